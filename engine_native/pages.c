/* pages.c: the streams of a record -> per-head pages.
 *
 * Invariants
 *  - a full page holds one stripe of one stream, as many tokens as fit; what a stream leaves over
 * goes, in stream order, into shared pages, split at token boundaries so that those are full too;
 *  - full pages come first, then the shared ones; the stripe table is in the order of the pages;
 *  - a stream whose code would be longer than its plain rows is stored plain.
 */
#include "allocate.h"
#include "encode.h"
#include <string.h>

#define SPLIT_TOKENS_MIN 4u /* a stripe of fewer tokens isn't worth its row of the table */

typedef struct {
    const fkv_encode_batch *batch;
    const fkv_encode_record *record;
    fkv_record_shape *shape;
    fkv_record_parts *parts;
    uint8_t *payload;
    uint64_t page_room, stripe_room;
    uint32_t page;   /* pages begun */
    uint32_t offset; /* in the shared page that is open */
    bool shared_open;
    uint64_t *rows;           /* [tokens]: addresses of one stream's vectors */
    uint8_t *gathered;        /* [tokens]: vectors whose elements lie apart; NULL: there are none */
    uint16_t *costs;          /* [tokens] */
    uint32_t *left_first;     /* [streams]: first token of the remainder */
    uint32_t *stream_offsets; /* [streams]: into parts->streams */
} packer;

void fkv_parts_free(fkv_record_parts *parts)
{
    fkv_free(parts->page_crcs), fkv_free(parts->streams), fkv_free(parts->stripes);
    parts->page_crcs = parts->stripes = NULL;
    parts->streams = NULL;
}

/* Where a vector lies after its elements were brought together. */
static uint64_t packer_gather(packer *p, const fkv_plane_row *plane, uint32_t stride,
                              uint64_t address, uint32_t token)
{
    uint8_t *to = p->gathered + (uint64_t)token * plane->vector_bytes;
    fkv_vector_gather(plane, stride, (const uint8_t *)(uintptr_t)address, to);
    return (uint64_t)(uintptr_t)to;
}

static void packer_rows(packer *p, const fkv_plane_row *plane, uint32_t entry, uint32_t head,
                        uint32_t first_token)
{
    const fkv_encode_batch *batch = p->batch;
    uint32_t token = 0, apart = batch->view->entries[entry].element_stride;
    for (uint32_t i = 0; i < p->record->block_count; i++) {
        const fkv_encode_block *b = &batch->blocks[p->record->first_block + i];
        if (token + b->tokens > first_token) {
            const uint64_t *pointers =
                batch->pointers + (uint64_t)b->source * batch->view->region_count;
            uint64_t stride = (uint64_t)batch->view->entries[entry].token_stride;
            uint32_t t = first_token > token ? first_token - token : 0;
            while (t < b->tokens) {
                uint64_t address = fkv_vector(batch->view, pointers, entry, head, t);
                uint32_t end = fkv_piece_end(batch->view, t, b->tokens);
                for (; t < end; address += stride, t++)
                    p->rows[token + t] =
                        apart ? packer_gather(p, plane, apart, address, token + t) : address;
            }
        }
        token += b->tokens;
    }
}

static void packer_costs(packer *p, const fkv_plane_row *plane, const fkv_stream_row *stream,
                         const uint8_t *bases, uint32_t first, uint32_t count)
{
    if (stream->mode != FKV_STREAM_PLAIN) {
        fkv_fxp_costs(p->rows + first, count, plane->vector_bytes, stream->mode, bases,
                      p->costs + first);
        return;
    }
    for (uint32_t t = first; t < first + count; t++) p->costs[t] = (uint16_t)plane->vector_bytes;
}

/* Tokens from `first` on that fit into `space` bytes. */
static uint32_t packer_fit(const packer *p, uint32_t first, uint32_t end, uint32_t space,
                           uint32_t *bytes)
{
    uint32_t used = 0, t = first;
    if (end - first > FKV_STRIPE_TOKENS_MAX) end = first + FKV_STRIPE_TOKENS_MAX;
    while (t < end && used + p->costs[t] <= space) used += p->costs[t++];
    *bytes = used;
    return t - first;
}

