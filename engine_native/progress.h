/* progress.h: what a read and those who wait for its layers share.
 *
 * Invariants
 *  - a layer is settled once all before it are, and nothing holds it; it stays so;
 *  - a read holds every layer before anyone can wait for it, and lets go of none before what is to
 * come of it holds it.
 */
#ifndef FLASHKV_PROGRESS_H
#define FLASHKV_PROGRESS_H
#include "flashkv_native.h"

uint32_t fkv_progress_layers(const fkv_progress *progress);
/* `count` parts of the read, each of which brings something of the layers [first, end). */
void fkv_progress_hold(fkv_progress *progress, uint32_t first, uint32_t end, uint64_t count);
void fkv_progress_release(fkv_progress *progress, uint32_t first, uint32_t end); /* of one part */
#endif
