/* writer.c: segments, their reclaim, and all that changes what the store holds; see plane.h for the
 * locks.
 *
 * Invariants: those of segment_writer.py and space.py, as far as they bear on the order of native
 * calls. */
#include "store.h"
#include <string.h>
#include <time.h>

#define PIN_WAIT_MS 20000 /* a sanitizer on a busy machine is slow, never that slow */

/* ---- segments (Space) ---- */

static void seal(plane *plane)
{
    if (plane->open < 0) return;
    segment *closing = &plane->segments[plane->open];
    plane->open = -1;
    plane_wait_written(plane, UINT64_MAX);
    closing->state = CLOSED;
    int32_t result;
    fkv_sync(plane->engine, &closing->fd, 1, &result);
    CHECK(result == 0, "%s", strerror(-result));
    closing->unsynced = false;
    /* Where a directory would go. */
    uint8_t *page = fkv_buffer_alloc(FKV_PAGE_BYTES);
    CHECK(page, "no memory");
    int status = fkv_pwrite(plane->engine, closing->fd, page, FKV_PAGE_BYTES,
                            (uint64_t)(SEGMENT_PAGES - 1) * FKV_PAGE_BYTES);
    CHECK(status == 0, "%s", strerror(-status));
    fkv_buffer_free(page, FKV_PAGE_BYTES);
    COUNT(plane->counts.sealed, 1);
}

static void publish(plane *plane, uint32_t number)
{
    const segment *begun = &plane->segments[number];
    published *before = atomic_load_explicit(&plane->published, memory_order_relaxed),
              *fresh = calloc(1, sizeof *fresh);
    CHECK(fresh, "no memory");
    if (before) *fresh = *before;
    fresh->before = before;
    fresh->fds[number] = begun->fd;
    fresh->epochs[number] = begun->epoch;
    memcpy(fresh->uuids[number], begun->uuid, FKV_UUID_BYTES);
    atomic_store_explicit(&plane->published, fresh, memory_order_release);
}

static void begin(plane *plane, uint32_t number)
{
    segment *s = &plane->segments[number];
    uint8_t *page = fkv_buffer_alloc(FKV_PAGE_BYTES);
    CHECK(page, "no memory");
    s->epoch++;
    s->first_sequence = plane->next_sequence;
    s->next_page = 1;
    fkv_header_cache_drop(plane->engine, number);
    int status = fkv_pwrite(plane->engine, s->fd, page, FKV_PAGE_BYTES, 0);
    CHECK(status == 0, "%s", strerror(-status));
    fkv_buffer_free(page, FKV_PAGE_BYTES);
    s->unsynced = true;
    s->state = OPEN;
    status = fkv_index_begin_segment(plane->index, number, s->epoch);
    CHECK(status == 0, "segment %u is not empty: %s", number, strerror(-status));
    publish(plane, number);
    plane->open = (int)number;
}

static bool wait_unpinned(plane *plane, uint32_t number, bool patient)
{
    fkv_segment_usage usage;
    for (int waited_ms = 0;; waited_ms++) {
        fkv_index_usage(plane->index, &number, 1, &usage);
        CHECK(usage.live_blocks == 0, "segment %u holds blocks after its end", number);
        if (usage.pins == 0) return true;
        if (!patient) return false;
        CHECK(waited_ms < PIN_WAIT_MS, "%u pins on segment %u stay", usage.pins, number);
        nanosleep(&(struct timespec){.tv_nsec = 500000}, NULL);
    }
}

/* Closed segments, the oldest first. */
static uint32_t candidates(const plane *plane, uint32_t *numbers)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < SEGMENTS; i++) {
        if (plane->segments[i].state != CLOSED) continue;
        uint32_t at = count++;
        for (;
             at > 0
             && plane->segments[numbers[at - 1]].first_sequence > plane->segments[i].first_sequence;
             at--)
            numbers[at] = numbers[at - 1];
        numbers[at] = i;
    }
    return count;
}

/* Nobody may read a free segment: what is left of it goes, at once. */
static void scribble(plane *plane, uint32_t number)
{
    uint64_t length = (uint64_t)SEGMENT_PAGES * FKV_PAGE_BYTES;
    uint8_t *bytes = fkv_buffer_alloc(length);
    CHECK(bytes, "no memory");
    memset(bytes, 0xDB, length);
    int status = fkv_pwrite(plane->engine, plane->segments[number].fd, bytes, length, 0);
    CHECK(status == 0, "%s", strerror(-status));
    fkv_buffer_free(bytes, length);
}

