/* codec_fxp_rows.h: stripes of the fixed-width exponent code row by row, and what rows have beyond their
 * last 64 values; compiled once for each path with vector instructions.
 *
 * The path's file has before it, for a group of 64 values:
 *
 *   order_group()   64 bases in the order in which the path holds bytes; the functions below take them so
 *   escapes_of()    which values of a row have no code, in any order
 *   encode_group()  a row's values to low bytes and words; returns which have no code
 *   decode_group()  the same back (row NULL: only which have none)
 *
 * Invariants
 *  - same costs, bytes and verdicts as the portable code;
 *  - the last values % 64 go 16 at a time, the last few of them through a padded copy, so nothing
 *    outside a row is touched;
 *  - which values have escapes is collected first, without a branch, and they are moved in a plain
 *    loop later: a few of them in every row would otherwise cost a mispredicted branch each time. */
#ifndef FLASHKV_CODEC_FXP_ROWS_H
#define FLASHKV_CODEC_FXP_ROWS_H
#include "codec_fxp.h"

/* The bases of whole groups. */
FXP_INLINE void order_bases(const uint8_t *bases, uint32_t values, uint8_t *ordered)
{
    for (uint32_t i = 0; i + FXP_GROUP <= values; i += FXP_GROUP)
        order_group(bases + i, ordered + i);
}

/* ---- the last values of a row ---- */
FXP_INLINE __m128i load_half(const void *at) { return _mm_loadu_si128((const __m128i *)at); }

FXP_INLINE __m128i exponents_half(__m128i a, __m128i b, bool fp16)
{
    a = _mm_add_epi16(a, a), b = _mm_add_epi16(b, b);
    return fp16 ? _mm_packus_epi16(_mm_srli_epi16(a, 11), _mm_srli_epi16(b, 11))
                : _mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8));
}

/* 16 values, of which in_use are there. */
FXP_INLINE void load_part(const uint8_t *row, uint32_t in_use, __m128i *a, __m128i *b)
{
    uint8_t copy[2 * FXP_PART] = {0};
    if (in_use < FXP_PART) {
        memcpy(copy, row, 2 * in_use);
        row = copy;
    }
    *a = load_half(row), *b = load_half(row + FXP_PART);
}

FXP_INLINE uint32_t part_mask(uint32_t in_use)
{
    return in_use < FXP_PART ? (1u << in_use) - 1 : 0xFFFF;
}

FXP_INLINE __m128i part_codes(const uint8_t *row, uint32_t in_use, bool fp16, const uint8_t *bases,
                              uint32_t *mask)
{
    __m128i a, b;
    load_part(row, in_use, &a, &b);
    const __m128i escape = _mm_set1_epi8(FXP_ESCAPE);
    __m128i codes =
        _mm_min_epu8(_mm_sub_epi8(load_half(bases), exponents_half(a, b, fp16)), escape);
    *mask = (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(codes, escape)) & part_mask(in_use);
    return codes;
}

/* ---- values whose escapes wait to be moved ---- */
#define WAITING_MAX 64u
#define AT_ONCE 4u

typedef struct {
    uintptr_t at[WAITING_MAX + FXP_GROUP + AT_ONCE];
    uint32_t count;
} waiting;

/* Whether the list is long enough now. mask: which of the values that begin at `values`. */
FXP_INLINE bool wait_for(waiting *list, const uint8_t *values, uint64_t mask)
{
    uintptr_t *to = list->at + list->count;
    const uintptr_t from = (uintptr_t)values;
    list->count += (uint32_t)_mm_popcnt_u64(mask);
    /* The first few without asking how many there are. */
#pragma GCC unroll 4
    for (uint32_t k = 0; k < AT_ONCE; k++, mask = _blsr_u64(mask))
        to[k] = from + 2 * _tzcnt_u64(mask);
    for (to += AT_ONCE; mask; mask = _blsr_u64(mask)) *to++ = from + 2 * _tzcnt_u64(mask);
    return list->count >= WAITING_MAX;
}

