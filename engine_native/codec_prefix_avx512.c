/* codec_prefix_avx512.c: the prefix code in bit planes with AVX-512 (F, BW) and BMI2; the format is in
 * codec_prefix.c, what paths have in common in codec_prefix_rows.h.
 *
 * A word of a plane is a mask of 64 bytes as it is, so planes need no spreading.
 *
 * Invariants
 *  - same costs, bytes and verdicts as the portable code;
 *  - nothing outside a row or the input is touched: loads and stores are masked at a row's end.
 */
#if defined(__x86_64__)
#define PREFIX_TARGET __attribute__((target("avx512f,avx512bw,avx2,bmi,bmi2,popcnt")))
#define PREFIX_BMI2
#include <immintrin.h>
#include "codec_prefix_planes.h"

#define INLINE PREFIX_INLINE
#define STEP 32u /* 16-bit values of a register */

/* A byte of each of a group's 64 values, in their order. */
typedef struct {
    __m512i all;
} group_bytes;

/* The low bytes as they are stored but for bit 7. */
typedef struct {
    group_bytes bytes;
    uint64_t mantissa[3]; /* all but bfloat16: bits 8, 9 and 7 */
} low_part;

/* What the channels of a group have alike in all rows. */
typedef struct {
    __m512i base, narrow_symbols, wide_symbols, narrow_distances, wide_distances, exponent_max;
    uint64_t valid, wide, raw_sign, negative;
    uint32_t first; /* channel */
} group_lanes;

INLINE uint64_t words_pair(uint32_t low, uint32_t high) { return low | (uint64_t)high << 32; }

/* 16 bytes in each quarter. */
INLINE __m512i table(const void *bytes)
{
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)bytes));
}

/* Packs the low bytes of 64 16-bit values below 256, in their order. */
INLINE __m512i pack(__m512i a, __m512i b)
{
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7),
                                    _mm512_packus_epi16(a, b));
}