static uint32_t reclaim_locked(plane *plane, uint32_t wanted)
{
    uint32_t numbers[SEGMENTS], freed = 0, count = candidates(plane, numbers);
    for (uint32_t i = 0; i < count && freed < wanted; i++) {
        uint32_t number = numbers[i];
        pthread_mutex_lock(&plane->leases);
        bool held = plane->leased[number] > 0;
        if (!held) fkv_index_drop_segment(plane->index, number);
        pthread_mutex_unlock(&plane->leases);
        if (held || !wait_unpinned(plane, number, freed == 0)) {
            COUNT(plane->counts.held_back, 1);
            continue;
        }
        plane->segments[number].state = FREE;
        fkv_header_cache_drop(plane->engine, number);
        scribble(plane, number);
        freed++;
    }
    COUNT(plane->counts.reclaimed, freed);
    return freed;
}

uint32_t plane_reclaim(plane *plane, uint32_t wanted)
{
    pthread_mutex_lock(&plane->writer);
    uint32_t closed = 0;
    for (uint32_t i = 0; i < SEGMENTS; i++) closed += plane->segments[i].state == CLOSED;
    uint32_t freed = closed > SEGMENTS * 3 / 4 ? reclaim_locked(plane, wanted) : 0;
    pthread_mutex_unlock(&plane->writer);
    return freed;
}

/* The open segment with room for so many pages, another one where it has not; false: all is held. */
static bool room_for(plane *plane, uint32_t pages)
{
    if (plane->open >= 0 && plane->segments[plane->open].next_page + pages <= SEGMENT_PAGES - 1)
        return true;
    seal(plane);
    for (int again = 0; again < 2; again++) {
        for (uint32_t i = 0; i < SEGMENTS; i++)
            if (plane->segments[i].state == FREE) {
                begin(plane, i);
                return true;
            }
        if (!reclaim_locked(plane, 1)) break;
    }
    return false;
}

/* ---- putting ---- */

typedef struct {
    uint32_t count;
    uint32_t rows[BATCH_MAX]; /* of the batch */
    fkv_encode_block blocks[BATCH_MAX];
    fkv_encode_record records[BATCH_MAX];
    uint64_t bounds[BATCH_MAX];
    uint64_t pointers[BATCH_MAX];
    fkv_encode_batch job;
} put_job;

static void job_make(plane *plane, const key_batch *batch, uint8_t *const *blocks, uint8_t codec,
                     bool together, bool replace, put_job *job)
{
    fkv_place places[BATCH_MAX];
    memset(job, 0, sizeof *job);
    if (!replace) fkv_index_lookup(plane->index, batch->digests, batch->count, 0, places);
    for (uint32_t i = 0; i < batch->count; i++) {
        if (!replace && places[i].record != FKV_NONE) continue;
        uint64_t begin = i ? batch->ends[i - 1] : 0;
        job->pointers[i] = (uint64_t)(uintptr_t)blocks[i];
        job->blocks[job->count] =
            (fkv_encode_block){.key_offset = begin,
                               .key_bytes = (uint8_t)(batch->ends[i] - begin),
                               .source = i,
                               .tokens = (uint16_t)plane_tokens(batch->numbers[i])};
        job->rows[job->count++] = i;
    }
    if (!job->count) return;
    uint32_t records = together ? 1 : job->count;
    for (uint32_t i = 0; i < records; i++)
        job->records[i] = (fkv_encode_record){.start_token = FKV_POSITION_UNKNOWN,
                                              .first_block = i,
                                              .block_count = together ? job->count : 1,
                                              .codec = codec};
    job->job = (fkv_encode_batch){
        .geometry = &plane->geometry,
        .view = &plane->exact[batch->numbers[0] / 64 % TOKEN_CLASSES].view,
        .namespace_digest = plane->spaces[batch->space].prefix,
        .shard = plane->shard,
        .keys = batch->blob,
        .pointers = job->pointers,
        .blocks = job->blocks,
        .records = job->records,
        .record_count = records,
    };
}

