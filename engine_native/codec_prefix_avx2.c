/* codec_prefix_avx2.c: the prefix code in bit planes with AVX2 and BMI2; the format is in
 * codec_prefix.c.
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
#ifdef FKV_COVERAGE
#define INLINE TARGET static inline
#else
#define INLINE TARGET static inline __attribute__((always_inline))
#endif

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

INLINE void add_counters(const __m256i *counters, uint16_t (*sums)[PREFIX_STEP], uint32_t bins)
{
    for (uint32_t k = 0; k < bins; k++) {
        __m256i low = _mm256_cvtepu8_epi16(_mm256_castsi256_si128(counters[k])),
                high = _mm256_cvtepu8_epi16(_mm256_extracti128_si256(counters[k], 1));
        store(sums[k], _mm256_add_epi16(load(sums[k]), low));
        store(sums[k] + 16, _mm256_add_epi16(load(sums[k] + 16), high));
    }
}

/* Values at distances first_bin ... first_bin + 7 below `top`. */
INLINE void count_pass(const uint64_t *rows, uint32_t count, uint32_t offset, uint32_t in_use,
                       bool fp16, __m256i top, uint32_t first_bin, uint16_t (*sums)[PREFIX_STEP])
{
    memset(sums, 0, BINS_A_PASS * sizeof *sums);
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
                             bool fp16, uint16_t (*negatives)[PREFIX_STEP])
{
    __m256i top = _mm256_setzero_si256(), a, b;
    memset(negatives, 0, sizeof *negatives);
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

INLINE void count_step(const uint64_t *rows, uint32_t count, uint32_t offset, uint32_t in_use,
                       bool fp16, prefix_counts *counts)
{
    __m256i top = top_and_signs(rows, count, offset, in_use, fp16, &counts->negatives);
    store(counts->top, top);
    for (uint32_t k = 0; k < 2 * BINS_A_PASS; k += BINS_A_PASS)
        count_pass(rows, count, offset, in_use, fp16, top, k, counts->counts + k);
    for (uint32_t h = 0; h < PREFIX_STEP; h += 16) {
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
    uint32_t in_use = values - first;
    if (fp16)
        count_step(rows, count, 2 * first, in_use, true, counts);
    else if (in_use >= STEP)
        count_step(rows, count, 2 * first, STEP, false, counts);
    else
        count_step(rows, count, 2 * first, in_use, false, counts);
}

/* ---- encoding ---- */
/* The low bytes of a group's 64 values, in their order, as they are stored but for bit 7. */
typedef struct {
    __m256i bytes[2];
    uint64_t mantissa[3]; /* all but bfloat16: bits 8, 9 and 7 */
} low_part;

INLINE uint64_t words_pair(uint32_t low, uint32_t high) { return low | (uint64_t)high << 32; }

/* Bit `k` of 64 bytes. */
INLINE uint64_t plane_of(const __m256i bytes[2], int k)
{
    return words_pair((uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(bytes[0], 7 - k)),
                      (uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(bytes[1], 7 - k)));
}

INLINE __m256i symbols(__m256i exponent, const prefix_plan *plan, uint32_t channel, bool fp16)
{
    const __m256i escape = _mm256_set1_epi8(PREFIX_ESCAPE);
    __m256i narrow =
        _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)fkv_prefix_symbol[0]));
    __m256i wide =
        _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)fkv_prefix_symbol[1]));
    __m256i at = _mm256_sub_epi8(load(plan->base + channel), exponent);
    at = _mm256_sub_epi8(at, _mm256_set1_epi8(PREFIX_DISTANCE_FIRST));
    if (fp16) at = _mm256_and_si256(at, _mm256_set1_epi8((char)plan->exponent_max));
    at = _mm256_min_epu8(at, escape);
    return _mm256_blendv_epi8(_mm256_shuffle_epi8(narrow, at), _mm256_shuffle_epi8(wide, at),
                              load(plan->kind + channel));
}

