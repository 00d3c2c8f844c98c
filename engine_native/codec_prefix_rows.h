/* codec_prefix_rows.h: stripes of the prefix code in batches of groups; compiled once for each path.
 *
 * The path's file has before it, for a group of 64 values:
 *
 *   group_lanes    what the group's channels have alike in all rows; lanes_of() makes it
 *   group_bytes    a byte of each value; low_part: those, and bits of the mantissa (all but bfloat16)
 *   group_words()  a row's symbols and signs, and its low bytes if they are asked for
 *   store_low(), add_tops()  low bytes to their place, then bits 7 from a word
 *   load_low(), low_of_plane(), tops_of()  low bytes, bytes of bit 7 alone, and their bits 7
 *   merge_group()  a batch's words and low bytes to values
 *
 * A batch is 64 groups in the order of rows, so that each group of the vector comes again after
 * plan->groups: loops go over one such group's rows, with its lanes in registers.
 *
 * Invariants
 *  - every path gives the same costs, bytes and verdicts;
 *  - nothing outside a row or the input is touched. */
#ifndef FLASHKV_CODEC_PREFIX_ROWS_H
#define FLASHKV_CODEC_PREFIX_ROWS_H
#include "codec_prefix_planes.h"

/* Of the group that has `at` before it in the stripe: which of the vector, and of which row. */
PREFIX_INLINE uint32_t group_of(const prefix_plan *plan, uint32_t at) { return at % plan->groups; }
PREFIX_INLINE uint32_t row_of(const prefix_plan *plan, uint32_t at) { return at / plan->groups; }

/* The first place in a batch, which begins at `begin`, that has this group of the vector. */
PREFIX_INLINE uint32_t first_place(const prefix_plan *plan, uint32_t begin, uint32_t group)
{
    const uint32_t g = group_of(plan, begin);
    return group >= g ? group - g : group + plan->groups - g;
}

/* A batch and the bits of mantissas that lie in planes: of all but bfloat16. */
typedef struct {
    prefix_batch batch;
    uint64_t mantissa[PREFIX_BATCH][3];
} batch_values;

/* ---- encoding ---- */
PREFIX_INLINE void costs_of(const uint64_t *rows, uint32_t count, const prefix_plan *plan,
                            bool fp16, uint16_t *bits)
{
    for (uint32_t r = 0; r < count; r++)
        bits[r] = (uint16_t)(8 * plan->low_bytes + plan->static_bits);
    for (uint32_t g = 0; g < plan->groups; g++) {
        const group_lanes lanes = lanes_of(plan, g);
        const uint64_t raw_sign = plan->raw_sign[g];
        for (uint32_t r = 0; r < count; r++) {
            prefix_words w;
            group_words((const uint8_t *)(uintptr_t)rows[r], &lanes, fp16, &w, NULL);
            prefix_masks m = masks_of(w.symbol[0], w.symbol[1], w.symbol[2], w.symbol[3]);
            bits[r] = (uint16_t)(bits[r] + bits_of(&m, raw_sign) + 8 * COUNT_BITS(m.escape));
        }
    }
}

typedef struct {
    bit_writer planes, digits;
} stripe_writers;

/* Symbols, signs and low bytes of a batch's values. */
PREFIX_INLINE void take_batch(const uint64_t *rows, const prefix_plan *plan, bool fp16,
                              batch_values *b, uint8_t *low_out)
{
    for (uint32_t g = 0; g < plan->groups; g++) {
        const group_lanes lanes = lanes_of(plan, g);
        uint32_t i = first_place(plan, b->batch.begin, g);
        uint32_t r = row_of(plan, b->batch.begin + i);
        for (; i < b->batch.count; i += plan->groups, r++) {
            prefix_words w;
            low_part low;
            group_words((const uint8_t *)(uintptr_t)rows[r], &lanes, fp16, &w, &low);
            if (!fp16 || plan->low_bytes)
                store_low(low_out + r * plan->low_bytes, &lanes, &low.bytes);
            for (int k = 0; fp16 && k < 3; k++) b->mantissa[i][k] = low.mantissa[k];
            for (int k = 0; k < 4; k++) b->batch.symbol[k][i] = w.symbol[k];
            b->batch.sign[i] = w.sign;
        }
    }
}

