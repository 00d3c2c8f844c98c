/* flashkv_native.h: the only face of the data plane: plain structures and arrays in, arrays out.
 *
 * Invariants
 *  - no call keeps a pointer of the caller's after it returned, but for fkv_write_submit (until the
 * write's tag was reaped), fkv_read_start (until the read is over) and fkv_engine_register;
 *  - every call that can block (I/O, coding) is made with the GIL released by cffi;
 *  - statuses are FKV_OK, another FKV_* below, or a negative errno; flashkv/errors.py alone turns
 * them into Python.
 *
 * build.py gives this file to cffi as well: plain declarations and integer constants only.
 */
#ifndef FLASHKV_NATIVE_H
#define FLASHKV_NATIVE_H
#include "format.h"
#include <stddef.h>

/* ---- statuses of one block ---- */
#define FKV_OK 0
#define FKV_MISS 1     /* not there, or another key under the same digest */
#define FKV_DAMAGED 2  /* a checksum, length or key in the store was wrong */
#define FKV_IO_ERROR 3 /* the device or file system failed */
#define FKV_TOO_LARGE 4
#define FKV_NO_MEMORY 5
#define FKV_CANCELLED 6 /* given up before it was in place */

/* ---- geometry and the caller's memory ---- */
#define FKV_DTYPE_OPAQUE 0
#define FKV_DTYPE_BF16 1
#define FKV_DTYPE_FP16 2
#define FKV_DTYPE_FP32 3
#define FKV_DTYPE_BYTES 4 /* one-byte integers */
#define FKV_DTYPE_E4M3 5
#define FKV_DTYPE_E5M2 6

typedef struct {
    uint32_t plane_count;
    uint32_t group;
    fkv_plane_row planes[8];
} fkv_geometry;

/* Where the vectors of one plane in one layer lie, relative to the base of a region of the block.
 * address(head, token) = pointers[block][region] + offset + head * head_stride + token *
 * token_stride. Paged memory: the same with pointers[block][page * page_regions + region], where
 * page = token / page_tokens, and token % page_tokens */
typedef struct {
    int32_t region;          /* -1: this layer is not wanted */
    uint32_t element_stride; /* bytes from one element of a vector to the next; 0: side by side */
    int64_t offset;
    int64_t head_stride;
    int64_t token_stride;
} fkv_place_in_memory;

typedef struct {
    uint32_t region_count; /* pointers a block has, those of all its pages */
    uint32_t page_tokens;  /* tokens of a page of the caller's memory; 0: a block is one piece */
    uint32_t page_regions; /* pointers that each page has; they lie page by page */
    uint32_t entry_count;  /* planes x layers, plane-major: entries of plane p begin at the sum of
                             the layers of the planes before it */
    const fkv_place_in_memory *entries;
    const int32_t *head_slots; /* [heads] position of each head in the caller's memory, -1: not
                                  wanted; NULL: all in order */
    fkv_order_row order; /* what `raw` records as the caller's order; block_tokens: capacity */
} fkv_view;

/* Fills entries[planes x layers] for a contiguous block of `order`, the axes in `region_axes` (bit
 * per FKV_AXIS_*: LAYER and PLANE only, outermost in `order`) being split into regions;
 * region_bytes[region_count] receives the length of each. entries, region_bytes may be NULL to
 * learn the count. Returns the region count or -EINVAL. */
int fkv_view_fill(const fkv_geometry *geometry, const fkv_order_row *order, uint32_t region_axes,
                  fkv_place_in_memory *entries, uint64_t *region_bytes);
/* Bytes of a block of `tokens` tokens. */
uint64_t fkv_block_bytes(const fkv_geometry *geometry, uint32_t tokens);

/* ---- checksums, hashes, filters ---- */
uint32_t fkv_crc32c(uint32_t crc, const uint8_t *data,
                    size_t length); /* crc: of the bytes before, 0 at first */
uint32_t fkv_crc32c_portable(uint32_t crc, const uint8_t *data, size_t length);
void fkv_sha256(const uint8_t *data, size_t length, uint8_t *digest);
void fkv_sha256_portable(const uint8_t *data, size_t length, uint8_t *digest);
/* Token chain: chain[i] = SHA-256(chain[i-1] | tokens (int32 LE) | extra), chain[-1] = seed[32].
 * `count` tokens are cut every `granule`; a shorter last granule gets a key too. out:
 * [ceil(count/granule)][32]. */