static void encode(plane *plane, put_job *job)
{
    uint64_t length = 0;
    fkv_encode_bounds(&job->job, job->bounds);
    for (uint64_t i = 0; i < job->job.record_count; i++) length += job->bounds[i];
    staging *buffer = plane_staging_with(plane, length);
    uint64_t at = buffer->used;
    for (uint64_t i = 0; i < job->job.record_count; at += job->bounds[i++]) {
        job->records[i].sequence = plane->next_sequence++;
        job->records[i].buffer_offset = at;
    }
    job->job.buffer = buffer->base;
    fkv_encode(plane->engine, &job->job);
    for (uint64_t i = 0; i < job->job.record_count; i++) {
        const fkv_encode_record *r = &job->records[i];
        CHECK(r->status == FKV_OK, "%d", r->status);
        uint64_t end = r->buffer_offset + (uint64_t)r->pages * FKV_PAGE_BYTES;
        if (end > buffer->used) buffer->used = end;
    }
}

/* Notes a record's write, or lets the one before it grow. */
static void gather_locked(plane *plane, const segment *into, const fkv_encode_record *record,
                          uint32_t page)
{
    uint64_t length = (uint64_t)record->pages * FKV_PAGE_BYTES;
    run *fresh = malloc(sizeof *fresh);
    CHECK(fresh, "no memory");
    *fresh = (run){.offset = (uint64_t)page * FKV_PAGE_BYTES,
                   .length = length,
                   .first_sequence = record->sequence,
                   .data = plane->filling->base + record->buffer_offset,
                   .buffer = plane->filling,
                   .fd = into->fd};
    plane->pending_bytes += length;
    run *last = plane->pending.head;
    while (last && last->next) last = last->next;
    if (last && last->fd == fresh->fd && last->data + last->length == fresh->data
        && last->offset + last->length == fresh->offset && last->length < RUN_BYTES) {
        last->length += length;
        free(fresh);
        return;
    }
    run_append(&plane->pending, fresh);
}

/* Places one record at the tail and shows its blocks. */
static void append(plane *plane, const key_batch *batch, const put_job *job, uint64_t number,
                   const uint32_t *versions, bool lose)
{
    const fkv_encode_record *r = &job->records[number];
    segment *into = &plane->segments[plane->open];
    uint32_t page = into->next_page, id = batch->space;
    uint64_t start = r->buffer_offset, dropped_count;
    fkv_dropped dropped[BATCH_MAX];
    fkv_directory_block blocks[BATCH_MAX];
    fkv_directory_record row = {.sequence = r->sequence,
                                .page = page,
                                .pages = r->pages,
                                .header_pages = r->header_pages,
                                .block_count = (uint16_t)r->block_count,
                                .tokens = r->tokens,
                                .codec = r->codec,
                                .flags = r->flags};
    into->next_page += r->pages;
    into->unsynced = true;
    fkv_records_bind(plane->filling->base, &start, &page, 1, into->uuid, into->epoch);
    for (uint32_t i = 0; i < r->block_count; i++) {
        uint32_t from = job->rows[r->first_block + i];
        memcpy(blocks[i].digest, batch->digests + from * FKV_DIGEST_BYTES, FKV_DIGEST_BYTES);
        blocks[i].tokens = job->blocks[r->first_block + i].tokens;
        blocks[i].ordinal = (uint16_t)i;
        plane_raise(&plane->keys[batch->numbers[from]].ceiling, versions[from]);
    }
    pthread_mutex_lock(&plane->flights);
    gather_locked(plane, into, r, page);
    int status = fkv_index_add(plane->index, (uint32_t)plane->open, &row, 1, blocks, r->block_count,
                               &id, NULL, 0, dropped, &dropped_count);
    CHECK(status == 0 && dropped_count <= r->block_count, "%d", status);
    if (lose) fkv_index_drop_sequences(plane->index, &r->sequence, 1);
    pthread_mutex_unlock(&plane->flights);
    COUNT(plane->counts.dropped, dropped_count);
    COUNT(*(lose ? &plane->counts.lost : &plane->counts.stored), r->block_count);
    for (uint32_t i = 0; i < r->block_count; i++) {
        uint32_t from = job->rows[r->first_block + i];
        plane_raise(&plane->keys[batch->numbers[from]].floor, versions[from] + lose);
    }
}

