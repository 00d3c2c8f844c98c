/* encode.c: blocks in the caller's memory -> whole records (header and payload pages) in a staging
 * buffer.
 *
 * Invariants
 *  - the output depends only on the blocks, the geometry, the order and the record's fields: same
 * input, same bytes;
 *  - a record never takes more room than fkv_encode_bounds() said;
 *  - every byte of its pages is set (staging is reused); no page allocates; no I/O.
 * Where a record lies in its bound: payload from a page boundary on, header pages right in front of
 * it.
 */
#include "allocate.h"
#include "encode.h"
#include <string.h>

#define ROUND8(n) (((uint64_t)(n) + 7u) & ~(uint64_t)7u)
#define PAGES(bytes) (((bytes) + FKV_PAGE_BYTES - 1) / FKV_PAGE_BYTES)

/* ---- sizes ---- */

#define PREFIX_TOKENS_MIN                                                                          \
    4u /* of fewer tokens the parameters would cost more than the code saves */

/* The most that the rows of all streams can take. */
static uint64_t stream_bytes_max(const fkv_geometry *g, bool prefix, bool lossy)
{
    uint64_t bytes = 0;
    for (uint32_t p = 0; p < g->plane_count; p++) {
        const fkv_plane_row *plane = &g->planes[p];
        uint64_t most = fkv_stream_parameters(plane->vector_bytes, fkv_plane_mode(plane, prefix));
        uint32_t bounded = FKV_STREAM_CHANNELS_BF16 + plane->dtype - FKV_DTYPE_BF16;
        if (lossy && plane->dtype >= FKV_DTYPE_BF16 && plane->dtype <= FKV_DTYPE_FP32
            && fkv_stream_parameters(plane->vector_bytes, bounded) > most)
            most = fkv_stream_parameters(plane->vector_bytes, bounded);
        bytes += (uint64_t)plane->layers * plane->heads * (sizeof(fkv_stream_row) + most);
    }
    return bytes;
}

/* Whether streams may be in the prefix code, and what their rows can take then. */
static void shape_prefix(const fkv_encode_batch *batch, const fkv_encode_record *record,
                         fkv_record_shape *shape)
{
    const fkv_geometry *g = batch->geometry;
    shape->prefix = record->codec != FKV_CODEC_FAST && shape->tokens >= PREFIX_TOKENS_MIN;
    shape->stream_bytes = stream_bytes_max(g, shape->prefix, shape->lossy);
    if (!(shape->prefix || shape->lossy)
        || fkv_header_room(g, record->block_count, shape) <= FKV_HEADER_BYTES_MAX)
        return;
    shape->prefix = shape->lossy =
        false; /* streams beyond number: their parameters fit no header */
    shape->stream_bytes = stream_bytes_max(g, false, false);
}

