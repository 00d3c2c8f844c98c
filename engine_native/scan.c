/* scan.c: finds the records that a segment really holds, without its directory.
 *
 * Invariants
 *  - a record is reported only if its header is right for this segment, epoch and page; with
 *    FKV_SCAN_VERIFY_PAGES also only if every page of it is;
 *  - after anything that is no such record the scan goes on at the next page: damage in the middle
 *    hides nothing behind it;
 *  - what begins as a header and is none is counted as damaged, but for those of earlier epochs;
 *  - the time is that of some passes over what is scanned, whatever lies there: pages that say that
 *    headers of many pages begin there would each be read with all behind them, once an epoch. So
 *    bytes that are checked in vain have a budget. Where it is spent, by far more than a torn or old
 *    tail takes, headers of many pages are damaged unseen, and none is looked at as an old one.
 */
#include "allocate.h"
#include "io.h"
#include "record.h"
#include "sha256.h"
#include <errno.h>
#include <string.h>

#define WINDOW_PAGES 1024u /* 4 MiB a read at most */
#define STALE_EPOCHS 256u  /* earlier epochs that are tried: nearly always it is the last one */
#define IN_VAIN_PASSES 64u /* the budget: so many times the bytes that are scanned */
#define ALWAYS_PAGES 16u   /* headers of so many pages are checked all the same */

typedef struct {
    void *data;
    uint64_t count, room;
} list;

struct fkv_scan {
    fkv_engine *engine;
    int32_t fd;
    const uint8_t *segment_uuid;
    uint64_t epoch;
    uint32_t end_page, flags;
    uint8_t *window;
    uint32_t window_page, window_pages;
    list records, blocks, namespaces;
    uint64_t damaged, unreadable;
    uint32_t last_page;
    uint64_t in_vain;     /* bytes that may still be checked in vain */
    uint64_t stale_epoch; /* of the last old header */
    bool out_of_memory;
    int32_t failed; /* a read for no fault of the device's */
};

static void *list_add(fkv_scan *scan, list *l, size_t size)
{
    if (l->count == l->room) {
        uint64_t room = l->room ? l->room * 2 : 256;
        void *data = fkv_realloc(l->data, room * size);
        if (!data) {
            scan->out_of_memory = true;
            return NULL;
        }
        l->data = data, l->room = room;
    }
    return memset((uint8_t *)l->data + l->count++ * size, 0, size);
}

static void window_load(fkv_scan *scan, uint32_t page)
{
    uint32_t pages = scan->end_page - page < WINDOW_PAGES ? scan->end_page - page : WINDOW_PAGES;
    uint64_t bytes = (uint64_t)pages * FKV_PAGE_BYTES, offset = (uint64_t)page * FKV_PAGE_BYTES;
    scan->window_page = page, scan->window_pages = pages;
    if (fkv_pread(scan->engine, scan->fd, scan->window, bytes, offset) == 0) return;
    for (uint32_t i = 0; i < pages; i++) {
        uint8_t *at = scan->window + (uint64_t)i * FKV_PAGE_BYTES;
        int status = fkv_pread(scan->engine, scan->fd, at, FKV_PAGE_BYTES,
                               offset + (uint64_t)i * FKV_PAGE_BYTES);
        if (status == 0) continue;
        if (status == -ENOMEM || status == -EAGAIN || status == -EINTR) scan->failed = status;
        memset(at, 0, FKV_PAGE_BYTES);
        scan->unreadable++;
    }
}

static const uint8_t *page_of(fkv_scan *scan, uint32_t page)
{
    if (page < scan->window_page || page >= scan->window_page + scan->window_pages)
        window_load(scan, page);
    return scan->window + (uint64_t)(page - scan->window_page) * FKV_PAGE_BYTES;
}

/* Whether there was as much left of the budget. */
static bool spend(fkv_scan *scan, uint64_t bytes)
{
    bool enough = bytes <= scan->in_vain;
    scan->in_vain -= enough ? bytes : scan->in_vain;
    return enough;
}

/* Whether a header is right for an earlier epoch: what lies behind the tail of a segment whose space
 * was used again is no damage. */
