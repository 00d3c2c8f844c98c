/* index_lookup.c: keys -> digests -> places, and what is alive where.
 *
 * Invariants: those of index_state.h; nothing here changes rows or entries, only pins and visits.
 */
#include "index_state.h"
#include "sha256.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#define HASH_BATCH 128 /* digests on the stack */

static void one_digest(const fkv_keyspace *space, const uint8_t *key, uint64_t length,
                       uint8_t *digest)
{
    uint8_t whole[32];
    fkv_sha256_2(space->prefix, sizeof space->prefix, key, length, whole);
    memcpy(digest, whole, FKV_DIGEST_BYTES);
    if (space->digest_bytes < FKV_DIGEST_BYTES)
        memset(digest + space->digest_bytes, 0, FKV_DIGEST_BYTES - space->digest_bytes);
}

void fkv_key_digests(const fkv_keyspace *space, const uint8_t *keys, const uint64_t *ends,
                     uint64_t count, uint8_t *digests)
{
    uint64_t begin = 0;
    for (uint64_t i = 0; i < count; i++) {
        one_digest(space, keys + begin, ends[i] - begin, digests + i * FKV_DIGEST_BYTES);
        begin = ends[i];
    }
}

void fkv_index_lookup(fkv_index *index, const uint8_t *digests, uint64_t count, int pin,
                      fkv_place *places)
{
    fkv_index_lock(index);
    for (uint64_t i = 0; i < count; i++) {
        if (i + FKV_AHEAD < count)
            fkv_table_prefetch(&index->table, digests + (i + FKV_AHEAD) * FKV_DIGEST_BYTES);
        const fkv_entry *entry = fkv_table_find(&index->table, digests + i * FKV_DIGEST_BYTES);
        places[i] = (fkv_place){.record = FKV_NONE, .segment = FKV_NONE};
        if (!entry) continue;
        const fkv_record_row *row = fkv_index_row(index, entry->record);
        places[i] = (fkv_place){
            .sequence = row->sequence,
            .record = entry->record,
            .segment = row->segment,
            .page = row->page,
            .pages = row->pages,
            .record_tokens = row->tokens,
            .header_pages = row->header_pages,
            .record_blocks = row->block_count,
            .ordinal = entry->ordinal,
            .tokens = entry->tokens,
            .group = row->group,
            .codec = row->codec,
            .fidelity = row->fidelity,
            .flags = row->flags,
        };
        if (pin) index->segments[row->segment].pins++;
    }
    fkv_index_unlock(index);
}

void fkv_index_contains(fkv_index *index, const fkv_keyspace *space, const uint8_t *keys,
                        const uint64_t *ends, uint64_t count, uint8_t *found)
{
    uint8_t digests[HASH_BATCH][FKV_DIGEST_BYTES];
    uint64_t begin = 0;
    for (uint64_t done = 0; done < count; done += HASH_BATCH) {
        uint64_t part = count - done < HASH_BATCH ? count - done : HASH_BATCH;
        for (uint64_t i = 0; i < part; i++) {
            one_digest(space, keys + begin, ends[done + i] - begin, digests[i]);
            begin = ends[done + i];
        }
        fkv_index_lock(index);
        for (uint64_t i = 0; i < part; i++) fkv_table_prefetch(&index->table, digests[i]);
        for (uint64_t i = 0; i < part; i++)
            found[done + i] = fkv_table_find(&index->table, digests[i]) != NULL;
        fkv_index_unlock(index);
    }
}

int fkv_index_contains_one(fkv_index *index, const fkv_keyspace *space, const uint8_t *key,
                           uint64_t length)
{
    uint8_t digest[FKV_DIGEST_BYTES];
    if (length == 0 || length > FKV_KEY_BYTES_MAX) return -EINVAL;
    one_digest(space, key, length, digest);
    fkv_index_lock(index);
    int found = fkv_table_find(&index->table, digest) != NULL;
    fkv_index_unlock(index);
    return found;
}

/* Lists and pins a segment unless this match did so before. */
static void match_pin(fkv_index *index, uint32_t segment, uint32_t *segments,
                      uint64_t *segment_count)
{
    fkv_segment_row *row = &index->segments[segment];
    if (row->visit == index->visit) return;
    row->visit = index->visit;
    row->pins++;
    segments[(*segment_count)++] = segment;
}

uint64_t fkv_index_match(fkv_index *index, const fkv_keyspace *space, const uint8_t *keys,
                         const uint64_t *ends, uint64_t count, int pin, uint32_t *segments,
                         uint64_t *segment_count)
{
    uint8_t digest[FKV_DIGEST_BYTES];
    uint64_t begin = 0, matched = 0, pinned = 0;
    fkv_index_lock(index);
    if (++index->visit == 0) { /* numbers of visits wrapped: forget the old ones */
        for (uint32_t i = 0; i < index->segment_count; i++) index->segments[i].visit = 0;
        index->visit = 1;
    }
    for (; matched < count; matched++) {
        one_digest(space, keys + begin, ends[matched] - begin, digest);
        begin = ends[matched];
        const fkv_entry *entry = fkv_table_find(&index->table, digest);
        if (!entry) break;
        if (pin) match_pin(index, fkv_index_row(index, entry->record)->segment, segments, &pinned);
    }
    fkv_index_unlock(index);
    if (segment_count) *segment_count = pinned;
    return matched;
}

/* ---- pins and totals ---- */

void fkv_index_unpin(fkv_index *index, const uint32_t *segments, uint64_t count)
{
    fkv_index_lock(index);
    for (uint64_t i = 0; i < count; i++) {
        if (segments[i] == FKV_NONE) continue;
        assert(segments[i] < index->segment_count && index->segments[segments[i]].pins > 0);
        index->segments[segments[i]].pins--;
    }
    fkv_index_unlock(index);
}

void fkv_index_usage(fkv_index *index, const uint32_t *segments, uint64_t count,
                     fkv_segment_usage *usage)
{
    fkv_index_lock(index);
    for (uint64_t i = 0; i < count; i++) {
        usage[i] = (fkv_segment_usage){0};
        if (segments[i] >= index->segment_count) continue;
        const fkv_segment_row *row = &index->segments[segments[i]];
        usage[i].epoch = row->epoch;
        usage[i].live_pages = row->live_pages;
        usage[i].live_blocks = row->live_blocks;
        usage[i].live_records = row->live_records;
        usage[i].pins = row->pins;
    }
    fkv_index_unlock(index);
}

void fkv_index_totals_get(fkv_index *index, fkv_index_totals *totals)
{
    fkv_index_lock(index);
    totals->blocks = index->table.count;
    totals->records = index->live_records;
    totals->live_pages = index->live_pages;
    totals->memory_bytes = sizeof *index + fkv_table_bytes(&index->table)
                           + (uint64_t)index->block_count * sizeof(fkv_row_block)
                           + index->block_room * sizeof *index->blocks
                           + index->segment_count * sizeof *index->segments
                           + index->namespace_count * sizeof *index->namespace_blocks;
    fkv_index_unlock(index);
}

uint64_t fkv_index_namespace_blocks(fkv_index *index, uint32_t namespace_id)
{
    fkv_index_lock(index);
    uint64_t blocks = 0;
    if (namespace_id < index->namespace_count) blocks = index->namespace_blocks[namespace_id];
    fkv_index_unlock(index);
    return blocks;
}