static void shape_of(const fkv_encode_batch *batch, const fkv_encode_record *record,
                     fkv_record_shape *shape)
{
    const fkv_geometry *g = batch->geometry;
    memset(shape, 0, sizeof *shape);
    uint64_t largest = 0;
    for (uint32_t i = 0; i < record->block_count; i++) {
        const fkv_encode_block *b = &batch->blocks[record->first_block + i];
        uint64_t bytes = fkv_block_bytes(g, b->tokens);
        shape->tokens += b->tokens;
        shape->key_bytes += (uint64_t)b->key_bytes + b->parent_bytes;
        shape->logical_bytes += bytes;
        shape->aligned_bytes += fkv_raw_stride(bytes, true);
        shape->chunks += (bytes + FKV_CHUNK_BYTES - 1) / FKV_CHUNK_BYTES;
        if (bytes > largest) largest = bytes;
    }
    shape->coded =
        record->codec != FKV_CODEC_RAW && fkv_geometry_codable(g) && shape->tokens <= 0xFFFF;
    if (shape->coded || record->codec != FKV_CODEC_LOSSLESS || !fkv_zstd_there()) shape->chunks = 0;
    if (shape->coded) {
        shape->lossy = record->codec == FKV_CODEC_BOUNDED || record->codec == FKV_CODEC_COLD;
        shape->profile_bytes = shape->lossy && batch->profile ? FKV_PROFILE_BYTES : 0;
        shape->streams = fkv_geometry_streams(g);
        for (uint32_t p = 0; p < g->plane_count; p++) {
            const fkv_plane_row *plane = &g->planes[p];
            uint64_t streams = (uint64_t)plane->layers * plane->heads;
            /* The longest row of the code: every value an escape (of a byte's elements 21 bits). A
             * page is filled but for less than that. */
            uint64_t row = plane->vector_bytes;
            if (fkv_plane_exponents(plane) || shape->lossy)
                row *= fkv_element_bytes(plane) == 1 ? 3 : 2;
            uint64_t fill =
                FKV_PAGE_BYTES - (row < FKV_PAGE_BYTES / 2 ? row : FKV_PAGE_BYTES / 2 + 512);
            uint64_t pages = (uint64_t)shape->tokens * plane->vector_bytes / fill + 2;
            uint64_t by_count = shape->tokens / FKV_STRIPE_TOKENS_MAX;
            shape->payload_pages += streams * (pages + by_count);
        }
        shape->stripes = shape->payload_pages + shape->streams;
        shape_prefix(batch, record, shape);
        return;
    }
    /* Page alignment lets a block land directly in its place; it may cost a sixteenth. */
    shape->aligned = (shape->aligned_bytes - shape->logical_bytes) * 16 <= shape->logical_bytes;
    shape->payload_bytes = shape->aligned ? shape->aligned_bytes : shape->logical_bytes;
    shape->payload_pages = PAGES(shape->payload_bytes);
    if (shape->logical_bytes <= FKV_INLINE_PAYLOAD_MAX) {
        fkv_record_shape tight = *shape;
        tight.inlined = true, tight.aligned = false, tight.chunks = 0;
        tight.payload_bytes = shape->logical_bytes, tight.payload_pages = 0;
        if (fkv_header_room(g, record->block_count, &tight) <= FKV_PAGE_BYTES) *shape = tight;
    }
}

uint64_t fkv_header_room(const fkv_geometry *g, uint32_t block_count, const fkv_record_shape *s)
{
    uint64_t bytes = sizeof(fkv_record_header);
    bytes += sizeof(fkv_tlv) + ROUND8(block_count * sizeof(fkv_block_row));
    bytes += sizeof(fkv_tlv) + ROUND8(s->key_bytes);
    bytes += sizeof(fkv_tlv) + ROUND8(g->plane_count * sizeof(fkv_plane_row));
    bytes += sizeof(fkv_tlv) + ROUND8(4 * s->payload_pages);
    if (s->profile_bytes) bytes += sizeof(fkv_tlv) + ROUND8(s->profile_bytes);
    if (s->coded)
        return bytes + 2 * sizeof(fkv_tlv) + ROUND8(s->stream_bytes) + ROUND8(4 * s->stripes);
    bytes += sizeof(fkv_tlv) + ROUND8(sizeof(fkv_order_row));
    if (s->chunks) bytes += sizeof(fkv_tlv) + ROUND8(4 * s->chunks);
    return s->inlined ? bytes + sizeof(fkv_tlv) + ROUND8(s->payload_bytes) : bytes;
}

static uint64_t bound_of(const fkv_geometry *g, uint32_t block_count, const fkv_record_shape *s)
{
    return (PAGES(fkv_header_room(g, block_count, s)) + s->payload_pages) * FKV_PAGE_BYTES;
}

void fkv_encode_bounds(const fkv_encode_batch *batch, uint64_t *bounds)
{
    for (uint64_t i = 0; i < batch->record_count; i++) {
        fkv_record_shape shape;
        shape_of(batch, &batch->records[i], &shape);
        bounds[i] = bound_of(batch->geometry, batch->records[i].block_count, &shape);
    }
}

/* ---- header ---- */

static uint8_t *tlv_begin(uint8_t *at, uint16_t type, uint64_t length)
{
    fkv_tlv tlv = {type, 0, (uint32_t)length};
    memcpy(at, &tlv, sizeof tlv);
    return at + sizeof tlv;
}

static uint8_t *tlv_put(uint8_t *at, uint16_t type, const void *data, uint64_t length)
{
    at = tlv_begin(at, type, length);
    if (length) memcpy(at, data, length);
    return at + ROUND8(length);
}