PREFIX_INLINE void put_escapes(const uint64_t *rows, const prefix_plan *plan, bool fp16,
                               const prefix_batch *b, prefix_parts *parts)
{
    for (uint32_t i = 0; i < b->count; i++)
        for (uint64_t left = b->escape[i]; left; left &= left - 1) {
            const uint32_t at = b->begin + i, bit = (uint32_t)__builtin_ctzll(left);
            const uint8_t *row = (const uint8_t *)(uintptr_t)rows[row_of(plan, at)];
            const uint16_t value = value_at(row + 2 * (group_of(plan, at) * PREFIX_GROUP + bit));
            parts->escapes[parts->escape_count++] = (uint8_t)exponent_of(value, fp16);
        }
}

PREFIX_INLINE void encode_batch(const uint64_t *rows, const prefix_plan *plan, bool fp16,
                                batch_values *b, stripe_writers *to, prefix_parts *parts)
{
    uint64_t low[PREFIX_BATCH], high[PREFIX_BATCH];
    take_batch(rows, plan, fp16, b, parts->low);
    cut_symbols(&b->batch, low, high);
    for (uint32_t i = 0, g = group_of(plan, b->batch.begin); i < b->batch.count; i++) {
        for (uint32_t k = 0; fp16 && k < plan->mantissa_planes; k++)
            put_bits(&to->planes, b->mantissa[i][k], COUNT_BITS(plan->valid[g]));
        put_planes(plan, g, low[i], high[i], b->batch.sign[i], &to->planes);
        if (++g == plan->groups) g = 0;
    }
    for (uint32_t g = 0; !fp16 && g < plan->groups; g++) {
        const group_lanes lanes = lanes_of(plan, g);
        uint32_t i = first_place(plan, b->batch.begin, g);
        uint8_t *out = parts->low + row_of(plan, b->batch.begin + i) * plan->low_bytes;
        for (; i < b->batch.count; i += plan->groups, out += plan->low_bytes)
            add_tops(out, &lanes, low[i]);
    }
    put_escapes(rows, plan, fp16, &b->batch, parts);
    put_batch(plan, &b->batch, &to->digits);
}

PREFIX_INLINE void encode(const uint64_t *rows, uint32_t count, const prefix_plan *plan, bool fp16,
                          prefix_parts *parts)
{
    const uint32_t groups = count * plan->groups;
    stripe_writers to = {{parts->planes, 0, 0}, {parts->digits, 0, parts->digits_held}};
    batch_values b;
    for (b.batch.begin = 0; b.batch.begin < groups; b.batch.begin += PREFIX_BATCH) {
        b.batch.count =
            groups - b.batch.begin < PREFIX_BATCH ? groups - b.batch.begin : PREFIX_BATCH;
        encode_batch(rows, plan, fp16, &b, &to, parts);
    }
    prefix_parts_end(parts, &to.planes, &to.digits);
}

/* ---- decoding ---- */
/* The planes of a batch. A row's begin at a multiple of the bits that all rows have. */
PREFIX_INLINE void read_planes(const uint8_t *in, const prefix_plan *plan, bool fp16,
                               const uint8_t *planes, batch_values *b)
{
    uint32_t before = 0; /* bits of the groups before */
    for (uint32_t g = 0; g < plan->groups; g++) {
        const group_lanes lanes = lanes_of(plan, g);
        const group_planes of = planes_of(plan, g);
        const uint32_t in_use = COUNT_BITS(plan->valid[g]);
        const uint32_t step = plan->groups, row_bits = plan->static_bits;
        uint32_t i = first_place(plan, b->batch.begin, g);
        uint32_t r = row_of(plan, b->batch.begin + i);
        uint64_t at = (uint64_t)r * row_bits + before;
        const uint8_t *low_in = in + r * plan->low_bytes;
        for (; i < b->batch.count; i += step, at += row_bits, low_in += plan->low_bytes) {
            if (fp16) {
                uint64_t from = at;
                b->mantissa[i][2] = 0;
                for (uint32_t k = 0; k < plan->mantissa_planes; k++, from += in_use)
                    b->mantissa[i][k] = take_bits(planes, from);
                get_planes(&of, take_bits(planes, from), planes, from + in_use, &b->batch, i);
            } else {
                const group_bytes low = load_low(low_in, &lanes);
                get_planes(&of, tops_of(&low), planes, at, &b->batch, i);
            }
        }
        before += of.wide_count + of.sign_count + (fp16 ? (plan->mantissa_planes + 1) * in_use : 0);
    }
}

