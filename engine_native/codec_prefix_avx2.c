/* codec_prefix_avx2.c: the prefix code in bit planes with AVX2 and BMI2; the format is in
 * codec_prefix.c, what paths have in common in codec_prefix_rows.h.
 *
 * Invariants
 *  - same counts, costs, bytes and verdicts as the portable code;
 *  - nothing outside a row or the input is touched: the last values % 64 of a row go through a
 *    padded copy.
 */
#if defined(__x86_64__)
#define TARGET __attribute__((target("avx2,bmi,bmi2,popcnt")))
#define PREFIX_TARGET TARGET
#define PREFIX_BMI2
#include <immintrin.h>
#include "codec_prefix_planes.h"

#define STEP 32u
#define INLINE PREFIX_INLINE

INLINE __m256i load(const void *at) { return _mm256_loadu_si256((const __m256i *)at); }
INLINE void store(void *at, __m256i value) { _mm256_storeu_si256((__m256i *)at, value); }

/* Packs the low bytes of 32 16-bit values below 256, in their order. */
INLINE __m256i pack(__m256i a, __m256i b)
{
    return _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xD8);
}

INLINE __m256i exponents(__m256i a, __m256i b, bool fp16)
{
    a = _mm256_add_epi16(a, a), b = _mm256_add_epi16(b, b); /* the sign is gone */
    return fp16 ? pack(_mm256_srli_epi16(a, 11), _mm256_srli_epi16(b, 11))
                : pack(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
}

/* ---- counting ---- */
#define BINS_A_PASS 8u
#define ROWS_A_PASS 255u /* until an 8-bit counter is full */

INLINE void load_step(const uint8_t *row, uint32_t in_use, __m256i *a, __m256i *b)
{
    if (in_use >= STEP) {
        *a = load(row), *b = load(row + STEP);
        return;
    }
    uint8_t copy[2 * STEP] = {0};
    memcpy(copy, row, 2 * in_use);
    *a = load(copy), *b = load(copy + STEP);
}

/* sums: of the first bin; of each next one PREFIX_STEP further. */
INLINE void add_counters(const __m256i *counters, uint16_t *sums, uint32_t bins)
{
    for (uint32_t k = 0; k < bins; k++) {
        __m256i low = _mm256_cvtepu8_epi16(_mm256_castsi256_si128(counters[k])),
                high = _mm256_cvtepu8_epi16(_mm256_extracti128_si256(counters[k], 1));
        uint16_t *to = sums + k * PREFIX_STEP;
        store(to, _mm256_add_epi16(load(to), low));
        store(to + 16, _mm256_add_epi16(load(to + 16), high));
    }
}

/* Values at distances first_bin ... first_bin + 7 below `top`. */
INLINE void count_pass(const uint64_t *rows, uint32_t count, uint32_t offset, uint32_t in_use,
                       bool fp16, __m256i top, uint32_t first_bin, uint16_t *sums)
{
    for (uint32_t done = 0; done < count; done += ROWS_A_PASS) {
        uint32_t end = count - done < ROWS_A_PASS ? count : done + ROWS_A_PASS;
        __m256i counters[BINS_A_PASS], a, b;
        const __m256i from = _mm256_sub_epi8(top, _mm256_set1_epi8((char)first_bin));
#pragma GCC unroll 8
        for (uint32_t k = 0; k < BINS_A_PASS; k++) counters[k] = _mm256_setzero_si256();
        for (uint32_t r = done; r < end; r++) {
            load_step((const uint8_t *)(uintptr_t)rows[r] + offset, in_use, &a, &b);
            __m256i below = _mm256_sub_epi8(from, exponents(a, b, fp16));
#pragma GCC unroll 8
            for (uint32_t k = 0; k < BINS_A_PASS; k++)
                counters[k] = _mm256_sub_epi8(counters[k],
                                              _mm256_cmpeq_epi8(below, _mm256_set1_epi8((char)k)));
        }
        add_counters(counters, sums, BINS_A_PASS);
    }
}

INLINE __m256i top_and_signs(const uint64_t *rows, uint32_t count, uint32_t offset, uint32_t in_use,
                             bool fp16, uint16_t *negatives)
{
    __m256i top = _mm256_setzero_si256(), a, b;
    for (uint32_t done = 0; done < count; done += ROWS_A_PASS) {
        uint32_t end = count - done < ROWS_A_PASS ? count : done + ROWS_A_PASS;
        __m256i counter = _mm256_setzero_si256();
        for (uint32_t r = done; r < end; r++) {
            load_step((const uint8_t *)(uintptr_t)rows[r] + offset, in_use, &a, &b);
            top = _mm256_max_epu8(top, exponents(a, b, fp16));
            counter =
                _mm256_add_epi8(counter, pack(_mm256_srli_epi16(a, 15), _mm256_srli_epi16(b, 15)));
        }
        add_counters(&counter, negatives, 1);
    }
    return top;
}

/* Channels [channel, channel + 32) of the rows to columns [at, at + 32) of the counts. */
INLINE void count_half(const uint64_t *rows, uint32_t count, uint32_t channel, uint32_t in_use,
                       bool fp16, uint32_t at, prefix_counts *counts)
{
    __m256i top = top_and_signs(rows, count, 2 * channel, in_use, fp16, counts->negatives + at);
    store(counts->top + at, top);
    for (uint32_t k = 0; k < 2 * BINS_A_PASS; k += BINS_A_PASS)
        count_pass(rows, count, 2 * channel, in_use, fp16, top, k, counts->counts[k] + at);
    for (uint32_t h = at; h < at + STEP; h += 16) {
        __m256i others = _mm256_set1_epi16((short)count);
        for (uint32_t k = 0; k < 15; k++)
            others = _mm256_sub_epi16(others, load(counts->counts[k] + h));
        store(counts->counts[15] + h, others);
    }
}

TARGET void fkv_prefix_best_avx2(const prefix_counts *counts, uint32_t shift,
                                 uint8_t best[PREFIX_STEP])
{
    const __m128i bits = _mm_cvtsi32_si128((int)shift);
    for (uint32_t h = 0; h < PREFIX_STEP; h += 16) {
        __m256i shifted[16], least = _mm256_set1_epi16(-1), which = _mm256_setzero_si256();
        for (uint32_t k = 0; k < 16; k++)
            shifted[k] = _mm256_srl_epi16(load(counts->counts[k] + h), bits);
        for (uint32_t c = 0; c < PREFIX_COMBINATIONS; c += 4) {
            __m256i sums[4];
#pragma GCC unroll 4
            for (uint32_t j = 0; j < 4; j++) sums[j] = _mm256_setzero_si256();
#pragma GCC unroll 16
            for (uint32_t k = 0; k < 16; k++)
#pragma GCC unroll 4
                for (uint32_t j = 0; j < 4; j++) {
                    __m256i price = _mm256_set1_epi16((short)fkv_prefix_prices[k][c + j]);
                    sums[j] = _mm256_add_epi16(sums[j], _mm256_mullo_epi16(shifted[k], price));
                }
            for (uint32_t j = 0; j < 4; j++) {
                __m256i lower = _mm256_min_epu16(least, sums[j]);
                __m256i same = _mm256_cmpeq_epi16(lower, least);
                which = _mm256_blendv_epi8(_mm256_set1_epi16((short)(c + j)), which, same);
                least = lower;
            }
        }
        __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi16(which, which), 0xD8);
        _mm_storeu_si128((__m128i *)(best + h), _mm256_castsi256_si128(packed));
    }
}

