/* extents.c: which pages of a record a read needs, and by which device reads they come.
 *
 * Invariants
 *  - every needed page is read exactly once, by one extent, or was in the record's first read;
 *  - an extent has at most FKV_EXTENT_PAGES_MAX payload pages, fewer where layers are waited for; a
 *    long run is cut into equal parts;
 *  - a chunk's pages come by one extent;
 *  - unwanted pages are read through only within gap_pages and amplification_percent of the batch.
 */
#include "allocate.h"
#include "reader.h"
#include <string.h>

/* Most payload pages of an extent. Where layers are waited for, so few that the first ones needn't wait
 * for what comes with them; the device hardly minds. */
static uint32_t extent_pages_max(const fkv_reading *reading)
{
    bool whole = !reading->job->batch->progress || reading->header->chunk_count;
    return whole ? FKV_EXTENT_PAGES_MAX : FKV_EXTENT_LAYER_PAGES;
}

/* A single block that is the whole record, raw, page-aligned: its bytes can land in place before
 * its header is known. */
static uint8_t *first_direct(const fkv_reading *reading, uint64_t *bytes)
{
    const fkv_read_batch *batch = reading->job->batch;
    const fkv_read_record *r = reading->request;
    if (!(r->flags & FKV_RECORD_ALIGNED) || r->record_blocks != 1 || r->want_count != 1
        || r->record_tokens > batch->view->order.block_tokens)
        return NULL;
    const fkv_read_want *w = fkv_want_at(reading, r->first_want);
    *bytes = fkv_block_bytes(batch->geometry, r->record_tokens);
    uint64_t pages = r->pages - r->header_pages;
    if (w->first_token || (w->token_count && w->token_count != r->record_tokens)) return NULL;
    if ((r->header_pages + 1u) * FKV_PAGE_BYTES > FKV_POOL_SMALL || pages > FKV_EXTENT_PAGES_MAX)
        return NULL;
    if (*bytes > pages * FKV_PAGE_BYTES || *bytes + FKV_PAGE_BYTES <= pages * FKV_PAGE_BYTES)
        return NULL;
    return fkv_raw_direct(reading, w, &batch->view->order, *bytes, r->record_tokens);
}

bool fkv_extents_first(fkv_reading *reading)
{
    const fkv_read_batch *batch = reading->job->batch;
    const fkv_read_record *r = reading->request;
    fkv_extent *extent = fkv_extent_new(reading);
    if (!extent) {
        fkv_reading_fail(reading, FKV_NO_MEMORY);
        return false;
    }
    uint64_t bytes, tokens = 0;
    uint32_t payload = r->pages - r->header_pages;
    extent->header_pages = r->header_pages;
    extent->direct = batch->progress ? NULL : first_direct(reading, &bytes);
    if (extent->direct) {
        extent->direct_bytes = bytes / FKV_PAGE_BYTES * FKV_PAGE_BYTES;
        extent->page_count = payload;
        extent->want = r->first_want;
    } else if (reading->job->selects_all && !batch->progress) {
        for (uint32_t i = 0; i < r->want_count; i++) {
            const fkv_read_want *w = fkv_want_at(reading, r->first_want + i);
            tokens += w->token_count ? w->token_count : r->record_tokens / r->record_blocks;
        }
        if (tokens * batch->amplification_percent >= (uint64_t)r->record_tokens * 100)
            extent->page_count = payload < FKV_EXTENT_PAGES_MAX ? payload : FKV_EXTENT_PAGES_MAX;
    }
    fkv_extent_issue(extent);
    return true;
}

/* ---- which pages ---- */

static bool note_ranges(fkv_reading *reading)
{
    const fkv_header *h = reading->header;
    uint32_t wants = reading->request->want_count, end = 0;
    reading->ranges = wants == 1 ? &reading->sole : fkv_malloc(wants * sizeof *reading->ranges);
    if (!reading->ranges) return false;
    for (uint32_t i = 0; i < wants; i++) {
        uint32_t row = reading->request->first_want + i;
        const fkv_read_want *w = fkv_want_at(reading, row);
        if (w->status != FKV_OK) continue;
        uint32_t first = h->blocks[w->ordinal].first_token + w->first_token;
        if (first < end) { /* ordinals ascend, each once: see fkv_read_record */
            fkv_want_fail(reading, row, FKV_MISS);
            continue;
        }
        end = first + w->token_count;
        reading->ranges[reading->range_count++] = (fkv_range){first, end, row};
    }
    return true;
}

typedef struct {
    uint8_t *needed;
    uint64_t block_offset;
    const fkv_header *header; /* of chunks */
    uint32_t first_chunk;     /* of the block */
} need_context;