/* Symbols, signs and (low != NULL) low bytes of a group; `row` may lie up to its end only. */
INLINE void group_words(const uint8_t *row, uint32_t group, const prefix_plan *plan, bool fp16,
                        prefix_words *w, low_part *low)
{
    const uint32_t first = group * PREFIX_GROUP;
    const __m256i mantissa = _mm256_set1_epi16(fp16 ? 0xFF : 0x7F);
    uint8_t copy[2 * PREFIX_GROUP];
    __m256i symbol[2], high[2];
    row += 2 * first;
    if (plan->values - first < PREFIX_GROUP) {
        memset(copy, 0, sizeof copy);
        memcpy(copy, row, 2 * (plan->values - first));
        row = copy;
    }
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        __m256i a = load(row + 64 * h), b = load(row + 64 * h + STEP);
        const uint32_t at = first + STEP * (uint32_t)h;
        symbol[h] = symbols(exponents(a, b, fp16), plan, at, fp16);
        high[h] = pack(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
        if (low) low->bytes[h] = pack(_mm256_and_si256(a, mantissa), _mm256_and_si256(b, mantissa));
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) w->symbol[k] = plane_of(symbol, k) & plan->valid[group];
    w->sign = plane_of(high, 7);
    if (low && fp16) {
        for (int k = 0; k < 2; k++) low->mantissa[k] = plane_of(high, k) & plan->valid[group];
        low->mantissa[2] = plane_of(low->bytes, 7) & plan->valid[group];
    }
    except(plan, group, w);
}

/* 32 bits to 32 bytes of 0 or -1, in their order. */
INLINE __m256i spread(uint32_t word)
{
    const __m256i order = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2,
                                           2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i bits = _mm256_set1_epi64x((long long)0x8040201008040201);
    __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32((int)word), order);
    return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bits), bits);
}

INLINE void store_low(uint8_t *out, const low_part *low, uint64_t top_bits, bool fp16,
                      uint32_t in_use)
{
    uint8_t copy[PREFIX_GROUP];
    uint8_t *to = in_use < PREFIX_GROUP ? copy : out;
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        __m256i bytes = low->bytes[h];
        if (!fp16)
            bytes = _mm256_or_si256(bytes, _mm256_and_si256(spread((uint32_t)(top_bits >> 32 * h)),
                                                            _mm256_set1_epi8((char)0x80)));
        store(to + STEP * h, bytes);
    }
    if (in_use < PREFIX_GROUP) memcpy(out, copy, in_use);
}

INLINE void costs_of(const uint64_t *rows, uint32_t count, const prefix_plan *plan, bool fp16,
                     uint16_t *bits)
{
    for (uint32_t r = 0; r < count; r++) {
        uint32_t sum = 8 * plan->low_bytes + plan->static_bits;
        for (uint32_t g = 0; g < plan->groups; g++) {
            prefix_words w;
            group_words((const uint8_t *)(uintptr_t)rows[r], g, plan, fp16, &w, NULL);
            prefix_masks m = masks_of(w.symbol);
            sum += bits_of(&m, plan->raw_sign[g]) + 8 * COUNT_BITS(m.escape);
        }
        bits[r] = (uint16_t)sum;
    }
}

TARGET void fkv_prefix_costs_avx2(const uint64_t *rows, uint32_t count, const prefix_plan *plan,
                                  uint16_t *bits)
{
    if (plan->fp16)
        costs_of(rows, count, plan, true, bits);
    else
        costs_of(rows, count, plan, false, bits);
}

INLINE void encode(const uint64_t *rows, uint32_t count, const prefix_plan *plan, bool fp16,
                   prefix_parts *parts)
{
    uint8_t *out = parts->low;
    bit_writer planes = {parts->planes, 0, 0}, digits = {parts->digits, 0, parts->digits_held};
    prefix_batch batch;
    batch.count = 0;
    for (uint32_t r = 0; r < count; r++, out += plan->low_bytes) {
        const uint8_t *row = (const uint8_t *)(uintptr_t)rows[r];
        for (uint32_t g = 0; g < plan->groups; g++) {
            const uint32_t first = g * PREFIX_GROUP;
            const uint32_t in_use =
                plan->values - first < PREFIX_GROUP ? plan->values - first : PREFIX_GROUP;
            prefix_words w;
            low_part low = {.mantissa = {0}};
            group_words(row, g, plan, fp16, &w, &low);
            prefix_masks m = masks_of(w.symbol);
            for (uint32_t k = 0; fp16 && k < plan->mantissa_planes; k++)
                put_bits(&planes, low.mantissa[k], in_use);
            uint64_t top_bits = put_planes(plan, g, &w, &m, &planes);
            if (!fp16 || plan->low_bytes) store_low(out + first, &low, top_bits, fp16, in_use);
            batch.words[batch.count] = w;
            batch.masks[batch.count] = m;
            batch.group[batch.count++] = g;
            if (batch.count == PREFIX_BATCH) put_batch(plan, &batch, &digits);
            for (uint64_t left = m.escape; left; left &= left - 1) {
                uint16_t value;
                memcpy(&value, row + 2 * (first + (uint32_t)__builtin_ctzll(left)), 2);
                parts->escapes[parts->escape_count++] =
                    (uint8_t)(fp16 ? value >> 10 & 0x1F : value >> 7);
            }
        }
    }
    put_batch(plan, &batch, &digits);
    prefix_parts_end(parts, &planes, &digits);
}