static uint8_t *header_blocks(uint8_t *at, const fkv_encode_batch *batch,
                              const fkv_encode_record *record, uint64_t key_bytes)
{
    const fkv_encode_block *blocks = &batch->blocks[record->first_block];
    at = tlv_begin(at, FKV_TLV_BLOCKS, record->block_count * sizeof(fkv_block_row));
    uint32_t token = 0;
    for (uint32_t i = 0; i < record->block_count; i++, at += sizeof(fkv_block_row)) {
        fkv_block_row row = {token, blocks[i].tokens, blocks[i].key_bytes, blocks[i].parent_bytes};
        memcpy(at, &row, sizeof row);
        token += blocks[i].tokens;
    }
    uint8_t *key = tlv_begin(at, FKV_TLV_KEYS, key_bytes);
    at = key + ROUND8(key_bytes);
    for (uint32_t i = 0; i < record->block_count; key += blocks[i++].key_bytes)
        memcpy(key, batch->keys + blocks[i].key_offset, blocks[i].key_bytes);
    for (uint32_t i = 0; i < record->block_count; key += blocks[i++].parent_bytes)
        if (blocks[i].parent_bytes)
            memcpy(key, batch->parents + blocks[i].parent_offset, blocks[i].parent_bytes);
    return at;
}

/* Writes the header in front of `payload` and fills what the caller needs to know of the record. */
static void header_write(const fkv_encode_batch *batch, fkv_encode_record *record,
                         const fkv_record_shape *s, uint8_t *payload, const fkv_record_parts *parts)
{
    const fkv_geometry *g = batch->geometry;
    uint64_t used = fkv_header_room(g, record->block_count, s);
    uint32_t pages = (uint32_t)PAGES(used);
    uint8_t *header = payload - (uint64_t)pages * FKV_PAGE_BYTES,
            *at = header + sizeof(fkv_record_header);
    memset(header, 0, (uint64_t)pages * FKV_PAGE_BYTES);
    at = header_blocks(at, batch, record, s->key_bytes);
    at = tlv_put(at, FKV_TLV_PLANES, g->planes, g->plane_count * sizeof(fkv_plane_row));
    at = tlv_put(at, FKV_TLV_PAGE_CRCS, parts->page_crcs, 4 * s->payload_pages);
    if (s->coded) {
        at = tlv_put(at, FKV_TLV_STREAMS, parts->streams, s->stream_bytes);
        at = tlv_put(at, FKV_TLV_STRIPES, parts->stripes, 4 * s->stripes);
        if (s->profile_bytes) tlv_put(at, FKV_TLV_PROFILE, batch->profile, s->profile_bytes);
    } else {
        at = tlv_put(at, FKV_TLV_ORDER, &batch->view->order, sizeof(fkv_order_row));
        if (s->inlined) tlv_put(at, FKV_TLV_INLINE, parts->inlined, s->payload_bytes);
        if (s->chunks) tlv_put(at, FKV_TLV_CHUNKS, parts->chunks, 4 * s->chunks);
    }
    record->codec = s->chunks                                             ? FKV_CODEC_ZSTD
                    : !s->coded                                           ? FKV_CODEC_RAW
                    : record->codec == FKV_CODEC_FAST || s->lossy_streams ? record->codec
                                                                          : FKV_CODEC_LOSSLESS;
    if (!s->lossy_streams) record->fidelity = FKV_FIDELITY_EXACT;
    record->flags = (s->inlined ? FKV_RECORD_INLINE : 0) | (s->aligned ? FKV_RECORD_ALIGNED : 0);
    record->header_pages = (uint16_t)pages;
    record->pages = pages + (uint32_t)s->payload_pages;
    record->tokens = s->tokens;
    record->logical_bytes = s->logical_bytes;
    record->buffer_offset = (uint64_t)(header - batch->buffer);
    fkv_record_header fixed = {
        .magic = {'F', 'K', 'V', 'R'},
        .header_bytes = (uint32_t)used,
        .header_pages = (uint16_t)pages,
        .kind = FKV_KIND_DATA,
        .group = (uint8_t)g->group,
        .pages = record->pages,
        .block_count = (uint16_t)record->block_count,
        .codec = record->codec,
        .codec_version = 1,
        .table_set = s->coded && record->codec != FKV_CODEC_FAST ? FKV_TABLE_SET : 0,
        .fidelity = record->fidelity,
        .flags = record->flags,
        .tokens = s->tokens,
        .sequence = record->sequence,
        .created_ms = batch->created_ms,
        .payload_bytes = s->payload_bytes,
        .logical_bytes = s->logical_bytes,
        .start_token = record->start_token,
        .tlv_count = (s->inlined || s->coded || s->chunks ? 6 : 5) + (s->profile_bytes != 0),
    };
    memcpy(fixed.namespace_digest, batch->namespace_digest, FKV_NAMESPACE_BYTES);
    memcpy(fixed.shard, batch->shard, FKV_SHARD_BYTES);
    memcpy(header, &fixed, sizeof fixed);
}