static void need_run(void *context, uint64_t stored, uint8_t *memory, uint64_t length)
{
    need_context *c = context;
    (void)memory;
    uint64_t from = (c->block_offset + stored) / FKV_PAGE_BYTES;
    uint64_t to = (c->block_offset + stored + length - 1) / FKV_PAGE_BYTES;
    memset(c->needed + from, 1, to - from + 1);
}

static void need_chunks(void *context, uint64_t stored, uint8_t *memory, uint64_t length)
{
    const need_context *c = context;
    const uint32_t *pages = c->header->chunk_pages + c->first_chunk;
    (void)memory;
    uint32_t from = pages[stored / FKV_CHUNK_BYTES];
    uint32_t to = pages[(stored + length - 1) / FKV_CHUNK_BYTES + 1];
    memset(c->needed + from, 1, to - from);
}

/* A whole block into its place without a copy; its pages are then no other read's. */
static bool issue_direct(fkv_reading *reading, uint32_t row, uint64_t offset, uint64_t bytes)
{
    const fkv_read_want *w = fkv_want_at(reading, row);
    const fkv_header *h = reading->header;
    uint8_t *memory = fkv_raw_direct(reading, w, &h->order, bytes, h->blocks[w->ordinal].tokens);
    if (!memory || !(h->fixed.flags & FKV_RECORD_ALIGNED) || bytes < FKV_PAGE_BYTES) return false;
    uint32_t first = (uint32_t)(offset / FKV_PAGE_BYTES);
    uint32_t pages = (uint32_t)((bytes + FKV_PAGE_BYTES - 1) / FKV_PAGE_BYTES);
    uint32_t most = extent_pages_max(reading), parts = (pages + most - 1) / most, done = 0;
    for (uint32_t i = 0; i < parts; i++) {
        uint32_t count = (pages - done) / (parts - i);
        fkv_extent *extent = fkv_extent_new(reading);
        if (!extent) {
            fkv_want_fail(reading, row, FKV_NO_MEMORY);
            return true;
        }
        uint64_t at = (uint64_t)done * FKV_PAGE_BYTES,
                 whole = bytes / FKV_PAGE_BYTES * FKV_PAGE_BYTES;
        extent->first_page = first + done;
        extent->page_count = count;
        extent->direct = memory + at;
        extent->direct_bytes = whole - at < (uint64_t)count * FKV_PAGE_BYTES
                                   ? whole - at
                                   : (uint64_t)count * FKV_PAGE_BYTES;
        extent->want = row;
        done += count;
        fkv_extent_issue(extent);
    }
    return true;
}

static void need_stripes(fkv_reading *reading, uint32_t from, uint32_t to)
{
    const fkv_stripe *stripes = reading->header->stripes;
    for (uint32_t i = from; i < to; i++)
        if (fkv_stripe_wanted(reading, &stripes[i])) reading->needed[stripes[i].page] = 1;
}

/* Pages of the wanted layers' and heads' stripes. */
static void need_coded(fkv_reading *reading)
{
    const fkv_header *h = reading->header;
    const fkv_view *view = reading->job->batch->view;
    uint32_t entry = 0, rest = h->stream_count + 1;
    for (uint32_t p = 0; p < h->geometry.plane_count; p++) {
        const fkv_plane_row *plane = &h->geometry.planes[p];
        for (uint32_t layer = 0; layer < plane->layers; layer++, entry++) {
            if (view->entries[entry].region < 0) continue;
            for (uint32_t head = 0; head < plane->heads; head++) {
                if (view->head_slots && view->head_slots[head] < 0) continue;
                const uint32_t *stripes = &h->stream_stripes[h->entry_streams[entry] + head];
                need_stripes(reading, stripes[0], stripes[1]);
                need_stripes(reading, stripes[rest], stripes[rest + 1]);
            }
        }
    }
}

/* The stored form of most blocks, once for all wants of the record. */
static void note_stored(fkv_reading *reading)
{
    const fkv_header *h = reading->header;
    fkv_order_row order = h->order;
    order.block_tokens = reading->stored_tokens = h->blocks[0].tokens;
    reading->stored = fkv_malloc(fkv_geometry_entries(&h->geometry) * sizeof *reading->stored);
    if (reading->stored) fkv_view_fill(&h->geometry, &order, 0, reading->stored, NULL);
}

