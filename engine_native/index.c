/* index.c: which record holds a block: records and their blocks come in and go out.
 *
 * Invariants: those of index_state.h, and
 *  - memory is reserved before the first change of a batch: it is added as a whole or not at all
 *    (but for a digest space so skewed that the table's spare slots run out);
 *  - of two blocks with one digest the higher sequence stays; the loser is reported, not forgotten.
 */
#include "allocate.h"
#include "index_state.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define SEGMENTS_MAX (1u << 20)
#define NAMESPACES_MAX (1u << 24)

fkv_index *fkv_index_new(void)
{
    fkv_index *index = fkv_calloc(1, sizeof *index);
    if (!index) return NULL;
    if (pthread_mutex_init(&index->mutex, NULL) != 0) {
        fkv_free(index);
        return NULL;
    }
    index->first_free = FKV_NONE;
    return index;
}

void fkv_index_free(fkv_index *index)
{
    if (!index) return;
    for (uint32_t i = 0; i < index->block_count; i++) fkv_free(index->blocks[i]);
    fkv_free(index->blocks);
    fkv_free(index->segments);
    fkv_free(index->namespace_blocks);
    fkv_table_free(&index->table);
    pthread_mutex_destroy(&index->mutex);
    fkv_free(index);
}

/* ---- rows ---- */

/* Marks are kept apart from the rows: a sweep reads one bit an entry, which stays in the cache. */
static uint64_t *mark_word(fkv_index *index, uint32_t record)
{
    return &index->blocks[record / FKV_ROWS]->marked[record % FKV_ROWS / 64];
}

static uint64_t mark_bit(uint32_t record) { return UINT64_C(1) << (record % 64); }

static int reserve_rows(fkv_index *index, uint64_t count)
{
    uint64_t have = index->rows_free + (uint64_t)index->block_count * FKV_ROWS - index->rows_used;
    uint64_t missing = count > have ? count - have : 0;
    uint64_t blocks = index->block_count + (missing + FKV_ROWS - 1) / FKV_ROWS;
    if (blocks >= FKV_NONE / FKV_ROWS) return -ENOMEM;
    while (index->block_count < blocks) {
        if (index->block_count == index->block_room) {
            uint32_t room = index->block_room ? index->block_room * 2 : 16;
            fkv_row_block **grown = fkv_realloc(index->blocks, room * sizeof *grown);
            if (!grown) return -ENOMEM;
            index->blocks = grown;
            index->block_room = room;
        }
        fkv_row_block *block = fkv_calloc(1, sizeof *block);
        if (!block) return -ENOMEM;
        index->blocks[index->block_count++] = block;
    }
    return 0;
}

static uint32_t take_row(fkv_index *index)
{
    uint32_t record = index->first_free;
    if (record == FKV_NONE) return index->rows_used++;
    index->first_free = fkv_index_row(index, record)->page;
    index->rows_free--;
    return record;
}

static void free_row(fkv_index *index, uint32_t record)
{
    fkv_record_row *row = fkv_index_row(index, record);
    *row = (fkv_record_row){.page = index->first_free};
    *mark_word(index, record) &= ~mark_bit(record);
    index->first_free = record;
    index->rows_free++;
}

static int grow(void **array, uint32_t *count, uint64_t wanted, size_t item_bytes)
{
    if (wanted <= *count) return 0;
    uint64_t room = *count + *count / 4 + 16;
    if (room < wanted) room = wanted;
    uint8_t *grown = fkv_realloc(*array, room * item_bytes);
    if (!grown) return -ENOMEM;
    memset(grown + *count * item_bytes, 0, (room - *count) * item_bytes);
    *array = grown;
    *count = (uint32_t)room;
    return 0;
}

