/* lookup.c: what any thread does without the writer's lock; see plane.h.
 *
 * Invariants: those of segment_reader.py and leases.py: places hold pins until the read is over; a
 * block whose write is on its way is waited for; a lease is taken in one step with its match. */
#include "plane.h"
#include <string.h>

#define POISON 0xA5
#define NOISE_BYTES (64u << 10)

/* ---- contents ---- */

/* bf16 numbers of a few exponents, and some that fall out of every window of the code. */
static uint8_t noise[NOISE_BYTES];

__attribute__((constructor)) static void noise_make(void)
{
    uint64_t state = 88172645463325252u;
    for (uint32_t i = 0; i < NOISE_BYTES; i += 2) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        uint16_t exponent =
            state % 50 == 0 ? (uint16_t)(state >> 40 & 255) : (uint16_t)(120 + (state >> 40 & 7));
        uint16_t value = (uint16_t)((state >> 20 & 0x807F) | exponent << 7);
        memcpy(noise + i, &value, 2);
    }
}

static void vector_fill(uint8_t *memory, uint32_t key, uint32_t version, uint32_t stream,
                        uint32_t token)
{
    uint64_t mixed = (key * UINT64_C(0x9E3779B97F4A7C15)) ^ (version * UINT64_C(0xBF58476D1CE4E5B9))
                     ^ (stream * 4099 + token) * UINT64_C(0x94D049BB133111EB);
    mixed ^= mixed >> 29;
    memcpy(memory, noise + mixed % (NOISE_BYTES - VECTOR_BYTES) / 2 * 2, VECTOR_BYTES);
    memcpy(memory, &key, 4);
    memcpy(memory + 4, &version, 4);
}

void block_fill(uint8_t *memory, uint32_t key, uint32_t version)
{
    uint32_t tokens = plane_tokens(key);
    for (uint32_t stream = 0; stream < STREAMS; stream++)
        for (uint32_t token = 0; token < tokens; token++, memory += VECTOR_BYTES)
            vector_fill(memory, key, version, stream, token);
}

static bool poisoned(const uint8_t *memory, uint64_t length)
{
    return length == 0 || (memory[0] == POISON && memcmp(memory, memory + 1, length - 1) == 0);
}

/* Of tokens [first, first + count) in a view: every vector right, everything else as it was. Returns
 * the version. */
static uint32_t block_check(const plane_view *view, const uint8_t *memory, uint32_t key,
                            uint32_t first, uint32_t count)
{
    uint8_t expected[VECTOR_BYTES];
    uint32_t room = view->view.order.block_tokens, version = 0;
    bool any = false;
    for (uint32_t stream = 0; stream < STREAMS; stream++) {
        uint32_t head = stream % HEADS;
        if (view->view.head_slots) {
            if (view->view.head_slots[head] < 0) continue;
            head = (uint32_t)view->view.head_slots[head];
        }
        const uint8_t *at =
            memory + ((uint64_t)stream / HEADS * HEADS + head) * room * VECTOR_BYTES;
        for (uint32_t i = 0; i < count; i++, at += VECTOR_BYTES) {
            if (!any) memcpy(&version, at + 4, 4);
            any = true;
            vector_fill(expected, key, version, stream, first + i);
            CHECK(!memcmp(at, expected, VECTOR_BYTES), "key %u version %u stream %u token %u", key,
                  version, stream, first + i);
        }
        CHECK(poisoned(at, (uint64_t)(room - count) * VECTOR_BYTES), "key %u: behind its tokens",
              key);
    }
    return version;
}

/* ---- reading ---- */

typedef struct {
    fkv_place places[BATCH_MAX];
    uint32_t pinned[BATCH_MAX];
    uint32_t rows[BATCH_MAX]; /* found, in the order of their places */
    uint32_t row_count;
    fkv_read_record records[BATCH_MAX];
    fkv_read_want wants[BATCH_MAX];
    uint64_t record_count;
    uint64_t pointers[BATCH_MAX];
} reading;

static bool place_before(const fkv_place *a, const fkv_place *b)
{
    if (a->segment != b->segment) return a->segment < b->segment;
    if (a->page != b->page) return a->page < b->page;
    return a->ordinal < b->ordinal;
}

static void rows_sort(reading *r, const key_batch *batch)
{
    for (uint32_t i = 0; i < batch->count; i++) {
        if (r->places[i].record == FKV_NONE) continue;
        uint32_t at = r->row_count++;
        for (; at > 0 && place_before(&r->places[i], &r->places[r->rows[at - 1]]); at--)
            r->rows[at] = r->rows[at - 1];
        r->rows[at] = i;
    }
}

