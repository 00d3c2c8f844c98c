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
    memset(plan->base + values, 0, PREFIX_GROUP);
    memset(plan->kind + values, 0, PREFIX_GROUP);
    for (uint32_t g = 0; g < plan->groups; g++) {
        uint32_t first = g * PREFIX_GROUP;
        uint32_t in_use = values - first < PREFIX_GROUP ? values - first : PREFIX_GROUP;
        uint64_t wide = 0, steady = 0, negative = 0;
        for (uint32_t i = 0; i < in_use; i++) {
            uint32_t p = parameters[first + i], delta = p & PREFIX_DELTA_MASK;
            if ((p & PREFIX_NEGATIVE) && !(p & PREFIX_STEADY)) return false;
            plan->base[first + i] =
                delta == PREFIX_DELTA_ZERO ? 0 : (uint8_t)((base - delta) & exponent_max);
            plan->kind[first + i] = p & PREFIX_WIDE ? 0xFF : 0;
            wide |= (uint64_t)(p / PREFIX_WIDE & 1) << i;
            steady |= (uint64_t)(p / PREFIX_STEADY & 1) << i;
            negative |= (uint64_t)(p / PREFIX_NEGATIVE & 1) << i;
        }
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

/* ---- values ---- */
static inline uint16_t load16(const uint8_t *at)
{
    uint16_t value;
    memcpy(&value, at, 2);
    return value;
}

static inline uint32_t exponent_of(uint16_t value, bool fp16)
{
    return fp16 ? value >> 10 & 0x1F : value >> 7 & 0xFF;
}

static inline uint32_t symbol_of(uint32_t exponent, const prefix_plan *plan, uint32_t channel)
{
    uint32_t at =
        (plan->base[channel] - exponent - (uint32_t)PREFIX_DISTANCE_FIRST) & plan->exponent_max;
    return at < PREFIX_SYMBOLS ? fkv_prefix_symbol[plan->kind[channel] & 1][at] : PREFIX_ESCAPE;
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
            uint32_t exponent = exponent_of(load16(row + 2 * channel), fp16);
            if (exponent < limit && exponent > top) top = exponent;
        }
        for (uint32_t k = 0; k < 16; k++) counts->counts[k][i] = 0;
        counts->negatives[i] = 0;
        for (uint32_t r = 0; r < count; r++) {
            uint16_t value = load16((const uint8_t *)(uintptr_t)rows[r] + 2 * channel);
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
        fkv_prefix_count_avx2(rows, count, values, first, fp16, counts);
        for (uint32_t i = 0; i < channels; i++)
            if (far_below(counts, i, count)) count_channel(rows, count, first + i, i, fp16, counts);
        return;
    }
#endif
    for (uint32_t i = 0; i < channels; i++) count_channel(rows, count, first + i, i, fp16, counts);
}

/* ---- encoding ---- */
static void group_words(const uint8_t *row, uint32_t group, const prefix_plan *plan,
                        prefix_words *w)
{
    memset(w, 0, sizeof *w);
    for (uint32_t i = 0, c = group * PREFIX_GROUP; i < PREFIX_GROUP && c < plan->values; i++, c++) {
        uint16_t value = load16(row + 2 * c);
        uint32_t symbol = symbol_of(exponent_of(value, plan->fp16), plan, c);
        for (int k = 0; k < 4; k++) w->symbol[k] |= (uint64_t)(symbol >> k & 1) << i;
        w->sign |= (uint64_t)(value >> 15) << i;
    }
    except(plan, group, w);
}

static void costs_portable(const uint64_t *rows, uint32_t count, const prefix_plan *plan,
                           uint16_t *bits)
{
    for (uint32_t r = 0; r < count; r++) {
        uint32_t sum = 8 * plan->low_bytes + plan->static_bits;
        for (uint32_t g = 0; g < plan->groups; g++) {
            prefix_words w;
            group_words((const uint8_t *)(uintptr_t)rows[r], g, plan, &w);
            prefix_masks m = masks_of(w.symbol);
            sum += bits_of(&m, plan->raw_sign[g]) + 8 * COUNT_BITS(m.escape);
        }
        bits[r] = (uint16_t)sum;
    }
}

void fkv_prefix_plan_costs(const uint64_t *rows, uint32_t count, const prefix_plan *plan,
                           uint16_t *bits)
{
#if defined(__x86_64__)
    if (fkv_cpu_has.avx2) {
        fkv_prefix_costs_avx2(rows, count, plan, bits);
        return;
    }
#endif
    costs_portable(rows, count, plan, bits);
}

