/* record.c: record headers: binding them to their place, checking and decoding them.
 *
 * Invariants
 *  - nothing read from flash is used before the header's checksum (which binds segment uuid, epoch
 * and page) was right;
 *  - and even then every length, count and offset is bounded: a header can be refused, it can't
 * lead outside;
 *  - reserved fields and padding are zero.
 */
#include "allocate.h"
#include "record.h"
#include <string.h>

#define ROUND8(n) (((n) + 7u) & ~7u)

uint32_t fkv_header_crc(const uint8_t *header, uint64_t length, const uint8_t *segment_uuid,
                        uint64_t epoch, uint32_t page)
{
    uint8_t seed[FKV_UUID_BYTES + 12], zero[4] = {0};
    memcpy(seed, segment_uuid, FKV_UUID_BYTES);
    memcpy(seed + FKV_UUID_BYTES, &epoch, 8);
    memcpy(seed + FKV_UUID_BYTES + 8, &page, 4);
    uint32_t crc = fkv_crc32c(0, seed, sizeof seed);
    crc = fkv_crc32c(crc, header, 4);
    crc = fkv_crc32c(crc, zero, 4);
    return fkv_crc32c(crc, header + 8, length - 8);
}

void fkv_record_bind(uint8_t *header, const uint8_t *segment_uuid, uint64_t epoch, uint32_t page)
{
    fkv_record_header *h = (fkv_record_header *)header;
    h->crc = fkv_header_crc(header, (uint64_t)h->header_pages * FKV_PAGE_BYTES, segment_uuid, epoch,
                            page);
}

void fkv_records_bind(uint8_t *buffer, const uint64_t *offsets, const uint32_t *pages,
                      uint64_t count, const uint8_t *segment_uuid, uint64_t epoch)
{
    for (uint64_t i = 0; i < count; i++)
        fkv_record_bind(buffer + offsets[i], segment_uuid, epoch, pages[i]);
}

/* ---- geometry ---- */
bool fkv_geometry_valid(const fkv_geometry *g)
{
    uint64_t streams = 0, entries = 0;
    if (g->plane_count < 1 || g->plane_count > FKV_PLANES_MAX) return false;
    for (uint32_t p = 0; p < g->plane_count; p++) {
        const fkv_plane_row *row = &g->planes[p];
        if (!row->layers || !row->heads || !row->vector_bytes || row->reserved) return false;
        if (row->layers > 4096 || row->heads > 4096) return false;
        streams += (uint64_t)row->layers * row->heads;
        entries += row->layers;
    }
    return streams <= (1u << 20) && entries <= 0xFFFF;
}

bool fkv_geometry_codable(const fkv_geometry *g)
{
    for (uint32_t p = 0; p < g->plane_count; p++) {
        const fkv_plane_row *row = &g->planes[p];
        if (row->dtype == FKV_DTYPE_OPAQUE || row->vector_bytes > FKV_CODABLE_VECTOR_MAX)
            return false;
        if (fkv_plane_halves(row) && row->vector_bytes % 2) return false;
    }
    return true;
}

uint32_t fkv_geometry_layers(const fkv_geometry *g)
{
    uint32_t layers = 0;
    for (uint32_t p = 0; p < g->plane_count; p++)
        if (g->planes[p].layers > layers) layers = g->planes[p].layers;
    return layers;
}

uint32_t fkv_geometry_entries(const fkv_geometry *g)
{
    uint32_t entries = 0;
    for (uint32_t p = 0; p < g->plane_count; p++) entries += g->planes[p].layers;
    return entries;
}

uint32_t fkv_geometry_streams(const fkv_geometry *g)
{
    uint32_t streams = 0;
    for (uint32_t p = 0; p < g->plane_count; p++)
        streams += g->planes[p].layers * g->planes[p].heads;
    return streams;
}

uint32_t fkv_entry_plane(const fkv_geometry *g, uint32_t entry)
{
    uint32_t p = 0;
    while (entry >= g->planes[p].layers) entry -= g->planes[p++].layers;
    return p;
}

/* ---- decoding ---- */

typedef struct {
    const uint8_t *data;
    uint32_t length;
} tlv_view;
#define TLV_KNOWN 10

