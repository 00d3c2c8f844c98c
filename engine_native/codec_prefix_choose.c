/* codec_prefix_choose.c: which base, kind and steady sign each channel of a stream gets.
 *
 * Invariants
 *  - the choice depends on counts alone, which both code paths give alike;
 *  - parameters made here pass fkv_prefix_plan_make.
 *
 * The price of every (kind, base) is the sum of counts times code lengths; bases are tried from 6
 * below a channel's highest exponent to 1 above it.
 */
#include "codec_prefix.h"
#include "cpu.h"

#define DELTAS 8u
#define DELTA_FIRST (-6)
#define COMBINATIONS (2 * DELTAS)
#define EXCEPTION_BITS 16u /* what a value with another sign than its channel's costs more */

/* [distance from top][kind, delta]: bits. */
static uint32_t prices[16][COMBINATIONS];

void fkv_prefix_make_prices(void)
{
    for (uint32_t kind = 0; kind < 2; kind++)
        for (int k = 0; k < 16; k++)
            for (uint32_t d = 0; d < DELTAS; d++) {
                int at = k + DELTA_FIRST + (int)d - PREFIX_DISTANCE_FIRST;
                bool coded = k < 15 && at >= 0 && at < (int)PREFIX_SYMBOLS;
                uint32_t symbol = coded ? fkv_prefix_symbol[kind][at] : PREFIX_ESCAPE;
                prices[k][kind * DELTAS + d] = fkv_prefix_bits[kind][symbol];
            }
}

typedef struct {
    uint8_t base, flags;
} channel_choice;

static inline __attribute__((always_inline)) void sum_prices(const uint32_t *counts,
                                                             uint32_t sums[COMBINATIONS])
{
    for (uint32_t i = 0; i < COMBINATIONS; i++) sums[i] = 0;
    for (uint32_t k = 0; k < 16; k++)
        for (uint32_t i = 0; i < COMBINATIONS; i++) sums[i] += counts[k] * prices[k][i];
    for (uint32_t i = 0; i < COMBINATIONS; i++) sums[i] = sums[i] * COMBINATIONS + i;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void sum_prices_avx2(const uint32_t *counts,
                                                            uint32_t sums[COMBINATIONS])
{
    sum_prices(counts, sums);
}
#endif

static channel_choice choose_channel(const prefix_counts *c, uint32_t count, bool fp16)
{
    uint32_t sums[COMBINATIONS], best = UINT32_MAX;
    channel_choice choice = {0, 0};
#if defined(__x86_64__)
    if (fkv_cpu_has.avx2)
        sum_prices_avx2(c->all, sums);
    else
#endif
        sum_prices(c->all, sums);
    for (uint32_t i = 0; i < COMBINATIONS; i++) best = sums[i] < best ? sums[i] : best;
    best %= COMBINATIONS;
    int base = c->top + DELTA_FIRST + (int)(best % DELTAS);
    choice.base = (uint8_t)((uint32_t)base & prefix_exponent_max(fp16));
    if (best >= DELTAS) choice.flags = PREFIX_WIDE;
    const uint32_t negatives = c->negatives, positives = count - c->negatives;
    if ((uint64_t)negatives * EXCEPTION_BITS < count)
        choice.flags |= PREFIX_STEADY;
    else if ((uint64_t)positives * EXCEPTION_BITS < count)
        choice.flags |= PREFIX_STEADY | PREFIX_NEGATIVE;
    return choice;
}

/* The base that most channels lie within reach of; the lowest one of equals. */
static uint32_t common_base(const channel_choice *choices, uint32_t values)
{
    uint32_t bins[256 + PREFIX_DELTA_ZERO] = {0}, most = 0, base = 0, sum = 0;
    for (uint32_t c = 0; c < values; c++) bins[choices[c].base + PREFIX_DELTA_ZERO]++;
    for (uint32_t b = 0; b < 256; b++) {
        sum += bins[b + PREFIX_DELTA_ZERO] - bins[b];
        if (sum > most) most = sum, base = b;
    }
    return base;
}

void fkv_prefix_choose(const uint64_t *rows, uint32_t count, uint32_t vector_bytes, uint32_t mode,
                       uint8_t *parameters)
{
    channel_choice choices[PREFIX_VALUES_MAX];
    prefix_counts counts[32];
    const uint32_t values = vector_bytes / 2;
    const bool fp16 = mode == FKV_STREAM_PREFIX_FP16;
    for (uint32_t first = 0; first < values; first += 32) {
        fkv_prefix_count(rows, count, values, first, fp16, counts);
        for (uint32_t i = 0; i < 32 && first + i < values; i++)
            choices[first + i] = choose_channel(&counts[i], count, fp16);
    }
    const uint32_t base = common_base(choices, values);
    *parameters++ = (uint8_t)base;
    for (uint32_t c = 0; c < values; c++) {
        const uint32_t own = choices[c].base;
        uint32_t delta = own < base ? base - own : 0;
        if (delta >= PREFIX_DELTA_ZERO) delta = PREFIX_DELTA_ZERO - (own >= base / 2);
        parameters[c] = (uint8_t)(delta | choices[c].flags);
    }
}
