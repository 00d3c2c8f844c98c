/* crc32c.c: CRC-32C (Castagnoli), the checksum of every page, header and table.
 *
 * Invariants
 *  - the usual convention: fkv_crc32c(0, "123456789", 9) == 0xE3069283, and the checksum of a
 *    concatenation is fkv_crc32c(crc of the first part, second part);
 *  - both paths give the same result for every length and alignment;
 *  - the tables are filled when the library is loaded and never change.
 *
 * The SSE4.2 instruction takes a new word every cycle but answers after three, so three parts of a
 * block are checked side by side and joined: crc(A|B) = shift(crc(A), len(B)) ^ crc(B), where
 * shift, appending zero bytes, is linear and hence four table look-ups. The long part is made for
 * pages: 3 * 1360 + 16 = 4096.
 */
#include "cpu.h"
#include "flashkv_native.h"
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#define TARGET __attribute__((target("sse4.2")))
#endif

#define POLYNOMIAL 0x82F63B78u /* 0x1EDC6F41, bits reversed */
#define LONG_BYTES 1360u
#define SHORT_BYTES 168u
#define AHEAD_BYTES 16u /* between the three parts of a page and those of the next */

/* slices[k][b]: checksum of byte b with k zero bytes behind it.
 * shift_*[k][b]: what byte k of a checksum, being b, becomes by that many zero bytes. */
static uint32_t slices[8][256];
static uint32_t shift_long[4][256];
static uint32_t shift_short[4][256];

static void fill_shift(uint32_t table[4][256], uint32_t bytes)
{
    /* Basis first: one bit at a time through the zero bytes; every other row is a sum of basis
     * rows. */
    for (int k = 0; k < 4; k++) {
        for (int bit = 0; bit < 8; bit++) {
            uint32_t crc = 1u << (8 * k + bit);
            for (uint32_t i = 0; i < bytes; i++) crc = crc >> 8 ^ slices[0][crc & 0xFF];
            table[k][1 << bit] = crc;
        }
        table[k][0] = 0;
        for (int b = 1; b < 256; b++) table[k][b] = table[k][b & (b - 1)] ^ table[k][b & -b];
    }
}

__attribute__((constructor)) static void fill_tables(void)
{
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t crc = b;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
        slices[0][b] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (int b = 0; b < 256; b++)
            slices[k][b] = slices[k - 1][b] >> 8 ^ slices[0][slices[k - 1][b] & 0xFF];
    fill_shift(shift_long, LONG_BYTES);
    fill_shift(shift_short, SHORT_BYTES);
}

uint32_t fkv_crc32c_portable(uint32_t crc, const uint8_t *data, size_t length)
{
    crc = ~crc;
    for (; length >= 8; data += 8, length -= 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        word ^= crc;
        crc = slices[7][word & 0xFF] ^ slices[6][word >> 8 & 0xFF] ^ slices[5][word >> 16 & 0xFF]
              ^ slices[4][word >> 24 & 0xFF] ^ slices[3][word >> 32 & 0xFF]
              ^ slices[2][word >> 40 & 0xFF] ^ slices[1][word >> 48 & 0xFF] ^ slices[0][word >> 56];
    }
    for (; length; data++, length--) crc = crc >> 8 ^ slices[0][(crc ^ *data) & 0xFF];
    return ~crc;
}

#if defined(__x86_64__)
static inline uint64_t load64(const uint8_t *data)
{
    uint64_t word;
    memcpy(&word, data, 8);
    return word;
}

static inline uint32_t shifted(const uint32_t table[4][256], uint32_t crc)
{
    return table[0][crc & 0xFF] ^ table[1][crc >> 8 & 0xFF] ^ table[2][crc >> 16 & 0xFF]
           ^ table[3][crc >> 24];
}

/* The state after three parts of `part` bytes each (a multiple of 8). */
TARGET static inline __attribute__((always_inline)) uint32_t
three_parts(uint32_t state, const uint8_t *data, uint32_t part, const uint32_t table[4][256])
{
    uint64_t a = state, b = 0, c = 0;
    for (uint32_t i = 0; i < part; i += 8) {
        if (i % 64 == 0) { /* what comes next: from memory it takes longer than to check this */
            _mm_prefetch((const char *)(data + 3 * part + AHEAD_BYTES + i), _MM_HINT_T0);
            _mm_prefetch((const char *)(data + 4 * part + AHEAD_BYTES + i), _MM_HINT_T0);
            _mm_prefetch((const char *)(data + 5 * part + AHEAD_BYTES + i), _MM_HINT_T0);
        }
        a = _mm_crc32_u64(a, load64(data + i));
        b = _mm_crc32_u64(b, load64(data + part + i));
        c = _mm_crc32_u64(c, load64(data + 2 * part + i));
    }
    return shifted(table, shifted(table, (uint32_t)a) ^ (uint32_t)b) ^ (uint32_t)c;
}

TARGET static uint32_t sse42(uint32_t state, const uint8_t *data, size_t length)
{
    for (; length >= 3 * LONG_BYTES; data += 3 * LONG_BYTES, length -= 3 * LONG_BYTES)
        state = three_parts(state, data, LONG_BYTES, shift_long);
    for (; length >= 3 * SHORT_BYTES; data += 3 * SHORT_BYTES, length -= 3 * SHORT_BYTES)
        state = three_parts(state, data, SHORT_BYTES, shift_short);
    uint64_t wide = state;
    for (; length >= 8; data += 8, length -= 8) wide = _mm_crc32_u64(wide, load64(data));
    state = (uint32_t)wide;
    for (; length; data++, length--) state = _mm_crc32_u8(state, *data);
    return state;
}

TARGET static uint32_t page_sse42(uint64_t sequence, uint32_t ordinal, const uint8_t *page)
{
    uint32_t state = (uint32_t)_mm_crc32_u64(0xFFFFFFFF, sequence);
    state = three_parts(_mm_crc32_u32(state, ordinal), page, LONG_BYTES, shift_long);
    page += 3 * LONG_BYTES;
    return ~(uint32_t)_mm_crc32_u64(_mm_crc32_u64(state, load64(page)), load64(page + 8));
}
_Static_assert(FKV_PAGE_BYTES == 3 * LONG_BYTES + 16, "page_sse42 takes exactly one page");
#endif

uint32_t fkv_crc32c(uint32_t crc, const uint8_t *data, size_t length)
{
#if defined(__x86_64__)
    if (fkv_cpu_has.sse42) return ~sse42(~crc, data, length);
#endif
    return fkv_crc32c_portable(crc, data, length);
}

/* CRC-32C over the sequence (8 bytes), the ordinal (4) and the page, so that a page in another
 * record's place, or another page of the same record, is damage. */
uint32_t fkv_page_crc(uint64_t sequence, uint32_t ordinal, const uint8_t *page)
{
#if defined(__x86_64__)
    if (fkv_cpu_has.sse42) return page_sse42(sequence, ordinal, page);
#endif
    uint8_t seed[12];
    memcpy(seed, &sequence, 8);
    memcpy(seed + 8, &ordinal, 4);
    return fkv_crc32c_portable(fkv_crc32c_portable(0, seed, sizeof seed), page, FKV_PAGE_BYTES);
}
