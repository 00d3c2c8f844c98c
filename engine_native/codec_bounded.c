/* codec_bounded.c: the bounded code of one stripe: parameters, stripes and back, the portable path.
 *
 * A value x of channel c comes back as
 *
 *   z = carry * z' + s * (magnitude + 1/2) * step        y = middle + z
 *
 * in float32, each operation rounded once; s is the value's sign bit, z' the z of the token before (0
 * at a stripe's start, x - middle after an exact value, 0 where that is no number), y what is rounded
 * to the stream's type. Two forms: steps of channels (with carries) and steps of tokens (without).
 *
 * Parameters, in the record's header, little-endian:
 *
 *   int16 base | uint8 exact tokens | uint8 unit | a channel's bits, 3 bytes each (tokens: 2)
 *
 *   by channel: code 4 bits, carry in eighths 3, delta 6, middle 11 (signed); unit is 0
 *   by token:   code 4 bits, middle 12 (signed); unit is 0 or 1
 *
 *   A step with exponent e is 2^(e/8). Channels: e = base - delta. Tokens: e = base + (level << unit),
 *   the level of each stored with it. code: 2 * low bits + (first digit's bits - 1), 0 to 13; 15: a
 *   channel of zeros. middle counts units of the channel's step (tokens: of 2^(base/8)) times
 *   2^max(low bits - 1, 0).
 *
 * A stripe of `count` rows, the first of them exact:
 *
 *   exact rows | planes of the others, whole bytes | digits, whole bytes | escapes
 *
 *   planes   row by row; by token: the level, 4 bits. Then for every 64 values (fewer at the end): the
 *            low bits of the magnitudes, a plane each; the first digits' low bits; their high bits of
 *            channels where they have two; the signs. One bit of each value that has one, lowest first
 *   digits   for every 64 such groups: all second digits, all third ones, ... all eighth ones; of
 *            values that have them, a bit each
 *   escapes  values as they are, the last one first
 *
 * A magnitude is its low bits and a high part: the first digit, if that is not its greatest one; else
 * that and a further one for every digit 1 that follows, up to a 0. Seven ones: an escape.
 *
 * Invariants
 *  - a value that is no escape comes back within half a step (and 2^-22 of itself, float32's own
 *    rounding) before it is rounded to its type; escapes come back bit for bit;
 *  - decoding reads nothing outside in[0, length) and writes whole wanted rows only, whatever the
 *    bytes are.
 */
#include "codec_bounded.h"
#include "allocate.h"
#include "cpu.h"
#include <math.h>
#include <stddef.h>
#define CORE_TARGET
#include "codec_bounded_core.h"

BOUNDED_DEFINE(portable)

