/* reader.h: what reader.c (the life of a read), extents.c (which pages, by which reads) and place.c
 * (pages -> memory) share.
 *
 * Invariants
 *  - a record is open while any of its extents is; its wants' statuses are final when it closes;
 *  - a want's status only ever goes from FKV_OK to something else;
 *  - an extent gives its buffer back before its record closes; it waits for nothing while it holds
 * one;
 *  - once a read is given up nobody but the device writes to the caller's memory, and that only by direct
 * reads that were issued before.
 */
#ifndef FLASHKV_READER_H
#define FLASHKV_READER_H
#include "header_cache.h"
#include "io.h"
#include "record.h"

#define FKV_EXTENT_PAGES_MAX (FKV_IO_MAX_BYTES / FKV_PAGE_BYTES)
#define FKV_EXTENT_LAYER_PAGES 64 /* the same where layers are waited for */
#define FKV_EXTENT_INLINE_PAGES 4 /* so little is handled by the thread that reaped it */

typedef struct fkv_reading fkv_reading;
struct fkv_read_job {
    fkv_engine *engine;
    const fkv_read_batch *batch;
    fkv_reading *readings; /* [record_count] */
    pthread_mutex_t lock;
    pthread_cond_t done;
    uint64_t open_records;
    uint64_t tag;     /* 0: who waits for the end of all records is told by `done` */
    bool selects_all; /* every layer and head is wanted */
    struct fkv_read_job *next;
    /* Giving it up (cancel.c): */
    _Atomic bool given_up;
    _Atomic uint32_t placing;        /* extents that write to the caller's memory right now */
    _Atomic uint64_t direct_flights; /* direct reads that the device has */
    /* Of a batch whose layers are waited for: */
    uint64_t unplanned; /* records whose extents aren't known yet */
    struct fkv_extent *deferred;
    uint64_t deferred_count;
};

typedef struct {
    uint32_t first, end;
} fkv_layer_range;

/* Tokens [first, end) of a record, which a want takes. */
typedef struct {
    uint32_t first, end;
    uint32_t want;
} fkv_range;

typedef struct fkv_extent fkv_extent;
struct fkv_reading {
    fkv_read_job *job;
    const fkv_read_record *request;
    fkv_header *header;
    _Atomic uint32_t open;
    fkv_extent *extents; /* all of them, to be freed at the end */
    fkv_range *ranges;   /* coded: wanted tokens, ascending; `sole` if it is one */
    uint32_t range_count;
    fkv_range sole;
    uint8_t *needed;             /* [payload pages] */
    fkv_place_in_memory *stored; /* raw: where vectors lie in a block of stored_tokens tokens */
    uint32_t stored_tokens;
    bool planned; /* its extents are known, or there will be none */
};

struct fkv_extent {
    fkv_io_op op;
    fkv_task task;
    fkv_pool_waiter waiter;
    fkv_reading *reading;
    fkv_extent *next;
    uint8_t *buffer;       /* header pages, bounced pages, or the tail of a direct read */
    uint64_t own_bytes;    /* buffer isn't the pool's */
    uint32_t header_pages; /* in front of the payload: the first read of a record */
    uint32_t first_page, page_count;
    uint8_t *direct;        /* the caller's memory, or NULL */
    uint64_t direct_bytes;  /* whole pages that land there; the rest is in the buffer */
    uint32_t want;          /* of a direct read */
    fkv_layer_range layers; /* that it brings, where they are waited for */
    bool placed;            /* or failed: its wants have their statuses */
    fkv_extent *deferred;
};

/* reader.c */
void fkv_extent_issue(fkv_extent *extent);        /* starts it, or defers it until all are known */
void fkv_extent_start(fkv_extent *extent);        /* takes a buffer, then goes to the device */
fkv_extent *fkv_extent_new(fkv_reading *reading); /* listed and counted as open; NULL: no memory */
void fkv_want_fail(fkv_reading *reading, uint32_t want, uint32_t status);
/* From this layer on; those below may be in place. */
void fkv_want_fail_from(fkv_reading *reading, uint32_t want, uint32_t status, uint32_t layer);
void fkv_reading_fail(fkv_reading *reading, uint32_t status);
void fkv_extent_lost(fkv_extent *extent, uint32_t status); /* it doesn't come: fails who needs it */
static inline fkv_read_want *fkv_want_at(const fkv_reading *reading, uint32_t want)
{
    return &reading->job->batch->wants[want];
}
static inline const uint64_t *fkv_want_pointers(const fkv_reading *reading,
                                                const fkv_read_want *want)
{
    const fkv_read_batch *batch = reading->job->batch;
    return batch->pointers + (uint64_t)want->target * batch->view->region_count;
}

/* cancel.c */
/* Around what writes to the caller's memory, or takes a header for granted. False: the read was given up. */
bool fkv_place_begin(fkv_read_job *job);
void fkv_place_end(fkv_read_job *job);
void fkv_read_report(fkv_read_job *job); /* a tagged one is over */

/* extents.c */
/* The first read, while the header is not known yet: of it alone where layers are waited for. False: it
 * failed for want of memory. */
bool fkv_extents_first(fkv_reading *reading);
/* With the header known: what of [0, have_pages) of the payload `have` holds is placed, the rest is
 * read. */
void fkv_extents_rest(fkv_reading *reading, fkv_extent *have);

/* place.c */
void fkv_raw_block_place(const fkv_reading *reading, const fkv_read_want *want, uint64_t *offset,
                         uint64_t *bytes);
/* Where a whole raw block can land without a copy: its address, else NULL. */
uint8_t *fkv_raw_direct(const fkv_reading *reading, const fkv_read_want *want,
                        const fkv_order_row *order, uint64_t block_bytes, uint32_t block_tokens);
bool fkv_raw_runs(const fkv_reading *reading, const fkv_read_want *want, fkv_run_fn emit,
                  void *context);
bool fkv_stripe_wanted(const fkv_reading *reading, const fkv_stripe *stripe);
uint64_t fkv_first_stripe(const fkv_header *header, uint32_t page); /* of those from a page on */
void fkv_extent_place(fkv_extent *extent); /* checks and copies or decodes what the extent holds */
void fkv_extent_fail(fkv_extent *extent, uint32_t status);

/* layerwise.c; where no layers are waited for they do nothing, and ranges are of all layers */
void fkv_layers_begin(fkv_read_job *job);
void fkv_layers_planned(fkv_reading *reading); /* may start the extents of all records */
void fkv_layers_defer(fkv_extent *extent);
void fkv_layers_done(fkv_extent *extent);
void fkv_layers_lost(fkv_extent *extent); /* those that it was to bring won't come; before it is done */
fkv_layer_range fkv_layers_of_bytes(const fkv_reading *reading, uint64_t from, uint64_t to);
uint32_t fkv_entry_layer(const fkv_geometry *geometry, uint32_t entry);
#endif
