/* fuzz_zstd.c: chunks that no encoder wrote, and any bytes through the encoder and back.
 *
 * Input: mode and what to do, length of the chunk (24 bits), then what is stored, or the bytes.
 * Promises: nothing outside what is stored and the chunk is touched; what is taken fills the chunk;
 * what was encoded takes fewer bytes and comes back.
 */
#include "fuzz.h"

#define ROOM 65536u

static void hostile(uint32_t mode, uint32_t length, fuzz_input *in)
{
    size_t stored;
    uint8_t *chunk = take_rest(in, &stored), *out = exactly(length);
    if (stored <= FKV_CHUNK_LENGTH_MASK) {
        int status =
            fkv_zstd_decode((uint32_t)stored | mode << FKV_CHUNK_MODE_SHIFT, chunk, out, length);
        PROMISE(status == FKV_OK || status == FKV_DAMAGED || !fkv_zstd_there());
    }
    give_back(out, length);
    give_back(chunk, stored);
}

static void round_trip(uint32_t mode, fuzz_input *in)
{
    size_t length;
    uint8_t *bytes = take_rest(in, &length);
    const size_t all = length;
    if (length > ROOM) length = ROOM;
    uint8_t *stored = exactly(length), *out = exactly(length);
    uint32_t used = fkv_zstd_encode(mode, bytes, (uint32_t)length, stored, (uint32_t)length);
    PROMISE(used <= length);
    if (used) {
        uint8_t *tight = copied(stored, used);
        PROMISE(fkv_zstd_decode(used | mode << FKV_CHUNK_MODE_SHIFT, tight, out, (uint32_t)length)
                == FKV_OK);
        PROMISE(!memcmp(out, bytes, length));
        give_back(tight, used);
    }
    give_back(out, length);
    give_back(stored, length);
    give_back(bytes, all);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_input in = {data, size};
    uint8_t control = take8(&in);
    uint32_t length = take16(&in) | (uint32_t)take8(&in) << 16;
    if (control & 4)
        round_trip(FKV_CHUNK_ZSTD + control % 2u, &in);
    else
        hostile(control & 3, length % (FKV_CHUNK_BYTES + 1u), &in);
    return 0;
}