static void wants_make(const plane *plane, const key_batch *batch, uint32_t first, uint32_t count,
                       reading *r)
{
    const published *now = atomic_load_explicit(&plane->published, memory_order_acquire);
    const fkv_place *before = NULL;
    for (uint32_t i = 0; i < r->row_count; i++) {
        uint32_t row = r->rows[i];
        const fkv_place *place = &r->places[row];
        uint64_t key = row ? batch->ends[row - 1] : 0;
        bool same = before && before->segment == place->segment && before->page == place->page
                    && before->ordinal != place->ordinal;
        if (!same)
            r->records[r->record_count++] =
                (fkv_read_record){.sequence = place->sequence,
                                  .epoch = now->epochs[place->segment],
                                  .segment_uuid = now->uuids[place->segment],
                                  .segment = place->segment,
                                  .fd = now->fds[place->segment],
                                  .page = place->page,
                                  .pages = place->pages,
                                  .record_tokens = place->record_tokens,
                                  .header_pages = place->header_pages,
                                  .record_blocks = place->record_blocks,
                                  .first_want = i,
                                  .codec = place->codec,
                                  .flags = place->flags};
        r->records[r->record_count - 1].want_count++;
        r->wants[i] = (fkv_read_want){.key_offset = key,
                                      .target = row,
                                      .key_bytes = (uint16_t)(batch->ends[row] - key),
                                      .ordinal = place->ordinal,
                                      .first_token = (uint16_t)first,
                                      .token_count = (uint16_t)count};
        before = place;
    }
}

/* Drops the rows whose blocks went while their write was waited for: it may have failed. */
static void rows_again(plane *plane, const key_batch *batch, reading *r)
{
    fkv_place now[BATCH_MAX];
    uint32_t kept = 0;
    fkv_index_lookup(plane->index, batch->digests, batch->count, 0, now);
    for (uint32_t i = 0; i < r->row_count; i++)
        if (now[r->rows[i]].record != FKV_NONE) r->rows[kept++] = r->rows[i];
    r->row_count = kept;
}

static void found_check(plane *plane, const key_batch *batch, const reading *r, uint32_t want,
                        const uint32_t *floors, const uint32_t *ceilings, const plane_view *view,
                        uint8_t *const *blocks, bool remove)
{
    uint32_t row = r->rows[want], key = batch->numbers[row], first = r->wants[want].first_token;
    CHECK(r->wants[want].status == FKV_OK, "key %u: status %u", key, r->wants[want].status);
    uint32_t version = block_check(view, blocks[row], key, first, r->wants[want].token_count);
    CHECK(version >= floors[row] && version <= ceilings[row], "key %u: version %u of [%u, %u]", key,
          version, floors[row], ceilings[row]);
    if (!remove) return;
    uint64_t dropped_count;
    fkv_dropped dropped;
    fkv_index_remove(plane->index, batch->digests + row * FKV_DIGEST_BYTES,
                     &r->places[row].sequence, 1, &dropped, &dropped_count);
    plane_raise(&plane->keys[key].floor, version + 1);
}

/* All layers are settled by the read itself, and what failed is told. */
static void layers_check(fkv_progress *progress, const reading *r)
{
    uint32_t settled = fkv_progress_wait(progress, LAYERS, 0), failed = FKV_NONE;
    CHECK(settled == LAYERS, "%u layers are settled", settled);
    for (uint32_t i = 0; i < r->row_count; i++) {
        const fkv_read_want *w = &r->wants[i];
        CHECK((w->status == FKV_OK) == (w->failed_layer == FKV_NONE), "status %u, layer %u",
              w->status, w->failed_layer);
        if (w->failed_layer < failed) failed = w->failed_layer;
    }
    CHECK(fkv_progress_failed(progress) == failed, "layer %u failed", failed);
    fkv_progress_free(progress);
}

/* A read that goes on after the call, and is given up now and then: memory that is said to be free is used
 * again at once. Threads tell each other which reads are over. */
static void read_begun(plane *plane, const fkv_read_batch *batch, const reading *r, bool give_up,
                       uint8_t *const *blocks, uint64_t block_bytes)
{
    _Atomic bool over = false;
    bool unused[BATCH_MAX] = {false};
    fkv_read_job *job;
    CHECK(fkv_read_start(plane->engine, batch, (uint64_t)(uintptr_t)&over, &job) == FKV_OK,
          "%u blocks", r->row_count);
    bool released = give_up && fkv_read_cancel(job);
    for (uint32_t i = 0; i < r->row_count; i++) {
        unused[i] = released && r->wants[i].status == FKV_CANCELLED;
        if (unused[i]) memset(blocks[r->rows[i]], POISON, block_bytes);
    }
    while (!atomic_load(&over)) {
        uint64_t tags[8];
        uint64_t count = fkv_read_reap(plane->engine, tags, 8, 1);
        for (uint64_t i = 0; i < count; i++) atomic_store((_Atomic bool *)(uintptr_t)tags[i], true);
    }
    fkv_read_free(job);
    for (uint32_t i = 0; i < r->row_count; i++)
        CHECK(!unused[i] || poisoned(blocks[r->rows[i]], block_bytes), "block %u", r->rows[i]);
}

