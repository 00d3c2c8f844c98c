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
#include "codec_delta.h"
#include "codec_fxp.h"
#include "codec_halves.h"
#include "cpu.h"
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
    uint16_t *halves;         /* [tokens]: vectors of other elements as 16-bit values; or NULL */
    uint64_t *half_rows;      /* [tokens]: addresses of those */
    uint16_t *costs;          /* [tokens]: bits */
    uint32_t *left_first;     /* [streams]: first token of the remainder */
    uint32_t *stream_offsets; /* [streams]: into parts->streams */
    uint32_t stream_end;      /* of parts->streams in use */
    prefix_plan plan;         /* of the stream at hand, in the prefix modes */
    uint8_t parameters[BOUNDED_HEAD + 3 * PREFIX_VALUES_MAX]; /* of the stream at hand */
    uint8_t packed[2 + PREFIX_VALUES_MAX * 3 / 2];            /* the same, packed */
    uint32_t packed_bytes;
    uint32_t layer, exact; /* of the stream at hand; exact: tokens kept as they are if bounded */
    bounded_work *bounded; /* where streams may be bounded, else NULL */
    uint32_t delta_bytes;  /* of the stream's vectors, in FKV_STREAM_DELTA; else 0 */
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
    if (!fkv_mode_cuts(fkv_plane_mode(plane, true))) return;
    const uint32_t values = plane->vector_bytes / fkv_element_bytes(plane);
    for (uint32_t t = first_token; t < token; t++) {
        uint16_t *to = p->halves + (uint64_t)t * values;
        fkv_halves_cut((const uint8_t *)(uintptr_t)p->rows[t], values, plane->dtype, to);
        p->half_rows[t] = (uint64_t)(uintptr_t)to;
    }
}

/* Sets the bits of each token's vector, and the plan of a prefix mode; returns their sum. */
static uint64_t packer_costs(packer *p, const fkv_plane_row *plane, uint32_t mode, uint32_t first,
                             uint32_t count)
{
    const uint32_t half_mode = fkv_mode_of_halves(mode),
                   values = plane->vector_bytes / fkv_mode_element(mode),
                   rest_bits = 8 * values * fkv_mode_rest(mode);
    const uint64_t *rows = (fkv_mode_cuts(mode) ? p->half_rows : p->rows) + first;
    uint64_t total = 0;
    p->delta_bytes = mode == FKV_STREAM_DELTA ? plane->vector_bytes : 0;
    if (p->delta_bytes) {
        fkv_delta_costs(rows, count, plane->vector_bytes, p->costs + first);
    } else if (prefix_mode(half_mode)) {
        bool made = fkv_prefix_plan_make(&p->plan, p->parameters, 2 * values, half_mode);
        assert(made);
        (void)made;
        fkv_prefix_plan_costs(rows, count, &p->plan, p->costs + first);
    } else {
        uint32_t bytes = mode == FKV_STREAM_PLAIN ? plane->vector_bytes : 2 * values;
        fkv_fxp_costs(rows, count, bytes, half_mode, p->parameters, p->costs + first);
        for (uint32_t t = first; t < first + count; t++) p->costs[t] = (uint16_t)(8 * p->costs[t]);
    }
    for (uint32_t t = first; t < first + count; t++)
        total += p->costs[t] = (uint16_t)(p->costs[t] + rest_bits);
    return total;
}

/* Bits of a vector that begins a stripe. */
static uint32_t packer_first_cost(const packer *p, uint32_t token)
{
    if (!p->delta_bytes) return p->costs[token];
    return fkv_delta_cost(NULL, (const uint8_t *)(uintptr_t)p->rows[token], p->delta_bytes);
}

/* Tokens from `first` on that fit into `space` bytes. */
static uint32_t packer_fit(const packer *p, uint32_t first, uint32_t end, uint32_t space,
                           uint32_t *bits)
{
    uint32_t used = packer_first_cost(p, first), t = first + 1;
    *bits = 0;
    if (end - first > FKV_STRIPE_TOKENS_MAX) end = first + FKV_STRIPE_TOKENS_MAX;
    if (used > 8 * space) return 0;
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
    if (plane->vector_bytes % fkv_bounded_element(wish->mode)) return false;
    if (p->record->codec == FKV_CODEC_BOUNDED && batch->factors)
        wish->factor = batch->factors[by_token * layers + p->layer];
    return true;
}

