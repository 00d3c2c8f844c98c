/* encode.h: what encode.c (records, headers, raw) and pages.c (per-head pages) share.
 *
 * Invariants
 *  - a shape before coding is an upper bound in every field that coding makes exact, so a record
 *    never outgrows the room that was reserved for it;
 *  - the parts belong to the caller, also where coding failed. */
#ifndef FLASHKV_ENCODE_H
#define FLASHKV_ENCODE_H
#include "io.h"
#include "record.h"

#define FKV_ENCODE_TASK_BYTES (64u << 10) /* a record of less is coded by the thread that asks */

/* Sizes of a record: bounds before it is coded, exact afterwards. */
typedef struct {
    bool coded, aligned, inlined;
    bool prefix; /* streams may be in the prefix code */
    bool lossy;  /* streams may be bounded: FKV_CODEC_BOUNDED, FKV_CODEC_COLD */
    uint32_t tokens;
    uint32_t streams;
    uint64_t key_bytes; /* keys and parents */
    uint64_t logical_bytes;
    uint64_t aligned_bytes;
    uint64_t payload_bytes;
    uint64_t payload_pages;
    uint64_t stream_bytes; /* of FKV_TLV_STREAMS */
    uint64_t stripes;
    uint64_t lossy_streams; /* exact only: how many are */
    uint64_t profile_bytes;
} fkv_record_shape;

typedef struct {
    uint32_t *page_crcs;
    uint8_t *streams;
    uint32_t *stripes;
    const uint8_t *inlined;
} fkv_record_parts;

uint64_t fkv_header_room(const fkv_geometry *geometry, uint32_t block_count,
                         const fkv_record_shape *shape);
/* Codes every stream into pages at `payload`; makes the shape exact. The caller frees the parts,
 * always. */
int fkv_pages_encode(const fkv_encode_batch *batch, const fkv_encode_record *record,
                     fkv_record_shape *shape, uint8_t *payload, fkv_record_parts *parts);
void fkv_parts_free(fkv_record_parts *parts);
#endif