void fkv_token_chain(const uint8_t *seed, const int32_t *tokens, uint64_t count, uint32_t granule,
                     const uint8_t *extra, size_t extra_length, uint8_t *out);
/* Split-block Bloom filter of 32-byte blocks over 16-byte digests. */
uint64_t fkv_bloom_bytes(uint64_t count, uint32_t bits_per_key);
void fkv_bloom_add(uint8_t *filter, uint64_t length, const uint8_t *digests, uint64_t count,
                   uint32_t stride);
void fkv_bloom_test(const uint8_t *filter, uint64_t length, const uint8_t *digests, uint64_t count,
                    uint8_t *found);
/* Names of the code paths that this processor takes, as "crc32c=sse4.2 sha256=sha-ni codec=avx2".
 */
const char *fkv_code_paths(void);
/* level 0: portable code everywhere (tests); 1: the best that the processor has; 2: that of one without
 * AVX-512 and without carry-less multiplication of vectors; 3: AVX-512 for all that has it (tests). */
void fkv_use_simd(int level);

/* ---- index: digest of a block key -> record, block ---- */
typedef struct fkv_index fkv_index;

/* What every digest of a (namespace, shard) begins with. */
typedef struct {
    uint8_t prefix[48];    /* namespace digest[32], shard[16] */
    uint32_t namespace_id; /* in-memory number of the namespace */
    uint32_t digest_bytes; /* 16; fewer only in tests, to force collisions */
} fkv_keyspace;

#define FKV_NONE 0xFFFFFFFF
typedef struct {
    uint64_t sequence;
    uint32_t record; /* slot in the index's record table, FKV_NONE: absent */
    uint32_t segment;
    uint32_t page;
    uint32_t pages;
    uint32_t record_tokens;
    uint16_t header_pages;
    uint16_t record_blocks;
    uint16_t ordinal;
    uint16_t tokens; /* of the block */
    uint8_t group;
    uint8_t codec;
    uint8_t fidelity;
    uint8_t flags;
} fkv_place;

typedef struct { /* a block that went out of the index: what a kill names */
    uint32_t segment;
    uint32_t page;
    uint64_t epoch;
    uint64_t sequence;
    uint16_t ordinal;
    uint16_t reserved[3];
} fkv_dropped;

typedef struct {
    uint64_t blocks;
    uint64_t records;
    uint64_t memory_bytes;
    uint64_t live_pages;
} fkv_index_totals;

typedef struct {
    uint64_t epoch;
    uint64_t live_pages; /* pages of records that have a live block */
    uint64_t live_blocks;
    uint64_t live_records;
    uint32_t pins;
    uint32_t reserved;
} fkv_segment_usage;

fkv_index *fkv_index_new(void);
void fkv_index_free(fkv_index *index);
/* keys: bytes back to back; ends[i]: where key i ends. */
void fkv_key_digests(const fkv_keyspace *space, const uint8_t *keys, const uint64_t *ends,
                     uint64_t count, uint8_t *digests);
/* A segment must be begun (epoch set, no records) before records of it are added. */
int fkv_index_begin_segment(fkv_index *index, uint32_t segment, uint64_t epoch);
/* Adds records and their blocks. A digest that is there already goes to the higher sequence (equal:
 * the newcomer); the loser is reported in dropped[] (room for block_count; loser may be the
 * newcomer itself), count in *dropped_count. namespace_ids maps a record's namespace_ordinal. kills
 * (sorted by page, then ordinal) hide blocks of this segment. */
int fkv_index_add(fkv_index *index, uint32_t segment, const fkv_directory_record *records,
                  uint64_t record_count, const fkv_directory_block *blocks, uint64_t block_count,
                  const uint32_t *namespace_ids, const fkv_manifest_kill *kills,
                  uint64_t kill_count, fkv_dropped *dropped, uint64_t *dropped_count);
