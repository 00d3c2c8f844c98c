/* codec_fxp_avx2.c: the fixed-width exponent code with AVX2; the format is in codec_fxp.c.
 *
 * Invariants
 *  - same bases, costs, bytes and verdicts as the portable code;
 *  - 32 values are one step; the last values % 32 go through a padded copy, so nothing outside a
 *    row is touched;
 *  - where escapes are is collected first, without a branch a value, and they are moved in one
 *    plain loop later: a few of them in every row would otherwise cost a mispredicted branch each
 *    time.
 *
 * Inside a step bytes lie in `unpack order`: values 0-7 and 16-23 in the lower half, 8-15 and 24-31
 * in the upper one, which is what packing and unpacking 16-bit values within halves gives and
 * takes.
 */
#if defined(__x86_64__)
#include "codec_fxp.h"
#include <immintrin.h>
#include <stdbool.h>
#include <string.h>

#define STEP 32u
#define TARGET __attribute__((target("avx2,bmi,popcnt")))
#ifdef FKV_COVERAGE /* each branch once, not once in every copy */
#define INLINE TARGET static inline
#else
#define INLINE TARGET static inline __attribute__((always_inline))
#endif

/* Makes copies of `body` for the usual head sizes, so that the compiler keeps their bases in
 * registers. */
#define FOR_VALUES(values, body)                                                                   \
    switch (values) {                                                                              \
    case 64:                                                                                       \
        body(64);                                                                                  \
        break;                                                                                     \
    case 128:                                                                                      \
        body(128);                                                                                 \
        break;                                                                                     \
    default:                                                                                       \
        body(values);                                                                              \
    }

INLINE __m256i load(const void *at) { return _mm256_loadu_si256((const __m256i *)at); }

INLINE void store(void *at, __m256i value) { _mm256_storeu_si256((__m256i *)at, value); }

INLINE uint32_t load32(const uint8_t *at)
{
    uint32_t word;
    memcpy(&word, at, 4);
    return word;
}

INLINE uint16_t load16(const uint8_t *at)
{
    uint16_t word;
    memcpy(&word, at, 2);
    return word;
}

/* The bases of a step's two groups (the second may lie past the vector's end), in unpack order. */
INLINE __m256i step_bases(const uint8_t *bases, uint32_t first, uint32_t values)
{
    uint32_t group = first / FKV_STREAM_GROUP;
    uint64_t lower = bases[group],
             upper = first + FKV_STREAM_GROUP < values ? bases[group + 1] : lower;
    const uint64_t ones = 0x0101010101010101;
    return _mm256_set_epi64x((long long)(upper * ones), (long long)(lower * ones),
                             (long long)(upper * ones), (long long)(lower * ones));
}

/* Exponents of 32 values, in unpack order. */
INLINE __m256i step_exponents(const uint8_t *row, bool fp16)
{
    __m256i a = load(row), b = load(row + STEP);
    a = _mm256_add_epi16(a, a); /* the sign is gone, the exponent on top */
    b = _mm256_add_epi16(b, b);
    return fp16 ? _mm256_packus_epi16(_mm256_srli_epi16(a, 11), _mm256_srli_epi16(b, 11))
                : _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
}

/* ---- places of escapes that wait to be moved ---- */
#define WAITING_MAX 512u

typedef struct {
    uint64_t at[WAITING_MAX + 64]; /* addresses of 16-bit values */
    uint32_t count;
} waiting;

/* Adds values[i] for every bit i of the mask. Entries past the count may be written, never used. */
INLINE void wait_for(waiting *list, const uint8_t *values, uint64_t mask)
{
    uint64_t *at = list->at + list->count, first = (uintptr_t)values;
    uint32_t found = (uint32_t)_mm_popcnt_u64(mask);
    list->count += found;
#pragma GCC unroll 4
    for (uint32_t k = 0; k < 4; k++, mask = _blsr_u64(mask)) at[k] = first + 2 * _tzcnt_u64(mask);
    for (uint32_t k = 4; k < found; k++, mask = _blsr_u64(mask))
        at[k] = first + 2 * _tzcnt_u64(mask);
}

/* ---- choosing bases ---- */
#define BINS 16u         /* exponents counted, from the highest one down */
#define BINS_A_PASS 8u   /* that many counters stay in registers */
#define ROWS_A_PASS 255u /* until an 8-bit counter is full */

