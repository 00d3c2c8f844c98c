/* fuzz.h: what the fuzz targets share: their input, taken field by field, and memory of exactly the
 * size that it should have, so that the address sanitizer sees a byte too far.
 *
 * Invariants
 *  - a target is a function of its input alone: no clock, no chance, no file, no thread;
 *  - an input that ends early reads as zeros: every input means something;
 *  - a promise that is broken ends the process by abort(), as an error of a sanitizer does.
 */
#ifndef FLASHKV_FUZZ_H
#define FLASHKV_FUZZ_H
#include "flashkv_native.h"
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PROMISE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: broken: %s\n", __FILE__, __LINE__, #condition);                \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

typedef struct {
    const uint8_t *at;
    size_t left;
} fuzz_input;

/* Fills `to` with the next bytes, and with zeros where there are none left. */
static inline void take(fuzz_input *in, void *to, size_t bytes)
{
    size_t have = bytes < in->left ? bytes : in->left;
    if (have) memcpy(to, in->at, have);
    memset((uint8_t *)to + have, 0, bytes - have);
    in->at += have, in->left -= have;
}

static inline uint8_t take8(fuzz_input *in)
{
    uint8_t value;
    take(in, &value, sizeof value);
    return value;
}

static inline uint16_t take16(fuzz_input *in)
{
    uint16_t value;
    take(in, &value, sizeof value);
    return value;
}

/* Memory whose first byte behind the end is poisoned; never NULL. */
static inline void *exactly(size_t bytes)
{
    void *memory = malloc(bytes ? bytes : 1);
    PROMISE(memory != NULL);
    return bytes ? memory : (uint8_t *)memory + 1;
}

static inline void give_back(void *memory, size_t bytes)
{
    free(bytes ? memory : (uint8_t *)memory - 1);
}

static inline uint8_t *copied(const void *from, size_t bytes)
{
    uint8_t *memory = exactly(bytes);
    if (bytes) memcpy(memory, from, bytes);
    return memory;
}

/* The rest of the input, in memory of its own. */
static inline uint8_t *take_rest(fuzz_input *in, size_t *bytes)
{
    *bytes = in->left;
    uint8_t *memory = copied(in->at, in->left);
    in->at += in->left, in->left = 0;
    return memory;
}

/* Pages, each as a 16-bit length and that many bytes, filled up with zeros: until the input or the
 * room ends. */
static inline uint8_t *take_pages(fuzz_input *in, uint32_t room, uint32_t *count)
{
    fuzz_input ahead = *in;
    for (*count = 0; ahead.left && *count < room; ++*count) {
        uint32_t used = take16(&ahead) % (FKV_PAGE_BYTES + 1u);
        used = used < ahead.left ? used : (uint32_t)ahead.left;
        ahead.at += used, ahead.left -= used;
    }
    uint8_t *pages = exactly((size_t)*count * FKV_PAGE_BYTES);
    for (uint32_t i = 0; i < *count; i++) {
        uint8_t *page = pages + (size_t)i * FKV_PAGE_BYTES;
        uint32_t used = take16(in) % (FKV_PAGE_BYTES + 1u);
        memset(page, 0, FKV_PAGE_BYTES);
        take(in, page, used);
    }
    return pages;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
#endif
