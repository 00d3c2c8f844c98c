/* engine.c: one engine = a backend, its bounce buffers, the workers and the header cache; opened,
 * probed, counted, closed.
 *
 * Invariants
 *  - an engine is whole or not there: a part that can't be had closes the others and says why;
 *  - closing waits for every operation; the caller sees to it that no blocking call is running;
 *  - memory that the kernel refuses to register works all the same.
 */
#include "allocate.h"
#include "io.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define HUGE_PAGE (2ull << 20)
#define QUEUE_DEPTH_MAX 4096
#define WORKERS_MAX 256

#ifdef FKV_TEST_BUILD
#define SIM_BUILT 1
#else
#define SIM_BUILT 0
#endif

static const char *refusal(int status)
{
    return status == -ENOSYS ? "not in this build, or not in this kernel" : strerror(-status);
}

static fkv_backend *backend_open(const fkv_engine_options *options, char *error, size_t error_bytes)
{
    fkv_backend *backend = NULL;
    int status = -EINVAL, uring_status = 0;

    if (options->backend == FKV_BACKEND_AUTO || options->backend == FKV_BACKEND_IO_URING) {
        backend = fkv_io_uring_open(options, &uring_status);
        if (backend == NULL) snprintf(error, error_bytes, "io_uring: %s", refusal(uring_status));
    }
    if (options->backend == FKV_BACKEND_THREADS
        || (options->backend == FKV_BACKEND_AUTO && backend == NULL)) {
        backend = fkv_io_threads_open(options, &status);
        if (backend == NULL && uring_status != 0)
            snprintf(error, error_bytes, "io_uring: %s; threads: %s", refusal(uring_status),
                     refusal(status));
        else if (backend == NULL)
            snprintf(error, error_bytes, "threads: %s", refusal(status));
    }
    if (options->backend == FKV_BACKEND_SIM) {
        backend = fkv_io_sim_open(options, &status);
        if (backend == NULL) snprintf(error, error_bytes, "sim: %s", refusal(status));
    }
    return backend;
}

static const char *options_fault(const fkv_engine_options *options)
{
    if (options->backend > FKV_BACKEND_SIM) return "unknown backend";
    if (options->queue_depth < 1 || options->queue_depth > QUEUE_DEPTH_MAX)
        return "queue_depth must be 1 to 4096";
    uint32_t workers_min = options->backend == FKV_BACKEND_SIM ? 0 : 1; /* see fkv_sim_inline */
    if (options->workers < workers_min || options->workers > WORKERS_MAX)
        return "workers must be 1 to 256";
    if (options->io_threads < 1 || options->io_threads > WORKERS_MAX)
        return "io_threads must be 1 to 256";
    if (options->memory_alignment == 0
        || (options->memory_alignment & (options->memory_alignment - 1)) != 0)
        return "memory_alignment must be a power of two";
    return NULL;
}

fkv_engine *fkv_engine_open(const fkv_engine_options *options, char *error, size_t error_bytes)
{
    const char *fault = options_fault(options);
    fkv_engine *engine = fault == NULL ? fkv_calloc(1, sizeof *engine) : NULL;
    if (engine == NULL) {
        snprintf(error, error_bytes, "%s", fault != NULL ? fault : "out of memory");
        return NULL;
    }
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&engine->write_done, &attributes);
    pthread_cond_init(&engine->read_over, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&engine->write_lock, NULL);
    pthread_mutex_init(&engine->read_lock, NULL);
    engine->options = *options;

    engine->backend = backend_open(options, error, error_bytes);
    if (engine->backend != NULL) {
        engine->pool = fkv_pool_new(options->read_buffer_bytes);
        engine->headers = fkv_header_cache_new(options->header_cache_bytes);
        engine->workers = fkv_workers_new(options->workers);
        if (engine->pool != NULL && engine->headers != NULL && engine->workers != NULL) {
            void *base;
            uint64_t length;
            fkv_pool_memory(engine->pool, &base, &length);
            engine->backend->register_memory(engine->backend, base, length);
            return engine;
        }
        snprintf(error, error_bytes, "no memory or threads for buffers of %llu bytes, %u workers",
                 (unsigned long long)options->read_buffer_bytes, options->workers);
    }
    fkv_engine_close(engine);
    return NULL;
}

