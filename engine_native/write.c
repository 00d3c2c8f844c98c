/* write.c: asynchronous writes and the blocking helpers, on any backend.
 *
 * Invariants
 *  - a write is cut into near-equal operations of at most FKV_IO_MAX_BYTES at multiples of 4096;
 *  - a write is finished when its last operation is; its result is the error of the lowest offset,
 *    or 0;
 *  - every write submitted is reaped exactly once; fkv_write_submit() takes all its writes or none;
 *  - the blocking helpers must not be called on a backend's thread: they wait for it.
 */
#include "allocate.h"
#include "io.h"
#include <assert.h>
#include <errno.h>
#include <string.h>
#include <time.h>

#define ALIGNMENT 4096u
#define WINDOW 16 /* operations of a blocking helper at the device at once */

typedef struct fkv_write_state fkv_write_state;
struct fkv_write_state {
    fkv_write_state *next;
    fkv_engine *engine;
    fkv_write write;
    uint64_t parts, parts_left;
    fkv_io_op operations[];
};

static uint64_t part_count(uint64_t length)
{
    return (length + FKV_IO_MAX_BYTES - 1) / FKV_IO_MAX_BYTES;
}

/* Bytes of every part but the last: near-equal, so that no small one trails the others. */
static uint64_t part_bytes(uint64_t length)
{
    uint64_t parts = part_count(length);
    uint64_t bytes = (length + parts - 1) / parts;
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* ---- asynchronous writes ---- */

static void finish_locked(fkv_write_state *state)
{
    fkv_engine *engine = state->engine;
    for (uint64_t i = 0; i < state->parts && state->write.result == 0; i++)
        state->write.result = state->operations[i].result;
    state->next = NULL;
    if (engine->writes_finished == NULL)
        engine->writes_finished = state;
    else
        engine->writes_finished_last->next = state;
    engine->writes_finished_last = state;
    pthread_cond_signal(&engine->write_done);
}

static void part_done(fkv_io_op *op)
{
    fkv_write_state *state = op->owner;
    fkv_engine *engine = state->engine;
    pthread_mutex_lock(&engine->write_lock);
    if (--state->parts_left == 0) finish_locked(state);
    pthread_mutex_unlock(&engine->write_lock);
}

static fkv_write_state *state_new(fkv_engine *engine, const fkv_write *write)
{
    uint64_t parts = part_count(write->length);
    fkv_write_state *state = fkv_calloc(1, sizeof *state + parts * sizeof state->operations[0]);
    if (state == NULL) return NULL;
    state->engine = engine;
    state->write = *write;
    state->write.result = 0;
    state->parts = state->parts_left = parts;
    uint64_t bytes = parts > 0 ? part_bytes(write->length) : 0;
    for (uint64_t i = 0; i < parts; i++) {
        fkv_io_op *op = &state->operations[i];
        uint64_t start = i * bytes;
        op->kind = FKV_IO_WRITE;
        op->background = 1; /* nobody waits for it as for a read */
        op->fd = write->fd;
        op->offset = write->offset + start;
        op->iov_count = 1;
        op->iov[0].iov_base = (void *)(write->data + start);
        op->iov[0].iov_len = write->length - start < bytes ? write->length - start : bytes;
        op->complete = part_done;
        op->owner = state;
        op->next = i + 1 < parts ? op + 1 : NULL;
        fkv_io_prepare(op);
    }
    return state;
}

static void states_free(fkv_write_state *list)
{
    while (list != NULL) {
        fkv_write_state *next = list->next;
        fkv_free(list);
        list = next;
    }
}

int fkv_write_submit(fkv_engine *engine, const fkv_write *writes, uint64_t count)
{
    fkv_write_state *states = NULL, **end = &states;
    for (uint64_t i = 0; i < count; i++, end = &(*end)->next) {
        *end = state_new(engine, &writes[i]);
        if (*end == NULL) {
            states_free(states);
            return -ENOMEM;
        }
    }

    /* One list for the backend; writes of no bytes are finished already. */
    fkv_io_op *operations = NULL, **operations_end = &operations;
    pthread_mutex_lock(&engine->write_lock);
    engine->writes_inflight += count;
    for (fkv_write_state *state = states, *next; state != NULL; state = next) {
        next = state->next;
        if (state->parts == 0) {
            finish_locked(state);
        } else {
            *operations_end = state->operations;
            operations_end = &state->operations[state->parts - 1].next;
        }
    }
    pthread_mutex_unlock(&engine->write_lock);
    if (operations != NULL) engine->backend->submit(engine->backend, operations);
    return 0;
}

int64_t fkv_write_reap(fkv_engine *engine, fkv_write *finished, uint64_t room, int64_t timeout_ms)
{
    struct timespec deadline = timeout_ms > 0 ? fkv_deadline(timeout_ms) : (struct timespec){0};
    uint64_t count = 0;

    pthread_mutex_lock(&engine->write_lock);
    while (room > 0 && engine->writes_finished == NULL && engine->writes_inflight > 0
           && timeout_ms != 0) {
        if (timeout_ms < 0)
            pthread_cond_wait(&engine->write_done, &engine->write_lock);
        else if (pthread_cond_timedwait(&engine->write_done, &engine->write_lock, &deadline) != 0)
            break;
    }
    fkv_write_state *list = engine->writes_finished, *last = NULL;
    for (fkv_write_state *state = list; state != NULL && count < room; state = state->next) {
        finished[count++] = state->write;
        last = state;
    }
    if (last != NULL) {
        engine->writes_finished = last->next;
        last->next = NULL;
        engine->writes_inflight -= count;
        /* Others may wait for what this call took: wake them when nothing is left to come. */
        if (engine->writes_inflight == 0) pthread_cond_broadcast(&engine->write_done);
    }
    pthread_mutex_unlock(&engine->write_lock);
    if (last != NULL) states_free(list);
    return (int64_t)count;
}

uint64_t fkv_writes_inflight(fkv_engine *engine)
{
    pthread_mutex_lock(&engine->write_lock);
    uint64_t inflight = engine->writes_inflight;
    pthread_mutex_unlock(&engine->write_lock);
    return inflight;
}

void fkv_writes_drop(fkv_engine *engine)
{
    states_free(engine->writes_finished);
    engine->writes_finished = NULL;
    engine->writes_inflight = 0;
}

/* ---- blocking helpers ---- */

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t all_done;
    uint32_t left;
    uint32_t count;
    fkv_io_op operations[WINDOW];
} window;

