/* fuzz_prefix.c: stripes of the prefix code that no encoder wrote, on both code paths; and any
 * vectors through it and back.
 *
 * Input: mode (bits 0 and 3) and what to do, count of rows, values a row (16 bits), which rows are wanted (8 bits,
 * repeated), the parameters, then the stripe or the rows.
 * Promises: nothing outside stripe, parameters and rows is touched; the paths agree in verdict,
 * costs and bytes; what is taken is just what the encoder gives for those rows; every bit comes
 * back; a stripe with a byte more or less is refused.
 */
#include "fuzz_rows.h"

static int decode(const stripe_shape *s, const uint8_t *stripe, size_t length, const uint64_t *rows)
{
    return fkv_prefix_decode(stripe, (uint32_t)length, s->count, s->vector_bytes, s->mode,
                             s->parameters, rows);
}

/* The stripe of these rows, the same on both paths; NULL where a page can't hold it. */
static uint8_t *encode(const stripe_shape *s, const uint64_t *rows, uint32_t *length)
{
    uint8_t *stripes[2] = {NULL, NULL};
    uint64_t bits[2] = {0, 0};
    for (int level = 0; level < 2; level++) {
        uint16_t *costs = exactly(s->count * sizeof *costs);
        memset(costs, 0, s->count * sizeof *costs);
        fkv_use_simd(level);
        fkv_prefix_costs(rows, s->count, s->vector_bytes, s->mode, s->parameters, costs);
        for (uint32_t r = 0; r < s->count; r++) bits[level] += costs[r];
        give_back(costs, s->count * sizeof *costs);
        *length = (uint32_t)((bits[level] + 7) / 8);
        if (*length > FKV_PAGE_BYTES) continue;
        stripes[level] = exactly(*length);
        PROMISE(fkv_prefix_encode(rows, s->count, s->vector_bytes, s->mode, s->parameters,
                                  stripes[level])
                == *length);
    }
    PROMISE(bits[0] == bits[1]);
    if (!stripes[0]) return NULL;
    PROMISE(!memcmp(stripes[0], stripes[1], *length));
    give_back(stripes[1], *length);
    return stripes[0];
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
        uint32_t again;
        same_rows(s, rows[0], rows[1]);
        make_rows(s, all, true);
        PROMISE(decode(s, stripe, length, all) == 0);
        same_rows(s, rows[0], all);
        uint8_t *same = encode(s, all, &again);
        PROMISE(same && again == length && !memcmp(same, stripe, length));
        give_back(same, again);
        free_rows(s, all);
    }
    for (int level = 0; level < 2; level++) free_rows(s, rows[level]);
    give_back(stripe, length);
}

/* The bits that a value of one-byte types has. */
static void keep_pattern(const stripe_shape *s, uint64_t address)
{
    const uint32_t pattern = s->mode == FKV_STREAM_PREFIX_E4M3   ? 0xBF80
                             : s->mode == FKV_STREAM_PREFIX_E5M2 ? 0xFF00
                                                                 : 0xFFFF;
    uint8_t *row = (uint8_t *)(uintptr_t)address;
    for (uint32_t i = 0; i < s->vector_bytes; i++) row[i] &= (uint8_t)(pattern >> 8 * (i % 2));
}

static void round_trip(stripe_shape *s, fuzz_input *in, bool choose)
{
    uint64_t rows[ROWS_MAX], back[ROWS_MAX];
    uint32_t length;
    make_rows(s, rows, true);
    for (uint32_t r = 0; r < s->count; r++) {
        take(in, (uint8_t *)(uintptr_t)rows[r], s->vector_bytes);
        keep_pattern(s, rows[r]);
    }
    if (choose) {
        uint8_t *portable = exactly(s->parameters_bytes);
        fkv_use_simd(0);
        fkv_prefix_choose(rows, s->count, s->vector_bytes, s->mode, portable);
        fkv_use_simd(1);
        fkv_prefix_choose(rows, s->count, s->vector_bytes, s->mode, s->parameters);
        PROMISE(!memcmp(portable, s->parameters, s->parameters_bytes));
        give_back(portable, s->parameters_bytes);
    }
    uint8_t *stripe = encode(s, rows, &length);
    for (int level = 0; stripe && level < 2; level++) {
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
    free_rows(s, rows);
}

/* Whether the parameters are such as mean something; the decoder refuses the others. */
static bool sane(const stripe_shape *s)
{
    const uint32_t most = s->mode == FKV_STREAM_PREFIX_BF16   ? 255
                          : s->mode == FKV_STREAM_PREFIX_E4M3 ? 15
                                                              : 31;
    if (s->parameters[0] > most) return false;
    for (uint32_t i = 1; i < s->parameters_bytes; i++)
        if ((s->parameters[i] & 0xC0) == 0x40) return false;
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_input in = {data, size};
    uint8_t control = take8(&in);
    static const uint32_t modes[4] = {FKV_STREAM_PREFIX_BF16, FKV_STREAM_PREFIX_FP16,
                                      FKV_STREAM_PREFIX_E4M3, FKV_STREAM_PREFIX_E5M2};
    stripe_shape s = {.mode = modes[(control & 1) | (control >> 2 & 2)]};
    s.count = 1 + take8(&in) % ROWS_MAX;
    s.vector_bytes = 2 * (1 + take16(&in) % 1024u);
    s.wanted = take8(&in);
    s.parameters_bytes = 1 + s.vector_bytes / 2;
    s.parameters = exactly(s.parameters_bytes);
    memset(s.parameters, 0, s.parameters_bytes);
    take(&in, s.parameters, s.parameters_bytes);
    if (control & 2)
        hostile(&s, &in);
    else if (control & 4 || sane(&s))
        round_trip(&s, &in, control & 4);
    give_back(s.parameters, s.parameters_bytes);
    return 0;
}
