/* reader.c: the life of a batch of reads: header, pages, end.
 *
 *   fkv_read: is the record's header known?
 *     no  -> first read: the header and, where all is wanted, the first pages -> header checked -+
 *     yes -----------------------------------------------------------------------------------+  |
 *                                                                                            v  v
 *                           fkv_extents_rest: the pages that are needed, each extent checked,
 *                           decoded and scattered as it arrives
 *
 * Invariants: see reader.h. The caller's thread only submits and waits; nothing here takes a
 * decision about what to keep or where: the batch says which records, how far to read through
 * gaps, and where the bytes go.
 */
#include "allocate.h"
#include "reader.h"
#include <assert.h>
#include <errno.h>
#include <string.h>

/* Operations that one thread gathers to submit them together: so few that the device starts while
 * the rest is planned, so many that a submission's cost is shared. */
#define GATHER_MAX 16
typedef struct op_list {
    struct op_list *outer; /* a backend may complete what is submitted before submit() returns */
    fkv_io_op *head, **tail;
    uint32_t count;
} op_list;
static _Thread_local op_list *gathering;

static void gather_begin(op_list *list)
{
    *list = (op_list){gathering, NULL, &list->head, 0};
    gathering = list;
}

static void gather_flush(fkv_engine *engine, op_list *list)
{
    fkv_io_op *head = list->head;
    list->head = NULL, list->tail = &list->head, list->count = 0;
    if (head) engine->backend->submit(engine->backend, head);
}

static void gather_end(fkv_engine *engine, op_list *list)
{
    gathering = list->outer;
    gather_flush(engine, list);
}

