/* fuzz_roundtrip.c: any vectors through the codec and back.
 *
 * Input: mode, values a row (16 bits), the rows one after the other.
 * Promises: both paths choose the same parameters and give the same costs and stripe, in just the bytes
 * that the costs said; every bit comes back; a stripe with a byte more or less is refused.
 */
#include "fuzz.h"

#define ROWS_MAX 256u

typedef struct {
    uint32_t mode, count, vector_bytes, parameters_bytes;
    uint64_t rows[ROWS_MAX];
} vectors;

typedef struct {
    uint8_t *parameters, *stripe;
    uint16_t *costs;
    uint32_t length;
} coded;

static coded encode(const vectors *v, int level)
{
    coded c = {.parameters = exactly(v->parameters_bytes), .costs = exactly(v->count * sizeof *c.costs)};
    memset(c.parameters, 0, v->parameters_bytes);
    fkv_use_simd(level);
    fkv_fxp_choose(v->rows, v->count, v->vector_bytes, v->mode, c.parameters);
    fkv_fxp_costs(v->rows, v->count, v->vector_bytes, v->mode, c.parameters, c.costs);
    for (uint32_t r = 0; r < v->count; r++) c.length += c.costs[r];
    c.stripe = exactly(c.length);
    PROMISE(fkv_fxp_encode(v->rows, v->count, v->vector_bytes, v->mode, c.parameters, c.stripe)
            == c.length);
    return c;
}

static void decode(const vectors *v, const coded *c, int level)
{
    uint64_t rows[ROWS_MAX];
    for (uint32_t r = 0; r < v->count; r++)
        rows[r] = (uint64_t)(uintptr_t)exactly(v->vector_bytes);
    fkv_use_simd(level);
    PROMISE(fkv_fxp_decode(c->stripe, c->length, v->count, v->vector_bytes, v->mode, c->parameters, rows)
            == 0);
    for (uint32_t r = 0; r < v->count; r++)
        PROMISE(!memcmp((void *)(uintptr_t)rows[r], (void *)(uintptr_t)v->rows[r],
                        v->vector_bytes));
    if (c->length) {
        uint8_t *shorter = copied(c->stripe, c->length - 1u), *longer = exactly(c->length + 1u);
        memcpy(longer, c->stripe, c->length);
        longer[c->length] = 0;
        PROMISE(fkv_fxp_decode(shorter, c->length - 1, v->count, v->vector_bytes, v->mode, c->parameters,
                               rows)
                == -1);
        PROMISE(fkv_fxp_decode(longer, c->length + 1, v->count, v->vector_bytes, v->mode, c->parameters,
                               rows)
                == -1);
        give_back(shorter, c->length - 1u);
        give_back(longer, c->length + 1u);
    }
    for (uint32_t r = 0; r < v->count; r++)
        give_back((void *)(uintptr_t)rows[r], v->vector_bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_input in = {data, size};
    vectors v = {.mode = take8(&in) % 3u};
    v.vector_bytes = 2 * (1 + take16(&in) % 1024u);
    v.parameters_bytes = 1 + (v.vector_bytes / 2 + 1) / 2;
    while (in.left && v.count < ROWS_MAX) {
        uint8_t *row = exactly(v.vector_bytes);
        take(&in, row, v.vector_bytes);
        v.rows[v.count++] = (uint64_t)(uintptr_t)row;
    }
    coded c[2] = {encode(&v, 0), encode(&v, 1)};
    PROMISE(!memcmp(c[0].parameters, c[1].parameters, v.parameters_bytes));
    PROMISE(!memcmp(c[0].costs, c[1].costs, v.count * sizeof *c[0].costs));
    PROMISE(c[0].length == c[1].length && !memcmp(c[0].stripe, c[1].stripe, c[0].length));
    for (int level = 0; level < 2; level++) {
        decode(&v, &c[level], level);
        give_back(c[level].parameters, v.parameters_bytes);
        give_back(c[level].costs, v.count * sizeof *c[level].costs);
        give_back(c[level].stripe, c[level].length);
    }
    for (uint32_t r = 0; r < v.count; r++)
        give_back((void *)(uintptr_t)v.rows[r], v.vector_bytes);
    return 0;
}
