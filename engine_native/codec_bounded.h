/* codec_bounded.h: what the parts of the bounded code share; see codec_bounded.c for the format.
 *
 * Invariants
 *  - all code paths are compiled from codec_bounded_core.h: the same operations on float32 in the same
 *    order, so the same bytes and the same values;
 *  - a plan exists only for parameters that mean something (fkv_bounded_plan_make refuses others);
 *  - nothing here allocates; scratch is the caller's. */
#ifndef FLASHKV_CODEC_BOUNDED_H
#define FLASHKV_CODEC_BOUNDED_H
#include "flashkv_native.h"
#include <stdbool.h>
#include <string.h>

#define BOUNDED_VALUES_MAX 1024u /* of a vector: FKV_CODABLE_VECTOR_MAX bytes of two each */
#define BOUNDED_GROUP 64u        /* values whose bits are one word of each plane */
#define BOUNDED_GROUPS_MAX (BOUNDED_VALUES_MAX / BOUNDED_GROUP)
#define BOUNDED_LOW_MAX 6u        /* raw low bits of a magnitude, at most */
#define BOUNDED_CODES 14u         /* low bits 0 ... 6, with a first digit of one bit or of two */
#define BOUNDED_NOTHING 15u       /* a channel of zeros: no bits at all */
#define BOUNDED_ROUNDS 7u         /* further digits of a value, at most; that many: an escape */
#define BOUNDED_HEAD 4u           /* bytes of the parameters before the channels' */
#define BOUNDED_EXPONENT_MAX 1000 /* of steps, in eighths of an octave */
#define BOUNDED_LEVEL_BITS 4u     /* of a token's step, where each token has its own */
/* Values that one stripe's scratch has room for. */
#define BOUNDED_SCRATCH_VALUES 32768u
#define BOUNDED_ROWS_MAX 2047u           /* of a stripe: FKV_STRIPE_TOKENS_MAX */
#define BOUNDED_LOAD_ROOM (64u * 8 + 16) /* what a round of a batch may load behind the bits */

/* What a mode says: which of the two forms, and which elements. */
static inline bool fkv_mode_bounded(uint32_t mode)
{
    return mode >= FKV_STREAM_CHANNELS_BF16 && mode <= FKV_STREAM_TOKENS_FP32;
}
static inline bool fkv_mode_by_token(uint32_t mode) { return mode >= FKV_STREAM_TOKENS_BF16; }
/* FKV_DTYPE_BF16, _FP16 or _FP32. */
static inline uint32_t fkv_mode_dtype(uint32_t mode)
{
    return FKV_DTYPE_BF16 + (mode - FKV_STREAM_CHANNELS_BF16) % 3;
}
static inline uint32_t fkv_bounded_element(uint32_t mode)
{
    return fkv_mode_dtype(mode) == FKV_DTYPE_FP32 ? 4 : 2;
}
static inline uint32_t fkv_bounded_parameters(uint32_t vector_bytes, uint32_t mode)
{
    uint32_t values = vector_bytes / fkv_bounded_element(mode);
    return BOUNDED_HEAD + (fkv_mode_by_token(mode) ? 2 : 3) * values;
}

typedef struct {
    uint32_t values, groups, dtype, element;
    uint32_t row_bits; /* of the planes that each row has */
    uint32_t exact;    /* the record's first tokens, kept as they are */
    bool by_token;
    int32_t base; /* exponent of the largest step of a channel; of the smallest of a token */
    uint32_t unit;
    uint64_t valid[BOUNDED_GROUPS_MAX], coded[BOUNDED_GROUPS_MAX], wide[BOUNDED_GROUPS_MAX];
    uint64_t low[BOUNDED_GROUPS_MAX][BOUNDED_LOW_MAX]; /* channels with more than k low bits */
    uint8_t low_planes[BOUNDED_GROUPS_MAX];
    uint8_t low_count[BOUNDED_GROUPS_MAX][BOUNDED_LOW_MAX];
    uint8_t coded_count[BOUNDED_GROUPS_MAX], wide_count[BOUNDED_GROUPS_MAX];
    float levels[1u << BOUNDED_LEVEL_BITS]; /* steps of tokens */
    float middle[BOUNDED_VALUES_MAX
                 + BOUNDED_GROUP]; /* from here on by channel, filled as far as used */
    float step[BOUNDED_VALUES_MAX + BOUNDED_GROUP];    /* by channel; zero: no bits */
    float divisor[BOUNDED_VALUES_MAX + BOUNDED_GROUP]; /* the same, one where there are no bits */
    float carry[BOUNDED_VALUES_MAX + BOUNDED_GROUP];   /* share of the last deviation that stays */
    uint8_t shift[BOUNDED_VALUES_MAX + BOUNDED_GROUP]; /* low bits */
    uint8_t first[BOUNDED_VALUES_MAX + BOUNDED_GROUP]; /* 1 << shift: what a first digit is worth */
    uint8_t second[BOUNDED_VALUES_MAX + BOUNDED_GROUP]; /* its second bit: 2 << shift, or 0 */
    uint8_t top[BOUNDED_VALUES_MAX + BOUNDED_GROUP];    /* the first digit that goes on: 1 or 3 */
} bounded_plan;

