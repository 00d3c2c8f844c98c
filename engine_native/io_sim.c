/* io_sim.c: the `sim` backend of test builds: one thread carries operations out on the real files,
 * as the simulated device of fkv_engine_options decides. A peer of io_uring.c and io_threads.c.
 *
 * Invariants
 *  - results go through fkv_io_settle() as on every backend: what a fault answers is repeated,
 *    resumed or given up as if a kernel had answered it;
 *  - an operation that is held back is carried out when it is answered, not before: late, as the
 *    memory of a caller that let go of it too early would feel it;
 *  - at the close everything is answered, whatever held it back;
 *  - any number of channels needs no further thread: their times are reckoned, not waited for.
 */
#include "sim_state.h"
#include <errno.h>

#ifdef FKV_TEST_BUILD
#include <assert.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#define NS_PER_S 1000000000ull

typedef struct {
    fkv_backend base;
    fkv_sim *sim;
    uint32_t retries;
    bool threaded;
    pthread_t thread;
} sim_backend;

/* ---- carrying out (without the lock) ---- */

static int64_t move(const fkv_io_op *op, int fd, const struct iovec *iov, int iov_count,
                    uint64_t offset)
{
    int64_t moved = op->kind == FKV_IO_READ ? preadv(fd, iov, iov_count, (off_t)offset)
                                            : pwritev(fd, iov, iov_count, (off_t)offset);
    return moved < 0 ? -errno : moved;
}

/* Moves the first `bytes`, `skew` bytes behind their place; unaligned ones too: past O_DIRECT. */
static int64_t move_part(const fkv_io_op *op, uint64_t bytes, uint64_t skew)
{
    struct iovec iov[FKV_IO_IOV_MAX];
    int count = 0, flags = fcntl(op->fd, F_GETFL);
    if (flags < 0) return -errno;
    if (bytes > op->remaining) bytes = op->remaining;
    for (int i = op->iov_first; i < op->iov_count && bytes > 0; i++) {
        iov[count] = op->iov[i];
        if (iov[count].iov_len > bytes) iov[count].iov_len = bytes;
        bytes -= iov[count++].iov_len;
    }
    if (count == 0) return 0;
    int fd = op->fd;
    if (flags & O_DIRECT) {
        char path[32];
        snprintf(path, sizeof path, "/proc/self/fd/%d", op->fd);
        fd = open(path, (flags & O_ACCMODE) | O_CLOEXEC);
        if (fd < 0) return -errno;
    }
    int64_t moved = move(op, fd, iov, count, op->offset + skew);
    if (fd != op->fd) close(fd);
    return moved;
}

static void flip(const fkv_io_op *op, uint64_t moved, uint64_t bit)
{
    bit %= 8 * moved;
    uint64_t byte = bit / 8;
    for (int i = op->iov_first; i < op->iov_count; byte -= op->iov[i++].iov_len) {
        if (byte < op->iov[i].iov_len) {
            ((uint8_t *)op->iov[i].iov_base)[byte] ^= (uint8_t)(1u << bit % 8);
            return;
        }
    }
}

static bool misaligned(const sim_op *s)
{
    if (s->alignment <= 1 || s->op->kind == FKV_IO_SYNC) return false;
    uint64_t bits = s->op->offset;
    for (int i = s->op->iov_first; i < s->op->iov_count; i++)
        bits |= (uintptr_t)s->op->iov[i].iov_base | s->op->iov[i].iov_len;
    return (bits & (s->alignment - 1)) != 0;
}

static int64_t issue(const fkv_io_op *op)
{
    if (op->kind == FKV_IO_SYNC) return fdatasync(op->fd) < 0 ? -errno : 0;
    if (op->remaining == 0) return 0;
    return move(op, op->fd, &op->iov[op->iov_first], op->iov_count - op->iov_first, op->offset);
}

static int64_t carry_out(const sim_op *s)
{
    const fkv_io_op *op = s->op;
    const fkv_sim_fault *fault = s->fails ? &s->outcome : NULL;
    if (fault != NULL && fault->action == FKV_SIM_FAIL) {
        if (op->kind == FKV_IO_WRITE) move_part(op, fault->amount, 0);
        return fault->result;
    }
    if (misaligned(s)) return -EINVAL;
    if (fault == NULL) return issue(op);
    if (fault->action == FKV_SIM_SHORT) return move_part(op, fault->amount, 0);
    if (fault->action == FKV_SIM_LOSE) return (int64_t)op->remaining;
    if (fault->action == FKV_SIM_STRAY) return move_part(op, op->remaining, fault->amount);
    int64_t moved = issue(op);
    if (moved > 0) flip(op, (uint64_t)moved, fault->amount);
    return moved;
}