/* pin != 0: each place found holds one pin on its segment until fkv_index_unpin. */
void fkv_index_lookup(fkv_index *index, const uint8_t *digests, uint64_t count, int pin,
                      fkv_place *places);
void fkv_index_unpin(fkv_index *index, const uint32_t *segments,
                     uint64_t count); /* FKV_NONE entries are skipped */
void fkv_index_contains(fkv_index *index, const fkv_keyspace *space, const uint8_t *keys,
                        const uint64_t *ends, uint64_t count, uint8_t *found);
int fkv_index_contains_one(fkv_index *index, const fkv_keyspace *space, const uint8_t *key,
                           uint64_t length);
/* Leading keys present; with pin their segments are pinned once each, listed in segments[] (room:
 * count). */
uint64_t fkv_index_match(fkv_index *index, const fkv_keyspace *space, const uint8_t *keys,
                         const uint64_t *ends, uint64_t count, int pin, uint32_t *segments,
                         uint64_t *segment_count);
/* Removes blocks by digest; only where the place still is (sequences[i] equal) if sequences is not
 * NULL. dropped[count] receives what went, *dropped_count how many. */
void fkv_index_remove(fkv_index *index, const uint8_t *digests, const uint64_t *sequences,
                      uint64_t count, fkv_dropped *dropped, uint64_t *dropped_count);
/* Drops every block of a segment, of a record (by sequence), of a namespace; returns how many
 * blocks went. */
uint64_t fkv_index_drop_segment(fkv_index *index, uint32_t segment);
uint64_t fkv_index_drop_sequences(fkv_index *index, const uint64_t *sequences, uint64_t count);
uint64_t fkv_index_drop_namespace(fkv_index *index, uint32_t namespace_id);
void fkv_index_totals_get(fkv_index *index, fkv_index_totals *totals);
void fkv_index_usage(fkv_index *index, const uint32_t *segments, uint64_t count,
                     fkv_segment_usage *usage);
uint64_t fkv_index_namespace_blocks(fkv_index *index, uint32_t namespace_id);

/* ---- engine: I/O backend, workers, buffers ---- */
typedef struct fkv_engine fkv_engine;

#define FKV_BACKEND_AUTO 0
#define FKV_BACKEND_IO_URING 1
#define FKV_BACKEND_THREADS 2
#define FKV_BACKEND_SIM 3 /* test builds, see sim.h */

typedef struct fkv_sim fkv_sim;

typedef struct {
    uint32_t backend;
    uint32_t queue_depth;       /* operations at the device at once */
    uint32_t workers;           /* threads that check, decode and encode */
    uint32_t io_threads;        /* of the threads backend */
    uint32_t retries;           /* of one operation on EINTR, EAGAIN and short results */
    uint32_t memory_alignment;  /* of addresses for direct I/O */
    uint64_t read_buffer_bytes; /* bounce buffers of all reads together */
    uint64_t header_cache_bytes;
    fkv_sim *sim; /* the device of the sim backend, else NULL */
} fkv_engine_options;

typedef struct {
    uint64_t reads, writes, syncs;
    uint64_t read_bytes, written_bytes;
    uint64_t retries, short_results, errors;
    uint64_t direct_reads; /* extents that landed in the caller's memory */
    uint64_t bounced_reads;
    uint64_t read_through_pages; /* gap pages, read and not used */
    uint64_t buffer_waits;       /* reads that waited for a bounce buffer */
    uint64_t header_hits, header_misses, header_cache_bytes;
    uint64_t registered_bytes; /* memory registered with the kernel */
    uint64_t buffers_in_use;
    uint64_t inflight;
} fkv_engine_counters;

/* Returns NULL and fills error[] where no backend works. */
fkv_engine *fkv_engine_open(const fkv_engine_options *options, char *error, size_t error_bytes);
void fkv_engine_close(fkv_engine *engine);
const char *fkv_engine_backend(const fkv_engine *engine);
int fkv_backend_available(uint32_t backend); /* compiled in, and the kernel lets it start */
/* Real I/O on fd (one page at offset 0; written first if writable): 0 or -errno. */
int fkv_engine_probe(fkv_engine *engine, int32_t fd, int writable);
void fkv_engine_counters_get(fkv_engine *engine, fkv_engine_counters *counters);
/* Registers memory for I/O without per-call pinning: 0, or -errno (memlock limit): I/O then works
 * unregistered. */
