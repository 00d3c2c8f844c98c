/* codec_prefix.c: the prefix code in bit planes of one stripe: portable code and the choice of path.
 *
 * A stripe of `count` vectors of n values, n = vector_bytes / 2:
 *
 *   low bytes of row 0 | row 1 | ... | planes of row 0 | 1 | ... | digits | escapes
 *
 *   low byte  bf16: mantissa | low bit of the first digit << 7;  fp16: mantissa bits 0..7; e4m3 and
 *             e5m2: none
 *   planes    for every 64 values (fewer at the end): all but bf16: mantissa bit 8, bit 9, e4m3 only:
 *             bit 7, low bit of the first digit; then the first digit's high bits of wide channels; then the signs of
 *             channels without a steady one. One bit a value, lowest first, without gaps
 *   digits    for every 64 such groups of values: all second digits, all third ones, the fourth ones
 *             (of each group the low bits, then the high ones), the fifth ones (three bits likewise),
 *             the signs of escapes of steady channels: each of those values only whose code goes on
 *             so far. They follow the planes at the next bit; zeros fill the last byte
 *   escapes   an exponent each, a byte, the last one first (so that the first is the stripe's last
 *             byte), in order of row, then value
 *
 *   symbol  wide channel                    narrow channel
 *   0-2     first digit 0, 1, 2 (2 bits)    first digit 0 (1 bit): symbol 0
 *   3       3, then 0                       1, then 0
 *   4       3, 1, 0                         1, 1, 0
 *   5-7     3, 1, 1, 0..2 (2 bits)          1, 1, 1, 0..2
 *   8-14    3, 1, 1, 3, 0..6 (3 bits)       1, 1, 1, 3, 0..6
 *   15      3, 1, 1, 3, 7: an escape        1, 1, 1, 3, 7
 *
 * One-byte types come as 16-bit values (codec_halves.c): e4m3 as sign << 15 | exponent << 10 |
 * mantissa << 7, e5m2 as its byte << 8; the other bits are zero and not stored.
 *
 * A symbol means a distance of the exponent below the channel's base, by kind (table set 1, modulo
 * 256, in fp16 32). Parameters of a stream, in the record's header: a base, then a byte for each
 * channel: base - delta is its base (delta 31: 0); its kind; whether its sign is steady, and which.
 * A value with another sign than its steady channel's is an escape, whatever its exponent.
 *
 * Invariants
 *  - bit-exact for every 16-bit pattern, whatever the parameters;
 *  - decoding reads nothing outside in[0, length) and writes whole wanted rows only, whatever the
 *    bytes are; it takes exactly what the encoder gives: escapes only where no other code is, zeros
 *    in padding.
 */
#include "codec_prefix.h"
#include "codec_prefix_planes.h"
#include "cpu.h"