/* ---- the device thread ---- */

static void list_remove(fkv_sim *sim, sim_op *s)
{
    *(s->previous != NULL ? &s->previous->next : &sim->head) = s->next;
    *(s->next != NULL ? &s->next->previous : &sim->tail) = s->previous;
}

/* The device has it from here on. */
static void issue_to(fkv_sim *sim, fkv_io_op *op, bool dropped)
{
    sim_op *s = calloc(1, sizeof *s);
    if (s == NULL) abort(); /* there is nobody to tell: the test's machine is too small */
    s->op = op;
    s->index = sim->submitted++;
    s->dropped = dropped;
    s->event = SIM_NEVER;
    if (!dropped) {
        sim_identify(sim, s);
        sim_record_begin(sim, s);
        sim_arm(sim, s);
    }
    s->previous = sim->tail;
    *(sim->tail != NULL ? &sim->tail->next : &sim->head) = s;
    sim->tail = s;
}

static void feed(fkv_sim *sim)
{
    for (fkv_io_op *op; (op = fkv_io_queue_take(&sim->queue)) != NULL;)
        issue_to(sim, op, !fkv_io_may_issue(op));
}

/* Settles what was carried out; the lock is held, but not while complete() runs. */
static void answer(sim_backend *backend, sim_op *s)
{
    fkv_sim *sim = backend->sim;
    fkv_io_op *op = s->op;
    fkv_engine_counters counted = {0};
    bool done = true;
    if (s->dropped)
        op->result = -ECANCELED;
    else
        done = fkv_io_settle(op, s->result, backend->retries, &counted) == FKV_IO_DONE;

    pthread_mutex_lock(&backend->base.lock);
    fkv_io_counters_add(&backend->base.counters, &counted);
    if (done) backend->base.counters.inflight--;
    pthread_mutex_unlock(&backend->base.lock);
    if (!done) {
        sim_arm(sim, s);
        return;
    }
    sim_record_end(sim, s);
    list_remove(sim, s);
    sim_answered(sim, s);
    if (sim->depth != 0) {
        fkv_io_queue_done(&sim->queue, op);
        feed(sim);
    }
    pthread_mutex_unlock(&sim->lock);
    free(s);
    op->complete(op);
    pthread_mutex_lock(&sim->lock);
}

static void sleep_until(fkv_sim *sim, uint64_t wake_ns)
{
    if (wake_ns == SIM_NEVER) {
        pthread_cond_wait(&sim->work, &sim->lock);
        return;
    }
    struct timespec wake = {.tv_sec = (time_t)(wake_ns / NS_PER_S),
                            .tv_nsec = (long)(wake_ns % NS_PER_S)};
    pthread_cond_timedwait(&sim->work, &sim->lock, &wake);
}

/* One operation forward; false where nothing can be done before *wake_ns. */
static bool advance(sim_backend *backend, uint64_t *wake_ns)
{
    fkv_sim *sim = backend->sim;
    bool answers;
    sim_op *s = sim_pick(sim, &answers, wake_ns);
    if (s == NULL) return false;
    if (!s->carried && !s->dropped) {
        pthread_mutex_unlock(&sim->lock);
        int64_t result = carry_out(s);
        pthread_mutex_lock(&sim->lock);
        s->result = result;
        s->carried = true;
    }
    if (answers) answer(backend, s);
    return true;
}

static void *device_main(void *argument)
{
    sim_backend *backend = argument;
    fkv_sim *sim = backend->sim;
    uint64_t wake_ns;
    prctl(PR_SET_TIMERSLACK, 1000); /* ns: a rate is kept to more closely than by default */

    pthread_mutex_lock(&sim->lock);
    while (!sim->stopping || sim->head != NULL) {
        if (advance(backend, &wake_ns)) continue;
        uint64_t look_ns = fkv_io_queue_look_ns(&sim->queue);
        sleep_until(sim, look_ns != 0 && look_ns < wake_ns ? look_ns : wake_ns);
        feed(sim);
    }
    pthread_mutex_unlock(&sim->lock);
    return NULL;
}

/* What hangs stays; what complete() submits on the way is taken along. */
void sim_drain(fkv_sim *sim)
{
    sim_backend *backend = (sim_backend *)sim->backend;
    uint64_t wake_ns;
    if (backend == NULL || backend->threaded || sim->draining) return;
    sim->draining = true;
    while (sim->head != NULL) {
        if (advance(backend, &wake_ns)) continue;
        if (wake_ns == SIM_NEVER) break;
        sleep_until(sim, wake_ns);
    }
    sim->draining = false;
}

/* ---- the backend ---- */