int fkv_engine_register(fkv_engine *engine, void *base, uint64_t length);
/* Must come before memory that was registered is given back to the system. 0 or -ENOENT. */
int fkv_engine_unregister(fkv_engine *engine, void *base);

uint8_t *
fkv_buffer_alloc(uint64_t length); /* page-aligned (huge pages where to be had), zeroed; NULL */
void fkv_buffer_free(uint8_t *base, uint64_t length);

/* What direct I/O on this file needs of addresses and of offsets and lengths, as the kernel tells
 * it (0 and 0: it refuses direct I/O). 0, or -EOPNOTSUPP where the kernel can't tell. */
int fkv_direct_alignment(int32_t fd, uint32_t *memory_bytes, uint32_t *offset_bytes);
/* Makes the file `length` bytes long, with space reserved. 0; 1: made long, but the file system
 * can't reserve; or -errno. Never shortens. */
int fkv_preallocate(int32_t fd, uint64_t length);
/* Reserves space behind a file's end, up to byte `length`, and leaves its length. Returns as
 * fkv_preallocate. */
int fkv_reserve(int32_t fd, uint64_t length);

/* Blocking helpers for the few places that move single extents. 0 or -errno. */
int fkv_pread(fkv_engine *engine, int32_t fd, uint8_t *buffer, uint64_t length, uint64_t offset);
int fkv_pwrite(fkv_engine *engine, int32_t fd, const uint8_t *buffer, uint64_t length,
               uint64_t offset);
/* fdatasync of each file; results[i]: 0 or -errno. Never retried. */
void fkv_sync(fkv_engine *engine, const int32_t *fds, uint64_t count, int32_t *results);

/* Asynchronous writes. `data` stays the engine's until the tag was reaped. Split to at most 1 MiB
 * an operation. */
typedef struct {
    uint64_t tag;
    uint64_t offset;
    uint64_t length;
    const uint8_t *data;
    int32_t fd;
    int32_t result; /* out, when reaped: 0 or -errno */
} fkv_write;
int fkv_write_submit(fkv_engine *engine, const fkv_write *writes, uint64_t count);
/* Finished writes, at most `room`; waits up to timeout_ms for the first one (-1: without limit; 0:
 * polls). Returns how many. */
int64_t fkv_write_reap(fkv_engine *engine, fkv_write *finished, uint64_t room, int64_t timeout_ms);
uint64_t fkv_writes_inflight(fkv_engine *engine); /* submitted and not yet reaped */

/* ---- encode: blocks in the caller's memory -> records in a staging buffer ---- */
typedef struct {
    uint64_t key_offset;    /* in keys */
    uint64_t parent_offset; /* in parents */
    uint32_t source;        /* row of pointers[][region_count] */
    uint16_t tokens;
    uint8_t key_bytes;
    uint8_t parent_bytes;
} fkv_encode_block;

typedef struct {
    uint64_t sequence;
    uint64_t start_token;
    uint64_t buffer_offset; /* in: room of fkv_encode_bounds() bytes, page-aligned; out: where the
                               record begins */
    uint64_t logical_bytes; /* out */
    uint32_t first_block;
    uint32_t block_count;
    uint32_t pages;        /* out: header and payload */
    uint16_t header_pages; /* out */
    uint8_t codec;         /* in: asked for; out: used */
    uint8_t flags;         /* out */
    uint32_t tokens;       /* out */
    int32_t status;        /* out: FKV_OK, FKV_TOO_LARGE, FKV_NO_MEMORY */
    uint8_t fidelity;      /* in: asked for; out: FKV_FIDELITY_* */
    uint8_t reserved[7];
} fkv_encode_record;

typedef struct {
    const fkv_geometry *geometry;
    const fkv_view *view;
    const uint8_t *namespace_digest;
    const uint8_t *shard;
    const uint8_t *keys;
    const uint8_t *parents;
    const uint64_t *pointers;
    const fkv_encode_block *blocks;
    fkv_encode_record *records;
    uint64_t record_count;
    uint64_t created_ms;
    uint8_t *buffer;
    /* FKV_CODEC_BOUNDED: [2][layers of the plane with most]: the step of channels; of tokens (values) the
     * step by the token's deviation. Below 0: the same, channels' by their mean deviation. Else NULL. */
    const float *factors;
    const uint8_t *profile; /* its digest, FKV_PROFILE_BYTES, where the factors come from one */
} fkv_encode_batch;

