/* plane.h: a store in miniature, in C: what flashkv's control plane does with the data plane, and
 * under which of its locks.
 *
 * The contract that this checks is the one that the Python side keeps:
 *  - `writer`  is Store.writer_lock: encode, bind, begin_segment, drop_namespace, reclaim, sync and
 *              fkv_index_remove by a delete are called under it, and so one at a time;
 *  - `flights` is Flights.lock: fkv_write_submit and fkv_index_add are called under it (and under
 *              `writer`), fkv_write_reap that polls under it, fkv_write_reap that waits without;
 *  - `leases`  is Leases._lock: a match that pins, and the fkv_index_drop_segment of a reclaim;
 *  - what the interpreter's own lock makes one step (counters, the replaced arrays of Segments) is
 *    atomic here.
 * Everything else (contains, lookup, match, unpin, remove by sequence, usage, fkv_read, header cache,
 * registration, counters) is called by any thread at any time, with no lock of the caller's.
 *
 * Invariants
 *  - a block's bytes tell its key and version; a version that was superseded, deleted, retired or
 *    lost before a lookup began is never found by it, nor one whose put had not begun when it ended;
 *  - what is not OK has no say; what is OK is equal in every byte, and nothing around it changed. */
#ifndef FLASHKV_STRESS_PLANE_H
#define FLASHKV_STRESS_PLANE_H
#include "flashkv_native.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition, ...)                                                                      \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);                        \
            fprintf(stderr, __VA_ARGS__);                                                          \
            fputc('\n', stderr);                                                                   \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

#define SEGMENTS 20
#define SEGMENT_PAGES 64u
#define NAMESPACES 2
#define KEYS 384u /* of each namespace: more than the segments hold */
#define KEYS_ALL (NAMESPACES * KEYS)
#define KEY_ROOM 32
#define BATCH_MAX 8
#define LAYERS 2
#define HEADS 2
#define PLANES 2
#define VECTOR_BYTES 64
#define STREAMS (LAYERS * HEADS * PLANES)
#define TOKEN_CLASSES 3
#define TOKENS_MAX 40
#define BLOCK_ROOM (STREAMS * TOKENS_MAX * VECTOR_BYTES) /* whole pages */
#define STAGING 4
#define STAGING_BYTES (1u << 20)
#define RUN_BYTES (256u << 10)

/* Counts that the test asks for. Relaxed, as are the versions: what orders threads here must be the
 * data plane's own locks and the three above, or a race would hide behind the check. */
#define COUNT(counter, amount) atomic_fetch_add_explicit(&(counter), amount, memory_order_relaxed)
#define VERSION(value) atomic_load_explicit(&(value), memory_order_relaxed)
typedef struct {
    _Atomic uint64_t stored, skipped, hits, misses, waited, reclaimed, held_back, sealed, refused,
        lost, dropped;
} plane_counts;

typedef struct {
    _Atomic uint32_t floor;   /* no older version may be found any more */
    _Atomic uint32_t ceiling; /* no newer one may be found yet */
} key_state;

typedef struct {
    uint8_t *base;
    uint64_t used;
    bool taken;
} staging;

typedef struct run run;
struct run { /* a write that is pending or on its way */
    run *next;
    uint64_t tag, offset, length, first_sequence;
    const uint8_t *data;
    staging *buffer;
    int32_t fd;
};

typedef struct {
    run *head, **tail;
} run_list;

typedef enum { FREE, OPEN, CLOSED } segment_state;

typedef struct { /* guarded by `writer` */
    segment_state state;
    int32_t fd;
    uint32_t next_page;
    uint64_t epoch, first_sequence;
    uint8_t uuid[FKV_UUID_BYTES];
    bool unsynced;
} segment;

typedef struct published published;
struct published { /* never changed once readers may have it; freed at the end */
    published *before;
    int32_t fds[SEGMENTS];
    uint64_t epochs[SEGMENTS];
    uint8_t uuids[SEGMENTS][FKV_UUID_BYTES];
};

