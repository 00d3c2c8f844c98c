/* io_uring.c: the `io_uring` backend: one thread owns a ring, submits and reaps.
 *
 * Invariants
 *  - only the ring's thread touches the ring (the kernel enforces it with SINGLE_ISSUER); others
 *    hand over operations and requests to register memory under `lock`;
 *  - at most `depth` operations are in the ring, further ones wait in a queue (io_queue.h); so
 *    neither ring can overflow;
 *  - a completion belongs to an operation only if slot and generation in its user data are those of
 *    that operation;
 *  - nobody writes the eventfd unless the ring's thread may sleep with room in the ring for what is
 *    realtime;
 *  - no linked operations: a short write would cancel what is linked behind it;
 *  - counters are added before complete() is called, complete() is called without the lock.
 */
#include "allocate.h"
#include "io_queue.h"
#include <errno.h>

#ifdef FKV_HAVE_LIBURING
#include <assert.h>
#include <liburing.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#define REGIONS_MAX 64                /* registered buffers */
#define REGION_BYTES_MAX (1ull << 30) /* the kernel's limit of one */
#define WAKE_DATA UINT64_MAX          /* user data of the eventfd's read */
#define NS_PER_S 1000000000u
#define PAUSE_NS 1000000 /* before a kernel short of memory is entered again */

typedef struct {
    fkv_io_op *op;
    uint32_t generation;
} uring_slot;

typedef struct {
    uint8_t *base;
    uint64_t length; /* 0: free */
    void *owner;     /* what was registered may take several regions */
} uring_region;

typedef struct control control;
struct control {
    control *next;
    void *base;
    uint64_t length; /* 0: unregister */
    int status;
    bool done;
};

typedef struct {
    fkv_backend base;

    /* guarded by base.lock */
    fkv_op_list intake;
    control *controls;
    pthread_cond_t changed; /* started, or a control is done */
    bool sleeping;          /* the eventfd must be written to be heard soon */
    bool stopping;
    bool started;
    int start_status;

    /* the ring thread's own */
    struct io_uring ring;
    fkv_io_queue queue;
    uring_slot *slots;
    uint32_t *free_slots;
    uint32_t free_count;
    uring_region regions[REGIONS_MAX];
    uint32_t region_end; /* regions behind it are free */
    bool table;          /* the kernel has a sparse buffer table */
    bool wake_armed;
    uint64_t wake_value;

    uint32_t depth, retries;
    int eventfd;
    pthread_t thread;
} uring_backend;

/* ---- registered memory (ring thread) ---- */

/* Index of the registered buffer that holds the range, or -1. */
static int region_of(const uring_backend *uring, const struct iovec *iov)
{
    const uint8_t *base = iov->iov_base;
    for (uint32_t i = 0; i < uring->region_end; i++) {
        const uring_region *region = &uring->regions[i];
        if (base >= region->base && iov->iov_len <= region->length
            && (uint64_t)(base - region->base) <= region->length - iov->iov_len)
            return (int)i;
    }
    return -1;
}

/* Tells the kernel about regions [first, first + count). Kernels before 5.19 have no sparse table:
 * there the whole list is registered anew (the kernel waits for operations that use it). */
static int regions_publish(uring_backend *uring, uint32_t first, uint32_t count)
{
    struct iovec iovs[REGIONS_MAX];
    uint32_t end = 0;
    for (uint32_t i = 0; i < REGIONS_MAX; i++) {
        iovs[i].iov_len = uring->regions[i].length;
        iovs[i].iov_base = iovs[i].iov_len > 0 ? uring->regions[i].base : NULL;
        if (iovs[i].iov_len > 0) end = i + 1;
    }
    int status;
    if (uring->table) {
        __u64 tags[REGIONS_MAX] = {0};
        status =
            io_uring_register_buffers_update_tag(&uring->ring, first, iovs + first, tags, count);
        status = status == (int)count ? 0 : status < 0 ? status : -ENOMEM;
    } else {
        io_uring_unregister_buffers(&uring->ring);
        status = end > 0 ? io_uring_register_buffers(&uring->ring, iovs, end) : 0;
    }
    if (status == 0) uring->region_end = end;
    return status;
}

