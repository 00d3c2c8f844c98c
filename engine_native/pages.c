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
#include "codec_bounded.h"
#include "codec_fxp.h"
#include "codec_prefix.h"
#include "encode.h"
#include <assert.h>
#include <string.h>

/* What coding a bounded stream takes. */
typedef struct {
    bounded_plan plan;
    bounded_scratch scratch;
    float *values;   /* [tokens * values] of the largest stream */
    uint16_t *work;  /* [tokens + values] */
    uint8_t *levels; /* [tokens] */
    float *factors;  /* [streams]: what steps came from */
} bounded_work;

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
    uint32_t layer, exact;    /* of the stream at hand; exact: tokens kept as they are if bounded */
    bounded_work *bounded;    /* where streams may be bounded, else NULL */
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

static bool is_prefix(uint32_t mode)
{
    return mode == FKV_STREAM_PREFIX_BF16 || mode == FKV_STREAM_PREFIX_FP16;
}

/* Sets the bits of each token's vector, and the plan of a prefix mode; returns their sum. */
static uint64_t packer_costs(packer *p, const fkv_plane_row *plane, uint32_t mode,
                             const uint8_t *parameters, uint32_t first, uint32_t count)
{
    uint32_t bytes = plane->vector_bytes;
    uint64_t total = 0;
    if (is_prefix(mode)) {
        bool made = fkv_prefix_plan_make(&p->plan, parameters, bytes, mode);
        assert(made);
        (void)made;
        fkv_prefix_plan_costs(p->rows + first, count, &p->plan, p->costs + first);
    } else {
        fkv_fxp_costs(p->rows + first, count, bytes, mode, parameters, p->costs + first);
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

/* How a plane's streams may be bounded: by the steps of channels or tokens, times this. False: not at
 * all, being of another role or type. */
static bool packer_wish(const packer *p, const fkv_plane_row *plane, bounded_wish *wish)
{
    const fkv_encode_batch *batch = p->batch;
    const bool by_token = plane->role == FKV_ROLE_V;
    if (!p->bounded || plane->dtype < FKV_DTYPE_BF16 || plane->dtype > FKV_DTYPE_FP32) return false;
    if (plane->role < FKV_ROLE_K || plane->role > FKV_ROLE_ROPE) return false;
    const uint32_t layers = fkv_geometry_layers(batch->geometry);
    const uint32_t first = by_token ? FKV_STREAM_TOKENS_BF16 : FKV_STREAM_CHANNELS_BF16;
    wish->mode = first + plane->dtype - FKV_DTYPE_BF16;
    wish->vector_bytes = plane->vector_bytes, wish->exact = p->exact, wish->factor = 0.0f;
    if (plane->vector_bytes % fkv_mode_element(wish->mode)) return false;
    if (p->record->codec == FKV_CODEC_BOUNDED && batch->factors)
        wish->factor = batch->factors[by_token * layers + p->layer];
    return true;
}

/* Whether the stream at hand is bounded: its parameters. It must save three bits of eight. */
static bool packer_bound(packer *p, const fkv_plane_row *plane, uint32_t stream,
                         uint8_t *parameters, uint8_t *mode)
{
    bounded_wish wish;
    bounded_work *w = p->bounded;
    if (!packer_wish(p, plane, &wish)) return false;
    uint64_t bits = fkv_bounded_choose(p->rows, p->shape->tokens, &wish, w->values, w->work,
                                       parameters, w->levels);
    if (!bits || bits > 5 * (uint64_t)p->shape->tokens * plane->vector_bytes) return false;
    *mode = (uint8_t)wish.mode;
    w->factors[stream] = wish.factor;
    bool made = fkv_bounded_plan_make(&w->plan, parameters, plane->vector_bytes, wish.mode);
    assert(made);
    (void)made;
    return true;
}

/* Makes the plan of a stream again, and the levels of its tokens from `first` on. */
static void packer_rebound(packer *p, const fkv_plane_row *plane, uint32_t stream,
                           const uint8_t *parameters, uint32_t mode, uint32_t first)
{
    bounded_wish wish;
    bounded_work *w = p->bounded;
    packer_wish(p, plane, &wish);
    wish.factor = w->factors[stream];
    fkv_bounded_plan_make(&w->plan, parameters, plane->vector_bytes, mode);
    if (w->plan.by_token)
        fkv_bounded_levels(p->rows + first, p->shape->tokens - first, &wish, &w->plan,
                           w->levels + first);
}

/* Tokens from `first` on of a bounded stream that fit into `space` bytes; they lie in the scratch. */
static uint32_t packer_fit_bounded(packer *p, uint32_t first, uint32_t end, uint32_t space)
{
    bounded_work *w = p->bounded;
    return fkv_bounded_fit(p->rows + first, end - first,
                           w->plan.exact > first ? w->plan.exact - first : 0, w->levels + first,
                           space, &w->plan, &w->scratch);
}

static int packer_stripe(packer *p, const fkv_plane_row *plane, const fkv_stream_row *stream,
                         const uint8_t *parameters, uint32_t first, uint32_t count, bool new_page)
{
    if (p->shape->stripes >= p->stripe_room || p->page > p->page_room) return FKV_TOO_LARGE;
    uint8_t *out = p->payload + (uint64_t)(p->page - 1) * FKV_PAGE_BYTES + p->offset;
    uint32_t length =
        fkv_mode_bounded(stream->mode)
            ? fkv_bounded_emit(p->rows + first, &p->bounded->plan, &p->bounded->scratch, out)
        : is_prefix(stream->mode) ? fkv_prefix_plan_encode(p->rows + first, count, &p->plan, out)
                                  : fkv_fxp_encode(p->rows + first, count, plane->vector_bytes,
                                                   stream->mode, parameters, out);
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

/* The mode that takes fewest bits, its parameters and its costs; returns their sum. What the
 * parameters take in the header counts. */
static uint64_t packer_choose(packer *p, const fkv_plane_row *plane, uint8_t *parameters,
                              uint8_t *mode)
{
    const uint32_t tokens = p->shape->tokens, bytes = plane->vector_bytes;
    const bool fp16 = plane->dtype == FKV_DTYPE_FP16;
    const uint32_t prefix = fp16 ? FKV_STREAM_PREFIX_FP16 : FKV_STREAM_PREFIX_BF16,
                   fixed = fp16 ? FKV_STREAM_FXP_FP16 : FKV_STREAM_FXP_BF16;
    const uint32_t prefix_more = 8 * fkv_stream_parameters(bytes, prefix),
                   fixed_more = 8 * fkv_stream_parameters(bytes, fixed);
    const uint64_t plain_bits = 8 * (uint64_t)tokens * bytes;
    uint64_t prefix_bits = UINT64_MAX - prefix_more, bits;
    if (fkv_plane_halves(plane)) {
        if (p->shape->prefix) {
            fkv_prefix_choose(p->rows, tokens, bytes, prefix, parameters);
            prefix_bits = packer_costs(p, plane, prefix, parameters, 0, tokens);
            *mode = (uint8_t)prefix;
            /* The other code can't take less than its rows without escapes. */
            if (prefix_bits + prefix_more
                <= 8 * tokens * fkv_fxp_row_bytes(bytes, fixed) + fixed_more)
                return prefix_bits;
        }
        uint8_t bases[PREFIX_VALUES_MAX / FKV_STREAM_GROUP];
        fkv_fxp_choose(p->rows, tokens, bytes, fixed, bases);
        bits = packer_costs(p, plane, fixed, bases, 0, tokens);
        if (bits < plain_bits && bits + fixed_more <= prefix_bits + prefix_more) {
            memcpy(parameters, bases, fkv_stream_parameters(bytes, fixed));
            *mode = (uint8_t)fixed;
            return bits;
        }
        if (prefix_bits + prefix_more < plain_bits)
            return packer_costs(p, plane, prefix, parameters, 0, tokens);
    }
    *mode = FKV_STREAM_PLAIN;
    return packer_costs(p, plane, FKV_STREAM_PLAIN, parameters, 0, tokens);
}

/* The full pages of a bounded stream. FKV_TOO_LARGE, and nothing was written: a stripe's first token
 * has no prediction, and where that costs too much the whole takes more than it seemed to. */
static int packer_bounded_pages(packer *p, const fkv_plane_row *plane, fkv_stream_row *stream,
                                const uint8_t *parameters, uint32_t *first)
{
    const uint32_t tokens = p->shape->tokens, page = p->page;
    const uint64_t stripes = p->shape->stripes,
                   most = (uint64_t)tokens * plane->vector_bytes / FKV_PAGE_BYTES;
    for (;;) {
        uint32_t count = packer_fit_bounded(p, *first, tokens, FKV_PAGE_BYTES);
        if (count && *first + count == tokens) return FKV_OK;
        if (!count || p->page - page >= most) break;
        p->page++, p->offset = 0;
        int status = packer_stripe(p, plane, stream, parameters, *first, count, true);
        if (status != FKV_OK) break;
        packer_close_page(p);
        *first += count, stream->full_stripes++;
    }
    p->page = page, p->shape->stripes = stripes, stream->full_stripes = 0, *first = 0;
    return FKV_TOO_LARGE;
}

/* Chooses the stream's mode and writes its full pages. */
static int packer_full_pages(packer *p, const fkv_plane_row *plane, uint32_t stream_index)
{
    fkv_stream_row stream = {0};
    uint8_t *row = p->parts->streams + p->stream_end, *parameters = row + sizeof stream;
    uint32_t tokens = p->shape->tokens, first = 0, bits;
    const bool bounded = packer_bound(p, plane, stream_index, parameters, &stream.mode)
                         && packer_bounded_pages(p, plane, &stream, parameters, &first) == FKV_OK;
    uint64_t total = bounded ? 0 : packer_choose(p, plane, parameters, &stream.mode);
    p->shape->lossy_streams += bounded;
    while (total > 8 * FKV_PAGE_BYTES) {
        uint32_t count = packer_fit(p, first, tokens, FKV_PAGE_BYTES, &bits);
        p->page++, p->offset = 0;
        int status = packer_stripe(p, plane, &stream, parameters, first, count, true);
        if (status != FKV_OK) return status;
        packer_close_page(p);
        first += count, total -= bits, stream.full_stripes++;
    }
    p->left_first[stream_index] = first;
    p->stream_offsets[stream_index] = p->stream_end;
    memcpy(row, &stream, sizeof stream);
    p->stream_end +=
        (uint32_t)sizeof stream + fkv_stream_parameters(plane->vector_bytes, stream.mode);
    return FKV_OK;
}

static int packer_shared(packer *p, const fkv_plane_row *plane, uint32_t stream_index)
{
    fkv_stream_row stream;
    const uint8_t *row = p->parts->streams + p->stream_offsets[stream_index],
                  *parameters = row + sizeof stream;
    memcpy(&stream, row, sizeof stream);
    uint32_t tokens = p->shape->tokens, first = p->left_first[stream_index], bits;
    const bool bounded = fkv_mode_bounded(stream.mode);
    if (bounded)
        packer_rebound(p, plane, stream_index, parameters, stream.mode, first);
    else
        packer_costs(p, plane, stream.mode, parameters, first, tokens - first);
    while (first < tokens) {
        bool new_page = false;
        uint32_t space = FKV_PAGE_BYTES - p->offset;
        uint32_t count = !p->shared_open ? 0
                         : bounded       ? packer_fit_bounded(p, first, tokens, space)
                                         : packer_fit(p, first, tokens, space, &bits);
        if (!count) { /* even one vector is longer than a row of the stripe table */
            if (p->shared_open) packer_close_page(p);
            p->shared_open = new_page = true;
            p->page++, p->offset = 0;
            count = bounded ? packer_fit_bounded(p, first, tokens, FKV_PAGE_BYTES)
                            : packer_fit(p, first, tokens, FKV_PAGE_BYTES, &bits);
            if (!count) return FKV_TOO_LARGE;
        }
        int status = packer_stripe(p, plane, &stream, parameters, first, count, new_page);
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
            p->layer = layer;
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

/* Room for bounded streams; false: no memory. */
static bool packer_bounded_make(packer *p)
{
    const fkv_geometry *g = p->batch->geometry;
    uint64_t values = 1, tokens = p->shape->tokens;
    for (uint32_t i = 0; i < g->plane_count; i++)
        if (g->planes[i].vector_bytes / 2 > values) values = g->planes[i].vector_bytes / 2;
    bounded_work *w = p->bounded = fkv_calloc(1, sizeof *w);
    if (!w) return false;
    w->values = fkv_malloc(tokens * values * sizeof *w->values);
    w->work = fkv_malloc((tokens + values) * sizeof *w->work);
    w->levels = fkv_calloc(tokens, 1);
    w->factors = fkv_malloc(p->shape->streams * sizeof *w->factors);
    return w->values && w->work && w->levels && w->factors;
}

static void packer_bounded_free(packer *p)
{
    if (!p->bounded) return;
    fkv_free(p->bounded->values), fkv_free(p->bounded->work), fkv_free(p->bounded->levels);
    fkv_free(p->bounded->factors), fkv_free(p->bounded);
}

/* Tokens at the record's start that a bounded stream keeps: those that begin a sequence. */
static uint32_t exact_tokens(const fkv_encode_batch *batch, const fkv_encode_record *record)
{
    const uint64_t at = record->start_token;
    if (at == FKV_POSITION_UNKNOWN)
        return batch->blocks[record->first_block].parent_bytes ? 0 : FKV_EXACT_TOKENS;
    return at < FKV_EXACT_TOKENS ? FKV_EXACT_TOKENS - (uint32_t)at : 0;
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
                .stripe_room = shape->stripes,
                .exact = exact_tokens(batch, record)};
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
    if ((!shape->lossy || packer_bounded_make(&p)) && (p.gathered || !apart) && p.rows && p.costs
        && p.left_first && p.stream_offsets && parts->page_crcs && parts->stripes
        && parts->streams) {
        shape->stripes = shape->payload_pages = shape->lossy_streams = 0;
        status = packer_each(&p, packer_full_pages, false);
        if (status == FKV_OK) status = packer_each(&p, packer_shared, true);
        if (status == FKV_OK && p.shared_open) packer_close_page(&p);
        shape->payload_bytes = shape->payload_pages * FKV_PAGE_BYTES;
        shape->stream_bytes = p.stream_end;
    }
    packer_bounded_free(&p);
    fkv_free(p.gathered), fkv_free(p.rows), fkv_free(p.costs), fkv_free(p.left_first),
        fkv_free(p.stream_offsets);
    return status;
}
