/* place.c: pages that arrived -> the caller's memory: checked, then copied or decoded.
 *
 * Invariants
 *  - no byte of a page is used before the page's checksum (seeded by the record's sequence and the
 * page's ordinal) was right; the exceptions are a direct read, whose bytes are in place already, and
 * raw bytes from a block's failed layer on: then only the status tells;
 *  - a bad page fails every want that needed it, and no other.
 */
#include "allocate.h"
#include "codec_zstd.h"
#include "reader.h"
#include "stripe.h"
#include <string.h>

static const uint8_t *page_at(const fkv_extent *extent, uint32_t page)
{
    uint64_t at = (uint64_t)(page - extent->first_page) * FKV_PAGE_BYTES;
    const uint8_t *payload =
        extent->buffer ? extent->buffer + (uint64_t)extent->header_pages * FKV_PAGE_BYTES : NULL;
    if (!extent->direct) return payload + at;
    return at < extent->direct_bytes ? extent->direct + at : payload + (at - extent->direct_bytes);
}

static bool page_good(const fkv_extent *extent, uint32_t page)
{
    const fkv_header *h = extent->reading->header;
    return fkv_page_crc(h->fixed.sequence, page, page_at(extent, page)) == h->page_crcs[page];
}

/* ---- raw ---- */

void fkv_raw_block_place(const fkv_reading *reading, const fkv_read_want *want, uint64_t *offset,
                         uint64_t *bytes)
{
    const fkv_header *h = reading->header;
    *offset = h->block_offsets[want->ordinal];
    *bytes = fkv_block_bytes(&h->geometry, h->blocks[want->ordinal].tokens);
}

static bool runs_with(const fkv_reading *reading, const fkv_read_want *want,
                      const fkv_order_row *order, uint32_t block_tokens, uint32_t token_count,
                      fkv_run_fn emit, void *context)
{
    const fkv_read_batch *batch = reading->job->batch;
    fkv_place_in_memory *own = NULL;
    const fkv_place_in_memory *stored = reading->stored;
    fkv_order_row row = *order;
    row.block_tokens = block_tokens;
    if (!stored || reading->stored_tokens != block_tokens) {
        own = fkv_malloc(fkv_geometry_entries(batch->geometry) * sizeof *own);
        if (!own) return false;
        fkv_view_fill(batch->geometry, &row, 0, own, NULL);
        stored = own;
    }
    fkv_runs runs = {batch->geometry, &row, stored, batch->view, want->first_token, token_count};
    fkv_runs_each(&runs, fkv_want_pointers(reading, want), emit, context);
    fkv_free(own);
    return true;
}

bool fkv_raw_runs(const fkv_reading *reading, const fkv_read_want *want, fkv_run_fn emit,
                  void *context)
{
    const fkv_header *h = reading->header;
    return runs_with(reading, want, &h->order, h->blocks[want->ordinal].tokens, want->token_count,
                     emit, context);
}

typedef struct {
    uint8_t *memory;
    uint64_t length;
    uint32_t runs;
} single_run;

static void single_run_note(void *context, uint64_t stored, uint8_t *memory, uint64_t length)
{
    single_run *s = context;
    s->runs++;
    s->memory = stored == 0 ? memory : NULL;
    s->length = length;
}

uint8_t *fkv_raw_direct(const fkv_reading *reading, const fkv_read_want *want,
                        const fkv_order_row *order, uint64_t block_bytes, uint32_t block_tokens)
{
    single_run s = {0};
    uint32_t alignment = reading->job->engine->options.memory_alignment;
    if (!reading->job->selects_all || reading->job->batch->flags & FKV_READ_BOUNCE) return NULL;
    if (!alignment || want->first_token || (want->token_count && want->token_count != block_tokens))
        return NULL;
    if (block_bytes < FKV_PAGE_BYTES) return NULL;
    if (!runs_with(reading, want, order, block_tokens, block_tokens, single_run_note, &s))
        return NULL;
    bool whole = s.runs == 1 && s.memory && s.length == block_bytes;
    return whole && (uintptr_t)s.memory % alignment == 0 ? s.memory : NULL;
}

typedef struct {
    const fkv_extent *extent;
    const uint8_t *inlined;
    uint64_t block_offset, from, to; /* payload bytes that are here */
} copy_context;

static void copy_run(void *context, uint64_t stored, uint8_t *memory, uint64_t length)
{
    const copy_context *c = context;
    uint64_t begin = c->block_offset + stored, end = begin + length;
    uint64_t from = begin > c->from ? begin : c->from, to = end < c->to ? end : c->to;
    if (from >= to) return;
    /* Pages that nobody needed from here were not checked here: a direct read brings that block. */
    if (!c->inlined && !c->extent->reading->needed[from / FKV_PAGE_BYTES]) return;
    const uint8_t *source =
        c->inlined ? c->inlined : page_at(c->extent, c->extent->first_page) - c->from;
    memcpy(memory + (from - begin), source + from, to - from);
}