static int packer_stripe(packer *p, const fkv_plane_row *plane, const fkv_stream_row *stream,
                         const uint8_t *bases, uint32_t first, uint32_t count, bool new_page)
{
    if (p->shape->stripes >= p->stripe_room || p->page > p->page_room) return FKV_TOO_LARGE;
    uint8_t *out = p->payload + (uint64_t)(p->page - 1) * FKV_PAGE_BYTES + p->offset;
    uint32_t length = 0;
    if (stream->mode == FKV_STREAM_PLAIN)
        for (uint32_t t = first; t < first + count; t++, length += plane->vector_bytes)
            memcpy(out + length, (const uint8_t *)(uintptr_t)p->rows[t], plane->vector_bytes);
    else
        length =
            fkv_fxp_encode(p->rows + first, count, plane->vector_bytes, stream->mode, bases, out);
    p->parts->stripes[p->shape->stripes++] = length | count << 13 | (uint32_t)new_page << 24;
    p->offset += length;
    return FKV_OK;
}

static void packer_close_page(packer *p)
{
    uint8_t *page = p->payload + (uint64_t)(p->page - 1) * FKV_PAGE_BYTES;
    memset(page + p->offset, 0, FKV_PAGE_BYTES - p->offset);
    p->parts->page_crcs[p->page - 1] = fkv_page_crc(p->record->sequence, p->page - 1, page);
    p->shape->payload_pages = p->page;
}

/* Chooses the stream's mode and writes its full pages. */
static int packer_full_pages(packer *p, const fkv_plane_row *plane, uint32_t stream_index)
{
    fkv_stream_row stream = {0};
    uint8_t *row = p->parts->streams + p->stream_offsets[stream_index],
            *bases = row + sizeof stream;
    uint32_t tokens = p->shape->tokens, first = 0, bytes, total = 0;
    uint32_t mode = !fkv_plane_bases(plane)          ? FKV_STREAM_PLAIN
                    : plane->dtype == FKV_DTYPE_BF16 ? FKV_STREAM_FXP_BF16
                                                     : FKV_STREAM_FXP_FP16;
    if (mode != FKV_STREAM_PLAIN) {
        stream.mode = (uint8_t)mode;
        fkv_fxp_choose(p->rows, tokens, plane->vector_bytes, mode, bases);
        packer_costs(p, plane, &stream, bases, 0, tokens);
        for (uint32_t t = 0; t < tokens; t++) total += p->costs[t];
    }
    if (mode == FKV_STREAM_PLAIN || total >= (uint64_t)tokens * plane->vector_bytes) {
        stream.mode = FKV_STREAM_PLAIN;
        memset(bases, 0, fkv_plane_bases(plane));
        packer_costs(p, plane, &stream, bases, 0, tokens);
        total = tokens * plane->vector_bytes;
    }
    while (total > FKV_PAGE_BYTES) {
        uint32_t count = packer_fit(p, first, tokens, FKV_PAGE_BYTES, &bytes);
        p->page++, p->offset = 0;
        int status = packer_stripe(p, plane, &stream, bases, first, count, true);
        if (status != FKV_OK) return status;
        packer_close_page(p);
        first += count, total -= bytes, stream.full_stripes++;
    }
    p->left_first[stream_index] = first;
    memcpy(row, &stream, sizeof stream);
    return FKV_OK;
}

static int packer_shared(packer *p, const fkv_plane_row *plane, uint32_t stream_index)
{
    fkv_stream_row stream;
    const uint8_t *row = p->parts->streams + p->stream_offsets[stream_index],
                  *bases = row + sizeof stream;
    memcpy(&stream, row, sizeof stream);
    uint32_t tokens = p->shape->tokens, first = p->left_first[stream_index], bytes;
    packer_costs(p, plane, &stream, bases, first, tokens - first);
    while (first < tokens) {
        bool new_page = false;
        uint32_t left = tokens - first;
        uint32_t count =
            p->shared_open ? packer_fit(p, first, tokens, FKV_PAGE_BYTES - p->offset, &bytes) : 0;
        if (count < left && count < SPLIT_TOKENS_MIN) {
            if (p->shared_open) packer_close_page(p);
            p->shared_open = new_page = true;
            p->page++, p->offset = 0;
            count = packer_fit(p, first, tokens, FKV_PAGE_BYTES, &bytes);
        }
        int status = packer_stripe(p, plane, &stream, bases, first, count, new_page);
        if (status != FKV_OK) return status;
        first += count;
    }
    return FKV_OK;
}

