/* progress.c: how many leading layers of a read are in place. */
#include "progress.h"
#include "allocate.h"
#include "io.h"

struct fkv_progress {
    pthread_mutex_t lock;
    pthread_cond_t moved;
    uint32_t layers;
    uint32_t settled; /* guarded by lock */
    _Atomic uint32_t failed;
    _Atomic uint64_t held[];
};

fkv_progress *fkv_progress_new(uint32_t layers)
{
    fkv_progress *progress = fkv_calloc(1, sizeof *progress + layers * sizeof progress->held[0]);
    pthread_condattr_t attributes;
    if (!progress) return NULL;
    progress->layers = layers;
    atomic_init(&progress->failed, FKV_NONE);
    pthread_mutex_init(&progress->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&progress->moved, &attributes);
    pthread_condattr_destroy(&attributes);
    return progress;
}

void fkv_progress_free(fkv_progress *progress)
{
    if (!progress) return;
    pthread_cond_destroy(&progress->moved);
    pthread_mutex_destroy(&progress->lock);
    fkv_free(progress);
}

uint32_t fkv_progress_layers(const fkv_progress *progress) { return progress->layers; }

void fkv_progress_hold(fkv_progress *progress, uint32_t first, uint32_t end, uint64_t count)
{
    for (uint32_t i = first; i < end; i++)
        atomic_fetch_add_explicit(&progress->held[i], count, memory_order_relaxed);
}

void fkv_progress_release(fkv_progress *progress, uint32_t first, uint32_t end)
{
    bool last = false;
    for (uint32_t i = first; i < end; i++)
        last |= atomic_fetch_sub_explicit(&progress->held[i], 1, memory_order_acq_rel) == 1;
    if (!last) return;
    pthread_mutex_lock(&progress->lock);
    uint32_t before = progress->settled;
    while (progress->settled < progress->layers
           && !atomic_load_explicit(&progress->held[progress->settled], memory_order_acquire))
        progress->settled++;
    if (progress->settled != before) pthread_cond_broadcast(&progress->moved);
    pthread_mutex_unlock(&progress->lock);
}

void fkv_progress_fail(fkv_progress *progress, uint32_t layer)
{
    uint32_t before = atomic_load_explicit(&progress->failed, memory_order_relaxed);
    while (layer < before
           && !atomic_compare_exchange_weak_explicit(&progress->failed, &before, layer,
                                                     memory_order_release, memory_order_relaxed)) {
    }
}

uint32_t fkv_progress_failed(const fkv_progress *progress)
{
    return atomic_load_explicit(&progress->failed, memory_order_acquire);
}

void fkv_progress_end(fkv_progress *progress)
{
    pthread_mutex_lock(&progress->lock);
    progress->settled = progress->layers;
    pthread_cond_broadcast(&progress->moved);
    pthread_mutex_unlock(&progress->lock);
}

uint32_t fkv_progress_wait(fkv_progress *progress, uint32_t layers, int64_t timeout_ms)
{
    struct timespec deadline = timeout_ms > 0 ? fkv_deadline(timeout_ms) : (struct timespec){0};
    if (layers > progress->layers) layers = progress->layers;
    pthread_mutex_lock(&progress->lock);
    while (progress->settled < layers && timeout_ms != 0) {
        if (timeout_ms < 0)
            pthread_cond_wait(&progress->moved, &progress->lock);
        else if (pthread_cond_timedwait(&progress->moved, &progress->lock, &deadline) != 0)
            break;
    }
    uint32_t settled = progress->settled;
    pthread_mutex_unlock(&progress->lock);
    return settled;
}
