/* format.h: every structure that flashkv writes to disk, format version 0.
 *
 * Invariants
 *  - little-endian, naturally aligned, no hidden padding; size and offsets are checked at compile
 * time (format_check.c);
 *  - this file is read twice: by the C compiler and, through build.py, by cffi. It therefore holds
 * plain structures, integer constants and comments only;
 *  - reserved fields are written as zero and refused when they are not zero.
 *
 * docs/format.md describes the same bytes in words.
 */
#ifndef FLASHKV_FORMAT_H
#define FLASHKV_FORMAT_H
#include <stdint.h>

#define FKV_FORMAT_VERSION 0
#define FKV_PAGE_SHIFT 12
#define FKV_PAGE_BYTES 4096
#define FKV_CHECKSUM_CRC32C 1
#define FKV_UUID_BYTES 16
#define FKV_DIGEST_BYTES 16
#define FKV_NAMESPACE_BYTES 32
#define FKV_SHARD_BYTES 16
#define FKV_PROFILE_BYTES 32
#define FKV_KEY_BYTES_MAX 255
#define FKV_PLANES_MAX 8
#define FKV_INLINE_PAYLOAD_MAX 2048
#define FKV_BLOCK_TOKENS_MAX 1024
#define FKV_BLOCKS_PER_RECORD_MAX 1024
#define FKV_POSITION_UNKNOWN 0xFFFFFFFFFFFFFFFF
/* Sequences, epochs and generations lie below this: a million a second take 146,000 years. What says
 * otherwise is damaged; counting on from what doesn't stays within 64 bits. */
#define FKV_COUNT_END 0x4000000000000000

/* ---- superblock: one page, two files ---- */
typedef struct {
    uint8_t magic[8];    /* "FKVSUPER" */
    uint32_t crc;        /* CRC-32C of the page with this field zero */
    uint32_t version;    /* FKV_FORMAT_VERSION */
    uint64_t generation; /* the copy with the higher one rules */
    uint8_t store_uuid[16];
    uint32_t page_shift;
    uint32_t checksum_id;
    uint64_t segment_bytes;
    uint64_t features_compatible;
    uint64_t features_read_only;
    uint64_t features_incompatible;
    uint64_t manifest_generation; /* manifest-<generation>.log rules */
    uint64_t created_ms;
    uint64_t capacity_bytes; /* the cap that was given last; a later open may give another one */
    uint32_t geometry_bytes; /* length of the geometry's canonical JSON, which follows */
    uint32_t reserved;
} fkv_superblock;

/* ---- manifest: a log of entries: fkv_manifest_entry and payload, padded to 8 bytes ---- */
#define FKV_MANIFEST_BEGIN 1     /* payload: fkv_manifest_begin */
#define FKV_MANIFEST_OPENED 2    /* payload: fkv_manifest_segment: the segment starts this epoch */
#define FKV_MANIFEST_FREED 3     /* payload: fkv_manifest_segment: all of that epoch is dead */
#define FKV_MANIFEST_KILL 4      /* payload: fkv_manifest_kill[] */
#define FKV_MANIFEST_NAMESPACE 5 /* payload: digest[32] and canonical JSON */
#define FKV_MANIFEST_RETIRED 6   /* payload: fkv_manifest_retired */
#define FKV_MANIFEST_PROFILE 7   /* payload: digest[32] and canonical JSON */
#define FKV_MANIFEST_VOID 8      /* payload: fkv_manifest_void */

typedef struct {
    uint32_t crc; /* of the rest of this structure and the payload, seeded by the store uuid */
    uint16_t type;
    uint16_t reserved;
    uint32_t length_bytes; /* of the payload, without padding */
    uint32_t ordinal; /* 0, 1, 2 ... within the file: a stale tail can't be taken for this log's */
} fkv_manifest_entry;

typedef struct {
    uint8_t store_uuid[16];
    uint64_t generation;
    uint64_t next_sequence; /* no record has this sequence or a later one when the log begins */
} fkv_manifest_begin;

typedef struct {
    uint32_t segment;
    uint32_t reserved;
    uint64_t epoch;
    uint8_t segment_uuid[16];
} fkv_manifest_segment;

typedef struct { /* the namespace's records up to a sequence are dead */
    uint8_t namespace_digest[32];
    uint64_t last_sequence;
} fkv_manifest_retired;

typedef struct { /* no record of the segment with one of these sequences counts */
    uint32_t segment;
    uint32_t reserved;
    uint64_t epoch;
    uint64_t first_sequence, last_sequence;
} fkv_manifest_void;

#define FKV_KILL_RECORD 0xFFFF /* ordinal: the whole record */
typedef struct {
    uint32_t segment;
    uint32_t page; /* address of the record's header in its segment */
    uint64_t epoch;
    uint64_t sequence; /* of the record: its place may be written again after a crash */
    uint16_t ordinal;  /* block within the record, or FKV_KILL_RECORD */
    uint16_t reserved[3];
} fkv_manifest_kill;

