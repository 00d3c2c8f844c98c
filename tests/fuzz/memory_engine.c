/* memory_engine.c: see memory_engine.h. */
#include "memory_engine.h"
#include "record.h"
#include <errno.h>

static const uint8_t *device;
static uint64_t device_bytes, device_offset;
static fkv_io_op *queue, **queue_end = &queue;
static bool draining;
static uint64_t buffers_out;

void memory_device(const uint8_t *bytes, uint64_t length, uint64_t offset)
{
    device = bytes, device_bytes = length, device_offset = offset;
}

static int read_one(fkv_io_op *op)
{
    PROMISE(op->kind == FKV_IO_READ && op->iov_count <= FKV_IO_IOV_MAX);
    if (op->offset < device_offset) return -ENODATA;
    uint64_t at = op->offset - device_offset;
    for (unsigned i = 0; i < op->iov_count; i++) {
        const struct iovec *iov = &op->iov[i];
        if (at > device_bytes || iov->iov_len > device_bytes - at) return -ENODATA;
        memcpy(iov->iov_base, device + at, iov->iov_len);
        at += iov->iov_len;
    }
    return 0;
}

/* Completions submit further operations: those wait in the queue, as they would at a device. */
static void submit(fkv_backend *backend, fkv_io_op *list)
{
    (void)backend;
    *queue_end = list;
    while (*queue_end) queue_end = &(*queue_end)->next;
    if (draining) return;
    draining = true;
    while (queue) {
        fkv_io_op *op = queue;
        queue = op->next;
        if (!queue) queue_end = &queue;
        op->result = read_one(op);
        op->complete(op);
    }
    draining = false;
}

fkv_engine *memory_engine_new(uint32_t memory_alignment)
{
    fkv_engine *engine = calloc(1, sizeof *engine);
    PROMISE(engine && (engine->backend = calloc(1, sizeof *engine->backend)));
    engine->backend->submit = submit;
    engine->headers = fkv_header_cache_new(1 << 20);
    engine->options.memory_alignment = memory_alignment;
    PROMISE(engine->headers);
    return engine;
}

void memory_engine_free(fkv_engine *engine)
{
    PROMISE(!queue && !buffers_out);
    fkv_header_cache_free(engine->headers);
    free(engine->backend);
    free(engine);
}

/* ---- in place of pool.c, workers.c and engine.c ---- */

void fkv_pool_take(fkv_pool *pool, uint64_t bytes, fkv_pool_waiter *waiter)
{
    (void)pool;
    PROMISE(bytes && bytes <= FKV_POOL_LARGE);
    buffers_out++;
    waiter->ready(waiter, exactly(bytes));
}

void fkv_pool_give(fkv_pool *pool, uint8_t *buffer)
{
    (void)pool;
    buffers_out--;
    free(buffer);
}

void fkv_workers_push(fkv_workers *workers, fkv_task *task)
{
    (void)workers;
    task->run(task);
}

/* The largest one is kept: clearing megabytes would take most of a run's time. */
uint8_t *fkv_buffer_alloc(uint64_t length)
{
    static uint8_t *kept;
    if (length != 4u << 20) return length ? calloc(1, length) : NULL;
    if (!kept) kept = calloc(1, length);
    return kept;
}

void fkv_buffer_free(uint8_t *base, uint64_t length)
{
    if (length != 4u << 20) free(base);
}

/* ---- records ---- */

bool set_record_right(uint8_t *record, uint64_t length, const uint8_t *uuid, uint64_t epoch,
                      uint32_t page)
{
    fkv_record_header f;
    uint32_t offset, bytes;
    if (length < FKV_PAGE_BYTES) return false;
    memcpy(&f, record, sizeof f);
    uint64_t header = (uint64_t)f.header_pages * FKV_PAGE_BYTES;
    if (!header || header > length) return false;
    fkv_header_tlv(record, header, FKV_TLV_PAGE_CRCS, &offset, &bytes);
    for (uint32_t i = 0; i < bytes / 4; i++) {
        uint64_t at = header + (uint64_t)i * FKV_PAGE_BYTES;
        if (at + FKV_PAGE_BYTES > length) break;
        uint32_t crc = fkv_page_crc(f.sequence, i, record + at);
        memcpy(record + offset + 4 * (uint64_t)i, &crc, 4);
    }
    fkv_record_bind(record, uuid, epoch, page);
    return true;
}
