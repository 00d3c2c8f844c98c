/* codec_bounded_avx512.c: the bounded code with AVX-512 (F, BW, DQ, VL) and BMI2; the format is in
 * codec_bounded.c.
 *
 * Invariant: same bytes and values as the portable code; all of it is in codec_bounded_core.h. */
#if defined(__x86_64__)
#ifdef __clang__ /* it takes wide vectors where there are any, and knows no such option */
#define WIDE_VECTORS ""
#else
#define WIDE_VECTORS ",prefer-vector-width=512"
#endif
#define PREFIX_TARGET                                                                              \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi,bmi2,"                      \
                          "popcnt" WIDE_VECTORS)))
#define PREFIX_BMI2
#define BOUNDED_MASKS
#define CORE_TARGET PREFIX_TARGET
#include <immintrin.h>
#include "codec_bounded_core.h"

BOUNDED_DEFINE(avx512)
#endif
