/* codec_prefix_portable.c: the prefix code in bit planes value by value, for any processor; the format is in
 * codec_prefix.c.
 *
 * Invariant: what the other paths give, this one gives; their tests compare with it. */
#include "codec_prefix_planes.h"

/* What the channels of a group have alike in all rows. */
typedef struct {
    const prefix_plan *plan;
    uint32_t group, first, in_use; /* first, in_use: channels */
} group_lanes;

static group_lanes lanes_of(const prefix_plan *plan, uint32_t group)
{
    const uint32_t first = group * PREFIX_GROUP;
    return (group_lanes){plan, group, first,
                         plan->values - first < PREFIX_GROUP ? plan->values - first : PREFIX_GROUP};
}

/* A byte of each of a group's 64 values, in their order. */
typedef struct {
    uint8_t all[PREFIX_GROUP];
} group_bytes;

/* The low bytes as they are stored but for bit 7. */
typedef struct {
    group_bytes bytes;
    uint64_t mantissa[3]; /* all but bfloat16: bits 8, 9 and 7 */
} low_part;

/* ---- encoding ---- */
/* Symbols, signs and (low != NULL) low bytes of a group. */
static void group_words(const uint8_t *row, const group_lanes *lanes, bool fp16, prefix_words *w,
                        low_part *low)
{
    static const uint8_t bit_of[3] = {8, 9, 7};
    memset(w, 0, sizeof *w);
    if (low) memset(low, 0, sizeof *low);
    for (uint32_t i = 0, c = lanes->first; i < lanes->in_use; i++, c++) {
        const uint16_t value = value_at(row + 2 * c);
        const uint32_t symbol = prefix_symbol(exponent_of(value, fp16), lanes->plan, c);
        for (int k = 0; k < 4; k++) w->symbol[k] |= (uint64_t)(symbol >> k & 1) << i;
        w->sign |= (uint64_t)(value >> 15) << i;
        if (!low) continue;
        low->bytes.all[i] = (uint8_t)(fp16 ? value : value & 0x7F);
        for (int k = 0; k < 3; k++) low->mantissa[k] |= (uint64_t)(value >> bit_of[k] & 1) << i;
    }
    except(w, lanes->plan->negative[lanes->group], lanes->plan->raw_sign[lanes->group],
           lanes->plan->valid[lanes->group]);
}

static void store_low(uint8_t *out, const group_lanes *lanes, const group_bytes *low)
{
    memcpy(out + lanes->first, low->all, lanes->in_use);
}

static void add_tops(uint8_t *out, const group_lanes *lanes, uint64_t tops)
{
    for (uint32_t i = 0; i < lanes->in_use; i++)
        out[lanes->first + i] |= (uint8_t)((tops >> i & 1) << 7);
}

/* ---- decoding ---- */
static void merge_group(const prefix_batch *b, uint32_t i, const uint64_t mantissa[3],
                        const group_lanes *lanes, const group_bytes *low, bool fp16, uint8_t *row)
{
    const prefix_plan *plan = lanes->plan;
    for (uint32_t k = 0; k < lanes->in_use; k++) {
        const uint32_t c = lanes->first + k;
        uint32_t symbol = 0, value = (uint32_t)(b->sign[i] >> k & 1) << 15;
        for (uint32_t bit = 0; bit < 4; bit++)
            symbol |= (uint32_t)(b->symbol[bit][i] >> k & 1) << bit;
        int distance = fkv_prefix_distance[plan->kind[c] & 1][symbol];
        uint32_t exponent = ((uint32_t)plan->base[c] - (uint32_t)distance) & plan->exponent_max;
        if (fp16)
            value |= exponent << 10 | (uint32_t)(mantissa[0] >> k & 1) << 8
                     | (uint32_t)(mantissa[1] >> k & 1) << 9 | low->all[k];
        else
            value |= exponent << 7 | (low->all[k] & 0x7F);
        const uint16_t narrow = (uint16_t)value;
        memcpy(row + 2 * c, &narrow, 2);
    }
}

/* 64 low bytes of a group, those past its end zero. */
static group_bytes load_low(const uint8_t *in, const group_lanes *lanes)
{
    group_bytes low = {{0}};
    memcpy(low.all, in + lanes->first, lanes->in_use);
    return low;
}

/* The same where there are no low bytes: a plane holds their bit 7, or nothing does. */
static group_bytes low_of_plane(uint64_t plane)
{
    group_bytes low;
    for (uint32_t i = 0; i < PREFIX_GROUP; i++) low.all[i] = (uint8_t)((plane >> i & 1) << 7);
    return low;
}

/* Bit 7 of each. */
static uint64_t tops_of(const group_bytes *bytes)
{
    uint64_t tops = 0;
    for (uint32_t i = 0; i < PREFIX_GROUP; i++) tops |= (uint64_t)(bytes->all[i] >> 7) << i;
    return tops;
}

#include "codec_prefix_rows.h"
PREFIX_DEFINE(portable)