static void sim_submit(fkv_backend *base, fkv_io_op *list)
{
    fkv_sim *sim = ((sim_backend *)base)->sim;
    uint64_t count = 0;

    pthread_mutex_lock(&sim->lock);
    for (const fkv_io_op *op = list; op != NULL; op = op->next) count++;
    if (sim->depth != 0) {
        fkv_io_queue_add(&sim->queue, list);
        feed(sim);
    } else {
        for (fkv_io_op *op = list, *next; op != NULL; op = next) {
            next = op->next;
            issue_to(sim, op, !fkv_io_may_issue(op));
        }
    }
    pthread_mutex_lock(&base->lock);
    base->counters.inflight += count;
    pthread_mutex_unlock(&base->lock);
    pthread_cond_signal(&sim->work);
    sim_drain(sim);
    pthread_mutex_unlock(&sim->lock);
}

static int sim_register(fkv_backend *backend, void *base, uint64_t length)
{
    (void)backend, (void)base, (void)length;
    return -EOPNOTSUPP;
}

static int sim_unregister(fkv_backend *backend, void *base)
{
    (void)backend, (void)base;
    return -ENOENT;
}

static void sim_close(fkv_backend *base)
{
    sim_backend *backend = (sim_backend *)base;
    fkv_sim *sim = backend->sim;
    pthread_mutex_lock(&sim->lock);
    sim->stopping = true;
    for (sim_op *s = sim->head; s != NULL; s = s->next) s->hanging = false;
    sim->hanging = 0;
    pthread_cond_signal(&sim->work);
    sim_drain(sim);
    pthread_mutex_unlock(&sim->lock);
    if (backend->threaded) pthread_join(backend->thread, NULL);

    pthread_mutex_lock(&sim->lock);
    sim->backend = NULL;
    sim->stopping = false;
    pthread_mutex_unlock(&sim->lock);
    pthread_mutex_destroy(&base->lock);
    free(backend);
}

/* Makes `backend` the one that is open on the device: 0 or -EBUSY. */
static int device_take(fkv_sim *sim, fkv_backend *backend)
{
    pthread_mutex_lock(&sim->lock);
    int status = sim->backend == NULL || backend == NULL ? 0 : -EBUSY;
    if (status == 0) sim->backend = backend;
    pthread_mutex_unlock(&sim->lock);
    return status;
}

fkv_backend *fkv_io_sim_open(const fkv_engine_options *options, int *status)
{
    sim_backend *backend = options->sim != NULL ? calloc(1, sizeof *backend) : NULL;
    if (backend == NULL) {
        *status = options->sim != NULL ? -ENOMEM : -ENODEV;
        return NULL;
    }
    backend->base.name = "sim";
    backend->base.submit = sim_submit;
    backend->base.register_memory = sim_register;
    backend->base.unregister_memory = sim_unregister;
    backend->base.close = sim_close;
    backend->sim = options->sim;
    backend->retries = options->retries;
    pthread_mutex_init(&backend->base.lock, NULL);
    *status = device_take(backend->sim, &backend->base);
    backend->threaded = !backend->sim->inlined;
    if (*status == 0) {
        if (backend->threaded)
            *status = fkv_thread_start(&backend->thread, "fkv-sim", device_main, backend);
        if (*status == 0) return &backend->base;
        device_take(backend->sim, NULL);
    }
    pthread_mutex_destroy(&backend->base.lock);
    free(backend);
    return NULL;
}

/* ---- the device's life ---- */

fkv_sim *fkv_sim_new(uint64_t seed)
{
    fkv_sim *sim = calloc(1, sizeof *sim);
    if (sim == NULL) return NULL;
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&sim->work, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&sim->lock, NULL);
    sim->seed = seed;
    sim->window = 1;
    return sim;
}

void fkv_sim_free(fkv_sim *sim)
{
    if (sim == NULL) return;
    assert(sim->backend == NULL);
    fkv_sim_forget(sim);
    free(sim->bindings);
    free(sim->faults);
    pthread_cond_destroy(&sim->work);
    pthread_mutex_destroy(&sim->lock);
    free(sim);
}

void fkv_sim_depth(fkv_sim *sim, uint32_t depth)
{
    pthread_mutex_lock(&sim->lock);
    sim->depth = depth;
    fkv_io_queue_init(&sim->queue, depth);
    pthread_mutex_unlock(&sim->lock);
}

void fkv_sim_inline(fkv_sim *sim, int on)
{
    pthread_mutex_lock(&sim->lock);
    sim->inlined = on != 0;
    pthread_mutex_unlock(&sim->lock);
}

#else

fkv_backend *fkv_io_sim_open(const fkv_engine_options *options, int *status)
{
    (void)options;
    *status = -ENOSYS; /* test builds only */
    return NULL;
}
#endif