static bool stale(fkv_scan *scan, const uint8_t *bytes, uint64_t length, uint32_t page)
{
    uint32_t stored;
    memcpy(&stored, bytes + 4, 4);
    uint64_t first = scan->epoch > STALE_EPOCHS ? scan->epoch - STALE_EPOCHS : 1;
    uint64_t last = scan->stale_epoch; /* a tail was written in one go */
    if (last && fkv_header_crc(bytes, length, scan->segment_uuid, last, page) == stored)
        return true;
    for (uint64_t epoch = scan->epoch; epoch-- > first && spend(scan, length);)
        if (fkv_header_crc(bytes, length, scan->segment_uuid, epoch, page) == stored) {
            scan->stale_epoch = epoch;
            return true;
        }
    return false;
}

static fkv_header *header_at(fkv_scan *scan, uint32_t page)
{
    const uint8_t *first = page_of(scan, page);
    uint32_t pages = fkv_header_peek(first);
    if (!pages) {
        scan->damaged += !memcmp(first, "FKVR", 4); /* begins as a header, and can't be one */
        return NULL;
    }
    fkv_header *h = NULL;
    bool old = false;
    if (pages <= scan->end_page - page && (scan->in_vain || pages <= ALWAYS_PAGES)) {
        uint8_t *bytes = fkv_malloc((uint64_t)pages * FKV_PAGE_BYTES);
        if (!bytes) {
            scan->out_of_memory = true;
            return NULL;
        }
        for (uint32_t i = 0; i < pages; i++)
            memcpy(bytes + (uint64_t)i * FKV_PAGE_BYTES, page_of(scan, page + i), FKV_PAGE_BYTES);
        int status;
        h = fkv_header_parse(bytes, (uint64_t)pages * FKV_PAGE_BYTES, scan->segment_uuid,
                             scan->epoch, page, &status);
        old = !h && spend(scan, (uint64_t)pages * FKV_PAGE_BYTES)
              && stale(scan, bytes, (uint64_t)pages * FKV_PAGE_BYTES, page);
        fkv_free(bytes);
        if (status == FKV_NO_MEMORY) scan->out_of_memory = true;
    }
    if (!h && !old) scan->damaged++;
    return h;
}

static bool pages_good(fkv_scan *scan, const fkv_header *h, uint32_t page)
{
    if (h->fixed.pages > scan->end_page - page) return false;
    for (uint32_t i = 0; i < h->payload_pages; i++)
        if (fkv_page_crc(h->fixed.sequence, i, page_of(scan, page + h->fixed.header_pages + i))
            != h->page_crcs[i])
            return false;
    return true;
}

static uint16_t namespace_row(fkv_scan *scan, const uint8_t *digest)
{
    const uint8_t *known = scan->namespaces.data;
    for (uint64_t i = 0; i < scan->namespaces.count; i++)
        if (!memcmp(known + i * FKV_NAMESPACE_BYTES, digest, FKV_NAMESPACE_BYTES))
            return (uint16_t)i;
    uint8_t *row = list_add(scan, &scan->namespaces, FKV_NAMESPACE_BYTES);
    if (row) memcpy(row, digest, FKV_NAMESPACE_BYTES);
    return (uint16_t)(scan->namespaces.count - 1);
}

static void blocks_add(fkv_scan *scan, const fkv_header *h)
{
    uint8_t prefix[FKV_NAMESPACE_BYTES + FKV_SHARD_BYTES], digest[32];
    memcpy(prefix, h->fixed.namespace_digest, FKV_NAMESPACE_BYTES);
    memcpy(prefix + FKV_NAMESPACE_BYTES, h->fixed.shard, FKV_SHARD_BYTES);
    for (uint32_t i = 0; i < h->fixed.block_count; i++) {
        fkv_directory_block *b = list_add(scan, &scan->blocks, sizeof *b);
        if (!b) return;
        fkv_sha256_2(prefix, sizeof prefix, h->bytes + h->key_offsets[i], h->blocks[i].key_bytes,
                     digest);
        memcpy(b->digest, digest, FKV_DIGEST_BYTES);
        b->tokens = h->blocks[i].tokens;
        b->ordinal = (uint16_t)i;
    }
}