void fkv_prefix_costs(const uint64_t *rows, uint32_t count, uint32_t vector_bytes, uint32_t mode,
                      const uint8_t *parameters, uint16_t *bits)
{
    prefix_plan plan;
    if (fkv_prefix_plan_make(&plan, parameters, vector_bytes, mode))
        fkv_prefix_plan_costs(rows, count, &plan, bits);
}

static void low_bytes(const uint8_t *row, uint32_t first, uint32_t end, uint64_t low, uint8_t *out)
{
    for (uint32_t c = first; c < end; c++)
        out[c] = (uint8_t)((load16(row + 2 * c) & 0x7F) | (low >> (c - first) & 1) << 7);
}

/* All but bfloat16: the low bytes, if there are any, and the mantissa's planes. */
static void low_fp16(const uint8_t *row, uint32_t first, uint32_t end, const prefix_plan *plan,
                     uint8_t *out, bit_writer *planes)
{
    static const uint8_t bit_of[3] = {8, 9, 7};
    uint64_t words[3] = {0};
    for (uint32_t c = first; c < end; c++) {
        uint16_t value = load16(row + 2 * c);
        if (plan->low_bytes) out[c] = (uint8_t)value;
        for (int k = 0; k < 3; k++) words[k] |= (uint64_t)(value >> bit_of[k] & 1) << (c - first);
    }
    for (uint32_t k = 0; k < plan->mantissa_planes; k++) put_bits(planes, words[k], end - first);
}

static void encode_portable(const uint64_t *rows, uint32_t count, const prefix_plan *plan,
                            prefix_parts *parts)
{
    uint8_t *out = parts->low;
    bit_writer planes = {parts->planes, 0, 0}, digits = {parts->digits, 0, parts->digits_held};
    prefix_batch batch = {.count = 0};
    for (uint32_t r = 0; r < count; r++, out += plan->low_bytes) {
        const uint8_t *row = (const uint8_t *)(uintptr_t)rows[r];
        for (uint32_t g = 0; g < plan->groups; g++) {
            uint32_t first = g * PREFIX_GROUP, end = first + PREFIX_GROUP;
            prefix_words *w = &batch.words[batch.count];
            if (end > plan->values) end = plan->values;
            group_words(row, g, plan, w);
            prefix_masks m = masks_of(w->symbol);
            if (plan->fp16) low_fp16(row, first, end, plan, out, &planes);
            uint64_t low = put_planes(plan, g, w, &m, &planes);
            if (!plan->fp16) low_bytes(row, first, end, low, out);
            batch.masks[batch.count] = m;
            batch.group[batch.count++] = g;
            if (batch.count == PREFIX_BATCH) put_batch(plan, &batch, &digits);
            for (uint64_t left = m.escape; left; left &= left - 1) {
                uint32_t c = first + (uint32_t)__builtin_ctzll(left);
                parts->escapes[parts->escape_count++] =
                    (uint8_t)exponent_of(load16(row + 2 * c), plan->fp16);
            }
        }
    }
    put_batch(plan, &batch, &digits);
    prefix_parts_end(parts, &planes, &digits);
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
#if defined(__x86_64__)
    if (fkv_cpu_has.avx2)
        fkv_prefix_encode_avx2(rows, count, plan, &parts);
    else
#endif
        encode_portable(rows, count, plan, &parts);
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
    if (!exception && symbol_of(exponent, plan, channel) != PREFIX_ESCAPE) return false;
    if (!row) return true;
    uint32_t value = load16(row + 2 * channel);
    value = plan->fp16 ? (value & 0x83FF) | exponent << 10 : (value & 0x807F) | exponent << 7;
    uint16_t narrow = (uint16_t)value;
    memcpy(row + 2 * channel, &narrow, 2);
    return true;
}

static uint64_t low_word(const uint8_t *in, uint32_t first, uint32_t end)
{
    uint64_t low = 0;
    for (uint32_t c = first; c < end; c++) low |= (uint64_t)(in[c] >> 7) << (c - first);
    return low;
}