INLINE __m512i exponents(__m512i a, __m512i b, bool fp16)
{
    a = _mm512_add_epi16(a, a), b = _mm512_add_epi16(b, b); /* the sign is gone */
    return fp16 ? pack(_mm512_srli_epi16(a, 11), _mm512_srli_epi16(b, 11))
                : pack(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
}

INLINE group_lanes lanes_of(const prefix_plan *plan, uint32_t group)
{
    return (group_lanes){
        .base = _mm512_loadu_si512(plan->base + group * PREFIX_GROUP),
        .narrow_symbols = table(fkv_prefix_symbol[0]),
        .wide_symbols = table(fkv_prefix_symbol[1]),
        .narrow_distances = table(fkv_prefix_distance[0]),
        .wide_distances = table(fkv_prefix_distance[1]),
        .exponent_max = _mm512_set1_epi8((char)plan->exponent_max),
        .valid = plan->valid[group],
        .wide = plan->wide[group],
        .raw_sign = plan->raw_sign[group],
        .negative = plan->negative[group],
        .first = group * PREFIX_GROUP,
    };
}

/* ---- counting ---- */
#define BINS 15u
#define ROWS_A_PASS 255u /* until an 8-bit counter is full */

/* 64 values of a row, those past its end zero. */
INLINE void load_values(const uint8_t *row, uint32_t channel, uint64_t valid, __m512i *a,
                        __m512i *b)
{
    row += 2 * channel;
    *a = _mm512_maskz_loadu_epi16((uint32_t)valid, row);
    *b = _mm512_maskz_loadu_epi16((uint32_t)(valid >> 32), row + 2 * STEP);
}

INLINE __m512i count_where(__m512i counter, uint64_t mask)
{
    return _mm512_mask_sub_epi8(counter, mask, counter, _mm512_set1_epi8(-1));
}

INLINE void add_counter(__m512i counter, uint16_t *sums)
{
    for (uint32_t h = 0; h < 2; h++) {
        __m256i half = h ? _mm512_extracti64x4_epi64(counter, 1) : _mm512_castsi512_si256(counter);
        __m512i sum = _mm512_loadu_si512(sums + STEP * h);
        sum = _mm512_add_epi16(sum, _mm512_cvtepu8_epi16(half));
        _mm512_storeu_si512(sums + STEP * h, sum);
    }
}

/* Values at distances 0 ... 14 below `top` of rows [done, end), at most 255. */
INLINE void count_pass(const uint64_t *rows, uint32_t done, uint32_t end, uint32_t first,
                       uint64_t valid, bool fp16, __m512i top, prefix_counts *counts)
{
    __m512i counters[BINS], negatives = _mm512_setzero_si512(), a, b;
#pragma GCC unroll 15
    for (uint32_t k = 0; k < BINS; k++) counters[k] = _mm512_setzero_si512();
    for (uint32_t r = done; r < end; r++) {
        load_values((const uint8_t *)(uintptr_t)rows[r], first, valid, &a, &b);
        const __m512i below = _mm512_sub_epi8(top, exponents(a, b, fp16));
        negatives =
            count_where(negatives, words_pair(_mm512_movepi16_mask(a), _mm512_movepi16_mask(b)));
#pragma GCC unroll 15
        for (uint32_t k = 0; k < BINS; k++)
            counters[k] =
                count_where(counters[k], _mm512_cmpeq_epi8_mask(below, _mm512_set1_epi8((char)k)));
    }
    for (uint32_t k = 0; k < BINS; k++) add_counter(counters[k], counts->counts[k]);
    add_counter(negatives, counts->negatives);
}

INLINE void count_values(const uint64_t *rows, uint32_t count, uint32_t values, uint32_t first,
                         bool fp16, prefix_counts *counts)
{
    const uint64_t valid =
        values - first < PREFIX_STEP ? UINT64_MAX >> (PREFIX_STEP - (values - first)) : UINT64_MAX;
    __m512i top = _mm512_setzero_si512(), a, b;
    for (uint32_t r = 0; r < count; r++) {
        load_values((const uint8_t *)(uintptr_t)rows[r], first, valid, &a, &b);
        top = _mm512_max_epu8(top, exponents(a, b, fp16));
    }
    memset(counts, 0, sizeof *counts);
    _mm512_storeu_si512(counts->top, top);
    for (uint32_t done = 0; done < count; done += ROWS_A_PASS) {
        const uint32_t end = count - done < ROWS_A_PASS ? count : done + ROWS_A_PASS;
        count_pass(rows, done, end, first, valid, fp16, top, counts);
    }
    for (uint32_t h = 0; h < PREFIX_STEP; h += STEP) {
        __m512i others = _mm512_set1_epi16((short)count);
        for (uint32_t k = 0; k < BINS; k++)
            others = _mm512_sub_epi16(others, _mm512_loadu_si512(counts->counts[k] + h));
        _mm512_storeu_si512(counts->counts[15] + h, others);
    }
}

PREFIX_TARGET void fkv_prefix_count_avx512(const uint64_t *rows, uint32_t count, uint32_t values,
                                           uint32_t first, bool fp16, prefix_counts *counts)
{
    if (fp16)
        count_values(rows, count, values, first, true, counts);
    else
        count_values(rows, count, values, first, false, counts);
}

/* ---- encoding ---- */
INLINE __m512i symbols(__m512i exponent, const group_lanes *lanes, bool fp16)
{
    __m512i at = _mm512_sub_epi8(lanes->base, exponent);
    at = _mm512_sub_epi8(at, _mm512_set1_epi8(PREFIX_DISTANCE_FIRST));
    if (fp16) at = _mm512_and_si512(at, lanes->exponent_max);
    at = _mm512_min_epu8(at, _mm512_set1_epi8(PREFIX_ESCAPE));
    __m512i narrow = _mm512_shuffle_epi8(lanes->narrow_symbols, at);
    return _mm512_mask_shuffle_epi8(narrow, lanes->wide, lanes->wide_symbols, at);
}

INLINE uint64_t bit_of(__m512i a, __m512i b, int k)
{
    const __m512i bit = _mm512_set1_epi16((short)(1 << k));
    return words_pair(_mm512_test_epi16_mask(a, bit), _mm512_test_epi16_mask(b, bit));
}

/* Symbols, signs and (low != NULL) low bytes of a group; `row` may lie up to its end only. */
INLINE void group_words(const uint8_t *row, const group_lanes *lanes, bool fp16, prefix_words *w,
                        low_part *low)
{
    const __m512i mantissa = _mm512_set1_epi16(fp16 ? 0xFF : 0x7F);
    const uint64_t valid = lanes->valid;
    __m512i a, b;
    load_values(row, lanes->first, valid, &a, &b);
    __m512i symbol = symbols(exponents(a, b, fp16), lanes, fp16);
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++)
        w->symbol[k] = _mm512_mask_test_epi8_mask(valid, symbol, _mm512_set1_epi8((char)(1 << k)));
    w->sign = bit_of(a, b, 15);
    if (low) {
        low->bytes.all = pack(_mm512_and_si512(a, mantissa), _mm512_and_si512(b, mantissa));
        for (int k = 0; fp16 && k < 3; k++) low->mantissa[k] = bit_of(a, b, k < 2 ? 8 + k : 7);
    }
    except(w, lanes->negative, lanes->raw_sign, valid);
}