TARGET void fkv_prefix_encode_avx2(const uint64_t *rows, uint32_t count, const prefix_plan *plan,
                                   prefix_parts *parts)
{
    if (plan->fp16)
        encode(rows, count, plan, true, parts);
    else
        encode(rows, count, plan, false, parts);
}

/* ---- decoding ---- */
INLINE void merge_half(const prefix_plan *plan, const prefix_words *w, const uint64_t mantissa[3],
                       __m256i low, uint32_t channel, int half, bool fp16, uint8_t *row)
{
    const __m256i seven_bits = _mm256_set1_epi8(0x7F);
    __m256i narrow =
        _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)fkv_prefix_distance[0]));
    __m256i wide =
        _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)fkv_prefix_distance[1]));
    __m256i symbol =
        _mm256_and_si256(spread((uint32_t)(w->symbol[3] >> 32 * half)), _mm256_set1_epi8(8));
#pragma GCC unroll 3
    for (int k = 0; k < 3; k++)
        symbol =
            _mm256_or_si256(symbol, _mm256_and_si256(spread((uint32_t)(w->symbol[k] >> 32 * half)),
                                                     _mm256_set1_epi8((char)(1 << k))));
    __m256i distance =
        _mm256_blendv_epi8(_mm256_shuffle_epi8(narrow, symbol), _mm256_shuffle_epi8(wide, symbol),
                           load(plan->kind + channel));
    __m256i exponent = _mm256_sub_epi8(load(plan->base + channel), distance), high;
    __m256i sign = spread((uint32_t)(w->sign >> 32 * half));
    if (fp16) {
        exponent = _mm256_and_si256(exponent, _mm256_set1_epi8((char)plan->exponent_max));
        high = _mm256_slli_epi16(exponent, 2);
        for (int k = 0; k < 2; k++)
            high =
                _mm256_or_si256(high, _mm256_and_si256(spread((uint32_t)(mantissa[k] >> 32 * half)),
                                                       _mm256_set1_epi8((char)(1 << k))));
        high = _mm256_or_si256(high, _mm256_andnot_si256(seven_bits, sign));
    } else {
        low = _mm256_or_si256(_mm256_and_si256(low, seven_bits),
                              _mm256_andnot_si256(seven_bits, _mm256_slli_epi16(exponent, 7)));
        high = _mm256_or_si256(_mm256_andnot_si256(seven_bits, sign),
                               _mm256_and_si256(_mm256_srli_epi16(exponent, 1), seven_bits));
    }
    low = _mm256_permute4x64_epi64(low, 0xD8), high = _mm256_permute4x64_epi64(high, 0xD8);
    store(row, _mm256_unpacklo_epi8(low, high));
    store(row + STEP, _mm256_unpackhi_epi8(low, high));
}

INLINE void merge_group(const prefix_plan *plan, const prefix_words *w, const uint64_t mantissa[3],
                        const __m256i low[2], uint32_t first, uint32_t in_use, bool fp16,
                        uint8_t *row)
{
    uint8_t copy[2 * PREFIX_GROUP];
    uint8_t *to = in_use < PREFIX_GROUP ? copy : row + 2 * first;
    merge_half(plan, w, mantissa, low[0], first, 0, fp16, to);
    merge_half(plan, w, mantissa, low[1], first + STEP, 1, fp16, to + 64);
    if (in_use < PREFIX_GROUP) memcpy(row + 2 * first, copy, 2 * in_use);
}

/* 64 low bytes of a group, those past its end zero. */
INLINE void load_low(const uint8_t *from, uint32_t in_use, __m256i low[2])
{
    uint8_t copy[PREFIX_GROUP];
    if (in_use < PREFIX_GROUP) {
        memset(copy, 0, sizeof copy);
        memcpy(copy, from, in_use);
        from = copy;
    }
    low[0] = load(from), low[1] = load(from + STEP);
}

