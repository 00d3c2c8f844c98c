/* fuzz_page.c: a record's pages through the real read path: header, extents, checksums, decoding,
 * placing.
 *
 * Input: an `ask` (what is wanted, into which memory, and what of it the index has wrong), then the
 * record's pages.
 * Promises: whatever the record holds and whatever the index believed, only the caller's memory is
 * written; both code paths give the same statuses, and the same bytes where they are good.
 */
#include "memory_engine.h"
#include "record.h"

#define EPOCH 5
#define PAGE 9
#define WANTS 4u
#define MEMORY_MAX (1u << 20)
static const uint8_t uuid[16] = {1, 2, 3};

typedef struct {
    uint8_t control;  /* bits 0-1: 3: checksums as they are; bit 2: direct reads; bit 3: a region a
                      * layer; bit 4: without the odd heads; bit 5: without layer 0; bit 6: in another
                      * order; bit 7: the record twice in the batch */
    uint8_t lie;      /* what the index has wrong */
    uint8_t capacity; /* tokens that a block in memory has room for */
    uint8_t gap_pages, amplification;
    uint8_t want_count; /* bits 0-1; bits 2-3: pages of 4, 16 or 64 tokens in the caller's memory */
    struct {
        uint8_t ordinal, first_token, token_count;
    } wants[WANTS];
} ask;

typedef struct {
    fkv_geometry geometry;
    fkv_view view;
    fkv_place_in_memory *entries;
    uint64_t region_bytes[256];
    int32_t head_slots[4096];
    uint64_t pointers[WANTS * 256];
    uint32_t regions;
} memory;

static const uint8_t orders[4][4] = {{0, 1, 2, 3}, {0, 1, 3, 2}, {1, 0, 3, 2}, {3, 0, 1, 2}};

/* False where the geometry can't lie so, or is too large for a run. */
static bool memory_make(memory *m, const fkv_header *h, const ask *a)
{
    memset(&m->view, 0, sizeof m->view);
    m->geometry = h->geometry;
    uint32_t capacity = a->capacity ? a->capacity : 1, page = 1u << 2 * (a->want_count >> 2 & 3);
    bool paged = page > 1 && page < capacity;
    fkv_order_row order = {.block_tokens = paged ? page : capacity};
    bool same = h->fixed.codec == FKV_CODEC_RAW && !(a->control & 64);
    memcpy(order.axes, same ? h->order.axes : orders[a->lie >> 6], 4);
    uint32_t axes = a->control & 8 ? 1u << FKV_AXIS_LAYER : 0, entries = 0, heads = 0;
    int regions = fkv_view_fill(&m->geometry, &order, axes, NULL, NULL);
    if (regions < 1 || regions > 256) return false;
    if (fkv_block_bytes(&m->geometry, capacity) > MEMORY_MAX / WANTS) return false;
    entries = fkv_geometry_entries(&m->geometry);
    m->entries = exactly(entries * sizeof *m->entries);
    fkv_view_fill(&m->geometry, &order, axes, m->entries, m->region_bytes);
    m->regions = (uint32_t)regions * (paged ? (capacity + page - 1) / page : 1);
    if (m->regions > 256) {
        give_back(m->entries, entries * sizeof *m->entries);
        return false;
    }
    for (uint32_t i = (uint32_t)regions; i < m->regions; i++)
        m->region_bytes[i] = m->region_bytes[i - (uint32_t)regions];
    order.block_tokens = capacity;
    for (uint32_t e = 0, p = 0; p < m->geometry.plane_count; e += m->geometry.planes[p++].layers) {
        if (a->control & 32) m->entries[e].region = -1;
        if (m->geometry.planes[p].heads > heads) heads = m->geometry.planes[p].heads;
    }
    for (uint32_t i = 0; i < heads; i++) m->head_slots[i] = i % 2 ? -1 : (int32_t)(i / 2);
    m->view = (fkv_view){.region_count = m->regions,
                         .page_tokens = paged ? page : 0,
                         .page_regions = (uint32_t)regions,
                         .entry_count = entries,
                         .entries = m->entries,
                         .head_slots = a->control & 16 ? m->head_slots : NULL,
                         .order = order};
    for (uint32_t i = 0; i < WANTS * m->regions; i++) {
        uint64_t bytes = m->region_bytes[i % m->regions];
        m->pointers[i] = (uint64_t)(uintptr_t)exactly(bytes);
        memset((void *)(uintptr_t)m->pointers[i], 0xA5, bytes);
    }
    return true;
}

static void memory_free(memory *m)
{
    for (uint32_t i = 0; i < WANTS * m->regions; i++)
        give_back((void *)(uintptr_t)m->pointers[i], m->region_bytes[i % m->regions]);
    give_back(m->entries, fkv_geometry_entries(&m->geometry) * sizeof *m->entries);
}

