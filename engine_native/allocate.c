/* allocate.c: the counted allocations of test builds; see allocate.h. Empty otherwise.
 *
 * Invariants
 *  - the n-th call is the same whatever thread makes it: one count for all;
 *  - a call that fails changes nothing but that count.
 */
#include "allocate.h"

#ifdef FKV_TEST_BUILD
#include "sim.h"
#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>

static _Atomic uint64_t calls, live, fail_first, fail_count;

void fkv_alloc_fail(uint64_t first, uint64_t count)
{
    atomic_store(&fail_count, 0); /* so that no call sees one's first with the other's count */
    atomic_store(&fail_first, first);
    atomic_store(&calls, 0);
    atomic_store(&fail_count, count);
}

uint64_t fkv_alloc_calls(void) { return atomic_load(&calls); }

uint64_t fkv_alloc_live(void) { return atomic_load(&live); }

static bool fails(void)
{
    uint64_t call = atomic_fetch_add(&calls, 1) + 1, first = atomic_load(&fail_first);
    return first != 0 && call >= first && call - first < atomic_load(&fail_count);
}

static void *given(void *memory)
{
    if (memory != NULL) atomic_fetch_add(&live, 1);
    return memory;
}

void *fkv_malloc(size_t bytes) { return fails() ? NULL : given(malloc(bytes)); }

void *fkv_calloc(size_t count, size_t bytes)
{
    return fails() ? NULL : given(calloc(count, bytes));
}

void *fkv_realloc(void *memory, size_t bytes)
{
    if (fails()) return NULL;
    return memory == NULL ? given(malloc(bytes)) : realloc(memory, bytes);
}

void fkv_free(void *memory)
{
    if (memory != NULL) atomic_fetch_sub(&live, 1);
    free(memory);
}

void *fkv_map(size_t bytes)
{
    if (fails()) return NULL;
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return base == MAP_FAILED ? NULL : given(base);
}

void fkv_unmap(void *base, size_t bytes)
{
    atomic_fetch_sub(&live, 1);
    munmap(base, bytes);
}

int fkv_thread_create(pthread_t *thread, void *(*run)(void *), void *argument)
{
    return fails() ? EAGAIN : pthread_create(thread, NULL, run, argument);
}

#endif
