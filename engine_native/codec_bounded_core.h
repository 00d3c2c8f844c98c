/* codec_bounded_core.h: the work of the bounded code on rows and groups of 64 values; compiled once for
 * each code path.
 *
 * Invariants
 *  - every float32 operation is written out, one rounding each, and none is reordered: both paths
 *    give the same values, which the file's users are compiled for (-ffp-contract=off);
 *  - bit i of a word belongs to value i of the group; bits past the group's end are zero;
 *  - lanes past a row's end are computed in padding and never leave it.
 */
#ifndef FLASHKV_CODEC_BOUNDED_CORE_H
#define FLASHKV_CODEC_BOUNDED_CORE_H
#include "codec_bounded.h"
#include "codec_prefix_planes.h"

#define CORE PREFIX_INLINE

CORE uint32_t bits_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

CORE float float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

CORE bool is_finite(float value) { return (bits_of_float(value) & 0x7F800000) != 0x7F800000; }

/* ---- elements ---- */

CORE float of_half(uint32_t half)
{
    /* A multiplication puts denormals right; the two highest exponents are infinity's. */
    float value = float_of_bits((half & 0x7FFF) << 13) * float_of_bits(239u << 23);
    uint32_t special = (half & 0x7C00) == 0x7C00 ? 0x7F800000 : 0;
    return float_of_bits(bits_of_float(value) | special | (half & 0x8000) << 16);
}

CORE uint32_t to_half(float value)
{
    uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000, size = bits & 0x7FFFFFFF;
    uint32_t small = bits_of_float(float_of_bits(size) + 0.5f) - 0x3F000000;
    uint32_t normal = (size - (112u << 23) + 0xFFF + (size >> 13 & 1)) >> 13;
    normal = size >= 0x477FF000 ? 0x7C00 : normal; /* 65,520 and more */
    return sign | (size < 0x38800000 ? small : normal);
}