TARGET void fkv_prefix_count_avx2(const uint64_t *rows, uint32_t count, uint32_t values,
                                  uint32_t first, bool fp16, prefix_counts *counts)
{
    memset(counts, 0, sizeof *counts);
    for (uint32_t at = 0; at < PREFIX_STEP && first + at < values; at += STEP) {
        const uint32_t channel = first + at, in_use = values - channel;
        if (fp16)
            count_half(rows, count, channel, in_use, true, at, counts);
        else if (in_use >= STEP)
            count_half(rows, count, channel, STEP, false, at, counts);
        else
            count_half(rows, count, channel, in_use, false, at, counts);
    }
}

/* ---- encoding ---- */
INLINE __m256i to_unpack_order(__m256i bytes) { return _mm256_permute4x64_epi64(bytes, 0xD8); }

INLINE __m256i table(const void *bytes)
{
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)bytes));
}

/* What the channels of a group have alike in all rows. */
typedef struct {
    __m256i base[2], kind[2], narrow, wide, exponent_max; /* narrow, wide: distances of symbols */
    __m256i unpack_base[2], unpack_kind[2];               /* in the order of unpacking */
    uint64_t valid, raw_sign, negative;
    uint32_t first, in_use; /* channels */
} group_lanes;

INLINE group_lanes lanes_of(const prefix_plan *plan, uint32_t group)
{
    const uint32_t first = group * PREFIX_GROUP;
    const __m256i base[2] = {load(plan->base + first), load(plan->base + first + STEP)};
    const __m256i kind[2] = {load(plan->kind + first), load(plan->kind + first + STEP)};
    return (group_lanes){
        .base = {base[0], base[1]},
        .kind = {kind[0], kind[1]},
        .unpack_base = {to_unpack_order(base[0]), to_unpack_order(base[1])},
        .unpack_kind = {to_unpack_order(kind[0]), to_unpack_order(kind[1])},
        .narrow = table(fkv_prefix_distance[0]),
        .wide = table(fkv_prefix_distance[1]),
        .exponent_max = _mm256_set1_epi8((char)plan->exponent_max),
        .valid = plan->valid[group],
        .raw_sign = plan->raw_sign[group],
        .negative = plan->negative[group],
        .first = first,
        .in_use = plan->values - first < PREFIX_GROUP ? plan->values - first : PREFIX_GROUP,
    };
}

