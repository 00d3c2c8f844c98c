/* allocate.h: where the data plane takes memory and threads from. Nothing but the C library in a
 * normal build; in a test build (FKV_TEST_BUILD) every call is counted and can be made to fail.
 *
 * Invariants
 *  - engine_native takes memory and threads from here alone, so that every way in which they can
 *    run out is a number that a test can name; the simulated device's own memory (sim_*.c) is not
 *    the data plane's and comes from the C library;
 *  - what came from here goes back here: fkv_alloc_live() counts what did not.
 */
#ifndef FLASHKV_ALLOCATE_H
#define FLASHKV_ALLOCATE_H
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#ifdef FKV_TEST_BUILD

void *fkv_malloc(size_t bytes);
void *fkv_calloc(size_t count, size_t bytes);
void *fkv_realloc(void *memory, size_t bytes);
void fkv_free(void *memory);
void *fkv_map(size_t bytes); /* whole pages of zeros, or NULL */
void fkv_unmap(void *base, size_t bytes);
int fkv_thread_create(pthread_t *thread, void *(*run)(void *), void *argument); /* 0 or errno */

#else

static inline void *fkv_malloc(size_t bytes) { return malloc(bytes); }
static inline void *fkv_calloc(size_t count, size_t bytes) { return calloc(count, bytes); }
static inline void *fkv_realloc(void *memory, size_t bytes) { return realloc(memory, bytes); }
static inline void fkv_free(void *memory) { free(memory); }
static inline void *fkv_map(size_t bytes)
{
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return base == MAP_FAILED ? NULL : base;
}
static inline void fkv_unmap(void *base, size_t bytes) { munmap(base, bytes); }
static inline int fkv_thread_create(pthread_t *thread, void *(*run)(void *), void *argument)
{
    return pthread_create(thread, NULL, run, argument);
}

#endif
#endif
