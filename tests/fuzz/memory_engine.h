/* memory_engine.h: an engine whose device is memory and whose threads are the caller: the real read
 * path, one thread, and buffers of exactly the size that was asked for.
 *
 * It takes the place of engine.c, pool.c, workers.c and the backends; what it is given to read from
 * stays the caller's.
 */
#ifndef FLASHKV_FUZZ_MEMORY_ENGINE_H
#define FLASHKV_FUZZ_MEMORY_ENGINE_H
#include "fuzz.h"
#include "io.h"

/* Reads of any descriptor find `bytes` from byte `offset` on; in front of it and behind, the file
 * ends. */
void memory_device(const uint8_t *bytes, uint64_t length, uint64_t offset);
fkv_engine *memory_engine_new(uint32_t memory_alignment);
void memory_engine_free(fkv_engine *engine); /* nothing may be on its way, no buffer out */

/* A record of `length` bytes at `page`: its pages' checksums as its own header numbers them, and the
 * header bound to uuid, epoch and page. False where it doesn't begin with whole header pages. */
bool set_record_right(uint8_t *record, uint64_t length, const uint8_t *uuid, uint64_t epoch,
                      uint32_t page);
#endif