/* ---- segment: page 0, records, directory, footer in the last page ---- */
typedef struct {
    uint8_t magic[8]; /* "FKVSEGMT" */
    uint32_t crc;     /* CRC-32C of the page with this field zero */
    uint32_t version;
    uint8_t store_uuid[16];
    uint8_t segment_uuid[16];
    uint32_t segment;
    uint32_t page_shift;
    uint64_t epoch;
    uint64_t segment_bytes;
    uint64_t
        first_sequence; /* the next record sequence when this epoch began: orders segments by age */
    uint64_t created_ms;
    uint64_t reserved[4];
} fkv_segment_header;

#define FKV_SECTION_DIR_RECORDS 1    /* fkv_directory_record[] */
#define FKV_SECTION_DIR_BLOCKS 2     /* fkv_directory_block[], in the order of the records */
#define FKV_SECTION_DIR_NAMESPACES 3 /* digest[32][] */
#define FKV_SECTION_BLOOM 4          /* optional: split-block Bloom filter over the block digests */
#define FKV_SECTIONS_MAX 16

typedef struct {
    uint16_t type;
    uint16_t version;
    uint32_t crc;          /* of the section's bytes */
    uint64_t offset_bytes; /* in the segment, page-aligned */
    uint64_t length_bytes;
} fkv_section;

typedef struct {
    uint8_t magic[8]; /* "FKVFOOTR" */
    uint32_t crc;     /* of the page with this field zero, seeded by segment uuid and epoch */
    uint32_t version;
    uint8_t segment_uuid[16];
    uint64_t epoch;
    uint32_t record_count;
    uint32_t section_count;
    uint64_t block_count;
    uint64_t last_sequence; /* highest sequence in the segment */
    uint64_t reserved[4];
    fkv_section sections[16];
} fkv_segment_footer;

typedef struct {
    uint64_t sequence;
    uint32_t page;  /* of the header, in the segment */
    uint32_t pages; /* header and payload */
    uint16_t header_pages;
    uint16_t block_count;
    uint32_t tokens;
    uint16_t namespace_ordinal; /* row of FKV_SECTION_DIR_NAMESPACES */
    uint8_t group;
    uint8_t codec;
    uint8_t fidelity;
    uint8_t flags; /* FKV_RECORD_* */
    uint16_t reserved;
} fkv_directory_record;

typedef struct {
    uint8_t digest[16];
    uint16_t tokens;
    uint16_t ordinal; /* of the block in its record */
} fkv_directory_block;

/* ---- record: header (whole pages) and payload pages ---- */
#define FKV_KIND_DATA 1
#define FKV_KIND_NAMESPACE 2 /* payload-less: FKV_TLV_NAMESPACE holds the readable identity */

#define FKV_CODEC_RAW 1      /* caller's order, plain bytes */
#define FKV_CODEC_LOSSLESS 2 /* per-head pages, the cheapest mode for each stream, bit-exact */
#define FKV_CODEC_FAST 3     /* the same without the prefix code */
#define FKV_CODEC_ZSTD 6     /* as raw, in chunks that zstd made smaller */
#define FKV_CODEC_BOUNDED 8  /* as lossless, and numbers within a bound: FKV_FIDELITY_BOUNDED_* */
#define FKV_CODEC_COLD 9     /* as bounded, steps of a 254th of the range: FKV_FIDELITY_COLD */

#define FKV_TABLE_SET 1 /* of lossless records: which symbol of the prefix code means what */

/* The lower, the nearer to what was put. */
#define FKV_FIDELITY_EXACT 0
#define FKV_FIDELITY_COLD 1
#define FKV_FIDELITY_BOUNDED_1 2
#define FKV_FIDELITY_BOUNDED_4 5

#define FKV_RECORD_INLINE 1  /* the payload sits in the header page */
#define FKV_RECORD_ALIGNED 2 /* raw: every block begins on a page */

typedef struct {
    uint8_t magic[4]; /* "FKVR" */
    uint32_t crc; /* of all header_pages pages with this field zero, seeded by segment uuid, epoch
                   * and page */
    uint32_t header_bytes; /* used; the rest of the header's pages is zero */
    uint16_t header_pages;
    uint8_t kind;
    uint8_t group;
    uint32_t pages; /* header and payload */
    uint16_t block_count;
    uint8_t codec;
    uint8_t codec_version;
    uint16_t table_set; /* static tables that the codec used: FKV_TABLE_SET; 0: none */
    uint8_t fidelity;
    uint8_t flags;
    uint32_t tokens; /* of all blocks */
    uint64_t sequence;
    uint64_t created_ms;
    uint64_t payload_bytes; /* used bytes of the payload: pages of it, or the inline bytes */
    uint64_t logical_bytes; /* what get returns */
    uint64_t start_token;   /* position of the first token, or FKV_POSITION_UNKNOWN */
    uint8_t namespace_digest[32];
    uint8_t shard[16];
    uint32_t tlv_count;
    uint32_t reserved[5];
} fkv_record_header; /* 144 bytes; TLVs follow */

