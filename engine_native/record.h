/* record.h: a record's header, decoded, and the walks over a block that encode.c, reader.c and
 * scan.c share.
 *
 * Invariants
 *  - an fkv_header exists only for bytes whose checksum, bounds and every TLV were checked
 * (record.c);
 *  - it owns its bytes and never changes; it is shared by reference count;
 *  - streams are numbered layer, plane, head; stripes are listed in the order of their pages.
 */
#ifndef FLASHKV_RECORD_H
#define FLASHKV_RECORD_H
#include "codec_bounded.h"
#include "flashkv_native.h"
#include <stdatomic.h>
#include <stdbool.h>

#define FKV_HEADER_BYTES_MAX (4u << 20)
#define FKV_STRIPE_TOKENS_MAX 2047
#define FKV_CODABLE_VECTOR_MAX 2048 /* longer vectors, and opaque ones, are stored raw */

typedef struct {
    uint8_t mode;
    uint8_t reserved;
    uint16_t full_stripes;
    /* fkv_stream_parameters() bytes follow */
} fkv_stream_row;

typedef struct fkv_header {
    _Atomic uint32_t references;
    uint32_t bytes_total; /* memory that this costs */
    bool starved;         /* decoding ended for a lack of memory */
    fkv_record_header fixed;
    fkv_geometry geometry;
    fkv_order_row order;
    uint8_t *bytes; /* the header's pages */
    const fkv_block_row *blocks;
    uint32_t *key_offsets;   /* [block_count], into bytes */
    uint64_t *block_offsets; /* raw: [block_count + 1], where each block begins in the payload */
    const uint32_t *page_crcs;
    uint32_t payload_pages;
    const uint8_t *inline_payload;
    uint32_t stream_count;
    uint32_t *entry_streams;  /* first stream of (plane, layer), indexed like fkv_view.entries */
    uint32_t *stream_offsets; /* [stream_count]: of each fkv_stream_row, into bytes */
    uint16_t *stream_entries; /* [stream_count]: (plane, layer) of each stream */
    fkv_stripe *stripes;
    uint64_t stripe_count;
    /* [2 * stream_count + 2]: a stream's full stripes are [first[s], first[s + 1]), its others
     * [first[n + 1 + s], first[n + 2 + s]), n being stream_count. */
    uint32_t *stream_stripes;
} fkv_header;

/* Checks and decodes; NULL with *status FKV_DAMAGED, or FKV_NO_MEMORY, which says nothing about the
 * record. `bytes` is copied; status may be NULL. */
fkv_header *fkv_header_parse(const uint8_t *bytes, uint64_t length, const uint8_t *segment_uuid,
                             uint64_t epoch, uint32_t page, int *status);
void fkv_header_retain(fkv_header *header);
void fkv_header_release(fkv_header *header);
uint32_t fkv_header_crc(const uint8_t *header, uint64_t length, const uint8_t *segment_uuid,
                        uint64_t epoch, uint32_t page);
/* Whether a plane's values are those of the exponent codes. */
static inline bool fkv_plane_halves(const fkv_plane_row *plane)
{
    return plane->dtype == FKV_DTYPE_BF16 || plane->dtype == FKV_DTYPE_FP16;
}
/* Bytes of parameters that a stream of this mode has: exponent bases of groups of channels, or a
 * base and a byte for each channel. */
static inline uint32_t fkv_stream_parameters(uint32_t vector_bytes, uint32_t mode)
{
    if (fkv_mode_bounded(mode)) return fkv_bounded_parameters(vector_bytes, mode);
    if (mode == FKV_STREAM_PLAIN) return 0;
    if (mode == FKV_STREAM_PREFIX_BF16 || mode == FKV_STREAM_PREFIX_FP16)
        return 1 + vector_bytes / 2;
    return (vector_bytes / 2 + FKV_STREAM_GROUP - 1) / FKV_STREAM_GROUP;
}
bool fkv_geometry_valid(const fkv_geometry *geometry);
bool fkv_geometry_codable(const fkv_geometry *geometry);
uint32_t fkv_geometry_layers(const fkv_geometry *geometry);  /* of the plane with most */
uint32_t fkv_geometry_entries(const fkv_geometry *geometry); /* planes x layers */
uint32_t fkv_geometry_streams(const fkv_geometry *geometry);
uint32_t fkv_entry_plane(const fkv_geometry *geometry, uint32_t entry);

/* Raw: where block `ordinal` begins in the payload, given the tokens of the blocks before it. */
static inline uint64_t fkv_raw_stride(uint64_t block_bytes, bool aligned)
{
    return aligned ? (block_bytes + FKV_PAGE_BYTES - 1) / FKV_PAGE_BYTES * FKV_PAGE_BYTES
                   : block_bytes;
}

/* ---- copy.c: walks over the vectors of one block ---- */
/* Address of a vector in the caller's memory; 0 where its layer or head is not wanted. */
static inline uint64_t fkv_vector(const fkv_view *view, const uint64_t *pointers, uint32_t entry,
                                  uint32_t head, uint32_t token)
{
    const fkv_place_in_memory *place = &view->entries[entry];
    int64_t slot = view->head_slots ? view->head_slots[head] : (int64_t)head;
    if (place->region < 0 || slot < 0) return 0;
    if (view->page_tokens) {
        pointers += (uint64_t)(token / view->page_tokens) * view->page_regions;
        token %= view->page_tokens;
    }
    return pointers[place->region]
           + (uint64_t)(place->offset + slot * place->head_stride
                        + (int64_t)token * place->token_stride);
}

/* Bytes of an element of a plane: what stays together where vectors are strided. */
static inline uint32_t fkv_element_bytes(const fkv_plane_row *plane)
{
    if (plane->dtype == FKV_DTYPE_FP32) return 4;
    return plane->dtype == FKV_DTYPE_BF16 || plane->dtype == FKV_DTYPE_FP16 ? 2 : 1;
}
/* Vectors between memory with a stride and side by side. */
void fkv_vector_gather(const fkv_plane_row *plane, uint32_t stride, const uint8_t *from,
                       uint8_t *to);
void fkv_vector_scatter(const fkv_plane_row *plane, uint32_t stride, const uint8_t *from,
                        uint8_t *to);

/* One past the last token that lies as far behind its neighbour as `token`: its page's end. */
static inline uint32_t fkv_piece_end(const fkv_view *view, uint32_t token, uint32_t end)
{
    if (!view->page_tokens) return end;
    uint32_t piece = (token / view->page_tokens + 1) * view->page_tokens;
    return piece < end ? piece : end;
}

/* Pieces of a block that are contiguous both in its stored (raw) form and in the caller's memory,
 * in stored order. */
typedef void (*fkv_run_fn)(void *context, uint64_t stored_offset, uint8_t *memory, uint64_t length);
typedef struct {
    const fkv_geometry *geometry;
    const fkv_order_row *order;
    const fkv_place_in_memory *stored; /* entries of the stored form */
    const fkv_view *view;
    uint32_t first_token,
        token_count; /* range of the block that is wanted; it lands at token 0 of the view */
} fkv_runs;
void fkv_runs_each(const fkv_runs *runs, const uint64_t *pointers, fkv_run_fn emit, void *context);
#endif