/* A stripe on its way: two bytes of each value, and its tokens' levels. */
typedef struct {
    uint32_t count, exact; /* rows; of them those kept as they are, the first ones */
    uint32_t escapes;
    uint8_t low[BOUNDED_SCRATCH_VALUES + BOUNDED_GROUP]; /* a magnitude's low bits */
    uint8_t rest[BOUNDED_SCRATCH_VALUES
                 + BOUNDED_GROUP]; /* first digit, << 2 further ones, << 5 sign */
    uint8_t level[BOUNDED_ROWS_MAX + FKV_EXACT_TOKENS + 1];
    float state[BOUNDED_VALUES_MAX + BOUNDED_GROUP];
    uint8_t planes[FKV_PAGE_BYTES + 16], digits[FKV_PAGE_BYTES + 16];
} bounded_scratch;

bool fkv_bounded_plan_make(bounded_plan *plan, const uint8_t *parameters, uint32_t vector_bytes,
                           uint32_t mode);
float fkv_bounded_step(int32_t exponent);
/* The exponent whose step comes nearest, in ratio. */
int32_t fkv_bounded_exponent(float step);

/* What a stream is coded with. factor: the step of channels; of tokens the step by the token's deviation.
 * Below 0: the same, but steps of channels are -factor * their mean deviation, and choosing puts the
 * factor that this comes to in its place; 0: a 254th of the range (of a channel or token). exact: tokens
 * at the stream's start kept as they are. */
typedef struct {
    uint32_t mode, vector_bytes, exact;
    float factor;
} bounded_wish;

/* Chooses parameters for `count` rows, and levels[count] where tokens have their own. Scratch: values of
 * count * values, work of count + values. Returns the bits that the rows will take about, with
 * the parameters; 0: they can't be coded so. */
uint64_t fkv_bounded_choose(const uint64_t *rows, uint32_t count, bounded_wish *wish, float *values,
                            uint16_t *work, uint8_t *parameters, uint8_t *levels);
/* The levels of rows in a stream with these parameters, as fkv_bounded_choose() gives them. */
void fkv_bounded_levels(const uint64_t *rows, uint32_t count, const bounded_wish *wish,
                        const bounded_plan *plan, uint8_t *levels);
/* Quantises rows of a stripe that begins with row 0 until `space` bytes or `count` rows are full; the
 * first `exact` are kept as they are. Returns how many. */
uint32_t fkv_bounded_fit(const uint64_t *rows, uint32_t count, uint32_t exact,
                         const uint8_t *levels, uint32_t space, const bounded_plan *plan,
                         bounded_scratch *scratch);
/* The stripe of what was fitted; returns its length. */
uint32_t fkv_bounded_emit(const uint64_t *rows, const bounded_plan *plan, bounded_scratch *scratch,
                          uint8_t *out);
int fkv_bounded_plan_decode(const uint8_t *in, uint32_t length, uint32_t count, uint32_t exact,
                            const bounded_plan *plan, const uint64_t *rows);

/* ---- the paths ---- */
#define BOUNDED_PATH(suffix)                                                                       \
    void fkv_bounded_values_##suffix(const uint8_t *row, uint32_t dtype, uint32_t count,           \
                                     float *out);                                                  \
    void fkv_bounded_measure_##suffix(const float *values, uint32_t count, uint32_t width,         \
                                      float *sums);                                                \
    void fkv_bounded_spread_##suffix(const float *row, uint32_t width, float *spread);             \
    void fkv_bounded_magnitudes_##suffix(const float *values, uint32_t width,                      \
                                         const bounded_plan *plan, float step, float *state,       \
                                         uint16_t *magnitudes);                                    \
    void fkv_bounded_prices_##suffix(const uint16_t *magnitudes, uint32_t width, uint32_t element, \
                                     uint16_t *prices);                                            \
    void fkv_bounded_quantise_##suffix(const float *values, const bounded_plan *plan, float step,  \
                                       float limit, float *state, uint8_t *low, uint8_t *rest,     \
                                       uint32_t *totals);                                          \
    void fkv_bounded_emit_##suffix(const bounded_plan *plan, bounded_scratch *scratch,             \
                                   uint32_t *plane_bytes, uint32_t *digit_bytes);                  \
    const uint8_t *fkv_bounded_decode_##suffix(                                                    \
        const bounded_plan *plan, uint32_t count, const uint8_t *bits, const uint8_t *begin,       \
        const uint8_t *end, float *state, const uint64_t *rows, uint64_t *used);
BOUNDED_PATH(portable)
#if defined(__x86_64__)
BOUNDED_PATH(avx2)
BOUNDED_PATH(avx512)
#endif
#endif