void plane_read(plane *plane, const key_batch *batch, const plane_view *view,
                uint8_t *const *blocks, uint32_t first, uint32_t count, bool remove)
{
    uint32_t floors[BATCH_MAX], ceilings[BATCH_MAX];
    uint64_t newest = 0;
    reading r;
    memset(&r, 0, sizeof r);
    for (uint32_t i = 0; i < batch->count; i++) {
        memset(blocks[i], POISON, (size_t)STREAMS * view->view.order.block_tokens * VECTOR_BYTES);
        r.pointers[i] = (uint64_t)(uintptr_t)blocks[i];
        floors[i] = VERSION(plane->keys[batch->numbers[i]].floor);
    }
    fkv_index_lookup(plane->index, batch->digests, batch->count, 1, r.places);
    for (uint32_t i = 0; i < batch->count; i++) {
        ceilings[i] = VERSION(plane->keys[batch->numbers[i]].ceiling);
        r.pinned[i] = r.places[i].segment;
        if (r.places[i].record != FKV_NONE && r.places[i].sequence > newest)
            newest = r.places[i].sequence;
    }
    rows_sort(&r, batch);
    if (r.row_count && plane_wait_written(plane, newest)) rows_again(plane, batch, &r);
    if (r.row_count) {
        wants_make(plane, batch, first, count, &r);
        fkv_progress *progress = newest & 1 ? fkv_progress_new(LAYERS) : NULL; /* now and then */
        fkv_read_batch job = {
            .geometry = &plane->geometry,
            .view = &view->view,
            .namespace_digest = plane->spaces[batch->space].prefix,
            .shard = plane->shard,
            .keys = batch->blob,
            .pointers = r.pointers,
            .records = r.records,
            .record_count = r.record_count,
            .wants = r.wants,
            .want_count = r.row_count,
            .gap_pages = 16,
            .amplification_percent = 125,
            .progress = progress,
        };
        job.flags = (newest & 2 ? FKV_READ_BACKGROUND : 0) | (newest & 4 ? FKV_READ_BOUNCE : 0);
        uint64_t bytes = (uint64_t)STREAMS * view->view.order.block_tokens * VECTOR_BYTES;
        if (newest & 8)
            read_begun(plane, &job, &r, newest & 16, blocks, bytes);
        else
            fkv_read(plane->engine, &job);
        if (progress) layers_check(progress, &r);
    }
    fkv_index_unpin(plane->index, r.pinned, batch->count);
    for (uint32_t i = 0; i < r.row_count; i++)
        if (r.wants[i].status != FKV_CANCELLED)
            found_check(plane, batch, &r, i, floors, ceilings, view, blocks, remove);
    COUNT(plane->counts.hits, r.row_count);
    COUNT(plane->counts.misses, batch->count - r.row_count);
}

/* ---- looking ---- */

void plane_check_found(const plane *plane, uint32_t key, uint32_t floor)
{
    uint32_t ceiling = VERSION(plane->keys[key].ceiling);
    CHECK(ceiling > 0 && ceiling >= floor, "key %u is found and should not be: [%u, %u]", key,
          floor, ceiling);
}

uint64_t plane_match(plane *plane, const key_batch *batch, lease *held)
{
    const fkv_keyspace *space = &plane->spaces[batch->space];
    uint32_t floors[BATCH_MAX];
    uint64_t matched;
    for (uint32_t i = 0; i < batch->count; i++)
        floors[i] = VERSION(plane->keys[batch->numbers[i]].floor);
    if (!held) {
        matched = fkv_index_match(plane->index, space, batch->blob, batch->ends, batch->count, 0,
                                  NULL, NULL);
    } else {
        uint32_t holds = 0;
        pthread_mutex_lock(&plane->leases);
        matched = fkv_index_match(plane->index, space, batch->blob, batch->ends, batch->count, 1,
                                  held->segments, &held->count);
        for (uint64_t i = 0; i < held->count; i++) plane->leased[held->segments[i]]++;
        for (uint32_t i = 0; i < SEGMENTS; i++) holds += plane->leased[i] > 0;
        bool too_many = holds > SEGMENTS / 2;
        pthread_mutex_unlock(&plane->leases);
        if (too_many) plane_release(plane, held);
    }
    for (uint64_t i = 0; i < matched; i++) plane_check_found(plane, batch->numbers[i], floors[i]);
    return matched;
}

void plane_release(plane *plane, lease *held)
{
    pthread_mutex_lock(&plane->leases);
    for (uint64_t i = 0; i < held->count; i++) {
        CHECK(plane->leased[held->segments[i]] > 0, "segment %u", held->segments[i]);
        plane->leased[held->segments[i]]--;
    }
    pthread_mutex_unlock(&plane->leases);
    fkv_index_unpin(plane->index, held->segments, held->count);
    held->count = 0;
}