/* First of `count` neighbouring free regions, or -1. */
static int regions_free(const uring_backend *uring, uint64_t count)
{
    uint64_t run = 0;
    for (int i = 0; i < REGIONS_MAX; i++) {
        run = uring->regions[i].length == 0 ? run + 1 : 0;
        if (run == count) return i + 1 - (int)count;
    }
    return -1;
}

static int regions_add(uring_backend *uring, uint8_t *base, uint64_t length)
{
    uint64_t count = (length + REGION_BYTES_MAX - 1) / REGION_BYTES_MAX;
    int first = count <= REGIONS_MAX ? regions_free(uring, count) : -1;
    if (first < 0) return -ENOSPC;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t start = i * REGION_BYTES_MAX;
        uint64_t bytes = length - start < REGION_BYTES_MAX ? length - start : REGION_BYTES_MAX;
        uring->regions[first + i] = (uring_region){base + start, bytes, base};
    }
    int status = regions_publish(uring, (uint32_t)first, (uint32_t)count);
    if (status != 0) {
        /* What the kernel took of it before it failed must go too, and what was there must stay. */
        for (uint64_t i = 0; i < count; i++) uring->regions[first + i] = (uring_region){0};
        if (regions_publish(uring, (uint32_t)first, (uint32_t)count) != 0) uring->region_end = 0;
    }
    return status;
}

/* Bytes that went, or -ENOENT. */
static int64_t regions_remove(uring_backend *uring, void *owner)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < REGIONS_MAX; i++) {
        if (uring->regions[i].length == 0 || uring->regions[i].owner != owner) continue;
        bytes += uring->regions[i].length;
        uring->regions[i] = (uring_region){0};
        if (uring->table) regions_publish(uring, i, 1);
    }
    if (bytes > 0 && !uring->table && regions_publish(uring, 0, 0) != 0) uring->region_end = 0;
    return bytes > 0 ? (int64_t)bytes : -ENOENT;
}

static void controls_run(uring_backend *uring, control *list)
{
    while (list != NULL) {
        control *next = list->next;
        int64_t change = list->length > 0 ? regions_add(uring, list->base, list->length)
                                          : regions_remove(uring, list->base);
        pthread_mutex_lock(&uring->base.lock);
        if (list->length > 0 && change == 0)
            uring->base.counters.registered_bytes += list->length;
        else if (change > 0)
            uring->base.counters.registered_bytes -= (uint64_t)change;
        list->status = change < 0 ? (int)change : 0;
        list->done = true;
        pthread_cond_broadcast(&uring->changed);
        pthread_mutex_unlock(&uring->base.lock);
        list = next;
    }
}

/* ---- issue and reap (ring thread) ---- */

/* There is one for each slot and for the eventfd's read, whatever the kernel has taken of them. */
static struct io_uring_sqe *sqe_get(uring_backend *uring)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&uring->ring);
    assert(sqe != NULL);
    return sqe;
}

static void sqe_fill(uring_backend *uring, struct io_uring_sqe *sqe, fkv_io_op *op)
{
    struct iovec *iov = &op->iov[op->iov_first];
    unsigned iov_count = op->iov_count - op->iov_first;

    if (op->kind == FKV_IO_SYNC) {
        io_uring_prep_fsync(sqe, op->fd, IORING_FSYNC_DATASYNC);
        return;
    }
    if (iov_count != 1) {
        assert(op->kind == FKV_IO_READ);
        io_uring_prep_readv(sqe, op->fd, iov, iov_count, op->offset);
        return;
    }
    unsigned bytes = (unsigned)iov->iov_len;
    int region = region_of(uring, iov);
    if (op->kind == FKV_IO_READ && region >= 0)
        io_uring_prep_read_fixed(sqe, op->fd, iov->iov_base, bytes, op->offset, region);
    else if (op->kind == FKV_IO_READ)
        io_uring_prep_read(sqe, op->fd, iov->iov_base, bytes, op->offset);
    else if (region >= 0)
        io_uring_prep_write_fixed(sqe, op->fd, iov->iov_base, bytes, op->offset, region);
    else
        io_uring_prep_write(sqe, op->fd, iov->iov_base, bytes, op->offset);
}

