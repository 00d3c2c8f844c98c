/* sha256.h: SHA-256 for the other files of the data plane: in pieces, and over a prefix and a key
 * at once.
 *
 * Invariants
 *  - digests are those of FIPS 180-4, with and without the processor's SHA instructions;
 *  - nothing is allocated, and no state is shared: any thread may hash at any time. */
#ifndef FLASHKV_SHA256_H
#define FLASHKV_SHA256_H
#include <stddef.h>
#include <stdint.h>

typedef struct {
    uint32_t state[8];
    uint64_t length_bytes; /* of everything that was added */
    uint8_t pending[64];   /* the last length_bytes % 64 bytes */
} fkv_sha256_stream;

void fkv_sha256_begin(fkv_sha256_stream *stream);
void fkv_sha256_add(fkv_sha256_stream *stream, const uint8_t *data, size_t length);
void fkv_sha256_end(fkv_sha256_stream *stream, uint8_t digest[32]);

/* SHA-256 of a, then b. Made for the short: up to 119 bytes in all take one call of the
 * compression. */
void fkv_sha256_2(const uint8_t *a, size_t an, const uint8_t *b, size_t bn, uint8_t digest[32]);
#endif