static bool tlvs_read(const uint8_t *bytes, const fkv_record_header *fixed,
                      tlv_view found[TLV_KNOWN])
{
    uint64_t at = sizeof *fixed, end = fixed->header_bytes;
    for (uint32_t i = 0; i < fixed->tlv_count; i++) {
        fkv_tlv tlv;
        if (at + sizeof tlv > end) return false;
        memcpy(&tlv, bytes + at, sizeof tlv);
        at += sizeof tlv;
        if (tlv.reserved || tlv.length_bytes > end - at) return false;
        if (tlv.type < TLV_KNOWN && found[tlv.type].data) return false;
        if (tlv.type < TLV_KNOWN)
            found[tlv.type] = (tlv_view){bytes + at, tlv.length_bytes};
        else if (tlv.type & FKV_TLV_CRITICAL)
            return false;
        at += ROUND8(tlv.length_bytes);
        if (at > ROUND8(end)) return false;
    }
    return true;
}

/* Memory for a part of it. A lack of memory must not be taken for damage: see `starved`. */
static void *part(fkv_header *h, uint64_t count, size_t bytes)
{
    void *memory = fkv_calloc(count ? count : 1, bytes);
    if (!memory) h->starved = true;
    return memory;
}

static bool decode_blocks(fkv_header *h, const tlv_view *t)
{
    const fkv_record_header *f = &h->fixed;
    if (!f->block_count || f->block_count > FKV_BLOCKS_PER_RECORD_MAX) return false;
    if (t[FKV_TLV_BLOCKS].length != f->block_count * sizeof(fkv_block_row)) return false;
    h->blocks = (const fkv_block_row *)t[FKV_TLV_BLOCKS].data;
    h->key_offsets = part(h, f->block_count, sizeof *h->key_offsets);
    if (!h->key_offsets) return false;
    uint64_t keys = 0, parents = 0, tokens = 0;
    for (uint32_t i = 0; i < f->block_count; i++) {
        const fkv_block_row *b = &h->blocks[i];
        if (b->first_token != tokens || !b->tokens || !b->key_bytes) return false;
        h->key_offsets[i] = (uint32_t)(t[FKV_TLV_KEYS].data - h->bytes + (int64_t)keys);
        keys += b->key_bytes, parents += b->parent_bytes, tokens += b->tokens;
    }
    return tokens == f->tokens && keys + parents == t[FKV_TLV_KEYS].length;
}

static bool decode_geometry(fkv_header *h, const tlv_view *t)
{
    uint32_t count = t[FKV_TLV_PLANES].length / sizeof(fkv_plane_row);
    if (t[FKV_TLV_PLANES].length % sizeof(fkv_plane_row) || count < 1 || count > FKV_PLANES_MAX)
        return false;
    h->geometry.plane_count = count;
    h->geometry.group = h->fixed.group;
    memcpy(h->geometry.planes, t[FKV_TLV_PLANES].data, t[FKV_TLV_PLANES].length);
    return fkv_geometry_valid(&h->geometry);
}

static bool decode_raw(fkv_header *h, const tlv_view *t)
{
    if (t[FKV_TLV_ORDER].length != sizeof h->order) return false;
    memcpy(&h->order, t[FKV_TLV_ORDER].data, sizeof h->order);
    /* An order that this geometry can't lie in, or sums that don't fit, are refused here: readers take
     * offsets from it unseen. */
    fkv_order_row order = h->order;
    order.block_tokens = h->fixed.tokens;
    if (fkv_view_fill(&h->geometry, &order, 0, NULL, NULL) != 1) return false;
    uint64_t bytes = 0, logical = 0;
    h->block_offsets = part(h, h->fixed.block_count + 1u, sizeof *h->block_offsets);
    if (!h->block_offsets) return false;
    for (uint32_t i = 0; i < h->fixed.block_count; i++) {
        uint64_t block = fkv_block_bytes(&h->geometry, h->blocks[i].tokens);
        h->block_offsets[i] = bytes;
        bytes += fkv_raw_stride(block, h->fixed.flags & FKV_RECORD_ALIGNED);
        logical += block;
    }
    h->block_offsets[h->fixed.block_count] = bytes;
    if (logical != h->fixed.logical_bytes || bytes != h->fixed.payload_bytes) return false;
    if (h->fixed.flags & FKV_RECORD_INLINE) {
        h->inline_payload = t[FKV_TLV_INLINE].data;
        return h->payload_pages == 0 && t[FKV_TLV_INLINE].length == bytes;
    }
    return bytes <= (uint64_t)h->payload_pages * FKV_PAGE_BYTES
           && bytes > ((uint64_t)h->payload_pages - 1) * FKV_PAGE_BYTES;
}