/* ---- encoding ---- */
FXP_INLINE void costs_of(const uint64_t *rows, uint32_t count, uint32_t values, bool fp16,
                         const uint8_t *bases, uint16_t *costs)
{
    const uint32_t whole = values / FXP_GROUP * FXP_GROUP, fixed = fxp_row_bytes(values, fp16);
    uint8_t ordered[FXP_VALUES_MAX];
    order_bases(bases, values, ordered);
    for (uint32_t r = 0; r < count; r++) {
        const uint8_t *row = (const uint8_t *)(uintptr_t)rows[r];
        uint32_t cost = fixed, mask;
        for (uint32_t i = 0; i < whole; i += FXP_GROUP)
            cost += (uint32_t)_mm_popcnt_u64(escapes_of(row + 2 * i, fp16, ordered + i));
        for (uint32_t i = whole; i < values; i += FXP_PART) {
            part_codes(row + 2 * i, values - i, fp16, bases + i, &mask);
            cost += (uint32_t)_mm_popcnt_u32(mask);
        }
        costs[r] = (uint16_t)cost;
    }
}

/* Three bits of 16 values to a word. */
FXP_INLINE void put_part(uint8_t *out, __m128i bits)
{
    __m128i upper = _mm_slli_epi16(_mm_unpackhi_epi64(bits, bits), 4);
    _mm_storel_epi64((__m128i *)out, _mm_or_si128(bits, upper));
}

/* The last in_use (or 16) values of a row; returns the mask of escapes. */
FXP_INLINE uint32_t encode_part(const uint8_t *row, uint32_t in_use, bool fp16,
                                const uint8_t *bases, uint8_t *low_out, uint8_t *codes,
                                uint8_t *high_out)
{
    static const uint8_t valid[2 * FXP_PART] = {0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF,
                                                0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF};
    const __m128i low_byte = _mm_set1_epi16(0xFF);
    const uint32_t there = in_use < FXP_PART ? in_use : FXP_PART;
    __m128i a, b;
    uint32_t mask;
    uint8_t copy[FXP_PART];
    __m128i code = part_codes(row, in_use, fp16, bases, &mask);
    load_part(row, in_use, &a, &b);
    put_part(codes, _mm_and_si128(code, load_half(valid + FXP_PART - there)));
    if (fp16) {
        __m128i top = _mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8));
        put_part(high_out, _mm_or_si128(_mm_and_si128(top, _mm_set1_epi8(3)),
                                        _mm_and_si128(_mm_srli_epi16(top, 5), _mm_set1_epi8(4))));
    } else {
        a = _mm_or_si128(_mm_add_epi16(a, a), _mm_srli_epi16(a, 15));
        b = _mm_or_si128(_mm_add_epi16(b, b), _mm_srli_epi16(b, 15));
    }
    _mm_storeu_si128((__m128i *)copy,
                     _mm_packus_epi16(_mm_and_si128(a, low_byte), _mm_and_si128(b, low_byte)));
    memcpy(low_out, copy, there);
    return mask;
}

/* Writes the escapes that wait; returns where the next one goes. */
FXP_INLINE uint8_t *put_escapes(waiting *list, bool fp16, uint8_t *escapes)
{
    for (uint32_t k = 0; k < list->count; k++) {
        uint16_t value;
        memcpy(&value, (const uint8_t *)list->at[k], 2);
        *escapes++ = (uint8_t)(fp16 ? value >> 10 & 0x1F : value >> 7);
    }
    list->count = 0;
    return escapes;
}