typedef struct {
    fkv_view view;
    fkv_place_in_memory entries[LAYERS * PLANES];
    int32_t slots[HEADS];
} plane_view;

typedef struct {
    fkv_engine *engine;
    fkv_index *index;
    fkv_geometry geometry;
    plane_view exact[TOKEN_CLASSES]; /* room for just the block: raw ones are read in place */
    plane_view wide;                 /* room for TOKENS_MAX */
    plane_view one_head;             /* likewise; holds the last head only */
    fkv_keyspace spaces[NAMESPACES];
    uint8_t shard[FKV_SHARD_BYTES];
    char key_text[KEYS_ALL][KEY_ROOM];
    key_state keys[KEYS_ALL];

    pthread_mutex_t writer;
    segment segments[SEGMENTS];
    int open; /* the segment that is filled, or -1 */
    uint64_t next_sequence;
    staging staging[STAGING];

    pthread_mutex_t flights;
    run_list pending, flying;
    uint64_t pending_bytes, next_tag;
    staging *filling;

    pthread_mutex_t leases;
    uint32_t leased[SEGMENTS];

    _Atomic(published *) published;
    plane_counts counts;
} plane;

/* Keys of one namespace, packed as every call wants them. */
typedef struct {
    uint32_t count, space;
    uint32_t numbers[BATCH_MAX];
    uint8_t blob[BATCH_MAX * KEY_ROOM];
    uint64_t ends[BATCH_MAX];
    uint8_t digests[BATCH_MAX * FKV_DIGEST_BYTES];
} key_batch;

typedef struct { /* pins of a match */
    uint32_t segments[BATCH_MAX];
    uint64_t count;
} lease;

/* ---- store.c: opening, closing, writes on their way ---- */
plane *plane_open(const char *folder, const fkv_engine_options *options);
void plane_close(plane *plane);
void plane_pack(const plane *plane, const uint32_t *numbers, uint32_t count, key_batch *batch);
/* Tokens of every block of this key. */
uint32_t plane_tokens(uint32_t key);
/* Returns once every write up to a sequence has ended; whether there was cause to wait. */
bool plane_wait_written(plane *plane, uint64_t sequence);

/* ---- writer.c: what changes the store ---- */
/* blocks[i]: memory of a block in plane->exact; versions[i]: what it holds. One record a block, or
 * one for all. */
void plane_put(plane *plane, const key_batch *batch, uint8_t *const *blocks,
               const uint32_t *versions, uint8_t codec, bool together, bool replace, bool lose);
void plane_delete(plane *plane, const key_batch *batch);
void plane_retire(plane *plane, uint32_t space);
void plane_flush(plane *plane);
/* Frees up to `wanted` segments; how many became free. */
uint32_t plane_reclaim(plane *plane, uint32_t wanted);
/* Nothing is on its way, held or miscounted. */
void plane_check_rest(plane *plane);

/* ---- lookup.c: what reads it ---- */
/* Reads into blocks[i] of `view`; checks what is found. Tokens [first, first + count), count 0: all.
 * `remove`: takes the found blocks out of the index, as if they had been damaged. */
void plane_read(plane *plane, const key_batch *batch, const plane_view *view,
                uint8_t *const *blocks, uint32_t first, uint32_t count, bool remove);
/* Leading keys present; with `held` their segments are leased until plane_release(). */
uint64_t plane_match(plane *plane, const key_batch *batch, lease *held);
void plane_release(plane *plane, lease *held);
/* A key was found by a look that began when its floor was `floor`: may it be there? */
void plane_check_found(const plane *plane, uint32_t key, uint32_t floor);
void plane_raise(_Atomic uint32_t *value, uint32_t least);
void block_fill(uint8_t *memory, uint32_t key, uint32_t version);
#endif