/* Whether a record of this codec has streams of this mode in planes of this type. */
static bool mode_fits(uint32_t mode, uint32_t dtype, uint32_t codec)
{
    switch (mode) {
    case FKV_STREAM_PLAIN:
        return true;
    case FKV_STREAM_FXP_BF16:
        return dtype == FKV_DTYPE_BF16;
    case FKV_STREAM_FXP_FP16:
        return dtype == FKV_DTYPE_FP16;
    case FKV_STREAM_PREFIX_BF16:
        return dtype == FKV_DTYPE_BF16 && codec == FKV_CODEC_LOSSLESS;
    case FKV_STREAM_PREFIX_FP16:
        return dtype == FKV_DTYPE_FP16 && codec == FKV_CODEC_LOSSLESS;
    default:
        return false;
    }
}

/* Of a stream whose row lies at `row`; more than `room` where they can't be right. */
static uint64_t parameters_bytes(const fkv_stream_row *fields, const fkv_plane_row *plane,
                                 const uint8_t *row, uint64_t room)
{
    if (!fields->packed) return fkv_stream_parameters(plane->vector_bytes, fields->mode);
    if (fields->packed != 1 || !fkv_mode_is_prefix(fields->mode)) return UINT64_MAX;
    uint32_t bytes = fkv_prefix_packed_bytes(row + sizeof *fields, room, plane->vector_bytes / 2);
    return bytes ? bytes : UINT64_MAX;
}

/* Streams in their order: offsets of their rows, and which (plane, layer) each belongs to. */
static bool decode_streams(fkv_header *h, const tlv_view *t, uint64_t *full_total)
{
    const fkv_geometry *g = &h->geometry;
    uint32_t entries = fkv_geometry_entries(g), stream = 0;
    h->stream_count = fkv_geometry_streams(g);
    h->entry_streams = part(h, entries, sizeof *h->entry_streams);
    h->stream_offsets = part(h, h->stream_count, sizeof *h->stream_offsets);
    h->stream_entries = part(h, h->stream_count, sizeof *h->stream_entries);
    if (!h->entry_streams || !h->stream_offsets || !h->stream_entries) return false;
    uint64_t at = 0, layers = fkv_geometry_layers(g);
    *full_total = 0;
    for (uint32_t layer = 0; layer < layers; layer++) {
        for (uint32_t p = 0, entry = layer; p < g->plane_count; entry += g->planes[p++].layers) {
            const fkv_plane_row *plane = &g->planes[p];
            if (layer >= plane->layers) continue;
            h->entry_streams[entry] = stream;
            for (uint32_t head = 0; head < plane->heads; head++, stream++) {
                if (at + sizeof(fkv_stream_row) > t[FKV_TLV_STREAMS].length) return false;
                const uint8_t *row = t[FKV_TLV_STREAMS].data + at;
                fkv_stream_row fields;
                memcpy(&fields, row, sizeof fields);
                if (!mode_fits(fields.mode, plane->dtype, h->fixed.codec)) return false;
                at += sizeof fields;
                uint64_t size =
                    parameters_bytes(&fields, plane, row, t[FKV_TLV_STREAMS].length - at);
                if (size > t[FKV_TLV_STREAMS].length - at) return false;
                *full_total += fields.full_stripes;
                h->stream_offsets[stream] = (uint32_t)(row - h->bytes);
                h->stream_entries[stream] = (uint16_t)entry;
                at += size;
            }
        }
    }
    return at == t[FKV_TLV_STREAMS].length;
}

typedef struct {
    fkv_header *h;
    const uint8_t *rows;
    uint64_t count, next;
    uint32_t page, offset;
} stripe_walk;

static bool stripe_next(stripe_walk *w, uint32_t stream, uint32_t *first_token, bool full)
{
    uint32_t row;
    if (w->next >= w->count) return false;
    memcpy(&row, w->rows + 4 * w->next, 4);
    uint32_t length = row & 0x1FFF, tokens = row >> 13 & 0x7FF, new_page = row >> 24 & 1;
    if (row >> 25 || !tokens || !length || (full && !new_page)) return false;
    if (new_page) w->page++, w->offset = 0;
    if (w->page > w->h->payload_pages || w->page == 0 || w->offset + length > FKV_PAGE_BYTES)
        return false;
    if (*first_token + tokens > w->h->fixed.tokens) return false;
    w->h->stripes[w->next++] = (fkv_stripe){
        stream,          w->page - 1, (uint16_t)w->offset, (uint16_t)length, (uint16_t)*first_token,
        (uint16_t)tokens};
    *first_token += tokens;
    w->offset += length;
    return true;
}

