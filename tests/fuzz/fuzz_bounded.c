/* fuzz_bounded.c: stripes of the bounded code that no encoder wrote, on both code paths; and any
 * vectors through it and back.
 *
 * Input: mode and what to do, count of rows, values a row (16 bits), which rows are wanted (8 bits,
 * repeated), the stripe's first token, the parameters, then the stripe or the rows.
 * Promises: nothing outside stripe, parameters and rows is touched; the paths agree in verdict,
 * parameters, bytes and values; a stripe with a byte more or less is refused; exact tokens come back
 * bit for bit.
 */
#include "fuzz_rows.h"
#include "codec_bounded.h"

static int decode(const stripe_shape *s, uint32_t first, const uint8_t *stripe, size_t length,
                  const uint64_t *rows)
{
    return fkv_bounded_decode(stripe, (uint32_t)length, s->count, s->vector_bytes, s->mode,
                              s->parameters, first, rows);
}

static void hostile(const stripe_shape *s, uint32_t first, fuzz_input *in)
{
    size_t length;
    uint8_t *stripe = take_rest(in, &length);
    uint64_t rows[2][ROWS_MAX];
    int verdicts[2];
    for (int level = 0; level < 2; level++) {
        fkv_use_simd(level);
        make_rows(s, rows[level], false);
        verdicts[level] = decode(s, first, stripe, length, rows[level]);
    }
    PROMISE(verdicts[0] == verdicts[1]);
    if (verdicts[0] == 0) same_rows(s, rows[0], rows[1]);
    for (int level = 0; level < 2; level++) free_rows(s, rows[level]);
    give_back(stripe, length);
}

static void round_trip(stripe_shape *s, uint32_t first, fuzz_input *in, float factor)
{
    uint64_t rows[ROWS_MAX], back[2][ROWS_MAX], bits[2];
    uint8_t *parameters[2], *levels[2], *stripes[2];
    uint32_t lengths[2];
    make_rows(s, rows, true);
    for (uint32_t r = 0; r < s->count; r++)
        take(in, (uint8_t *)(uintptr_t)rows[r], s->vector_bytes);
    for (int level = 0; level < 2; level++) {
        fkv_use_simd(level);
        parameters[level] = exactly(s->parameters_bytes), levels[level] = exactly(s->count);
        stripes[level] = exactly(FKV_PAGE_BYTES), lengths[level] = 0;
        bits[level] = fkv_bounded_parameters_of(rows, s->count, s->vector_bytes, s->mode, factor,
                                                first % 5, parameters[level], levels[level]);
        if (bits[level])
            lengths[level] =
                fkv_bounded_encode(rows, s->count, s->vector_bytes, s->mode, parameters[level],
                                   levels[level], 0, stripes[level]);
    }
    PROMISE(bits[0] == bits[1] && lengths[0] == lengths[1]);
    PROMISE(!bits[0] || !memcmp(parameters[0], parameters[1], s->parameters_bytes));
    PROMISE(!memcmp(stripes[0], stripes[1], lengths[0]));
    if (lengths[0]) {
        memcpy(s->parameters, parameters[0], s->parameters_bytes);
        for (int level = 0; level < 2; level++) {
            uint8_t *shorter = copied(stripes[0], lengths[0] - 1u), *longer;
            longer = exactly(lengths[0] + 1u);
            memcpy(longer, stripes[0], lengths[0]);
            longer[lengths[0]] = 0;
            fkv_use_simd(level);
            make_rows(s, back[level], true);
            PROMISE(decode(s, 0, shorter, lengths[0] - 1u, back[level]) == -1);
            PROMISE(decode(s, 0, longer, lengths[0] + 1u, back[level]) == -1);
            PROMISE(decode(s, 0, stripes[0], lengths[0], back[level]) == 0);
            give_back(shorter, lengths[0] - 1u), give_back(longer, lengths[0] + 1u);
        }
        same_rows(s, back[0], back[1]);
        for (uint32_t r = 0; r < s->count && r < first % 5; r++)
            PROMISE(!memcmp((void *)(uintptr_t)rows[r], (void *)(uintptr_t)back[0][r],
                            s->vector_bytes));
        free_rows(s, back[0]), free_rows(s, back[1]);
    }
    for (int level = 0; level < 2; level++) {
        give_back(parameters[level], s->parameters_bytes), give_back(levels[level], s->count);
        give_back(stripes[level], FKV_PAGE_BYTES);
    }
    free_rows(s, rows);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const float factors[4] = {0.0f, -0.1f, -0.5f, 1.0f};
    fuzz_input in = {data, size};
    uint8_t control = take8(&in);
    stripe_shape s = {.mode = FKV_STREAM_CHANNELS_BF16 + control % 8 % 6};
    s.count = 1 + take8(&in) % ROWS_MAX;
    s.vector_bytes = fkv_bounded_element(s.mode) * (1 + take16(&in) % 512u);
    s.wanted = take8(&in);
    uint32_t first = take8(&in) % 8;
    s.parameters_bytes = fkv_bounded_parameters(s.vector_bytes, s.mode);
    s.parameters = exactly(s.parameters_bytes);
    memset(s.parameters, 0, s.parameters_bytes);
    if (control & 8) {
        take(&in, s.parameters, s.parameters_bytes);
        hostile(&s, first, &in);
    } else {
        round_trip(&s, first, &in, factors[control >> 4 & 3]);
    }
    give_back(s.parameters, s.parameters_bytes);
    return 0;
}