CORE uint32_t to_bf16(float value)
{
    uint32_t bits = bits_of_float(value);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

CORE void load_values(const uint8_t *row, uint32_t dtype, uint32_t count, float *out)
{
    uint16_t halves[BOUNDED_VALUES_MAX];
    if (dtype == FKV_DTYPE_FP32) {
        memcpy(out, row, 4 * (size_t)count);
        return;
    }
    memcpy(halves, row, 2 * (size_t)count);
    if (dtype == FKV_DTYPE_BF16)
        for (uint32_t i = 0; i < count; i++) out[i] = float_of_bits((uint32_t)halves[i] << 16);
    else
        for (uint32_t i = 0; i < count; i++) out[i] = of_half(halves[i]);
}

/* 64 values to the elements of a row, of which in_use are there. */
CORE void store_values(const float *values, uint32_t dtype, uint32_t in_use, uint8_t *out)
{
    uint16_t halves[BOUNDED_GROUP];
    if (dtype == FKV_DTYPE_FP32) {
        memcpy(out, values, 4 * (size_t)in_use);
        return;
    }
    if (dtype == FKV_DTYPE_BF16)
        for (uint32_t i = 0; i < BOUNDED_GROUP; i++) halves[i] = (uint16_t)to_bf16(values[i]);
    else
        for (uint32_t i = 0; i < BOUNDED_GROUP; i++) halves[i] = (uint16_t)to_half(values[i]);
    if (in_use == BOUNDED_GROUP)
        memcpy(out, halves, sizeof halves);
    else
        memcpy(out, halves, 2 * (size_t)in_use);
}

/* ---- measuring ---- */

/* What vectorises: selections by masks of ones, of the sizes that are compared. */
CORE uint32_t mask_of(bool condition) { return condition ? UINT32_MAX : 0; }
CORE float chosen(uint32_t mask, float yes, float no)
{
    return float_of_bits((bits_of_float(yes) & mask) | (bits_of_float(no) & ~mask));
}
CORE float size_of(float value) { return float_of_bits(bits_of_float(value) & 0x7FFFFFFF); }
CORE uint32_t finite_mask(float value)
{
    return mask_of((bits_of_float(value) & 0x7FFFFFFF) < 0x7F800000);
}

/* Of each channel: mean, sum of squared deviations, sum of products of neighbouring ones, least and
 * greatest value, how many numbers; what is none is left out. sums: [6][width]. */
CORE void measure(const float *restrict values, uint32_t count, uint32_t width,
                  float *restrict sums)
{
    float *restrict mean = sums, *restrict squares = sums + width,
                    *restrict products = sums + 2 * width, *restrict least = sums + 3 * width,
                    *restrict greatest = sums + 4 * width, *restrict n = sums + 5 * width;
    memset(sums, 0, 6 * sizeof *sums * width);
    for (uint32_t c = 0; c < width; c++) least[c] = 3.4e38f, greatest[c] = -3.4e38f;
    for (uint32_t r = 0; r < count; r++) {
        const float *restrict row = values + (size_t)r * width;
        for (uint32_t c = 0; c < width; c++) {
            float x = row[c];
            uint32_t finite = finite_mask(x);
            n[c] += chosen(finite, 1.0f, 0.0f);
            mean[c] += chosen(finite, x, 0.0f);
            least[c] = chosen(finite & mask_of(x < least[c]), x, least[c]);
            greatest[c] = chosen(finite & mask_of(x > greatest[c]), x, greatest[c]);
        }
    }
    for (uint32_t c = 0; c < width; c++) mean[c] = n[c] > 0.0f ? mean[c] / n[c] : 0.0f;
    for (uint32_t r = 0; r < count; r++) {
        const float *restrict row = values + (size_t)r * width, *restrict before =
                                                                    r ? row - width : row;
        const uint32_t follows = mask_of(r > 0);
        for (uint32_t c = 0; c < width; c++) {
            float x = row[c], last = before[c];
            float d = chosen(finite_mask(x), x - mean[c], 0.0f),
                  e = chosen(finite_mask(last) & follows, last - mean[c], 0.0f);
            squares[c] += d * d;
            products[c] += d * e;
        }
    }
}

#define LANES 8u
/* What lanes came to, in their order: the variance of a row's values and their range. */
CORE void spread_of_lanes(const float *squares, const float *least, const float *greatest,
                          uint32_t width, float *spread)
{
    float total = 0.0f, low = least[0], high = greatest[0];
    for (uint32_t l = 0; l < LANES; l++) {
        total += squares[l];
        low = least[l] < low ? least[l] : low;
        high = greatest[l] > high ? greatest[l] : high;
    }
    spread[0] = total / (float)width;
    spread[1] = high - low;
}

/* Of one row: the variance of its values and their range, in lanes of a fixed order; what is no number
 * counts as 0. */
#ifdef PREFIX_BMI2
/* Eight values from `at` on, those past the end 0; *there: which are. */
CORE __m256 lanes_at(const float *row, uint32_t at, uint32_t width, __m256i *there)
{
    const __m256i size = _mm256_set1_epi32(0x7FFFFFFF), infinity = _mm256_set1_epi32(0x7F800000);
    const __m256i place = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    *there = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(width - at)), place);
    __m256i bits = _mm256_castps_si256(_mm256_maskload_ps(row + at, *there));
    bits = _mm256_and_si256(bits, _mm256_cmpgt_epi32(infinity, _mm256_and_si256(bits, size)));
    return _mm256_castsi256_ps(bits);
}

CORE void spread_of(const float *row, uint32_t width, float *spread)
{
    const __m256 first = _mm256_set1_ps(is_finite(row[0]) ? row[0] : 0.0f);
    __m256 sum = _mm256_setzero_ps(), squares = sum, least = first, greatest = first;
    __m256i there;
    float lanes[3][LANES], mean = 0.0f;
    for (uint32_t at = 0; at < width; at += LANES) {
        const __m256 x = lanes_at(row, at, width, &there), mask = _mm256_castsi256_ps(there);
        sum = _mm256_add_ps(sum, x);
        least = _mm256_min_ps(_mm256_blendv_ps(least, x, mask), least);
        greatest = _mm256_max_ps(_mm256_blendv_ps(greatest, x, mask), greatest);
    }
    _mm256_storeu_ps(lanes[0], sum);
    for (uint32_t l = 0; l < LANES; l++) mean += lanes[0][l];
    mean /= (float)width;
    for (uint32_t at = 0; at < width; at += LANES) {
        const __m256 x = lanes_at(row, at, width, &there);
        const __m256 d =
            _mm256_and_ps(_mm256_sub_ps(x, _mm256_set1_ps(mean)), _mm256_castsi256_ps(there));
        squares = _mm256_add_ps(squares, _mm256_mul_ps(d, d));
    }
    _mm256_storeu_ps(lanes[0], squares), _mm256_storeu_ps(lanes[1], least);
    _mm256_storeu_ps(lanes[2], greatest);
    spread_of_lanes(lanes[0], lanes[1], lanes[2], width, spread);
}
#else
CORE void spread_of(const float *restrict row, uint32_t width, float *restrict spread)
{
    float sum[LANES] = {0}, squares[LANES] = {0}, least[LANES], greatest[LANES];
    float padded[BOUNDED_VALUES_MAX + LANES];
    const uint32_t whole = (width + LANES - 1) / LANES * LANES;
    padded[0] = 0.0f;
    for (uint32_t i = 0; i < width; i++) padded[i] = chosen(finite_mask(row[i]), row[i], 0.0f);
    for (uint32_t i = width; i < whole; i++) padded[i] = 0.0f;
    for (uint32_t l = 0; l < LANES; l++) least[l] = greatest[l] = padded[0];
    for (uint32_t i = 0; i < whole; i += LANES)
        for (uint32_t l = 0; l < LANES; l++) {
            float x = padded[i + l];
            uint32_t there = mask_of(i + l < width);
            sum[l] += x;
            least[l] = chosen(there & mask_of(x < least[l]), x, least[l]);
            greatest[l] = chosen(there & mask_of(x > greatest[l]), x, greatest[l]);
        }
    float mean = 0.0f;
    for (uint32_t l = 0; l < LANES; l++) mean += sum[l];
    mean /= (float)width;
    for (uint32_t i = 0; i < whole; i += LANES)
        for (uint32_t l = 0; l < LANES; l++) {
            float d = chosen(mask_of(i + l < width), padded[i + l] - mean, 0.0f);
            squares[l] += d * d;
        }
    spread_of_lanes(squares, least, greatest, width, spread);
}
#endif

