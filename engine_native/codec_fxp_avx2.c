/* codec_fxp_avx2.c: the fixed-width exponent code with AVX2; the format is in codec_fxp.c.
 *
 * Invariants
 *  - same bases, costs, bytes and verdicts as the portable code;
 *  - nothing outside a row is touched; codec_fxp_rows.h goes over rows, this file over 64 values.
 *
 * Inside a step the bytes of 32 values lie in `unpack order`: values 0-7 and 16-23 in the lower
 * half, 8-15 and 24-31 in the upper one, which is what packing and unpacking 16-bit values within
 * halves gives and takes. The words of codes are made for it: each 64-bit lane is the word shifted by
 * its own count.
 */
#if defined(__x86_64__)
#include "codec_fxp.h"
#include <immintrin.h>

#define STEP 32u
#define TARGET __attribute__((target("avx2,bmi,popcnt")))
#define FXP_TARGET TARGET
#ifdef FKV_COVERAGE /* each branch once, not once in every copy */
#define FXP_INLINE TARGET static inline
#else
#define FXP_INLINE TARGET static inline __attribute__((always_inline))
#endif
#define INLINE FXP_INLINE

INLINE __m256i load(const void *at) { return _mm256_loadu_si256((const __m256i *)at); }
INLINE void store(void *at, __m256i value) { _mm256_storeu_si256((__m256i *)at, value); }

/* Between the values' order and unpack order: its own inverse. */
INLINE __m256i reorder(__m256i bytes) { return _mm256_permute4x64_epi64(bytes, 0xD8); }

/* A mask of 64 values of which each half lies in unpack order, in the values' order. */
INLINE uint64_t reorder_mask(uint64_t mask)
{
    return (mask & 0xFF0000FFFF0000FF) | (mask & 0x0000FF000000FF00) << 8
           | (mask >> 8 & 0x0000FF000000FF00);
}

/* Exponents of 32 values, in unpack order. */
INLINE __m256i exponents(__m256i a, __m256i b, bool fp16)
{
    a = _mm256_add_epi16(a, a); /* the sign is gone, the exponent on top */
    b = _mm256_add_epi16(b, b);
    return fp16 ? _mm256_packus_epi16(_mm256_srli_epi16(a, 11), _mm256_srli_epi16(b, 11))
                : _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
}

/* ---- choosing bases ---- */
#define BINS_A_PASS 8u /* that many counters stay in registers */

typedef struct {
    uint8_t rows[FXP_SAMPLES_MAX][STEP];
} samples;

/* Exponents of 32 channels of the rows that count; returns each channel's highest. */
INLINE __m256i take_samples(const uint64_t *rows, uint32_t count, uint32_t channel, uint32_t in_use,
                            bool fp16, samples *s)
{
    const uint32_t stride = fxp_sample_stride(count);
    __m256i top = _mm256_setzero_si256();
    for (uint32_t r = 0, k = 0; r < count; r += stride, k++) {
        const uint8_t *row = (const uint8_t *)(uintptr_t)rows[r] + 2 * channel;
        uint8_t copy[2 * STEP] = {0};
        if (in_use < STEP) {
            memcpy(copy, row, 2 * in_use);
            row = copy;
        }
        __m256i found = exponents(load(row), load(row + STEP), fp16);
        store(s->rows[k], found);
        top = _mm256_max_epu8(top, found);
    }
    return top;
}

INLINE void count_bins(const samples *s, uint32_t count, __m256i top, __m256i bins[FXP_BINS])
{
    for (uint32_t first = 0; first < FXP_BINS; first += BINS_A_PASS) {
        const __m256i from = _mm256_sub_epi8(top, _mm256_set1_epi8((char)first));
        __m256i counters[BINS_A_PASS];
#pragma GCC unroll 8
        for (uint32_t k = 0; k < BINS_A_PASS; k++) counters[k] = _mm256_setzero_si256();
        for (uint32_t r = 0; r < count; r++) {
            __m256i below = _mm256_sub_epi8(from, load(s->rows[r]));
#pragma GCC unroll 8
            for (uint32_t k = 0; k < BINS_A_PASS; k++)
                counters[k] = _mm256_sub_epi8(counters[k],
                                              _mm256_cmpeq_epi8(below, _mm256_set1_epi8((char)k)));
        }
#pragma GCC unroll 8
        for (uint32_t k = 0; k < BINS_A_PASS; k++) bins[first + k] = counters[k];
    }
}

