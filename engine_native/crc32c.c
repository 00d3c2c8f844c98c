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
 *
 * Where carry-less multiplication works on 32 bytes at once, a page's first 1,920 bytes are folded
 * (Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ", Intel 2009) while
 * that instruction checks the others: the two keep different units of the processor busy. Folding
 * moves 16 bytes forward by d bits: their halves times x^(d + 32) and x^(d - 32), modulo the
 * polynomial, are what those halves are worth d bits later.
 */
#include "cpu.h"
#include "flashkv_native.h"
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#define TARGET __attribute__((target("sse4.2")))
#define FOLD_TARGET __attribute__((target("avx2,sse4.2,pclmul,vpclmulqdq")))
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
#if defined(__x86_64__)
/* A page's parts on the way with folding: ROUNDS times ROUND_BYTES folded, and three times
 * ROUND_WORDS words beside each round. */
#define ROUNDS 15u
#define ROUND_BYTES 128u
#define ROUND_WORDS 6u
#define BESIDE_BYTES (ROUNDS * ROUND_WORDS * 8u)
static uint32_t shift_beside[4][256];
static uint64_t fold_by[5][2]; /* by 32, 64, 96 bytes, a round, 16 bytes: for low and high halves */
#endif

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

#if defined(__x86_64__)
/* x^bits modulo the polynomial, as a factor: the highest power in bit 1. */
static uint64_t power(uint32_t bits)
{
    uint32_t crc = 0x80000000;
    while (bits--) crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
    return (uint64_t)crc << 1;
}

static void fill_folding(void)
{
    static const uint32_t bytes[5] = {32, 64, 96, ROUND_BYTES, 16};
    fill_shift(shift_beside, BESIDE_BYTES);
    for (int k = 0; k < 5; k++) {
        fold_by[k][0] = power(8 * bytes[k] + 32);
        fold_by[k][1] = power(8 * bytes[k] - 32);
    }
}
#endif

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
#if defined(__x86_64__)
    fill_folding();
#endif
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

FOLD_TARGET static inline __m256i fold(__m256i bytes, __m256i factors, __m256i ahead)
{
    __m256i low = _mm256_clmulepi64_epi128(bytes, factors, 0x00),
            high = _mm256_clmulepi64_epi128(bytes, factors, 0x11);
    return _mm256_xor_si256(_mm256_xor_si256(low, high), ahead);
}

FOLD_TARGET static inline __m256i factors_of(uint32_t k)
{
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)fold_by[k]));
}

/* The state after what was folded: of 16 bytes that are worth as much. */
FOLD_TARGET static inline uint32_t folded_state(const __m256i sums[4])
{
    __m256i all = fold(sums[2], factors_of(0), sums[3]);
    all = fold(sums[1], factors_of(1), all);
    all = fold(sums[0], factors_of(2), all);
    const __m256i upper = _mm256_castsi128_si256(_mm256_extracti128_si256(all, 1));
    const __m128i rest = _mm256_castsi256_si128(fold(all, factors_of(4), upper));
    const uint64_t half = _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(rest));
    return (uint32_t)_mm_crc32_u64(half, (uint64_t)_mm_extract_epi64(rest, 1));
}

FOLD_TARGET static uint32_t page_folded(uint64_t sequence, uint32_t ordinal, const uint8_t *page)
{
    const uint8_t *beside = page + ROUNDS * ROUND_BYTES;
    const __m256i factors = factors_of(3);
    uint64_t a = 0, b = 0, c = 0;
    uint32_t state = (uint32_t)_mm_crc32_u64(0xFFFFFFFF, sequence);
    state = _mm_crc32_u32(state, ordinal);
    __m256i sums[4];
    for (int k = 0; k < 4; k++) sums[k] = _mm256_setzero_si256();
    for (uint32_t round = 0; round < ROUNDS; round++, page += ROUND_BYTES) {
        for (uint32_t k = 0; k < 4; k++)
            sums[k] = fold(sums[k], factors, _mm256_loadu_si256((const __m256i *)page + k));
        if (round == 0)
            sums[0] = _mm256_xor_si256(sums[0], _mm256_setr_epi32((int)state, 0, 0, 0, 0, 0, 0, 0));
        for (uint32_t k = 0; k < 2; k++) /* what comes next, as in three_parts() */
            _mm_prefetch((const char *)page + FKV_PAGE_BYTES + 64 * k, _MM_HINT_T0);
        for (uint32_t part = 0; part < 3; part++)
            _mm_prefetch((const char *)beside + FKV_PAGE_BYTES + part * BESIDE_BYTES, _MM_HINT_T0);
#pragma GCC unroll 6
        for (uint32_t i = 0; i < ROUND_WORDS; i++, beside += 8) {
            a = _mm_crc32_u64(a, load64(beside));
            b = _mm_crc32_u64(b, load64(beside + BESIDE_BYTES));
            c = _mm_crc32_u64(c, load64(beside + 2 * BESIDE_BYTES));
        }
    }
    state = shifted(shift_beside, folded_state(sums)) ^ (uint32_t)a;
    state = shifted(shift_beside, state) ^ (uint32_t)b;
    state = shifted(shift_beside, state) ^ (uint32_t)c;
    beside += 2 * BESIDE_BYTES;
    return ~(uint32_t)_mm_crc32_u64(_mm_crc32_u64(state, load64(beside)), load64(beside + 8));
}
_Static_assert(FKV_PAGE_BYTES == ROUNDS * ROUND_BYTES + 3 * BESIDE_BYTES + 16,
               "page_folded takes exactly one page");

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
    if (fkv_cpu_has.vpclmul) return page_folded(sequence, ordinal, page);
    if (fkv_cpu_has.sse42) return page_sse42(sequence, ordinal, page);
#endif
    uint8_t seed[12];
    memcpy(seed, &sequence, 8);
    memcpy(seed + 8, &ordinal, 4);
    return fkv_crc32c_portable(fkv_crc32c_portable(0, seed, sizeof seed), page, FKV_PAGE_BYTES);
}
