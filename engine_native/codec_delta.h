/* codec_delta.h: vectors as what changed since the token before; see codec_delta.c. */
#ifndef FLASHKV_CODEC_DELTA_H
#define FLASHKV_CODEC_DELTA_H
#include "flashkv_native.h"

/* Bits that a vector takes behind `before`; NULL: as the first one of a stripe. */
uint32_t fkv_delta_cost(const uint8_t *before, const uint8_t *row, uint32_t vector_bytes);
#endif