/* Whether the stream at hand is bounded: its parameters. It must save three bits of eight. */
static bool packer_bound(packer *p, const fkv_plane_row *plane, uint32_t stream, uint8_t *mode)
{
    bounded_wish wish;
    bounded_work *w = p->bounded;
    if (!packer_wish(p, plane, &wish)) return false;
    uint64_t bits = fkv_bounded_choose(p->rows, p->shape->tokens, &wish, w->values, w->work,
                                       p->parameters, w->levels);
    if (!bits || bits > 5 * (uint64_t)p->shape->tokens * plane->vector_bytes) return false;
    bool made = fkv_bounded_plan_make(&w->plan, p->parameters, plane->vector_bytes, wish.mode);
    assert(made);
    (void)made;
    if (!w->plan.row_bits) return false; /* of zeros alone: no stripe is without bytes */
    *mode = (uint8_t)wish.mode;
    w->factors[stream] = wish.factor;
    return true;
}

/* Makes the plan of a stream again, and the levels of its tokens from `first` on. */
static void packer_rebound(packer *p, const fkv_plane_row *plane, uint32_t stream, uint32_t mode,
                           uint32_t first)
{
    bounded_wish wish;
    bounded_work *w = p->bounded;
    packer_wish(p, plane, &wish);
    wish.factor = w->factors[stream];
    fkv_bounded_plan_make(&w->plan, p->parameters, plane->vector_bytes, mode);
    if (w->plan.by_token)
        fkv_bounded_levels(p->rows + first, p->shape->tokens - first, &wish, &w->plan,
                           w->levels + first);
}

/* Tokens from `first` on of a bounded stream that fit into `space` bytes; they lie in the scratch. */
static uint32_t packer_fit_bounded(packer *p, uint32_t first, uint32_t end, uint32_t space)
{
    bounded_work *w = p->bounded;
    if (end - first > FKV_STRIPE_TOKENS_MAX) end = first + FKV_STRIPE_TOKENS_MAX;
    return fkv_bounded_fit(p->rows + first, end - first,
                           w->plan.exact > first ? w->plan.exact - first : 0, w->levels + first,
                           space, &w->plan, &w->scratch);
}

