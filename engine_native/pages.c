/* pages.c: the streams of a record -> per-head pages.
 *
 * Invariants
 *  - a full page holds one stripe of one stream, as many tokens as fit; what a stream leaves over
 * goes, in stream order, into shared pages, split at token boundaries so that those are full too;
 *  - full pages come first, then the shared ones; the stripe table is in the order of the pages;
 *  - each stream has the mode that takes fewest bytes of those that the record's codec has; plain
 * rows are among them.
 */
#include "allocate.h"
#include "codec_fxp.h"
#include "codec_prefix.h"
#include "encode.h"
#include <assert.h>
#include <string.h>

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
    uint16_t *costs;          /* [tokens]: bits */
    uint32_t *left_first;     /* [streams]: first token of the remainder */
    uint32_t *stream_offsets; /* [streams]: into parts->streams */
    uint32_t stream_end;      /* of parts->streams in use */
    prefix_plan plan;         /* of the stream at hand, in the prefix modes */
    uint8_t parameters[1 + PREFIX_VALUES_MAX];     /* of the stream at hand */
    uint8_t packed[2 + PREFIX_VALUES_MAX * 3 / 2]; /* the same, packed */
    uint32_t packed_bytes;
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

/* Sets the bits of each token's vector, and the plan of a prefix mode; returns their sum. */
static uint64_t packer_costs(packer *p, const fkv_plane_row *plane, uint32_t mode, uint32_t first,
                             uint32_t count)
{
    uint32_t bytes = plane->vector_bytes;
    uint64_t total = 0;
    if (fkv_mode_is_prefix(mode)) {
        bool made = fkv_prefix_plan_make(&p->plan, p->parameters, bytes, mode);
        assert(made);
        (void)made;
        fkv_prefix_plan_costs(p->rows + first, count, &p->plan, p->costs + first);
    } else {
        fkv_fxp_costs(p->rows + first, count, bytes, mode, p->parameters, p->costs + first);
        for (uint32_t t = first; t < first + count; t++) p->costs[t] = (uint16_t)(8 * p->costs[t]);
    }
    for (uint32_t t = first; t < first + count; t++) total += p->costs[t];
    return total;
}

/* Tokens from `first` on that fit into `space` bytes. */
static uint32_t packer_fit(const packer *p, uint32_t first, uint32_t end, uint32_t space,
                           uint32_t *bits)
{
    uint32_t used = 0, t = first;
    if (end - first > FKV_STRIPE_TOKENS_MAX) end = first + FKV_STRIPE_TOKENS_MAX;
    while (t < end && used + p->costs[t] <= 8 * space) used += p->costs[t++];
    *bits = used;
    return t - first;
}