/* As fkv_fxp_choose_channel()'s first attempt; returns a mask of the channels that need others. */
INLINE uint32_t best_bases(const __m256i bins[FXP_BINS], __m256i top, uint32_t count, bool fp16,
                           uint8_t *bases)
{
    const __m256i ones = _mm256_set1_epi8(1), zero = _mm256_setzero_si256();
    const __m256i highest = _mm256_set1_epi8((char)fxp_exponent_max(fp16));
    __m256i sum = zero, kept, base = _mm256_min_epu8(_mm256_adds_epu8(top, ones), highest);
    for (uint32_t k = 0; k < FXP_SPAN - 1; k++) sum = _mm256_add_epi8(sum, bins[k]);
    kept = sum;
    for (uint32_t start = 0; start + FXP_SPAN <= FXP_BINS; start++) {
        sum = _mm256_add_epi8(sum, bins[start + FXP_SPAN - 1]);
        const __m256i same = _mm256_cmpeq_epi8(_mm256_max_epu8(sum, kept), kept);
        base = _mm256_blendv_epi8(_mm256_sub_epi8(top, _mm256_set1_epi8((char)start)), base, same);
        kept = _mm256_max_epu8(sum, kept);
        sum = _mm256_sub_epi8(sum, bins[start]);
    }
    store(bases, reorder(_mm256_max_epu8(base, _mm256_set1_epi8(FXP_BASE_MIN))));
    /* Fewer than half of the samples, and exponents below those that were counted. */
    const __m256i half = _mm256_set1_epi8((char)((count + 1) / 2));
    const __m256i many = _mm256_cmpeq_epi8(_mm256_max_epu8(kept, half), kept);
    const __m256i deep = _mm256_set1_epi8(FXP_BINS);
    const __m256i other =
        _mm256_andnot_si256(many, _mm256_cmpeq_epi8(_mm256_max_epu8(top, deep), top));
    return (uint32_t)_mm256_movemask_epi8(reorder(other));
}

INLINE void choose(const uint64_t *rows, uint32_t count, uint32_t values, bool fp16, uint8_t *bases)
{
    const uint32_t stride = fxp_sample_stride(count);
    samples s;
    __m256i bins[FXP_BINS];
    for (uint32_t first = 0; first < values; first += STEP) {
        const uint32_t in_use = values - first < STEP ? values - first : STEP;
        const uint32_t taken = (count + stride - 1) / stride;
        const __m256i top = take_samples(rows, count, first, in_use, fp16, &s);
        count_bins(&s, taken, top, bins);
        uint32_t others = best_bases(bins, top, taken, fp16, bases + first);
        if (in_use < STEP) others &= (1u << in_use) - 1;
        for (; others; others &= others - 1) {
            const uint32_t channel = first + (uint32_t)__builtin_ctz(others);
            bases[channel] = fkv_fxp_choose_channel(rows, count, channel, fp16);
        }
    }
}

TARGET void fkv_fxp_choose_avx2(const uint64_t *rows, uint32_t count, uint32_t values, bool fp16,
                                uint8_t *bases)
{
    if (fp16)
        choose(rows, count, values, true, bases);
    else
        choose(rows, count, values, false, bases);
}

/* ---- encoding ---- */
/* Codes, in the order of the exponents. */
INLINE __m256i codes_of(__m256i bases, __m256i exponent)
{
    return _mm256_min_epu8(_mm256_sub_epi8(bases, exponent), _mm256_set1_epi8(FXP_ESCAPE));
}

INLINE void order_group(const uint8_t *bases, uint8_t *ordered)
{
    store(ordered, reorder(load(bases)));
    store(ordered + STEP, reorder(load(bases + STEP)));
}

INLINE uint32_t mask_of_7(__m256i codes)
{
    return (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(codes, _mm256_set1_epi8(FXP_ESCAPE)));
}

/* In unpack order. */
INLINE uint64_t escapes_of(const uint8_t *row, bool fp16, const uint8_t *bases)
{
    uint64_t mask = 0;
    for (uint32_t h = 0; h < 2; h++) {
        __m256i a = load(row + 64 * h), b = load(row + 64 * h + STEP);
        mask |= (uint64_t)mask_of_7(codes_of(load(bases + STEP * h), exponents(a, b, fp16)))
                << STEP * h;
    }
    return mask;
}