/* Bytes of staging that a record of these blocks can need, whatever they hold. */
void fkv_encode_bounds(const fkv_encode_batch *batch, uint64_t *bounds);
void fkv_encode(fkv_engine *engine, const fkv_encode_batch *batch);
/* A record that holds a namespace's readable identity, one page or more; returns its bytes or 0
 * (too large). */
uint64_t fkv_encode_namespace(const uint8_t *namespace_digest, const uint8_t *json,
                              uint64_t json_bytes, uint64_t sequence, uint64_t created_ms,
                              uint8_t *buffer, uint64_t room);
/* Binds a record to its place: the header's checksum, then nothing of it may change. */
void fkv_record_bind(uint8_t *header, const uint8_t *segment_uuid, uint64_t epoch, uint32_t page);
/* The same for records at offsets[i] of a buffer, placed at pages[i] of one segment. */
void fkv_records_bind(uint8_t *buffer, const uint64_t *offsets, const uint32_t *pages,
                      uint64_t count, const uint8_t *segment_uuid, uint64_t epoch);

/* ---- read: records -> the caller's memory ---- */
/* One record and its wanted blocks: in the record's order, each once. Who wants a block twice lists
 * the record twice. */
typedef struct {
    uint64_t sequence;
    uint64_t epoch;
    const uint8_t *segment_uuid;
    uint32_t segment;
    int32_t fd;
    uint32_t page;
    uint32_t pages;
    uint32_t record_tokens;
    uint16_t header_pages;
    uint16_t record_blocks;
    uint32_t first_want;
    uint32_t want_count;
    uint8_t codec;
    uint8_t flags;
    uint16_t reserved;
} fkv_read_record;

typedef struct {
    uint64_t key_offset;
    uint32_t target; /* row of pointers[][region_count] */
    uint16_t key_bytes;
    uint16_t ordinal;
    uint16_t first_token;  /* in the block */
    uint16_t token_count;  /* 0: to the block's end */
    uint32_t status;       /* out */
    uint32_t failed_layer; /* out: the first that isn't in place, FKV_NONE: none */
} fkv_read_want;

/* How far a read has come: its layers, each in place or failed, in their order. */
typedef struct fkv_progress fkv_progress;
fkv_progress *fkv_progress_new(uint32_t layers); /* nothing has come; NULL: no memory */
void fkv_progress_free(fkv_progress *progress);
/* Waits until the first `layers` layers are settled or the read has ended, up to timeout_ms (-1: without
 * limit; 0: asks). Returns how many are settled. */
uint32_t fkv_progress_wait(fkv_progress *progress, uint32_t layers, int64_t timeout_ms);
void fkv_progress_end(fkv_progress *progress); /* nothing more comes: all layers are settled */
/* A block's data from this layer on won't come. To be told before what held that layer lets go. */
void fkv_progress_fail(fkv_progress *progress, uint32_t layer);
uint32_t fkv_progress_failed(const fkv_progress *progress); /* the first such layer, or FKV_NONE */

typedef struct {
    const fkv_geometry *geometry;
    const fkv_view *view;
    const uint8_t *namespace_digest;
    const uint8_t *shard;
    const uint8_t *keys;
    const uint64_t *pointers;
    const fkv_read_record *records;
    uint64_t record_count;
    fkv_read_want *wants;
    uint64_t want_count;
    uint32_t gap_pages;             /* read through at most so many unwanted pages ... */
    uint32_t amplification_percent; /* ... while pages read <= this share of those wanted (125) */
    fkv_progress *progress;         /* NULL, or layers are read in their order and settled in it */
    uint32_t flags;                 /* FKV_READ_* */
    uint32_t reserved;
} fkv_read_batch;
#define FKV_READ_BACKGROUND 1 /* after realtime reads, with part of the buffers and the device */
#define FKV_READ_BOUNCE 2     /* the device never writes to the caller's memory itself */