INLINE __m256i highest(const uint64_t *rows, uint32_t count, uint32_t first, bool fp16)
{
    __m256i top = _mm256_setzero_si256();
    for (uint32_t r = 0; r < count; r++)
        top = _mm256_max_epu8(
            top, step_exponents((const uint8_t *)(uintptr_t)rows[r] + 2 * first, fp16));
    return top;
}

/* Sums the 16 bytes of each group of a step. */
INLINE void add_groups(__m256i counters, uint32_t *lower, uint32_t *upper)
{
    __m256i sums = _mm256_sad_epu8(counters, _mm256_setzero_si256());
    *lower += (uint32_t)(_mm256_extract_epi64(sums, 0) + _mm256_extract_epi64(sums, 2));
    *upper += (uint32_t)(_mm256_extract_epi64(sums, 1) + _mm256_extract_epi64(sums, 3));
}

/* counts[g][k]: values of group g whose exponent is tops[g] - k. */
INLINE void count_below(const uint64_t *rows, uint32_t count, uint32_t first, bool fp16,
                        const uint8_t tops[2], uint32_t counts[2][BINS])
{
    const __m256i top = step_bases(tops, 0, STEP);
    memset(counts, 0, 2 * sizeof counts[0]);
    for (uint32_t done = 0; done < count; done += ROWS_A_PASS) {
        uint32_t end = count - done < ROWS_A_PASS ? count : done + ROWS_A_PASS;
        for (uint32_t bin = 0; bin < BINS; bin += BINS_A_PASS) {
            const __m256i wanted = _mm256_sub_epi8(top, _mm256_set1_epi8((char)bin));
            __m256i counters[BINS_A_PASS];
            for (uint32_t k = 0; k < BINS_A_PASS; k++) counters[k] = _mm256_setzero_si256();
            for (uint32_t r = done; r < end; r++) {
                __m256i below = _mm256_sub_epi8(
                    wanted, step_exponents((const uint8_t *)(uintptr_t)rows[r] + 2 * first, fp16));
#pragma GCC unroll 8
                for (uint32_t k = 0; k < BINS_A_PASS; k++)
                    counters[k] = _mm256_sub_epi8(
                        counters[k], _mm256_cmpeq_epi8(below, _mm256_set1_epi8((char)k)));
            }
            for (uint32_t k = 0; k < BINS_A_PASS; k++)
                add_groups(counters[k], &counts[0][bin + k], &counts[1][bin + k]);
        }
    }
}

/* The best base from the counts of the highest exponents alone, or -1 where what lies below might
 * give a better. */
static int best_of_top(const uint32_t counts[BINS], uint32_t top, uint64_t total,
                       uint32_t exponent_max)
{
    uint32_t best = 0, sum = 0,
             last = BINS - FXP_SPAN; /* windows that start at bins 0 ... last are known */
    uint64_t rest = total;
    int base = -1;
    for (uint32_t k = 0; k < FXP_SPAN - 1; k++) sum += counts[k];
    for (uint32_t start = 0; start <= last; start++) {
        sum += counts[start + FXP_SPAN - 1];
        if (base < 0 || sum > best) {
            best = sum;
            base = (int)top - (int)start;
        }
        rest -= counts[start];
        sum -= counts[start];
    }
    if (rest > best) return -1;
    /* A window that reaches above `top` holds less or as much; as much, and the higher base wins.
     * */
    if (base == (int)top) {
        uint32_t empty = 0;
        while (empty < FXP_SPAN && base + 1 <= (int)exponent_max
               && counts[FXP_SPAN - 1 - empty] == 0) {
            empty++;
            base++;
        }
    }
    return base;
}

INLINE void choose(const uint64_t *rows, uint32_t count, uint32_t values, bool fp16, uint8_t *bases)
{
    const uint32_t mode = fp16 ? FKV_STREAM_FXP_FP16 : FKV_STREAM_FXP_BF16;
    const uint32_t exponent_max = fkv_fxp_exponent_max(mode);
    uint32_t first = 0, bins[256], counts[2][BINS];
    for (; first + STEP <= values && count; first += STEP) {
        uint8_t top[STEP], tops[2] = {0, 0};
        store(top, highest(rows, count, first, fp16));
        for (uint32_t i = 0; i < STEP; i++) /* unpack order: the groups alternate every 8 bytes */
            tops[i / 8 & 1] = top[i] > tops[i / 8 & 1] ? top[i] : tops[i / 8 & 1];
        count_below(rows, count, first, fp16, tops, counts);
        for (uint32_t g = 0; g < 2; g++) {
            int base =
                best_of_top(counts[g], tops[g], (uint64_t)count * FKV_STREAM_GROUP, exponent_max);
            if (base < 0) {
                fkv_fxp_count(rows, count, 2 * (first + g * FKV_STREAM_GROUP), FKV_STREAM_GROUP,
                              mode, bins);
                base = fkv_fxp_best_base(bins, exponent_max);
            }
            bases[first / FKV_STREAM_GROUP + g] = (uint8_t)base;
        }
    }
    for (; first < values; first += FKV_STREAM_GROUP) {
        uint32_t channels = values - first < FKV_STREAM_GROUP ? values - first : FKV_STREAM_GROUP;
        fkv_fxp_count(rows, count, 2 * first, channels, mode, bins);
        bases[first / FKV_STREAM_GROUP] = fkv_fxp_best_base(bins, exponent_max);
    }
}