/* ---- quantising ---- */
#define BOUNDED_MAGNITUDE_MAX 4095.0f

/* How many whole steps, at most BOUNDED_MAGNITUDE_MAX: what is no number as well. */
CORE int32_t whole_steps(float d, float divisor)
{
    float ratio = size_of(d) / divisor;
    return (int32_t)chosen(mask_of(ratio < BOUNDED_MAGNITUDE_MAX), ratio, BOUNDED_MAGNITUDE_MAX);
}

CORE float signed_like(float size, float of)
{
    return float_of_bits(bits_of_float(size) | (bits_of_float(of) & 0x80000000));
}

/* Magnitudes with the plan's middles, steps and carries, whatever the codes; `state` goes on. */
CORE void magnitudes_of(const float *restrict values, uint32_t width, const bounded_plan *plan,
                        bool by_token, float step, float *restrict state,
                        uint16_t *restrict magnitudes)
{
    const float *restrict middle = plan->middle, *restrict carry = plan->carry,
                          *restrict divisors = plan->divisor;
    for (uint32_t c = 0; c < width; c++) {
        float divisor = by_token ? step : divisors[c];
        float from = values[c] - middle[c], kept = by_token ? 0.0f : carry[c] * state[c];
        float d = from - kept;
        int32_t whole = whole_steps(d, divisor);
        float next = kept + signed_like(((float)whole + 0.5f) * divisor, d);
        uint32_t near = mask_of(whole < (int32_t)BOUNDED_MAGNITUDE_MAX);
        if (!by_token) state[c] = chosen(near, next, chosen(finite_mask(from), from, 0.0f));
        magnitudes[c] = (uint16_t)whole;
    }
}

/* Adds up what each code takes for each channel: prices[BOUNDED_CODES][width], bits. */
CORE void prices_of(const uint16_t *restrict magnitudes, uint32_t width, uint32_t element,
                    uint16_t *restrict prices)
{
    const uint16_t escape = (uint16_t)(BOUNDED_ROUNDS + 8 * element);
#pragma GCC unroll 14
    for (uint32_t code = 0; code < BOUNDED_CODES; code++) {
        const uint16_t low = (uint16_t)(code >> 1), digit = (uint16_t)(1 + (code & 1)),
                       before = (uint16_t)((1 << digit) - 2), always = (uint16_t)(1 + low + digit);
        uint16_t *restrict sums = prices + (size_t)code * width;
        for (uint32_t c = 0; c < width; c++) {
            uint16_t high = (uint16_t)(magnitudes[c] >> low);
            uint16_t more = (uint16_t)(high > before ? high - before : 0);
            more = more > BOUNDED_ROUNDS ? escape : more;
            sums[c] = (uint16_t)(sums[c] + always + more);
        }
    }
}