/* Three bits of 64 values, each half in unpack order, to their words. */
INLINE void put_words(uint8_t *out, __m256i first, __m256i second)
{
    const __m256i two = _mm256_set1_epi8(3), four = _mm256_set1_epi8(4);
    const __m256i by_two = _mm256_setr_epi64x(0, 4, 2, 6);
    __m256i a = _mm256_sllv_epi64(_mm256_and_si256(first, two), by_two);
    __m256i b = _mm256_sllv_epi64(_mm256_and_si256(second, two), by_two);
    __m256i high = _mm256_or_si256(
        _mm256_sllv_epi64(_mm256_srli_epi64(_mm256_and_si256(first, four), 2),
                          _mm256_setr_epi64x(0, 2, 1, 3)),
        _mm256_sllv_epi64(_mm256_and_si256(second, four), _mm256_setr_epi64x(2, 4, 3, 5)));
    a = _mm256_or_si256(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    __m128i words = _mm_or_si128(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    __m128i word = _mm_or_si128(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    _mm_storeu_si128((__m128i *)out, words);
    _mm_storel_epi64((__m128i *)(out + 16), _mm_or_si128(word, _mm_unpackhi_epi64(word, word)));
}

/* 64 values to their low bytes and words; returns the mask of escapes. */
INLINE uint64_t encode_group(const uint8_t *row, bool fp16, const uint8_t *bases, uint8_t *low_out,
                             uint8_t *codes, uint8_t *high_out)
{
    const __m256i low_byte = _mm256_set1_epi16(0xFF);
    __m256i code[2], high[2];
    uint64_t mask = 0;
#pragma GCC unroll 2
    for (uint32_t h = 0; h < 2; h++) {
        __m256i a = load(row + 64 * h), b = load(row + 64 * h + STEP);
        code[h] = codes_of(load(bases + STEP * h), exponents(a, b, fp16));
        mask |= (uint64_t)mask_of_7(code[h]) << STEP * h;
        if (fp16) {
            __m256i top = _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
            high[h] =
                _mm256_or_si256(_mm256_and_si256(top, _mm256_set1_epi8(3)),
                                _mm256_and_si256(_mm256_srli_epi16(top, 5), _mm256_set1_epi8(4)));
        } else { /* the sign comes to the low end */
            a = _mm256_or_si256(_mm256_add_epi16(a, a), _mm256_srli_epi16(a, 15));
            b = _mm256_or_si256(_mm256_add_epi16(b, b), _mm256_srli_epi16(b, 15));
        }
        store(low_out + STEP * h, reorder(_mm256_packus_epi16(_mm256_and_si256(a, low_byte),
                                                              _mm256_and_si256(b, low_byte))));
    }
    put_words(codes, code[0], code[1]);
    if (fp16) put_words(high_out, high[0], high[1]);
    return reorder_mask(mask);
}

/* ---- decoding ---- */
INLINE __m256i word_in_all(const uint8_t *in)
{
    long long word;
    memcpy(&word, in, 8);
    return _mm256_set1_epi64x(word);
}

/* Three bits of each of 64 values, both halves in unpack order. */
INLINE void get_words(const uint8_t *in, __m256i bits[2])
{
    const __m256i two = _mm256_set1_epi8(3), four = _mm256_set1_epi8(4);
    const __m256i by_two = _mm256_setr_epi64x(0, 4, 2, 6);
    __m256i high = word_in_all(in + 16);
    __m256i high_first =
        _mm256_srlv_epi64(_mm256_slli_epi64(high, 2), _mm256_setr_epi64x(0, 2, 1, 3));
    __m256i high_second = _mm256_srlv_epi64(high, _mm256_setr_epi64x(2, 4, 3, 5));
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        __m256i low = _mm256_srlv_epi64(word_in_all(in + 8 * h), by_two);
        bits[h] = _mm256_or_si256(_mm256_and_si256(low, two),
                                  _mm256_and_si256(h ? high_second : high_first, four));
    }
}

INLINE __m256i high_bytes(__m256i exponent, __m256i bits)
{
    exponent = _mm256_slli_epi16(_mm256_and_si256(exponent, _mm256_set1_epi8(0x1F)), 2);
    bits = _mm256_or_si256(_mm256_and_si256(bits, _mm256_set1_epi8(3)),
                           _mm256_slli_epi16(_mm256_and_si256(bits, _mm256_set1_epi8(4)), 5));
    return _mm256_or_si256(exponent, bits);
}

/* The sign goes to the upper end. */
INLINE __m256i turn(__m256i words)
{
    return _mm256_or_si256(_mm256_srli_epi16(words, 1), _mm256_slli_epi16(words, 15));
}

/* 64 values (row NULL: only their escapes are found); returns the mask of escapes. */
INLINE uint64_t decode_group(const uint8_t *low_in, const uint8_t *codes, const uint8_t *high_in,
                             bool fp16, const uint8_t *bases, uint8_t *row)
{
    __m256i code[2], high[2];
    get_words(codes, code);
    uint64_t mask = mask_of_7(code[0]) | (uint64_t)mask_of_7(code[1]) << STEP;
    if (!row) return reorder_mask(mask);
    if (fp16) get_words(high_in, high);
#pragma GCC unroll 2
    for (uint32_t h = 0; h < 2; h++) {
        __m256i low = reorder(load(low_in + STEP * h));
        __m256i top = _mm256_sub_epi8(load(bases + STEP * h), code[h]);
        if (fp16) top = high_bytes(top, high[h]);
        __m256i a = _mm256_unpacklo_epi8(low, top), b = _mm256_unpackhi_epi8(low, top);
        store(row + 64 * h, fp16 ? a : turn(a));
        store(row + 64 * h + STEP, fp16 ? b : turn(b));
    }
    return reorder_mask(mask);
}

#include "codec_fxp_rows.h"
FXP_DEFINE(avx2)
#endif
