/* header_cache.c: a bounded cache of decoded record headers.
 *
 * Invariants
 *  - what it costs stays within its limit, but for the one header that is being added;
 *  - it holds only headers that were checked in their place; the sequence tells an old tenant of
 * the place from a new one, and a segment's headers are dropped before its space is used again.
 */
#include "allocate.h"
#include "header_cache.h"

typedef struct entry {
    struct entry *chain;
    struct entry *newer, *older;
    fkv_header *header;
    uint32_t segment, page;
} entry;

struct fkv_header_cache {
    pthread_mutex_t lock;
    entry **buckets;
    uint32_t bucket_count, count;
    entry *newest, *oldest;
    uint64_t bytes, limit_bytes, hits, misses;
};

fkv_header_cache *fkv_header_cache_new(uint64_t bytes)
{
    fkv_header_cache *cache = fkv_calloc(1, sizeof *cache);
    if (!cache) return NULL;
    cache->bucket_count = 1024;
    while (cache->bucket_count < bytes / 4096 && cache->bucket_count < (1u << 20))
        cache->bucket_count *= 2;
    cache->buckets = fkv_calloc(cache->bucket_count, sizeof *cache->buckets);
    cache->limit_bytes = bytes;
    pthread_mutex_init(&cache->lock, NULL);
    if (cache->buckets) return cache;
    fkv_free(cache);
    return NULL;
}

static entry **slot_of(fkv_header_cache *cache, uint32_t segment, uint32_t page)
{
    uint64_t hash = ((uint64_t)segment << 32 | page) * 0x9E3779B97F4A7C15u;
    entry **slot = &cache->buckets[hash >> 32 & (cache->bucket_count - 1)];
    while (*slot && ((*slot)->segment != segment || (*slot)->page != page)) slot = &(*slot)->chain;
    return slot;
}

static void list_take(fkv_header_cache *cache, entry *e)
{
    if (e->newer)
        e->newer->older = e->older;
    else
        cache->newest = e->older;
    if (e->older)
        e->older->newer = e->newer;
    else
        cache->oldest = e->newer;
}

static void list_push(fkv_header_cache *cache, entry *e)
{
    e->newer = NULL, e->older = cache->newest;
    if (cache->newest)
        cache->newest->newer = e;
    else
        cache->oldest = e;
    cache->newest = e;
}

static void forget(fkv_header_cache *cache, entry **slot)
{
    entry *e = *slot;
    *slot = e->chain;
    list_take(cache, e);
    cache->bytes -= e->header->bytes_total + sizeof *e;
    cache->count--;
    fkv_header_release(e->header);
    fkv_free(e);
}

fkv_header *fkv_header_cache_get(fkv_header_cache *cache, uint32_t segment, uint32_t page,
                                 uint64_t sequence)
{
    fkv_header *header = NULL;
    pthread_mutex_lock(&cache->lock);
    entry *e = *slot_of(cache, segment, page);
    if (e && e->header->fixed.sequence == sequence) {
        list_take(cache, e), list_push(cache, e);
        header = e->header;
        fkv_header_retain(header);
        cache->hits++;
    } else {
        cache->misses++;
    }
    pthread_mutex_unlock(&cache->lock);
    return header;
}

void fkv_header_cache_put(fkv_header_cache *cache, uint32_t segment, uint32_t page,
                          fkv_header *header)
{
    entry *e = fkv_malloc(sizeof *e);
    if (!e) return;
    pthread_mutex_lock(&cache->lock);
    entry **slot = slot_of(cache, segment, page);
    if (*slot) forget(cache, slot);
    fkv_header_retain(header);
    *e = (entry){.chain = NULL, .header = header, .segment = segment, .page = page};
    *slot_of(cache, segment, page) = e;
    list_push(cache, e);
    cache->bytes += header->bytes_total + sizeof *e;
    cache->count++;
    while (cache->bytes > cache->limit_bytes)
        forget(cache, slot_of(cache, cache->oldest->segment, cache->oldest->page));
    pthread_mutex_unlock(&cache->lock);
}

void fkv_header_cache_drop(fkv_engine *engine, uint32_t segment)
{
    fkv_header_cache *cache = engine->headers;
    pthread_mutex_lock(&cache->lock);
    for (entry *e = cache->newest, *older; e; e = older) {
        older = e->older;
        if (e->segment == segment) forget(cache, slot_of(cache, e->segment, e->page));
    }
    pthread_mutex_unlock(&cache->lock);
}

void fkv_header_cache_counters(fkv_header_cache *cache, fkv_engine_counters *counters)
{
    pthread_mutex_lock(&cache->lock);
    counters->header_hits = cache->hits;
    counters->header_misses = cache->misses;
    counters->header_cache_bytes = cache->bytes;
    pthread_mutex_unlock(&cache->lock);
}

void fkv_header_cache_free(fkv_header_cache *cache)
{
    if (!cache) return;
    while (cache->oldest)
        forget(cache, slot_of(cache, cache->oldest->segment, cache->oldest->page));
    pthread_mutex_destroy(&cache->lock);
    fkv_free(cache->buckets);
    fkv_free(cache);
}
