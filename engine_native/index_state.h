/* index_state.h: what index.c changes and index_lookup.c reads. Internal.
 *
 * Invariants
 *  - one mutex guards all; a batch takes it once, hashing is done outside of it;
 *  - a row of the record table exists while one of its blocks is alive, and its pages count as live
 *    for just as long;
 *  - counters of segments, namespaces and totals are sums over rows and entries: every change goes
 *    through block_came() and block_gone() of index.c.
 *
 * Memory: 24 bytes an entry at a load of 0.65 to 0.85, 40 bytes a record in blocks of rows that are
 * never moved: under 80 bytes a block even where each block is a record of its own.
 */
#ifndef FLASHKV_INDEX_STATE_H
#define FLASHKV_INDEX_STATE_H
#include "index_table.h"

#include <pthread.h>

#define FKV_ROWS 4096u /* of the record table, allocated at once */
#define FKV_AHEAD 8    /* entries that are fetched into the cache before they are needed */

typedef struct {
    uint64_t sequence;
    uint32_t segment;
    uint32_t page; /* of a free row: the next free row */
    uint32_t pages;
    uint32_t tokens;
    uint32_t namespace_id;
    uint16_t header_pages;
    uint16_t block_count;
    uint16_t live; /* blocks in the table; 0: the row is free */
    uint8_t group;
    uint8_t codec;
    uint8_t fidelity;
    uint8_t flags;
} fkv_record_row;
_Static_assert(sizeof(fkv_record_row) == 40, "the index's budget is 40 bytes a record");

typedef struct {
    fkv_record_row rows[FKV_ROWS];
    uint64_t marked[FKV_ROWS / 64]; /* rows that a sweep takes out */
} fkv_row_block;

typedef struct {
    uint64_t epoch;
    uint64_t live_pages;
    uint64_t live_blocks;
    uint32_t live_records;
    uint32_t pins;
    uint32_t visit; /* the match that listed it last */
    bool begun;
} fkv_segment_row;

struct fkv_index {
    pthread_mutex_t mutex;
    fkv_table table;
    fkv_row_block **blocks;
    uint32_t block_count, block_room;
    uint32_t rows_used; /* rows before it have been taken at least once */
    uint32_t rows_free; /* length of the free list */
    uint32_t first_free;
    fkv_segment_row *segments;
    uint32_t segment_count;
    uint64_t *namespace_blocks;
    uint32_t namespace_count;
    uint32_t visit;
    uint64_t live_records, live_pages;
};

static inline void fkv_index_lock(fkv_index *index) { pthread_mutex_lock(&index->mutex); }
static inline void fkv_index_unlock(fkv_index *index) { pthread_mutex_unlock(&index->mutex); }

static inline fkv_record_row *fkv_index_row(const fkv_index *index, uint32_t record)
{
    return &index->blocks[record / FKV_ROWS]->rows[record % FKV_ROWS];
}
#endif