static fkv_read_record place_of(const fkv_header *h, uint8_t lie)
{
    const fkv_record_header *f = &h->fixed;
    fkv_read_record r = {.sequence = f->sequence,
                         .epoch = EPOCH,
                         .segment_uuid = uuid,
                         .page = PAGE,
                         .pages = f->pages,
                         .record_tokens = f->tokens,
                         .header_pages = f->header_pages,
                         .record_blocks = f->block_count,
                         .codec = f->codec,
                         .flags = f->flags};
    switch (lie % 16) {
    case 1:
        r.pages++;
        break;
    case 2:
        r.pages = r.header_pages;
        break;
    case 3:
        r.header_pages++;
        break;
    case 4:
        r.header_pages = 0;
        break;
    case 5:
        r.record_tokens++;
        break;
    case 6:
        r.record_blocks = 1;
        break;
    case 7:
        r.record_blocks = 0;
        break;
    case 8:
        r.flags ^= FKV_RECORD_ALIGNED;
        break;
    case 9:
        r.sequence++;
        break;
    case 10:
        r.flags |= FKV_RECORD_ALIGNED, r.record_blocks = 1;
        break;
    default:
        break;
    }
    return r;
}

/* The wanted blocks in the record's order, each once, as reads are made. */
static uint32_t wants_of(const fkv_header *h, const ask *a, fkv_read_want *wants)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < 1u + a->want_count % WANTS; i++) {
        uint16_t ordinal = a->wants[i].ordinal % (h->fixed.block_count + 1u);
        if (count && ordinal <= wants[count - 1].ordinal) continue;
        bool there = ordinal < h->fixed.block_count;
        uint32_t tokens = a->wants[i].token_count;
        wants[count] = (fkv_read_want){.key_offset = there ? h->key_offsets[ordinal] : 0,
                                       .target = count,
                                       .key_bytes = there ? h->blocks[ordinal].key_bytes : 3,
                                       .ordinal = ordinal,
                                       .first_token = a->wants[i].first_token,
                                       .token_count = (uint16_t)tokens};
        if (tokens > (a->capacity ? a->capacity : 1u)) wants[count].token_count = 0;
        count++;
    }
    return count;
}

static uint32_t read_once(const fkv_header *h, const ask *a, memory *m, fkv_read_want *wants)
{
    fkv_read_record records[2] = {place_of(h, a->lie), place_of(h, a->lie)};
    uint32_t count = wants_of(h, a, wants), twice = a->control >> 7 && count > 1;
    records[0].want_count = twice ? count / 2 : count;
    records[1].first_want = count / 2, records[1].want_count = count - count / 2;
    fkv_read_batch batch = {.geometry = &m->geometry,
                            .view = &m->view,
                            .namespace_digest = h->fixed.namespace_digest,
                            .shard = h->fixed.shard,
                            .keys = h->bytes,
                            .pointers = m->pointers,
                            .records = records,
                            .record_count = 1 + twice,
                            .wants = wants,
                            .want_count = count,
                            .gap_pages = a->gap_pages % 8,
                            .amplification_percent = 100u + a->amplification};
    fkv_engine *engine = memory_engine_new(a->control & 4 ? 1 : 4096);
    fkv_read(engine, &batch);
    memory_engine_free(engine);
    for (uint32_t i = 0; i < count; i++) PROMISE(wants[i].status <= FKV_IO_ERROR);
    return count;
}

static void read_both(const fkv_header *h, const ask *a)
{
    static memory m[2];
    fkv_read_want wants[2][WANTS];
    uint32_t count = 0;
    if (!memory_make(&m[0], h, a)) return;
    PROMISE(memory_make(&m[1], h, a));
    for (int level = 0; level < 2; level++) {
        fkv_use_simd(level);
        count = read_once(h, a, &m[level], wants[level]);
    }
    for (uint32_t i = 0; i < count; i++) {
        PROMISE(wants[0][i].status == wants[1][i].status);
        for (uint32_t r = 0; wants[0][i].status == FKV_OK && r < m[0].regions; r++)
            PROMISE(!memcmp((void *)(uintptr_t)m[0].pointers[i * m[0].regions + r],
                            (void *)(uintptr_t)m[1].pointers[i * m[1].regions + r],
                            m[0].region_bytes[r]));
    }
    memory_free(&m[0]);
    memory_free(&m[1]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_input in = {data, size};
    ask a;
    uint32_t count;
    take(&in, &a, sizeof a);
    uint8_t *pages = take_pages(&in, 24, &count);
    uint64_t length = (uint64_t)count * FKV_PAGE_BYTES;
    /* Bound at any rate, so that there is a place to read it from; then perhaps a page changes. */
    bool whole = set_record_right(pages, length, uuid, EPOCH, PAGE);
    fkv_header *h = whole ? fkv_header_parse(pages, length, uuid, EPOCH, PAGE, NULL) : NULL;
    if (h && h->fixed.kind == FKV_KIND_DATA) {
        if ((a.control & 3) == 3)
            pages[(a.gap_pages * 251u + a.amplification * 4099u) % length] ^= (uint8_t)(a.lie | 1);
        memory_device(pages, length, (uint64_t)PAGE * FKV_PAGE_BYTES);
        read_both(h, &a);
    }
    fkv_header_release(h);
    give_back(pages, length);
    return 0;
}