void fkv_engine_close(fkv_engine *engine)
{
    if (engine == NULL) return;
    /* The backend first: its last completions may still push tasks and give buffers back. */
    if (engine->backend != NULL) engine->backend->close(engine->backend);
    fkv_workers_free(engine->workers);
    fkv_writes_drop(engine);
    fkv_header_cache_free(engine->headers);
    fkv_pool_free(engine->pool);
    pthread_cond_destroy(&engine->write_done);
    pthread_mutex_destroy(&engine->write_lock);
    pthread_cond_destroy(&engine->read_over);
    pthread_mutex_destroy(&engine->read_lock);
    fkv_free(engine);
}

const char *fkv_engine_backend(const fkv_engine *engine) { return engine->backend->name; }

int fkv_backend_available(uint32_t backend)
{
    fkv_engine_options options = {.queue_depth = 2, .io_threads = 1};
    fkv_backend *opened = NULL;
    int status;
    if (backend == FKV_BACKEND_IO_URING)
        opened = fkv_io_uring_open(&options, &status);
    else if (backend == FKV_BACKEND_THREADS)
        opened = fkv_io_threads_open(&options, &status);
    else if (backend == FKV_BACKEND_SIM)
        return SIM_BUILT;
    if (opened == NULL) return 0;
    opened->close(opened);
    return 1;
}

int fkv_engine_probe(fkv_engine *engine, int32_t fd, int writable)
{
    uint8_t *written = fkv_buffer_alloc(2 * FKV_PAGE_BYTES);
    if (written == NULL) return -ENOMEM;
    uint8_t *read = written + FKV_PAGE_BYTES;
    int status = 0;
    if (writable) {
        for (unsigned i = 0; i < FKV_PAGE_BYTES; i++)
            written[i] = (uint8_t)(i * 151 + (i >> 8) + 1);
        status = fkv_pwrite(engine, fd, written, FKV_PAGE_BYTES, 0);
        if (status == 0) fkv_sync(engine, &fd, 1, &status);
    }
    if (status == 0) status = fkv_pread(engine, fd, read, FKV_PAGE_BYTES, 0);
    if (status == 0 && writable && memcmp(written, read, FKV_PAGE_BYTES) != 0) status = -EIO;
    fkv_buffer_free(written, 2 * FKV_PAGE_BYTES);
    return status;
}

void fkv_engine_counters_get(fkv_engine *engine, fkv_engine_counters *counters)
{
    pthread_mutex_lock(&engine->backend->lock);
    *counters = engine->backend->counters;
    pthread_mutex_unlock(&engine->backend->lock);
    counters->direct_reads = atomic_load_explicit(&engine->direct_reads, memory_order_relaxed);
    counters->bounced_reads = atomic_load_explicit(&engine->bounced_reads, memory_order_relaxed);
    counters->read_through_pages =
        atomic_load_explicit(&engine->read_through_pages, memory_order_relaxed);
    counters->buffer_waits = fkv_pool_waits(engine->pool);
    counters->buffers_in_use = fkv_pool_in_use(engine->pool);
    fkv_header_cache_counters(engine->headers, counters);
}

int fkv_engine_register(fkv_engine *engine, void *base, uint64_t length)
{
    if (length == 0) return -EINVAL;
    return engine->backend->register_memory(engine->backend, base, length);
}

int fkv_engine_unregister(fkv_engine *engine, void *base)
{
    return engine->backend->unregister_memory(engine->backend, base);
}

static uint64_t whole_pages(uint64_t length)
{
    return (length + FKV_PAGE_BYTES - 1) / FKV_PAGE_BYTES * FKV_PAGE_BYTES;
}

uint8_t *fkv_buffer_alloc(uint64_t length)
{
    if (length == 0 || length > UINT64_MAX / 2) return NULL;
    length = whole_pages(length);
    /* Huge pages need a start at a multiple of their size: map more and cut the ends off. */
    uint64_t slack = length >= HUGE_PAGE ? HUGE_PAGE : 0;
    uint8_t *mapped = fkv_map(length + slack);
    if (mapped == NULL || slack == 0) return mapped;
    uint64_t before = (HUGE_PAGE - (uintptr_t)mapped % HUGE_PAGE) % HUGE_PAGE;
    if (before > 0) munmap(mapped, before);
    if (slack > before) munmap(mapped + before + length, slack - before);
    madvise(mapped + before, length, MADV_HUGEPAGE);
    return mapped + before;
}

void fkv_buffer_free(uint8_t *base, uint64_t length)
{
    if (base != NULL) fkv_unmap(base, whole_pages(length));
}
