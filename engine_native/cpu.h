/* cpu.h: which instructions this processor has; asked once; fkv_use_simd() overrides it in tests.
 *
 * Invariants
 *  - a feature is true only where processor and operating system both have it;
 *  - nothing outside cpu.c writes it, and the choice changes speed only, never bytes. */
#ifndef FLASHKV_CPU_H
#define FLASHKV_CPU_H
#include <stdbool.h>
#include <stdint.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

typedef struct {
    bool sse42, avx2, sha_ni, vpclmul;
    bool avx512;      /* F, BW, DQ and VL; implies avx2 */
    bool avx512_wide; /* and it pays where there is little else to do */
} fkv_cpu;
extern fkv_cpu fkv_cpu_has;

/* Lets this thread's arithmetic keep denormals, which a program may have set it to flush to zero: the
 * bounded code's numbers must not depend on that. Returns what to give back. */
static inline uint32_t fkv_denormals_keep(void)
{
#if defined(__x86_64__)
    const uint32_t before = _mm_getcsr();
    _mm_setcsr(before & ~0x8040u);
    return before;
#else
    return 0;
#endif
}
static inline void fkv_denormals_as(uint32_t before)
{
#if defined(__x86_64__)
    _mm_setcsr(before);
#else
    (void)before;
#endif
}
#endif