/* The processor's path of a function that has three. */
#if defined(__x86_64__)
#define RUN(name, ...)                                                                             \
    (fkv_cpu_has.avx512 ? fkv_prefix_##name##_avx512(__VA_ARGS__)                                  \
     : fkv_cpu_has.avx2 ? fkv_prefix_##name##_avx2(__VA_ARGS__)                                    \
                        : fkv_prefix_##name##_portable(__VA_ARGS__))
#else
#define RUN(name, ...) fkv_prefix_##name##_portable(__VA_ARGS__)
#endif

#define NONE PREFIX_NONE
const int8_t fkv_prefix_distance[2][16] = {
    {0, NONE, NONE, 1, 2, 3, -1, 4, 5, 6, -2, 7, 8, 9, 10, NONE},
    {0, 1, 2, 3, 4, -1, 5, 6, 7, 8, -2, 9, 10, -3, -4, NONE},
};
const uint8_t fkv_prefix_bits[2][16] = {
    {1, 0, 0, 2, 3, 5, 5, 5, 8, 8, 8, 8, 8, 8, 8, 16},
    {2, 2, 2, 3, 4, 6, 6, 6, 9, 9, 9, 9, 9, 9, 9, 17},
};
uint8_t fkv_prefix_symbol[2][16];

__attribute__((constructor)) static void make_symbols(void)
{
    memset(fkv_prefix_symbol, PREFIX_ESCAPE, sizeof fkv_prefix_symbol);
    for (int kind = 0; kind < 2; kind++)
        for (uint8_t s = 0; s < PREFIX_SYMBOLS; s++)
            if (fkv_prefix_distance[kind][s] != NONE)
                fkv_prefix_symbol[kind][fkv_prefix_distance[kind][s] - PREFIX_DISTANCE_FIRST] = s;
    fkv_prefix_make_prices();
}

/* ---- plans ---- */
/* Which of 64 bytes have this bit. */
static uint64_t bits_of_bytes(const uint8_t *bytes, uint32_t bit)
{
    uint64_t result = 0, word;
    for (uint32_t i = 0; i < 8; i++) {
        memcpy(&word, bytes + 8 * i, 8);
        word = word / bit & 0x0101010101010101; /* each in the lowest bit of its byte */
        result |= (word * 0x0102040810204080 >> 56) << 8 * i;
    }
    return result;
}

bool fkv_prefix_plan_make(prefix_plan *plan, const uint8_t *parameters, uint32_t vector_bytes,
                          uint32_t mode)
{
    const uint32_t values = vector_bytes / 2, base = *parameters++;
    const bool fp16 = mode != FKV_STREAM_PREFIX_BF16;
    const uint32_t exponent_max = prefix_exponent_max(mode);
    if (!values || values > PREFIX_VALUES_MAX || vector_bytes % 2 || base > exponent_max)
        return false;
    plan->values = values;
    plan->groups = (values + PREFIX_GROUP - 1) / PREFIX_GROUP;
    plan->fp16 = fp16;
    plan->exponent_max = exponent_max;
    plan->mantissa_planes = prefix_mantissa_planes(mode);
    plan->static_bits = fp16 ? (plan->mantissa_planes + 1) * values : 0;
    plan->low_bytes = !fp16 || mode == FKV_STREAM_PREFIX_FP16 ? values : 0;
    for (uint32_t g = 0; g < plan->groups; g++) {
        uint32_t first = g * PREFIX_GROUP;
        uint32_t in_use = values - first < PREFIX_GROUP ? values - first : PREFIX_GROUP;
        uint8_t p[PREFIX_GROUP] = {0};
        memcpy(p, parameters + first, in_use);
        for (uint32_t i = 0; i < PREFIX_GROUP; i++) {
            const uint8_t delta = p[i] & PREFIX_DELTA_MASK;
            const uint8_t own = (uint8_t)((base - delta) & exponent_max);
            plan->base[first + i] = delta == PREFIX_DELTA_ZERO ? 0 : own;
            plan->kind[first + i] = p[i] & PREFIX_WIDE ? 0xFF : 0;
        }
        const uint64_t wide = bits_of_bytes(p, PREFIX_WIDE),
                       steady = bits_of_bytes(p, PREFIX_STEADY);
        const uint64_t negative = bits_of_bytes(p, PREFIX_NEGATIVE);
        if (negative & ~steady) return false;
        plan->valid[g] = UINT64_MAX >> (PREFIX_GROUP - in_use);
        plan->wide[g] = wide;
        plan->raw_sign[g] = plan->valid[g] & ~steady;
        plan->negative[g] = negative;
        plan->wide_count[g] = (uint8_t)COUNT_BITS(wide);
        plan->sign_count[g] = (uint8_t)COUNT_BITS(plan->raw_sign[g]);
        plan->static_bits += plan->wide_count[g] + (uint32_t)plan->sign_count[g];
    }
    return true;
}

/* ---- counting ---- */
static bool far_below(const prefix_counts *counts, uint32_t i, uint32_t count)
{
    return counts->counts[15][i] > count / 2 && counts->top[i] >= 15;
}

/* Column i; where most values of a channel lie far below its highest ones, counts again from those. */
static void count_channel(const uint64_t *rows, uint32_t count, uint32_t channel, uint32_t i,
                          bool fp16, prefix_counts *counts)
{
    uint32_t limit = 256;
    for (int attempt = 0; attempt < 4; attempt++) {
        uint32_t top = 0;
        for (uint32_t r = 0; r < count; r++) {
            const uint8_t *row = (const uint8_t *)(uintptr_t)rows[r];
            uint32_t exponent = exponent_of(value_at(row + 2 * channel), fp16);
            if (exponent < limit && exponent > top) top = exponent;
        }
        for (uint32_t k = 0; k < 16; k++) counts->counts[k][i] = 0;
        counts->negatives[i] = 0;
        for (uint32_t r = 0; r < count; r++) {
            uint16_t value = value_at((const uint8_t *)(uintptr_t)rows[r] + 2 * channel);
            uint32_t below = top - exponent_of(value, fp16);
            counts->counts[below < 15 ? below : 15][i]++;
            counts->negatives[i] = (uint16_t)(counts->negatives[i] + (value >> 15));
        }
        counts->top[i] = (uint8_t)top;
        if (!far_below(counts, i, count)) return;
        limit = top - 14; /* a few outliers on top of what matters */
    }
}

void fkv_prefix_count(const uint64_t *rows, uint32_t count, uint32_t values, uint32_t first,
                      bool fp16, prefix_counts *counts)
{
    const uint32_t channels = values - first < PREFIX_STEP ? values - first : PREFIX_STEP;
#if defined(__x86_64__)
    if (fkv_cpu_has.avx2) {
        if (fkv_cpu_has.avx512)
            fkv_prefix_count_avx512(rows, count, values, first, fp16, counts);
        else
            fkv_prefix_count_avx2(rows, count, values, first, fp16, counts);
        for (uint32_t i = 0; i < channels; i++)
            if (far_below(counts, i, count)) count_channel(rows, count, first + i, i, fp16, counts);
        return;
    }
#endif
    for (uint32_t i = 0; i < channels; i++) count_channel(rows, count, first + i, i, fp16, counts);
}

/* ---- encoding ---- */
void fkv_prefix_plan_costs(const uint64_t *rows, uint32_t count, const prefix_plan *plan,
                           uint16_t *bits)
{
    RUN(costs, rows, count, plan, bits);
}

void fkv_prefix_costs(const uint64_t *rows, uint32_t count, uint32_t vector_bytes, uint32_t mode,
                      const uint8_t *parameters, uint16_t *bits)
{
    prefix_plan plan;
    if (fkv_prefix_plan_make(&plan, parameters, vector_bytes, mode))
        fkv_prefix_plan_costs(rows, count, &plan, bits);
}

/* A stripe that fits a page has no more than this in its parts; others are refused. */
static bool fits(uint32_t count, const prefix_plan *plan)
{
    return (uint64_t)count * (8 * plan->low_bytes + plan->static_bits) <= FKV_PAGE_BYTES * 8;
}

uint32_t fkv_prefix_plan_encode(const uint64_t *rows, uint32_t count, const prefix_plan *plan,
                                uint8_t *out)
{
    prefix_parts parts;
    if (!fits(count, plan)) return 0;
    parts.low = out;
    parts.escape_count = 0;
    parts.digits_held = count * plan->static_bits % 8;
    RUN(encode, rows, count, plan, &parts);
    uint32_t planes = count * plan->static_bits / 8;
    out += count * plan->low_bytes;
    memcpy(out, parts.planes, planes);
    memcpy(out + planes, parts.digits, parts.digit_bytes);
    out += planes + parts.digit_bytes;
    for (uint32_t i = parts.escape_count; i > 0; i--) *out++ = parts.escapes[i - 1];
    return (uint32_t)(out - parts.low);
}

uint32_t fkv_prefix_encode(const uint64_t *rows, uint32_t count, uint32_t vector_bytes,
                           uint32_t mode, const uint8_t *parameters, uint8_t *out)
{
    prefix_plan plan;
    if (!fkv_prefix_plan_make(&plan, parameters, vector_bytes, mode)) return 0;
    return fkv_prefix_plan_encode(rows, count, &plan, out);
}

/* ---- decoding ---- */
static bool patch_one(const prefix_plan *plan, uint32_t channel, uint32_t exponent, bool exception,
                      uint8_t *row)
{
    if (exponent > plan->exponent_max) return false;
    if (!exception && prefix_symbol(exponent, plan, channel) != PREFIX_ESCAPE) return false;
    if (!row) return true;
    uint32_t value = value_at(row + 2 * channel);
    value = plan->fp16 ? (value & 0x83FF) | exponent << 10 : (value & 0x807F) | exponent << 7;
    uint16_t narrow = (uint16_t)value;
    memcpy(row + 2 * channel, &narrow, 2);
    return true;
}

bool fkv_prefix_patch_group(uint64_t escape, uint32_t group, const prefix_plan *plan, uint64_t sign,
                            const uint8_t *begin, const uint8_t **escapes, uint8_t *row)
{
    const uint64_t exceptions = (sign ^ plan->negative[group]) & ~plan->raw_sign[group];
    for (; escape; escape &= escape - 1) {
        uint32_t i = (uint32_t)__builtin_ctzll(escape);
        if (*escapes == begin) return false;
        *escapes -= 1;
        if (!patch_one(plan, group * PREFIX_GROUP + i, **escapes, exceptions >> i & 1, row))
            return false;
    }
    return true;
}

int fkv_prefix_plan_decode(const uint8_t *in, uint32_t length, uint32_t count,
                           const prefix_plan *plan, const uint64_t *rows)
{
    uint8_t planes[PREFIX_BITS_ROOM];
    const uint8_t *begin = in + (size_t)count * plan->low_bytes, *end = in + length, *escapes;
    uint64_t bits;
    if (!count || length > FKV_PAGE_BYTES || count > FKV_PAGE_BYTES) return -1;
    if (!fits(count, plan)
        || (uint64_t)count * (8 * plan->low_bytes + plan->static_bits) > (uint64_t)length * 8)
        return -1;
    /* A copy, so that words can be loaded at its end. */
    memcpy(planes, begin, (size_t)(end - begin));
    memset(planes + (end - begin), 0, PREFIX_LOAD_ROOM);
    escapes = RUN(decode, in, count, plan, planes, &bits, end, rows);
    if (!escapes || (uint64_t)(escapes - begin) != (bits + 7) / 8) return -1;
    return bits % 8 && planes[bits / 8] >> bits % 8 ? -1 : 0;
}

int fkv_prefix_decode(const uint8_t *in, uint32_t length, uint32_t count, uint32_t vector_bytes,
                      uint32_t mode, const uint8_t *parameters, const uint64_t *rows)
{
    prefix_plan plan;
    if (!prefix_mode(mode)) return -1;
    if (!fkv_prefix_plan_make(&plan, parameters, vector_bytes, mode)) return -1;
    return fkv_prefix_plan_decode(in, length, count, &plan, rows);
}