typedef int (*packer_step)(packer *p, const fkv_plane_row *plane, uint32_t stream_index);

/* Runs a step over all streams in their order. */
static int packer_each(packer *p, packer_step step, bool remainder)
{
    const fkv_geometry *g = p->batch->geometry;
    uint32_t layers = fkv_geometry_layers(g), stream = 0;
    for (uint32_t layer = 0; layer < layers; layer++)
        for (uint32_t plane = 0, entry = layer; plane < g->plane_count;
             entry += g->planes[plane++].layers) {
            const fkv_plane_row *row = &g->planes[plane];
            if (layer >= row->layers) continue;
            for (uint32_t head = 0; head < row->heads; head++, stream++) {
                packer_rows(p, row, entry, head, remainder ? p->left_first[stream] : 0);
                int status = step(p, row, stream);
                if (status != FKV_OK) return status;
            }
        }
    return FKV_OK;
}

static void packer_offsets(packer *p)
{
    const fkv_geometry *g = p->batch->geometry;
    uint32_t layers = fkv_geometry_layers(g), stream = 0, at = 0;
    for (uint32_t layer = 0; layer < layers; layer++)
        for (uint32_t plane = 0; plane < g->plane_count; plane++) {
            const fkv_plane_row *row = &g->planes[plane];
            for (uint32_t head = 0; layer < row->layers && head < row->heads; head++) {
                p->stream_offsets[stream++] = at;
                at += sizeof(fkv_stream_row) + fkv_plane_bases(row);
            }
        }
}

/* Bytes of the longest vector whose elements lie apart. */
static uint32_t packer_apart_bytes(const fkv_encode_batch *batch)
{
    uint32_t bytes = 0, entry = 0;
    for (uint32_t p = 0; p < batch->geometry->plane_count; p++) {
        const fkv_plane_row *plane = &batch->geometry->planes[p];
        for (uint32_t l = 0; l < plane->layers; l++, entry++)
            if (batch->view->entries[entry].element_stride && plane->vector_bytes > bytes)
                bytes = plane->vector_bytes;
    }
    return bytes;
}

int fkv_pages_encode(const fkv_encode_batch *batch, const fkv_encode_record *record,
                     fkv_record_shape *shape, uint8_t *payload, fkv_record_parts *parts)
{
    packer p = {.batch = batch,
                .record = record,
                .shape = shape,
                .parts = parts,
                .payload = payload,
                .page_room = shape->payload_pages,
                .stripe_room = shape->stripes};
    uint32_t apart = packer_apart_bytes(batch);
    if (apart) p.gathered = fkv_malloc((uint64_t)shape->tokens * apart);
    p.rows = fkv_malloc(shape->tokens * sizeof *p.rows);
    p.costs = fkv_malloc(shape->tokens * sizeof *p.costs);
    p.left_first = fkv_malloc(shape->streams * sizeof *p.left_first);
    p.stream_offsets = fkv_malloc(shape->streams * sizeof *p.stream_offsets);
    parts->page_crcs = fkv_malloc(p.page_room * sizeof *parts->page_crcs);
    parts->stripes = fkv_malloc(p.stripe_room * sizeof *parts->stripes);
    parts->streams = fkv_calloc(1, shape->stream_bytes);
    int status = FKV_NO_MEMORY;
    if ((p.gathered || !apart) && p.rows && p.costs && p.left_first && p.stream_offsets
        && parts->page_crcs && parts->stripes && parts->streams) {
        shape->stripes = shape->payload_pages = 0;
        packer_offsets(&p);
        status = packer_each(&p, packer_full_pages, false);
        if (status == FKV_OK) status = packer_each(&p, packer_shared, true);
        if (status == FKV_OK && p.shared_open) packer_close_page(&p);
        shape->payload_bytes = shape->payload_pages * FKV_PAGE_BYTES;
    }
    fkv_free(p.gathered), fkv_free(p.rows), fkv_free(p.costs), fkv_free(p.left_first),
        fkv_free(p.stream_offsets);
    return status;
}