/* Counters of what was settled are the backend's already. */
static void complete_all(uring_backend *uring, fkv_op_list *finished)
{
    if (finished->count == 0) return;
    pthread_mutex_lock(&uring->base.lock);
    uring->base.counters.inflight -= finished->count;
    pthread_mutex_unlock(&uring->base.lock);
    for (fkv_io_op *op = fkv_op_list_take(finished); op != NULL; op = fkv_op_list_take(finished))
        op->complete(op);
}

/* True: what was given up has left the queue, so that collect() must look again before this thread sleeps. */
static bool issue(uring_backend *uring)
{
    if (!uring->wake_armed) {
        struct io_uring_sqe *sqe = sqe_get(uring);
        io_uring_prep_read(sqe, uring->eventfd, &uring->wake_value, sizeof uring->wake_value, 0);
        io_uring_sqe_set_data64(sqe, WAKE_DATA);
        uring->wake_armed = true;
    }
    fkv_op_list dropped = {0};
    for (fkv_io_op *op; (op = fkv_io_queue_take(&uring->queue)) != NULL;) {
        if (!fkv_io_may_issue(op)) {
            op->result = -ECANCELED;
            fkv_io_queue_done(&uring->queue, op);
            fkv_op_list_add(&dropped, op);
            continue;
        }
        struct io_uring_sqe *sqe = sqe_get(uring);
        assert(uring->free_count > 0);
        uint32_t index = uring->free_slots[--uring->free_count];
        uring_slot *slot = &uring->slots[index];
        slot->op = op;
        slot->generation++;
        sqe_fill(uring, sqe, op);
        io_uring_sqe_set_data64(sqe, (uint64_t)slot->generation << 32 | index);
    }
    bool any = dropped.count > 0;
    complete_all(uring, &dropped);
    return any;
}

/* The operation that a completion names, or NULL (a kernel that answers twice). */
static fkv_io_op *slot_release(uring_backend *uring, uint64_t data)
{
    uint32_t index = (uint32_t)data;
    if (index >= uring->depth || uring->slots[index].op == NULL
        || uring->slots[index].generation != (uint32_t)(data >> 32))
        return NULL;
    fkv_io_op *op = uring->slots[index].op;
    uring->slots[index].op = NULL;
    uring->free_slots[uring->free_count++] = index;
    return op;
}

static void reap(uring_backend *uring)
{
    fkv_engine_counters counted = {0};
    fkv_op_list finished = {0}, again = {0};
    struct io_uring_cqe *cqe;
    unsigned head, seen = 0;

    io_uring_for_each_cqe(&uring->ring, head, cqe)
    {
        seen++;
        if (cqe->user_data == WAKE_DATA) {
            uring->wake_armed = false;
            continue;
        }
        fkv_io_op *op = slot_release(uring, cqe->user_data);
        if (op == NULL)
            counted.errors++; /* nobody's: it can finish nothing */
        else if (fkv_io_settle(op, cqe->res, uring->retries, &counted) == FKV_IO_DONE) {
            fkv_io_queue_done(&uring->queue, op);
            fkv_op_list_add(&finished, op);
        } else {
            fkv_op_list_add(&again, op);
        }
    }
    io_uring_cq_advance(&uring->ring, seen);

    if (finished.count == 0 && again.count == 0 && counted.errors == 0) return;
    /* Before what waits: a half-done operation holds its buffers. */
    for (fkv_io_op *op; (op = fkv_op_list_take(&again)) != NULL;)
        fkv_io_queue_again(&uring->queue, op);
    pthread_mutex_lock(&uring->base.lock);
    fkv_io_counters_add(&uring->base.counters, &counted);
    pthread_mutex_unlock(&uring->base.lock);
    complete_all(uring, &finished);
}

