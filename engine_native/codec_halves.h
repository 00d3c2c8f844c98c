/* codec_halves.h: elements of four bytes and of one, seen as the 16-bit values that the exponent codes
 * take; see codec_halves.c.
 *
 * Invariants
 *  - nothing here allocates; scratch is bounded by what fits a page;
 *  - decoding reads nothing outside [in, in + length), whatever the page holds. */
#ifndef FLASHKV_CODEC_HALVES_H
#define FLASHKV_CODEC_HALVES_H
#include "codec_prefix.h"
#include "record.h"

/* The mode of the 16-bit values that a stream's elements are cut into; of others the mode itself. */
static inline uint32_t fkv_mode_of_halves(uint32_t mode)
{
    switch (mode) {
    case FKV_STREAM_FXP_FP32:
    case FKV_STREAM_FXP_FP32_SHORT:
        return FKV_STREAM_FXP_BF16;
    case FKV_STREAM_PREFIX_FP32:
    case FKV_STREAM_PREFIX_FP32_SHORT:
        return FKV_STREAM_PREFIX_BF16;
    default:
        return mode;
    }
}

/* Whether a mode's elements are not 16-bit values themselves. */
static inline bool fkv_mode_cuts(uint32_t mode) { return fkv_mode_element(mode) != 2; }

/* Bytes of an element that are stored as they are. */
static inline uint32_t fkv_mode_rest(uint32_t mode)
{
    return mode == FKV_STREAM_FXP_FP32 || mode == FKV_STREAM_PREFIX_FP32 ? 2 : 0;
}

/* 16-bit values of a vector of `values` elements of a type. */
void fkv_halves_cut(const uint8_t *row, uint32_t values, uint32_t dtype, uint16_t *halves);
/* Whether all of a vector of float32 is in those. */
bool fkv_halves_enough(const uint8_t *row, uint32_t values);
/* What the functions of flashkv_native.h do; plan: of fkv_mode_of_halves() in the prefix modes. */
uint32_t fkv_halves_plan_encode(const uint64_t *rows, uint32_t count, uint32_t vector_bytes,
                                uint32_t mode, const uint8_t *parameters, const prefix_plan *plan,
                                uint8_t *out);
int fkv_halves_plan_decode(const uint8_t *in, uint32_t length, uint32_t count,
                           uint32_t vector_bytes, uint32_t mode, const uint8_t *parameters,
                           const prefix_plan *plan, const uint64_t *rows);
#endif
