/* header_cache.h: decoded record headers by (segment, page), least recently used go first.
 *
 * Invariants
 *  - a header is found only under the sequence that it was put with: a place whose space was used
 *    again misses;
 *  - a header lives until its last reference goes, whether or not the cache still has it. */
#ifndef FLASHKV_HEADER_CACHE_H
#define FLASHKV_HEADER_CACHE_H
#include "io.h"
#include "record.h"

typedef struct fkv_header_cache fkv_header_cache;
/* The header of this record, with a reference for the caller, or NULL. */
fkv_header *fkv_header_cache_get(fkv_header_cache *cache, uint32_t segment, uint32_t page,
                                 uint64_t sequence);
/* Takes a reference of its own; replaces what it had for the place. */
void fkv_header_cache_put(fkv_header_cache *cache, uint32_t segment, uint32_t page,
                          fkv_header *header);
#endif