static void raw_copy(const fkv_extent *extent, copy_context *context)
{
    fkv_reading *reading = extent->reading;
    for (uint32_t i = 0; i < reading->request->want_count; i++) {
        uint32_t row = reading->request->first_want + i;
        const fkv_read_want *w = fkv_want_at(reading, row);
        uint64_t bytes;
        /* What failed in a later layer is wanted up to there where layers are waited for. */
        if (__atomic_load_n(&w->failed_layer, __ATOMIC_RELAXED) <= extent->layers.first) continue;
        fkv_raw_block_place(reading, w, &context->block_offset, &bytes);
        if (context->block_offset >= context->to || context->block_offset + bytes <= context->from)
            continue;
        if (!fkv_raw_runs(reading, w, copy_run, context))
            fkv_want_fail_from(reading, row, FKV_NO_MEMORY, extent->layers.first);
    }
}

/* ---- coded ---- */

/* The first range that ends behind a token, or NULL. */
static const fkv_range *first_range(const fkv_reading *reading, uint32_t token)
{
    uint32_t low = 0, high = reading->range_count;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (reading->ranges[middle].end <= token)
            low = middle + 1;
        else
            high = middle;
    }
    return low < reading->range_count ? &reading->ranges[low] : NULL;
}

bool fkv_stripe_wanted(const fkv_reading *reading, const fkv_stripe *s)
{
    const fkv_view *view = reading->job->batch->view;
    const fkv_header *h = reading->header;
    uint32_t entry = h->stream_entries[s->stream], head = s->stream - h->entry_streams[entry];
    if (view->entries[entry].region < 0 || (view->head_slots && view->head_slots[head] < 0))
        return false;
    const fkv_range *range = first_range(reading, s->first_token);
    return range && range->first < (uint32_t)s->first_token + s->tokens;
}

/* Addresses of a stripe's vectors in the caller's memory; 0 for tokens that nobody wants. */
static void stripe_rows(const fkv_reading *reading, const fkv_stripe *s, uint32_t entry,
                        uint32_t head, uint64_t *rows)
{
    const fkv_view *view = reading->job->batch->view;
    const fkv_range *range = first_range(reading, s->first_token);
    const fkv_range *last = reading->ranges + reading->range_count;
    uint64_t stride = (uint64_t)view->entries[entry].token_stride;
    uint32_t token = s->first_token, end = token + s->tokens;
    for (; range && range < last && range->first < end; range++) {
        while (token < range->first) rows[token++ - s->first_token] = 0;
        const fkv_read_want *w = fkv_want_at(reading, range->want);
        const uint64_t *pointers = fkv_want_pointers(reading, w);
        uint32_t stop = end < range->end ? end : range->end;
        while (token < stop) {
            uint32_t at = token - range->first;
            uint64_t address = fkv_vector(view, pointers, entry, head, at);
            uint32_t piece = range->first + fkv_piece_end(view, at, stop - range->first);
            for (; token < piece; address += stride) rows[token++ - s->first_token] = address;
        }
    }
    while (token < end) rows[token++ - s->first_token] = 0;
}

/* Decodes vectors side by side and scatters those that are wanted. */
static uint32_t stripe_decode_apart(const fkv_header *h, const fkv_stripe *s,
                                    const fkv_plane_row *plane, fkv_last_plan *last,
                                    const uint8_t *in, uint32_t stride, const uint64_t *rows)
{
    uint32_t bytes = plane->vector_bytes;
    uint8_t *whole = fkv_malloc((uint64_t)s->tokens * bytes);
    uint64_t places[FKV_STRIPE_TOKENS_MAX];
    if (!whole) return FKV_NO_MEMORY;
    for (uint32_t t = 0; t < s->tokens; t++)
        places[t] = rows[t] ? (uint64_t)(uintptr_t)(whole + (uint64_t)t * bytes) : 0;
    bool good = fkv_stripe_decode(h, s, bytes, last, in, places);
    const uint8_t *from = whole;
    for (uint32_t t = 0; good && t < s->tokens; t++, from += bytes)
        if (rows[t]) fkv_vector_scatter(plane, stride, from, (uint8_t *)(uintptr_t)rows[t]);
    fkv_free(whole);
    return good ? FKV_OK : FKV_DAMAGED;
}