uint64_t fkv_encode_namespace(const uint8_t *namespace_digest, const uint8_t *json,
                              uint64_t json_bytes, uint64_t sequence, uint64_t created_ms,
                              uint8_t *buffer, uint64_t room)
{
    uint64_t used = sizeof(fkv_record_header) + sizeof(fkv_tlv) + ROUND8(json_bytes),
             pages = PAGES(used);
    if (pages * FKV_PAGE_BYTES > room || used > FKV_HEADER_BYTES_MAX) return 0;
    memset(buffer, 0, pages * FKV_PAGE_BYTES);
    fkv_record_header fixed = {
        .magic = {'F', 'K', 'V', 'R'},
        .header_bytes = (uint32_t)used,
        .header_pages = (uint16_t)pages,
        .kind = FKV_KIND_NAMESPACE,
        .pages = (uint32_t)pages,
        .sequence = sequence,
        .created_ms = created_ms,
        .start_token = FKV_POSITION_UNKNOWN,
        .tlv_count = 1,
    };
    memcpy(fixed.namespace_digest, namespace_digest, FKV_NAMESPACE_BYTES);
    memcpy(buffer, &fixed, sizeof fixed);
    tlv_put(buffer + sizeof fixed, FKV_TLV_NAMESPACE, json, json_bytes);
    return pages * FKV_PAGE_BYTES;
}

/* ---- raw ---- */

static void gather_run(void *context, uint64_t stored, uint8_t *memory, uint64_t length)
{
    memcpy((uint8_t *)context + stored, memory, length);
}

/* All blocks, in the caller's order, back to back or each from a page boundary on. */
static int raw_gather(const fkv_encode_batch *batch, const fkv_encode_record *record, bool aligned,
                      uint8_t *payload)
{
    const fkv_geometry *g = batch->geometry;
    fkv_place_in_memory *stored = fkv_malloc(fkv_geometry_entries(g) * sizeof *stored);
    if (!stored) return FKV_NO_MEMORY;
    fkv_order_row order = batch->view->order;
    order.block_tokens = 0;
    uint64_t at = 0;
    for (uint32_t i = 0; i < record->block_count; i++) {
        const fkv_encode_block *b = &batch->blocks[record->first_block + i];
        if (order.block_tokens != b->tokens) {
            order.block_tokens = b->tokens;
            fkv_view_fill(g, &order, 0, stored, NULL);
        }
        uint64_t bytes = fkv_block_bytes(g, b->tokens), stride = fkv_raw_stride(bytes, aligned);
        fkv_runs runs = {g, &order, stored, batch->view, 0, b->tokens};
        fkv_runs_each(&runs, batch->pointers + (uint64_t)b->source * batch->view->region_count,
                      gather_run, payload + at);
        memset(payload + at + bytes, 0, stride - bytes);
        at += stride;
    }
    fkv_free(stored);
    return FKV_OK;
}

static int encode_raw(const fkv_encode_batch *batch, fkv_encode_record *record, fkv_record_shape *s)
{
    uint8_t *base = batch->buffer + record->buffer_offset, inlined[FKV_INLINE_PAYLOAD_MAX];
    uint8_t *payload =
        base + PAGES(fkv_header_room(batch->geometry, record->block_count, s)) * FKV_PAGE_BYTES;
    fkv_record_parts parts = {.inlined = inlined};
    int status = raw_gather(batch, record, s->aligned, s->inlined ? inlined : payload);
    if (status != FKV_OK) return status;
    uint32_t *crcs = NULL, *chunks = s->chunks ? fkv_malloc(4 * s->chunks) : NULL;
    if (!chunks || !fkv_chunks_encode(batch, record, s, payload, chunks)) s->chunks = 0;
    parts.chunks = chunks;
    if (!s->inlined) {
        uint64_t end = s->payload_pages * FKV_PAGE_BYTES;
        memset(payload + s->payload_bytes, 0, end - s->payload_bytes);
        crcs = fkv_malloc(4 * s->payload_pages);
        if (!crcs) {
            fkv_free(chunks);
            return FKV_NO_MEMORY;
        }
        for (uint64_t p = 0; p < s->payload_pages; p++)
            crcs[p] = fkv_page_crc(record->sequence, (uint32_t)p, payload + p * FKV_PAGE_BYTES);
    }
    parts.page_crcs = crcs;
    header_write(batch, record, s, payload, &parts);
    fkv_free(crcs), fkv_free(chunks);
    return FKV_OK;
}