FXP_INLINE uint8_t *encode(const uint64_t *rows, uint32_t count, uint32_t values, bool fp16,
                           const uint8_t *bases, uint8_t *out)
{
    const uint32_t row_bytes = fxp_row_bytes(values, fp16), code_bytes = fxp_codes_bytes(values);
    uint8_t *escapes = out + (uint64_t)count * row_bytes;
    uint8_t ordered[FXP_VALUES_MAX];
    waiting list;
    list.count = 0;
    order_bases(bases, values, ordered);
    for (uint32_t r = 0; r < count; r++, out += row_bytes) {
        uint8_t *row = (uint8_t *)(uintptr_t)rows[r], *codes = out + values;
        uint32_t i = 0;
        for (; i + FXP_GROUP <= values; i += FXP_GROUP, codes += FXP_GROUP_BYTES) {
            uint64_t mask =
                encode_group(row + 2 * i, fp16, ordered + i, out + i, codes, codes + code_bytes);
            if (wait_for(&list, row + 2 * i, mask)) escapes = put_escapes(&list, fp16, escapes);
        }
        for (; i < values; i += FXP_PART, codes += FXP_PART_BYTES) {
            uint64_t mask = encode_part(row + 2 * i, values - i, fp16, bases + i, out + i, codes,
                                        codes + code_bytes);
            if (wait_for(&list, row + 2 * i, mask)) escapes = put_escapes(&list, fp16, escapes);
        }
    }
    return put_escapes(&list, fp16, escapes);
}

/* ---- decoding ---- */
FXP_INLINE __m128i get_part(const uint8_t *in)
{
    __m128i word = _mm_loadl_epi64((const __m128i *)in);
    return _mm_and_si128(_mm_unpacklo_epi64(word, _mm_srli_epi16(word, 4)), _mm_set1_epi8(7));
}

/* The last in_use (or 16) values of a row. */
FXP_INLINE uint32_t decode_part(const uint8_t *low_in, uint32_t in_use, const uint8_t *codes,
                                const uint8_t *high_in, bool fp16, const uint8_t *bases,
                                uint8_t *row)
{
    const uint32_t there = in_use < FXP_PART ? in_use : FXP_PART;
    const __m128i code = get_part(codes);
    uint32_t mask = (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(code, _mm_set1_epi8(FXP_ESCAPE)));
    if (row) {
        uint8_t copy[2 * FXP_PART] = {0};
        memcpy(copy, low_in, there);
        __m128i low = load_half(copy), top = _mm_sub_epi8(load_half(bases), code), a, b;
        if (fp16) {
            const __m128i bits = get_part(high_in);
            top = _mm_slli_epi16(_mm_and_si128(top, _mm_set1_epi8(0x1F)), 2);
            top = _mm_or_si128(top, _mm_and_si128(bits, _mm_set1_epi8(3)));
            top = _mm_or_si128(top, _mm_slli_epi16(_mm_and_si128(bits, _mm_set1_epi8(4)), 5));
        }
        a = _mm_unpacklo_epi8(low, top), b = _mm_unpackhi_epi8(low, top);
        if (!fp16) {
            a = _mm_or_si128(_mm_srli_epi16(a, 1), _mm_slli_epi16(a, 15));
            b = _mm_or_si128(_mm_srli_epi16(b, 1), _mm_slli_epi16(b, 15));
        }
        _mm_storeu_si128((__m128i *)copy, a);
        _mm_storeu_si128((__m128i *)(copy + FXP_PART), b);
        memcpy(row, copy, 2 * there);
    }
    return mask & part_mask(in_use);
}

/* Sets the exponents that wait; returns where their escapes end, or NULL where there are too few. */
FXP_INLINE const uint8_t *patch(waiting *list, bool fp16, const uint8_t *escapes,
                                const uint8_t *end)
{
    if ((uint64_t)(end - escapes) < list->count) return NULL;
    for (uint32_t k = 0; k < list->count; k++) {
        uint8_t *at = (uint8_t *)list->at[k];
        uint32_t exponent = *escapes++;
        uint16_t value;
        memcpy(&value, at, 2);
        value = (uint16_t)(fp16 ? (value & 0x83FFu) | (exponent & 0x1F) << 10
                                : (value & 0x807Fu) | exponent << 7);
        memcpy(at, &value, 2);
    }
    list->count = 0;
    return escapes;
}

