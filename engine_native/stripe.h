/* stripe.h: decoding one stripe of a coded record, whatever its stream's mode.
 *
 * Invariants
 *  - the plan that is kept is that of one stream of one header: whoever goes on to another header
 *    begins with none. */
#ifndef FLASHKV_STRIPE_H
#define FLASHKV_STRIPE_H
#include "codec_bounded.h"
#include "codec_prefix.h"
#include "record.h"

/* The plan of the stream that was decoded last: most stripes of an extent follow one another in
 * theirs. */
typedef struct {
    uint32_t stream; /* FKV_NO_STREAM: none */
    union {
        prefix_plan plan;
        bounded_plan bounded;
    };
} fkv_last_plan;
#define FKV_NO_STREAM UINT32_MAX

/* Vectors of a stripe to rows[]; 0: not wanted. in: the stripe's bytes. False: damaged. */
bool fkv_stripe_decode(const fkv_header *header, const fkv_stripe *stripe, uint32_t vector_bytes,
                       fkv_last_plan *last, const uint8_t *in, const uint64_t *rows);
#endif
