/* fuzz_rows.h: what the targets of stripes share: a stripe's shape, and vectors in memory of their
 * very size.
 *
 * Invariant: rows that are not wanted have no memory.
 */
#ifndef FLASHKV_FUZZ_ROWS_H
#define FLASHKV_FUZZ_ROWS_H
#include "fuzz.h"

#define ROWS_MAX 64u

typedef struct {
    uint32_t mode, count, vector_bytes;
    uint8_t wanted, *parameters;
    uint32_t parameters_bytes;
} stripe_shape;

static inline void make_rows(const stripe_shape *s, uint64_t *rows, bool all)
{
    for (uint32_t r = 0; r < s->count; r++) {
        bool wanted = all || s->wanted >> (r % 8) & 1;
        rows[r] = wanted ? (uint64_t)(uintptr_t)exactly(s->vector_bytes) : 0;
        if (rows[r]) memset((void *)(uintptr_t)rows[r], 0xA5, s->vector_bytes);
    }
}

static inline void free_rows(const stripe_shape *s, uint64_t *rows)
{
    for (uint32_t r = 0; r < s->count; r++)
        if (rows[r]) give_back((void *)(uintptr_t)rows[r], s->vector_bytes);
}

static inline void same_rows(const stripe_shape *s, const uint64_t *a, const uint64_t *b)
{
    for (uint32_t r = 0; r < s->count; r++)
        if (a[r] && b[r])
            PROMISE(!memcmp((void *)(uintptr_t)a[r], (void *)(uintptr_t)b[r], s->vector_bytes));
}
#endif
