/* codec_fxp_avx512.c: the fixed-width exponent code with AVX-512 (F, BW); the format is in codec_fxp.c.
 * Bases are chosen by the AVX2 code.
 *
 * Invariants
 *  - same costs, bytes and verdicts as the portable code;
 *  - nothing outside a row is touched; codec_fxp_rows.h goes over rows, this file over 64 values.
 *
 * The bytes of 64 values lie in `unpack order`: eights of values 0, 4, 1, 5, 2, 6, 3, 7, which is what
 * packing and unpacking 16-bit values within quarters gives and takes. Each 64-bit lane of codes is a
 * word shifted by its own count.
 */
#if defined(__x86_64__)
#include "codec_fxp.h"
#include <immintrin.h>

#define FXP_TARGET __attribute__((target("avx512f,avx512bw,avx2,bmi,bmi2,popcnt")))
#ifdef FKV_COVERAGE /* each branch once, not once in every copy */
#define FXP_INLINE FXP_TARGET static inline
#else
#define FXP_INLINE FXP_TARGET static inline __attribute__((always_inline))
#endif
#define INLINE FXP_INLINE
#define STEP 32u /* 16-bit values of a register */

/* From the values' order to unpack order, and back. */
INLINE __m512i to_unpack_order(__m512i bytes)
{
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), bytes);
}
INLINE __m512i to_values_order(__m512i bytes)
{
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), bytes);
}
INLINE uint64_t mask_to_values_order(uint64_t mask)
{
    return _pext_u64(mask, 0x00FF00FF00FF00FF) | _pext_u64(mask, 0xFF00FF00FF00FF00) << 32;
}

INLINE void order_group(const uint8_t *bases, uint8_t *ordered)
{
    _mm512_storeu_si512(ordered, to_unpack_order(_mm512_loadu_si512(bases)));
}

/* ---- encoding ---- */
INLINE __m512i codes_of(__m512i a, __m512i b, bool fp16, const uint8_t *bases)
{
    const int shift = fp16 ? 11 : 8;
    a = _mm512_srli_epi16(_mm512_add_epi16(a, a), shift); /* the sign is gone */
    b = _mm512_srli_epi16(_mm512_add_epi16(b, b), shift);
    return _mm512_min_epu8(_mm512_sub_epi8(_mm512_loadu_si512(bases), _mm512_packus_epi16(a, b)),
                           _mm512_set1_epi8(FXP_ESCAPE));
}

INLINE uint64_t mask_of_7(__m512i codes)
{
    return _mm512_cmpeq_epi8_mask(codes, _mm512_set1_epi8(FXP_ESCAPE));
}

/* In unpack order. */
INLINE uint64_t escapes_of(const uint8_t *row, bool fp16, const uint8_t *bases)
{
    return mask_of_7(
        codes_of(_mm512_loadu_si512(row), _mm512_loadu_si512(row + 2 * STEP), fp16, bases));
}

/* By how much a lane's eight values lie above the first ones in their words: of two bits, of one. */
INLINE __m512i by_two(void) { return _mm512_setr_epi64(0, 0, 2, 2, 4, 4, 6, 6); }
INLINE __m512i by_one(void) { return _mm512_setr_epi64(-2, 2, -1, 3, 0, 4, 1, 5); }

/* Three bits of 64 values to their words. */
INLINE void put_words(uint8_t *out, __m512i bits)
{
    __m512i low = _mm512_sllv_epi64(_mm512_and_si512(bits, _mm512_set1_epi8(3)), by_two());
    __m512i high = _mm512_rolv_epi64(_mm512_and_si512(bits, _mm512_set1_epi8(4)), by_one());
    __m256i half = _mm256_or_si256(_mm512_castsi512_si256(low), _mm512_extracti64x4_epi64(low, 1));
    __m256i one = _mm256_or_si256(_mm512_castsi512_si256(high), _mm512_extracti64x4_epi64(high, 1));
    __m128i words = _mm_or_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    __m128i word = _mm_or_si128(_mm256_castsi256_si128(one), _mm256_extracti128_si256(one, 1));
    _mm_storeu_si128((__m128i *)out, words);
    _mm_storel_epi64((__m128i *)(out + 16), _mm_or_si128(word, _mm_unpackhi_epi64(word, word)));
}

