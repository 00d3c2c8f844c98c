/* codec_prefix_parameters.c: parameters of the prefix code as a header keeps them, in half the bytes.
 *
 *   base | a nibble for each channel | bytes
 *
 * A nibble below 15 is a place in the table of the channels that are most frequent; 15: the channel's
 * byte is among those behind the nibbles. The first channel has the lower nibble.
 *
 * Invariants
 *  - any parameters come back as they were;
 *  - a reader knows the length before it reads a byte behind it.
 */
#include "codec_prefix.h"

#define FREQUENT 15u

/* Part of table set 1. */
static const uint8_t frequent[FREQUENT] = {PREFIX_WIDE | 3,
                                           PREFIX_WIDE | 2,
                                           PREFIX_WIDE | 1,
                                           PREFIX_WIDE,
                                           PREFIX_WIDE | 4,
                                           3,
                                           2,
                                           1,
                                           0,
                                           PREFIX_STEADY | PREFIX_NEGATIVE | 2,
                                           PREFIX_STEADY | 2,
                                           PREFIX_STEADY | PREFIX_NEGATIVE | 1,
                                           PREFIX_STEADY | 1,
                                           PREFIX_STEADY | PREFIX_NEGATIVE,
                                           PREFIX_STEADY};

static uint8_t place_of[256];

__attribute__((constructor)) static void make_places(void)
{
    memset(place_of, FREQUENT, sizeof place_of);
    for (uint8_t place = 0; place < FREQUENT; place++) place_of[frequent[place]] = place;
}

uint32_t fkv_prefix_pack(const uint8_t *parameters, uint32_t values, uint8_t *out)
{
    uint8_t *nibbles = out + 1, *others = nibbles + (values + 1) / 2;
    *out = *parameters++;
    memset(nibbles, 0, (values + 1) / 2);
    for (uint32_t i = 0; i < values; i++) {
        const uint32_t place = place_of[parameters[i]];
        if (place == FREQUENT) *others++ = parameters[i];
        nibbles[i / 2] |= (uint8_t)(place << 4 * (i & 1));
    }
    return (uint32_t)(others - out);
}

static uint32_t nibble(const uint8_t *packed, uint32_t i)
{
    return packed[1 + i / 2] >> 4 * (i & 1) & 0xFu;
}

uint32_t fkv_prefix_packed_bytes(const uint8_t *packed, uint64_t room, uint32_t values)
{
    uint32_t bytes = 1 + (values + 1) / 2;
    if (bytes > room) return 0;
    for (uint32_t i = 0; i < values; i++) bytes += nibble(packed, i) == FREQUENT;
    return bytes <= room ? bytes : 0;
}

void fkv_prefix_unpack(const uint8_t *packed, uint32_t values, uint8_t *parameters)
{
    const uint8_t *others = packed + 1 + (values + 1) / 2;
    *parameters++ = *packed;
    for (uint32_t i = 0; i < values; i++) {
        const uint32_t place = nibble(packed, i);
        parameters[i] = place == FREQUENT ? *others++ : frequent[place];
    }
}