/* A byte of each of a group's 64 values, in their order. */
typedef struct {
    __m256i half[2];
} group_bytes;

/* The low bytes as they are stored but for bit 7. */
typedef struct {
    group_bytes bytes;
    uint64_t mantissa[3]; /* all but bfloat16: bits 8, 9 and 7 */
} low_part;

INLINE uint64_t words_pair(uint32_t low, uint32_t high) { return low | (uint64_t)high << 32; }

/* Bit `k` of 64 bytes. */
INLINE uint64_t plane_of(const group_bytes *bytes, int k)
{
    return words_pair((uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(bytes->half[0], 7 - k)),
                      (uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(bytes->half[1], 7 - k)));
}

INLINE __m256i symbols(__m256i exponent, const group_lanes *lanes, int half, bool fp16)
{
    const __m256i escape = _mm256_set1_epi8(PREFIX_ESCAPE);
    __m256i at = _mm256_sub_epi8(lanes->base[half], exponent);
    at = _mm256_sub_epi8(at, _mm256_set1_epi8(PREFIX_DISTANCE_FIRST));
    if (fp16) at = _mm256_and_si256(at, lanes->exponent_max);
    at = _mm256_min_epu8(at, escape);
    return _mm256_blendv_epi8(_mm256_shuffle_epi8(table(fkv_prefix_symbol[0]), at),
                              _mm256_shuffle_epi8(table(fkv_prefix_symbol[1]), at),
                              lanes->kind[half]);
}

/* Symbols, signs and (low != NULL) low bytes of a group; `row` may lie up to its end only. */
INLINE void group_words(const uint8_t *row, const group_lanes *lanes, bool fp16, prefix_words *w,
                        low_part *low)
{
    const __m256i mantissa = _mm256_set1_epi16(fp16 ? 0xFF : 0x7F);
    uint8_t copy[2 * PREFIX_GROUP];
    group_bytes symbol, high;
    row += 2 * lanes->first;
    if (lanes->in_use < PREFIX_GROUP) {
        memset(copy, 0, sizeof copy);
        memcpy(copy, row, 2 * lanes->in_use);
        row = copy;
    }
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        __m256i a = load(row + 64 * h), b = load(row + 64 * h + STEP);
        symbol.half[h] = symbols(exponents(a, b, fp16), lanes, h, fp16);
        high.half[h] = pack(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
        if (low)
            low->bytes.half[h] = pack(_mm256_and_si256(a, mantissa), _mm256_and_si256(b, mantissa));
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) w->symbol[k] = plane_of(&symbol, k) & lanes->valid;
    w->sign = plane_of(&high, 7);
    if (low && fp16) {
        for (int k = 0; k < 2; k++) low->mantissa[k] = plane_of(&high, k) & lanes->valid;
        low->mantissa[2] = plane_of(&low->bytes, 7) & lanes->valid;
    }
    except(w, lanes->negative, lanes->raw_sign, lanes->valid);
}

/* The bits that bytes are for, where each byte has all eight. */
INLINE __m256i bits_of_bytes(__m256i bytes)
{
    const __m256i bits = _mm256_set1_epi64x((long long)0x8040201008040201);
    return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bits), bits);
}

/* Half of 64 bits to 32 bytes of 0 or -1, in their order. */
INLINE __m256i spread(uint64_t word, int half)
{
    const __m256i order = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2,
                                           2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i own = _mm256_add_epi8(order, _mm256_set1_epi8((char)(4 * half)));
    return bits_of_bytes(_mm256_shuffle_epi8(_mm256_set1_epi64x((long long)word), own));
}

/* The same in unpack order, where unpacking bytes to 16 bits, within halves, gives values in order:
 * eights of values 0, 2, 1, 3. */
INLINE __m256i spread_for_unpacking(uint64_t word, int half)
{
    const __m256i order = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1,
                                           1, 1, 1, 1, 1, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i own = _mm256_add_epi8(order, _mm256_set1_epi8((char)(4 * half)));
    return bits_of_bytes(_mm256_shuffle_epi8(_mm256_set1_epi64x((long long)word), own));
}