#if defined(__x86_64__)
#define RUN(name, ...)                                                                             \
    (fkv_cpu_has.avx512 ? fkv_bounded_##name##_avx512(__VA_ARGS__)                                 \
     : fkv_cpu_has.avx2 ? fkv_bounded_##name##_avx2(__VA_ARGS__)                                   \
                        : fkv_bounded_##name##_portable(__VA_ARGS__))
#else
#define RUN(name, ...) fkv_bounded_##name##_portable(__VA_ARGS__)
#endif

#define CARRY_MAX 7
#define DELTA_MAX 63
#define LEVEL_MAX 15
#define CHANNEL_MIDDLE_MAX 1023.0f
#define TOKEN_MIDDLE_MAX 2047.0f
#define SAMPLES 128u /* rows that codes are chosen by, at most about */
#define NUMBER_MAX 1e37f

/* ---- steps ---- */
static const float octave[8] = {1.0f,        1.09050773f, 1.18920712f, 1.29683955f,
                                1.41421356f, 1.54221083f, 1.68179283f, 1.83400809f};

float fkv_bounded_step(int32_t exponent)
{
    return octave[exponent & 7] * float_of_bits((uint32_t)((exponent >> 3) + 127) << 23);
}

int32_t fkv_bounded_exponent(float step)
{
    /* Halfway between neighbours, in ratio. */
    static const float above[8] = {1.04427378f, 1.13878863f, 1.24185781f, 1.35425555f,
                                   1.47682615f, 1.61049033f, 1.75625216f, 1.91520656f};
    if (!(step >= fkv_bounded_step(-BOUNDED_EXPONENT_MAX))) return -BOUNDED_EXPONENT_MAX;
    if (!(step <= fkv_bounded_step(BOUNDED_EXPONENT_MAX))) return BOUNDED_EXPONENT_MAX;
    uint32_t bits = bits_of_float(step);
    float mantissa = float_of_bits((bits & 0x7FFFFF) | 127u << 23);
    int32_t exponent = ((int32_t)(bits >> 23) - 127) * 8;
    for (int i = 0; i < 8; i++) exponent += mantissa >= above[i];
    return exponent < BOUNDED_EXPONENT_MAX ? exponent : BOUNDED_EXPONENT_MAX;
}

/* ---- plans ---- */
typedef struct {
    uint32_t code, carry, delta;
    int32_t middle;
} channel_fields;

static channel_fields channel_read(const uint8_t *at, bool by_token)
{
    uint32_t bits = at[0] | (uint32_t)at[1] << 8 | (by_token ? 0 : (uint32_t)at[2] << 16);
    if (by_token) return (channel_fields){bits & 15, 0, 0, (int32_t)(bits << 16) >> 20};
    return (channel_fields){bits & 15, bits >> 4 & 7, bits >> 7 & 63, (int32_t)(bits << 8) >> 21};
}

static void channel_write(uint8_t *at, bool by_token, channel_fields f)
{
    uint32_t bits = by_token ? f.code | (uint32_t)f.middle << 4
                             : f.code | f.carry << 4 | f.delta << 7 | (uint32_t)f.middle << 13;
    at[0] = (uint8_t)bits, at[1] = (uint8_t)(bits >> 8);
    if (!by_token) at[2] = (uint8_t)(bits >> 16);
}

static float middle_unit(float step, uint32_t low)
{
    return step * (float)(1u << (low ? low - 1 : 0));
}

static bool channel_plan(bounded_plan *plan, uint32_t c, channel_fields f)
{
    const uint32_t low = f.code >> 1;
    if (f.code == BOUNDED_NOTHING) return !f.carry && !f.delta && !f.middle;
    if (f.code >= BOUNDED_CODES) return false;
    int32_t exponent = plan->base - (int32_t)f.delta;
    if (exponent < -BOUNDED_EXPONENT_MAX) return false;
    float step = fkv_bounded_step(exponent);
    plan->step[c] = plan->by_token ? 1.0f : step;
    plan->divisor[c] = step;
    plan->carry[c] = (float)f.carry / 8.0f;
    plan->middle[c] = (float)f.middle * middle_unit(step, low);
    plan->shift[c] = (uint8_t)low;
    plan->first[c] = (uint8_t)(1u << low);
    plan->top[c] = f.code & 1 ? 3 : 1;
    plan->second[c] = f.code & 1 ? (uint8_t)(2u << low) : 0;
    const uint32_t g = c / BOUNDED_GROUP;
    const uint64_t bit = 1ull << c % BOUNDED_GROUP;
    plan->coded[g] |= bit;
    if (f.code & 1) plan->wide[g] |= bit;
    for (uint32_t k = 0; k < low; k++) plan->low[g][k] |= bit;
    return true;
}

bool fkv_bounded_plan_make(bounded_plan *plan, const uint8_t *parameters, uint32_t vector_bytes,
                           uint32_t mode)
{
    if (!fkv_mode_bounded(mode)) return false;
    memset(plan, 0,
           offsetof(bounded_plan, middle)); /* what follows is long, and most of it unused */
    plan->by_token = fkv_mode_by_token(mode), plan->dtype = fkv_mode_dtype(mode);
    plan->element = fkv_bounded_element(mode);
    plan->values = vector_bytes / plan->element;
    if (!plan->values || plan->values > BOUNDED_VALUES_MAX || vector_bytes % plan->element)
        return false;
    plan->base = (int16_t)(parameters[0] | parameters[1] << 8);
    plan->exact = parameters[2], plan->unit = parameters[3];
    if (plan->unit > plan->by_token || plan->exact > FKV_EXACT_TOKENS) return false;
    int32_t last = plan->base + (plan->by_token ? LEVEL_MAX << plan->unit : 0);
    if (plan->base < -BOUNDED_EXPONENT_MAX || last > BOUNDED_EXPONENT_MAX) return false;
    for (int32_t l = 0; plan->by_token && l <= LEVEL_MAX; l++)
        plan->levels[l] = fkv_bounded_step(plan->base + (l << plan->unit));
    plan->groups = (plan->values + BOUNDED_GROUP - 1) / BOUNDED_GROUP;
    const uint32_t padded = plan->values + BOUNDED_GROUP;
    memset(plan->middle, 0, padded * sizeof *plan->middle);
    memset(plan->step, 0, padded * sizeof *plan->step);
    memset(plan->carry, 0, padded * sizeof *plan->carry);
    for (uint32_t c = 0; c < padded; c++) plan->divisor[c] = 1.0f;
    memset(plan->shift, 0, padded), memset(plan->first, 0, padded);
    memset(plan->second, 0, padded), memset(plan->top, 1, padded);
    const uint32_t size = plan->by_token ? 2 : 3;
    parameters += BOUNDED_HEAD;
    for (uint32_t c = 0; c < plan->values; c++, parameters += size)
        if (!channel_plan(plan, c, channel_read(parameters, plan->by_token))) return false;
    plan->row_bits = plan->by_token ? BOUNDED_LEVEL_BITS : 0;
    for (uint32_t g = 0; g < plan->groups; g++) {
        plan->coded_count[g] = (uint8_t)__builtin_popcountll(plan->coded[g]);
        plan->wide_count[g] = (uint8_t)__builtin_popcountll(plan->wide[g]);
        plan->row_bits += 2u * plan->coded_count[g] + plan->wide_count[g];
        for (uint32_t k = 0; k < BOUNDED_LOW_MAX && plan->low[g][k]; k++) {
            plan->low_count[g][k] = (uint8_t)__builtin_popcountll(plan->low[g][k]);
            plan->row_bits += plan->low_count[g][k];
            plan->low_planes[g] = (uint8_t)(k + 1);
        }
    }
    return true;
}

/* ---- choosing ---- */
typedef struct {
    bounded_wish *wish;
    bool by_token;
    uint32_t width, coded; /* values of a row; rows that are not exact */
    const float *rows;
    bounded_plan plan;
    int16_t *exponents; /* [coded]: of tokens */
    uint32_t unit;
    bool nothing[BOUNDED_VALUES_MAX];
    uint8_t carry[BOUNDED_VALUES_MAX], delta[BOUNDED_VALUES_MAX];
    float sums[6 * BOUNDED_VALUES_MAX];
    uint16_t prices[BOUNDED_CODES * BOUNDED_VALUES_MAX];
} chooser;

/* A channel's step is at most so many times the deviation of what prediction leaves: numbers lie
 * halfway between steps, so beyond that half a step is more than their own size, and saves no bit. */
#define DEVIATIONS_MAX 1.2f
#define STEP_LEAST 0.0625f /* of the stream's step: what is finer doesn't show beside the others */

/* Channels of a stream share one step: a query's products mind the error, not what it is a part of.
 * Tokens have their own: those of small values are those that attention dwells on. */
static float wished_step(const bounded_wish *wish, float variance, float range)
{
    if (!(wish->factor > 0.0f)) return range / 254.0f;
    return wish->factor * (fkv_mode_by_token(wish->mode) ? sqrtf(variance) : 1.0f);
}

/* A factor in proportion becomes one of its own. */
static void resolve(bounded_wish *wish, float unit)
{
    if (wish->factor < 0.0f) wish->factor *= -unit;
    if (!(wish->factor >= 0.0f)) wish->factor = 0.0f;
}

/* Of a channel's neighbouring tokens; 0 where it is below. */
static float correlation_of(const chooser *s, uint32_t c)
{
    const float *squares = s->sums + s->width, *products = squares + s->width;
    float found = squares[c] > 0.0f ? products[c] / squares[c] : 0.0f;
    return found > 0.0f ? found : 0.0f;
}

/* The step of a channel for which `step` was wished; its middle is so many steps that they can be
 * told. */
static float channel_step(float step, float variance, float middle, float correlation, float carry)
{
    const float r = correlation < 1.0f ? correlation : 1.0f;
    const float most = DEVIATIONS_MAX * sqrtf(variance * (1.0f - 2.0f * carry * r + carry * carry));
    float least = fabsf(middle) / (CHANNEL_MIDDLE_MAX / 2);
    if (least < step * STEP_LEAST) least = step * STEP_LEAST;
    if (most > least) least = most;
    return step < least ? step : least;
}

/* Steps and carries of channels; false where no number stands for them. */
static bool choose_channels(chooser *s)
{
    const uint32_t width = s->width;
    const float *squares = s->sums + width, *least = squares + 2 * width, *greatest = least + width;
    int32_t base = -BOUNDED_EXPONENT_MAX + DELTA_MAX;
    int16_t exponents[BOUNDED_VALUES_MAX];
    float total = 0.0f, channels = 0.0f;
    for (uint32_t c = 0; c < width; c++) {
        if (s->nothing[c]) continue;
        float variance = squares[c] / (float)s->coded;
        if (!(variance <= NUMBER_MAX)) return false;
        total += sqrtf(variance), channels += 1.0f;
    }
    resolve(s->wish, channels > 0.0f ? total / channels : 0.0f);
    for (uint32_t c = 0; c < width; c++) {
        if (s->nothing[c]) continue;
        float variance = squares[c] / (float)s->coded;
        float step = wished_step(s->wish, variance, greatest[c] - least[c]);
        float r = correlation_of(s, c), share = r * 8.0f + 0.5f;
        s->carry[c] = (uint8_t)(share < CARRY_MAX ? share : CARRY_MAX);
        s->plan.carry[c] = (float)s->carry[c] / 8.0f;
        if (s->wish->factor > 0.0f)
            step = channel_step(step, variance, s->sums[c], r, s->plan.carry[c]);
        exponents[c] = (int16_t)fkv_bounded_exponent(step);
        if (exponents[c] > base) base = exponents[c];
    }
    s->plan.base = base;
    for (uint32_t c = 0; c < width; c++) {
        if (s->nothing[c]) continue;
        int32_t delta = base - exponents[c];
        s->delta[c] = (uint8_t)(delta < DELTA_MAX ? delta : DELTA_MAX);
        float step = fkv_bounded_step(base - s->delta[c]);
        s->plan.step[c] = s->plan.divisor[c] = step;
    }
    return true;
}

static int32_t token_exponent(const bounded_wish *wish, const float *row, uint32_t width)
{
    float spread[2];
    RUN(spread, row, width, spread);
    return fkv_bounded_exponent(wished_step(wish, spread[0], spread[1]));
}

static uint8_t level_of(int32_t exponent, int32_t base, uint32_t unit)
{
    int32_t level = exponent > base ? (exponent - base) >> unit : 0;
    return (uint8_t)(level < LEVEL_MAX ? level : LEVEL_MAX);
}

/* Steps of tokens: a window of levels around the middle one; what lies above it gets smaller steps
 * than it asked for, what lies below larger ones. */
static bool choose_tokens(chooser *s, uint8_t *levels)
{
    uint32_t counts[2 * BOUNDED_EXPONENT_MAX + 1] = {0}, seen = 0, used = 0;
    int32_t least = BOUNDED_EXPONENT_MAX, greatest = -BOUNDED_EXPONENT_MAX, middle;
    resolve(s->wish, 1.0f);
    for (uint32_t r = 0; r < s->coded; r++) {
        int32_t e = token_exponent(s->wish, s->rows + (size_t)r * s->width, s->width);
        s->exponents[r] = (int16_t)e;
        if (e == -BOUNDED_EXPONENT_MAX) continue; /* all alike: any step will do */
        counts[e + BOUNDED_EXPONENT_MAX]++, used++;
        least = e < least ? e : least, greatest = e > greatest ? e : greatest;
    }
    if (!used) least = greatest = 0;
    for (middle = least; middle < greatest; middle++)
        if (2 * (seen += counts[middle + BOUNDED_EXPONENT_MAX]) >= used) break;
    int32_t base = least > middle - LEVEL_MAX ? least : middle - LEVEL_MAX;
    s->unit = greatest - base > LEVEL_MAX;
    if (base > BOUNDED_EXPONENT_MAX - 2 * LEVEL_MAX) base = BOUNDED_EXPONENT_MAX - 2 * LEVEL_MAX;
    s->plan.base = base;
    for (uint32_t r = 0; r < s->coded; r++) levels[r] = level_of(s->exponents[r], base, s->unit);
    return true;
}

void fkv_bounded_levels(const uint64_t *rows, uint32_t count, const bounded_wish *wish,
                        const bounded_plan *plan, uint8_t *levels)
{
    float row[BOUNDED_VALUES_MAX];
    for (uint32_t r = 0; r < count; r++) {
        RUN(values, (const uint8_t *)(uintptr_t)rows[r], plan->dtype, plan->values, row);
        levels[r] = level_of(token_exponent(wish, row, plan->values), plan->base, plan->unit);
    }
}

static float token_step(const chooser *s, uint8_t level)
{
    return fkv_bounded_step(s->plan.base + ((int32_t)level << s->unit));
}

/* Prices of all codes over sampled rows; returns how many were. */
static uint32_t choose_prices(chooser *s, const uint8_t *levels, uint16_t *magnitudes)
{
    float state[BOUNDED_VALUES_MAX] = {0};
    const uint32_t every = (s->coded + SAMPLES - 1) / SAMPLES;
    uint32_t sampled = 0;
    memset(s->prices, 0, sizeof s->prices);
    for (uint32_t r = 0; r < s->coded; r++) {
        bool sample = r % every == 0;
        if (s->by_token && !sample) continue;
        RUN(magnitudes, s->rows + (size_t)r * s->width, s->width, &s->plan,
            s->by_token ? token_step(s, levels[r]) : 0.0f, state, magnitudes);
        if (!sample) continue;
        RUN(prices, magnitudes, s->width, s->plan.element, s->prices);
        sampled++;
    }
    return sampled;
}

/* The channel's fields, and the bits of the sampled rows; false: its middle is out of reach. */
static bool choose_code(const chooser *s, uint32_t c, channel_fields *f, uint64_t *bits)
{
    uint32_t best = 0;
    *f = (channel_fields){.code = BOUNDED_NOTHING};
    if (s->nothing[c]) return true;
    for (uint32_t code = 1; code < BOUNDED_CODES; code++)
        if (s->prices[(size_t)code * s->width + c] < s->prices[(size_t)best * s->width + c])
            best = code;
    float step = s->by_token ? fkv_bounded_step(s->plan.base) : s->plan.step[c],
          limit = s->by_token ? TOKEN_MIDDLE_MAX : CHANNEL_MIDDLE_MAX, middle;
    for (;; best += 2) {
        if (best >= BOUNDED_CODES) return false;
        middle = s->sums[c] / middle_unit(step, best >> 1);
        if (middle >= -limit && middle <= limit) break;
    }
    *bits += s->prices[(size_t)best * s->width + c];
    *f = (channel_fields){best, s->carry[c], s->delta[c],
                          (int32_t)(middle + (middle < 0.0f ? -0.5f : 0.5f))};
    return true;
}

static bool chooser_begin(chooser *s, const uint64_t *rows, uint32_t count, float *values)
{
    const bounded_wish *wish = s->wish;
    const uint32_t element = fkv_bounded_element(wish->mode), width = s->width;
    if (count <= wish->exact || count > 0xFFFF || wish->vector_bytes % element || !width
        || width > BOUNDED_VALUES_MAX)
        return false;
    memset(&s->plan, 0, sizeof s->plan);
    s->plan.by_token = s->by_token, s->plan.element = element;
    s->coded = count - wish->exact, s->rows = values;
    for (uint32_t r = 0; r < s->coded; r++)
        RUN(values, (const uint8_t *)(uintptr_t)rows[r + wish->exact], fkv_mode_dtype(wish->mode),
            width, values + (size_t)r * width);
    RUN(measure, values, s->coded, width, s->sums);
    for (uint32_t c = 0; c < width; c++) {
        if (!(s->sums[c] <= NUMBER_MAX && s->sums[c] >= -NUMBER_MAX)) return false;
        s->nothing[c] = s->sums[3 * width + c] == 0.0f && s->sums[4 * width + c] == 0.0f
                        && s->sums[5 * width + c] == (float)s->coded;
        s->carry[c] = s->delta[c] = 0;
        s->plan.middle[c] = s->sums[c], s->plan.divisor[c] = 1.0f;
    }
    return true;
}

uint64_t fkv_bounded_choose(const uint64_t *rows, uint32_t count, bounded_wish *wish, float *values,
                            uint16_t *work, uint8_t *parameters, uint8_t *levels)
{
    chooser s;
    s.wish = wish, s.by_token = fkv_mode_by_token(wish->mode), s.unit = 0;
    s.width = wish->vector_bytes / fkv_bounded_element(wish->mode);
    s.exponents = (int16_t *)work;
    if (!chooser_begin(&s, rows, count, values)) return 0;
    levels += wish->exact;
    if (!(s.by_token ? choose_tokens(&s, levels) : choose_channels(&s))) return 0;
    uint32_t sampled = choose_prices(&s, levels, work);
    uint64_t bits = 0;
    parameters[0] = (uint8_t)s.plan.base, parameters[1] = (uint8_t)((uint32_t)s.plan.base >> 8);
    parameters[2] = (uint8_t)wish->exact, parameters[3] = (uint8_t)s.unit;
    uint8_t *at = parameters + BOUNDED_HEAD;
    for (uint32_t c = 0; c < s.width; c++, at += s.by_token ? 2 : 3) {
        channel_fields fields;
        if (!choose_code(&s, c, &fields, &bits)) return 0;
        channel_write(at, s.by_token, fields);
    }
    return bits * s.coded / sampled + (s.by_token ? BOUNDED_LEVEL_BITS : 0) * (uint64_t)s.coded
           + 8ull * wish->exact * wish->vector_bytes
           + 8ull * fkv_bounded_parameters(wish->vector_bytes, wish->mode);
}

/* ---- stripes ---- */

static float greatest_of(uint32_t dtype)
{
    return dtype == FKV_DTYPE_FP16   ? 65504.0f
           : dtype == FKV_DTYPE_BF16 ? float_of_bits(0x7F7F0000)
                                     : float_of_bits(0x7F7FFFFF);
}

/* The state behind exact rows. */
static void state_begin(const bounded_plan *plan, const uint8_t *last_exact, float *state)
{
    memset(state, 0, sizeof *state * (BOUNDED_VALUES_MAX + BOUNDED_GROUP));
    if (!last_exact || plan->by_token) return;
    load_values(last_exact, plan->dtype, plan->values, state);
    for (uint32_t c = 0; c < plan->values; c++) {
        state[c] -= plan->middle[c];
        if (!is_finite(state[c])) state[c] = 0.0f;
    }
}

uint32_t fkv_bounded_fit(const uint64_t *rows, uint32_t count, uint32_t exact,
                         const uint8_t *levels, uint32_t space, const bounded_plan *plan,
                         bounded_scratch *s)
{
    const uint32_t vector_bytes = plan->values * plan->element;
    float row[BOUNDED_VALUES_MAX + BOUNDED_GROUP] = {0};
    uint32_t used = 0, coded = 0, totals[2] = {0, 0};
    if (exact > count) exact = count;
    if (exact * vector_bytes > space) exact = count = space / vector_bytes;
    state_begin(plan, exact ? (const uint8_t *)(uintptr_t)rows[exact - 1] : NULL, s->state);
    used = exact * vector_bytes;
    s->exact = exact, s->escapes = 0;
    for (; exact + coded < count; coded++) {
        const uint32_t r = exact + coded, at = coded * plan->values;
        if (at + plan->values > BOUNDED_SCRATCH_VALUES || exact + coded >= BOUNDED_ROWS_MAX) break;
        s->level[r] = plan->by_token ? levels[r] & LEVEL_MAX : 0;
        RUN(values, (const uint8_t *)(uintptr_t)rows[r], plan->dtype, plan->values, row);
        RUN(quantise, row, plan, plan->levels[s->level[r]], greatest_of(plan->dtype), s->state,
            s->low + at, s->rest + at, totals);
        uint64_t length = used + ((coded + 1) * (uint64_t)plan->row_bits + 7) / 8
                          + (totals[0] + 7) / 8 + (uint64_t)totals[1] * plan->element;
        if (length > space) break;
        s->escapes = totals[1];
    }
    s->count = exact + coded;
    return s->count;
}

uint32_t fkv_bounded_emit(const uint64_t *rows, const bounded_plan *plan, bounded_scratch *s,
                          uint8_t *out)
{
    const uint32_t vector_bytes = plan->values * plan->element;
    uint32_t plane_bytes, digit_bytes;
    uint8_t *at = out;
    for (uint32_t r = 0; r < s->exact; r++, at += vector_bytes)
        memcpy(at, (const uint8_t *)(uintptr_t)rows[r], vector_bytes);
    RUN(emit, plan, s, &plane_bytes, &digit_bytes);
    memcpy(at, s->planes, plane_bytes);
    memcpy(at + plane_bytes, s->digits, digit_bytes);
    at += plane_bytes + digit_bytes + (size_t)s->escapes * plan->element;
    uint8_t *escape = at;
    for (uint32_t r = s->exact, i = 0; s->escapes && r < s->count; r++)
        for (uint32_t c = 0; c < plan->values; c++, i++) {
            if ((s->rest[i] >> 2 & 7) != BOUNDED_ROUNDS) continue;
            escape -= plan->element;
            memcpy(escape, (const uint8_t *)(uintptr_t)rows[r] + (size_t)c * plan->element,
                   plan->element);
        }
    return (uint32_t)(at - out);
}

/* ---- decoding ---- */

/* Whether the padding behind `bits` bits is zero. */
static bool padded(const uint8_t *bytes, uint64_t bits)
{
    return bits % 8 == 0 || !(bytes[bits / 8] >> bits % 8);
}

int fkv_bounded_plan_decode(const uint8_t *in, uint32_t length, uint32_t count, uint32_t exact,
                            const bounded_plan *plan, const uint64_t *rows)
{
    const uint32_t vector_bytes = plan->values * plan->element;
    uint8_t copy[FKV_PAGE_BYTES + BOUNDED_LOAD_ROOM];
    float state[BOUNDED_VALUES_MAX + BOUNDED_GROUP];
    if (!count || length > FKV_PAGE_BYTES || count > BOUNDED_ROWS_MAX) return -1;
    if (exact > count) exact = count;
    if ((uint64_t)exact * vector_bytes > length) return -1;
    for (uint32_t r = 0; r < exact; r++)
        if (rows[r]) memcpy((uint8_t *)(uintptr_t)rows[r], in + r * vector_bytes, vector_bytes);
    state_begin(plan, exact ? in + (exact - 1) * vector_bytes : NULL, state);
    in += exact * vector_bytes, length -= exact * vector_bytes, count -= exact, rows += exact;
    if (!count) return length ? -1 : 0;
    const uint64_t fixed = (uint64_t)count * plan->row_bits;
    uint64_t used;
    if ((fixed + 7) / 8 > length) return -1;
    memcpy(copy, in, length); /* a copy, so that words can be loaded at its end */
    memset(copy + length, 0, BOUNDED_LOAD_ROOM);
    const uint8_t *escapes = RUN(decode, plan, count, copy, in, in + length, state, rows, &used);
    if (!escapes || (uint64_t)(escapes - in) != (used + 7) / 8) return -1;
    return padded(copy, fixed) && padded(copy, used) ? 0 : -1;
}

/* ---- for tests ---- */

uint64_t fkv_bounded_parameters_of(const uint64_t *rows, uint32_t count, uint32_t vector_bytes,
                                   uint32_t mode, float factor, uint32_t exact, uint8_t *parameters,
                                   uint8_t *levels)
{
    bounded_wish wish = {mode, vector_bytes, exact, factor};
    const uint64_t values = vector_bytes / fkv_bounded_element(mode);
    float *numbers = fkv_malloc((count * values + 1) * sizeof *numbers);
    uint16_t *work = fkv_malloc((count + values) * sizeof *work);
    uint64_t bits = 0;
    memset(levels, 0, count);
    if (numbers && work)
        bits = fkv_bounded_choose(rows, count, &wish, numbers, work, parameters, levels);
    fkv_free(numbers), fkv_free(work);
    return bits;
}

uint32_t fkv_bounded_encode(const uint64_t *rows, uint32_t count, uint32_t vector_bytes,
                            uint32_t mode, const uint8_t *parameters, const uint8_t *levels,
                            uint32_t first_token, uint8_t *out)
{
    bounded_plan plan;
    bounded_scratch *scratch = fkv_malloc(sizeof *scratch);
    uint32_t length = 0;
    if (scratch && fkv_bounded_plan_make(&plan, parameters, vector_bytes, mode)) {
        uint32_t exact = plan.exact > first_token ? plan.exact - first_token : 0;
        if (fkv_bounded_fit(rows, count, exact, levels, FKV_PAGE_BYTES, &plan, scratch) == count)
            length = fkv_bounded_emit(rows, &plan, scratch, out);
    }
    fkv_free(scratch);
    return length;
}

int fkv_bounded_decode(const uint8_t *in, uint32_t length, uint32_t count, uint32_t vector_bytes,
                       uint32_t mode, const uint8_t *parameters, uint32_t first_token,
                       const uint64_t *rows)
{
    bounded_plan plan;
    if (!fkv_bounded_plan_make(&plan, parameters, vector_bytes, mode)) return -1;
    uint32_t exact = plan.exact > first_token ? plan.exact - first_token : 0;
    return fkv_bounded_plan_decode(in, length, count, exact, &plan, rows);
}
