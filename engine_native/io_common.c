/* io_common.c: what the result of a system call or completion means for an operation. Shared by all
 * backends, so that they can't differ in it.
 *
 * Invariants
 *  - an operation succeeds only when every byte moved;
 *  - a short result is resumed at a multiple of the operation's own alignment (4096, else 512, else
 *    1), so that direct I/O stays aligned; bytes beyond it are moved again;
 *  - whatever is repeated counts against `retries`; progress does not reset the count;
 *  - a sync is never repeated.
 */
#include "allocate.h"
#include "io.h"
#include <errno.h>
#include <signal.h>
#include <sys/stat.h>

void fkv_io_prepare(fkv_io_op *op)
{
    op->remaining = 0;
    op->attempts = 0;
    op->iov_first = 0;
    op->result = 0;
    for (unsigned i = 0; i < op->iov_count; i++) op->remaining += op->iov[i].iov_len;
}

static int done(fkv_io_op *op, int result, fkv_engine_counters *counters)
{
    op->result = result;
    if (result != 0) counters->errors++;
    if (op->kind == FKV_IO_READ)
        counters->reads++;
    else if (op->kind == FKV_IO_WRITE)
        counters->writes++;
    else
        counters->syncs++;
    return FKV_IO_DONE;
}

static int again_or(fkv_io_op *op, int result, uint32_t retries, fkv_engine_counters *counters)
{
    if (op->attempts >= retries) return done(op, result, counters);
    op->attempts++;
    counters->retries++;
    return FKV_IO_AGAIN;
}

static void advance(fkv_io_op *op, uint64_t bytes)
{
    op->offset += bytes;
    op->remaining -= bytes;
    while (bytes > 0) {
        struct iovec *iov = &op->iov[op->iov_first];
        if (bytes < iov->iov_len) {
            iov->iov_base = (uint8_t *)iov->iov_base + bytes;
            iov->iov_len -= bytes;
            return;
        }
        bytes -= iov->iov_len;
        op->iov_first++;
    }
}

/* A read that ends inside an alignment unit: the file ends there, or the device fails behind it. */
static int stuck_read(const fkv_io_op *op, uint64_t moved)
{
    struct stat status;
    if (fstat(op->fd, &status) == 0 && S_ISREG(status.st_mode)
        && op->offset + moved < (uint64_t)status.st_size)
        return -EIO;
    return -ENODATA;
}

static int settle_short(fkv_io_op *op, uint64_t moved, uint32_t retries,
                        fkv_engine_counters *counters)
{
    uint64_t shape = op->offset | op->remaining;
    uint64_t unit = (shape & 4095) == 0 ? 4096 : (shape & 511) == 0 ? 512 : 1;
    uint64_t progress = moved - moved % unit;

    counters->short_results++;
    if (op->kind == FKV_IO_READ)
        counters->read_bytes += progress;
    else
        counters->written_bytes += progress;
    if (progress > 0) {
        advance(op, progress);
        return again_or(op, -EIO, retries, counters);
    }
    int result = op->kind == FKV_IO_READ ? stuck_read(op, moved) : -EIO;
    if (result == -ENODATA) return done(op, result, counters);
    return again_or(op, result, retries, counters);
}

int fkv_io_settle(fkv_io_op *op, int64_t result, uint32_t retries, fkv_engine_counters *counters)
{
    if (op->kind == FKV_IO_SYNC) return done(op, result < 0 ? (int)result : 0, counters);
    if (result == -EINTR || result == -EAGAIN) return again_or(op, (int)result, retries, counters);
    if (result < 0) return done(op, (int)result, counters);
    if ((uint64_t)result > op->remaining) return done(op, -EIO, counters);
    if ((uint64_t)result < op->remaining) {
        if (result > 0) return settle_short(op, (uint64_t)result, retries, counters);
        if (op->kind == FKV_IO_READ) return done(op, -ENODATA, counters);
        return again_or(op, -EIO, retries, counters);
    }
    if (op->kind == FKV_IO_READ)
        counters->read_bytes += (uint64_t)result;
    else
        counters->written_bytes += (uint64_t)result;
    op->offset += (uint64_t)result;
    op->remaining = 0;
    return done(op, 0, counters);
}

void fkv_io_counters_add(fkv_engine_counters *sum, const fkv_engine_counters *part)
{
    sum->reads += part->reads;
    sum->writes += part->writes;
    sum->syncs += part->syncs;
    sum->read_bytes += part->read_bytes;
    sum->written_bytes += part->written_bytes;
    sum->retries += part->retries;
    sum->short_results += part->short_results;
    sum->errors += part->errors;
}

int fkv_thread_start(pthread_t *thread, const char *name, void *(*run)(void *), void *argument)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int status = fkv_thread_create(thread, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (status == 0) pthread_setname_np(*thread, name);
    return -status;
}

uint64_t fkv_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

struct timespec fkv_deadline(int64_t timeout_ms)
{
    struct timespec deadline;
    clock_gettime(CLOCK_MONOTONIC, &deadline);
    deadline.tv_sec += timeout_ms / 1000;
    deadline.tv_nsec += timeout_ms % 1000 * 1000000;
    if (deadline.tv_nsec >= 1000000000) {
        deadline.tv_nsec -= 1000000000;
        deadline.tv_sec++;
    }
    return deadline;
}
