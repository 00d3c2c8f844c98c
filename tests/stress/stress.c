/* stress.c: threads that do, from C, what the control plane does with the data plane, while one of
 * them takes segments back all the time; to be run under a sanitizer. See plane.h.
 *
 *   stress FOLDER BACKEND SEED THREADS OPERATIONS     prints its counts as "name=number" lines
 *
 * Under TSan the real backends want a build without FKV_TEST_BUILD: its counted allocations order
 * the threads that make them, and would hide races.
 *
 * Invariants
 *  - every operation counts as one, whatever it costs: the mix below is chosen so that 8 x 10^5 fit in
 *    about a minute under TSan: nine tenths look up, the rest reads, writes and ends;
 *  - a key is written by one thread only (superseding is the interesting case, not who does it), and
 *    looked up, read, deleted, damaged and retired by all. */
#include "plane.h"
#include <string.h>
#ifdef FKV_TEST_BUILD
#include "sim.h"
#endif

#define GUARD FKV_PAGE_BYTES /* behind each block of memory, never written */
#define MEMORY (BLOCK_ROOM + GUARD)

typedef struct thread thread;
struct thread {
    plane *plane;
    pthread_t handle;
    uint32_t number, threads;
    uint64_t operations, random;
    uint8_t *sources, *targets; /* BATCH_MAX x MEMORY each */
    bool registered;
    lease held;
    uint32_t versions[KEYS_ALL]; /* of this thread's keys: the last one that it made */
    uint64_t *done;
};

static uint64_t draw(thread *self, uint64_t below)
{
    self->random ^= self->random << 13;
    self->random ^= self->random >> 7;
    self->random ^= self->random << 17;
    return (self->random >> 11) % below;
}

/* Neighbouring keys; some twice as likely as others, as in a cache. */
static void some_keys(thread *self, uint32_t most, key_batch *batch)
{
    uint32_t numbers[BATCH_MAX], count = 1 + (uint32_t)draw(self, most);
    uint64_t key = draw(self, draw(self, 2) ? KEYS_ALL : KEYS_ALL / 4);
    uint32_t first = (uint32_t)key / BATCH_MAX * BATCH_MAX;
    for (uint32_t i = 0; i < count; i++) numbers[i] = first + (uint32_t)(key + i) % BATCH_MAX;
    plane_pack(self->plane, numbers, count, batch);
}

/* ---- operations ---- */

static void do_contains_one(thread *self)
{
    key_batch batch;
    some_keys(self, 1, &batch);
    uint32_t key = batch.numbers[0], floor = VERSION(self->plane->keys[key].floor);
    int found = fkv_index_contains_one(self->plane->index, &self->plane->spaces[batch.space],
                                       batch.blob, batch.ends[0]);
    if (found) plane_check_found(self->plane, key, floor);
}

static void do_contains(thread *self)
{
    key_batch batch;
    uint8_t found[BATCH_MAX];
    uint32_t floors[BATCH_MAX];
    some_keys(self, BATCH_MAX, &batch);
    for (uint32_t i = 0; i < batch.count; i++)
        floors[i] = VERSION(self->plane->keys[batch.numbers[i]].floor);
    fkv_index_contains(self->plane->index, &self->plane->spaces[batch.space], batch.blob,
                       batch.ends, batch.count, found);
    for (uint32_t i = 0; i < batch.count; i++)
        if (found[i]) plane_check_found(self->plane, batch.numbers[i], floors[i]);
}

static void do_match(thread *self)
{
    key_batch batch;
    some_keys(self, BATCH_MAX, &batch);
    plane_match(self->plane, &batch, NULL);
}

static void do_lease(thread *self)
{
    key_batch batch;
    plane_release(self->plane, &self->held);
    if (draw(self, 2)) return;
    some_keys(self, 4, &batch);
    plane_match(self->plane, &batch, &self->held);
}

static void do_lookup(thread *self)
{
    key_batch batch;
    fkv_place places[BATCH_MAX];
    uint32_t segments[BATCH_MAX], floors[BATCH_MAX];
    some_keys(self, BATCH_MAX, &batch);
    for (uint32_t i = 0; i < batch.count; i++)
        floors[i] = VERSION(self->plane->keys[batch.numbers[i]].floor);
    fkv_index_lookup(self->plane->index, batch.digests, batch.count, 1, places);
    for (uint32_t i = 0; i < batch.count; i++) {
        segments[i] = places[i].segment;
        if (places[i].record != FKV_NONE)
            plane_check_found(self->plane, batch.numbers[i], floors[i]);
    }
    fkv_index_unpin(self->plane->index, segments, batch.count);
}

