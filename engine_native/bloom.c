/* bloom.c: split-block Bloom filter over block digests: one cache line's half a key, one bit in
 * each of its words.
 *
 * Invariants
 *  - no false negatives: a digest that was added is always found;
 *  - digests are SHA-256 output, so their bits are used as they are: the first 8 bytes choose the
 *    block, the low 40 bits of the last 8 bytes the bit in each of the block's eight words;
 *  - the filter is an array of little-endian 32-bit words, the same on disk; a filter shorter than
 *    a block excludes nothing.
 */
#include "flashkv_native.h"
#include <string.h>

#define BLOCK_BYTES 32u
#define WORDS 8u
#define PREFETCH_AHEAD 16u

static uint64_t block_offset(const uint8_t *digest, uint64_t blocks)
{
    uint64_t high;
    memcpy(&high, digest, 8);
    return (uint64_t)((unsigned __int128)high * blocks >> 64) * BLOCK_BYTES;
}

static void bits_of(const uint8_t *digest, uint32_t bits[WORDS])
{
    uint64_t low;
    memcpy(&low, digest + 8, 8);
    for (unsigned w = 0; w < WORDS; w++) bits[w] = 1u << (low >> (5 * w) & 31);
}

uint64_t fkv_bloom_bytes(uint64_t count, uint32_t bits_per_key)
{
    uint64_t blocks = (count * bits_per_key + 8 * BLOCK_BYTES - 1) / (8 * BLOCK_BYTES);
    return (blocks ? blocks : 1) * BLOCK_BYTES;
}

void fkv_bloom_add(uint8_t *filter, uint64_t length, const uint8_t *digests, uint64_t count,
                   uint32_t stride)
{
    uint64_t blocks = length / BLOCK_BYTES;
    if (blocks == 0) return;
    for (uint64_t i = 0; i < count; i++) {
        const uint8_t *digest = digests + i * stride;
        uint32_t words[WORDS], bits[WORDS];
        uint8_t *block = filter + block_offset(digest, blocks);
        bits_of(digest, bits);
        memcpy(words, block, sizeof words);
        for (unsigned w = 0; w < WORDS; w++) words[w] |= bits[w];
        memcpy(block, words, sizeof words);
    }
}

void fkv_bloom_test(const uint8_t *filter, uint64_t length, const uint8_t *digests, uint64_t count,
                    uint8_t *found)
{
    uint64_t blocks = length / BLOCK_BYTES;
    if (blocks == 0) {
        memset(found, 1, count);
        return;
    }
    for (uint64_t i = 0; i < count; i++) {
        uint32_t words[WORDS], bits[WORDS], missing = 0;
        if (i + PREFETCH_AHEAD < count)
            __builtin_prefetch(
                filter + block_offset(digests + (i + PREFETCH_AHEAD) * FKV_DIGEST_BYTES, blocks));
        memcpy(words, filter + block_offset(digests + i * FKV_DIGEST_BYTES, blocks), sizeof words);
        bits_of(digests + i * FKV_DIGEST_BYTES, bits);
        for (unsigned w = 0; w < WORDS; w++) missing |= bits[w] & ~words[w];
        found[i] = missing == 0;
    }
}
