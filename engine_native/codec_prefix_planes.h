/* codec_prefix_planes.h: the words of a group of 64 values: symbols to planes and back; compiled once
 * for each code path.
 *
 * Invariants
 *  - bit i of a word belongs to value i of the group; bits past the group's end are zero;
 *  - a plane holds bits only of the values that its symbol's prefix leads to, packed together;
 *  - reading goes at most 9 bytes past the bit it starts at; the caller has room for it.
 */
#ifndef FLASHKV_CODEC_PREFIX_PLANES_H
#define FLASHKV_CODEC_PREFIX_PLANES_H
#include "codec_prefix.h"

#ifndef PREFIX_TARGET
#define PREFIX_TARGET
#endif
#ifdef FKV_COVERAGE /* each branch once, not once in every copy */
#define PREFIX_INLINE PREFIX_TARGET static inline
#else
#define PREFIX_INLINE PREFIX_TARGET static inline __attribute__((always_inline))
#endif

/* The lowest bits to where the mask has ones. */
PREFIX_TARGET static inline uint64_t spread_bits(uint64_t bits, uint64_t mask)
{
    uint64_t result = 0;
    for (; mask; mask &= mask - 1, bits >>= 1)
        if (bits & 1) result |= mask & (0 - mask);
    return result;
}

#ifdef PREFIX_BMI2
#define SPREAD_BITS(bits, mask) _pdep_u64(bits, mask)
#define PACK_BITS(word, mask) _pext_u64(word, mask)
#define COUNT_BITS(word) ((uint32_t)_mm_popcnt_u64(word))
#else
#define SPREAD_BITS(bits, mask) spread_bits(bits, mask)
#define PACK_BITS(word, mask) pack_bits(word, mask)
#define COUNT_BITS(word) ((uint32_t)__builtin_popcountll(word))
/* The bits where the mask has ones, together. */
static inline uint64_t pack_bits(uint64_t word, uint64_t mask)
{
    uint64_t result = 0;
    for (uint32_t k = 0; mask; mask &= mask - 1, k++)
        result |= (uint64_t)((word & mask & (0 - mask)) != 0) << k;
    return result;
}
#endif

/* 64 bits from bit `at` on. */
PREFIX_INLINE uint64_t take_bits(const uint8_t *planes, uint64_t at)
{
    uint64_t word;
    const uint8_t *from = planes + at / 8;
    memcpy(&word, from, 8);
    return word >> at % 8 | (uint64_t)from[8] << 1 << (63 - at % 8);
}

/* At least `count` bits from bit `at` on: most often one load. */
PREFIX_INLINE uint64_t take_count(const uint8_t *planes, uint64_t at, uint32_t count)
{
    uint64_t word;
    if (count > 57) return take_bits(planes, at);
    memcpy(&word, planes + at / 8, 8);
    return word >> at % 8;
}

/* Bits one behind the other; what is not a whole byte yet is carried. */
typedef struct {
    uint8_t *out;
    uint64_t carried;
    uint32_t held; /* bits of it: fewer than 8 */
} bit_writer;

/* Up to 64 bits; writes 8 bytes at `out`. Bits above count are zero. */
PREFIX_INLINE void put_bits(bit_writer *w, uint64_t bits, uint32_t count)
{
    uint64_t word = w->carried | bits << w->held;
    uint32_t total = w->held + count;
    memcpy(w->out, &word, 8);
    if (total >= 64) {
        w->out += 8;
        w->carried = bits >> 1 >> (63 - w->held);
        w->held = total - 64;
    } else {
        w->out += total / 8;
        w->carried = word >> (total & 56);
        w->held = total & 7;
    }
}

/* The same for up to 56 bits. */
PREFIX_INLINE void put_few(bit_writer *w, uint64_t bits, uint32_t count)
{
    const uint64_t word = w->carried | bits << w->held;
    const uint32_t total = w->held + count;
    memcpy(w->out, &word, 8);
    w->out += total / 8;
    w->carried = word >> (total & 56);
    w->held = total & 7;
}

/* Which values' codes go on behind the first digit, the first, the second one-bit digit, the two-bit
 * and the three-bit digit. */
typedef struct {
    uint64_t first, second, third, fourth, escape;
} prefix_masks;

PREFIX_INLINE prefix_masks masks_of(uint64_t s0, uint64_t s1, uint64_t s2, uint64_t s3)
{
    prefix_masks m;
    m.fourth = s3;
    m.escape = s3 & s2 & s1 & s0;
    m.third = s3 | (s2 & (s1 | s0));
    m.second = s3 | s2;
    m.first = m.second | (s1 & s0);
    return m;
}

PREFIX_INLINE uint32_t bits_of(const prefix_masks *m, uint64_t raw_sign)
{
    return COUNT_BITS(m->first) + COUNT_BITS(m->second) + 2 * COUNT_BITS(m->third)
           + 3 * COUNT_BITS(m->fourth) + COUNT_BITS(m->escape & ~raw_sign);
}