static void window_part_done(fkv_io_op *op)
{
    window *waited = op->owner;
    pthread_mutex_lock(&waited->lock);
    if (--waited->left == 0) pthread_cond_signal(&waited->all_done);
    pthread_mutex_unlock(&waited->lock);
}

static void window_init(window *waited)
{
    memset(waited, 0, sizeof *waited);
    pthread_mutex_init(&waited->lock, NULL);
    pthread_cond_init(&waited->all_done, NULL);
}

static void window_destroy(window *waited)
{
    pthread_cond_destroy(&waited->all_done);
    pthread_mutex_destroy(&waited->lock);
}

static void window_add(window *waited, uint8_t kind, int32_t fd, const uint8_t *buffer,
                       uint64_t length, uint64_t offset)
{
    assert(waited->count < WINDOW);
    fkv_io_op *op = &waited->operations[waited->count];
    memset(op, 0, sizeof *op);
    op->kind = kind;
    op->fd = fd;
    op->offset = offset;
    op->iov_count = kind == FKV_IO_SYNC ? 0 : 1;
    op->iov[0].iov_base = (void *)buffer;
    op->iov[0].iov_len = length;
    op->complete = window_part_done;
    op->owner = waited;
    if (waited->count > 0) waited->operations[waited->count - 1].next = op;
    waited->count++;
    fkv_io_prepare(op);
}

static void window_run(fkv_engine *engine, window *waited)
{
    waited->left = waited->count;
    engine->backend->submit(engine->backend, waited->operations);
    pthread_mutex_lock(&waited->lock);
    while (waited->left > 0) pthread_cond_wait(&waited->all_done, &waited->lock);
    pthread_mutex_unlock(&waited->lock);
}

static int move(fkv_engine *engine, uint8_t kind, int32_t fd, const uint8_t *buffer,
                uint64_t length, uint64_t offset)
{
    int result = 0;
    window waited;
    window_init(&waited);
    while (length > 0 && result == 0) {
        for (waited.count = 0; waited.count < WINDOW && length > 0;) {
            uint64_t bytes = part_bytes(length) < length ? part_bytes(length) : length;
            window_add(&waited, kind, fd, buffer, bytes, offset);
            buffer += bytes;
            offset += bytes;
            length -= bytes;
        }
        window_run(engine, &waited);
        for (uint32_t i = 0; i < waited.count && result == 0; i++)
            result = waited.operations[i].result;
    }
    window_destroy(&waited);
    return result;
}

int fkv_pread(fkv_engine *engine, int32_t fd, uint8_t *buffer, uint64_t length, uint64_t offset)
{
    return move(engine, FKV_IO_READ, fd, buffer, length, offset);
}

int fkv_pwrite(fkv_engine *engine, int32_t fd, const uint8_t *buffer, uint64_t length,
               uint64_t offset)
{
    return move(engine, FKV_IO_WRITE, fd, buffer, length, offset);
}

void fkv_sync(fkv_engine *engine, const int32_t *fds, uint64_t count, int32_t *results)
{
    window waited;
    window_init(&waited);
    for (uint64_t first = 0; first < count; first += WINDOW) {
        waited.count = 0;
        for (uint64_t i = first; i < count && waited.count < WINDOW; i++)
            window_add(&waited, FKV_IO_SYNC, fds[i], NULL, 0, 0);
        window_run(engine, &waited);
        for (uint32_t i = 0; i < waited.count; i++)
            results[first + i] = waited.operations[i].result;
    }
    window_destroy(&waited);
}
