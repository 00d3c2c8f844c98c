/* fuzz_delta.c: stripes of the token delta that no encoder wrote; and any vectors through it and back.
 *
 * Input: what to do, count of rows, bytes a row (16 bits), which rows are wanted (8 bits, repeated),
 * then the stripe or the rows.
 * Promises: nothing outside stripe and rows is touched; what is taken is just what the encoder gives
 * for those rows; every bit comes back, in as many bytes as the costs said; a stripe with a byte more
 * or less is refused.
 */
#include "fuzz_rows.h"

static int decode(const stripe_shape *s, const uint8_t *stripe, size_t length, const uint64_t *rows)
{
    return fkv_delta_decode(stripe, (uint32_t)length, s->count, s->vector_bytes, rows);
}

static uint8_t *encode(const stripe_shape *s, const uint64_t *rows, uint32_t *length)
{
    uint16_t costs[ROWS_MAX];
    uint64_t bits = 0;
    fkv_delta_costs(rows, s->count, s->vector_bytes, costs);
    for (uint32_t r = 0; r < s->count; r++) bits += costs[r];
    *length = (uint32_t)((bits + 7) / 8);
    uint8_t *stripe = exactly(*length);
    PROMISE(fkv_delta_encode(rows, s->count, s->vector_bytes, stripe) == *length);
    return stripe;
}

static void hostile(const stripe_shape *s, fuzz_input *in)
{
    size_t length;
    uint8_t *stripe = take_rest(in, &length);
    uint64_t some[ROWS_MAX], all[ROWS_MAX];
    uint32_t again;
    make_rows(s, some, false);
    make_rows(s, all, true);
    int verdict = decode(s, stripe, length, some);
    PROMISE(verdict == decode(s, stripe, length, all));
    if (verdict == 0) {
        same_rows(s, some, all);
        uint8_t *same = encode(s, all, &again);
        PROMISE(again == length && !memcmp(same, stripe, length));
        give_back(same, again);
    }
    free_rows(s, some), free_rows(s, all);
    give_back(stripe, length);
}

static void round_trip(const stripe_shape *s, fuzz_input *in)
{
    uint64_t rows[ROWS_MAX], back[ROWS_MAX];
    uint32_t length;
    make_rows(s, rows, true);
    for (uint32_t r = 0; r < s->count; r++)
        take(in, (uint8_t *)(uintptr_t)rows[r], s->vector_bytes);
    uint8_t *stripe = encode(s, rows, &length), *longer = exactly(length + 1u);
    uint8_t *shorter = copied(stripe, length - 1u);
    memcpy(longer, stripe, length);
    longer[length] = 0;
    make_rows(s, back, true);
    PROMISE(decode(s, stripe, length, back) == 0);
    same_rows(s, rows, back);
    PROMISE(decode(s, shorter, length - 1u, back) == -1);
    PROMISE(decode(s, longer, length + 1u, back) == -1);
    give_back(shorter, length - 1u), give_back(longer, length + 1u), give_back(stripe, length);
    free_rows(s, rows), free_rows(s, back);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_input in = {data, size};
    uint8_t control = take8(&in);
    stripe_shape s = {.count = 1 + take8(&in) % ROWS_MAX};
    s.vector_bytes = 1 + take16(&in) % 2048u;
    s.wanted = take8(&in);
    if (control & 1)
        round_trip(&s, &in);
    else
        hostile(&s, &in);
    return 0;
}
