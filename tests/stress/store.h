/* store.h: what store.c lends to writer.c.
 *
 * Invariants
 *  - a function that ends in _locked is called under `flights`;
 *  - a staging buffer is taken again only when no write reads it and the writer doesn't fill it. */
#ifndef FLASHKV_STRESS_STORE_H
#define FLASHKV_STRESS_STORE_H
#include "plane.h"

void run_append(run_list *list, run *one);
/* Submits what is pending, if it is at least so many bytes. */
void plane_launch_locked(plane *plane, uint64_t least);
/* The buffer that is filled, if so many bytes fit, else another one; under `writer`. */
staging *plane_staging_with(plane *plane, uint64_t bytes);
#endif