TARGET void fkv_fxp_choose_avx2(const uint64_t *rows, uint32_t count, uint32_t vector_bytes,
                                uint32_t mode, uint8_t *bases)
{
    if (mode == FKV_STREAM_FXP_FP16)
        choose(rows, count, fkv_fxp_values(vector_bytes), true, bases);
    else
        choose(rows, count, fkv_fxp_values(vector_bytes), false, bases);
}

/* ---- encoding ---- */
/* How many of a step's values are escapes. */
INLINE uint32_t step_escapes(const uint8_t *row, bool fp16, __m256i bases, uint32_t in_use)
{
    const __m256i escape = _mm256_set1_epi8(FXP_ESCAPE);
    __m256i code = _mm256_sub_epi8(bases, step_exponents(row, fp16));
    __m256i escapes = _mm256_cmpeq_epi8(_mm256_max_epu8(code, escape), code);
    if (in_use == STEP) return (uint32_t)_mm_popcnt_u32((uint32_t)_mm256_movemask_epi8(escapes));
    escapes = _mm256_permute4x64_epi64(escapes, 0xD8);
    return (uint32_t)_mm_popcnt_u32((uint32_t)_mm256_movemask_epi8(escapes) & ((1u << in_use) - 1));
}

INLINE uint32_t tail_escapes(const uint8_t *row, bool fp16, __m256i bases, uint32_t in_use)
{
    uint8_t copy[2 * STEP] = {0};
    memcpy(copy, row, 2 * in_use);
    return step_escapes(copy, fp16, bases, in_use);
}

INLINE void costs_of(const uint64_t *rows, uint32_t count, uint32_t values, bool fp16,
                     const uint8_t *bases, uint64_t fixed, uint16_t *costs)
{
    for (uint32_t r = 0; r < count; r++) {
        const uint8_t *row = (const uint8_t *)(uintptr_t)rows[r];
        uint64_t cost = fixed;
        uint32_t i = 0;
        for (; i + STEP <= values; i += STEP)
            cost += step_escapes(row + 2 * i, fp16, step_bases(bases, i, values), STEP);
        if (i + FKV_STREAM_GROUP == values)
            cost += tail_escapes(row + 2 * i, fp16, step_bases(bases, i, values), FKV_STREAM_GROUP);
        else if (i < values)
            cost += tail_escapes(row + 2 * i, fp16, step_bases(bases, i, values), values - i);
        costs[r] = cost < UINT16_MAX ? (uint16_t)cost : UINT16_MAX;
    }
}

TARGET void fkv_fxp_costs_avx2(const uint64_t *rows, uint32_t count, uint32_t vector_bytes,
                               uint32_t mode, const uint8_t *bases, uint16_t *costs)
{
    uint64_t fixed = fkv_fxp_row_bytes(vector_bytes, mode);
    uint32_t values = fkv_fxp_values(vector_bytes);
#define BODY_BF16(n) costs_of(rows, count, n, false, bases, fixed, costs)
#define BODY_FP16(n) costs_of(rows, count, n, true, bases, fixed, costs)
    if (mode == FKV_STREAM_FXP_FP16)
        FOR_VALUES(values, BODY_FP16)
    else
        FOR_VALUES(values, BODY_BF16)
#undef BODY_BF16
#undef BODY_FP16
}

INLINE void store_plane(uint8_t *plane, __m256i bytes, unsigned bit, uint32_t plane_step_bytes,
                        uint32_t valid)
{
    uint32_t word =
        (uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(bytes, (int)(7 - bit))) & valid;
    memcpy(plane, &word, plane_step_bytes);
}