/* Takes over what others brought, and decides whether they have to wake this thread. False: the
 * time to end has come. */
static bool collect(uring_backend *uring)
{
    for (;;) {
        pthread_mutex_lock(&uring->base.lock);
        fkv_io_queue_add(&uring->queue, uring->intake.head);
        uring->intake = (fkv_op_list){0};
        control *controls = uring->controls;
        uring->controls = NULL;
        /* A full ring can't take more before a completion, which wakes this thread anyway. */
        uring->sleeping = controls == NULL && fkv_io_queue_has_room(&uring->queue);
        bool end = uring->stopping && fkv_io_queue_idle(&uring->queue);
        pthread_mutex_unlock(&uring->base.lock);
        if (controls == NULL) return !end;
        controls_run(uring, controls);
    }
}

static void wait_for_completions(uring_backend *uring)
{
    uint64_t look_ns = fkv_io_queue_look_ns(&uring->queue);
    int status;
    if (look_ns == 0) {
        status = io_uring_submit_and_wait(&uring->ring, 1);
    } else {
        uint64_t now_ns = fkv_now_ns(), left_ns = look_ns > now_ns ? look_ns - now_ns : 1;
        struct __kernel_timespec left = {.tv_sec = (int64_t)(left_ns / NS_PER_S),
                                         .tv_nsec = (long long)(left_ns % NS_PER_S)};
        struct io_uring_cqe *first;
        status = io_uring_submit_and_wait_timeout(&uring->ring, &first, 1, &left, NULL);
    }
    if (status >= 0 || status == -EINTR || status == -EBUSY || status == -ETIME) return;
    /* Nothing else is expected here; what is in the ring stays valid and is tried again. */
    assert(status == -EAGAIN || status == -ENOMEM);
    nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
}

/* ---- life ---- */

static int ring_open(uring_backend *uring)
{
    static const unsigned ladder[] = {
        /* 6.1 */
        IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_COOP_TASKRUN,
        IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_COOP_TASKRUN, /* 6.0 */
        IORING_SETUP_COOP_TASKRUN,                              /* 5.19 */
        0,
    };
    int status = -EINVAL;
    for (unsigned i = 0; i < sizeof ladder / sizeof ladder[0] && status == -EINVAL; i++) {
        struct io_uring_params params = {.flags = ladder[i]};
        status = io_uring_queue_init_params(uring->depth + 1, &uring->ring, &params);
    }
    if (status != 0) return status;

    struct io_uring_probe *probe = io_uring_get_probe_ring(&uring->ring);
    bool able = probe != NULL && io_uring_opcode_supported(probe, IORING_OP_READ)
                && io_uring_opcode_supported(probe, IORING_OP_WRITE)
                && io_uring_opcode_supported(probe, IORING_OP_FSYNC);
    io_uring_free_probe(probe);
    if (!able) {
        io_uring_queue_exit(&uring->ring);
        return -ENOSYS;
    }
    uring->table = io_uring_register_buffers_sparse(&uring->ring, REGIONS_MAX) == 0;
    io_uring_register_ring_fd(&uring->ring); /* where it is known: saves a lookup per call */
    return 0;
}

static void *ring_main(void *argument)
{
    uring_backend *uring = argument;
    int status = ring_open(uring);

    pthread_mutex_lock(&uring->base.lock);
    uring->started = true;
    uring->start_status = status;
    pthread_cond_broadcast(&uring->changed);
    pthread_mutex_unlock(&uring->base.lock);
    if (status != 0) return NULL;
    while (collect(uring)) {
        if (issue(uring)) continue;
        wait_for_completions(uring);
        reap(uring);
    }
    io_uring_queue_exit(&uring->ring);
    return NULL;
}

static void wake(uring_backend *uring)
{
    while (eventfd_write(uring->eventfd, 1) != 0 && errno == EINTR) continue;
}

