/* sha256.c: SHA-256 (FIPS 180-4) for key digests, namespaces and the token chain.
 *
 * Invariants
 *  - the SHA-NI path and the portable path give the same digests;
 *  - no allocation, no state but the caller's.
 */
#include "sha256.h"
#include "cpu.h"
#include "flashkv_native.h"
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define BLOCK_BYTES 64u
#define PADDING_MIN_BYTES 9u /* the bit behind the message and its length */

static const uint32_t initial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

static const uint32_t constants[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static inline uint32_t rotate(uint32_t x, unsigned by) { return x >> by | x << (32 - by); }

static void compress_portable(uint32_t state[8], const uint8_t *data, size_t blocks)
{
    for (; blocks; blocks--, data += BLOCK_BYTES) {
        uint32_t w[64], s[8];
        for (int i = 0; i < 16; i++) {
            memcpy(&w[i], data + 4 * i, 4);
            w[i] = __builtin_bswap32(w[i]);
        }
        for (int i = 16; i < 64; i++)
            w[i] = w[i - 16] + w[i - 7]
                   + (rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3)
                   + (rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10);
        memcpy(s, state, sizeof s);
        for (int i = 0; i < 64; i++) {
            uint32_t t1 = s[7] + (rotate(s[4], 6) ^ rotate(s[4], 11) ^ rotate(s[4], 25))
                          + ((s[4] & s[5]) ^ (~s[4] & s[6])) + constants[i] + w[i];
            uint32_t t2 = (rotate(s[0], 2) ^ rotate(s[0], 13) ^ rotate(s[0], 22))
                          + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
            memmove(s + 1, s, 7 * sizeof *s);
            s[4] += t1;
            s[0] = t1 + t2;
        }
        for (int i = 0; i < 8; i++) state[i] += s[i];
    }
}

#if defined(__x86_64__)
/* The instructions keep the state as (a, b, e, f) and (c, d, g, h), highest word first, and do two
 * rounds a call. */
__attribute__((target("sha,sse4.1,ssse3"))) static void
compress_sha_ni(uint32_t state[8], const uint8_t *data, size_t blocks)
{
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i dcba = _mm_loadu_si128((const __m128i *)state);
    __m128i hgfe = _mm_loadu_si128((const __m128i *)(state + 4));
    __m128i badc = _mm_shuffle_epi32(dcba, 0xB1), efgh = _mm_shuffle_epi32(hgfe, 0x1B);
    __m128i abef = _mm_alignr_epi8(badc, efgh, 8);
    __m128i cdgh = _mm_blend_epi16(efgh, badc, 0xF0);

    for (; blocks; blocks--, data += BLOCK_BYTES) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[4];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            __m128i now;
            if (i < 4) {
                now = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(data + 16 * i)), swap);
            } else { /* w[t-16] + s0(w[t-15]) + w[t-7], then s1(w[t-2]), four words at once */
                now = _mm_sha256msg1_epu32(w[i & 3], w[(i + 1) & 3]);
                now = _mm_add_epi32(now, _mm_alignr_epi8(w[(i + 3) & 3], w[(i + 2) & 3], 4));
                now = _mm_sha256msg2_epu32(now, w[(i + 3) & 3]);
            }
            w[i & 3] = now;
            __m128i sum = _mm_add_epi32(now, _mm_load_si128((const __m128i *)(constants + 4 * i)));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0E));
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    __m128i feba = _mm_shuffle_epi32(abef, 0x1B), dchg = _mm_shuffle_epi32(cdgh, 0xB1);
    _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(feba, dchg, 0xF0));
    _mm_storeu_si128((__m128i *)(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}
#endif

static inline void compress(uint32_t state[8], const uint8_t *data, size_t blocks)
{
#if defined(__x86_64__)
    if (fkv_cpu_has.sha_ni) {
        compress_sha_ni(state, data, blocks);
        return;
    }
#endif
    compress_portable(state, data, blocks);
}

static void store_digest(const uint32_t state[8], uint8_t digest[32])
{
    for (int i = 0; i < 8; i++) {
        uint32_t word = __builtin_bswap32(state[i]);
        memcpy(digest + 4 * i, &word, 4);
    }
}

/* Pads a buffer of two blocks that holds the message's last `used` < 64 (or, both blocks free, <=
 * 119) bytes; returns how many blocks are to be compressed. */
static size_t pad(uint8_t buffer[2 * BLOCK_BYTES], size_t used, uint64_t length_bytes)
{
    size_t blocks = (used + PADDING_MIN_BYTES + BLOCK_BYTES - 1) / BLOCK_BYTES;
    uint64_t bits = __builtin_bswap64(length_bytes * 8);
    memset(buffer + used, 0, blocks * BLOCK_BYTES - used);
    buffer[used] = 0x80;
    memcpy(buffer + blocks * BLOCK_BYTES - 8, &bits, 8);
    return blocks;
}

void fkv_sha256_begin(fkv_sha256_stream *stream)
{
    memcpy(stream->state, initial, sizeof initial);
    stream->length_bytes = 0;
}

void fkv_sha256_add(fkv_sha256_stream *stream, const uint8_t *data, size_t length)
{
    size_t held = stream->length_bytes % BLOCK_BYTES;
    if (length == 0) return;
    stream->length_bytes += length;
    if (held) {
        size_t taken = BLOCK_BYTES - held < length ? BLOCK_BYTES - held : length;
        memcpy(stream->pending + held, data, taken);
        if (held + taken < BLOCK_BYTES) return;
        compress(stream->state, stream->pending, 1);
        data += taken;
        length -= taken;
    }
    if (length >= BLOCK_BYTES) compress(stream->state, data, length / BLOCK_BYTES);
    memcpy(stream->pending, data + length / BLOCK_BYTES * BLOCK_BYTES, length % BLOCK_BYTES);
}

void fkv_sha256_end(fkv_sha256_stream *stream, uint8_t digest[32])
{
    uint8_t buffer[2 * BLOCK_BYTES];
    size_t held = stream->length_bytes % BLOCK_BYTES;
    memcpy(buffer, stream->pending, held);
    compress(stream->state, buffer, pad(buffer, held, stream->length_bytes));
    store_digest(stream->state, digest);
}

void fkv_sha256_2(const uint8_t *a, size_t an, const uint8_t *b, size_t bn, uint8_t digest[32])
{
    if (an + bn <= 2 * BLOCK_BYTES - PADDING_MIN_BYTES) {
        uint8_t buffer[2 * BLOCK_BYTES];
        uint32_t state[8];
        memcpy(state, initial, sizeof initial);
        if (an) memcpy(buffer, a, an);
        if (bn) memcpy(buffer + an, b, bn);
        compress(state, buffer, pad(buffer, an + bn, an + bn));
        store_digest(state, digest);
        return;
    }
    fkv_sha256_stream stream;
    fkv_sha256_begin(&stream);
    fkv_sha256_add(&stream, a, an);
    fkv_sha256_add(&stream, b, bn);
    fkv_sha256_end(&stream, digest);
}

void fkv_sha256(const uint8_t *data, size_t length, uint8_t *digest)
{
    fkv_sha256_2(data, length, NULL, 0, digest);
}

void fkv_sha256_portable(const uint8_t *data, size_t length, uint8_t *digest)
{
    uint32_t state[8];
    uint8_t buffer[2 * BLOCK_BYTES];
    size_t whole = length / BLOCK_BYTES;
    memcpy(state, initial, sizeof initial);
    compress_portable(state, data, whole);
    if (length % BLOCK_BYTES) memcpy(buffer, data + whole * BLOCK_BYTES, length % BLOCK_BYTES);
    compress_portable(state, buffer, pad(buffer, length % BLOCK_BYTES, length));
    store_digest(state, digest);
}

void fkv_token_chain(const uint8_t *seed, const int32_t *tokens, uint64_t count, uint32_t granule,
                     const uint8_t *extra, size_t extra_length, uint8_t *out)
{
    if (granule == 0) return;
    for (uint64_t first = 0; first < count; first += granule, out += 32) {
        uint64_t taken = count - first < granule ? count - first : granule;
        fkv_sha256_stream stream;
        fkv_sha256_begin(&stream);
        fkv_sha256_add(&stream, seed, 32);
        fkv_sha256_add(&stream, (const uint8_t *)(tokens + first), taken * sizeof *tokens);
        fkv_sha256_add(&stream, extra, extra_length);
        fkv_sha256_end(&stream, out);
        seed = out;
    }
}