/* 64 values of a row, those past its end in padding. */
CORE void quantise_group(const float *restrict values, const bounded_plan *plan, uint32_t at,
                         bool by_token, float step, float limit, float *restrict state,
                         uint8_t *restrict low, uint8_t *restrict rest, uint32_t *restrict totals)
{
    int32_t wholes[BOUNDED_GROUP], misses[BOUNDED_GROUP], signs[BOUNDED_GROUP];
    float states[BOUNDED_GROUP];
    const float *restrict middle = plan->middle + at, *restrict carry = plan->carry + at,
                          *restrict divisors = plan->divisor + at,
                          *restrict steps = plan->step + at;
    const uint8_t *restrict shift = plan->shift + at, *restrict tops = plan->top + at,
                            *restrict first = plan->first + at;
    for (uint32_t c = 0; c < BOUNDED_GROUP; c++) {
        float size = by_token ? steps[c] * step : steps[c], x = values[c], from = x - middle[c];
        float kept = by_token ? 0.0f : carry[c] * state[c], d = from - kept;
        int32_t whole = whole_steps(d, by_token ? step : divisors[c]);
        float next = kept + signed_like(((float)whole + 0.5f) * size, d), y = middle[c] + next;
        /* Half a step, and what float32 itself rounds off. */
        float bound = size * 0.5f + size_of(x) * 2.3841858e-7f;
        uint32_t good = mask_of(size_of(x - y) <= bound) & mask_of(size_of(y) <= limit);
        int32_t further = (whole >> shift[c]) - tops[c];
        uint32_t miss = ~good | mask_of(further >= (int32_t)BOUNDED_ROUNDS);
        wholes[c] = whole, misses[c] = (int32_t)miss;
        signs[c] = (int32_t)(bits_of_float(d) >> 31);
        states[c] = chosen(miss, chosen(finite_mask(from), from, 0.0f), next);
    }
    int32_t lows[BOUNDED_GROUP], rests[BOUNDED_GROUP], taken[BOUNDED_GROUP], lost[BOUNDED_GROUP];
    for (uint32_t c = 0; c < BOUNDED_GROUP; c++) {
        int32_t whole = wholes[c], top = tops[c], high = whole >> shift[c], miss = misses[c];
        int32_t further = high > top ? high - top : 0, digit = high < top ? high : top;
        further = (further & ~miss) | ((int32_t)BOUNDED_ROUNDS & miss);
        digit = (digit & ~miss) | (top & miss);
        int32_t bits = further < (int32_t)BOUNDED_ROUNDS ? further + 1 : (int32_t)BOUNDED_ROUNDS;
        taken[c] = digit == top ? bits : 0;
        /* A channel without bits has no escapes either: a stripe that none fits. */
        lost[c] = miss & (first[c] ? 1 : (int32_t)FKV_PAGE_BYTES);
        lows[c] = whole & (first[c] - 1) & ~miss;
        rests[c] = digit | further << 2 | (signs[c] & ~miss) << 5;
    }
    int32_t digits = 0, escapes = 0;
    for (uint32_t c = 0; c < BOUNDED_GROUP; c++) digits += taken[c], escapes += lost[c];
    for (uint32_t c = 0; c < BOUNDED_GROUP; c++) low[c] = (uint8_t)lows[c];
    for (uint32_t c = 0; c < BOUNDED_GROUP; c++) rest[c] = (uint8_t)rests[c];
    if (!by_token) memcpy(state, states, sizeof states);
    totals[0] += (uint32_t)digits, totals[1] += (uint32_t)escapes;
}

/* One row: low and rest of each value; adds to totals[0] the further digits, to totals[1] the escapes. A
 * value that comes back further from itself than half a step, or not at all, is an escape. */
CORE void quantise(const float *values, const bounded_plan *plan, bool by_token, float step,
                   float limit, float *state, uint8_t *low, uint8_t *rest, uint32_t *totals)
{
    for (uint32_t at = 0; at < plan->values; at += BOUNDED_GROUP)
        quantise_group(values + at, plan, at, by_token, step, limit, state + at, low + at,
                       rest + at, totals);
}

/* ---- bytes and words ---- */
#if defined(BOUNDED_MASKS)
CORE uint64_t word_of(const uint8_t *bytes, int bit)
{
    return _mm512_test_epi8_mask(_mm512_loadu_si512(bytes), _mm512_set1_epi8((char)(1 << bit)));
}

/* Adds weights[i] to the bytes whose bits are set; the weights have bits that no byte has yet. */
CORE void weigh(uint64_t word, const uint8_t *weights, uint8_t *bytes)
{
    const __m512i before = _mm512_loadu_si512(bytes);
    _mm512_storeu_si512(bytes,
                        _mm512_mask_add_epi8(before, word, before, _mm512_loadu_si512(weights)));
}
#elif defined(PREFIX_BMI2)
CORE uint64_t word_of(const uint8_t *bytes, int bit)
{
    const __m256i *from = (const __m256i *)bytes;
    __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1);
    uint32_t first = (uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(a, 7 - bit));
    uint32_t second = (uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(b, 7 - bit));
    return first | (uint64_t)second << 32;
}

