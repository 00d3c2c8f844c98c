/* codec_values.h: a 16-bit value of a row, and its exponent; for the portable code.
 *
 * Invariant: rows may lie at any address. */
#ifndef FLASHKV_CODEC_VALUES_H
#define FLASHKV_CODEC_VALUES_H
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

static inline uint16_t value_at(const uint8_t *at)
{
    uint16_t value;
    memcpy(&value, at, 2);
    return value;
}

/* fp16: exponents from bit 10 on, else as bfloat16 has them. */
static inline uint32_t exponent_of(uint16_t value, bool fp16)
{
    return fp16 ? value >> 10 & 0x1F : value >> 7 & 0xFF;
}
#endif