static void block_came(fkv_index *index, uint32_t record)
{
    fkv_record_row *row = fkv_index_row(index, record);
    fkv_segment_row *segment = &index->segments[row->segment];
    if (row->live++ == 0) {
        segment->live_records++;
        segment->live_pages += row->pages;
        index->live_records++;
        index->live_pages += row->pages;
    }
    segment->live_blocks++;
    index->namespace_blocks[row->namespace_id]++;
}

static void block_gone(fkv_index *index, uint32_t record)
{
    fkv_record_row *row = fkv_index_row(index, record);
    fkv_segment_row *segment = &index->segments[row->segment];
    assert(row->live > 0 && segment->live_blocks > 0);
    segment->live_blocks--;
    index->namespace_blocks[row->namespace_id]--;
    if (--row->live > 0) return;
    segment->live_records--;
    segment->live_pages -= row->pages;
    index->live_records--;
    index->live_pages -= row->pages;
    free_row(index, record);
}

/* ---- segments and pins ---- */

int fkv_index_begin_segment(fkv_index *index, uint32_t segment, uint64_t epoch)
{
    if (segment >= SEGMENTS_MAX) return -EINVAL;
    fkv_index_lock(index);
    void *rows = index->segments;
    int status = grow(&rows, &index->segment_count, (uint64_t)segment + 1, sizeof(fkv_segment_row));
    index->segments = rows;
    if (status == 0) {
        fkv_segment_row *row = &index->segments[segment];
        if (row->live_records > 0 || row->pins > 0)
            status = -EBUSY;
        else
            row->epoch = epoch, row->begun = true;
    }
    fkv_index_unlock(index);
    return status;
}

/* ---- adding ---- */

typedef struct {
    fkv_index *index;
    uint32_t segment;
    uint64_t epoch;
    const fkv_manifest_kill *kills;
    uint64_t kill_count;
    fkv_dropped *dropped;
    uint64_t dropped_count;
} adding;

static void report(adding *add, const fkv_record_row *row, uint16_t ordinal)
{
    if (add->dropped)
        add->dropped[add->dropped_count] = (fkv_dropped){
            .segment = row->segment,
            .page = row->page,
            .epoch = add->index->segments[row->segment].epoch,
            .sequence = row->sequence,
            .ordinal = ordinal,
        };
    add->dropped_count++;
}