static void merge_group(const uint8_t *in, uint32_t first, uint32_t end, const prefix_plan *plan,
                        const prefix_words *w, const uint64_t mantissa[3], uint8_t *row)
{
    for (uint32_t c = first; c < end; c++) {
        uint32_t i = c - first, symbol = 0, value = (uint32_t)(w->sign >> i & 1) << 15;
        for (uint32_t k = 0; k < 4; k++) symbol |= (uint32_t)(w->symbol[k] >> i & 1) << k;
        int distance = fkv_prefix_distance[plan->kind[c] & 1][symbol];
        uint32_t exponent = ((uint32_t)plan->base[c] - (uint32_t)distance) & plan->exponent_max;
        if (plan->fp16)
            value |= exponent << 10 | (uint32_t)(mantissa[0] >> i & 1) << 8
                     | (uint32_t)(mantissa[1] >> i & 1) << 9
                     | (plan->low_bytes ? in[c] : (uint32_t)(mantissa[2] >> i & 1) << 7);
        else
            value |= exponent << 7 | (in[c] & 0x7F);
        uint16_t narrow = (uint16_t)value;
        memcpy(row + 2 * c, &narrow, 2);
    }
}

bool fkv_prefix_patch_group(uint64_t escape, uint32_t first, const prefix_plan *plan,
                            const prefix_words *w, const uint8_t *begin, const uint8_t **escapes,
                            uint8_t *row)
{
    const uint32_t g = first / PREFIX_GROUP;
    for (; escape; escape &= escape - 1) {
        uint32_t i = (uint32_t)__builtin_ctzll(escape);
        bool exception = ((w->sign ^ plan->negative[g]) & ~plan->raw_sign[g]) >> i & 1;
        if (*escapes == begin) return false;
        *escapes -= 1;
        if (!patch_one(plan, first + i, **escapes, exception, row)) return false;
    }
    return true;
}

/* Puts a batch in place, escapes too; false where they ran out or are not what they must be. */
static bool place_batch(const prefix_plan *plan, const batch_places *b, const uint8_t *begin,
                        const uint8_t **escapes)
{
    for (uint32_t i = 0; i < b->batch.count; i++) {
        uint32_t first = b->batch.group[i] * PREFIX_GROUP, stop = first + PREFIX_GROUP;
        if (stop > plan->values) stop = plan->values;
        const prefix_words *w = &b->batch.words[i];
        if (b->row[i]) merge_group(b->low[i], first, stop, plan, w, b->mantissa[i], b->row[i]);
        if (!fkv_prefix_patch_group(b->batch.masks[i].escape, first, plan, w, begin, escapes,
                                    b->row[i]))
            return false;
    }
    return true;
}

static const uint8_t *decode_portable(const uint8_t *in, uint32_t count, const prefix_plan *plan,
                                      const uint8_t *planes, uint64_t *plane_bits,
                                      const uint8_t *end, const uint64_t *rows)
{
    const uint8_t *begin = in + (size_t)count * plan->low_bytes;
    const uint64_t room_bits = (uint64_t)(end - begin) * 8;
    uint64_t plane_at = 0, at = (uint64_t)count * plan->static_bits;
    batch_places b = {.batch = {.count = 0}};
    for (uint32_t r = 0, g = 0; r < count;) {
        uint32_t i = b.batch.count++, first = g * PREFIX_GROUP, stop = first + PREFIX_GROUP;
        if (stop > plan->values) stop = plan->values;
        b.batch.group[i] = g, b.low[i] = in, b.row[i] = (uint8_t *)(uintptr_t)rows[r];
        uint64_t low;
        if (plan->fp16) {
            b.mantissa[i][2] = 0;
            for (uint32_t k = 0; k < plan->mantissa_planes; k++, plane_at += stop - first)
                b.mantissa[i][k] = take_bits(planes, plane_at);
            low = take_bits(planes, plane_at);
            plane_at += stop - first;
        } else {
            low = low_word(in, first, stop);
        }
        get_planes(plan, g, low, planes, plane_at, &b.batch.words[i], &b.batch.masks[i]);
        plane_at += plan->wide_count[g] + (uint32_t)plan->sign_count[g];
        if (++g == plan->groups) g = 0, r++, in += plan->low_bytes;
        if (b.batch.count < PREFIX_BATCH && r < count) continue;
        at = get_batch(plan, &b.batch, planes, at, room_bits);
        if (at > room_bits || !place_batch(plan, &b, begin, &end)) return NULL;
        b.batch.count = 0;
    }
    *plane_bits = at;
    return end;
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
#if defined(__x86_64__)
    if (fkv_cpu_has.avx2)
        escapes = fkv_prefix_decode_avx2(in, count, plan, planes, &bits, end, rows);
    else
#endif
        escapes = decode_portable(in, count, plan, planes, &bits, end, rows);
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