void fkv_want_fail_from(fkv_reading *reading, uint32_t want, uint32_t status, uint32_t layer)
{
    fkv_read_want *w = fkv_want_at(reading, want);
    if (reading->job->batch->progress) fkv_progress_fail(reading->job->batch->progress, layer);
    uint32_t good = FKV_OK, before = __atomic_load_n(&w->failed_layer, __ATOMIC_RELAXED);
    while (layer < before
           && !__atomic_compare_exchange_n(&w->failed_layer, &before, layer, false,
                                           __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    __atomic_compare_exchange_n(&w->status, &good, status, false, __ATOMIC_RELAXED,
                                __ATOMIC_RELAXED);
}

void fkv_want_fail(fkv_reading *reading, uint32_t want, uint32_t status)
{
    fkv_want_fail_from(reading, want, status, 0);
}

void fkv_reading_fail(fkv_reading *reading, uint32_t status)
{
    for (uint32_t i = 0; i < reading->request->want_count; i++)
        fkv_want_fail(reading, reading->request->first_want + i, status);
}

static void reading_close(fkv_reading *reading)
{
    if (atomic_fetch_sub_explicit(&reading->open, 1, memory_order_acq_rel) != 1) return;
    fkv_read_job *job = reading->job;
    pthread_mutex_lock(&job->lock);
    bool last = --job->open_records == 0, tagged = job->tag != 0;
    if (last && !tagged) pthread_cond_signal(&job->done);
    pthread_mutex_unlock(&job->lock);
    if (last && tagged) fkv_read_report(job);
}

/* ---- extents ---- */

fkv_extent *fkv_extent_new(fkv_reading *reading)
{
    fkv_extent *extent = fkv_calloc(1, sizeof *extent);
    if (!extent) return NULL;
    extent->reading = reading;
    extent->next = reading->extents;
    reading->extents = extent;
    atomic_fetch_add_explicit(&reading->open, 1, memory_order_relaxed);
    return extent;
}

static void buffer_give(fkv_extent *extent)
{
    if (!extent->buffer) return;
    if (extent->own_bytes)
        fkv_buffer_free(extent->buffer, extent->own_bytes);
    else
        fkv_pool_give(extent->reading->job->engine->pool, extent->buffer);
    extent->buffer = NULL;
}

/* Is this the record that the index meant, and is every wanted block the one asked for? */
static bool header_fits(fkv_reading *reading, const fkv_header *h)
{
    const fkv_read_batch *batch = reading->job->batch;
    const fkv_read_record *r = reading->request;
    const fkv_record_header *f = &h->fixed;
    if (f->kind != FKV_KIND_DATA || f->sequence != r->sequence || f->pages != r->pages
        || f->header_pages != r->header_pages || f->tokens != r->record_tokens
        || f->block_count != r->record_blocks) {
        fkv_reading_fail(reading, FKV_DAMAGED);
        return false;
    }
    if (memcmp(f->namespace_digest, batch->namespace_digest, FKV_NAMESPACE_BYTES)
        || memcmp(f->shard, batch->shard, FKV_SHARD_BYTES) || f->group != batch->geometry->group
        || h->geometry.plane_count != batch->geometry->plane_count
        || memcmp(h->geometry.planes, batch->geometry->planes,
                  h->geometry.plane_count * sizeof(fkv_plane_row))) {
        fkv_reading_fail(reading, FKV_MISS);
        return false;
    }
    bool any = false;
    for (uint32_t i = 0; i < r->want_count; i++) {
        fkv_read_want *w = fkv_want_at(reading, r->first_want + i);
        bool same = w->ordinal < f->block_count && h->blocks[w->ordinal].key_bytes == w->key_bytes
                    && !memcmp(h->bytes + h->key_offsets[w->ordinal], batch->keys + w->key_offset,
                               w->key_bytes);
        uint32_t tokens = same ? h->blocks[w->ordinal].tokens : 0;
        if (same && !w->token_count && w->first_token < tokens)
            w->token_count = (uint16_t)(tokens - w->first_token);
        if (!same)
            fkv_want_fail(reading, r->first_want + i, FKV_MISS);
        else if (!w->token_count || (uint32_t)w->first_token + w->token_count > tokens
                 || w->token_count > batch->view->order.block_tokens)
            /* Tokens and memory are what the directory says the block has. */
            fkv_want_fail(reading, r->first_want + i, FKV_DAMAGED);
        else
            any = true;
    }
    return any;
}

static void first_arrived(fkv_extent *extent)
{
    fkv_reading *reading = extent->reading;
    const fkv_read_record *r = reading->request;
    int status;
    fkv_header *h =
        fkv_header_parse(extent->buffer, (uint64_t)extent->header_pages * FKV_PAGE_BYTES,
                         r->segment_uuid, r->epoch, r->page, &status);
    if (!h) {
        fkv_reading_fail(reading, (uint32_t)status);
        return;
    }
    reading->header = h;
    fkv_header_cache_put(reading->job->engine->headers, r->segment, r->page, h);
    if (header_fits(reading, h)) fkv_extents_rest(reading, extent);
}

/* A lack of memory or of queue slots, or signals, say nothing about the record: it stays. */
static uint32_t read_status(int32_t result)
{
    if (result == -ENODATA) return FKV_DAMAGED;
    bool passing = result == -ENOMEM || result == -EAGAIN || result == -EINTR;
    return passing ? FKV_NO_MEMORY : FKV_IO_ERROR;
}

void fkv_extent_lost(fkv_extent *extent, uint32_t status)
{
    if (extent->header_pages)
        fkv_reading_fail(extent->reading, status);
    else
        fkv_extent_fail(extent, status);
}

static void extent_run(fkv_task *task)
{
    fkv_extent *extent = task->owner;
    fkv_reading *reading = extent->reading;
    fkv_engine *engine = reading->job->engine;
    op_list list;
    gather_begin(&list);
    if (!fkv_place_begin(reading->job)) {
        fkv_layers_lost(extent); /* who gave up fails its wants */
    } else {
        if (extent->op.result < 0)
            fkv_extent_lost(extent, read_status(extent->op.result));
        else if (extent->header_pages)
            first_arrived(extent);
        else
            fkv_extent_place(extent);
        extent->placed = true;
        fkv_place_end(reading->job);
    }
    buffer_give(extent);
    if (extent->header_pages) fkv_layers_planned(reading);
    fkv_layers_done(extent);
    gather_end(engine, &list);
    reading_close(reading);
}

static void extent_complete(fkv_io_op *op)
{
    fkv_extent *extent = op->owner;
    fkv_read_job *job = extent->reading->job;
    extent->task = (fkv_task){
        .run = extent_run, .owner = extent, .background = job->batch->flags & FKV_READ_BACKGROUND};
    if (op->flights && op->issued) atomic_fetch_sub(op->flights, 1);
    if (extent->page_count + extent->header_pages <= FKV_EXTENT_INLINE_PAGES)
        extent_run(&extent->task);
    else
        fkv_workers_push(job->engine->workers, &extent->task);
}

static void extent_ready(fkv_pool_waiter *waiter, uint8_t *buffer)
{
    fkv_extent *extent = waiter->owner;
    const fkv_read_record *r = extent->reading->request;
    fkv_io_op *op = &extent->op;
    uint64_t head = (uint64_t)extent->header_pages * FKV_PAGE_BYTES;
    uint64_t payload = (uint64_t)extent->page_count * FKV_PAGE_BYTES;
    uint64_t page =
        r->page + (extent->header_pages ? 0 : r->header_pages) + (uint64_t)extent->first_page;
    extent->buffer = buffer;
    op->kind = FKV_IO_READ;
    op->fd = r->fd;
    op->offset = page * FKV_PAGE_BYTES;
    op->complete = extent_complete;
    op->owner = extent;
    op->background = extent->waiter.background;
    op->given_up = &extent->reading->job->given_up;
    op->flights = extent->direct ? &extent->reading->job->direct_flights : NULL;
    if (extent->direct) {
        if (head) op->iov[op->iov_count++] = (struct iovec){buffer, head};
        if (extent->direct_bytes)
            op->iov[op->iov_count++] = (struct iovec){extent->direct, extent->direct_bytes};
        if (payload > extent->direct_bytes)
            op->iov[op->iov_count++] =
                (struct iovec){buffer + head, payload - extent->direct_bytes};
    } else {
        op->iov[op->iov_count++] = (struct iovec){buffer, head + payload};
    }
    fkv_io_prepare(op);
    op->next = NULL;
    assert(gathering); /* buffers are taken and given back while it goes on */
    *gathering->tail = op;
    gathering->tail = &op->next;
    if (++gathering->count == GATHER_MAX) gather_flush(extent->reading->job->engine, gathering);
}

void fkv_extent_issue(fkv_extent *extent)
{
    if (extent->reading->job->batch->progress && !extent->header_pages)
        fkv_layers_defer(extent);
    else
        fkv_extent_start(extent);
}

void fkv_extent_start(fkv_extent *extent)
{
    fkv_engine *engine = extent->reading->job->engine;
    uint64_t bytes = ((uint64_t)extent->header_pages + extent->page_count) * FKV_PAGE_BYTES
                     - extent->direct_bytes;
    extent->waiter.ready = extent_ready;
    extent->waiter.owner = extent;
    extent->waiter.background = extent->reading->job->batch->flags & FKV_READ_BACKGROUND;
    atomic_fetch_add_explicit(extent->direct ? &engine->direct_reads : &engine->bounced_reads, 1,
                              memory_order_relaxed);
    if (bytes == 0) {
        extent_ready(&extent->waiter, NULL);
    } else if (bytes <= FKV_POOL_LARGE) {
        fkv_pool_take(engine->pool, bytes, &extent->waiter);
    } else { /* a header of more than a megabyte */
        uint8_t *buffer = fkv_buffer_alloc(bytes);
        if (buffer) {
            extent->own_bytes = bytes;
            extent_ready(&extent->waiter, buffer);
        } else {
            fkv_reading_fail(extent->reading, FKV_NO_MEMORY);
            fkv_layers_planned(extent->reading); /* only a first read is so long */
            reading_close(extent->reading);
        }
    }
}

/* ---- the batch ---- */

static bool selects_all(const fkv_read_batch *batch)
{
    if (batch->view->head_slots) return false;
    for (uint32_t i = 0; i < batch->view->entry_count; i++)
        if (batch->view->entries[i].region < 0) return false;
    return true;
}

static void reading_begin(fkv_reading *reading)
{
    const fkv_read_record *r = reading->request;
    /* No directory that was checked says so; what follows divides and counts by it. */
    if (!r->header_pages || r->header_pages > r->pages || !r->record_blocks) {
        fkv_reading_fail(reading, FKV_DAMAGED);
    } else {
        reading->header =
            fkv_header_cache_get(reading->job->engine->headers, r->segment, r->page, r->sequence);
        if (reading->header && header_fits(reading, reading->header))
            fkv_extents_rest(reading, NULL);
        else if (!reading->header && fkv_extents_first(reading))
            return;
    }
    fkv_layers_planned(reading);
}

static void reading_free(fkv_reading *reading)
{
    for (fkv_extent *e = reading->extents, *next; e; e = next) {
        next = e->next;
        fkv_free(e);
    }
    fkv_header_release(reading->header);
    if (reading->ranges != &reading->sole) fkv_free(reading->ranges);
    fkv_free(reading->needed), fkv_free(reading->stored);
}

/* Frees what a batch of reads has; nobody uses it any more. */
void fkv_read_free(fkv_read_job *job)
{
    for (uint64_t i = 0; i < job->batch->record_count; i++) reading_free(&job->readings[i]);
    pthread_cond_destroy(&job->done);
    pthread_mutex_destroy(&job->lock);
    fkv_free(job->readings);
    fkv_free(job);
}

static fkv_read_job *job_new(fkv_engine *engine, const fkv_read_batch *batch, uint64_t tag)
{
    fkv_read_job *job = fkv_calloc(1, sizeof *job);
    uint64_t count = batch->record_count ? batch->record_count : 1;
    if (job) job->readings = fkv_calloc(count, sizeof *job->readings);
    for (uint64_t i = 0; i < batch->want_count; i++) {
        batch->wants[i].status = job && job->readings ? FKV_OK : FKV_NO_MEMORY;
        batch->wants[i].failed_layer = job && job->readings ? FKV_NONE : 0;
    }
    if (!job || !job->readings) {
        if (batch->progress) fkv_progress_fail(batch->progress, 0);
        fkv_free(job);
        return NULL;
    }
    pthread_cond_init(&job->done, NULL);
    pthread_mutex_init(&job->lock, NULL);
    job->engine = engine;
    job->batch = batch;
    job->tag = tag;
    job->open_records = batch->record_count;
    job->selects_all = selects_all(batch);
    for (uint64_t i = 0; i < batch->record_count; i++) {
        job->readings[i].job = job;
        job->readings[i].request = &batch->records[i];
        atomic_init(&job->readings[i].open, 1);
    }
    return job;
}

/* A tagged one may be gone when this returns. */
static void job_begin(fkv_read_job *job)
{
    const uint64_t count = job->batch->record_count;
    fkv_reading *readings = job->readings;
    op_list list;
    fkv_layers_begin(job);
    gather_begin(&list);
    for (uint64_t i = 0; i < count; i++) reading_begin(&readings[i]);
    gather_end(job->engine, &list);
    for (uint64_t i = 0; i < count; i++) reading_close(&readings[i]);
}

int fkv_read_start(fkv_engine *engine, const fkv_read_batch *batch, uint64_t tag,
                   fkv_read_job **job)
{
    assert(tag && batch->record_count);
    *job = job_new(engine, batch, tag);
    if (!*job) return FKV_NO_MEMORY;
    job_begin(*job);
    return FKV_OK;
}

void fkv_read(fkv_engine *engine, const fkv_read_batch *batch)
{
    fkv_read_job *job = job_new(engine, batch, 0);
    if (!job) return;
    job_begin(job);
    pthread_mutex_lock(&job->lock);
    while (job->open_records) pthread_cond_wait(&job->done, &job->lock);
    pthread_mutex_unlock(&job->lock);
    fkv_read_free(job);
}
