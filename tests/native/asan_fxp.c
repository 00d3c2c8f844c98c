/* asan_fxp.c: decodes valid, mutated, cut and random stripes in allocations of exactly their size.
 *
 *   asan_fxp SEED ROUNDS
 *
 * Meant for -fsanitize=address,undefined: a byte read or written outside ends the program. Besides
 * that it checks that valid stripes come back whole and that all code paths give the same verdict.
 */
#include "flashkv_native.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t state;

static uint64_t random64(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state * 0x2545F4914F6CDD1Du >> 8;
}

static uint32_t below(uint32_t bound)
{
    return (uint32_t)(random64() % bound);
}

static void *exactly(size_t bytes)
{
    void *memory = malloc(bytes ? bytes : 1);
    if (memory == NULL)
        exit(2);
    return memory;
}

static void fail(const char *what)
{
    fprintf(stderr, "asan_fxp: %s\n", what);
    exit(1);
}

typedef struct {
    uint32_t count, vector_bytes, mode;
    uint8_t *bases;
    uint64_t *rows;
} stripe_shape;

/* Every row is an allocation of its own; `wanted_percent` of them exist. */
static void make_rows(stripe_shape *shape, uint32_t wanted_percent)
{
    shape->rows = exactly(shape->count * sizeof(uint64_t));
    for (uint32_t r = 0; r < shape->count; r++)
        shape->rows[r] =
            below(100) < wanted_percent ? (uint64_t)(uintptr_t)exactly(shape->vector_bytes) : 0;
}

static void free_rows(stripe_shape *shape)
{
    for (uint32_t r = 0; r < shape->count; r++)
        free((void *)(uintptr_t)shape->rows[r]);
    free(shape->rows);
}

static void fill(uint8_t *bytes, size_t length, uint32_t kind)
{
    for (size_t i = 0; i < length; i++) {
        bytes[i] = (uint8_t)random64();
        if (kind == 1) /* few ones: few escapes */
            bytes[i] &= (uint8_t)random64();
        else if (kind == 2) /* values near 1.0 */
            bytes[i] = i & 1 ? 0x3F : bytes[i];
        else if (kind == 3)
            bytes[i] = 0xFF;
    }
}

/* Decodes on both paths, the input being in an allocation of exactly its length. */
static int decode(const stripe_shape *shape, const uint8_t *bytes, uint32_t length)
{
    int verdicts[2];
    for (int level = 0; level < 2; level++) {
        uint8_t *in = exactly(length);
        memcpy(in, bytes, length);
        fkv_use_simd(level);
        verdicts[level] =
            fkv_fxp_decode(length ? in : in + 1, length, shape->count, shape->vector_bytes,
                           shape->mode, shape->bases, shape->rows);
        free(in);
    }
    if (verdicts[0] != verdicts[1])
        fail("the code paths disagree");
    return verdicts[0];
}

static void a_valid_stripe_and_its_ruins(stripe_shape *shape)
{
    make_rows(shape, 100);
    uint32_t length = 0, kind = below(4);
    uint8_t *stripes[2], *content = exactly((size_t)shape->count * shape->vector_bytes);
    for (uint32_t r = 0; r < shape->count; r++) {
        fill((uint8_t *)(uintptr_t)shape->rows[r], shape->vector_bytes, kind);
        memcpy(content + (size_t)r * shape->vector_bytes, (void *)(uintptr_t)shape->rows[r],
               shape->vector_bytes);
    }
    for (int level = 0; level < 2; level++) {
        uint16_t *costs = exactly(shape->count * sizeof(uint16_t));
        fkv_use_simd(level);
        fkv_fxp_choose(shape->rows, shape->count, shape->vector_bytes, shape->mode, shape->bases);
        fkv_fxp_costs(shape->rows, shape->count, shape->vector_bytes, shape->mode, shape->bases,
                      costs);
        length = 0;
        for (uint32_t r = 0; r < shape->count; r++)
            length += costs[r];
        free(costs);
        stripes[level] = exactly(length);
        if (fkv_fxp_encode(shape->rows, shape->count, shape->vector_bytes, shape->mode,
                           shape->bases, stripes[level]) != length)
            fail("the costs are not the length");
    }
    if (memcmp(stripes[0], stripes[1], length) != 0)
        fail("the code paths encode differently");
    for (uint32_t r = 0; r < shape->count; r++)
        memset((void *)(uintptr_t)shape->rows[r], 0xC3, shape->vector_bytes);
    if (decode(shape, stripes[0], length) != 0)
        fail("a valid stripe was refused");
    for (uint32_t r = 0; r < shape->count; r++)
        if (memcmp(content + (size_t)r * shape->vector_bytes, (void *)(uintptr_t)shape->rows[r],
                   shape->vector_bytes) != 0)
            fail("other bytes came back");
    free_rows(shape);

    make_rows(shape, below(2) ? 100 : 50);
    if (decode(shape, stripes[0], length) != 0)
        fail("a valid stripe was refused in part");
    if (length && decode(shape, stripes[0], below(length)) == 0)
        fail("a cut stripe was taken");
    for (int flips = 0; length && flips < 8; flips++) {
        stripes[0][below(length)] ^= (uint8_t)(1 << below(8));
        decode(shape, stripes[0], length);
    }
    free_rows(shape);
    free(stripes[0]);
    free(stripes[1]);
    free(content);
}

static void a_random_stripe(stripe_shape *shape)
{
    uint32_t length = below(2) ? below(4096) : below(64);
    uint8_t *bytes = exactly(length);
    fill(bytes, length, below(4));
    for (uint32_t i = 0; i < (shape->vector_bytes / 2 + 15) / 16; i++)
        shape->bases[i] = (uint8_t)random64();
    make_rows(shape, below(101));
    decode(shape, bytes, length);
    free_rows(shape);
    free(bytes);
}

int main(int count, char **arguments)
{
    static const uint32_t usual[] = {32, 64, 96, 128, 160, 192, 256, 512, 1152};
    state = 0x9E3779B97F4A7C15u ^ (count > 1 ? strtoull(arguments[1], NULL, 10) : 1);
    uint64_t rounds = count > 2 ? strtoull(arguments[2], NULL, 10) : 1000;
    for (uint64_t round = 0; round < rounds; round++) {
        stripe_shape shape;
        shape.mode = below(3);
        shape.vector_bytes = below(2) ? usual[below(9)] : 2 * (1 + below(150));
        shape.count = below(50);
        shape.bases = exactly((shape.vector_bytes / 2 + 15) / 16);
        if (round % 2)
            a_valid_stripe_and_its_ruins(&shape);
        else
            a_random_stripe(&shape);
        free(shape.bases);
    }
    return 0;
}