/* Reads, checks, decodes and scatters all records of the batch; returns when every want has its
 * status. */
void fkv_read(fkv_engine *engine, const fkv_read_batch *batch);

/* The same, and returns once it was begun: fkv_read_reap() tells `tag` (not 0) when every want has its
 * status. The batch, all that it points to and the caller's memory stay where they are until then. *job is
 * set before that can be. FKV_OK, or FKV_NO_MEMORY: nothing was begun. */
typedef struct fkv_read_job fkv_read_job;
int fkv_read_start(fkv_engine *engine, const fkv_read_batch *batch, uint64_t tag,
                   fkv_read_job **job);
/* Gives a read up: what wasn't issued won't be, what arrives from now on is thrown away; wants that
 * aren't whole in place become FKV_CANCELLED, and statuses are final, when it returns (it waits for
 * decoding that is under way, not for the device). 1: the caller's memory is free; 0: a direct read is on
 * its way there, until the read is over. */
int fkv_read_cancel(fkv_read_job *job);
void fkv_read_free(fkv_read_job *job); /* once its tag was reaped */
/* Tags of reads that are over, each once, at most `room`; waits up to timeout_ms (-1: without limit) for
 * the first, or for fkv_read_wake(). Returns how many. */
uint64_t fkv_read_reap(fkv_engine *engine, uint64_t *tags, uint64_t room, int64_t timeout_ms);
void fkv_read_wake(fkv_engine *engine); /* fkv_read_reap() returns, this time or the next */
void fkv_header_cache_drop(fkv_engine *engine, uint32_t segment); /* forget a segment's headers */

/* ---- scan: what a segment really holds (recovery of tails, fsck, dump) ---- */
#define FKV_SCAN_VERIFY_PAGES 1 /* a record counts only if every page's checksum is right */
typedef struct {
    fkv_directory_record row; /* namespace_ordinal: row of namespaces found */
    uint8_t kind;
    uint8_t bad_pages; /* some page's checksum was wrong (reported, not counted, without VERIFY) */
    uint16_t reserved;
    uint32_t first_block; /* row of blocks */
} fkv_scan_record;

typedef struct fkv_scan fkv_scan;
/* Scans pages [first_page, end_page) of a segment, resynchronising page by page past what is no
 * record. Pages that the device can't read are passed over and counted. NULL: no memory (*status =
 * -ENOMEM). */
fkv_scan *fkv_scan_segment(fkv_engine *engine, int32_t fd, const uint8_t *segment_uuid,
                           uint64_t epoch, uint32_t first_page, uint32_t end_page, uint32_t flags,
                           int32_t *status);
uint64_t fkv_scan_record_count(const fkv_scan *scan);
const fkv_scan_record *fkv_scan_records(const fkv_scan *scan);
uint64_t fkv_scan_block_count(const fkv_scan *scan);
const fkv_directory_block *fkv_scan_blocks(const fkv_scan *scan); /* digests are filled */
uint64_t fkv_scan_namespace_count(const fkv_scan *scan);
const uint8_t *fkv_scan_namespaces(const fkv_scan *scan); /* digest[32][] */
uint64_t fkv_scan_damaged(const fkv_scan *scan);    /* records with a magic but wrong contents */
uint64_t fkv_scan_unreadable(const fkv_scan *scan); /* pages that the device could not read */
uint32_t fkv_scan_end_page(const fkv_scan *scan);   /* first page behind the last record */
void fkv_scan_free(fkv_scan *scan);

/* ---- metadata: the manifest's log, a sealed segment's footer and directory ---- */
typedef struct {
    uint64_t offset;       /* of the payload, in the log */
    uint32_t length_bytes; /* of the payload */
    uint32_t ordinal;
    uint16_t type;
    uint16_t behind_damage; /* bytes that are no entry lie somewhere before */
    uint32_t reserved;
} fkv_manifest_row;
/* The good entries of a log in their order; at most `room` are written. Returns how many there are.
 */
uint64_t fkv_manifest_walk(const uint8_t *log, uint64_t length, const uint8_t *store_uuid,
                           fkv_manifest_row *rows, uint64_t room);