/* ---- one record ---- */

static void encode_one(const fkv_encode_batch *batch, fkv_encode_record *record)
{
    fkv_record_shape shape;
    shape_of(batch, record, &shape);
    if (fkv_header_room(batch->geometry, record->block_count, &shape) > FKV_HEADER_BYTES_MAX
        || record->block_count > FKV_BLOCKS_PER_RECORD_MAX) {
        record->status = FKV_TOO_LARGE;
        return;
    }
    if (!shape.coded) {
        record->status = encode_raw(batch, record, &shape);
        return;
    }
    uint64_t room =
        PAGES(fkv_header_room(batch->geometry, record->block_count, &shape)) * FKV_PAGE_BYTES;
    uint8_t *payload = batch->buffer + record->buffer_offset + room;
    fkv_record_parts parts = {0};
    record->status = fkv_pages_encode(batch, record, &shape, payload, &parts);
    if (!shape.lossy_streams) shape.profile_bytes = 0;
    if (record->status == FKV_OK) header_write(batch, record, &shape, payload, &parts);
    fkv_parts_free(&parts);
    if (record->status != FKV_TOO_LARGE || !shape.lossy) return;
    record->codec = FKV_CODEC_LOSSLESS; /* such values as no bound makes smaller */
    encode_one(batch, record);
}

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t done;
    uint64_t open;
} encode_latch;

typedef struct {
    fkv_task task;
    const fkv_encode_batch *batch;
    fkv_encode_record *record;
    encode_latch *latch;
} encode_task;

static void encode_run(fkv_task *task)
{
    encode_task *t = task->owner;
    encode_latch *latch = t->latch;
    encode_one(t->batch, t->record);
    pthread_mutex_lock(&latch->lock);
    if (--latch->open == 0) pthread_cond_signal(&latch->done);
    pthread_mutex_unlock(&latch->lock);
}

/* Small batches are coded here at once; else the workers take a record each, this thread too. */
void fkv_encode(fkv_engine *engine, const fkv_encode_batch *batch)
{
    encode_task *tasks =
        batch->record_count > 1 ? fkv_malloc(batch->record_count * sizeof *tasks) : NULL;
    if (!tasks) {
        for (uint64_t i = 0; i < batch->record_count; i++) encode_one(batch, &batch->records[i]);
        return;
    }
    encode_latch latch = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0};
    uint64_t large = 0;
    for (uint64_t i = 0; i < batch->record_count; i++) {
        uint64_t bytes = 0;
        for (uint32_t b = 0; b < batch->records[i].block_count && bytes < FKV_ENCODE_TASK_BYTES;
             b++)
            bytes += fkv_block_bytes(batch->geometry,
                                     batch->blocks[batch->records[i].first_block + b].tokens);
        tasks[i] = (encode_task){.batch = batch, .record = &batch->records[i], .latch = &latch};
        tasks[i].task = (fkv_task){.run = encode_run, .owner = &tasks[i]};
        /* Every other large record goes to the workers; they have one thread more than this. */
        if (bytes < FKV_ENCODE_TASK_BYTES || large++ % 2) tasks[i].latch = NULL;
    }
    for (uint64_t i = 0; i < batch->record_count; i++) latch.open += tasks[i].latch != NULL;
    for (uint64_t i = 0; i < batch->record_count; i++)
        if (tasks[i].latch) fkv_workers_push(engine->workers, &tasks[i].task);
    for (uint64_t i = 0; i < batch->record_count; i++)
        if (!tasks[i].latch) encode_one(batch, tasks[i].record);
    pthread_mutex_lock(&latch.lock);
    while (latch.open) pthread_cond_wait(&latch.done, &latch.lock);
    pthread_mutex_unlock(&latch.lock);
    fkv_free(tasks);
}
