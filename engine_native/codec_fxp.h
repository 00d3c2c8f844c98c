/* codec_fxp.h: what the two halves of the fixed-width exponent code share; see codec_fxp.c for the
 * format.
 *
 * Invariants
 *  - a function and its _avx2 and _avx512 twins give the same bytes and read the same ones: which of them coded
 *    a page can't be told from the page;
 *  - decoding reads nothing outside [in, in + length), whatever the page holds;
 *  - no base is below FXP_BASE_MIN: base - exponent as a byte is a code, or 7 and more. */
#ifndef FLASHKV_CODEC_FXP_H
#define FLASHKV_CODEC_FXP_H
#include "record.h"
#include <stdbool.h>
#include <string.h>

#define FXP_ESCAPE 7u   /* the code that means: the exponent itself is among the escapes */
#define FXP_SPAN 7u     /* exponents that have a code: base, base - 1 ... base - 6 */
#define FXP_BASE_MIN 6u /* of a channel */
#define FXP_DELTA_MIN 15u
#define FXP_VALUES_MAX (FKV_CODABLE_VECTOR_MAX / 2)
#define FXP_GROUP 64u /* values whose codes are three words */
#define FXP_GROUP_BYTES 24u
#define FXP_PART 16u /* values of what a row has beyond its last group: a word each */
#define FXP_PART_BYTES 8u
#define FXP_SAMPLES 128u /* rows that bases are chosen from: as many, or up to twice as many */
#define FXP_SAMPLES_MAX (2 * FXP_SAMPLES - 1)
#define FXP_BINS 16u /* exponents counted, from the highest one down */

static inline uint32_t fxp_values(uint32_t vector_bytes) { return vector_bytes / 2; }

/* Bytes of three bits a value. */
static inline uint32_t fxp_codes_bytes(uint32_t values)
{
    return values / FXP_GROUP * FXP_GROUP_BYTES
           + (values % FXP_GROUP + FXP_PART - 1) / FXP_PART * FXP_PART_BYTES;
}

/* Bytes of a row in a stripe without its escapes. */
static inline uint32_t fxp_row_bytes(uint32_t values, bool fp16)
{
    return values + fxp_codes_bytes(values) * (fp16 ? 2 : 1);
}

static inline uint32_t fxp_exponent_max(bool fp16) { return fp16 ? 31 : 255; }

/* Of `count` rows every which one bases are chosen from. */
static inline uint32_t fxp_sample_stride(uint32_t count)
{
    return count < 2 * FXP_SAMPLES ? 1 : count / FXP_SAMPLES;
}

/* The base of one channel. */
uint8_t fkv_fxp_choose_channel(const uint64_t *rows, uint32_t count, uint32_t channel, bool fp16);

#if defined(__x86_64__)
/* The twins. bases: of each channel, and up to the next multiple of FXP_GROUP any. */
void fkv_fxp_choose_avx2(const uint64_t *rows, uint32_t count, uint32_t values, bool fp16,
                         uint8_t *bases);
/* Decoding returns where the escapes that it used end, or NULL where there were too few. */
#define FXP_PATH(suffix)                                                                           \
    void fkv_fxp_costs_##suffix(const uint64_t *rows, uint32_t count, uint32_t values, bool fp16,  \
                                const uint8_t *bases, uint16_t *costs);                            \
    uint8_t *fkv_fxp_encode_##suffix(const uint64_t *rows, uint32_t count, uint32_t values,        \
                                     bool fp16, const uint8_t *bases, uint8_t *out);               \
    const uint8_t *fkv_fxp_decode_##suffix(const uint8_t *in, uint32_t length, uint32_t count,     \
                                           uint32_t values, bool fp16, const uint8_t *bases,       \
                                           const uint64_t *rows);
FXP_PATH(avx2)
FXP_PATH(avx512)
#endif
#endif