/* First kill that is not before (page, ordinal). */
static uint64_t first_kill(const adding *add, uint32_t page, uint16_t ordinal)
{
    uint64_t low = 0, high = add->kill_count;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        const fkv_manifest_kill *kill = &add->kills[middle];
        if (kill->page < page || (kill->page == page && kill->ordinal < ordinal))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool is_killed(const adding *add, uint32_t page, uint64_t sequence, uint16_t ordinal)
{
    if (add->kill_count == 0) return false;
    for (uint64_t i = first_kill(add, page, ordinal); i < add->kill_count; i++) {
        const fkv_manifest_kill *kill = &add->kills[i];
        if (kill->page != page || kill->ordinal != ordinal) return false;
        if (kill->segment == add->segment && kill->epoch == add->epoch
            && kill->sequence == sequence)
            return true;
    }
    return false;
}

static int add_block(adding *add, uint32_t record, const fkv_directory_block *block)
{
    fkv_index *index = add->index;
    const fkv_record_row *row = fkv_index_row(index, record);
    bool made;
    fkv_entry *entry = fkv_table_put(&index->table, block->digest, &made);
    if (!entry) return -ENOMEM;
    if (!made) {
        if (fkv_index_row(index, entry->record)->sequence > row->sequence) {
            report(add, row, block->ordinal);
            return 0;
        }
        report(add, fkv_index_row(index, entry->record), entry->ordinal);
    }
    uint32_t loser = entry->record;
    entry->record = record;
    entry->ordinal = block->ordinal;
    entry->tokens = block->tokens;
    block_came(index, record); /* first: the loser may be the same record */
    if (!made) block_gone(index, loser);
    return 0;
}

static int add_record(adding *add, const fkv_directory_record *record, uint32_t namespace_id,
                      const fkv_directory_block *blocks, const fkv_directory_block *end)
{
    if (is_killed(add, record->page, record->sequence, FKV_KILL_RECORD)) return 0;
    uint32_t number = take_row(add->index);
    *fkv_index_row(add->index, number) = (fkv_record_row){
        .sequence = record->sequence,
        .segment = add->segment,
        .page = record->page,
        .pages = record->pages,
        .tokens = record->tokens,
        .namespace_id = namespace_id,
        .header_pages = record->header_pages,
        .block_count = record->block_count,
        .group = record->group,
        .codec = record->codec,
        .fidelity = record->fidelity,
        .flags = record->flags,
    };
    int status = 0;
    for (uint32_t i = 0; i < record->block_count && status == 0; i++) {
        if (&blocks[i] + FKV_AHEAD < end)
            fkv_table_prefetch(&add->index->table, blocks[i + FKV_AHEAD].digest);
        if (!is_killed(add, record->page, record->sequence, blocks[i].ordinal))
            status = add_block(add, number, &blocks[i]);
    }
    if (fkv_index_row(add->index, number)->live == 0) free_row(add->index, number);
    return status;
}

/* Checks a batch and reserves all that it can need. */
static int prepare(fkv_index *index, uint32_t segment, const fkv_directory_record *records,
                   uint64_t record_count, uint64_t block_count, const uint32_t *namespace_ids)
{
    uint64_t blocks = 0, namespaces = 0;
    if (segment >= index->segment_count || !index->segments[segment].begun) return -EINVAL;
    for (uint64_t i = 0; i < record_count; i++) {
        uint64_t id = namespace_ids ? namespace_ids[records[i].namespace_ordinal] : 0;
        if (id >= NAMESPACES_MAX) return -EINVAL;
        if (id + 1 > namespaces) namespaces = id + 1;
        blocks += records[i].block_count;
    }
    if (blocks != block_count) return -EINVAL;
    void *counters = index->namespace_blocks;
    int status = grow(&counters, &index->namespace_count, namespaces, sizeof(uint64_t));
    index->namespace_blocks = counters;
    if (status == 0) status = reserve_rows(index, record_count);
    if (status == 0) status = fkv_table_reserve(&index->table, index->table.count + block_count);
    return status;
}

int fkv_index_add(fkv_index *index, uint32_t segment, const fkv_directory_record *records,
                  uint64_t record_count, const fkv_directory_block *blocks, uint64_t block_count,
                  const uint32_t *namespace_ids, const fkv_manifest_kill *kills,
                  uint64_t kill_count, fkv_dropped *dropped, uint64_t *dropped_count)
{
    adding add = {.index = index,
                  .segment = segment,
                  .kills = kills,
                  .kill_count = kill_count,
                  .dropped = dropped};
    const fkv_directory_block *end = block_count ? blocks + block_count : blocks;
    fkv_index_lock(index);
    int status = prepare(index, segment, records, record_count, block_count, namespace_ids);
    if (status == 0) add.epoch = index->segments[segment].epoch;
    for (uint64_t i = 0; i < record_count && status == 0; i++) {
        uint32_t id = namespace_ids ? namespace_ids[records[i].namespace_ordinal] : 0;
        status = add_record(&add, &records[i], id, blocks, end);
        blocks += records[i].block_count;
    }
    fkv_index_unlock(index);
    if (dropped_count) *dropped_count = add.dropped_count;
    return status;
}

/* ---- taking out ---- */

void fkv_index_remove(fkv_index *index, const uint8_t *digests, const uint64_t *sequences,
                      uint64_t count, fkv_dropped *dropped, uint64_t *dropped_count)
{
    adding out = {.index = index, .dropped = dropped};
    fkv_index_lock(index);
    for (uint64_t i = 0; i < count; i++) {
        if (i + FKV_AHEAD < count)
            fkv_table_prefetch(&index->table, digests + (i + FKV_AHEAD) * FKV_DIGEST_BYTES);
        fkv_entry *entry = fkv_table_find(&index->table, digests + i * FKV_DIGEST_BYTES);
        if (!entry || (sequences && fkv_index_row(index, entry->record)->sequence != sequences[i]))
            continue;
        uint32_t record = entry->record;
        report(&out, fkv_index_row(index, record), entry->ordinal);
        fkv_table_erase(&index->table, entry);
        block_gone(index, record);
    }
    fkv_index_unlock(index);
    if (dropped_count) *dropped_count = out.dropped_count;
}

static bool entry_marked(void *context, const fkv_entry *entry)
{
    fkv_index *index = context;
    uint32_t record = entry->record;
    if (!(*mark_word(index, record) & mark_bit(record))) return false;
    block_gone(index, record);
    return true;
}

/* Drops all blocks of the records that match; one pass over the rows, one over the table. */
typedef bool (*row_predicate)(const void *context, const fkv_record_row *row);
static uint64_t drop_rows(fkv_index *index, row_predicate match, const void *context)
{
    uint64_t blocks = index->table.count, marked = 0;
    for (uint32_t record = 0; record < index->rows_used; record++) {
        const fkv_record_row *row = fkv_index_row(index, record);
        if (row->live == 0 || !match(context, row)) continue;
        *mark_word(index, record) |= mark_bit(record);
        marked++;
    }
    if (marked) fkv_table_sweep(&index->table, entry_marked, index);
    return blocks - index->table.count;
}

static bool in_segment(const void *context, const fkv_record_row *row)
{
    return row->segment == *(const uint32_t *)context;
}

static bool in_namespace(const void *context, const fkv_record_row *row)
{
    return row->namespace_id == *(const uint32_t *)context;
}

typedef struct {
    const uint64_t *sequences;
    uint64_t count;
    bool sorted;
} sequence_set;

static bool in_sequences(const void *context, const fkv_record_row *row)
{
    const sequence_set *set = context;
    if (!set->sorted) {
        for (uint64_t i = 0; i < set->count; i++)
            if (set->sequences[i] == row->sequence) return true;
        return false;
    }
    uint64_t low = 0, high = set->count;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (set->sequences[middle] < row->sequence)
            low = middle + 1;
        else
            high = middle;
    }
    return low < set->count && set->sequences[low] == row->sequence;
}

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