/* 32 values (of which `in_use` count) to their low bytes and planes; returns the mask of escapes.
 * */
INLINE uint32_t encode_step(const uint8_t *in, bool fp16, __m256i bases, uint8_t *low_out,
                            uint8_t *planes, uint32_t plane_bytes, uint32_t in_use)
{
    const __m256i even_odd = _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15,
                                              0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    const __m256i seven_bits = _mm256_set1_epi8(0x7F);
    __m256i a = _mm256_shuffle_epi8(load(in), even_odd),
            b = _mm256_shuffle_epi8(load(in + STEP), even_odd);
    __m256i low = _mm256_unpacklo_epi64(a, b), high = _mm256_unpackhi_epi64(a, b), exponent;
    if (fp16) {
        exponent = _mm256_and_si256(_mm256_srli_epi16(high, 2), _mm256_set1_epi8(0x1F));
    } else { /* the exponent's lowest bit is the low byte's highest */
        exponent = _mm256_sub_epi8(_mm256_add_epi8(high, high),
                                   _mm256_cmpgt_epi8(_mm256_setzero_si256(), low));
        low = _mm256_or_si256(_mm256_and_si256(low, seven_bits),
                              _mm256_andnot_si256(seven_bits, high));
    }
    __m256i code = _mm256_min_epu8(_mm256_sub_epi8(bases, exponent), _mm256_set1_epi8(FXP_ESCAPE));
    code = _mm256_permute4x64_epi64(code, 0xD8);
    low = _mm256_permute4x64_epi64(low, 0xD8);

    const uint32_t bytes = (in_use + 7) / 8,
                   valid = in_use == STEP ? UINT32_MAX : (1u << in_use) - 1;
    if (in_use == STEP) {
        store(low_out, low);
    } else {
        uint8_t copy[STEP];
        store(copy, low);
        memcpy(low_out, copy, in_use);
    }
    for (unsigned k = 0; k < 3; k++) store_plane(planes + k * plane_bytes, code, k, bytes, valid);
    if (fp16) {
        high = _mm256_permute4x64_epi64(high, 0xD8);
        store_plane(planes + 3 * plane_bytes, high, 0, bytes, valid);
        store_plane(planes + 4 * plane_bytes, high, 1, bytes, valid);
        store_plane(planes + 5 * plane_bytes, high, 7, bytes, valid);
    }
    return (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(code, _mm256_set1_epi8(FXP_ESCAPE)))
           & valid;
}

/* Writes the escapes that wait; returns where the next one goes. */
INLINE uint8_t *put_escapes(waiting *list, bool fp16, uint8_t *escapes)
{
    for (uint32_t k = 0; k < list->count; k++) {
        uint32_t value = load16((const uint8_t *)(uintptr_t)list->at[k]);
        *escapes++ = (uint8_t)(fp16 ? value >> 10 & 0x1F : value >> 7);
    }
    list->count = 0;
    return escapes;
}

INLINE void encode_tail(const uint8_t *row, uint32_t i, uint32_t values, bool fp16,
                        const uint8_t *bases, uint8_t *out, uint32_t in_use, waiting *list)
{
    uint8_t copy[2 * STEP] = {0};
    memcpy(copy, row + 2 * i, 2 * in_use);
    wait_for(list, row + 2 * i,
             encode_step(copy, fp16, step_bases(bases, i, values), out + i, out + values + i / 8,
                         (values + 7) / 8, in_use));
}

INLINE uint8_t *encode(const uint64_t *rows, uint32_t count, uint32_t values, bool fp16,
                       const uint8_t *bases, uint64_t row_bytes, uint8_t *out)
{
    const uint32_t plane_bytes = (values + 7) / 8;
    uint8_t *escapes = out + count * row_bytes;
    waiting list;
    list.count = 0;
    for (uint32_t r = 0; r < count; r++, out += row_bytes) {
        const uint8_t *row = (const uint8_t *)(uintptr_t)rows[r];
        uint8_t *planes = out + values;
        uint32_t i = 0;
        for (; i + 2 * STEP <= values; i += 2 * STEP) {
            uint64_t mask = encode_step(row + 2 * i, fp16, step_bases(bases, i, values), out + i,
                                        planes + i / 8, plane_bytes, STEP);
            mask |= (uint64_t)encode_step(row + 2 * i + 2 * STEP, fp16,
                                          step_bases(bases, i + STEP, values), out + i + STEP,
                                          planes + i / 8 + 4, plane_bytes, STEP)
                    << STEP;
            wait_for(&list, row + 2 * i, mask);
            if (list.count > WAITING_MAX - 4 * STEP) escapes = put_escapes(&list, fp16, escapes);
        }
        if (i + STEP <= values) {
            wait_for(&list, row + 2 * i,
                     encode_step(row + 2 * i, fp16, step_bases(bases, i, values), out + i,
                                 planes + i / 8, plane_bytes, STEP));
            i += STEP;
        }
        if (i + FKV_STREAM_GROUP == values)
            encode_tail(row, i, values, fp16, bases, out, FKV_STREAM_GROUP, &list);
        else if (i < values)
            encode_tail(row, i, values, fp16, bases, out, values - i, &list);
        if (list.count > WAITING_MAX - 4 * STEP) escapes = put_escapes(&list, fp16, escapes);
    }
    return put_escapes(&list, fp16, escapes);
}