static bool decode_stripes(fkv_header *h, const tlv_view *t, uint64_t full_total)
{
    stripe_walk w = {
        .h = h, .rows = t[FKV_TLV_STRIPES].data, .count = t[FKV_TLV_STRIPES].length / 4};
    if (t[FKV_TLV_STRIPES].length % 4 || h->fixed.tokens > 0xFFFF || full_total > w.count)
        return false;
    uint32_t streams = h->stream_count;
    h->stripes = part(h, w.count, sizeof *h->stripes);
    h->stream_stripes = part(h, 2ul * streams + 2, sizeof *h->stream_stripes);
    uint32_t *first = part(h, streams, sizeof *first);
    bool good = h->stripes && h->stream_stripes && first;
    for (uint32_t s = 0; good && s < streams; s++) {
        fkv_stream_row row;
        memcpy(&row, h->bytes + h->stream_offsets[s], sizeof row);
        h->stream_stripes[s] = (uint32_t)w.next;
        for (uint32_t i = 0; good && i < row.full_stripes; i++)
            good = stripe_next(&w, s, &first[s], true);
    }
    if (good) h->stream_stripes[streams] = (uint32_t)w.next;
    bool opened = false;
    for (uint32_t s = 0; good && s < streams; s++) {
        h->stream_stripes[streams + 1 + s] = (uint32_t)w.next;
        while (good && first[s] < h->fixed.tokens) {
            good = stripe_next(&w, s, &first[s], !opened);
            opened = true;
        }
    }
    if (good) h->stream_stripes[2 * streams + 1] = (uint32_t)w.next;
    fkv_free(first);
    h->stripe_count = w.next;
    return good && w.next == w.count && w.page == h->payload_pages;
}

/* What this version writes: other values are a later one's, and mean what can't be known here. */
static bool fields_known(const fkv_record_header *f)
{
    bool data = f->kind == FKV_KIND_DATA;
    uint32_t flags = data && f->codec == FKV_CODEC_RAW ? FKV_RECORD_INLINE | FKV_RECORD_ALIGNED : 0;
    uint32_t tables = data && f->codec == FKV_CODEC_LOSSLESS ? FKV_TABLE_SET : 0;
    return f->sequence < FKV_COUNT_END && f->table_set == tables
           && f->fidelity == FKV_FIDELITY_EXACT && !(f->flags & ~flags)
           && f->codec_version == (data ? 1 : 0);
}

static bool decode(fkv_header *h)
{
    const fkv_record_header *f = &h->fixed;
    tlv_view t[TLV_KNOWN] = {{0}};
    if (!fields_known(f)) return false;
    if (!tlvs_read(h->bytes, f, t)) return false;
    if (f->kind == FKV_KIND_NAMESPACE)
        return t[FKV_TLV_NAMESPACE].length > 0 && h->payload_pages == 0 && !f->block_count
               && !f->tokens;
    if (f->kind != FKV_KIND_DATA) return false;
    if (!decode_blocks(h, t) || !decode_geometry(h, t)) return false;
    if (t[FKV_TLV_PAGE_CRCS].length != 4 * (uint64_t)h->payload_pages) return false;
    h->page_crcs = (const uint32_t *)t[FKV_TLV_PAGE_CRCS].data;
    if (f->codec == FKV_CODEC_RAW) return decode_raw(h, t);
    uint64_t full;
    return (f->codec == FKV_CODEC_LOSSLESS || f->codec == FKV_CODEC_FAST)
           && fkv_geometry_codable(&h->geometry)
           && f->payload_bytes == (uint64_t)h->payload_pages * FKV_PAGE_BYTES
           && f->logical_bytes == fkv_block_bytes(&h->geometry, f->tokens)
           && decode_streams(h, t, &full) && decode_stripes(h, t, full);
}

uint32_t fkv_header_peek(const uint8_t *page)
{
    fkv_record_header f;
    memcpy(&f, page, sizeof f);
    if (memcmp(f.magic, "FKVR", 4)) return 0;
    uint64_t bytes = (uint64_t)f.header_pages * FKV_PAGE_BYTES;
    if (!f.header_pages || bytes > FKV_HEADER_BYTES_MAX || f.pages < f.header_pages) return 0;
    if (f.header_bytes < sizeof f || f.header_bytes > bytes) return 0;
    return f.header_pages;
}

