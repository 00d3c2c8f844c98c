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

/* Which values' codes go on behind the first digit, the first, the second one-bit digit, the two-bit
 * and the three-bit digit. */
typedef struct {
    uint64_t first, second, third, fourth, escape;
} prefix_masks;

PREFIX_INLINE prefix_masks masks_of(const uint64_t symbol[4])
{
    prefix_masks m;
    m.fourth = symbol[3];
    m.escape = symbol[3] & symbol[2] & symbol[1] & symbol[0];
    m.third = symbol[3] | (symbol[2] & (symbol[1] | symbol[0]));
    m.second = symbol[3] | symbol[2];
    m.first = m.second | (symbol[1] & symbol[0]);
    return m;
}

PREFIX_INLINE uint32_t bits_of(const prefix_masks *m, uint64_t raw_sign)
{
    return COUNT_BITS(m->first) + COUNT_BITS(m->second) + 2 * COUNT_BITS(m->third)
           + 3 * COUNT_BITS(m->fourth) + COUNT_BITS(m->escape & ~raw_sign);
}

/* Makes escapes of the values that have not their channel's steady sign. */
PREFIX_INLINE void except(const prefix_plan *plan, uint32_t group, prefix_words *w)
{
    uint64_t other =
        (w->sign ^ plan->negative[group]) & ~plan->raw_sign[group] & plan->valid[group];
    for (int k = 0; k < 4; k++) w->symbol[k] |= other;
}

/* The planes that every row has, but those of the low bits; returns the first digit's low bits. */
PREFIX_INLINE uint64_t put_planes(const prefix_plan *plan, uint32_t group, const prefix_words *w,
                                  const prefix_masks *m, bit_writer *planes)
{
    const uint64_t wide = plan->wide[group], raw_sign = plan->raw_sign[group];
    uint64_t low = m->first | (w->symbol[0] & ~w->symbol[1]);
    uint64_t high = m->first | (w->symbol[1] & ~w->symbol[0]);
    if (plan->fp16) put_bits(planes, low & plan->valid[group], COUNT_BITS(plan->valid[group]));
    put_bits(planes, PACK_BITS(high, wide), plan->wide_count[group]);
    put_bits(planes, PACK_BITS(w->sign, raw_sign), plan->sign_count[group]);
    return low;
}

/* Groups whose digits lie together: no digit's place depends on what the one before says, but for
 * how many there are. */
#define PREFIX_BATCH 64u
typedef struct {
    uint32_t count;
    uint32_t group[PREFIX_BATCH]; /* of the vector */
    prefix_words words[PREFIX_BATCH];
    prefix_masks masks[PREFIX_BATCH];
} prefix_batch;

/* Where the values of a batch come from and go to. */
typedef struct {
    prefix_batch batch;
    uint64_t mantissa[PREFIX_BATCH][3];
    const uint8_t *low[PREFIX_BATCH]; /* of each group's row */
    uint8_t *row[PREFIX_BATCH];
} batch_places;

PREFIX_INLINE void put_batch(const prefix_plan *plan, prefix_batch *b, bit_writer *digits)
{
    for (uint32_t i = 0; i < b->count; i++)
        put_bits(digits, PACK_BITS(b->masks[i].second, b->masks[i].first),
                 COUNT_BITS(b->masks[i].first));
    for (uint32_t i = 0; i < b->count; i++)
        put_bits(digits, PACK_BITS(b->masks[i].third, b->masks[i].second),
                 COUNT_BITS(b->masks[i].second));
    for (uint32_t i = 0; i < b->count; i++) {
        const uint64_t *s = b->words[i].symbol, mask = b->masks[i].third;
        const uint64_t middle = s[2] & ~s[3] & s[1];
        put_bits(digits, PACK_BITS(s[3] | (middle & ~s[0]), mask), COUNT_BITS(mask));
        put_bits(digits, PACK_BITS(s[3] | (middle & s[0]), mask), COUNT_BITS(mask));
    }
    for (uint32_t i = 0; i < b->count; i++)
        for (int k = 0; b->masks[i].fourth && k < 3; k++)
            put_bits(digits, PACK_BITS(b->words[i].symbol[k], b->masks[i].fourth),
                     COUNT_BITS(b->masks[i].fourth));
    for (uint32_t i = 0; i < b->count; i++) {
        const uint64_t mask = b->masks[i].escape & ~plan->raw_sign[b->group[i]];
        if (mask) put_bits(digits, PACK_BITS(b->words[i].sign, mask), COUNT_BITS(mask));
    }
    b->count = 0;
}