static void do_numbers(thread *self)
{
    fkv_index_totals totals;
    fkv_engine_counters counters;
    fkv_segment_usage usage[2];
    uint32_t segments[2] = {(uint32_t)draw(self, SEGMENTS), (uint32_t)draw(self, 2 * SEGMENTS)};
    fkv_index_totals_get(self->plane->index, &totals);
    fkv_engine_counters_get(self->plane->engine, &counters);
    fkv_index_usage(self->plane->index, segments, 2, usage);
    CHECK(totals.live_pages <= SEGMENTS * SEGMENT_PAGES && totals.records <= totals.blocks,
          "%llu pages", (unsigned long long)totals.live_pages);
    CHECK(usage[0].live_pages <= SEGMENT_PAGES, "%llu", (unsigned long long)usage[0].live_pages);
    CHECK(fkv_index_namespace_blocks(self->plane->index, (uint32_t)draw(self, 3)) <= KEYS, "keys");
    fkv_writes_inflight(self->plane->engine);
}

static void guards_check(const thread *self, uint32_t blocks)
{
    for (uint32_t i = 0; i < blocks; i++) {
        const uint8_t *guard = self->targets + (size_t)i * MEMORY + BLOCK_ROOM;
        CHECK(guard[0] == 0x5A && !memcmp(guard, guard + 1, 63), "block %u was left", i);
    }
}

static void read_some(thread *self, uint32_t most, bool remove)
{
    key_batch batch;
    uint8_t *blocks[BATCH_MAX];
    uint32_t first = 0, count = 0;
    some_keys(self, most, &batch);
    uint32_t tokens = plane_tokens(batch.numbers[0]);
    for (uint32_t i = 0; i < batch.count; i++) blocks[i] = self->targets + (size_t)i * MEMORY;
    const plane_view *view = &self->plane->exact[batch.numbers[0] / 64 % TOKEN_CLASSES];
    if (draw(self, 3) == 0) {
        view = draw(self, 2) ? &self->plane->wide : &self->plane->one_head;
        first = (uint32_t)draw(self, tokens);
        count = (uint32_t)draw(self, tokens - first + 1);
    }
    plane_read(self->plane, &batch, view, blocks, first, count, remove);
    guards_check(self, batch.count);
}

static void do_read(thread *self) { read_some(self, 3, false); }

static void do_damage(thread *self) { read_some(self, 1, true); }

static void do_put(thread *self)
{
    key_batch batch;
    uint8_t *blocks[BATCH_MAX];
    uint32_t numbers[BATCH_MAX], versions[BATCH_MAX], count = 1 + (uint32_t)draw(self, 4);
    if (draw(self, 16) == 0) count = BATCH_MAX; /* large enough for the workers */
    uint32_t groups = KEYS_ALL / BATCH_MAX / self->threads;
    uint32_t group = (uint32_t)draw(self, draw(self, 2) ? groups : groups / 4 + 1);
    uint32_t key = (group * self->threads + self->number) * BATCH_MAX;
    for (uint32_t i = 0; i < count; i++) {
        numbers[i] = key + i;
        versions[i] = ++self->versions[key + i];
        blocks[i] = self->sources + (size_t)i * MEMORY;
        block_fill(blocks[i], numbers[i], versions[i]);
    }
    plane_pack(self->plane, numbers, count, &batch);
    plane_put(self->plane, &batch, blocks, versions,
              draw(self, 2) ? FKV_CODEC_RAW : FKV_CODEC_LOSSLESS, draw(self, 2), draw(self, 3) > 0,
              draw(self, 50) == 0);
    /* The source is the caller's again. */
    for (uint32_t i = 0; i < count; i++)
        memset(blocks[i], 0xEE, (size_t)STREAMS * plane_tokens(key) * VECTOR_BYTES);
}

static void do_delete(thread *self)
{
    key_batch batch;
    some_keys(self, 2, &batch);
    plane_delete(self->plane, &batch);
}

static void do_retire(thread *self) { plane_retire(self->plane, NAMESPACES - 1); }

static void do_flush(thread *self) { plane_flush(self->plane); }