/* Adds weights[i] to the bytes whose bits are set; the weights have bits that no byte has yet. */
CORE void weigh(uint64_t word, const uint8_t *weights, uint8_t *bytes)
{
    const __m256i order = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2,
                                           2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i bits = _mm256_set1_epi64x((long long)0x8040201008040201);
    for (int h = 0; h < 2; h++) {
        __m256i *to = (__m256i *)(bytes + 32 * h);
        __m256i all = _mm256_shuffle_epi8(_mm256_set1_epi32((int)(word >> 32 * h)), order);
        __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(all, bits), bits);
        __m256i weight = _mm256_loadu_si256((const __m256i *)(weights + 32 * h));
        _mm256_storeu_si256(to,
                            _mm256_or_si256(_mm256_loadu_si256(to), _mm256_and_si256(set, weight)));
    }
}
#else
CORE uint64_t word_of(const uint8_t *bytes, int bit)
{
    uint64_t word = 0;
    for (uint32_t i = 0; i < BOUNDED_GROUP; i++) word |= (uint64_t)(bytes[i] >> bit & 1) << i;
    return word;
}

CORE void weigh(uint64_t word, const uint8_t *weights, uint8_t *bytes)
{
    for (uint32_t i = 0; i < BOUNDED_GROUP; i++)
        bytes[i] |= (uint8_t)(word >> i & 1 ? weights[i] : 0);
}
#endif

#define BOUNDED_BATCH 64u
/* Which values of each group go on after each digit; [0]: after the first one. */
typedef struct {
    uint32_t count;
    uint64_t go[BOUNDED_ROUNDS + 1][BOUNDED_BATCH];
} bounded_rounds;

CORE void put_rounds(bounded_rounds *b, bit_writer *digits)
{
    for (uint32_t k = 1; k <= BOUNDED_ROUNDS; k++)
        for (uint32_t i = 0; i < b->count; i++)
            put_bits(digits, PACK_BITS(b->go[k][i], b->go[k - 1][i]), COUNT_BITS(b->go[k - 1][i]));
    b->count = 0;
}

CORE void emit(const bounded_plan *plan, bounded_scratch *s, uint32_t *plane_bytes,
               uint32_t *digit_bytes)
{
    bit_writer planes = {s->planes, 0, 0}, digits = {s->digits, 0, 0};
    bounded_rounds b;
    b.count = 0;
    for (uint32_t r = s->exact; r < s->count; r++) {
        if (plan->by_token) put_bits(&planes, s->level[r], BOUNDED_LEVEL_BITS);
        for (uint32_t g = 0; g < plan->groups; g++) {
            const size_t at = (size_t)(r - s->exact) * plan->values + g * BOUNDED_GROUP;
            const uint8_t *low = s->low + at, *rest = s->rest + at;
            const uint64_t coded = plan->coded[g], wide = plan->wide[g];
            for (uint32_t k = 0; k < plan->low_planes[g]; k++)
                put_bits(&planes, PACK_BITS(word_of(low, (int)k), plan->low[g][k]),
                         plan->low_count[g][k]);
            const uint64_t d0 = word_of(rest, 0) & coded, d1 = word_of(rest, 1) & wide;
            put_bits(&planes, PACK_BITS(d0, coded), plan->coded_count[g]);
            put_bits(&planes, PACK_BITS(d1, wide), plan->wide_count[g]);
            put_bits(&planes, PACK_BITS(word_of(rest, 5), coded), plan->coded_count[g]);
            const uint64_t u0 = word_of(rest, 2) & coded, u1 = word_of(rest, 3) & coded,
                           u2 = word_of(rest, 4) & coded;
            const uint32_t i = b.count++;
            b.go[0][i] = d0 & (d1 | ~wide);
            b.go[1][i] = u0 | u1 | u2;
            b.go[2][i] = u1 | u2;
            b.go[3][i] = u2 | (u1 & u0);
            b.go[4][i] = u2;
            b.go[5][i] = u2 & (u1 | u0);
            b.go[6][i] = u2 & u1;
            b.go[7][i] = u2 & u1 & u0;
            if (b.count == BOUNDED_BATCH) put_rounds(&b, &digits);
        }
    }
    put_rounds(&b, &digits);
    *planes.out = (uint8_t)planes.carried, *digits.out = (uint8_t)digits.carried;
    *plane_bytes = (uint32_t)(planes.out - s->planes) + (planes.held != 0);
    *digit_bytes = (uint32_t)(digits.out - s->digits) + (digits.held != 0);
}

/* ---- decoding ---- */
/* A batch of groups, in the order of rows: arrays by word, as in the prefix code. Each group of the vector
 * comes again after plan->groups, and loops go over one such group's rows. */
