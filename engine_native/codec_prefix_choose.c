/* codec_prefix_choose.c: which base, kind and steady sign each channel of a stream gets.
 *
 * Invariants
 *  - the choice depends on counts alone, which both code paths give alike;
 *  - parameters made here pass fkv_prefix_plan_make.
 *
 * The price of every (kind, base) is the sum of counts times code lengths; bases are tried from 6
 * below a channel's highest exponent to 1 above it. Sums are of 16 bits: counts of more tokens than
 * those can take are shifted down.
 */
#include "codec_prefix.h"
#include "cpu.h"

#define DELTA_FIRST (-6)
#define EXCEPTION_BITS 13u /* what a value with another sign than its channel's costs more */
#define COUNT_MAX 3855u    /* times the longest code, 17 bits: less than 65,536 */

uint16_t fkv_prefix_prices[16][PREFIX_COMBINATIONS]; /* [distance from top][kind, delta]: bits */

void fkv_prefix_make_prices(void)
{
    for (uint32_t kind = 0; kind < 2; kind++)
        for (int k = 0; k < 16; k++)
            for (uint32_t d = 0; d < PREFIX_DELTAS; d++) {
                int at = k + DELTA_FIRST + (int)d - PREFIX_DISTANCE_FIRST;
                bool coded = k < 15 && at >= 0 && at < (int)PREFIX_SYMBOLS;
                uint32_t symbol = coded ? fkv_prefix_symbol[kind][at] : PREFIX_ESCAPE;
                fkv_prefix_prices[k][kind * PREFIX_DELTAS + d] = fkv_prefix_bits[kind][symbol];
            }
}

/* The cheapest combination of each channel; the first one of equals. */
static void best_portable(const prefix_counts *counts, uint32_t shift, uint8_t best[PREFIX_STEP])
{
    for (uint32_t i = 0; i < PREFIX_STEP; i++) {
        uint32_t least = UINT32_MAX;
        for (uint32_t c = 0; c < PREFIX_COMBINATIONS; c++) {
            uint32_t sum = 0;
            for (uint32_t k = 0; k < 16; k++)
                sum += (uint32_t)(counts->counts[k][i] >> shift) * fkv_prefix_prices[k][c];
            if (sum < least) least = sum, best[i] = (uint8_t)c;
        }
    }
}

typedef struct {
    uint8_t base, flags;
} channel_choice;

static void choose_step(const uint64_t *rows, uint32_t count, uint32_t values, uint32_t first,
                        uint32_t mode, channel_choice *choices)
{
    const bool fp16 = mode != FKV_STREAM_PREFIX_BF16;
    prefix_counts counts = {.top = {0}};
    uint8_t best[PREFIX_STEP];
    uint32_t shift = 0;
    fkv_prefix_count(rows, count, values, first, fp16, &counts);
    while (count >> shift > COUNT_MAX) shift++;
#if defined(__x86_64__)
    if (fkv_cpu_has.avx2)
        fkv_prefix_best_avx2(&counts, shift, best);
    else
#endif
        best_portable(&counts, shift, best);
    for (uint32_t i = 0; i < PREFIX_STEP && first + i < values; i++) {
        const uint32_t negatives = counts.negatives[i], positives = count - negatives;
        uint32_t base = (uint32_t)(counts.top[i] + DELTA_FIRST + best[i] % (int)PREFIX_DELTAS);
        choices[i].base = (uint8_t)(base & prefix_exponent_max(mode));
        choices[i].flags = best[i] >= PREFIX_DELTAS ? PREFIX_WIDE : 0;
        if (negatives * EXCEPTION_BITS < count)
            choices[i].flags |= PREFIX_STEADY;
        else if (positives * EXCEPTION_BITS < count)
            choices[i].flags |= PREFIX_STEADY | PREFIX_NEGATIVE;
    }
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
    const uint32_t values = vector_bytes / 2;
    for (uint32_t first = 0; first < values; first += PREFIX_STEP)
        choose_step(rows, count, values, first, mode, choices + first);
    const uint32_t base = common_base(choices, values);
    *parameters++ = (uint8_t)base;
    for (uint32_t c = 0; c < values; c++) {
        const uint32_t own = choices[c].base;
        uint32_t delta = own < base ? base - own : 0;
        if (delta >= PREFIX_DELTA_ZERO) delta = PREFIX_DELTA_ZERO - (own >= base / 2);
        parameters[c] = (uint8_t)(delta | choices[c].flags);
    }
}