/* The last bits of both; they meet within a byte. */
PREFIX_INLINE void prefix_parts_end(prefix_parts *parts, bit_writer *planes, bit_writer *digits)
{
    *digits->out = (uint8_t)digits->carried;
    parts->digit_bytes = (uint32_t)(digits->out - parts->digits) + (digits->held != 0);
    parts->digits[0] |= (uint8_t)planes->carried;
}

/* The planes of a group to its first digit (symbol[0], symbol[1]), its signs and masks.first.
 * `low`: the first digit's low bits. */
PREFIX_INLINE void get_planes(const prefix_plan *plan, uint32_t group, uint64_t low,
                              const uint8_t *planes, uint64_t at, prefix_words *w, prefix_masks *m)
{
    const uint64_t wide = plan->wide[group];
    const uint64_t high = SPREAD_BITS(take_bits(planes, at), wide);
    w->sign = SPREAD_BITS(take_bits(planes, at + plan->wide_count[group]), plan->raw_sign[group])
              | plan->negative[group];
    m->first = low & (high | ~wide) & plan->valid[group];
    w->symbol[0] = low & ~m->first & plan->valid[group];
    w->symbol[1] = high & ~m->first;
}

/* The fifth digit, and the signs of escapes of steady channels. */
PREFIX_INLINE uint64_t get_last_digits(const prefix_plan *plan, prefix_batch *b,
                                       const uint8_t *planes, uint64_t at)
{
    uint64_t any = 0;
    for (uint32_t i = 0; i < b->count; i++) {
        const uint64_t mask = b->masks[i].fourth;
        const uint32_t n = COUNT_BITS(mask);
        uint64_t *s = b->words[i].symbol, bits = take_bits(planes, at), d0, d1, d2;
        d0 = SPREAD_BITS(bits, mask);
        if (n <= 21) {
            d1 = SPREAD_BITS(bits >> n, mask);
            d2 = SPREAD_BITS(bits >> 2 * n, mask);
        } else {
            d1 = SPREAD_BITS(take_bits(planes, at + n), mask);
            d2 = SPREAD_BITS(take_bits(planes, at + 2 * n), mask);
        }
        at += 3 * n;
        s[0] |= d0, s[1] |= d1, s[2] |= d2, s[3] = mask;
        b->masks[i].escape = d0 & d1 & d2;
        any |= b->masks[i].escape & ~plan->raw_sign[b->group[i]];
    }
    for (uint32_t i = 0; any && i < b->count; i++) {
        const uint64_t mask = b->masks[i].escape & ~plan->raw_sign[b->group[i]];
        if (!mask) continue;
        b->words[i].sign = (b->words[i].sign & ~mask) | SPREAD_BITS(take_bits(planes, at), mask);
        at += COUNT_BITS(mask);
    }
    return at;
}

/* The digits of a batch, of which get_planes() was called for every group; returns where they end:
 * behind `end` (bits) if they are too many. */
PREFIX_INLINE uint64_t get_batch(const prefix_plan *plan, prefix_batch *b, const uint8_t *planes,
                                 uint64_t at, uint64_t end)
{
    for (uint32_t i = 0; i < b->count; i++) {
        b->masks[i].second = SPREAD_BITS(take_bits(planes, at), b->masks[i].first);
        at += COUNT_BITS(b->masks[i].first);
    }
    if (at > end) return at;
    for (uint32_t i = 0; i < b->count; i++) {
        b->masks[i].third = SPREAD_BITS(take_bits(planes, at), b->masks[i].second);
        at += COUNT_BITS(b->masks[i].second);
    }
    if (at > end) return at;
    for (uint32_t i = 0; i < b->count; i++) {
        const uint64_t mask = b->masks[i].third, only = b->masks[i].first & ~b->masks[i].second;
        const uint32_t n = COUNT_BITS(mask);
        uint64_t *s = b->words[i].symbol, bits = take_bits(planes, at);
        uint64_t d0 = SPREAD_BITS(bits, mask);
        uint64_t d1 = SPREAD_BITS(n <= 32 ? bits >> (n & 63) : take_bits(planes, at + n), mask);
        at += 2 * n;
        const uint64_t fourth = d0 & d1, middle = mask & ~fourth;
        b->masks[i].fourth = fourth;
        s[0] |= only | (middle & ~d0);
        s[1] |= only | (middle & (d0 | d1));
        s[2] = b->masks[i].second & ~fourth;
    }
    return at > end ? at : get_last_digits(plan, b, planes, at);
}
#endif