static void need_raw(fkv_reading *reading, const fkv_extent *have)
{
    const fkv_header *h = reading->header;
    need_context context = {.needed = reading->needed, .header = h};
    uint32_t have_pages = have && !have->direct ? have->page_count : 0;
    for (uint32_t i = 0; i < reading->request->want_count; i++) {
        uint32_t row = reading->request->first_want + i;
        const fkv_read_want *w = fkv_want_at(reading, row);
        uint64_t bytes;
        if (w->status != FKV_OK) continue;
        if (h->chunk_count) {
            context.first_chunk = h->block_chunks[w->ordinal];
            if (!fkv_raw_runs(reading, w, need_chunks, &context))
                fkv_want_fail(reading, row, FKV_NO_MEMORY);
            continue;
        }
        fkv_raw_block_place(reading, w, &context.block_offset, &bytes);
        uint64_t end_page = (context.block_offset + bytes + FKV_PAGE_BYTES - 1) / FKV_PAGE_BYTES;
        if (end_page > have_pages && issue_direct(reading, row, context.block_offset, bytes))
            continue;
        if (!fkv_raw_runs(reading, w, need_run, &context))
            fkv_want_fail(reading, row, FKV_NO_MEMORY);
    }
}

/* ---- by which reads ---- */

static uint32_t run_limit(const fkv_reading *reading, uint32_t start, uint32_t end)
{
    const uint8_t *needed = reading->needed;
    uint32_t run = start, most = extent_pages_max(reading);
    while (run < end && needed[run]) run++;
    run -= start;
    if (run <= most) return most;
    uint32_t parts = (run + most - 1) / most;
    return (run + parts - 1) / parts;
}

/* The last page up to `last` that ends a chunk. An extent has room for more than one. */
static uint32_t chunk_end(const fkv_header *h, uint32_t last)
{
    uint32_t chunk = fkv_chunk_of_page(h, last);
    return h->chunk_pages[chunk + 1] - 1 == last ? last : h->chunk_pages[chunk] - 1;
}

/* Last page of the extent that begins at `start`. */
static uint32_t extent_last(const fkv_reading *reading, uint32_t start, uint32_t end,
                            uint32_t *through)
{
    const fkv_read_batch *batch = reading->job->batch;
    const uint8_t *needed = reading->needed;
    uint32_t last = start, wanted = 1, limit = run_limit(reading, start, end);
    for (uint32_t p = start + 1; p < end && p - start < limit; p++) {
        uint32_t gap = p - last - 1;
        if (gap > batch->gap_pages) break;
        if (!needed[p]) continue;
        if (gap
            && (uint64_t)(p - start + 1) * 100
                   > (uint64_t)(wanted + 1) * batch->amplification_percent)
            break;
        last = p;
        wanted++;
    }
    *through = last - start + 1 - wanted;
    return last;
}

static void issue_needed(fkv_reading *reading, uint32_t from)
{
    uint32_t end = reading->header->payload_pages;
    for (uint32_t p = from; p < end; p++) {
        const uint8_t *next = memchr(reading->needed + p, 1, end - p);
        if (!next) return;
        p = (uint32_t)(next - reading->needed);
        uint32_t through, last = extent_last(reading, p, end, &through);
        if (reading->header->chunk_count) last = chunk_end(reading->header, last);
        fkv_extent *extent = fkv_extent_new(reading);
        if (!extent) {
            fkv_reading_fail(reading, FKV_NO_MEMORY);
            return;
        }
        extent->first_page = p;
        extent->page_count = last - p + 1;
        atomic_fetch_add_explicit(&reading->job->engine->read_through_pages, through,
                                  memory_order_relaxed);
        fkv_extent_issue(extent);
        p = last;
    }
}

void fkv_extents_rest(fkv_reading *reading, fkv_extent *have)
{
    const fkv_header *h = reading->header;
    if (have && have->direct) {
        if (!memcmp(h->order.axes, reading->job->batch->view->order.axes, 4)) {
            fkv_extent_place(have);
            return;
        }
        have = NULL; /* stored in another order than the one it was read for */
    }
    reading->needed = fkv_calloc(1, h->payload_pages + 1);
    if (!reading->needed) {
        fkv_reading_fail(reading, FKV_NO_MEMORY);
        return;
    }
    if (fkv_holds_blocks(h)) {
        note_stored(reading);
        if (!h->inline_payload) need_raw(reading, have);
    } else if (!note_ranges(reading)) {
        fkv_reading_fail(reading, FKV_NO_MEMORY);
        return;
    } else {
        need_coded(reading);
    }
    if (have && have->page_count && h->chunk_count)
        have->page_count = chunk_end(h, have->page_count - 1) + 1;
    uint32_t have_pages = have ? have->page_count : 0;
    issue_needed(reading, have_pages);
    /* Last, so that what is still missing is on its way meanwhile. Inline records have all in their
     * header. */
    if (have_pages)
        fkv_extent_place(have);
    else if (h->inline_payload)
        fkv_extent_place(&(fkv_extent){.reading = reading});
}
