/* cpu.c: finds once, when the library is loaded, which instructions this processor has.
 *
 * Invariants
 *  - fkv_cpu_has never names an instruction that the processor or the operating system lacks;
 *  - fkv_use_simd() only narrows it, and is meant for tests: nothing may run in the engine
 *    meanwhile;
 *  - every fast path gives the bytes of its portable twin, so the choice is never visible in a
 *    store.
 */
#include "cpu.h"
#include "flashkv_native.h"
#include <stdio.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "the store's structures are used in place");

fkv_cpu fkv_cpu_has;

static char code_paths[96];

static fkv_cpu detect(void)
{
    fkv_cpu found = {0};
#if defined(__x86_64__)
    unsigned eax, ebx = 0, ecx, edx;
    __builtin_cpu_init();
    found.sse42 = __builtin_cpu_supports("sse4.2");
    /* The codec's AVX2 code also uses bit counting; every processor with AVX2 has both, emulators
     * may not. */
    found.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi")
                 && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
    found.avx512 = found.avx2 && __builtin_cpu_supports("avx512f")
                   && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")
                   && __builtin_cpu_supports("avx512vl");
    /* Those before it clock lower for a while after wide registers were in use. */
    found.avx512_wide = found.avx512 && __builtin_cpu_supports("avx512vbmi2");
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) {
        found.sha_ni = (ebx >> 29 & 1) && found.sse42;
        found.vpclmul = (ecx >> 10 & 1) && found.avx2 && found.sse42;
    }
#endif
    return found;
}

void fkv_use_simd(int level)
{
    static const fkv_cpu none = {0};
    fkv_cpu_has = level == 0 ? none : detect();
    if (level == 2) fkv_cpu_has.vpclmul = fkv_cpu_has.avx512 = fkv_cpu_has.avx512_wide = false;
    if (level == 3) fkv_cpu_has.avx512_wide = fkv_cpu_has.avx512;
    snprintf(code_paths, sizeof code_paths, "crc32c=%s sha256=%s codec=%s",
             fkv_cpu_has.vpclmul ? "vpclmul"
             : fkv_cpu_has.sse42 ? "sse4.2"
                                 : "portable",
             fkv_cpu_has.sha_ni ? "sha-ni" : "portable",
             fkv_cpu_has.avx512 ? "avx512"
             : fkv_cpu_has.avx2 ? "avx2"
                                : "portable");
}

const char *fkv_code_paths(void) { return code_paths; }

__attribute__((constructor)) static void detect_at_load(void) { fkv_use_simd(1); }