/* What decoding allocated. */
static void free_parts(fkv_header *h)
{
    fkv_free(h->key_offsets), fkv_free(h->block_offsets), fkv_free(h->entry_streams);
    fkv_free(h->stream_offsets), fkv_free(h->stream_entries), fkv_free(h->stripes),
        fkv_free(h->stream_stripes);
}

fkv_header *fkv_header_parse(const uint8_t *bytes, uint64_t length, const uint8_t *segment_uuid,
                             uint64_t epoch, uint32_t page, int *status)
{
    int unwanted;
    if (!status) status = &unwanted;
    *status = FKV_DAMAGED;
    if (length < FKV_PAGE_BYTES) return NULL;
    uint32_t pages = fkv_header_peek(bytes);
    if (!pages || (uint64_t)pages * FKV_PAGE_BYTES > length) return NULL;
    length = (uint64_t)pages * FKV_PAGE_BYTES;
    uint32_t stored;
    memcpy(&stored, bytes + 4, 4);
    if (fkv_header_crc(bytes, length, segment_uuid, epoch, page) != stored) return NULL;
    *status = FKV_NO_MEMORY;
    fkv_header *h = fkv_calloc(1, sizeof *h);
    if (!h) return NULL;
    atomic_init(&h->references, 1);
    h->bytes = fkv_malloc(length);
    if (!h->bytes) goto refuse;
    memcpy(h->bytes, bytes, length);
    memcpy(&h->fixed, bytes, sizeof h->fixed);
    *status = FKV_DAMAGED;
    for (int i = 0; i < 5; i++)
        if (h->fixed.reserved[i]) goto refuse;
    h->payload_pages = h->fixed.pages - h->fixed.header_pages;
    if (!decode(h)) {
        if (h->starved) *status = FKV_NO_MEMORY;
        goto refuse;
    }
    h->bytes_total = (uint32_t)(sizeof *h + length + h->fixed.block_count * 12
                                + h->stream_count * 14 + h->stripe_count * sizeof(fkv_stripe));
    *status = FKV_OK;
    return h;
refuse:
    fkv_header_release(h);
    return NULL;
}

void fkv_header_retain(fkv_header *h)
{
    atomic_fetch_add_explicit(&h->references, 1, memory_order_relaxed);
}

void fkv_header_release(fkv_header *h)
{
    if (!h || atomic_fetch_sub_explicit(&h->references, 1, memory_order_acq_rel) != 1) return;
    free_parts(h);
    fkv_free(h->bytes);
    fkv_free(h);
}

/* ---- for tools ---- */

int fkv_header_check(const uint8_t *header, uint64_t length, const uint8_t *segment_uuid,
                     uint64_t epoch, uint32_t page)
{
    int status;
    fkv_header_release(fkv_header_parse(header, length, segment_uuid, epoch, page, &status));
    return status;
}

void fkv_header_tlv(const uint8_t *header, uint64_t length, uint32_t type, uint32_t *offset,
                    uint32_t *bytes)
{
    fkv_record_header f;
    tlv_view t[TLV_KNOWN] = {{0}};
    *offset = *bytes = 0;
    if (length < sizeof f || type >= TLV_KNOWN) return;
    memcpy(&f, header, sizeof f);
    if (f.header_bytes > length || !tlvs_read(header, &f, t) || !t[type].data) return;
    *offset = (uint32_t)(t[type].data - header);
    *bytes = t[type].length;
}

uint32_t fkv_stream_parameter_bytes(uint32_t vector_bytes, uint32_t mode)
{
    return fkv_stream_parameters(vector_bytes, mode);
}

int64_t fkv_header_stripes(const uint8_t *header, uint64_t length, fkv_stripe *stripes,
                           uint64_t room)
{
    /* The header was checked in its place before; here only its own structure matters. */
    if (length < FKV_PAGE_BYTES || !fkv_header_peek(header)) return -1;
    fkv_header h = {0};
    memcpy(&h.fixed, header, sizeof h.fixed);
    h.bytes = (uint8_t *)header;
    h.payload_pages = h.fixed.pages - h.fixed.header_pages;
    bool good = (uint64_t)h.fixed.header_pages * FKV_PAGE_BYTES <= length && decode(&h);
    int64_t count = good ? (int64_t)h.stripe_count : -1;
    for (uint64_t i = 0; good && i < h.stripe_count && i < room; i++) stripes[i] = h.stripes[i];
    free_parts(&h);
    return count;
}
