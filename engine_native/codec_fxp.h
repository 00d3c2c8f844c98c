/* codec_fxp.h: what the two halves of the fixed-width exponent code share; see codec_fxp.c for the
 * format.
 *
 * Invariants
 *  - a function and its _avx2 twin give the same bytes and read the same ones: which of them coded
 *    a page can't be told from the page;
 *  - decoding reads nothing outside [in, in + length), whatever the page holds. */
#ifndef FLASHKV_CODEC_FXP_H
#define FLASHKV_CODEC_FXP_H
#include "flashkv_native.h"

#define FXP_ESCAPE 7u /* the code that means: the exponent itself is among the escapes */
#define FXP_SPAN 7u   /* exponents that have a code: base, base - 1 ... base - 6 */

/* Channels of a vector in the two exponent modes. */
static inline uint32_t fkv_fxp_values(uint32_t vector_bytes) { return vector_bytes / 2; }

static inline uint32_t fkv_fxp_bases_bytes(uint32_t vector_bytes)
{
    return (vector_bytes / 2 + FKV_STREAM_GROUP - 1) / FKV_STREAM_GROUP;
}

/* Bytes of a row in a stripe without its escapes. */
static inline uint64_t fkv_fxp_row_bytes(uint32_t vector_bytes, uint32_t mode)
{
    uint64_t values = vector_bytes / 2, plane = (values + 7) / 8;
    if (mode == FKV_STREAM_PLAIN) return vector_bytes;
    return values + plane * (mode == FKV_STREAM_FXP_FP16 ? 6 : 3);
}

static inline uint32_t fkv_fxp_exponent_max(uint32_t mode)
{
    return mode == FKV_STREAM_FXP_FP16 ? 31 : 255;
}

/* The window of FXP_SPAN exponents that holds most of `bins` (one count an exponent), by its upper
 * end. */
uint8_t fkv_fxp_best_base(const uint32_t *bins, uint32_t exponent_max);
/* Counts one group's exponents: `channels` values from byte `offset` of every row. */
void fkv_fxp_count(const uint64_t *rows, uint32_t count, uint32_t offset, uint32_t channels,
                   uint32_t mode, uint32_t *bins);

#if defined(__x86_64__)
/* The twins of the functions in flashkv_native.h, modes FXP_* only. Bases of encode and costs are
 * >= FXP_SPAN - 1. */
void fkv_fxp_choose_avx2(const uint64_t *rows, uint32_t count, uint32_t vector_bytes, uint32_t mode,
                         uint8_t *bases);
void fkv_fxp_costs_avx2(const uint64_t *rows, uint32_t count, uint32_t vector_bytes, uint32_t mode,
                        const uint8_t *bases, uint16_t *costs);
uint8_t *fkv_fxp_encode_avx2(const uint64_t *rows, uint32_t count, uint32_t vector_bytes,
                             uint32_t mode, const uint8_t *bases, uint8_t *out);
/* Returns where the escapes that it used end, or NULL where there were too few. */
const uint8_t *fkv_fxp_decode_avx2(const uint8_t *in, uint32_t length, uint32_t count,
                                   uint32_t vector_bytes, uint32_t mode, const uint8_t *bases,
                                   const uint64_t *rows);
#endif
#endif
