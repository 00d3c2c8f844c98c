/* codec_delta.c: a stripe of vectors, each as what changed since the one before: for streams that stand
 * still, or nearly so.
 *
 *   changed | vectors that changed
 *   changed   a bit for each vector, lowest first, rounded up to a byte: set if it differs from the one
 *             before; the first one is compared with zeros
 *   vector    a map of ceil(vector_bytes / 8) bytes: bit i of byte j is set where byte 8j + i of this
 *             vector XOR the one before isn't 0; then those bytes
 *
 * Invariants
 *  - exact for every byte; a stripe decodes without the one before it;
 *  - one form for everything: no map is empty, no byte that is stored is 0, padding is 0;
 *  - decoding reads nothing outside in[0, length) and writes whole wanted rows only.
 */
#include "codec_delta.h"
#include "record.h"
#include <string.h>

/* A bit for each byte of a word that isn't 0. */
static uint32_t byte_map(uint64_t word)
{
    word |= word >> 4, word |= word >> 2, word |= word >> 1;
    return (uint32_t)((word & 0x0101010101010101u) * 0x0102040810204080u >> 56);
}

/* Up to 8 bytes of the difference; those past the end are 0. */
static uint64_t difference(const uint8_t *before, const uint8_t *row, uint32_t at,
                           uint32_t vector_bytes)
{
    uint64_t a = 0, b = 0;
    const uint32_t bytes = vector_bytes - at < 8 ? vector_bytes - at : 8;
    memcpy(&b, row + at, bytes);
    if (before) memcpy(&a, before + at, bytes);
    return a ^ b;
}

uint32_t fkv_delta_cost(const uint8_t *before, const uint8_t *row, uint32_t vector_bytes)
{
    uint32_t bytes = 0; /* that differ: a plain loop, which compilers make vectors of */
    if (before)
        for (uint32_t at = 0; at < vector_bytes; at++) bytes += row[at] != before[at];
    else
        for (uint32_t at = 0; at < vector_bytes; at++) bytes += row[at] != 0;
    return bytes ? 1 + 8 * (bytes + (vector_bytes + 7) / 8) : 1;
}

void fkv_delta_costs(const uint64_t *rows, uint32_t count, uint32_t vector_bytes, uint16_t *bits)
{
    const uint8_t *before = NULL;
    for (uint32_t r = 0; r < count; r++) {
        const uint8_t *row = (const uint8_t *)(uintptr_t)rows[r];
        uint32_t cost = fkv_delta_cost(before, row, vector_bytes);
        bits[r] = cost < UINT16_MAX ? (uint16_t)cost : UINT16_MAX;
        before = row;
    }
}

uint32_t fkv_delta_encode(const uint64_t *rows, uint32_t count, uint32_t vector_bytes, uint8_t *out)
{
    const uint32_t map_bytes = (vector_bytes + 7) / 8;
    const uint8_t *before = NULL;
    uint8_t *changed = out, *to = out + (count + 7) / 8;
    memset(changed, 0, (size_t)(to - out));
    for (uint32_t r = 0; r < count; r++) {
        const uint8_t *row = (const uint8_t *)(uintptr_t)rows[r];
        if (fkv_delta_cost(before, row, vector_bytes) > 1) {
            uint8_t *map = to;
            changed[r / 8] |= (uint8_t)(1 << r % 8);
            to += map_bytes;
            for (uint32_t at = 0; at < vector_bytes; at += 8) {
                const uint64_t word = difference(before, row, at, vector_bytes);
                uint32_t left = byte_map(word);
                map[at / 8] = (uint8_t)left;
                for (; left; left &= left - 1) *to++ = (uint8_t)(word >> 8 * __builtin_ctz(left));
            }
        }
        before = row;
    }
    return (uint32_t)(to - out);
}

/* Applies a vector's changes to the one before; the end of what was read, or NULL: damaged. */
static const uint8_t *apply(const uint8_t *in, const uint8_t *end, uint32_t vector_bytes,
                            uint8_t *vector)
{
    const uint32_t map_bytes = (vector_bytes + 7) / 8;
    const uint8_t *map = in;
    uint32_t any = 0;
    if ((size_t)(end - in) < map_bytes) return NULL;
    in += map_bytes;
    for (uint32_t j = 0; j < map_bytes; j++) {
        uint32_t left = map[j];
        any |= left;
        if (j + 1 == map_bytes && vector_bytes % 8 && left >> vector_bytes % 8) return NULL;
        for (; left; left &= left - 1) {
            if (in == end || !*in) return NULL;
            vector[8 * j + (uint32_t)__builtin_ctz(left)] ^= *in++;
        }
    }
    return any ? in : NULL;
}

int fkv_delta_decode(const uint8_t *in, uint32_t length, uint32_t count, uint32_t vector_bytes,
                     const uint64_t *rows)
{
    uint8_t vector[FKV_CODABLE_VECTOR_MAX] = {0};
    const uint8_t *end = in + length, *at = in + (count + 7ull) / 8;
    if (!vector_bytes || vector_bytes > sizeof vector || (count + 7ull) / 8 > length) return -1;
    if (count % 8 && in[count / 8] >> count % 8) return -1;
    for (uint32_t r = 0; r < count; r++) {
        if (in[r / 8] >> r % 8 & 1) at = apply(at, end, vector_bytes, vector);
        if (!at) return -1;
        if (rows[r]) memcpy((uint8_t *)(uintptr_t)rows[r], vector, vector_bytes);
    }
    return at == end ? 0 : -1;
}
