/* fuzz_codec.c: stripes that no encoder wrote, on both code paths.
 *
 * Input: mode, count of rows, values a row (16 bits), which rows are wanted (8 bits, repeated), the
 * parameters, the stripe.
 * Promises: nothing outside stripe, parameters and rows is touched; the paths agree in verdict and bytes;
 * what was decoded, encoded again with the same parameters, decodes to the same rows.
 */
#include "fuzz_rows.h"

/* Rows -> stripe -> rows, on both paths. */
static void again(const stripe_shape *s, const uint64_t *rows)
{
    uint8_t *stripes[2];
    uint32_t lengths[2];
    for (int level = 0; level < 2; level++) {
        uint16_t *costs = exactly(s->count * sizeof *costs);
        uint64_t back[ROWS_MAX];
        fkv_use_simd(level);
        fkv_fxp_costs(rows, s->count, s->vector_bytes, s->mode, s->parameters, costs);
        lengths[level] = 0;
        for (uint32_t r = 0; r < s->count; r++) lengths[level] += costs[r];
        stripes[level] = exactly(lengths[level]);
        PROMISE(
            fkv_fxp_encode(rows, s->count, s->vector_bytes, s->mode, s->parameters, stripes[level])
            == lengths[level]);
        make_rows(s, back, true);
        PROMISE(fkv_fxp_decode(stripes[level], lengths[level], s->count, s->vector_bytes, s->mode,
                               s->parameters, back)
                == 0);
        same_rows(s, rows, back);
        free_rows(s, back);
        give_back(costs, s->count * sizeof *costs);
    }
    PROMISE(lengths[0] == lengths[1] && !memcmp(stripes[0], stripes[1], lengths[0]));
    for (int level = 0; level < 2; level++) give_back(stripes[level], lengths[level]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_input in = {data, size};
    stripe_shape s = {.mode = take8(&in) % 4u, .count = take8(&in) % (ROWS_MAX + 1)};
    s.vector_bytes = s.mode == FKV_STREAM_PLAIN ? take16(&in) % 2049u : take16(&in) % 1025u * 2;
    s.wanted = take8(&in);
    s.parameters_bytes = 1 + (s.vector_bytes / 2 + 1) / 2;
    s.parameters = exactly(s.parameters_bytes);
    take(&in, s.parameters, s.parameters_bytes);
    size_t length;
    uint8_t *stripe = take_rest(&in, &length);
    uint64_t rows[2][ROWS_MAX], all[ROWS_MAX];
    int verdicts[2];
    for (int level = 0; level < 2; level++) {
        fkv_use_simd(level);
        make_rows(&s, rows[level], false);
        verdicts[level] = fkv_fxp_decode(stripe, (uint32_t)length, s.count, s.vector_bytes, s.mode,
                                         s.parameters, rows[level]);
    }
    PROMISE(verdicts[0] == verdicts[1]);
    if (verdicts[0] == 0) {
        same_rows(&s, rows[0], rows[1]);
        make_rows(&s, all, true);
        PROMISE(fkv_fxp_decode(stripe, (uint32_t)length, s.count, s.vector_bytes, s.mode,
                               s.parameters, all)
                == 0);
        same_rows(&s, rows[0], all);
        again(&s, all);
        free_rows(&s, all);
    }
    for (int level = 0; level < 2; level++) free_rows(&s, rows[level]);
    give_back(stripe, length);
    give_back(s.parameters, s.parameters_bytes);
    return 0;
}