typedef struct {
    bounded_rounds rounds;
    uint32_t begin; /* groups of the stripe before it */
    uint64_t low[BOUNDED_LOW_MAX][BOUNDED_BATCH];
    uint64_t first[BOUNDED_BATCH], second[BOUNDED_BATCH], sign[BOUNDED_BATCH];
    uint64_t further[3][BOUNDED_BATCH]; /* bits of how many further digits each value has */
    float step[BOUNDED_BATCH];          /* of each group's token, where tokens have their own */
} bounded_batch;

/* The first place in a batch that has this group of the vector. */
CORE uint32_t first_place_of(const bounded_plan *plan, uint32_t begin, uint32_t group)
{
    const uint32_t g = begin % plan->groups;
    return group >= g ? group - g : group + plan->groups - g;
}

/* The planes of a batch. A row's begin at a multiple of the bits that all rows have. */
CORE void get_planes_of(const bounded_plan *plan, bounded_batch *b, bool by_token,
                        const uint8_t *bits)
{
    uint32_t before = by_token ? BOUNDED_LEVEL_BITS : 0; /* bits of the groups before */
    for (uint32_t g = 0; g < plan->groups; g++) {
        const uint64_t coded = plan->coded[g], wide = plan->wide[g];
        const uint32_t coded_count = plan->coded_count[g], wide_count = plan->wide_count[g];
        const uint32_t planes = plan->low_planes[g], step = plan->groups, row_bits = plan->row_bits;
        uint32_t i = first_place_of(plan, b->begin, g);
        uint64_t row_at = (uint64_t)((b->begin + i) / plan->groups) * row_bits;
        for (; i < b->rounds.count; i += step, row_at += row_bits) {
            uint64_t at = row_at + before;
            for (uint32_t k = 0; k < planes; k++) {
                const uint32_t n = plan->low_count[g][k];
                b->low[k][i] = SPREAD_BITS(take_count(bits, at, n), plan->low[g][k]);
                at += n;
            }
            const uint64_t first = SPREAD_BITS(take_count(bits, at, coded_count), coded);
            at += coded_count;
            const uint64_t second = SPREAD_BITS(take_count(bits, at, wide_count), wide);
            at += wide_count;
            b->first[i] = first, b->second[i] = second;
            b->sign[i] = SPREAD_BITS(take_count(bits, at, coded_count), coded);
            b->rounds.go[0][i] = first & (second | ~wide) & coded;
            if (by_token)
                b->step[i] =
                    plan->levels[take_bits(bits, row_at) & ((1u << BOUNDED_LEVEL_BITS) - 1)];
        }
        for (uint32_t k = 0; k < planes; k++) before += plan->low_count[g][k];
        before += 2 * coded_count + wide_count;
    }
}

/* The further digits of a batch; returns where they end: behind `room` (bits) if they are too many. Most
 * groups have none from the third on, so each round has a list of those that go on. */
CORE uint64_t get_rounds(bounded_rounds *b, const uint8_t *bits, uint64_t at, uint64_t room)
{
    uint32_t list[BOUNDED_BATCH], listed = b->count;
    for (uint32_t i = 0; i < listed; i++) list[i] = i;
    memset(b->go[1], 0, BOUNDED_ROUNDS * sizeof b->go[1]);
    for (uint32_t k = 1; k <= BOUNDED_ROUNDS && listed; k++) {
        uint32_t kept = 0;
        for (uint32_t j = 0; j < listed; j++) {
            const uint32_t i = list[j];
            const uint64_t before = b->go[k - 1][i];
            const uint32_t n = COUNT_BITS(before);
            const uint64_t digit = SPREAD_BITS(take_count(bits, at, n), before);
            b->go[k][i] = digit;
            list[kept] = i, kept += digit != 0;
            at += n;
        }
        if (at > room) return at;
        listed = kept;
    }
    return at;
}

/* 64 bytes alike: what a bit of a magnitude is worth; [6]: the sign. */
#define ALIKE8(n) n, n, n, n, n, n, n, n
#define ALIKE(n)                                                                                   \
    {                                                                                              \
        ALIKE8(n), ALIKE8(n), ALIKE8(n), ALIKE8(n), ALIKE8(n), ALIKE8(n), ALIKE8(n), ALIKE8(n)     \
    }
static const uint8_t bounded_worth[BOUNDED_LOW_MAX + 1][BOUNDED_GROUP] = {
    ALIKE(1), ALIKE(2), ALIKE(4), ALIKE(8), ALIKE(16), ALIKE(32), ALIKE(128)};