/* FKV_OK where this page is the footer of that segment and epoch, and its sections lie between the
 * segment's header and its footer; else FKV_DAMAGED. */
int fkv_footer_check(const uint8_t *page, const uint8_t *segment_uuid, uint64_t epoch,
                     uint64_t segment_bytes);
/* Checksum of a footer's page, its own field counting as zero. */
uint32_t fkv_footer_crc(const uint8_t *page, const uint8_t *segment_uuid, uint64_t epoch);
typedef struct { /* offsets in the data that was checked */
    uint64_t records_offset, record_count;
    uint64_t blocks_offset, block_count;
    uint64_t namespaces_offset, namespace_count;
} fkv_directory_rows;
/* Checks the sections of a checked footer in data[length], which begins at byte first_byte of the
 * segment: checksums, counts, every row. FKV_OK and *rows, or FKV_DAMAGED. */
int fkv_directory_check(const uint8_t *page, uint64_t segment_bytes, const uint8_t *data,
                        uint64_t length, uint64_t first_byte, fkv_directory_rows *rows);

/* ---- record headers, for tools ---- */
/* Length in pages of the record header that `page` (one page) begins with, else 0. */
uint32_t fkv_header_peek(const uint8_t *page);
/* Checks a whole header (checksum, bounds, every TLV): FKV_OK, FKV_DAMAGED or FKV_NO_MEMORY. */
int fkv_header_check(const uint8_t *header, uint64_t length, const uint8_t *segment_uuid,
                     uint64_t epoch, uint32_t page);
/* Byte offset and length of a TLV's payload in a checked header; 0 and 0 if it isn't there. */
void fkv_header_tlv(const uint8_t *header, uint64_t length, uint32_t type, uint32_t *offset,
                    uint32_t *bytes);
typedef struct {
    uint32_t stream;
    uint32_t page; /* of the payload */
    uint16_t offset;
    uint16_t length;
    uint16_t first_token; /* in the record */
    uint16_t tokens;
} fkv_stripe;
/* The stripe table of a checked header, decoded; returns the count (at most room are written), or
 * -1: damaged. */
int64_t fkv_header_stripes(const uint8_t *header, uint64_t length, fkv_stripe *stripes,
                           uint64_t room);
/* Bytes of parameters behind the row of a stream of this mode. */
uint32_t fkv_stream_parameter_bytes(uint32_t vector_bytes, uint32_t mode);
/* All vectors of a coded record in memory, checked: stream after stream, logical_bytes in all. FKV_OK,
 * FKV_DAMAGED (also: not coded, or no room) or FKV_NO_MEMORY. */
int fkv_record_decode(const uint8_t *record, uint64_t length, const uint8_t *segment_uuid,
                      uint64_t epoch, uint32_t page, uint8_t *out, uint64_t room);
uint32_t fkv_page_crc(uint64_t sequence, uint32_t ordinal, const uint8_t *page);

/* ---- codec, for tests: one stripe of one stream ---- */
/* rows: count addresses of vectors. parameters: a byte, then a nibble for each value;
 * values: at most 1,024. */
void fkv_fxp_choose(const uint64_t *rows, uint32_t count, uint32_t vector_bytes, uint32_t mode,
                    uint8_t *parameters);
void fkv_fxp_costs(const uint64_t *rows, uint32_t count, uint32_t vector_bytes, uint32_t mode,
                   const uint8_t *parameters,
                   uint16_t *costs); /* bytes that each row takes in a stripe */
uint32_t fkv_fxp_encode(const uint64_t *rows, uint32_t count, uint32_t vector_bytes, uint32_t mode,
                        const uint8_t *parameters, uint8_t *out);
/* rows[i] == 0: row i is not wanted. 0, or -1 where the stripe's length does not fit. */
int fkv_fxp_decode(const uint8_t *in, uint32_t length, uint32_t count, uint32_t vector_bytes,
                   uint32_t mode, const uint8_t *parameters, const uint64_t *rows);
/* The prefix code, likewise. parameters: a byte, then one for each value; costs in bits: a stripe has
 * the sum of its rows', rounded up to a byte. A stripe that can't fit a page is refused. */