INLINE void store_low(uint8_t *out, const group_lanes *lanes, const group_bytes *low)
{
    uint8_t copy[PREFIX_GROUP];
    uint8_t *to = lanes->in_use < PREFIX_GROUP ? copy : out + lanes->first;
    store(to, low->half[0]), store(to + STEP, low->half[1]);
    if (to == copy) memcpy(out + lanes->first, copy, lanes->in_use);
}

/* 64 low bytes of a group, those past its end zero. */
INLINE group_bytes load_low(const uint8_t *in, const group_lanes *lanes)
{
    const uint8_t *from = in + lanes->first;
    uint8_t copy[PREFIX_GROUP];
    if (lanes->in_use < PREFIX_GROUP) {
        memset(copy, 0, sizeof copy);
        memcpy(copy, from, lanes->in_use);
        from = copy;
    }
    return (group_bytes){{load(from), load(from + STEP)}};
}

/* The same where there are no low bytes: a plane holds their bit 7, or nothing does. */
INLINE group_bytes low_of_plane(uint64_t plane)
{
    group_bytes low;
    for (int h = 0; h < 2; h++)
        low.half[h] = _mm256_and_si256(spread(plane, h), _mm256_set1_epi8((char)0x80));
    return low;
}

/* Bit 7 of each. */
INLINE uint64_t tops_of(const group_bytes *bytes) { return plane_of(bytes, 7); }

INLINE void add_tops(uint8_t *out, const group_lanes *lanes, uint64_t tops)
{
    group_bytes low = load_low(out, lanes), top = low_of_plane(tops);
    for (int h = 0; h < 2; h++) low.half[h] = _mm256_or_si256(low.half[h], top.half[h]);
    store_low(out, lanes, &low);
}

/* ---- decoding ---- */
INLINE void merge_half(const prefix_batch *b, uint32_t i, const uint64_t mantissa[3],
                       const group_lanes *lanes, __m256i low, int half, bool fp16, uint8_t *row)
{
    const __m256i seven_bits = _mm256_set1_epi8(0x7F);
    __m256i symbol =
        _mm256_and_si256(spread_for_unpacking(b->symbol[3][i], half), _mm256_set1_epi8(8));
#pragma GCC unroll 3
    for (int k = 0; k < 3; k++)
        symbol =
            _mm256_or_si256(symbol, _mm256_and_si256(spread_for_unpacking(b->symbol[k][i], half),
                                                     _mm256_set1_epi8((char)(1 << k))));
    __m256i distance =
        _mm256_blendv_epi8(_mm256_shuffle_epi8(lanes->narrow, symbol),
                           _mm256_shuffle_epi8(lanes->wide, symbol), lanes->unpack_kind[half]);
    __m256i exponent = _mm256_sub_epi8(lanes->unpack_base[half], distance), high;
    __m256i sign = spread_for_unpacking(b->sign[i], half);
    low = to_unpack_order(low);
    if (fp16) {
        exponent = _mm256_and_si256(exponent, lanes->exponent_max);
        high = _mm256_slli_epi16(exponent, 2);
        for (int k = 0; k < 2; k++)
            high = _mm256_or_si256(high, _mm256_and_si256(spread_for_unpacking(mantissa[k], half),
                                                          _mm256_set1_epi8((char)(1 << k))));
        high = _mm256_or_si256(high, _mm256_andnot_si256(seven_bits, sign));
    } else {
        low = _mm256_or_si256(_mm256_and_si256(low, seven_bits),
                              _mm256_andnot_si256(seven_bits, _mm256_slli_epi16(exponent, 7)));
        high = _mm256_or_si256(_mm256_andnot_si256(seven_bits, sign),
                               _mm256_and_si256(_mm256_srli_epi16(exponent, 1), seven_bits));
    }
    store(row, _mm256_unpacklo_epi8(low, high));
    store(row + STEP, _mm256_unpackhi_epi8(low, high));
}

INLINE void merge_group(const prefix_batch *b, uint32_t i, const uint64_t mantissa[3],
                        const group_lanes *lanes, const group_bytes *low, bool fp16, uint8_t *row)
{
    uint8_t copy[2 * PREFIX_GROUP];
    uint8_t *to = lanes->in_use < PREFIX_GROUP ? copy : row + 2 * lanes->first;
    merge_half(b, i, mantissa, lanes, low->half[0], 0, fp16, to);
    merge_half(b, i, mantissa, lanes, low->half[1], 1, fp16, to + 64);
    if (to == copy) memcpy(row + 2 * lanes->first, copy, 2 * lanes->in_use);
}

#include "codec_prefix_rows.h"
PREFIX_DEFINE(avx2)
#endif