static uint32_t stripe_place(const fkv_reading *reading, const fkv_stripe *s, const uint8_t *page,
                             fkv_last_plan *last)
{
    const fkv_header *h = reading->header;
    uint64_t rows[FKV_STRIPE_TOKENS_MAX];
    uint32_t entry = h->stream_entries[s->stream], head = s->stream - h->entry_streams[entry];
    const fkv_plane_row *plane = &h->geometry.planes[fkv_entry_plane(&h->geometry, entry)];
    uint32_t apart = reading->job->batch->view->entries[entry].element_stride;
    const uint8_t *in = page + s->offset;
    stripe_rows(reading, s, entry, head, rows);
    if (apart) return stripe_decode_apart(h, s, plane, last, in, apart, rows);
    return fkv_stripe_decode(h, s, plane->vector_bytes, last, in, rows) ? FKV_OK : FKV_DAMAGED;
}

static void stripe_fail(fkv_reading *reading, const fkv_stripe *s, uint32_t status)
{
    const fkv_range *range = first_range(reading, s->first_token);
    const fkv_range *last = reading->ranges + reading->range_count;
    const fkv_header *h = reading->header;
    uint32_t layer = fkv_entry_layer(&h->geometry, h->stream_entries[s->stream]);
    for (; range && range < last && range->first < (uint32_t)s->first_token + s->tokens; range++)
        fkv_want_fail_from(reading, range->want, status, layer);
}