uint64_t fkv_index_drop_segment(fkv_index *index, uint32_t segment)
{
    fkv_index_lock(index);
    uint64_t gone = 0;
    if (segment < index->segment_count && index->segments[segment].live_records > 0)
        gone = drop_rows(index, in_segment, &segment);
    fkv_index_unlock(index);
    return gone;
}

uint64_t fkv_index_drop_sequences(fkv_index *index, const uint64_t *sequences, uint64_t count)
{
    sequence_set set = {.sequences = sequences, .count = count};
    uint64_t *copy = count > 8 ? fkv_malloc(count * sizeof *copy) : NULL;
    if (copy) { /* without memory for it, the linear search is right as well */
        memcpy(copy, sequences, count * sizeof *copy);
        qsort(copy, count, sizeof *copy, by_value);
        set.sequences = copy;
        set.sorted = true;
    }
    fkv_index_lock(index);
    uint64_t gone = count ? drop_rows(index, in_sequences, &set) : 0;
    fkv_index_unlock(index);
    fkv_free(copy);
    return gone;
}

uint64_t fkv_index_drop_namespace(fkv_index *index, uint32_t namespace_id)
{
    fkv_index_lock(index);
    uint64_t gone = 0;
    if (namespace_id < index->namespace_count && index->namespace_blocks[namespace_id] > 0)
        gone = drop_rows(index, in_namespace, &namespace_id);
    fkv_index_unlock(index);
    return gone;
}