FXP_INLINE const uint8_t *decode(const uint8_t *in, uint32_t length, uint32_t count,
                                 uint32_t values, bool fp16, const uint8_t *bases,
                                 const uint64_t *rows)
{
    const uint32_t row_bytes = fxp_row_bytes(values, fp16), code_bytes = fxp_codes_bytes(values);
    const uint8_t *escapes = in + (uint64_t)count * row_bytes, *end = in + length;
    uint8_t ordered[FXP_VALUES_MAX];
    uint8_t unwanted[2 * FXP_GROUP] = {0}; /* escapes of rows that aren't go here */
    waiting list;
    list.count = 0;
    order_bases(bases, values, ordered);
    for (uint32_t r = 0; r < count; r++, in += row_bytes) {
        uint8_t *row = (uint8_t *)(uintptr_t)rows[r];
        const uint8_t *codes = in + values;
        uint32_t i = 0;
        for (; i + FXP_GROUP <= values; i += FXP_GROUP, codes += FXP_GROUP_BYTES) {
            uint8_t *to = row ? row + 2 * i : NULL;
            uint64_t mask = decode_group(in + i, codes, codes + code_bytes, fp16, ordered + i, to);
            if (wait_for(&list, to ? to : unwanted, mask)
                && !(escapes = patch(&list, fp16, escapes, end)))
                return NULL;
        }
        for (; i < values; i += FXP_PART, codes += FXP_PART_BYTES) {
            uint8_t *to = row ? row + 2 * i : NULL;
            uint64_t mask =
                decode_part(in + i, values - i, codes, codes + code_bytes, fp16, bases + i, to);
            if (wait_for(&list, to ? to : unwanted, mask)
                && !(escapes = patch(&list, fp16, escapes, end)))
                return NULL;
        }
    }
    return patch(&list, fp16, escapes, end);
}

/* ---- the path's functions ---- */
/* Copies for bfloat16 and the usual head sizes: their loops have constant ends. */
#define FXP_DEFINE(suffix)                                                                         \
    FXP_TARGET void fkv_fxp_costs_##suffix(const uint64_t *rows, uint32_t count, uint32_t values,  \
                                           bool fp16, const uint8_t *bases, uint16_t *costs)       \
    {                                                                                              \
        if (fp16)                                                                                  \
            costs_of(rows, count, values, true, bases, costs);                                     \
        else if (values == 64)                                                                     \
            costs_of(rows, count, 64, false, bases, costs);                                        \
        else if (values == 128)                                                                    \
            costs_of(rows, count, 128, false, bases, costs);                                       \
        else                                                                                       \
            costs_of(rows, count, values, false, bases, costs);                                    \
    }                                                                                              \
    FXP_TARGET uint8_t *fkv_fxp_encode_##suffix(const uint64_t *rows, uint32_t count,              \
                                                uint32_t values, bool fp16, const uint8_t *bases,  \
                                                uint8_t *out)                                      \
    {                                                                                              \
        if (fp16) return encode(rows, count, values, true, bases, out);                            \
        if (values == 64) return encode(rows, count, 64, false, bases, out);                       \
        if (values == 128) return encode(rows, count, 128, false, bases, out);                     \
        return encode(rows, count, values, false, bases, out);                                     \
    }                                                                                              \
    FXP_TARGET const uint8_t *fkv_fxp_decode_##suffix(const uint8_t *in, uint32_t length,          \
                                                      uint32_t count, uint32_t values, bool fp16,  \
                                                      const uint8_t *bases, const uint64_t *rows)  \
    {                                                                                              \
        if (fp16) return decode(in, length, count, values, true, bases, rows);                     \
        if (values == 64) return decode(in, length, count, 64, false, bases, rows);                \
        if (values == 128) return decode(in, length, count, 128, false, bases, rows);              \
        return decode(in, length, count, values, false, bases, rows);                              \
    }
#endif