/* Group i's values: words to magnitudes to numbers; `state` goes on. */
CORE void place_group(const bounded_plan *plan, const bounded_batch *b, uint32_t i, uint32_t g,
                      bool by_token, uint32_t dtype, float *restrict state, uint8_t *row)
{
    const uint32_t at = g * BOUNDED_GROUP;
    uint8_t fixed[BOUNDED_GROUP] = {0}, more[BOUNDED_GROUP] = {0}, sign[BOUNDED_GROUP] = {0};
    float values[BOUNDED_GROUP];
    for (uint32_t k = 0; k < plan->low_planes[g]; k++) weigh(b->low[k][i], bounded_worth[k], fixed);
    weigh(b->first[i], plan->first + at, fixed);
    weigh(b->second[i], plan->second + at, fixed);
    weigh(b->sign[i], bounded_worth[BOUNDED_LOW_MAX], sign);
    for (uint32_t k = 0; k < 3; k++) weigh(b->further[k][i], bounded_worth[k], more);
    const uint8_t *restrict worth = plan->first + at;
    const float *restrict middle = plan->middle + at, *restrict carry = plan->carry + at,
                          *restrict steps = plan->step + at;
    const float step = by_token ? b->step[i] : 0.0f;
    for (uint32_t c = 0; c < BOUNDED_GROUP; c++) {
        int32_t magnitude = fixed[c] + (int32_t)more[c] * worth[c];
        float size = (float)magnitude + 0.5f;
        float back = size * (by_token ? steps[c] * step : steps[c]);
        back = float_of_bits(bits_of_float(back) ^ (uint32_t)sign[c] << 24);
        float next = by_token ? back : carry[c] * state[c] + back;
        if (!by_token) state[c] = next;
        values[c] = middle[c] + next;
    }
    if (!row) return;
    const uint32_t in_use = plan->values - at < BOUNDED_GROUP ? plan->values - at : BOUNDED_GROUP;
    store_values(values, dtype, in_use, row + (size_t)at * plan->element);
}

/* Puts escapes of a group in their places; they are read downwards from `end`. */
CORE void patch_group(const bounded_plan *plan, uint64_t escapes, uint32_t g, const uint8_t *end,
                      float *state, uint8_t *row)
{
    for (; escapes; escapes &= escapes - 1) {
        const uint32_t k = (uint32_t)__builtin_ctzll(escapes), c = g * BOUNDED_GROUP + k;
        float value;
        end -= plan->element;
        load_values(end, plan->dtype, 1, &value);
        float from = value - plan->middle[c];
        state[k] = is_finite(from) ? from : 0.0f;
        if (row) memcpy(row + (size_t)c * plan->element, end, plan->element);
    }
}

/* How many further digits, in bits. */
CORE void count_rounds(bounded_batch *b)
{
    const uint64_t(*go)[BOUNDED_BATCH] = b->rounds.go;
    for (uint32_t i = 0; i < b->rounds.count; i++) {
        b->further[0][i] =
            go[1][i] ^ go[2][i] ^ go[3][i] ^ go[4][i] ^ go[5][i] ^ go[6][i] ^ go[7][i];
        b->further[1][i] = go[2][i] ^ go[4][i] ^ go[6][i];
        b->further[2][i] = go[4][i];
    }
}

/* Values and escapes of a batch; false where escapes ran out, which are read downwards from *end, not
 * below `begin`. */
CORE bool place_batch_of(const bounded_plan *plan, bounded_batch *b, bool by_token, uint32_t dtype,
                         const uint8_t *begin, const uint8_t **end, float *state,
                         const uint64_t *rows)
{
    const uint64_t *escapes = b->rounds.go[BOUNDED_ROUNDS];
    uint32_t before[BOUNDED_BATCH], total = 0; /* escapes of the groups before, in bytes */
    for (uint32_t i = 0; i < b->rounds.count; i++) {
        before[i] = total;
        total += COUNT_BITS(escapes[i]) * plan->element;
    }
    if ((uint64_t)(*end - begin) < total) return false;
    count_rounds(b);
    for (uint32_t g = 0; g < plan->groups; g++) {
        uint32_t i = first_place_of(plan, b->begin, g), r = (b->begin + i) / plan->groups;
        float *own = state + g * BOUNDED_GROUP;
        for (; i < b->rounds.count; i += plan->groups, r++) {
            uint8_t *row = (uint8_t *)(uintptr_t)rows[r];
            if (row || !by_token) place_group(plan, b, i, g, by_token, dtype, own, row);
            if (escapes[i]) patch_group(plan, escapes[i], g, *end - before[i], own, row);
        }
    }
    *end -= total;
    return true;
}