static void do_reclaim(thread *self) { plane_reclaim(self->plane, 1 + (uint32_t)draw(self, 2)); }

static void do_forget_headers(thread *self)
{
    fkv_header_cache_drop(self->plane->engine, (uint32_t)draw(self, SEGMENTS));
}

static void do_register(thread *self)
{
    fkv_engine *engine = self->plane->engine;
    if (self->registered) {
        int status = fkv_engine_unregister(engine, self->targets);
        CHECK(status == 0, "%d", status);
        self->registered = false;
    } else {
        self->registered = fkv_engine_register(engine, self->targets, BATCH_MAX * MEMORY) == 0;
    }
}

typedef struct {
    const char *name;
    void (*run)(thread *self);
    uint32_t weight;   /* of 10,000 */
    uint32_t weight_0; /* of the thread that reclaims all the time */
} operation;

static const operation OPERATIONS[] = {
    {"contains_one", do_contains_one, 3450, 2850},
    {"contains", do_contains, 1500, 1200},
    {"match", do_match, 1200, 1000},
    {"lease", do_lease, 800, 500},
    {"lookup", do_lookup, 1600, 1200},
    {"numbers", do_numbers, 500, 500},
    {"read", do_read, 600, 600},
    {"put", do_put, 200, 200},
    {"delete", do_delete, 60, 60},
    {"damage", do_damage, 30, 30},
    {"forget_headers", do_forget_headers, 40, 40},
    {"register", do_register, 15, 15},
    {"flush", do_flush, 4, 4},
    {"retire", do_retire, 1, 1},
    {"reclaim", do_reclaim, 0, 1800},
};
#define OPERATION_COUNT (sizeof OPERATIONS / sizeof OPERATIONS[0])

/* ---- threads ---- */

static void *thread_main(void *argument)
{
    thread *self = argument;
    for (uint64_t i = 0; i < self->operations; i++) {
        uint64_t at = draw(self, 10000);
        for (uint32_t kind = 0; kind < OPERATION_COUNT; kind++) {
            const operation *tried = &OPERATIONS[kind];
            uint32_t weight = self->number == 0 ? tried->weight_0 : tried->weight;
            if (at < weight) {
                tried->run(self);
                self->done[kind]++;
                break;
            }
            at -= weight;
        }
    }
    plane_release(self->plane, &self->held);
    if (self->registered) do_register(self);
    return NULL;
}

static void thread_make(thread *self, plane *plane, uint32_t number, uint32_t threads,
                        uint64_t operations, uint64_t seed)
{
    *self =
        (thread){.plane = plane, .number = number, .threads = threads, .operations = operations};
    self->random = (seed + 1) * UINT64_C(0x9E3779B97F4A7C15) ^ (number + 1) * UINT64_C(2654435761);
    for (int i = 0; i < 8; i++) draw(self, 2);
    self->sources = fkv_buffer_alloc(BATCH_MAX * MEMORY);
    self->targets = fkv_buffer_alloc(BATCH_MAX * MEMORY);
    self->done = calloc(OPERATION_COUNT, sizeof *self->done);
    CHECK(self->sources && self->targets && self->done, "no memory");
    memset(self->targets, 0x5A, BATCH_MAX * MEMORY);
}

static void thread_free(thread *self)
{
    fkv_buffer_free(self->sources, BATCH_MAX * MEMORY);
    fkv_buffer_free(self->targets, BATCH_MAX * MEMORY);
    free(self->done);
}

/* Every key once more: what is there is the newest version. */
static void read_all(thread *self)
{
    for (uint32_t key = 0; key < KEYS_ALL; key++) {
        key_batch batch;
        plane_pack(self->plane, &key, 1, &batch);
        plane_read(self->plane, &batch, &self->plane->exact[key / 64 % TOKEN_CLASSES],
                   &self->targets, 0, 0, false);
    }
}