void plane_put(plane *plane, const key_batch *batch, uint8_t *const *blocks,
               const uint32_t *versions, uint8_t codec, bool together, bool replace, bool lose)
{
    put_job job;
    pthread_mutex_lock(&plane->writer);
    job_make(plane, batch, blocks, codec, together, replace, &job);
    COUNT(plane->counts.skipped, batch->count - job.count);
    if (job.count) {
        encode(plane, &job);
        for (uint64_t i = 0; i < job.job.record_count; i++) {
            if (!room_for(plane, job.records[i].pages)) {
                COUNT(plane->counts.refused, 1);
                break;
            }
            append(plane, batch, &job, i, versions, lose);
        }
        pthread_mutex_lock(&plane->flights);
        plane_launch_locked(plane, RUN_BYTES);
        pthread_mutex_unlock(&plane->flights);
    }
    pthread_mutex_unlock(&plane->writer);
}

/* ---- ending ---- */

void plane_delete(plane *plane, const key_batch *batch)
{
    fkv_dropped dropped[BATCH_MAX];
    uint64_t count;
    pthread_mutex_lock(&plane->writer);
    fkv_index_remove(plane->index, batch->digests, NULL, batch->count, dropped, &count);
    for (uint32_t i = 0; i < batch->count; i++) {
        key_state *key = &plane->keys[batch->numbers[i]];
        plane_raise(&key->floor, VERSION(key->ceiling) + 1);
    }
    pthread_mutex_unlock(&plane->writer);
}

void plane_retire(plane *plane, uint32_t space)
{
    pthread_mutex_lock(&plane->writer);
    fkv_index_drop_namespace(plane->index, space);
    for (uint32_t key = space * KEYS; key < (space + 1) * KEYS; key++)
        plane_raise(&plane->keys[key].floor, VERSION(plane->keys[key].ceiling) + 1);
    CHECK(fkv_index_namespace_blocks(plane->index, space) == 0, "%u", space);
    pthread_mutex_unlock(&plane->writer);
}

void plane_flush(plane *plane)
{
    int32_t fds[SEGMENTS], results[SEGMENTS];
    uint64_t count = 0;
    pthread_mutex_lock(&plane->writer);
    plane_wait_written(plane, UINT64_MAX);
    for (uint32_t i = 0; i < SEGMENTS; i++) {
        if (!plane->segments[i].unsynced) continue;
        fds[count++] = plane->segments[i].fd;
        plane->segments[i].unsynced = false;
    }
    fkv_sync(plane->engine, fds, count, results);
    for (uint64_t i = 0; i < count; i++) CHECK(results[i] == 0, "%s", strerror(-results[i]));
    pthread_mutex_unlock(&plane->writer);
}

void plane_check_rest(plane *plane)
{
    fkv_index_totals totals;
    fkv_engine_counters counters;
    fkv_segment_usage usage[SEGMENTS];
    uint32_t numbers[SEGMENTS];
    uint64_t blocks = 0, records = 0, pages = 0;
    plane_flush(plane);
    for (uint32_t i = 0; i < SEGMENTS; i++) numbers[i] = i;
    fkv_index_usage(plane->index, numbers, SEGMENTS, usage);
    fkv_index_totals_get(plane->index, &totals);
    for (uint32_t i = 0; i < SEGMENTS; i++) {
        CHECK(usage[i].pins == 0, "segment %u has %u pins", i, usage[i].pins);
        blocks += usage[i].live_blocks;
        records += usage[i].live_records;
        pages += usage[i].live_pages;
    }
    CHECK(blocks == totals.blocks && records == totals.records && pages == totals.live_pages,
          "%llu of %llu blocks", (unsigned long long)blocks, (unsigned long long)totals.blocks);
    blocks = 0;
    for (uint32_t i = 0; i < NAMESPACES; i++) blocks += fkv_index_namespace_blocks(plane->index, i);
    CHECK(blocks == totals.blocks, "%llu", (unsigned long long)blocks);
    CHECK(fkv_writes_inflight(plane->engine) == 0, "writes on their way");
    fkv_engine_counters_get(plane->engine, &counters);
    CHECK(counters.inflight == 0 && counters.buffers_in_use == 0 && counters.errors == 0,
          "%llu in flight, %llu bytes of buffers, %llu errors",
          (unsigned long long)counters.inflight, (unsigned long long)counters.buffers_in_use,
          (unsigned long long)counters.errors);
}
