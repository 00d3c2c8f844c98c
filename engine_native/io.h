/* io.h: the narrow seam between what wants I/O and what does it. Backends (io_uring.c,
 * io_threads.c, io_sim.c in test builds) are peers behind fkv_backend; nothing above this file knows which
 * one runs.
 *
 * Invariants
 *  - an operation belongs to the backend from submit() until complete() is called, exactly once, on
 * a backend thread;
 *  - complete() never blocks; it may submit further operations;
 *  - result is 0 only if every byte moved: short results are resumed (alignment kept), EINTR and
 * EAGAIN repeated, both up to `retries` times; end of file on a read is -ENODATA; anything else
 * comes back as -errno;
 *  - a failed sync is never repeated;
 *  - what was given up before it was issued moves no byte; what was issued can't be recalled.
 */
#ifndef FLASHKV_IO_H
#define FLASHKV_IO_H
#include "flashkv_native.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/uio.h>
#include <time.h>

#define FKV_IO_READ 0
#define FKV_IO_WRITE 1
#define FKV_IO_SYNC 2
#define FKV_IO_IOV_MAX 4
#define FKV_IO_MAX_BYTES (1u << 20) /* of one operation; a header page may ride on top */

typedef struct fkv_io_op fkv_io_op;
struct fkv_io_op {
    fkv_io_op *next;
    uint8_t kind;
    uint8_t iov_count;  /* 1 of a write, 0 of a sync */
    uint8_t iov_first;  /* first one with bytes left */
    uint8_t background; /* realtime operations go before it, see io_queue.h */
    uint32_t attempts;  /* repeats so far */
    int32_t fd;
    int32_t result;     /* 0 or -errno, valid in complete() */
    uint64_t offset;    /* moves on as short results are resumed */
    uint64_t remaining; /* bytes still to move */
    struct iovec iov[FKV_IO_IOV_MAX];
    const _Atomic bool *given_up; /* once true it isn't issued any more: -ECANCELED; or NULL */
    _Atomic uint64_t
        *flights; /* counts it from its issue on, if there is one; the owner ends that */
    bool issued;
    void (*complete)(fkv_io_op *op);
    void *owner;
};

/* Before each issue. False: it was given up, and is over with -ECANCELED. Who gives up and looks at
 * `flights` afterwards either finds it there or knows that it won't be issued. */
static inline bool fkv_io_may_issue(fkv_io_op *op)
{
    bool first = !op->issued;
    if (op->flights != NULL && first) atomic_fetch_add(op->flights, 1);
    op->issued = true;
    if (op->given_up == NULL || !atomic_load(op->given_up)) return true;
    if (op->flights != NULL && first) atomic_fetch_sub(op->flights, 1);
    op->issued = !first;
    return false;
}

/* io_common.c: shared by all backends. What a system call's or CQE's result means for the
 * operation. */
#define FKV_IO_DONE 1  /* op->result is final */
#define FKV_IO_AGAIN 0 /* issue it again (what remains of it) */
int fkv_io_settle(fkv_io_op *op, int64_t result, uint32_t retries, fkv_engine_counters *counters);
void fkv_io_prepare(fkv_io_op *op); /* sets remaining, attempts, iov_first, result from iov[] */
void fkv_io_counters_add(fkv_engine_counters *sum,
                         const fkv_engine_counters *part); /* what settle counts */
/* A named thread that takes no signals (they are the embedding process's): 0 or -errno. */
int fkv_thread_start(pthread_t *thread, const char *name, void *(*run)(void *), void *argument);
uint64_t fkv_now_ns(void);                        /* of the monotonic clock */
struct timespec fkv_deadline(int64_t timeout_ms); /* of the monotonic clock, from now on */

typedef struct fkv_backend fkv_backend;
struct fkv_backend {
    const char *name;
    /* Takes a list linked by next, in order. Never waits for the device. */
    void (*submit)(fkv_backend *backend, fkv_io_op *list);
    int (*register_memory)(fkv_backend *backend, void *base, uint64_t length);
    int (*unregister_memory)(fkv_backend *backend, void *base); /* base as it was registered */
    void (*close)(fkv_backend *backend);                        /* waits for what is in flight */
    fkv_engine_counters counters;                               /* of I/O; guarded by lock */
    pthread_mutex_t lock;
};
/* NULL, with *status = -errno, where it can't run. */
fkv_backend *fkv_io_uring_open(const fkv_engine_options *options, int *status);
fkv_backend *fkv_io_threads_open(const fkv_engine_options *options, int *status);
fkv_backend *fkv_io_sim_open(const fkv_engine_options *options, int *status);

/* ---- pool.c: bounce buffers of two sizes, handed out to realtime before background ---- */
#define FKV_POOL_SMALL (16u << 10)
#define FKV_POOL_LARGE ((1u << 20) + (64u << 10))
typedef struct fkv_pool fkv_pool;
typedef struct fkv_pool_waiter fkv_pool_waiter;
struct fkv_pool_waiter {
    fkv_pool_waiter *next;
    void (*ready)(fkv_pool_waiter *waiter, uint8_t *buffer); /* never blocks */
    void *owner;
    bool background;
};
fkv_pool *fkv_pool_new(uint64_t bytes); /* at least two large buffers and eight small ones */
void fkv_pool_free(fkv_pool *pool);
/* Calls waiter->ready at once where a buffer of that size is free (of background: beside a reserve), else
 * when one is given back. */
void fkv_pool_take(fkv_pool *pool, uint64_t bytes, fkv_pool_waiter *waiter);
void fkv_pool_give(fkv_pool *pool, uint8_t *buffer);
uint64_t fkv_pool_in_use(fkv_pool *pool);
uint64_t fkv_pool_waits(fkv_pool *pool);
void fkv_pool_memory(fkv_pool *pool, void **base, uint64_t *length); /* to register it */

/* ---- workers.c: threads that check, decode and encode ---- */
typedef struct fkv_task fkv_task;
struct fkv_task {
    fkv_task *next;
    void (*run)(fkv_task *task);
    void *owner;
    bool background;
};
typedef struct fkv_workers fkv_workers;
fkv_workers *fkv_workers_new(uint32_t count);
void fkv_workers_free(fkv_workers *workers); /* runs what is queued, then ends the threads */
void fkv_workers_push(fkv_workers *workers, fkv_task *task);

/* ---- engine.c ---- */

struct fkv_header_cache;
struct fkv_engine {
    fkv_backend *backend;
    fkv_pool *pool;
    fkv_workers *workers;
    struct fkv_header_cache *headers;
    fkv_engine_options options;
    _Atomic uint64_t direct_reads, bounced_reads, read_through_pages;
    /* finished asynchronous writes (write.c part of engine) */
    pthread_mutex_t write_lock;
    pthread_cond_t write_done;
    struct fkv_write_state *writes_finished, *writes_finished_last;
    uint64_t writes_inflight; /* submitted and not yet reaped */
    /* reads that are over and whose tags were not reaped (reader.c) */
    pthread_mutex_t read_lock;
    pthread_cond_t read_over;
    struct fkv_read_job *reads_over, *reads_over_last;
    bool read_wake;
};

/* write.c: frees what was finished and never reaped; called once the backend is closed */
void fkv_writes_drop(fkv_engine *engine);

/* header_cache.c (declared here so that engine.c can own one) */
struct fkv_header_cache *fkv_header_cache_new(uint64_t bytes);
void fkv_header_cache_free(struct fkv_header_cache *cache);
void fkv_header_cache_counters(struct fkv_header_cache *cache, fkv_engine_counters *counters);
#endif