static int packer_stripe(packer *p, const fkv_plane_row *plane, const fkv_stream_row *stream,
                         uint32_t first, uint32_t count, bool new_page)
{
    if (p->shape->stripes >= p->stripe_room || p->page > p->page_room) return FKV_TOO_LARGE;
    uint8_t *out = p->payload + (uint64_t)(p->page - 1) * FKV_PAGE_BYTES + p->offset;
    const uint64_t *rows = p->rows + first;
    const uint32_t bytes = plane->vector_bytes, mode = stream->mode;
    uint32_t length =
        mode == FKV_STREAM_DELTA ? fkv_delta_encode(rows, count, bytes, out)
        : fkv_mode_bounded(mode)
            ? fkv_bounded_emit(rows, &p->bounded->plan, &p->bounded->scratch, out)
        : fkv_mode_cuts(mode)
            ? fkv_halves_plan_encode(rows, count, bytes, mode, p->parameters, &p->plan, out)
        : prefix_mode(mode) ? fkv_prefix_plan_encode(rows, count, &p->plan, out)
                            : fkv_fxp_encode(rows, count, bytes, mode, p->parameters, out);
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
static uint32_t packer_pack(packer *p, uint32_t values)
{
    p->packed_bytes = fkv_prefix_pack(p->parameters, values, p->packed);
    return p->packed_bytes < 1 + values ? p->packed_bytes : 1 + values;
}

/* Whether all of a stream of float32 is in its upper halves. */
static bool packer_short(const packer *p, const fkv_plane_row *plane)
{
    for (uint32_t t = 0; t < p->shape->tokens; t++)
        if (!fkv_halves_enough((const uint8_t *)(uintptr_t)p->rows[t], plane->vector_bytes / 4))
            return false;
    return true;
}

/* Bytes that a row takes at least in a mode of the fixed-width code. */
static uint64_t fixed_row_bytes(uint32_t vector_bytes, uint32_t mode)
{
    const uint32_t values = vector_bytes / fkv_mode_element(mode);
    if (mode == FKV_STREAM_PLAIN) return vector_bytes;
    return fxp_row_bytes(values, mode == FKV_STREAM_FXP_FP16) + values * fkv_mode_rest(mode);
}

/* The code of exponents that takes fewest bits, or none, its parameters and its costs; returns their
 * sum. What the parameters take in the header counts. */
static uint64_t packer_choose_code(packer *p, const fkv_plane_row *plane, uint8_t *mode)
{
    const uint32_t tokens = p->shape->tokens, bytes = plane->vector_bytes;
    const bool is_short =
        plane->dtype == FKV_DTYPE_FP32 && fkv_plane_exponents(plane) && packer_short(p, plane);
    const uint32_t prefix = fkv_plane_mode(plane, true) + is_short,
                   fixed = fkv_plane_mode(plane, false) + is_short;
    const uint64_t *rows = fkv_mode_cuts(prefix) ? p->half_rows : p->rows;
    const uint32_t values = bytes / fkv_mode_element(prefix);
    const uint32_t fixed_more = 8 * fkv_stream_parameters(bytes, fixed);
    const uint64_t plain_bits = 8 * (uint64_t)tokens * bytes;
    uint64_t prefix_bits = UINT64_MAX, bits;
    if (prefix != FKV_STREAM_PLAIN) {
        if (p->shape->prefix) {
            fkv_prefix_choose(rows, tokens, 2 * values, fkv_mode_of_halves(prefix), p->parameters);
            bits = packer_costs(p, plane, prefix, 0, tokens);
            prefix_bits = bits + 8 * packer_pack(p, values);
            *mode = (uint8_t)prefix;
            /* The other code can't take less than its rows without escapes. */
            if (prefix_bits < plain_bits
                && prefix_bits <= 8 * tokens * fixed_row_bytes(bytes, fixed) + fixed_more)
                return bits;
        }
        bits = plain_bits;
        if (fixed != FKV_STREAM_PLAIN) {
            fkv_fxp_choose(rows, tokens, 2 * values, fkv_mode_of_halves(fixed), p->parameters);
            bits = packer_costs(p, plane, fixed, 0, tokens);
        }
        if (bits < plain_bits && bits + fixed_more <= prefix_bits) {
            *mode = (uint8_t)fixed;
            return bits;
        }
        if (prefix_bits < plain_bits) {
            fkv_prefix_unpack(p->packed, values, p->parameters);
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
        fkv_prefix_unpack(row, plane->vector_bytes / fkv_mode_element(stream.mode), p->parameters);
    else
        memcpy(p->parameters, row, fkv_stream_parameters(plane->vector_bytes, stream.mode));
    return stream;
}

/* The full pages of a bounded stream. FKV_TOO_LARGE, and nothing was written: a stripe's first token
 * has no prediction, and where that costs too much the whole takes more than it seemed to. */
static int packer_bounded_pages(packer *p, const fkv_plane_row *plane, fkv_stream_row *stream,
                                uint32_t *first)
{
    const uint32_t tokens = p->shape->tokens, page = p->page;
    const uint64_t stripes = p->shape->stripes,
                   most = (uint64_t)tokens * plane->vector_bytes / FKV_PAGE_BYTES;
    for (;;) {
        uint32_t count = packer_fit_bounded(p, *first, tokens, FKV_PAGE_BYTES);
        if (count && *first + count == tokens) return FKV_OK;
        if (!count || p->page - page >= most) break;
        p->page++, p->offset = 0;
        int status = packer_stripe(p, plane, stream, *first, count, true);
        if (status != FKV_OK) break;
        packer_close_page(p);
        *first += count, stream->full_stripes++;
    }
    p->page = page, p->shape->stripes = stripes, stream->full_stripes = 0, *first = 0;
    return FKV_TOO_LARGE;
}

#define DELTA_SAMPLES 16u

/* Whether vectors may have so much of their neighbours that changes take fewer bits than this. */
static bool packer_may_repeat(const packer *p, uint32_t vector_bytes, uint64_t bits)
{
    const uint32_t tokens = p->shape->tokens;
    const uint32_t samples = tokens - 1 < DELTA_SAMPLES ? tokens - 1 : DELTA_SAMPLES;
    uint64_t sum = 0;
    for (uint32_t i = 0; i < samples; i++) {
        const uint64_t *rows = p->rows + (uint64_t)(tokens - 1) * i / samples;
        sum += fkv_delta_cost((const uint8_t *)(uintptr_t)rows[0],
                              (const uint8_t *)(uintptr_t)rows[1], vector_bytes);
    }
    return sum * tokens < bits * samples;
}

/* The mode that takes fewest bits, its parameters and its costs; returns their sum. */
static uint64_t packer_choose(packer *p, const fkv_plane_row *plane, uint8_t *mode)
{
    const uint32_t tokens = p->shape->tokens, bytes = plane->vector_bytes;
    uint64_t bits = packer_choose_code(p, plane, mode);
    const uint64_t all = bits + 8 * fkv_stream_parameters(bytes, *mode);
    if (!packer_may_repeat(p, bytes, all)) return bits;
    uint64_t delta = packer_costs(p, plane, FKV_STREAM_DELTA, 0, tokens);
    /* Every stripe begins with a whole vector. */
    const uint64_t begins = delta / (8 * FKV_PAGE_BYTES) + tokens / FKV_STRIPE_TOKENS_MAX + 2;
    const uint64_t whole = begins * (9ull * bytes + 9);
    if (delta + whole >= all) return packer_costs(p, plane, *mode, 0, tokens);
    *mode = FKV_STREAM_DELTA;
    return delta;
}

/* Chooses the stream's mode and writes its full pages. */
static int packer_full_pages(packer *p, const fkv_plane_row *plane, uint32_t stream_index)
{
    fkv_stream_row stream = {0};
    uint32_t tokens = p->shape->tokens, first = 0, bits;
    const bool bounded = packer_bound(p, plane, stream_index, &stream.mode)
                         && packer_bounded_pages(p, plane, &stream, &first) == FKV_OK;
    uint64_t total = bounded ? 0 : packer_choose(p, plane, &stream.mode);
    p->shape->lossy_streams += bounded;
    while (total > 8 * FKV_PAGE_BYTES) {
        uint32_t count = packer_fit(p, first, tokens, FKV_PAGE_BYTES, &bits);
        p->page++, p->offset = 0;
        int status = packer_stripe(p, plane, &stream, first, count, true);
        if (status != FKV_OK) return status;
        packer_close_page(p);
        first += count, total -= bits, stream.full_stripes++;
        if (first < tokens) total += packer_first_cost(p, first), total -= p->costs[first];
    }
    p->left_first[stream_index] = first;
    packer_row(p, plane, stream_index, &stream);
    return FKV_OK;
}

static int packer_shared(packer *p, const fkv_plane_row *plane, uint32_t stream_index)
{
    const fkv_stream_row stream = packer_row_again(p, plane, stream_index);
    uint32_t tokens = p->shape->tokens, first = p->left_first[stream_index], bits;
    const bool bounded = fkv_mode_bounded(stream.mode);
    if (bounded)
        packer_rebound(p, plane, stream_index, stream.mode, first);
    else
        packer_costs(p, plane, stream.mode, first, tokens - first);
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

/* Elements of the longest vector that is seen as 16-bit values. */
static uint32_t packer_cut_values(const fkv_geometry *geometry)
{
    uint32_t most = 0;
    for (uint32_t p = 0; p < geometry->plane_count; p++) {
        const fkv_plane_row *plane = &geometry->planes[p];
        uint32_t values = plane->vector_bytes / fkv_element_bytes(plane);
        if (fkv_mode_cuts(fkv_plane_mode(plane, true)) && values > most) most = values;
    }
    return most;
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
    uint32_t apart = packer_apart_bytes(batch), cut = packer_cut_values(batch->geometry);
    if (apart) p.gathered = fkv_malloc((uint64_t)shape->tokens * apart);
    if (cut) p.halves = fkv_malloc((uint64_t)shape->tokens * cut * sizeof *p.halves);
    if (cut) p.half_rows = fkv_malloc(shape->tokens * sizeof *p.half_rows);
    p.rows = fkv_malloc(shape->tokens * sizeof *p.rows);
    p.costs = fkv_malloc(shape->tokens * sizeof *p.costs);
    p.left_first = fkv_malloc(shape->streams * sizeof *p.left_first);
    p.stream_offsets = fkv_malloc(shape->streams * sizeof *p.stream_offsets);
    parts->page_crcs = fkv_malloc(p.page_room * sizeof *parts->page_crcs);
    parts->stripes = fkv_malloc(p.stripe_room * sizeof *parts->stripes);
    parts->streams = fkv_calloc(1, shape->stream_bytes);
    int status = FKV_NO_MEMORY;
    if ((!shape->lossy || packer_bounded_make(&p)) && (p.gathered || !apart)
        && ((p.halves && p.half_rows) || !cut) && p.rows && p.costs && p.left_first
        && p.stream_offsets && parts->page_crcs && parts->stripes && parts->streams) {
        shape->stripes = shape->payload_pages = shape->lossy_streams = 0;
        const uint32_t before = fkv_denormals_keep();
        status = packer_each(&p, packer_full_pages, false);
        if (status == FKV_OK) status = packer_each(&p, packer_shared, true);
        fkv_denormals_as(before);
        if (status == FKV_OK && p.shared_open) packer_close_page(&p);
        shape->payload_bytes = shape->payload_pages * FKV_PAGE_BYTES;
        shape->stream_bytes = p.stream_end;
    }
    packer_bounded_free(&p);
    fkv_free(p.gathered), fkv_free(p.halves), fkv_free(p.half_rows), fkv_free(p.rows),
        fkv_free(p.costs), fkv_free(p.left_first), fkv_free(p.stream_offsets);
    return status;
}