void fkv_prefix_choose(const uint64_t *rows, uint32_t count, uint32_t vector_bytes, uint32_t mode,
                       uint8_t *parameters);
void fkv_prefix_costs(const uint64_t *rows, uint32_t count, uint32_t vector_bytes, uint32_t mode,
                      const uint8_t *parameters, uint16_t *bits);
uint32_t fkv_prefix_encode(const uint64_t *rows, uint32_t count, uint32_t vector_bytes,
                           uint32_t mode, const uint8_t *parameters, uint8_t *out);
/* Its parameters as a header may keep them: `out` has room for 2 + values + values / 2 bytes; returns how
 * many it is. */
uint32_t fkv_prefix_pack(const uint8_t *parameters, uint32_t values, uint8_t *out);
/* Bytes of packed parameters; 0 where they are more than `room`. */
uint32_t fkv_prefix_packed_bytes(const uint8_t *packed, uint64_t room, uint32_t values);
void fkv_prefix_unpack(const uint8_t *packed, uint32_t values, uint8_t *parameters);
int fkv_prefix_decode(const uint8_t *in, uint32_t length, uint32_t count, uint32_t vector_bytes,
                      uint32_t mode, const uint8_t *parameters, const uint64_t *rows);
/* Chunks of opaque bytes: one of FKV_CHUNK_* to out[room]: bytes used, 0: not fewer than room, or no
 * zstd; and a row of FKV_TLV_CHUNKS to out[length]: FKV_OK, FKV_DAMAGED or FKV_NO_MEMORY. */
uint32_t fkv_zstd_encode(uint32_t mode, const uint8_t *in, uint32_t length, uint8_t *out,
                         uint32_t room);
int fkv_zstd_decode(uint32_t row, const uint8_t *in, uint8_t *out, uint32_t length);
/* Whether the system has zstd, and it is wanted (fkv_use_zstd(0), for tests: as if it had none). */
int fkv_zstd_there(void);
void fkv_use_zstd(int want);
/* Vectors as what changed since the one before, likewise; without parameters. */
void fkv_delta_costs(const uint64_t *rows, uint32_t count, uint32_t vector_bytes, uint16_t *bits);
uint32_t fkv_delta_encode(const uint64_t *rows, uint32_t count, uint32_t vector_bytes,
                          uint8_t *out);
int fkv_delta_decode(const uint8_t *in, uint32_t length, uint32_t count, uint32_t vector_bytes,
                     const uint64_t *rows);
/* Both codes of float32 and one-byte floats, likewise; parameters: of their 16-bit values. */
uint32_t fkv_halves_encode(const uint64_t *rows, uint32_t count, uint32_t vector_bytes,
                           uint32_t mode, const uint8_t *parameters, uint8_t *out);
int fkv_halves_decode(const uint8_t *in, uint32_t length, uint32_t count, uint32_t vector_bytes,
                      uint32_t mode, const uint8_t *parameters, const uint64_t *rows);
/* The bounded code. factor: steps are factor * sqrt(deviation); below 0: -factor * sqrt(deviation * the
 * mean deviation of all channels or tokens); 0: a 254th of the range. exact: tokens
 * at the beginning kept as they are. parameters: 4 bytes and 3 a value, or 2 where steps are tokens';
 * levels[count]: of those steps. Returns the bits that the rows take about; 0: not to be coded so. */
uint64_t fkv_bounded_parameters_of(const uint64_t *rows, uint32_t count, uint32_t vector_bytes,
                                   uint32_t mode, float factor, uint32_t exact, uint8_t *parameters,
                                   uint8_t *levels);
/* first_token: of the stripe in its stream. Returns its length; 0: it doesn't fit a page. */
uint32_t fkv_bounded_encode(const uint64_t *rows, uint32_t count, uint32_t vector_bytes,
                            uint32_t mode, const uint8_t *parameters, const uint8_t *levels,
                            uint32_t first_token, uint8_t *out);
int fkv_bounded_decode(const uint8_t *in, uint32_t length, uint32_t count, uint32_t vector_bytes,
                       uint32_t mode, const uint8_t *parameters, uint32_t first_token,
                       const uint64_t *rows);
#endif