/* The same where there are no low bytes: a plane holds their bit 7, or nothing does. */
INLINE void low_of_plane(uint64_t plane, __m256i low[2])
{
    for (int h = 0; h < 2; h++)
        low[h] =
            _mm256_and_si256(spread((uint32_t)(plane >> 32 * h)), _mm256_set1_epi8((char)0x80));
}

INLINE uint32_t group_values(const prefix_plan *plan, uint32_t first)
{
    return plan->values - first < PREFIX_GROUP ? plan->values - first : PREFIX_GROUP;
}

INLINE bool place_batch(const prefix_plan *plan, const batch_places *b, bool fp16,
                        const uint8_t *begin, const uint8_t **escapes)
{
    for (uint32_t i = 0; i < b->batch.count; i++) {
        const uint32_t first = b->batch.group[i] * PREFIX_GROUP;
        const uint32_t in_use = group_values(plan, first);
        const uint64_t escape = b->batch.masks[i].escape;
        if (b->row[i]) {
            __m256i low[2];
            if (!fp16 || plan->low_bytes)
                load_low(b->low[i] + first, in_use, low);
            else
                low_of_plane(b->mantissa[i][2], low);
            merge_group(plan, &b->batch.words[i], b->mantissa[i], low, first, in_use, fp16,
                        b->row[i]);
        }
        if (escape
            && !fkv_prefix_patch_group(escape, first, plan, &b->batch.words[i], begin, escapes,
                                       b->row[i]))
            return false;
    }
    return true;
}

/* The planes of one group; returns how many bits they have. */
INLINE uint32_t read_planes(const prefix_plan *plan, batch_places *b, uint32_t i, bool fp16,
                            const uint8_t *planes, uint64_t at)
{
    const uint32_t g = b->batch.group[i], first = g * PREFIX_GROUP;
    const uint32_t in_use = group_values(plan, first);
    uint32_t fixed = 0;
    uint64_t low_bits;
    if (fp16) {
        b->mantissa[i][2] = 0;
        for (uint32_t k = 0; k < plan->mantissa_planes; k++, fixed += in_use)
            b->mantissa[i][k] = take_bits(planes, at + fixed);
        low_bits = take_bits(planes, at + fixed);
        fixed += in_use;
    } else {
        __m256i low[2];
        load_low(b->low[i] + first, in_use, low);
        low_bits = words_pair((uint32_t)_mm256_movemask_epi8(low[0]),
                              (uint32_t)_mm256_movemask_epi8(low[1]));
    }
    get_planes(plan, g, low_bits, planes, at + fixed, &b->batch.words[i], &b->batch.masks[i]);
    return fixed + plan->wide_count[g] + (uint32_t)plan->sign_count[g];
}

INLINE const uint8_t *decode(const uint8_t *in, uint32_t count, const prefix_plan *plan, bool fp16,
                             const uint8_t *planes, uint64_t *plane_bits, const uint8_t *end,
                             const uint64_t *rows)
{
    const uint8_t *begin = in + (size_t)count * plan->low_bytes;
    const uint64_t room_bits = (uint64_t)(end - begin) * 8;
    uint64_t plane_at = 0, at = (uint64_t)count * plan->static_bits;
    batch_places b;
    b.batch.count = 0;
    for (uint32_t r = 0, g = 0; r < count;) {
        uint32_t i = b.batch.count++;
        b.batch.group[i] = g, b.low[i] = in, b.row[i] = (uint8_t *)(uintptr_t)rows[r];
        plane_at += read_planes(plan, &b, i, fp16, planes, plane_at);
        if (++g == plan->groups) g = 0, r++, in += plan->low_bytes;
        if (b.batch.count < PREFIX_BATCH && r < count) continue;
        at = get_batch(plan, &b.batch, planes, at, room_bits);
        if (at > room_bits || !place_batch(plan, &b, fp16, begin, &end)) return NULL;
        b.batch.count = 0;
    }
    *plane_bits = at;
    return end;
}

TARGET const uint8_t *fkv_prefix_decode_avx2(const uint8_t *in, uint32_t count,
                                             const prefix_plan *plan, const uint8_t *planes,
                                             uint64_t *plane_bits, const uint8_t *end,
                                             const uint64_t *rows)
{
    if (plan->fp16) return decode(in, count, plan, true, planes, plane_bits, end, rows);
    return decode(in, count, plan, false, planes, plane_bits, end, rows);
}
#endif
