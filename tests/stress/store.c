/* store.c: opening, closing, and the writes that are on their way; see plane.h for the locks.
 *
 * Invariants: those of flights.py and codec.py's Staging, as far as they bear on the order of native
 * calls. */
#include "store.h"
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

static const uint32_t TOKENS[TOKEN_CLASSES] = {1, 16, TOKENS_MAX};

uint32_t plane_tokens(uint32_t key) { return TOKENS[key / 64 % TOKEN_CLASSES]; }

void plane_raise(_Atomic uint32_t *value, uint32_t least)
{
    uint32_t now = VERSION(*value);
    while (now < least
           && !atomic_compare_exchange_weak_explicit(value, &now, least, memory_order_relaxed,
                                                     memory_order_relaxed))
        continue;
}

/* ---- open and close ---- */

static void view_make(const fkv_geometry *geometry, plane_view *made, uint32_t room)
{
    fkv_order_row order = {{FKV_AXIS_LAYER, FKV_AXIS_PLANE, FKV_AXIS_HEAD, FKV_AXIS_TOKEN}, room};
    int regions = fkv_view_fill(geometry, &order, 0, made->entries, NULL);
    CHECK(regions == 1, "%d", regions);
    made->view = (fkv_view){
        .region_count = 1,
        .entry_count = LAYERS * PLANES,
        .entries = made->entries,
        .order = order,
    };
}

static void views_make(plane *plane)
{
    for (uint32_t i = 0; i < TOKEN_CLASSES; i++)
        view_make(&plane->geometry, &plane->exact[i], TOKENS[i]);
    view_make(&plane->geometry, &plane->wide, TOKENS_MAX);
    view_make(&plane->geometry, &plane->one_head, TOKENS_MAX);
    for (int head = 0; head < HEADS; head++)
        plane->one_head.slots[head] = head == HEADS - 1 ? 0 : -1;
    plane->one_head.view.head_slots = plane->one_head.slots;
}

static void keys_make(plane *plane)
{
    for (uint32_t space = 0; space < NAMESPACES; space++) {
        plane->spaces[space].namespace_id = space;
        plane->spaces[space].digest_bytes = FKV_DIGEST_BYTES;
        memset(plane->spaces[space].prefix, (int)space + 1, FKV_NAMESPACE_BYTES);
    }
    for (uint32_t key = 0; key < KEYS_ALL; key++)
        snprintf(plane->key_text[key], KEY_ROOM, "%s%u", key % 5 ? "key-" : "a longer key, ", key);
}

static int32_t file_open(const char *folder, uint32_t number)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%08u.seg", folder, number);
    int32_t fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_DIRECT, 0600);
    if (fd < 0 && errno == EINVAL) fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK(fd >= 0, "%s: %s", path, strerror(errno));
    int status = fkv_preallocate(fd, (uint64_t)SEGMENT_PAGES * FKV_PAGE_BYTES);
    CHECK(status >= 0, "%s: %s", path, strerror(-status));
    return fd;
}

plane *plane_open(const char *folder, const fkv_engine_options *options)
{
    char error[256] = "";
    plane *made = calloc(1, sizeof *made);
    CHECK(made, "no memory");
    made->geometry = (fkv_geometry){.plane_count = PLANES};
    for (int i = 0; i < PLANES; i++)
        made->geometry.planes[i] =
            (fkv_plane_row){(uint8_t)i, FKV_DTYPE_BF16, 0, LAYERS, HEADS, VECTOR_BYTES};
    views_make(made);
    keys_make(made);
    made->engine = fkv_engine_open(options, error, sizeof error);
    CHECK(made->engine, "%s", error);
    made->index = fkv_index_new();
    CHECK(made->index, "no memory");
    pthread_mutex_init(&made->writer, NULL);
    pthread_mutex_init(&made->flights, NULL);
    pthread_mutex_init(&made->leases, NULL);
    made->open = -1;
    made->next_sequence = made->next_tag = 1;
    made->pending.tail = &made->pending.head;
    made->flying.tail = &made->flying.head;
    for (uint32_t i = 0; i < SEGMENTS; i++) {
        made->segments[i].fd = file_open(folder, i);
        memset(made->segments[i].uuid, (int)i + 1, FKV_UUID_BYTES);
    }
    for (int i = 0; i < STAGING; i++) {
        made->staging[i].base = fkv_buffer_alloc(STAGING_BYTES);
        CHECK(made->staging[i].base, "no memory");
    }
    return made;
}

void plane_close(plane *plane)
{
    fkv_engine_close(plane->engine);
    fkv_index_free(plane->index);
    for (int i = 0; i < STAGING; i++) fkv_buffer_free(plane->staging[i].base, STAGING_BYTES);
    for (uint32_t i = 0; i < SEGMENTS; i++) close(plane->segments[i].fd);
    for (published *p = atomic_load_explicit(&plane->published, memory_order_relaxed), *before; p;
         p = before) {
        before = p->before;
        free(p);
    }
    pthread_mutex_destroy(&plane->writer);
    pthread_mutex_destroy(&plane->flights);
    pthread_mutex_destroy(&plane->leases);
    free(plane);
}

