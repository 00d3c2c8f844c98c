/* layerwise.c: reads whose layers are waited for: which layers an extent brings, and in which order
 * extents go to the device.
 *
 * Invariants
 *  - a record holds all layers until its extents are known, an extent those that it brings until its
 * bytes are in place or have failed;
 *  - extents start once the last record of the batch is planned: those of lower layers first, of one
 * file in the order of their places.
 */
#include "allocate.h"
#include "progress.h"
#include "reader.h"
#include <assert.h>
#include <stdlib.h>

uint32_t fkv_entry_layer(const fkv_geometry *geometry, uint32_t entry)
{
    for (uint32_t p = 0; p < geometry->plane_count; entry -= geometry->planes[p++].layers)
        if (entry < geometry->planes[p].layers) return entry;
    return 0;
}

static fkv_layer_range all_layers(const fkv_reading *reading)
{
    return (fkv_layer_range){0, fkv_geometry_layers(reading->job->batch->geometry)};
}

static void take_in(fkv_layer_range *range, uint32_t layer)
{
    if (layer < range->first) range->first = layer;
    if (layer + 1 > range->end) range->end = layer + 1;
}

/* Layers that have bytes in [from, to) of a block. Those of a token axis outside the layers' may lie
 * anywhere between the first and the last. */
static void take_in_block(const fkv_reading *reading, fkv_layer_range *range, uint64_t from,
                          uint64_t to)
{
    const fkv_geometry *g = reading->job->batch->geometry;
    const fkv_place_in_memory *place = reading->stored;
    for (uint32_t p = 0; p < g->plane_count; p++)
        for (uint32_t layer = 0; layer < g->planes[p].layers; layer++, place++) {
            uint64_t begin = (uint64_t)place->offset;
            uint64_t end = begin + g->planes[p].vector_bytes
                           + (uint64_t)place->head_stride * (g->planes[p].heads - 1)
                           + (uint64_t)place->token_stride * (reading->stored_tokens - 1);
            if (begin < to && from < end) take_in(range, layer);
        }
}

fkv_layer_range fkv_layers_of_bytes(const fkv_reading *reading, uint64_t from, uint64_t to)
{
    const fkv_header *h = reading->header;
    fkv_layer_range range = {UINT32_MAX, 0};
    if (!reading->job->batch->progress || !reading->stored) return all_layers(reading);
    for (uint32_t b = 0; b < h->fixed.block_count; b++) {
        uint64_t begin = h->block_offsets[b],
                 end = begin + fkv_block_bytes(&h->geometry, h->blocks[b].tokens);
        if (end <= from || begin >= to) continue;
        bool whole = from <= begin && end <= to;
        if (whole || h->blocks[b].tokens != reading->stored_tokens) return all_layers(reading);
        take_in_block(reading, &range, from > begin ? from - begin : 0, to - begin);
    }
    return range.end ? range : all_layers(reading);
}

static fkv_layer_range of_extent(const fkv_extent *extent)
{
    const fkv_reading *reading = extent->reading;
    const fkv_header *h = reading->header;
    uint32_t end = extent->first_page + extent->page_count;
    fkv_layer_range range = {UINT32_MAX, 0};
    if (h->chunk_count) return all_layers(reading);
    if (fkv_holds_blocks(h))
        return fkv_layers_of_bytes(reading, (uint64_t)extent->first_page * FKV_PAGE_BYTES,
                                   (uint64_t)end * FKV_PAGE_BYTES);
    for (uint64_t i = fkv_first_stripe(h, extent->first_page);
         i < h->stripe_count && h->stripes[i].page < end; i++)
        if (fkv_stripe_wanted(reading, &h->stripes[i]))
            take_in(&range, fkv_entry_layer(&h->geometry, h->stream_entries[h->stripes[i].stream]));
    return range.end ? range : all_layers(reading);
}

void fkv_layers_defer(fkv_extent *extent)
{
    fkv_read_job *job = extent->reading->job;
    extent->layers = of_extent(extent);
    fkv_progress_hold(job->batch->progress, extent->layers.first, extent->layers.end, 1);
    pthread_mutex_lock(&job->lock);
    extent->deferred = job->deferred;
    job->deferred = extent;
    job->deferred_count++;
    pthread_mutex_unlock(&job->lock);
}

static int by_layer(const void *left, const void *right)
{
    const fkv_extent *a = *(fkv_extent *const *)left, *b = *(fkv_extent *const *)right;
    const fkv_read_record *ra = a->reading->request, *rb = b->reading->request;
    if (a->layers.first != b->layers.first) return a->layers.first < b->layers.first ? -1 : 1;
    if (ra->segment != rb->segment) return ra->segment < rb->segment ? -1 : 1;
    uint64_t at = (uint64_t)ra->page + a->first_page, bt = (uint64_t)rb->page + b->first_page;
    return at < bt ? -1 : at > bt;
}

static void start_all(fkv_extent *list, uint64_t count)
{
    fkv_extent **sorted = count ? fkv_malloc(count * sizeof(fkv_extent *)) : NULL;
    uint64_t n = 0;
    for (fkv_extent *e = list, *next; e; e = next) {
        next = e->deferred;
        if (sorted)
            sorted[n++] = e;
        else
            fkv_extent_start(e); /* in another order, for want of memory */
    }
    if (sorted) qsort(sorted, n, sizeof(fkv_extent *), by_layer);
    for (uint64_t i = 0; i < n; i++) fkv_extent_start(sorted[i]);
    fkv_free(sorted);
}

void fkv_layers_planned(fkv_reading *reading)
{
    fkv_read_job *job = reading->job;
    fkv_layer_range all = all_layers(reading);
    if (!job->batch->progress || reading->planned) return;
    reading->planned = true;
    fkv_progress_release(job->batch->progress, all.first, all.end);
    pthread_mutex_lock(&job->lock);
    bool last = --job->unplanned == 0;
    fkv_extent *list = job->deferred;
    uint64_t count = job->deferred_count;
    pthread_mutex_unlock(&job->lock);
    if (last) start_all(list, count);
}

void fkv_layers_lost(fkv_extent *extent)
{
    fkv_progress *progress = extent->reading->job->batch->progress;
    if (progress) fkv_progress_fail(progress, extent->header_pages ? 0 : extent->layers.first);
}

void fkv_layers_done(fkv_extent *extent)
{
    fkv_progress *progress = extent->reading->job->batch->progress;
    if (progress && !extent->header_pages)
        fkv_progress_release(progress, extent->layers.first, extent->layers.end);
}

void fkv_layers_begin(fkv_read_job *job)
{
    const fkv_read_batch *batch = job->batch;
    job->unplanned = batch->record_count;
    if (!batch->progress) return;
    uint32_t layers = fkv_geometry_layers(batch->geometry);
    assert(fkv_progress_layers(batch->progress) == layers);
    fkv_progress_hold(batch->progress, 0, layers, batch->record_count);
}
