/* index_table.c: see index_table.h for the invariants. */
#include "allocate.h"
#include "index_table.h"

#include <errno.h>
#include <string.h>

/* Percent. Load 0.85 keeps a search at about four slots; growing by 1.3 wastes little. */
#define LOAD 85
#define GROWTH 130
#define RANGE_MIN 64
#define SPARE_MIN 64

static bool is_empty(const fkv_entry *entry) { return entry->record == FKV_NONE; }

void fkv_table_free(fkv_table *table)
{
    fkv_free(table->slots);
    *table = (fkv_table){0};
}

uint64_t fkv_table_bytes(const fkv_table *table) { return table->room * sizeof(fkv_entry); }

/* Copies all entries into a table of this range; false where the spare slots do not suffice. */
static bool refill(const fkv_table *from, fkv_table *into)
{
    uint64_t next = 0;
    for (uint64_t i = 0; i < from->room; i++) {
        const fkv_entry *entry = &from->slots[i];
        if (is_empty(entry)) continue;
        uint64_t place = fkv_table_home(into, entry->hi);
        if (place < next) place = next;
        if (place + 1 >= into->room) return false;
        into->slots[place] = *entry;
        next = place + 1;
    }
    into->count = from->count;
    return true;
}

static int rebuild(fkv_table *table, uint64_t range, uint64_t spare)
{
    for (;; spare *= 2) {
        fkv_table fresh = {.range = range, .room = range + spare};
        if (fresh.room > SIZE_MAX / sizeof(fkv_entry)) return -ENOMEM;
        fresh.slots = fkv_malloc(fresh.room * sizeof(fkv_entry));
        if (!fresh.slots) return -ENOMEM;
        memset(fresh.slots, 0xFF, fresh.room * sizeof(fkv_entry));
        if (refill(table, &fresh)) {
            fkv_free(table->slots);
            *table = fresh;
            return 0;
        }
        fkv_free(fresh.slots); /* many digests share the highest homes */
    }
}

int fkv_table_reserve(fkv_table *table, uint64_t count)
{
    if (count > UINT32_MAX) return -ENOMEM;
    if (count * 100 <= table->range * LOAD) return 0;
    uint64_t range = table->range * GROWTH / 100;
    if (range < count * 100 / LOAD + 1) range = count * 100 / LOAD + 1;
    if (range < RANGE_MIN) range = RANGE_MIN;
    return rebuild(table, range, SPARE_MIN);
}

/* First slot from the digest's home on that is empty or holds no smaller digest. */
static fkv_entry *lower_bound(const fkv_table *table, uint64_t hi, uint64_t lo)
{
    fkv_entry *entry = &table->slots[fkv_table_home(table, hi)];
    while (entry->hi < hi) entry++;
    while (entry->hi == hi && !is_empty(entry) && entry->lo < lo) entry++;
    return entry;
}

fkv_entry *fkv_table_find(const fkv_table *table, const uint8_t *digest)
{
    if (table->count == 0) return NULL;
    uint64_t hi = fkv_big_endian(digest), lo = fkv_big_endian(digest + 8);
    fkv_entry *entry = lower_bound(table, hi, lo);
    return entry->hi == hi && entry->lo == lo && !is_empty(entry) ? entry : NULL;
}

fkv_entry *fkv_table_put(fkv_table *table, const uint8_t *digest, bool *made)
{
    uint64_t hi = fkv_big_endian(digest), lo = fkv_big_endian(digest + 8);
    fkv_entry *entry = lower_bound(table, hi, lo);
    *made = false;
    if (entry->hi == hi && entry->lo == lo && !is_empty(entry)) return entry;
    fkv_entry *gap = entry;
    while (!is_empty(gap)) gap++;
    if (gap == &table->slots[table->room - 1]) {
        if (rebuild(table, table->range, (table->room - table->range) * 2) != 0) return NULL;
        return fkv_table_put(table, digest, made);
    }
    memmove(entry + 1, entry, (size_t)(gap - entry) * sizeof *entry);
    *entry = (fkv_entry){.hi = hi, .lo = lo, .record = 0};
    *made = true;
    table->count++;
    return entry;
}

void fkv_table_erase(fkv_table *table, fkv_entry *entry)
{
    fkv_entry *end = entry + 1; /* entries that may move one slot towards their home */
    while (!is_empty(end) && (uint64_t)(end - table->slots) > fkv_table_home(table, end->hi)) end++;
    memmove(entry, entry + 1, (size_t)(end - entry - 1) * sizeof *entry);
    memset(end - 1, 0xFF, sizeof *entry);
    table->count--;
}

void fkv_table_sweep(fkv_table *table, fkv_table_predicate gone, void *context)
{
    uint64_t next = 0;
    for (uint64_t i = 0; i < table->room; i++) {
        fkv_entry entry = table->slots[i];
        if (is_empty(&entry)) continue;
        memset(&table->slots[i], 0xFF, sizeof entry);
        if (gone(context, &entry)) {
            table->count--;
            continue;
        }
        uint64_t place = fkv_table_home(table, entry.hi);
        if (place < next) place = next;
        table->slots[place] = entry; /* place <= i: entries before it only went */
        next = place + 1;
    }
}
