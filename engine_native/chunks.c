/* chunks.c: the raw payload of a record -> chunks, where that saves an eighth of its pages.
 *
 * Invariants
 *  - a chunk holds bytes of one block and has whole pages of its own: a block is read without the
 *    others, and a run of pages is cut between chunks;
 *  - where compression doesn't pay the payload stays as it was: raw, which reads can place directly.
 */
#include "allocate.h"
#include "codec_zstd.h"
#include "encode.h"
#include <string.h>

#define PAGES(bytes) (((bytes) + FKV_PAGE_BYTES - 1) / FKV_PAGE_BYTES)
#define TRIAL_CHUNKS 2u /* after so many it must have paid, or no more is tried */

typedef struct {
    fkv_zstd *zstd;
    uint8_t *scratch, *out; /* out: room for the payload's pages */
    uint32_t mode;          /* what made the first chunk smallest */
    uint32_t chunks, pages;
    uint32_t *rows;
} chunker;

/* Codes one chunk behind the others; its pages' ends are zero. */
static void put_chunk(chunker *c, const uint8_t *in, uint32_t length)
{
    uint8_t *out = c->out + (uint64_t)c->pages * FKV_PAGE_BYTES;
    uint32_t mode = c->mode, bytes;
    if (!c->chunks) {
        /* Both are tried: the better one is that of all chunks. */
        uint32_t whole =
            fkv_chunk_encode(c->zstd, FKV_CHUNK_ZSTD, in, length, c->scratch, out, length);
        uint32_t halves =
            fkv_chunk_encode(c->zstd, FKV_CHUNK_HALVES, in, length, c->scratch, out, length);
        mode = c->mode = whole && (!halves || whole <= halves) ? FKV_CHUNK_ZSTD : FKV_CHUNK_HALVES;
    }
    bytes = fkv_chunk_encode(c->zstd, mode, in, length, c->scratch, out, length);
    if (!bytes || PAGES(bytes) >= PAGES(length)) {
        mode = FKV_CHUNK_PLAIN, bytes = length;
        memcpy(out, in, length);
    }
    c->rows[c->chunks++] = bytes | mode << FKV_CHUNK_MODE_SHIFT;
    memset(out + bytes, 0, PAGES(bytes) * FKV_PAGE_BYTES - bytes);
    c->pages += PAGES(bytes);
}

/* Whether all blocks could be coded; not where it turned out not to pay. */
static bool put_blocks(chunker *c, const fkv_encode_batch *batch, const fkv_encode_record *record,
                       const fkv_record_shape *s, const uint8_t *payload)
{
    for (uint32_t i = 0, raw_pages = 0; i < record->block_count; i++) {
        const fkv_encode_block *b = &batch->blocks[record->first_block + i];
        uint64_t bytes = fkv_block_bytes(batch->geometry, b->tokens);
        for (uint64_t at = 0; at < bytes; at += FKV_CHUNK_BYTES) {
            uint32_t length =
                (uint32_t)(bytes - at < FKV_CHUNK_BYTES ? bytes - at : FKV_CHUNK_BYTES);
            raw_pages += (uint32_t)PAGES(length);
            if (c->pages + PAGES(length) > s->payload_pages) return false;
            put_chunk(c, payload + at, length);
            if (c->chunks == TRIAL_CHUNKS && c->pages * 8 > raw_pages * 7) return false;
        }
        payload += fkv_raw_stride(bytes, s->aligned);
    }
    return c->pages * 8ull <= s->payload_pages * 7;
}

bool fkv_chunks_encode(const fkv_encode_batch *batch, const fkv_encode_record *record,
                       fkv_record_shape *s, uint8_t *payload, uint32_t *rows)
{
    chunker c = {.rows = rows};
    c.zstd = fkv_zstd_new(true);
    c.scratch = fkv_malloc(FKV_CHUNK_SCRATCH);
    c.out = fkv_malloc(s->payload_pages * FKV_PAGE_BYTES);
    bool pays = c.zstd && c.scratch && c.out && put_blocks(&c, batch, record, s, payload);
    if (pays) {
        memcpy(payload, c.out, (uint64_t)c.pages * FKV_PAGE_BYTES);
        s->aligned = false;
        s->payload_pages = c.pages;
        s->payload_bytes = (uint64_t)c.pages * FKV_PAGE_BYTES;
    }
    fkv_free(c.out), fkv_free(c.scratch);
    fkv_zstd_free(c.zstd);
    return pays;
}