#define FKV_TLV_BLOCKS 1    /* fkv_block_row[block_count] */
#define FKV_TLV_KEYS 2      /* the keys' bytes, then the parents' bytes, as the block rows say */
#define FKV_TLV_PLANES 3    /* fkv_plane_row[]: the geometry of the stored streams */
#define FKV_TLV_PAGE_CRCS 4 /* uint32_t[payload pages], each seeded by sequence and ordinal */
#define FKV_TLV_STREAMS 5   /* coded: per stream mode, full stripes, parameters */
#define FKV_TLV_STRIPES 6   /* coded: uint32_t[]: length 13 bits, tokens 11 bits, new page 1 bit */
#define FKV_TLV_ORDER 7     /* raw: fkv_order_row: the caller's axis order */
#define FKV_TLV_INLINE 8    /* the payload itself */
#define FKV_TLV_NAMESPACE 9 /* canonical JSON of the identity */
#define FKV_TLV_PROFILE 10  /* digest[32] of the calibration that bounded steps came from */
#define FKV_TLV_CHUNKS 11   /* zstd: uint32_t[]: stored bytes 18 bits, FKV_CHUNK_* */
/* Set in a type: a reader that does not know it must not use the record. */
#define FKV_TLV_CRITICAL 0x8000

typedef struct {
    uint16_t type;
    uint16_t reserved;
    uint32_t length_bytes; /* without the padding to 8 */
} fkv_tlv;

typedef struct {
    uint32_t first_token; /* in the record */
    uint16_t tokens;
    uint8_t key_bytes;
    uint8_t parent_bytes; /* 0: none */
} fkv_block_row;

typedef struct {
    uint8_t role;
    uint8_t dtype;
    uint16_t reserved;
    uint32_t layers;
    uint32_t heads;
    uint32_t vector_bytes; /* of one token of one head */
} fkv_plane_row;

#define FKV_CHUNK_BYTES 131072 /* of a block, that are coded together */
#define FKV_CHUNK_LENGTH_MASK 0x3FFFF
#define FKV_CHUNK_MODE_SHIFT 18
#define FKV_CHUNK_PLAIN 0
#define FKV_CHUNK_ZSTD 1
#define FKV_CHUNK_HALVES 2 /* even bytes as they are, odd ones in a zstd frame */

/* Axes of a block in memory, outermost first; FKV_AXIS_* each once. */
#define FKV_AXIS_LAYER 0
#define FKV_AXIS_PLANE 1
#define FKV_AXIS_HEAD 2
#define FKV_AXIS_TOKEN 3
typedef struct {
    uint8_t axes[4];
    uint32_t block_tokens; /* tokens that a block's strides are made for */
} fkv_order_row;

#define FKV_ROLE_K 1
#define FKV_ROLE_V 2
#define FKV_ROLE_ROPE 5 /* kv and latent before it */

#define FKV_STREAM_PLAIN 0    /* rows as they are */
#define FKV_STREAM_FXP_BF16 1 /* byte of mantissa and sign, 3-bit exponent code, escapes */
#define FKV_STREAM_FXP_FP16 2
#define FKV_STREAM_PREFIX_BF16 3 /* exponents in a prefix code in bit planes, steady signs left out */
#define FKV_STREAM_PREFIX_FP16 4
/* float32: the upper half as bfloat16, the lower one as it is, or (SHORT) zero and not stored. */
#define FKV_STREAM_FXP_FP32 16
#define FKV_STREAM_FXP_FP32_SHORT 17
#define FKV_STREAM_PREFIX_FP32 18
#define FKV_STREAM_PREFIX_FP32_SHORT 19
#define FKV_STREAM_PREFIX_E4M3 20 /* one byte, exponents as in PREFIX_FP16 */
#define FKV_STREAM_PREFIX_E5M2 21
#define FKV_STREAM_DELTA 22 /* every type: what changed since the token before */
/* Bounded: numbers between steps of a channel, or of a token; the type of the plane's elements. */
#define FKV_STREAM_CHANNELS_BF16 32
#define FKV_STREAM_CHANNELS_FP16 33
#define FKV_STREAM_CHANNELS_FP32 34
#define FKV_STREAM_TOKENS_BF16 35
#define FKV_STREAM_TOKENS_FP16 36
#define FKV_STREAM_TOKENS_FP32 37
#define FKV_EXACT_TOKENS 4  /* of a sequence's beginning, which bounded streams keep as they are */
#endif