/* 64 values to their low bytes and words; returns the mask of escapes. */
INLINE uint64_t encode_group(const uint8_t *row, bool fp16, const uint8_t *bases, uint8_t *low_out,
                             uint8_t *codes, uint8_t *high_out)
{
    const __m512i low_byte = _mm512_set1_epi16(0xFF);
    __m512i a = _mm512_loadu_si512(row), b = _mm512_loadu_si512(row + 2 * STEP);
    const __m512i code = codes_of(a, b, fp16, bases);
    put_words(codes, code);
    if (fp16) {
        __m512i top = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
        put_words(high_out, _mm512_or_si512(
                                _mm512_and_si512(top, _mm512_set1_epi8(3)),
                                _mm512_and_si512(_mm512_srli_epi16(top, 5), _mm512_set1_epi8(4))));
    } else { /* the sign comes to the low end */
        a = _mm512_or_si512(_mm512_add_epi16(a, a), _mm512_srli_epi16(a, 15));
        b = _mm512_or_si512(_mm512_add_epi16(b, b), _mm512_srli_epi16(b, 15));
    }
    _mm512_storeu_si512(low_out,
                        to_values_order(_mm512_packus_epi16(_mm512_and_si512(a, low_byte),
                                                            _mm512_and_si512(b, low_byte))));
    return mask_to_values_order(mask_of_7(code));
}

/* ---- decoding ---- */
/* Three bits of each of 64 values. */
INLINE __m512i get_words(const uint8_t *in)
{
    int64_t word;
    memcpy(&word, in + 16, 8);
    __m512i low = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)in));
    low = _mm512_srlv_epi64(low, by_two());
    const __m512i high = _mm512_rorv_epi64(_mm512_set1_epi64(word), by_one());
    /* Two bits of one, the third of the other. */
    return _mm512_and_si512(_mm512_ternarylogic_epi64(low, high, _mm512_set1_epi8(3), 0xE4),
                            _mm512_set1_epi8(7));
}

/* 64 values (row NULL: only their escapes are found); returns the mask of escapes. */
INLINE uint64_t decode_group(const uint8_t *low_in, const uint8_t *codes, const uint8_t *high_in,
                             bool fp16, const uint8_t *bases, uint8_t *row)
{
    const __m512i code = get_words(codes);
    const uint64_t mask = mask_to_values_order(mask_of_7(code));
    if (!row) return mask;
    const __m512i low = to_unpack_order(_mm512_loadu_si512(low_in));
    __m512i top = _mm512_sub_epi8(_mm512_loadu_si512(bases), code);
    if (fp16) {
        const __m512i bits = get_words(high_in);
        top = _mm512_slli_epi16(_mm512_and_si512(top, _mm512_set1_epi8(0x1F)), 2);
        top = _mm512_or_si512(top, _mm512_and_si512(bits, _mm512_set1_epi8(3)));
        top =
            _mm512_or_si512(top, _mm512_slli_epi16(_mm512_and_si512(bits, _mm512_set1_epi8(4)), 5));
    }
    __m512i a = _mm512_unpacklo_epi8(low, top), b = _mm512_unpackhi_epi8(low, top);
    if (!fp16) { /* the sign goes to the upper end */
        a = _mm512_or_si512(_mm512_srli_epi16(a, 1), _mm512_slli_epi16(a, 15));
        b = _mm512_or_si512(_mm512_srli_epi16(b, 1), _mm512_slli_epi16(b, 15));
    }
    _mm512_storeu_si512(row, a);
    _mm512_storeu_si512(row + 2 * STEP, b);
    return mask;
}

#include "codec_fxp_rows.h"
FXP_DEFINE(avx512)
#endif