static void report(const thread *threads, uint32_t count, const plane *plane)
{
    const plane_counts *c = &plane->counts;
    for (uint32_t kind = 0; kind < OPERATION_COUNT; kind++) {
        uint64_t done = 0;
        for (uint32_t i = 0; i < count; i++) done += threads[i].done[kind];
        printf("do_%s=%llu\n", OPERATIONS[kind].name, (unsigned long long)done);
    }
    const struct {
        const char *name;
        uint64_t value;
    } rows[] = {{"stored", c->stored},       {"skipped", c->skipped},    {"hits", c->hits},
                {"misses", c->misses},       {"waited", c->waited},      {"sealed", c->sealed},
                {"reclaimed", c->reclaimed}, {"refused", c->refused},    {"lost", c->lost},
                {"dropped", c->dropped},     {"held_back", c->held_back}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        printf("%s=%llu\n", rows[i].name, (unsigned long long)rows[i].value);
    fkv_engine_counters counters;
    fkv_engine_counters_get(plane->engine, &counters);
    printf("backend=%s\ndirect_reads=%llu\nbounced_reads=%llu\nread_through_pages=%llu\n"
           "buffer_waits=%llu\nheader_hits=%llu\nheader_misses=%llu\nread_bytes=%llu\n"
           "written_bytes=%llu\n",
           fkv_engine_backend(plane->engine), (unsigned long long)counters.direct_reads,
           (unsigned long long)counters.bounced_reads,
           (unsigned long long)counters.read_through_pages,
           (unsigned long long)counters.buffer_waits, (unsigned long long)counters.header_hits,
           (unsigned long long)counters.header_misses, (unsigned long long)counters.read_bytes,
           (unsigned long long)counters.written_bytes);
}

#ifdef FKV_TEST_BUILD
/* A device that answers out of order, late, and now and then too little. */
static fkv_sim *device_make(uint64_t seed)
{
    fkv_sim *sim = fkv_sim_new(seed);
    CHECK(sim, "no memory");
    fkv_sim_order(sim, 8);
    for (uint64_t i = 1; i <= 1000; i++) {
        const fkv_sim_fault faults[] = {
            {FKV_SIM_READ, FKV_SIM_SHORT, i * 101, 1, 0, FKV_PAGE_BYTES},
            {FKV_SIM_WRITE, FKV_SIM_SHORT, i * 37, 1, 0, FKV_PAGE_BYTES},
            {FKV_SIM_READ, FKV_SIM_LATE, i * 59, 1, 0, 6},
        };
        for (int kind = 0; kind < 3; kind++) {
            int status = fkv_sim_add_fault(sim, &faults[kind]);
            CHECK(status == 0, "%d", status);
        }
    }
    return sim;
}
#endif

int main(int argument_count, char **arguments)
{
    CHECK(argument_count == 6, "stress FOLDER BACKEND SEED THREADS OPERATIONS");
    uint32_t count = (uint32_t)strtoul(arguments[4], NULL, 10);
    uint64_t seed = strtoull(arguments[3], NULL, 10);
    uint64_t operations = strtoull(arguments[5], NULL, 10);
    CHECK(count >= 1 && KEYS_ALL / BATCH_MAX % count == 0, "threads must divide the keys");
    fkv_engine_options options = {
        .backend = (uint32_t)strtoul(arguments[2], NULL, 10),
        .queue_depth = 8, /* small: queues, pool and cache overflow all the time */
        .workers = 2,
        .io_threads = 4,
        .retries = 4,
        .memory_alignment = FKV_PAGE_BYTES,
        .read_buffer_bytes = 1,
        .header_cache_bytes = 512u << 10,
    };
#ifdef FKV_TEST_BUILD
    fkv_alloc_fail(0, 0);
    uint64_t live = fkv_alloc_live();
    fkv_sim *sim = NULL;
    if (options.backend == FKV_BACKEND_SIM) options.sim = sim = device_make(seed);
#endif
    plane *plane = plane_open(arguments[1], &options);
    thread *threads = calloc(count, sizeof *threads);
    CHECK(threads, "no memory");
    for (uint32_t i = 0; i < count; i++)
        thread_make(&threads[i], plane, i, count, operations, seed);
    for (uint32_t i = 0; i < count; i++)
        CHECK(!pthread_create(&threads[i].handle, NULL, thread_main, &threads[i]), "thread %u", i);
    for (uint32_t i = 0; i < count; i++) pthread_join(threads[i].handle, NULL);
    plane_check_rest(plane);
    read_all(&threads[0]);
    plane_check_rest(plane);
    report(threads, count, plane);
    for (uint32_t i = 0; i < count; i++) thread_free(&threads[i]);
    free(threads);
    plane_close(plane);
#ifdef FKV_TEST_BUILD
    if (sim) fkv_sim_free(sim);
    CHECK(fkv_alloc_live() == live, "%llu allocations stay", (unsigned long long)fkv_alloc_live());
#endif
    return 0;
}
