/* codec_zstd.c: a chunk of opaque bytes in one of three modes.
 *
 *   FKV_CHUNK_PLAIN   the bytes
 *   FKV_CHUNK_ZSTD    a zstd frame
 *   FKV_CHUNK_HALVES  bytes 0, 2, 4 ... as they are, then a zstd frame of bytes 1, 3, 5 ...: of 16-bit
 *                     floats the lower byte is noise, and the upper one compresses better without it
 *
 * Invariants
 *  - a frame is one of today's format (old ones, which zstd still reads, are refused), fills its
 *    place alone and gives exactly as many bytes as that says; the decompressor writes nowhere else
 *    and takes no memory that a frame asks for;
 *  - zstd's own memory is the only memory here that doesn't come from allocate.h.
 */
#include "codec_zstd.h"
#include "allocate.h"
#include <dlfcn.h>
#include <string.h>

#define LEVEL 1 /* higher ones cost a multiple of the time for some per mille */
static const uint8_t magic[4] = {0x28, 0xB5, 0x2F, 0xFD};

/* zstd's simple interface, which has not changed since 1.4. */
typedef struct {
    void *(*compressor_new)(void);
    size_t (*compressor_free)(void *);
    size_t (*compress)(void *, void *, size_t, const void *, size_t, int);
    void *(*decompressor_new)(void);
    size_t (*decompressor_free)(void *);
    size_t (*decompress)(void *, void *, size_t, const void *, size_t);
    size_t (*frame_bytes)(const void *, size_t);
    unsigned (*is_error)(size_t);
} zstd_functions;

static zstd_functions zstd;
static bool there, wanted = true;
static pthread_once_t looked = PTHREAD_ONCE_INIT;

static bool look_up(void *library, const char *name, void *function)
{
    void *found = dlsym(library, name);
    memcpy(function, &found, sizeof found); /* ISO C has no cast for this */
    return found != NULL;
}

static void look(void)
{
    void *library = dlopen("libzstd.so.1", RTLD_NOW | RTLD_LOCAL);
    there = library && look_up(library, "ZSTD_createCCtx", &zstd.compressor_new)
            && look_up(library, "ZSTD_freeCCtx", &zstd.compressor_free)
            && look_up(library, "ZSTD_compressCCtx", &zstd.compress)
            && look_up(library, "ZSTD_createDCtx", &zstd.decompressor_new)
            && look_up(library, "ZSTD_freeDCtx", &zstd.decompressor_free)
            && look_up(library, "ZSTD_decompressDCtx", &zstd.decompress)
            && look_up(library, "ZSTD_findFrameCompressedSize", &zstd.frame_bytes)
            && look_up(library, "ZSTD_isError", &zstd.is_error);
}

int fkv_zstd_there(void)
{
    pthread_once(&looked, look);
    return there && __atomic_load_n(&wanted, __ATOMIC_RELAXED);
}

void fkv_use_zstd(int want) { __atomic_store_n(&wanted, want != 0, __ATOMIC_RELAXED); }

struct fkv_zstd {
    void *compressor, *decompressor;
};

fkv_zstd *fkv_zstd_new(bool compress)
{
    fkv_zstd *z = fkv_zstd_there() ? fkv_calloc(1, sizeof *z) : NULL;
    if (!z) return NULL;
    if (compress)
        z->compressor = zstd.compressor_new();
    else
        z->decompressor = zstd.decompressor_new();
    if (z->compressor || z->decompressor) return z;
    fkv_free(z);
    return NULL;
}

void fkv_zstd_free(fkv_zstd *z)
{
    if (!z) return;
    if (z->compressor) zstd.compressor_free(z->compressor);
    if (z->decompressor) zstd.decompressor_free(z->decompressor);
    fkv_free(z);
}

static uint32_t frame_put(fkv_zstd *z, const uint8_t *in, uint32_t length, uint8_t *out,
                          uint32_t room)
{
    size_t bytes = zstd.compress(z->compressor, out, room, in, length, LEVEL);
    return zstd.is_error(bytes) ? 0 : (uint32_t)bytes;
}

static bool frame_get(fkv_zstd *z, const uint8_t *in, uint32_t stored, uint8_t *out,
                      uint32_t length)
{
    if (stored < sizeof magic || memcmp(in, magic, sizeof magic)) return false;
    if (zstd.frame_bytes(in, stored) != stored) return false; /* the decompressor takes several */
    return zstd.decompress(z->decompressor, out, length, in, stored) == length;
}

uint32_t fkv_chunk_encode(fkv_zstd *z, uint32_t mode, const uint8_t *in, uint32_t length,
                          uint8_t *scratch, uint8_t *out, uint32_t room)
{
    const uint32_t upper = length / 2, lower = length - upper;
    if (mode == FKV_CHUNK_ZSTD) return frame_put(z, in, length, out, room);
    if (!upper || lower >= room) return 0;
    for (uint32_t i = 0; i < upper; i++) out[i] = in[2 * i], scratch[i] = in[2 * i + 1];
    if (lower > upper) out[upper] = in[length - 1];
    const uint32_t bytes = frame_put(z, scratch, upper, out + lower, room - lower);
    return bytes ? lower + bytes : 0;
}

bool fkv_chunk_decode(fkv_zstd *z, uint32_t row, const uint8_t *in, uint8_t *scratch, uint8_t *out,
                      uint32_t length)
{
    const uint32_t upper = length / 2, lower = length - upper, stored = fkv_chunk_stored(row);
    if (fkv_chunk_mode(row) == FKV_CHUNK_PLAIN) {
        if (stored == length) memcpy(out, in, length);
        return stored == length;
    }
    if (fkv_chunk_mode(row) == FKV_CHUNK_ZSTD) return frame_get(z, in, stored, out, length);
    if (fkv_chunk_mode(row) != FKV_CHUNK_HALVES || !upper || stored <= lower
        || !frame_get(z, in + lower, stored - lower, scratch, upper))
        return false;
    for (uint32_t i = 0; i < upper; i++) out[2 * i] = in[i], out[2 * i + 1] = scratch[i];
    if (lower > upper) out[length - 1] = in[upper];
    return true;
}

/* ---- for tests ---- */

int fkv_zstd_decode(uint32_t row, const uint8_t *in, uint8_t *out, uint32_t length)
{
    fkv_zstd *z = fkv_zstd_new(false);
    uint8_t *scratch = fkv_malloc(FKV_CHUNK_SCRATCH);
    int status = FKV_NO_MEMORY;
    if (z && scratch && length <= FKV_CHUNK_BYTES)
        status = fkv_chunk_decode(z, row, in, scratch, out, length) ? FKV_OK : FKV_DAMAGED;
    fkv_free(scratch);
    fkv_zstd_free(z);
    return status;
}

uint32_t fkv_zstd_encode(uint32_t mode, const uint8_t *in, uint32_t length, uint8_t *out,
                         uint32_t room)
{
    fkv_zstd *z = fkv_zstd_new(true);
    uint8_t *scratch = fkv_malloc(FKV_CHUNK_SCRATCH);
    uint32_t bytes = 0;
    if (z && scratch && length <= FKV_CHUNK_BYTES)
        bytes = fkv_chunk_encode(z, mode, in, length, scratch, out, room);
    fkv_free(scratch);
    fkv_zstd_free(z);
    return bytes;
}
