/* pool.c: bounce buffers of two sizes, cut from one arena at start.
 *
 * Invariants
 *  - memory is bounded by the arena: who finds no free buffer waits in the queue of that class,
 *    first come, first served, realtime before background;
 *  - a reserve of each class is for realtime alone; while realtime waits for a class, no buffer of
 *    it is free, while background does, no more than the reserve;
 *  - ready() is called without the lock.
 */
#include "allocate.h"
#include "io.h"
#include <assert.h>
#include <sys/mman.h>

#define CLASSES 2     /* small, large */
#define SMALL_SHARE 8 /* one eighth of the arena is small buffers */
#define SMALL_MIN 8
#define LARGE_MIN 2
#define RESERVE_SHARE 4 /* a quarter of each class, at least one */

typedef struct {
    uint8_t *base;
    uint64_t size;
    uint32_t count;
    uint32_t free_count;
    uint32_t reserve;
    uint32_t *free; /* a stack: the buffer given back last is the warmest */
    struct {
        fkv_pool_waiter *head, *tail;
    } waiting[2]; /* realtime, background */
} pool_class;

struct fkv_pool {
    pthread_mutex_t lock;
    uint8_t *base;
    uint64_t length;
    uint64_t bytes_in_use;
    uint64_t waits;
    pool_class classes[CLASSES];
};

static int class_init(pool_class *class, uint8_t *base, uint64_t size, uint32_t count)
{
    class->base = base;
    class->size = size;
    class->count = count;
    class->reserve = count / RESERVE_SHARE > 0 ? count / RESERVE_SHARE : 1;
    class->free = fkv_malloc(count * sizeof *class->free);
    if (class->free == NULL) return -1;
    for (class->free_count = 0; class->free_count < count; class->free_count++)
        class->free[class->free_count] = count - 1 - class->free_count;
    return 0;
}

fkv_pool *fkv_pool_new(uint64_t bytes)
{
    uint64_t small = bytes / SMALL_SHARE / FKV_POOL_SMALL;
    uint64_t large = (bytes - bytes / SMALL_SHARE) / FKV_POOL_LARGE;
    if (small < SMALL_MIN) small = SMALL_MIN;
    if (large < LARGE_MIN) large = LARGE_MIN;
    if (small > UINT32_MAX || large > UINT32_MAX) return NULL;

    fkv_pool *pool = fkv_calloc(1, sizeof *pool);
    if (pool == NULL) return NULL;
    pthread_mutex_init(&pool->lock, NULL);
    pool->length = small * FKV_POOL_SMALL + large * FKV_POOL_LARGE;
    pool->base = fkv_buffer_alloc(pool->length);
    if (pool->base == NULL
        || class_init(&pool->classes[0], pool->base, FKV_POOL_SMALL, (uint32_t)small) != 0
        || class_init(&pool->classes[1], pool->base + small * FKV_POOL_SMALL, FKV_POOL_LARGE,
                      (uint32_t)large)
               != 0) {
        fkv_pool_free(pool);
        return NULL;
    }
    /* A forked child never reads these; else fork would copy what the kernel has pinned. */
    madvise(pool->base, pool->length, MADV_DONTFORK);
    return pool;
}

void fkv_pool_free(fkv_pool *pool)
{
    if (pool == NULL) return;
    assert(pool->bytes_in_use == 0);
    for (int i = 0; i < CLASSES; i++) {
        assert(pool->classes[i].waiting[0].head == NULL
               && pool->classes[i].waiting[1].head == NULL);
        fkv_free(pool->classes[i].free);
    }
    fkv_buffer_free(pool->base, pool->length);
    pthread_mutex_destroy(&pool->lock);
    fkv_free(pool);
}

void fkv_pool_take(fkv_pool *pool, uint64_t bytes, fkv_pool_waiter *waiter)
{
    assert(bytes <= FKV_POOL_LARGE);
    pool_class *class = &pool->classes[bytes <= FKV_POOL_SMALL ? 0 : 1];
    uint8_t *buffer = NULL;

    pthread_mutex_lock(&pool->lock);
    if (class->free_count > (waiter->background ? class->reserve : 0)) {
        buffer = class->base + class->free[--class->free_count] * class->size;
        pool->bytes_in_use += class->size;
    } else {
        int kind = waiter->background;
        waiter->next = NULL;
        if (class->waiting[kind].head == NULL)
            class->waiting[kind].head = waiter;
        else
            class->waiting[kind].tail->next = waiter;
        class->waiting[kind].tail = waiter;
        pool->waits++;
    }
    pthread_mutex_unlock(&pool->lock);
    if (buffer != NULL) waiter->ready(waiter, buffer);
}

void fkv_pool_give(fkv_pool *pool, uint8_t *buffer)
{
    pool_class *class = &pool->classes[buffer < pool->classes[1].base ? 0 : 1];
    uint64_t index = (uint64_t)(buffer - class->base) / class->size;
    assert(index < class->count && buffer == class->base + index * class->size);

    pthread_mutex_lock(&pool->lock);
    int kind = class->waiting[0].head == NULL && class->free_count >= class->reserve;
    fkv_pool_waiter *waiter = class->waiting[kind].head;
    if (waiter != NULL) {
        class->waiting[kind].head = waiter->next;
    } else {
        assert(class->free_count < class->count);
        class->free[class->free_count++] = (uint32_t)index;
        pool->bytes_in_use -= class->size;
    }
    pthread_mutex_unlock(&pool->lock);
    if (waiter != NULL) waiter->ready(waiter, buffer);
}

static uint64_t read_locked(fkv_pool *pool, const uint64_t *value)
{
    pthread_mutex_lock(&pool->lock);
    uint64_t copy = *value;
    pthread_mutex_unlock(&pool->lock);
    return copy;
}

uint64_t fkv_pool_in_use(fkv_pool *pool) { return read_locked(pool, &pool->bytes_in_use); }

uint64_t fkv_pool_waits(fkv_pool *pool) { return read_locked(pool, &pool->waits); }

void fkv_pool_memory(fkv_pool *pool, void **base, uint64_t *length)
{
    *base = pool->base;
    *length = pool->length;
}