TARGET uint8_t *fkv_fxp_encode_avx2(const uint64_t *rows, uint32_t count, uint32_t vector_bytes,
                                    uint32_t mode, const uint8_t *bases, uint8_t *out)
{
    uint64_t row_bytes = fkv_fxp_row_bytes(vector_bytes, mode);
    uint32_t values = fkv_fxp_values(vector_bytes);
#define BODY_BF16(n) return encode(rows, count, n, false, bases, row_bytes, out)
#define BODY_FP16(n) return encode(rows, count, n, true, bases, row_bytes, out)
    if (mode == FKV_STREAM_FXP_FP16)
        FOR_VALUES(values, BODY_FP16)
    else
        FOR_VALUES(values, BODY_BF16)
#undef BODY_BF16
#undef BODY_FP16
}

/* ---- decoding ---- */
/* 32 bits of a plane to 32 bytes of 0 or -1, in unpack order. */
INLINE __m256i spread(uint32_t word)
{
    const __m256i order = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1,
                                           1, 1, 1, 1, 1, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i bits = _mm256_set1_epi64x((long long)0x8040201008040201);
    __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32((int)word), order);
    return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bits), bits);
}

INLINE void decode_step(const uint8_t *low_in, const uint32_t planes[6], bool fp16, __m256i bases,
                        uint8_t *out)
{
    const __m256i seven_bits = _mm256_set1_epi8(0x7F);
    __m256i stored = _mm256_permute4x64_epi64(load(low_in), 0xD8), low = stored, high;
    /* base - (bit 0 + 2 bit 1 + 4 bit 2), the bits being 0 or -1 */
    __m256i exponent = spread(planes[2]);
    exponent = _mm256_add_epi8(_mm256_add_epi8(exponent, exponent), spread(planes[1]));
    exponent = _mm256_add_epi8(_mm256_add_epi8(exponent, exponent), spread(planes[0]));
    exponent = _mm256_add_epi8(exponent, bases);
    if (fp16) {
        high = _mm256_slli_epi16(_mm256_and_si256(exponent, _mm256_set1_epi8(0x1F)), 2);
        high = _mm256_or_si256(high, _mm256_and_si256(spread(planes[3]), _mm256_set1_epi8(1)));
        high = _mm256_or_si256(high, _mm256_and_si256(spread(planes[4]), _mm256_set1_epi8(2)));
        high = _mm256_or_si256(high, _mm256_andnot_si256(seven_bits, spread(planes[5])));
    } else {
        low = _mm256_or_si256(_mm256_and_si256(seven_bits, stored),
                              _mm256_andnot_si256(seven_bits, _mm256_slli_epi16(exponent, 7)));
        high = _mm256_or_si256(_mm256_andnot_si256(seven_bits, stored),
                               _mm256_and_si256(seven_bits, _mm256_srli_epi16(exponent, 1)));
    }
    store(out, _mm256_unpacklo_epi8(low, high));
    store(out + STEP, _mm256_unpackhi_epi8(low, high));
}

/* Sets the exponents of the values that wait, from the escapes that are theirs. */
INLINE void patch(waiting *list, bool fp16, const uint8_t *escapes)
{
    for (uint32_t k = 0; k < list->count; k++) {
        uint8_t *at = (uint8_t *)(uintptr_t)list->at[k];
        uint32_t exponent = escapes[k], value = load16(at);
        value =
            fp16 ? (value & 0x83FF) | (exponent & 0x1F) << 10 : (value & 0x807F) | exponent << 7;
        uint16_t narrow = (uint16_t)value;
        memcpy(at, &narrow, 2);
    }
    list->count = 0;
}

