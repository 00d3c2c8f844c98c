/* codec_zstd.h: chunks of opaque bytes in zstd frames; see codec_zstd.c.
 *
 * Invariants
 *  - zstd is the system's shared library, looked for when it is first needed; without it nothing is
 *    compressed, and what is can't be read (FKV_NO_MEMORY: says nothing about the record);
 *  - a chunk decodes alone, to exactly the length that its place says, into memory of that length. */
#ifndef FLASHKV_CODEC_ZSTD_H
#define FLASHKV_CODEC_ZSTD_H
#include "flashkv_native.h"
#include <stdbool.h>

#define FKV_CHUNK_SCRATCH (FKV_CHUNK_BYTES / 2) /* besides where a chunk goes to */

/* Row of FKV_TLV_CHUNKS. */
static inline uint32_t fkv_chunk_stored(uint32_t row) { return row & FKV_CHUNK_LENGTH_MASK; }
static inline uint32_t fkv_chunk_mode(uint32_t row) { return row >> FKV_CHUNK_MODE_SHIFT; }

/* A compressor's and a decompressor's memory: made once for many chunks. NULL: no zstd, no memory. */
typedef struct fkv_zstd fkv_zstd;
fkv_zstd *fkv_zstd_new(bool compress);
void fkv_zstd_free(fkv_zstd *z);
/* Codes length <= FKV_CHUNK_BYTES bytes in a mode to out[room]. Bytes used, or 0: not fewer than
 * `room`. scratch: FKV_CHUNK_SCRATCH bytes. */
uint32_t fkv_chunk_encode(fkv_zstd *z, uint32_t mode, const uint8_t *in, uint32_t length,
                          uint8_t *scratch, uint8_t *out, uint32_t room);
/* The opposite: out[length] from a row's stored bytes. False: damaged. */
bool fkv_chunk_decode(fkv_zstd *z, uint32_t row, const uint8_t *in, uint8_t *scratch, uint8_t *out,
                      uint32_t length);
#endif