uint64_t fkv_first_stripe(const fkv_header *h, uint32_t page)
{
    uint64_t low = 0, high = h->stripe_count;
    while (low < high) {
        uint64_t middle = (low + high) / 2;
        if (h->stripes[middle].page < page)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void coded_place(const fkv_extent *extent)
{
    fkv_reading *reading = extent->reading;
    const fkv_header *h = reading->header;
    uint32_t end = extent->first_page + extent->page_count, checked = UINT32_MAX;
    bool good = false;
    fkv_last_plan last;
    last.stream = FKV_NO_STREAM;
    for (uint64_t i = fkv_first_stripe(h, extent->first_page);
         i < h->stripe_count && h->stripes[i].page < end; i++) {
        const fkv_stripe *s = &h->stripes[i];
        if (!fkv_stripe_wanted(reading, s)) continue;
        if (s->page != checked) {
            checked = s->page;
            good = page_good(extent, checked);
        }
        uint32_t status =
            good ? stripe_place(reading, s, page_at(extent, s->page), &last) : FKV_DAMAGED;
        if (status != FKV_OK) stripe_fail(reading, s, status);
    }
}

/* ---- an extent ---- */

/* Whoever wants a block that has some of these bytes; of chunks: of the blocks one behind the other. */
static void fail_bytes(fkv_reading *reading, uint64_t from, uint64_t to, uint32_t status)
{
    uint32_t layer =
        reading->header->chunk_count ? 0 : fkv_layers_of_bytes(reading, from, to).first;
    for (uint32_t i = 0; i < reading->request->want_count; i++) {
        uint32_t row = reading->request->first_want + i;
        const fkv_read_want *w = fkv_want_at(reading, row);
        uint64_t offset, bytes;
        if (w->ordinal >= reading->header->fixed.block_count) continue;
        fkv_raw_block_place(reading, w, &offset, &bytes);
        if (offset < to && offset + bytes > from) fkv_want_fail_from(reading, row, status, layer);
    }
}

/* Where a chunk's bytes lie among those of all blocks. */
static void chunk_range(const fkv_header *h, uint32_t chunk, uint64_t *from, uint64_t *to)
{
    uint32_t low = 0, high = h->fixed.block_count;
    while (high - low > 1) {
        uint32_t middle = (low + high) / 2;
        if (h->block_chunks[middle] <= chunk)
            low = middle;
        else
            high = middle;
    }
    *from = h->block_offsets[low] + (uint64_t)(chunk - h->block_chunks[low]) * FKV_CHUNK_BYTES;
    *to = *from + FKV_CHUNK_BYTES;
    if (*to > h->block_offsets[low + 1]) *to = h->block_offsets[low + 1];
}

static void fail_chunk(fkv_reading *reading, uint32_t chunk, uint32_t status)
{
    uint64_t from, to;
    chunk_range(reading->header, chunk, &from, &to);
    fail_bytes(reading, from, to, status);
}

static void chunk_place(const fkv_extent *extent, uint32_t chunk, fkv_zstd *zstd, uint8_t *scratch)
{
    fkv_reading *reading = extent->reading;
    const fkv_header *h = reading->header;
    copy_context context = {.extent = extent};
    uint8_t *whole = scratch + FKV_CHUNK_SCRATCH;
    uint32_t first = h->chunk_pages[chunk], end = h->chunk_pages[chunk + 1];
    bool good = true;
    chunk_range(h, chunk, &context.from, &context.to);
    for (uint32_t p = first; good && p < end; p++) good = page_good(extent, p);
    if (!good
        || !fkv_chunk_decode(zstd, h->chunk_rows[chunk], page_at(extent, first), scratch, whole,
                             (uint32_t)(context.to - context.from))) {
        fail_chunk(reading, chunk, FKV_DAMAGED);
        return;
    }
    context.inlined = whole - context.from;
    raw_copy(extent, &context);
}

static void chunks_place(const fkv_extent *extent)
{
    fkv_reading *reading = extent->reading;
    const fkv_header *h = reading->header;
    const uint32_t end = extent->first_page + extent->page_count;
    fkv_zstd *zstd = fkv_zstd_new(false);
    uint8_t *scratch = fkv_malloc(FKV_CHUNK_SCRATCH + FKV_CHUNK_BYTES);
    for (uint32_t k = fkv_chunk_of_page(h, extent->first_page);
         k < h->chunk_count && h->chunk_pages[k + 1] <= end; k++) {
        if (!reading->needed[h->chunk_pages[k]]) continue;
        if (zstd && scratch)
            chunk_place(extent, k, zstd, scratch);
        else
            fail_chunk(reading, k, FKV_NO_MEMORY);
    }
    fkv_free(scratch);
    fkv_zstd_free(zstd);
}

static void fail_pages(fkv_reading *reading, uint32_t first, uint32_t count, uint32_t status)
{
    const fkv_header *h = reading->header;
    uint32_t end = first + count;
    if (!fkv_holds_blocks(h)) {
        for (uint64_t i = fkv_first_stripe(h, first);
             i < h->stripe_count && h->stripes[i].page < end; i++)
            if (fkv_stripe_wanted(reading, &h->stripes[i]))
                stripe_fail(reading, &h->stripes[i], status);
        return;
    }
    if (h->chunk_count) {
        for (uint32_t k = fkv_chunk_of_page(h, first);
             k < h->chunk_count && h->chunk_pages[k] < end; k++)
            fail_chunk(reading, k, status);
        return;
    }
    fail_bytes(reading, (uint64_t)first * FKV_PAGE_BYTES, (uint64_t)end * FKV_PAGE_BYTES, status);
}

void fkv_extent_fail(fkv_extent *extent, uint32_t status)
{
    if (extent->direct)
        fkv_want_fail_from(extent->reading, extent->want, status, extent->layers.first);
    else
        fail_pages(extent->reading, extent->first_page, extent->page_count, status);
}

static void direct_place(fkv_extent *extent)
{
    uint64_t offset, bytes;
    fkv_reading *reading = extent->reading;
    uint32_t end = extent->first_page + extent->page_count;
    uint32_t tail = extent->first_page + (uint32_t)(extent->direct_bytes / FKV_PAGE_BYTES);
    bool tail_good = true;
    fkv_raw_block_place(reading, fkv_want_at(reading, extent->want), &offset, &bytes);
    for (uint32_t p = extent->first_page; p < end; p++) {
        if (page_good(extent, p)) continue;
        uint64_t from = (uint64_t)p * FKV_PAGE_BYTES;
        /* Pages of higher layers may lie before those of lower ones: all are looked at. */
        fkv_want_fail_from(reading, extent->want, FKV_DAMAGED,
                           fkv_layers_of_bytes(reading, from, from + FKV_PAGE_BYTES).first);
        tail_good &= p != tail;
    }
    uint64_t read_to = offset + bytes - (uint64_t)extent->first_page * FKV_PAGE_BYTES;
    if (tail_good && read_to > extent->direct_bytes
        && read_to < (uint64_t)extent->page_count * FKV_PAGE_BYTES + 1)
        memcpy(extent->direct + extent->direct_bytes, page_at(extent, tail),
               read_to - extent->direct_bytes);
}

void fkv_extent_place(fkv_extent *extent)
{
    fkv_reading *reading = extent->reading;
    const fkv_header *h = reading->header;
    if (h->inline_payload) {
        copy_context context = {.inlined = h->inline_payload, .to = h->fixed.payload_bytes};
        raw_copy(extent, &context);
        return;
    }
    if (extent->direct) {
        direct_place(extent);
        return;
    }
    if (!fkv_holds_blocks(h)) {
        coded_place(extent);
        return;
    }
    if (h->chunk_count) {
        chunks_place(extent);
        return;
    }
    uint32_t end = extent->first_page + extent->page_count;
    for (uint32_t p = extent->first_page; p < end; p++)
        if (reading->needed[p] && !page_good(extent, p)) fail_pages(reading, p, 1, FKV_DAMAGED);
    copy_context context = {.extent = extent,
                            .from = (uint64_t)extent->first_page * FKV_PAGE_BYTES,
                            .to = (uint64_t)end * FKV_PAGE_BYTES};
    raw_copy(extent, &context);
}