/* Puts a batch in place, then its escapes; false where they ran out or are not what they must be. */
PREFIX_INLINE bool place_batch(const uint8_t *in, const prefix_plan *plan, bool fp16,
                               const batch_values *b, const uint64_t *rows, const uint8_t *begin,
                               const uint8_t **escapes)
{
    for (uint32_t g = 0; g < plan->groups; g++) {
        const group_lanes lanes = lanes_of(plan, g);
        const uint32_t step = plan->groups, low_bytes = plan->low_bytes;
        uint32_t i = first_place(plan, b->batch.begin, g);
        uint32_t r = row_of(plan, b->batch.begin + i);
        for (; i < b->batch.count; i += step, r++) {
            uint8_t *row = (uint8_t *)(uintptr_t)rows[r];
            if (!row) continue;
            const group_bytes low = !fp16 || low_bytes ? load_low(in + r * low_bytes, &lanes)
                                                       : low_of_plane(b->mantissa[i][2]);
            merge_group(&b->batch, i, b->mantissa[i], &lanes, &low, fp16, row);
        }
    }
    uint32_t g = group_of(plan, b->batch.begin), r = row_of(plan, b->batch.begin);
    for (uint32_t i = 0; i < b->batch.count; i++) {
        if (b->batch.escape[i]
            && !fkv_prefix_patch_group(b->batch.escape[i], g, plan, b->batch.sign[i], begin,
                                       escapes, (uint8_t *)(uintptr_t)rows[r]))
            return false;
        if (++g == plan->groups) g = 0, r++;
    }
    return true;
}

PREFIX_INLINE const uint8_t *decode(const uint8_t *in, uint32_t count, const prefix_plan *plan,
                                    bool fp16, const uint8_t *planes, uint64_t *plane_bits,
                                    const uint8_t *end, const uint64_t *rows)
{
    const uint32_t groups = count * plan->groups;
    const uint8_t *begin = in + (size_t)count * plan->low_bytes;
    const uint64_t room_bits = (uint64_t)(end - begin) * 8;
    uint64_t at = (uint64_t)count * plan->static_bits;
    batch_values b;
    for (b.batch.begin = 0; b.batch.begin < groups; b.batch.begin += PREFIX_BATCH) {
        b.batch.count =
            groups - b.batch.begin < PREFIX_BATCH ? groups - b.batch.begin : PREFIX_BATCH;
        read_planes(in, plan, fp16, planes, &b);
        at = get_batch(plan, &b.batch, planes, at, room_bits);
        if (at > room_bits || !place_batch(in, plan, fp16, &b, rows, begin, &end)) return NULL;
    }
    *plane_bits = at;
    return end;
}

/* ---- the path's functions ---- */
#define PREFIX_DEFINE(suffix)                                                                      \
    PREFIX_TARGET void fkv_prefix_costs_##suffix(const uint64_t *rows, uint32_t count,             \
                                                 const prefix_plan *plan, uint16_t *bits)          \
    {                                                                                              \
        if (plan->fp16)                                                                            \
            costs_of(rows, count, plan, true, bits);                                               \
        else                                                                                       \
            costs_of(rows, count, plan, false, bits);                                              \
    }                                                                                              \
    PREFIX_TARGET void fkv_prefix_encode_##suffix(const uint64_t *rows, uint32_t count,            \
                                                  const prefix_plan *plan, prefix_parts *parts)    \
    {                                                                                              \
        if (plan->fp16)                                                                            \
            encode(rows, count, plan, true, parts);                                                \
        else                                                                                       \
            encode(rows, count, plan, false, parts);                                               \
    }                                                                                              \
    PREFIX_TARGET const uint8_t *fkv_prefix_decode_##suffix(                                       \
        const uint8_t *in, uint32_t count, const prefix_plan *plan, const uint8_t *planes,         \
        uint64_t *plane_bits, const uint8_t *end, const uint64_t *rows)                            \
    {                                                                                              \
        if (plan->fp16) return decode(in, count, plan, true, planes, plane_bits, end, rows);       \
        return decode(in, count, plan, false, planes, plane_bits, end, rows);                      \
    }
#endif