/* ---- symbols ---- */
/* Makes escapes of the values that have not their channel's steady sign. */
PREFIX_INLINE void except(prefix_words *w, uint64_t negative, uint64_t raw_sign, uint64_t valid)
{
    const uint64_t other = (w->sign ^ negative) & ~raw_sign & valid;
    for (int k = 0; k < 4; k++) w->symbol[k] |= other;
}

/* Groups whose digits lie together: no digit's place depends on what the one before says, but for
 * how many there are. Arrays by word, so that what isn't moving bits is done for several groups at once. */
#define PREFIX_BATCH 64u
typedef struct {
    uint32_t begin, count; /* begin: groups of the stripe before it */
    uint64_t symbol[4][PREFIX_BATCH], sign[PREFIX_BATCH];
    uint64_t first[PREFIX_BATCH], second[PREFIX_BATCH], third[PREFIX_BATCH];
    uint64_t fourth[PREFIX_BATCH], escape[PREFIX_BATCH]; /* prefix_masks */
    uint64_t digit[5][PREFIX_BATCH]; /* two bits of the fourth, three of the fifth */
} prefix_batch;

/* ---- writing ---- */
/* Symbols to masks and digits; first digits go to `low` and `high`. */
PREFIX_INLINE void cut_symbols(prefix_batch *b, uint64_t *restrict low, uint64_t *restrict high)
{
    for (uint32_t i = 0; i < b->count; i++) {
        const uint64_t s0 = b->symbol[0][i], s1 = b->symbol[1][i], s2 = b->symbol[2][i],
                       s3 = b->symbol[3][i], middle = s2 & ~s3 & s1;
        const prefix_masks m = masks_of(s0, s1, s2, s3);
        low[i] = m.first | (s0 & ~s1);
        high[i] = m.first | (s1 & ~s0);
        b->first[i] = m.first, b->second[i] = m.second, b->third[i] = m.third;
        b->fourth[i] = m.fourth, b->escape[i] = m.escape;
        b->digit[0][i] = s3 | (middle & ~s0);
        b->digit[1][i] = s3 | (middle & s0);
    }
}

/* The planes that every row has, but those of the mantissa and bfloat16's low bits. */
PREFIX_INLINE void put_planes(const prefix_plan *plan, uint32_t group, uint64_t low, uint64_t high,
                              uint64_t sign, bit_writer *planes)
{
    if (plan->fp16) put_bits(planes, low & plan->valid[group], COUNT_BITS(plan->valid[group]));
    const uint32_t wide = plan->wide_count[group], signs = plan->sign_count[group];
    high = PACK_BITS(high, plan->wide[group]), sign = PACK_BITS(sign, plan->raw_sign[group]);
    if (wide + signs <= 56) {
        put_few(planes, high | sign << wide, wide + signs);
    } else {
        put_bits(planes, high, wide);
        put_bits(planes, sign, signs);
    }
}

PREFIX_INLINE void put_digits(const uint64_t *words, const uint64_t *masks, uint32_t count,
                              bit_writer *digits)
{
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t n = COUNT_BITS(masks[i]);
        if (n <= 56)
            put_few(digits, PACK_BITS(words[i], masks[i]), n);
        else
            put_bits(digits, PACK_BITS(words[i], masks[i]), n);
    }
}

/* Of `bits` bits: of each group first the lowest ones. */
PREFIX_INLINE void put_wide_digits(const uint64_t (*words)[PREFIX_BATCH], const uint64_t *masks,
                                   uint32_t count, uint32_t bits, bit_writer *digits)
{
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t n = COUNT_BITS(masks[i]);
        if (bits * n <= 56) {
            uint64_t all = 0;
            for (uint32_t k = 0; k < bits; k++) all |= PACK_BITS(words[k][i], masks[i]) << k * n;
            put_few(digits, all, bits * n);
        } else {
            for (uint32_t k = 0; k < bits; k++)
                put_bits(digits, PACK_BITS(words[k][i], masks[i]), n);
        }
    }
}

PREFIX_INLINE void put_batch(const prefix_plan *plan, const prefix_batch *b, bit_writer *digits)
{
    put_digits(b->second, b->first, b->count, digits);
    put_digits(b->third, b->second, b->count, digits);
    put_wide_digits(b->digit, b->third, b->count, 2, digits);
    put_wide_digits(b->symbol, b->fourth, b->count, 3, digits);
    for (uint32_t i = 0, g = b->begin % plan->groups; i < b->count; i++) {
        const uint64_t mask = b->escape[i] & ~plan->raw_sign[g];
        if (mask) put_bits(digits, PACK_BITS(b->sign[i], mask), COUNT_BITS(mask));
        if (++g == plan->groups) g = 0;
    }
}

/* The last bits of both; they meet within a byte. */
PREFIX_INLINE void prefix_parts_end(prefix_parts *parts, bit_writer *planes, bit_writer *digits)
{
    *digits->out = (uint8_t)digits->carried;
    parts->digit_bytes = (uint32_t)(digits->out - parts->digits) + (digits->held != 0);
    parts->digits[0] |= (uint8_t)planes->carried;
}