static int packer_stripe(packer *p, const fkv_plane_row *plane, const fkv_stream_row *stream,
                         uint32_t first, uint32_t count, bool new_page)
{
    if (p->shape->stripes >= p->stripe_room || p->page > p->page_room) return FKV_TOO_LARGE;
    uint8_t *out = p->payload + (uint64_t)(p->page - 1) * FKV_PAGE_BYTES + p->offset;
    uint32_t length = fkv_mode_is_prefix(stream->mode)
                          ? fkv_prefix_plan_encode(p->rows + first, count, &p->plan, out)
                          : fkv_fxp_encode(p->rows + first, count, plane->vector_bytes,
                                           stream->mode, p->parameters, out);
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

/* Bytes that the parameters of a prefix mode take in the header. */
static uint32_t packer_pack(packer *p, uint32_t vector_bytes)
{
    const uint32_t bytes = 1 + vector_bytes / 2;
    p->packed_bytes = fkv_prefix_pack(p->parameters, vector_bytes / 2, p->packed);
    return p->packed_bytes < bytes ? p->packed_bytes : bytes;
}

/* The mode that takes fewest bits, its parameters and its costs; returns their sum. What the
 * parameters take in the header counts. */
static uint64_t packer_choose(packer *p, const fkv_plane_row *plane, uint8_t *mode)
{
    const uint32_t tokens = p->shape->tokens, bytes = plane->vector_bytes;
    const bool fp16 = plane->dtype == FKV_DTYPE_FP16;
    const uint32_t prefix = fp16 ? FKV_STREAM_PREFIX_FP16 : FKV_STREAM_PREFIX_BF16,
                   fixed = fp16 ? FKV_STREAM_FXP_FP16 : FKV_STREAM_FXP_BF16;
    const uint32_t fixed_more = 8 * fkv_stream_parameters(bytes, fixed);
    const uint64_t plain_bits = 8 * (uint64_t)tokens * bytes;
    uint64_t prefix_bits = UINT64_MAX, bits;
    if (fkv_plane_halves(plane)) {
        if (p->shape->prefix) {
            fkv_prefix_choose(p->rows, tokens, bytes, prefix, p->parameters);
            bits = packer_costs(p, plane, prefix, 0, tokens);
            prefix_bits = bits + 8 * packer_pack(p, bytes);
            *mode = (uint8_t)prefix;
            /* The other code can't take less than its rows without escapes. */
            if (prefix_bits < plain_bits
                && prefix_bits <= 8 * tokens * fxp_row_bytes(bytes / 2, fp16) + fixed_more)
                return bits;
        }
        fkv_fxp_choose(p->rows, tokens, bytes, fixed, p->parameters);
        bits = packer_costs(p, plane, fixed, 0, tokens);
        if (bits < plain_bits && bits + fixed_more <= prefix_bits) {
            *mode = (uint8_t)fixed;
            return bits;
        }
        if (prefix_bits < plain_bits) {
            fkv_prefix_unpack(p->packed, bytes / 2, p->parameters);
            return packer_costs(p, plane, prefix, 0, tokens);
        }
    }
    *mode = FKV_STREAM_PLAIN;
    return packer_costs(p, plane, FKV_STREAM_PLAIN, 0, tokens);
}

/* The stream's row, and behind it the parameters as they take fewest bytes. */
static void packer_row(packer *p, const fkv_plane_row *plane, uint32_t stream_index,
                       fkv_stream_row *stream)
{
    uint8_t *row = p->parts->streams + p->stream_end;
    uint32_t bytes = fkv_stream_parameters(plane->vector_bytes, stream->mode);
    stream->packed = fkv_mode_is_prefix(stream->mode) && p->packed_bytes < bytes;
    if (stream->packed) bytes = p->packed_bytes;
    memcpy(row, stream, sizeof *stream);
    memcpy(row + sizeof *stream, stream->packed ? p->packed : p->parameters, bytes);
    p->stream_offsets[stream_index] = p->stream_end;
    p->stream_end += (uint32_t)sizeof *stream + bytes;
}

/* The row of a stream again, and its parameters. */
static fkv_stream_row packer_row_again(packer *p, const fkv_plane_row *plane, uint32_t stream_index)
{
    fkv_stream_row stream;
    const uint8_t *row = p->parts->streams + p->stream_offsets[stream_index];
    memcpy(&stream, row, sizeof stream);
    row += sizeof stream;
    if (stream.packed)
        fkv_prefix_unpack(row, plane->vector_bytes / 2, p->parameters);
    else
        memcpy(p->parameters, row, fkv_stream_parameters(plane->vector_bytes, stream.mode));
    return stream;
}

/* Chooses the stream's mode and writes its full pages. */
static int packer_full_pages(packer *p, const fkv_plane_row *plane, uint32_t stream_index)
{
    fkv_stream_row stream = {0};
    uint32_t tokens = p->shape->tokens, first = 0, bits;
    uint64_t total = packer_choose(p, plane, &stream.mode);
    while (total > 8 * FKV_PAGE_BYTES) {
        uint32_t count = packer_fit(p, first, tokens, FKV_PAGE_BYTES, &bits);
        p->page++, p->offset = 0;
        int status = packer_stripe(p, plane, &stream, first, count, true);
        if (status != FKV_OK) return status;
        packer_close_page(p);
        first += count, total -= bits, stream.full_stripes++;
    }
    p->left_first[stream_index] = first;
    packer_row(p, plane, stream_index, &stream);
    return FKV_OK;
}

static int packer_shared(packer *p, const fkv_plane_row *plane, uint32_t stream_index)
{
    const fkv_stream_row stream = packer_row_again(p, plane, stream_index);
    uint32_t tokens = p->shape->tokens, first = p->left_first[stream_index], bits;
    packer_costs(p, plane, stream.mode, first, tokens - first);
    while (first < tokens) {
        bool new_page = false;
        uint32_t count =
            p->shared_open ? packer_fit(p, first, tokens, FKV_PAGE_BYTES - p->offset, &bits) : 0;
        if (!count) { /* even one vector is longer than a row of the stripe table */
            if (p->shared_open) packer_close_page(p);
            p->shared_open = new_page = true;
            p->page++, p->offset = 0;
            count = packer_fit(p, first, tokens, FKV_PAGE_BYTES, &bits);
        }
        int status = packer_stripe(p, plane, &stream, first, count, new_page);
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
        status = packer_each(&p, packer_full_pages, false);
        if (status == FKV_OK) status = packer_each(&p, packer_shared, true);
        if (status == FKV_OK && p.shared_open) packer_close_page(&p);
        shape->payload_bytes = shape->payload_pages * FKV_PAGE_BYTES;
        shape->stream_bytes = p.stream_end;
    }
    fkv_free(p.gathered), fkv_free(p.rows), fkv_free(p.costs), fkv_free(p.left_first),
        fkv_free(p.stream_offsets);
    return status;
}
