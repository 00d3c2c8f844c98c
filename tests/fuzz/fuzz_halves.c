/* fuzz_halves.c: stripes of float32 and one-byte floats that no encoder wrote, on both code paths; and
 * any vectors through them and back.
 *
 * Input: mode (bits 0-2) and what to do (bit 3), count of rows, elements a row (16 bits), which rows
 * are wanted (8 bits, repeated), the parameters, then the stripe or the rows.
 * Promises: nothing outside stripe, parameters and rows is touched; the paths agree in verdict and
 * bytes; what is taken decodes to rows that are encoded to a stripe that decodes to them; every bit
 * comes back; a stripe with a byte more or less is refused.
 */
#include "fuzz_rows.h"

#define STRIPE_MAX (16 * FKV_PAGE_BYTES) /* more than the values of a page take, all escaped */

static bool is_short(uint32_t mode)
{
    return mode == FKV_STREAM_FXP_FP32_SHORT || mode == FKV_STREAM_PREFIX_FP32_SHORT;
}

static int decode(const stripe_shape *s, const uint8_t *stripe, size_t length, const uint64_t *rows)
{
    return fkv_halves_decode(stripe, (uint32_t)length, s->count, s->vector_bytes, s->mode,
                             s->parameters, rows);
}

/* The stripe of these rows, the same on both paths; NULL where it is refused. */
static uint8_t *encode(const stripe_shape *s, const uint64_t *rows, uint32_t *length)
{
    uint8_t *stripes[2];
    uint32_t lengths[2];
    for (int level = 0; level < 2; level++) {
        uint8_t *room = exactly(STRIPE_MAX);
        fkv_use_simd(level);
        lengths[level] =
            fkv_halves_encode(rows, s->count, s->vector_bytes, s->mode, s->parameters, room);
        PROMISE(lengths[level] <= STRIPE_MAX);
        stripes[level] = copied(room, lengths[level]);
        give_back(room, STRIPE_MAX);
    }
    PROMISE(lengths[0] == lengths[1] && !memcmp(stripes[0], stripes[1], lengths[0]));
    *length = lengths[0];
    give_back(stripes[1], lengths[1]);
    if (*length) return stripes[0];
    give_back(stripes[0], 0);
    return NULL;
}

/* Rows -> stripe -> rows; stripes of another length are refused. */
static void there_and_back(const stripe_shape *s, const uint64_t *rows)
{
    uint64_t back[ROWS_MAX];
    uint32_t length;
    uint8_t *stripe = encode(s, rows, &length);
    for (int level = 0; stripe && length <= FKV_PAGE_BYTES && level < 2; level++) {
        uint8_t *shorter = copied(stripe, length - 1u), *longer = exactly(length + 1u);
        memcpy(longer, stripe, length);
        longer[length] = 0;
        fkv_use_simd(level);
        make_rows(s, back, true);
        PROMISE(decode(s, stripe, length, back) == 0);
        same_rows(s, rows, back);
        PROMISE(decode(s, shorter, length - 1u, back) == -1);
        PROMISE(decode(s, longer, length + 1u, back) == -1);
        free_rows(s, back);
        give_back(shorter, length - 1u);
        give_back(longer, length + 1u);
    }
    if (stripe) give_back(stripe, length);
}

static void hostile(const stripe_shape *s, fuzz_input *in)
{
    size_t length;
    uint8_t *stripe = take_rest(in, &length);
    uint64_t rows[2][ROWS_MAX], all[ROWS_MAX];
    int verdicts[2];
    for (int level = 0; level < 2; level++) {
        fkv_use_simd(level);
        make_rows(s, rows[level], false);
        verdicts[level] = decode(s, stripe, length, rows[level]);
    }
    PROMISE(verdicts[0] == verdicts[1]);
    if (verdicts[0] == 0) {
        same_rows(s, rows[0], rows[1]);
        make_rows(s, all, true);
        PROMISE(decode(s, stripe, length, all) == 0);
        same_rows(s, rows[0], all);
        there_and_back(s, all);
        free_rows(s, all);
    }
    for (int level = 0; level < 2; level++) free_rows(s, rows[level]);
    give_back(stripe, length);
}

static void round_trip(const stripe_shape *s, fuzz_input *in)
{
    uint64_t rows[ROWS_MAX];
    make_rows(s, rows, true);
    for (uint32_t r = 0; r < s->count; r++) {
        uint8_t *row = (uint8_t *)(uintptr_t)rows[r];
        take(in, row, s->vector_bytes);
        for (uint32_t i = 0; is_short(s->mode) && i < s->vector_bytes; i++)
            if (i % 4 < 2) row[i] = 0;
    }
    there_and_back(s, rows);
    free_rows(s, rows);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_input in = {data, size};
    uint8_t control = take8(&in);
    stripe_shape s = {.mode = FKV_STREAM_FXP_FP32 + (control & 7) % 6u};
    const bool floats = s.mode < FKV_STREAM_PREFIX_E4M3, bases = s.mode < FKV_STREAM_PREFIX_FP32;
    s.count = 1 + take8(&in) % ROWS_MAX;
    const uint32_t values = 1 + take16(&in) % (floats ? 512u : 1024u);
    s.vector_bytes = values * (floats ? 4 : 1);
    s.wanted = take8(&in);
    s.parameters_bytes = bases ? 1 + (values + 1) / 2 : 1 + values;
    s.parameters = exactly(s.parameters_bytes);
    take(&in, s.parameters, s.parameters_bytes);
    if (control & 8)
        round_trip(&s, &in);
    else
        hostile(&s, &in);
    give_back(s.parameters, s.parameters_bytes);
    return 0;
}