static void uring_submit(fkv_backend *backend, fkv_io_op *list)
{
    uring_backend *uring = (uring_backend *)backend;
    fkv_op_list more = {list, list, 1};
    for (; more.tail->next != NULL; more.tail = more.tail->next) more.count++;

    pthread_mutex_lock(&backend->lock);
    backend->counters.inflight += more.count;
    fkv_op_list_join(&uring->intake, &more);
    bool must_wake = uring->sleeping;
    uring->sleeping = false;
    pthread_mutex_unlock(&backend->lock);
    if (must_wake) wake(uring);
}

static int control_send(uring_backend *uring, void *base, uint64_t length)
{
    control request = {.base = base, .length = length};
    pthread_mutex_lock(&uring->base.lock);
    request.next = uring->controls;
    uring->controls = &request;
    uring->sleeping = false;
    wake(uring);
    while (!request.done) pthread_cond_wait(&uring->changed, &uring->base.lock);
    pthread_mutex_unlock(&uring->base.lock);
    return request.status;
}

static int uring_register(fkv_backend *backend, void *base, uint64_t length)
{
    return control_send((uring_backend *)backend, base, length);
}

static int uring_unregister(fkv_backend *backend, void *base)
{
    return control_send((uring_backend *)backend, base, 0);
}

static void uring_free(uring_backend *uring)
{
    if (uring->eventfd >= 0) close(uring->eventfd);
    pthread_cond_destroy(&uring->changed);
    pthread_mutex_destroy(&uring->base.lock);
    fkv_free(uring->slots);
    fkv_free(uring->free_slots);
    fkv_free(uring);
}

static void uring_close(fkv_backend *backend)
{
    uring_backend *uring = (uring_backend *)backend;
    pthread_mutex_lock(&backend->lock);
    uring->stopping = true;
    pthread_mutex_unlock(&backend->lock);
    wake(uring);
    pthread_join(uring->thread, NULL);
    uring_free(uring);
}

/* The ring is made by the thread that will own it. */
static int uring_start(uring_backend *uring)
{
    uring->slots = fkv_calloc(uring->depth, sizeof *uring->slots);
    uring->free_slots = fkv_malloc(uring->depth * sizeof *uring->free_slots);
    if (uring->slots == NULL || uring->free_slots == NULL) return -ENOMEM;
    while (uring->free_count < uring->depth) {
        uring->free_slots[uring->free_count] = uring->depth - 1 - uring->free_count;
        uring->free_count++;
    }
    uring->eventfd = eventfd(0, EFD_CLOEXEC);
    if (uring->eventfd < 0) return -errno;
    int status = fkv_thread_start(&uring->thread, "fkv-ring", ring_main, uring);
    if (status != 0) return status;
    pthread_mutex_lock(&uring->base.lock);
    while (!uring->started) pthread_cond_wait(&uring->changed, &uring->base.lock);
    status = uring->start_status;
    pthread_mutex_unlock(&uring->base.lock);
    if (status != 0) pthread_join(uring->thread, NULL);
    return status;
}

fkv_backend *fkv_io_uring_open(const fkv_engine_options *options, int *status)
{
    uring_backend *uring = fkv_calloc(1, sizeof *uring);
    if (uring == NULL) {
        *status = -ENOMEM;
        return NULL;
    }
    uring->base.name = "io_uring";
    uring->base.submit = uring_submit;
    uring->base.register_memory = uring_register;
    uring->base.unregister_memory = uring_unregister;
    uring->base.close = uring_close;
    uring->depth = options->queue_depth;
    fkv_io_queue_init(&uring->queue, uring->depth);
    uring->retries = options->retries;
    uring->eventfd = -1;
    pthread_mutex_init(&uring->base.lock, NULL);
    pthread_cond_init(&uring->changed, NULL);
    *status = uring_start(uring);
    if (*status != 0) {
        uring_free(uring);
        return NULL;
    }
    return &uring->base;
}

#else

fkv_backend *fkv_io_uring_open(const fkv_engine_options *options, int *status)
{
    (void)options;
    *status = -ENOSYS; /* built without liburing */
    return NULL;
}
#endif
