/* cpu.h: which instructions this processor has; asked once; fkv_use_simd() overrides it in tests.
 *
 * Invariants
 *  - a feature is true only where processor and operating system both have it;
 *  - nothing outside cpu.c writes it, and the choice changes speed only, never bytes. */
#ifndef FLASHKV_CPU_H
#define FLASHKV_CPU_H
#include <stdbool.h>

typedef struct {
    bool sse42, avx2, sha_ni, vpclmul;
} fkv_cpu;
extern fkv_cpu fkv_cpu_has;
#endif