/* Reports the record at `page`; returns the pages to go on by. */
static uint32_t record_at(fkv_scan *scan, uint32_t page)
{
    fkv_header *h = header_at(scan, page);
    if (!h) return 1;
    bool good = pages_good(scan, h, page);
    uint32_t step = h->fixed.pages;
    if (!good) scan->damaged++;
    if (!good && (scan->flags & FKV_SCAN_VERIFY_PAGES)) {
        fkv_header_release(h);
        return 1;
    }
    const fkv_record_header *f = &h->fixed;
    uint64_t first_block = scan->blocks.count;
    fkv_scan_record *r = list_add(scan, &scan->records, sizeof *r);
    if (r) {
        r->row =
            (fkv_directory_record){.sequence = f->sequence,
                                   .page = page,
                                   .pages = f->pages,
                                   .header_pages = f->header_pages,
                                   .block_count = f->block_count,
                                   .tokens = f->tokens,
                                   .namespace_ordinal = namespace_row(scan, f->namespace_digest),
                                   .group = f->group,
                                   .codec = f->codec,
                                   .fidelity = f->fidelity,
                                   .flags = f->flags};
        r->kind = f->kind;
        r->bad_pages = !good;
        r->first_block = (uint32_t)first_block;
        if (f->kind == FKV_KIND_DATA) blocks_add(scan, h);
        scan->last_page = page + step < scan->end_page ? page + step : scan->end_page;
    }
    fkv_header_release(h);
    return good ? step : 1;
}

fkv_scan *fkv_scan_segment(fkv_engine *engine, int32_t fd, const uint8_t *segment_uuid,
                           uint64_t epoch, uint32_t first_page, uint32_t end_page, uint32_t flags,
                           int32_t *status)
{
    fkv_scan *scan = fkv_calloc(1, sizeof *scan);
    *status = -ENOMEM;
    if (!scan) return NULL;
    *scan = (fkv_scan){.engine = engine,
                       .fd = fd,
                       .segment_uuid = segment_uuid,
                       .epoch = epoch,
                       .end_page = end_page,
                       .flags = flags,
                       .last_page = first_page};
    uint64_t pages = end_page > first_page ? end_page - first_page : 1;
    uint64_t window = (pages < WINDOW_PAGES ? pages : WINDOW_PAGES) * FKV_PAGE_BYTES;
    scan->in_vain = pages * FKV_PAGE_BYTES * IN_VAIN_PASSES;
    scan->window = fkv_buffer_alloc(window);
    bool good = scan->window != NULL;
    for (uint64_t page = first_page; good && page < end_page;) {
        page += record_at(scan, (uint32_t)page);
        good = !scan->out_of_memory && !scan->failed;
    }
    if (scan->failed) *status = scan->failed;
    if (scan->window) fkv_buffer_free(scan->window, window);
    scan->window = NULL;
    scan->segment_uuid = NULL;
    if (!good) {
        fkv_scan_free(scan);
        return NULL;
    }
    *status = 0;
    return scan;
}

uint64_t fkv_scan_record_count(const fkv_scan *scan) { return scan->records.count; }
const fkv_scan_record *fkv_scan_records(const fkv_scan *scan) { return scan->records.data; }
uint64_t fkv_scan_block_count(const fkv_scan *scan) { return scan->blocks.count; }
const fkv_directory_block *fkv_scan_blocks(const fkv_scan *scan) { return scan->blocks.data; }
uint64_t fkv_scan_namespace_count(const fkv_scan *scan) { return scan->namespaces.count; }
const uint8_t *fkv_scan_namespaces(const fkv_scan *scan) { return scan->namespaces.data; }
uint64_t fkv_scan_damaged(const fkv_scan *scan) { return scan->damaged; }
uint64_t fkv_scan_unreadable(const fkv_scan *scan) { return scan->unreadable; }
uint32_t fkv_scan_end_page(const fkv_scan *scan) { return scan->last_page; }

void fkv_scan_free(fkv_scan *scan)
{
    if (!scan) return;
    fkv_free(scan->records.data), fkv_free(scan->blocks.data), fkv_free(scan->namespaces.data);
    fkv_free(scan);
}
