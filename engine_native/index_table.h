/* index_table.h: the hash table of the index: 16-byte digests -> record, ordinal, tokens. Internal.
 *
 * Invariants
 *  - open addressing with linear probing, in ascending order of digests: an entry's home grows with
 *    its digest (home = digest * range / 2^64), so the table is a sorted array with gaps. A search
 *    stops at the first greater digest; growing and sweeping are single sequential passes;
 *  - every slot from an entry's home to the entry is in use;
 *  - slots do not wrap: some spare ones follow the range, the last slot of all is always empty;
 *  - at most LOAD of the range is in use.
 */
#ifndef FLASHKV_INDEX_TABLE_H
#define FLASHKV_INDEX_TABLE_H
#include "flashkv_native.h"
#include <stdbool.h>

typedef struct {
    uint64_t hi, lo; /* the digest, big-endian; of an empty slot all bits are set */
    uint32_t record;
    uint16_t ordinal;
    uint16_t tokens;
} fkv_entry;
_Static_assert(sizeof(fkv_entry) == 24, "the index's budget is 24 bytes an entry");

typedef struct {
    fkv_entry *slots;
    uint64_t range; /* homes */
    uint64_t room;  /* slots: range and spare */
    uint64_t count;
} fkv_table;

static inline uint64_t fkv_big_endian(const uint8_t *bytes)
{
    uint64_t value;
    __builtin_memcpy(&value, bytes, sizeof value);
    return __builtin_bswap64(value);
}

static inline uint64_t fkv_table_home(const fkv_table *table, uint64_t hi)
{
    return (uint64_t)(((unsigned __int128)hi * table->range) >> 64);
}

static inline void fkv_table_prefetch(const fkv_table *table, const uint8_t *digest)
{
    if (table->range)
        __builtin_prefetch(&table->slots[fkv_table_home(table, fkv_big_endian(digest))]);
}

void fkv_table_free(fkv_table *table);
uint64_t fkv_table_bytes(const fkv_table *table);
/* Makes room for `count` entries in all: 0 or -ENOMEM, with the table unchanged. */
int fkv_table_reserve(fkv_table *table, uint64_t count);
/* The entry of a digest, or NULL. */
fkv_entry *fkv_table_find(const fkv_table *table, const uint8_t *digest);
/* The entry of a digest, made if absent (*made; record, ordinal, tokens are the caller's to fill).
 * Room must have been reserved. NULL only where spare slots ran out and so did memory. */
fkv_entry *fkv_table_put(fkv_table *table, const uint8_t *digest, bool *made);
void fkv_table_erase(fkv_table *table, fkv_entry *entry);
/* Erases every entry for which `gone` says so. */
typedef bool (*fkv_table_predicate)(void *context, const fkv_entry *entry);
void fkv_table_sweep(fkv_table *table, fkv_table_predicate gone, void *context);
#endif