/* ---- reading ---- */
/* Of a group of the vector: what its planes hold in every row. */
typedef struct {
    uint64_t valid, wide, raw_sign, negative;
    uint32_t wide_count, sign_count;
} group_planes;

PREFIX_INLINE group_planes planes_of(const prefix_plan *plan, uint32_t group)
{
    return (group_planes){plan->valid[group],    plan->wide[group],       plan->raw_sign[group],
                          plan->negative[group], plan->wide_count[group], plan->sign_count[group]};
}

/* The planes of group i to its first digit (symbol[0], symbol[1]), its signs and the mask behind it.
 * `low`: the first digit's low bits. */
PREFIX_INLINE void get_planes(const group_planes *of, uint64_t low, const uint8_t *planes,
                              uint64_t at, prefix_batch *b, uint32_t i)
{
    uint64_t high, sign;
    if (of->wide_count + of->sign_count <= 57) {
        const uint64_t word = take_count(planes, at, 57);
        high = word, sign = word >> of->wide_count;
    } else {
        high = take_bits(planes, at), sign = take_bits(planes, at + of->wide_count);
    }
    high = SPREAD_BITS(high, of->wide);
    const uint64_t first = low & (high | ~of->wide) & of->valid;
    b->sign[i] = SPREAD_BITS(sign, of->raw_sign) | of->negative;
    b->first[i] = first;
    b->symbol[0][i] = low & ~first & of->valid;
    b->symbol[1][i] = high & ~first;
}

/* A digit of one bit of each group's values that have it; returns where they end. */
PREFIX_INLINE uint64_t get_digits(const uint8_t *planes, uint64_t at, const uint64_t *masks,
                                  uint32_t count, uint64_t *digits)
{
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t n = COUNT_BITS(masks[i]);
        digits[i] = SPREAD_BITS(take_count(planes, at, n), masks[i]);
        at += n;
    }
    return at;
}

/* Of `bits` bits: of each group first the lowest ones. */
PREFIX_INLINE uint64_t get_wide_digits(const uint8_t *planes, uint64_t at, const uint64_t *masks,
                                       uint32_t count, uint32_t bits,
                                       uint64_t (*digits)[PREFIX_BATCH])
{
    for (uint32_t i = 0; i < count; i++) {
        const uint64_t mask = masks[i];
        const uint32_t n = COUNT_BITS(mask);
        if (bits * n <= 57) {
            uint64_t word = take_count(planes, at, bits * n);
            for (uint32_t k = 0; k < bits; k++, word >>= n) digits[k][i] = SPREAD_BITS(word, mask);
        } else {
            for (uint32_t k = 0; k < bits; k++)
                digits[k][i] = SPREAD_BITS(take_count(planes, at + k * n, n), mask);
        }
        at += bits * n;
    }
    return at;
}

/* A sign of each escape in a steady channel. */
PREFIX_INLINE uint64_t get_escape_signs(const prefix_plan *plan, prefix_batch *b,
                                        const uint8_t *planes, uint64_t at)
{
    for (uint32_t i = 0, g = b->begin % plan->groups; i < b->count; i++) {
        const uint64_t mask = b->escape[i] & ~plan->raw_sign[g];
        if (mask) {
            b->sign[i] = (b->sign[i] & ~mask) | SPREAD_BITS(take_bits(planes, at), mask);
            at += COUNT_BITS(mask);
        }
        if (++g == plan->groups) g = 0;
    }
    return at;
}

/* The digits of a batch, of which get_planes() was called for every group; returns where they end:
 * behind `end` (bits) if they are too many. */
PREFIX_INLINE uint64_t get_batch(const prefix_plan *plan, prefix_batch *b, const uint8_t *planes,
                                 uint64_t at, uint64_t end)
{
    const uint32_t count = b->count;
    at = get_digits(planes, at, b->first, count, b->second);
    if (at > end) return at;
    at = get_digits(planes, at, b->second, count, b->third);
    if (at > end) return at;
    at = get_wide_digits(planes, at, b->third, count, 2, b->digit);
    if (at > end) return at;
    for (uint32_t i = 0; i < count; i++) b->fourth[i] = b->digit[0][i] & b->digit[1][i];
    at = get_wide_digits(planes, at, b->fourth, count, 3, b->digit + 2);
    for (uint32_t i = 0; i < count; i++) {
        const uint64_t d0 = b->digit[0][i], d1 = b->digit[1][i], fourth = b->fourth[i];
        const uint64_t only = b->first[i] & ~b->second[i], middle = b->third[i] & ~fourth;
        b->symbol[0][i] |= only | (middle & ~d0) | b->digit[2][i];
        b->symbol[1][i] |= only | (middle & (d0 | d1)) | b->digit[3][i];
        b->symbol[2][i] = (b->second[i] & ~fourth) | b->digit[4][i];
        b->symbol[3][i] = fourth;
        b->escape[i] = b->digit[2][i] & b->digit[3][i] & b->digit[4][i];
    }
    return at > end ? at : get_escape_signs(plan, b, planes, at);
}
#endif
