/* io_threads.c: the `threads` backend: a few threads that call preadv, pwritev and fdatasync.
 * For kernels and containers without io_uring.
 *
 * Invariants
 *  - operations start in the order of io_queue.h; at most io_threads are at the device at once;
 *  - counters are added before complete() is called, complete() is called without the lock;
 *  - close() returns when the queue is empty and every thread has ended.
 */
#include "allocate.h"
#include "io_queue.h"
#include <assert.h>
#include <errno.h>
#include <unistd.h>

typedef struct {
    fkv_backend base;
    pthread_cond_t work;
    fkv_io_queue queue;
    uint32_t idle; /* threads that wait on `work` */
    uint32_t retries;
    bool stopping;
    uint32_t thread_count;
    pthread_t threads[];
} threads_backend;

static int64_t issue(fkv_io_op *op)
{
    struct iovec *iov = &op->iov[op->iov_first];
    int iov_count = op->iov_count - op->iov_first;
    int64_t result;

    if (op->kind == FKV_IO_SYNC)
        result = fdatasync(op->fd);
    else if (op->kind == FKV_IO_READ)
        result = preadv(op->fd, iov, iov_count, (off_t)op->offset);
    else
        result = pwritev(op->fd, iov, iov_count, (off_t)op->offset);
    return result < 0 ? -errno : result;
}

static void wake_idle(threads_backend *threads, uint64_t count)
{
    for (uint64_t i = 0; i < count && i < threads->idle; i++) pthread_cond_signal(&threads->work);
}

static void wait_for_work(threads_backend *threads)
{
    uint64_t look_ns = fkv_io_queue_look_ns(&threads->queue);
    struct timespec look = {.tv_sec = (time_t)(look_ns / 1000000000u),
                            .tv_nsec = (long)(look_ns % 1000000000u)};
    if (look_ns == 0)
        pthread_cond_wait(&threads->work, &threads->base.lock);
    else
        pthread_cond_timedwait(&threads->work, &threads->base.lock, &look);
}

static void *thread_main(void *argument)
{
    threads_backend *threads = argument;
    pthread_mutex_t *lock = &threads->base.lock;

    pthread_mutex_lock(lock);
    for (;;) {
        fkv_io_op *op = fkv_io_queue_take(&threads->queue);
        if (op == NULL) {
            if (threads->stopping && fkv_io_queue_idle(&threads->queue)) break;
            threads->idle++;
            wait_for_work(threads);
            threads->idle--;
            continue;
        }
        pthread_mutex_unlock(lock);

        fkv_engine_counters counted = {0};
        if (!fkv_io_may_issue(op))
            op->result = -ECANCELED;
        else
            while (fkv_io_settle(op, issue(op), threads->retries, &counted) == FKV_IO_AGAIN)
                continue;

        pthread_mutex_lock(lock);
        fkv_io_queue_done(&threads->queue, op);
        fkv_io_counters_add(&threads->base.counters, &counted);
        threads->base.counters.inflight--;
        /* This thread takes the next one itself; background that may run again by now needs more. */
        wake_idle(threads, threads->stopping ? UINT32_MAX : threads->queue.waiting[1].count > 0);
        pthread_mutex_unlock(lock);
        op->complete(op);
        pthread_mutex_lock(lock);
    }
    pthread_mutex_unlock(lock);
    return NULL;
}

static void threads_submit(fkv_backend *backend, fkv_io_op *list)
{
    threads_backend *threads = (threads_backend *)backend;
    uint64_t count = 0;
    for (const fkv_io_op *op = list; op != NULL; op = op->next) count++;

    pthread_mutex_lock(&backend->lock);
    fkv_io_queue_add(&threads->queue, list);
    backend->counters.inflight += count;
    wake_idle(threads, count);
    pthread_mutex_unlock(&backend->lock);
}

/* The kernel pins pages per call here; there is nothing to register with. */
static int threads_register(fkv_backend *backend, void *base, uint64_t length)
{
    (void)backend, (void)base, (void)length;
    return -EOPNOTSUPP;
}

static int threads_unregister(fkv_backend *backend, void *base)
{
    (void)backend, (void)base;
    return -ENOENT;
}

static void threads_close(fkv_backend *backend)
{
    threads_backend *threads = (threads_backend *)backend;
    pthread_mutex_lock(&backend->lock);
    threads->stopping = true;
    pthread_cond_broadcast(&threads->work);
    pthread_mutex_unlock(&backend->lock);
    for (uint32_t i = 0; i < threads->thread_count; i++) pthread_join(threads->threads[i], NULL);
    pthread_cond_destroy(&threads->work);
    pthread_mutex_destroy(&backend->lock);
    fkv_free(threads);
}

fkv_backend *fkv_io_threads_open(const fkv_engine_options *options, int *status)
{
    uint32_t count = options->io_threads;
    assert(count > 0);
    threads_backend *threads = fkv_calloc(1, sizeof *threads + count * sizeof threads->threads[0]);
    if (threads == NULL) {
        *status = -ENOMEM;
        return NULL;
    }
    threads->base.name = "threads";
    threads->base.submit = threads_submit;
    threads->base.register_memory = threads_register;
    threads->base.unregister_memory = threads_unregister;
    threads->base.close = threads_close;
    threads->retries = options->retries;
    fkv_io_queue_init(&threads->queue, count);
    pthread_mutex_init(&threads->base.lock, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&threads->work, &attributes);
    pthread_condattr_destroy(&attributes);
    for (; threads->thread_count < count; threads->thread_count++) {
        *status = fkv_thread_start(&threads->threads[threads->thread_count], "fkv-io", thread_main,
                                   threads);
        if (*status != 0) break;
    }
    pthread_mutex_lock(&threads->base.lock);
    threads->queue.depth = threads->thread_count;
    pthread_mutex_unlock(&threads->base.lock);
    if (threads->thread_count == 0) { /* some threads are enough, none are not */
        threads_close(&threads->base);
        return NULL;
    }
    *status = 0;
    return &threads->base;
}
