/* codec_bounded_avx2.c: the bounded code with AVX2 and BMI2; the format is in codec_bounded.c.
 *
 * Invariant: same bytes and values as the portable code; all of it is in codec_bounded_core.h. */
#if defined(__x86_64__)
#define PREFIX_TARGET __attribute__((target("avx2,bmi,bmi2,popcnt")))
#define PREFIX_BMI2
#define CORE_TARGET PREFIX_TARGET
#include <immintrin.h>
#include "codec_bounded_core.h"

BOUNDED_DEFINE(avx2)
#endif