INLINE void store_low(uint8_t *out, const group_lanes *lanes, const group_bytes *low)
{
    _mm512_mask_storeu_epi8(out + lanes->first, lanes->valid, low->all);
}

INLINE void add_tops(uint8_t *out, const group_lanes *lanes, uint64_t tops)
{
    __m512i low = _mm512_maskz_loadu_epi8(lanes->valid, out + lanes->first);
    low = _mm512_mask_add_epi8(low, tops, low, _mm512_set1_epi8((char)0x80));
    _mm512_mask_storeu_epi8(out + lanes->first, lanes->valid, low);
}

/* ---- decoding ---- */
INLINE void merge_group(const prefix_batch *b, uint32_t i, const uint64_t mantissa[3],
                        const group_lanes *lanes, const group_bytes *low_bytes, bool fp16,
                        uint8_t *row)
{
    /* So that interleaving, which works within quarters, gives 32 values in their order. */
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i seven_bits = _mm512_set1_epi8(0x7F);
    const __m512i top_bit = _mm512_set1_epi8((char)0x80);
    __m512i symbol = _mm512_maskz_mov_epi8(b->symbol[3][i], _mm512_set1_epi8(8)), high;
#pragma GCC unroll 3
    for (int k = 0; k < 3; k++)
        symbol =
            _mm512_mask_add_epi8(symbol, b->symbol[k][i], symbol, _mm512_set1_epi8((char)(1 << k)));
    __m512i distance = _mm512_shuffle_epi8(lanes->narrow_distances, symbol);
    distance = _mm512_mask_shuffle_epi8(distance, lanes->wide, lanes->wide_distances, symbol);
    __m512i exponent = _mm512_sub_epi8(lanes->base, distance);
    __m512i low = low_bytes->all;
    if (fp16) {
        exponent = _mm512_and_si512(exponent, lanes->exponent_max);
        high = _mm512_slli_epi16(exponent, 2);
        for (int k = 0; k < 2; k++)
            high = _mm512_mask_add_epi8(high, mantissa[k], high, _mm512_set1_epi8((char)(1 << k)));
    } else {
        /* Seven bits of one, the eighth of the other. */
        low = _mm512_ternarylogic_epi64(low, _mm512_slli_epi16(exponent, 7), seven_bits, 0xE4);
        high = _mm512_and_si512(_mm512_srli_epi16(exponent, 1), seven_bits);
    }
    high = _mm512_mask_add_epi8(high, b->sign[i], high, top_bit);
    low = _mm512_permutexvar_epi64(order, low), high = _mm512_permutexvar_epi64(order, high);
    row += 2 * lanes->first;
    _mm512_mask_storeu_epi16(row, (uint32_t)lanes->valid, _mm512_unpacklo_epi8(low, high));
    _mm512_mask_storeu_epi16(row + 2 * STEP, (uint32_t)(lanes->valid >> 32),
                             _mm512_unpackhi_epi8(low, high));
}

/* 64 low bytes of a group, those past its end zero. */
INLINE group_bytes load_low(const uint8_t *in, const group_lanes *lanes)
{
    return (group_bytes){_mm512_maskz_loadu_epi8(lanes->valid, in + lanes->first)};
}

/* The same where there are no low bytes: a plane holds their bit 7, or nothing does. */
INLINE group_bytes low_of_plane(uint64_t plane)
{
    return (group_bytes){_mm512_maskz_mov_epi8(plane, _mm512_set1_epi8((char)0x80))};
}

/* Bit 7 of each. */
INLINE uint64_t tops_of(const group_bytes *bytes) { return _mm512_movepi8_mask(bytes->all); }

#include "codec_prefix_rows.h"
PREFIX_DEFINE(avx512)
#endif