void plane_pack(const plane *plane, const uint32_t *numbers, uint32_t count, key_batch *batch)
{
    uint64_t end = 0;
    batch->count = count;
    batch->space = numbers[0] / KEYS;
    for (uint32_t i = 0; i < count; i++) {
        size_t length = strlen(plane->key_text[numbers[i]]);
        memcpy(batch->blob + end, plane->key_text[numbers[i]], length);
        batch->ends[i] = end += length;
        batch->numbers[i] = numbers[i];
    }
    fkv_key_digests(&plane->spaces[batch->space], batch->blob, batch->ends, count, batch->digests);
}

/* ---- writes on their way (Flights) ---- */

void run_append(run_list *list, run *one)
{
    one->next = NULL;
    *list->tail = one;
    list->tail = &one->next;
}

static void list_join(run_list *list, run_list *more)
{
    if (!more->head) return;
    *list->tail = more->head;
    list->tail = more->tail;
    *more = (run_list){NULL, &more->head};
}

static void land_locked(plane *plane, uint64_t tag)
{
    run **at = &plane->flying.head;
    while (*at && (*at)->tag != tag) at = &(*at)->next;
    run *landed = *at;
    CHECK(landed, "tag %llu was never submitted", (unsigned long long)tag);
    *at = landed->next;
    if (plane->flying.tail == &landed->next) plane->flying.tail = at;
    free(landed);
}

static uint64_t take_locked(plane *plane, const fkv_write *finished, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        CHECK(finished[i].result == 0, "a write failed: %d", finished[i].result);
        land_locked(plane, finished[i].tag);
    }
    for (int i = 0; i < STAGING; i++) {
        staging *buffer = &plane->staging[i];
        bool used = buffer == plane->filling;
        for (const run *r = plane->pending.head; r; r = r->next) used |= r->buffer == buffer;
        for (const run *r = plane->flying.head; r; r = r->next) used |= r->buffer == buffer;
        if (!used) buffer->taken = false;
    }
    return (uint64_t)count;
}

void plane_launch_locked(plane *plane, uint64_t least)
{
    fkv_write writes[64];
    if (!plane->pending.head || plane->pending_bytes < least) return;
    while (plane->pending.head) {
        uint64_t count = 0;
        run_list part = {NULL, &part.head};
        for (run *r = plane->pending.head, *next; r && count < 64; r = next) {
            next = plane->pending.head = r->next;
            r->tag = plane->next_tag++;
            writes[count++] = (fkv_write){r->tag, r->offset, r->length, r->data, r->fd, 0};
            run_append(&part, r);
        }
        list_join(&plane->flying, &part);
        int status = fkv_write_submit(plane->engine, writes, count);
        CHECK(status == 0, "%s", strerror(-status));
    }
    plane->pending = (run_list){NULL, &plane->pending.head};
    plane->pending_bytes = 0;
}

static void reap(plane *plane)
{
    fkv_write finished[64];
    pthread_mutex_lock(&plane->flights);
    plane_launch_locked(plane, 0);
    bool landed = take_locked(plane, finished, fkv_write_reap(plane->engine, finished, 64, 0)) > 0;
    bool none = !plane->flying.head;
    pthread_mutex_unlock(&plane->flights);
    if (landed || none) return;
    int64_t count = fkv_write_reap(plane->engine, finished, 64, 1000);
    pthread_mutex_lock(&plane->flights);
    take_locked(plane, finished, count);
    pthread_mutex_unlock(&plane->flights);
}

static bool written(plane *plane, uint64_t sequence)
{
    pthread_mutex_lock(&plane->flights);
    const run *first = plane->flying.head ? plane->flying.head : plane->pending.head;
    bool all = !first || first->first_sequence > sequence;
    pthread_mutex_unlock(&plane->flights);
    return all;
}

bool plane_wait_written(plane *plane, uint64_t sequence)
{
    if (written(plane, sequence)) return false;
    while (!written(plane, sequence)) reap(plane);
    COUNT(plane->counts.waited, 1);
    return true;
}

staging *plane_staging_with(plane *plane, uint64_t bytes)
{
    CHECK(bytes <= STAGING_BYTES, "%llu", (unsigned long long)bytes);
    if (plane->filling && STAGING_BYTES - plane->filling->used >= bytes) return plane->filling;
    for (;; reap(plane)) {
        fkv_write finished[64];
        staging *found = NULL;
        pthread_mutex_lock(&plane->flights);
        plane->filling = NULL;
        take_locked(plane, finished, fkv_write_reap(plane->engine, finished, 64, 0));
        for (int i = 0; i < STAGING && !found; i++)
            if (!plane->staging[i].taken) found = &plane->staging[i];
        if (found) *found = (staging){found->base, 0, true};
        plane->filling = found;
        pthread_mutex_unlock(&plane->flights);
        if (found) return found;
    }
}