/* `bits`: a copy of the planes and digits with room behind. Returns the first escape that was used, or
 * NULL; *used: how many bits of the digits were. */
CORE const uint8_t *decode_rows(const bounded_plan *plan, uint32_t count, bool by_token,
                                uint32_t dtype, const uint8_t *bits, const uint8_t *begin,
                                const uint8_t *end, float *state, const uint64_t *rows,
                                uint64_t *used)
{
    const uint64_t room = (uint64_t)(end - begin) * 8;
    const uint32_t groups = count * plan->groups;
    uint64_t at = ((uint64_t)count * plan->row_bits + 7) / 8 * 8;
    bounded_batch b;
    for (b.begin = 0; b.begin < groups; b.begin += BOUNDED_BATCH) {
        b.rounds.count = groups - b.begin < BOUNDED_BATCH ? groups - b.begin : BOUNDED_BATCH;
        get_planes_of(plan, &b, by_token, bits);
        at = get_rounds(&b.rounds, bits, at, room);
        if (at > room || !place_batch_of(plan, &b, by_token, dtype, begin, &end, state, rows))
            return NULL;
    }
    *used = at;
    return end;
}

/* ---- the path's functions ---- */
#define BOUNDED_DEFINE(suffix)                                                                     \
    CORE_TARGET void fkv_bounded_values_##suffix(const uint8_t *row, uint32_t dtype,               \
                                                 uint32_t count, float *out)                       \
    {                                                                                              \
        load_values(row, dtype, count, out);                                                       \
    }                                                                                              \
    CORE_TARGET void fkv_bounded_measure_##suffix(const float *values, uint32_t count,             \
                                                  uint32_t width, float *sums)                     \
    {                                                                                              \
        measure(values, count, width, sums);                                                       \
    }                                                                                              \
    CORE_TARGET void fkv_bounded_spread_##suffix(const float *row, uint32_t width, float *spread)  \
    {                                                                                              \
        spread_of(row, width, spread);                                                             \
    }                                                                                              \
    CORE_TARGET void fkv_bounded_magnitudes_##suffix(const float *values, uint32_t width,          \
                                                     const bounded_plan *plan, float step,         \
                                                     float *state, uint16_t *magnitudes)           \
    {                                                                                              \
        if (plan->by_token)                                                                        \
            magnitudes_of(values, width, plan, true, step, state, magnitudes);                     \
        else                                                                                       \
            magnitudes_of(values, width, plan, false, step, state, magnitudes);                    \
    }                                                                                              \
    CORE_TARGET void fkv_bounded_prices_##suffix(const uint16_t *magnitudes, uint32_t width,       \
                                                 uint32_t element, uint16_t *prices)               \
    {                                                                                              \
        prices_of(magnitudes, width, element, prices);                                             \
    }                                                                                              \
    CORE_TARGET void fkv_bounded_quantise_##suffix(const float *values, const bounded_plan *plan,  \
                                                   float step, float limit, float *state,          \
                                                   uint8_t *low, uint8_t *rest, uint32_t *totals)  \
    {                                                                                              \
        if (plan->by_token)                                                                        \
            quantise(values, plan, true, step, limit, state, low, rest, totals);                   \
        else                                                                                       \
            quantise(values, plan, false, step, limit, state, low, rest, totals);                  \
    }                                                                                              \
    CORE_TARGET void fkv_bounded_emit_##suffix(const bounded_plan *plan, bounded_scratch *scratch, \
                                               uint32_t *plane_bytes, uint32_t *digit_bytes)       \
    {                                                                                              \
        emit(plan, scratch, plane_bytes, digit_bytes);                                             \
    }                                                                                              \
    CORE_TARGET const uint8_t *fkv_bounded_decode_##suffix(                                        \
        const bounded_plan *plan, uint32_t count, const uint8_t *bits, const uint8_t *begin,       \
        const uint8_t *end, float *state, const uint64_t *rows, uint64_t *used)                    \
    {                                                                                              \
        const uint32_t dtype = plan->dtype;                                                        \
        if (dtype == FKV_DTYPE_BF16 && plan->by_token)                                             \
            return decode_rows(plan, count, true, FKV_DTYPE_BF16, bits, begin, end, state, rows,   \
                               used);                                                              \
        if (dtype == FKV_DTYPE_BF16)                                                               \
            return decode_rows(plan, count, false, FKV_DTYPE_BF16, bits, begin, end, state, rows,  \
                               used);                                                              \
        return decode_rows(plan, count, plan->by_token, dtype, bits, begin, end, state, rows,      \
                           used);                                                                  \
    }
#endif