/* One or two whole steps of a row (NULL: only its escapes are counted); returns the mask of
 * escapes. */
INLINE uint64_t decode_whole(const uint8_t *in, uint32_t i, uint32_t values, bool fp16,
                             unsigned steps, const uint8_t *bases, uint8_t *row)
{
    const uint32_t plane_bytes = (values + 7) / 8;
    uint64_t mask = 0;
    for (unsigned s = 0; s < steps; s++, i += STEP) {
        uint32_t words[6];
        for (unsigned k = 0; k < (fp16 ? 6 : 3); k++)
            words[k] = load32(in + values + k * plane_bytes + i / 8);
        mask |= (uint64_t)(words[0] & words[1] & words[2]) << (STEP * s);
        if (row) decode_step(in + i, words, fp16, step_bases(bases, i, values), row + 2 * i);
    }
    return mask;
}

/* The last in_use < 32 values of a row. */
INLINE uint64_t decode_tail(const uint8_t *in, uint32_t i, uint32_t values, bool fp16,
                            const uint8_t *bases, uint8_t *row, uint32_t in_use)
{
    const uint32_t plane_bytes = (values + 7) / 8;
    uint32_t words[6] = {0};
    for (unsigned k = 0; k < (fp16 ? 6 : 3); k++)
        memcpy(&words[k], in + values + k * plane_bytes + i / 8, (in_use + 7) / 8);
    if (row) {
        uint8_t low[STEP] = {0}, decoded[2 * STEP];
        memcpy(low, in + i, in_use);
        decode_step(low, words, fp16, step_bases(bases, i, values), decoded);
        memcpy(row + 2 * i, decoded, 2 * in_use);
    }
    return words[0] & words[1] & words[2] & ((1u << in_use) - 1);
}

INLINE const uint8_t *decode(const uint8_t *in, uint32_t length, uint32_t count, uint32_t values,
                             bool fp16, const uint8_t *bases, uint64_t row_bytes,
                             const uint64_t *rows)
{
    const uint8_t *escapes = in + count * row_bytes, *end = in + length;
    const uint8_t *moved = escapes; /* of those before `escapes`, the ones behind `moved` wait */
    waiting list;
    list.count = 0;
    for (uint32_t r = 0; r < count; r++, in += row_bytes) {
        uint8_t *row = (uint8_t *)(uintptr_t)rows[r];
        if (row == NULL) patch(&list, fp16, moved);
        for (uint32_t i = 0, taken; i < values; i += taken) {
            uint64_t mask;
            taken = values - i < 2 * STEP ? (values - i < STEP ? values - i : STEP) : 2 * STEP;
            if (taken == 2 * STEP)
                mask = decode_whole(in, i, values, fp16, 2, bases, row);
            else if (taken == STEP)
                mask = decode_whole(in, i, values, fp16, 1, bases, row);
            else if (taken == FKV_STREAM_GROUP)
                mask = decode_tail(in, i, values, fp16, bases, row, FKV_STREAM_GROUP);
            else
                mask = decode_tail(in, i, values, fp16, bases, row, taken);
            uint64_t needed = (uint64_t)_mm_popcnt_u64(mask);
            if ((uint64_t)(end - escapes) < needed) return NULL;
            escapes += needed;
            if (row) wait_for(&list, row + 2 * i, mask);
            if (list.count > WAITING_MAX - 2 * STEP || row == NULL) {
                patch(&list, fp16, moved);
                moved = escapes;
            }
        }
    }
    patch(&list, fp16, moved);
    return escapes;
}

TARGET const uint8_t *fkv_fxp_decode_avx2(const uint8_t *in, uint32_t length, uint32_t count,
                                          uint32_t vector_bytes, uint32_t mode,
                                          const uint8_t *bases, const uint64_t *rows)
{
    uint64_t row_bytes = fkv_fxp_row_bytes(vector_bytes, mode);
    uint32_t values = fkv_fxp_values(vector_bytes);
#define BODY_BF16(n) return decode(in, length, count, n, false, bases, row_bytes, rows)
#define BODY_FP16(n) return decode(in, length, count, n, true, bases, row_bytes, rows)
    if (mode == FKV_STREAM_FXP_FP16)
        FOR_VALUES(values, BODY_FP16)
    else
        FOR_VALUES(values, BODY_BF16)
#undef BODY_BF16
#undef BODY_FP16
}
#endif
