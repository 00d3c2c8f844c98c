/* codec_prefix.h: what the halves of the prefix code in bit planes share; see codec_prefix.c for the
 * format.
 *
 * Invariants
 *  - a function and its _avx2 and _avx512 twins give the same bytes, costs and verdicts;
 *  - a plan exists only for parameters that an encoder can produce (fkv_prefix_plan_make refuses the
 *    others);
 *  - nothing here allocates; scratch is bounded by what fits a page. */
#ifndef FLASHKV_CODEC_PREFIX_H
#define FLASHKV_CODEC_PREFIX_H
#include "flashkv_native.h"
#include "codec_values.h"
#include <stdbool.h>
#include <string.h>

#define PREFIX_VALUES_MAX 1024u /* of a vector: FKV_CODABLE_VECTOR_MAX bytes */
#define PREFIX_GROUP 64u        /* values whose bits are one word of each plane */
#define PREFIX_GROUPS_MAX (PREFIX_VALUES_MAX / PREFIX_GROUP)
#define PREFIX_SYMBOLS 15u
#define PREFIX_ESCAPE 15u
#define PREFIX_DISTANCE_FIRST (-4) /* distances below the base that have a symbol: -4 ... 10 */
#define PREFIX_NONE 99             /* in fkv_prefix_distance: no symbol of this kind */
/* A channel's parameter: delta in bits 0-4, its kind in bit 5, its sign in bits 6 and 7. */
#define PREFIX_DELTA_MASK 0x1Fu
#define PREFIX_DELTA_ZERO 0x1Fu /* base 0 */
#define PREFIX_WIDE 0x20u
#define PREFIX_STEADY 0x80u
#define PREFIX_NEGATIVE 0x40u
/* Values that a stripe can have: without low bytes a value has 3 bits at least. */
#define PREFIX_PAGE_VALUES (FKV_PAGE_BYTES * 8 / 3)
/* What a batch may load behind the planes: three digits of 64 groups, and a word. */
#define PREFIX_LOAD_ROOM (64u * 24 + 16)
#define PREFIX_BITS_ROOM (FKV_PAGE_BYTES + PREFIX_LOAD_ROOM)

/* Table set 1: the distance of a symbol, and the symbol of distance - PREFIX_DISTANCE_FIRST; by kind
 * (0 narrow, 1 wide). */
extern const int8_t fkv_prefix_distance[2][16];
extern uint8_t fkv_prefix_symbol[2][16];
extern const uint8_t fkv_prefix_bits[2][16]; /* of a symbol; an escape with its byte */

typedef struct {
    uint32_t values, groups, static_bits; /* static_bits: of the planes that every row has */
    uint32_t low_bytes;                   /* of a row: a byte a value, or none */
    uint32_t mantissa_planes;             /* float16 and one-byte types: bits 8, 9 and 7 */
    uint32_t exponent_max;
    bool fp16; /* all but bfloat16: exponents from bit 10 on */
    uint8_t wide_count[PREFIX_GROUPS_MAX], sign_count[PREFIX_GROUPS_MAX];
    uint64_t valid[PREFIX_GROUPS_MAX], wide[PREFIX_GROUPS_MAX];
    uint64_t raw_sign[PREFIX_GROUPS_MAX]; /* channels whose signs are stored */
    uint64_t negative[PREFIX_GROUPS_MAX]; /* of the others those that are */
    uint8_t base[PREFIX_VALUES_MAX + PREFIX_GROUP];
    uint8_t kind[PREFIX_VALUES_MAX + PREFIX_GROUP]; /* 0xFF: wide */
} prefix_plan;

void fkv_prefix_make_prices(void); /* once the symbols are there */
bool fkv_prefix_plan_make(prefix_plan *plan, const uint8_t *parameters, uint32_t vector_bytes,
                          uint32_t mode);

static inline bool prefix_mode(uint32_t mode)
{
    return mode == FKV_STREAM_PREFIX_BF16 || mode == FKV_STREAM_PREFIX_FP16
           || mode == FKV_STREAM_PREFIX_E4M3 || mode == FKV_STREAM_PREFIX_E5M2;
}
/* Planes that hold bits of the mantissa. */
static inline uint32_t prefix_mantissa_planes(uint32_t mode)
{
    return mode == FKV_STREAM_PREFIX_BF16 ? 0 : mode == FKV_STREAM_PREFIX_E4M3 ? 3 : 2;
}

static inline uint32_t prefix_exponent_max(uint32_t mode)
{
    return mode == FKV_STREAM_PREFIX_BF16 ? 255 : mode == FKV_STREAM_PREFIX_E4M3 ? 15 : 31;
}

/* A stripe while it is made: where each part goes. The digits' first byte has digits_held bits of the
 * last plane's. Digits take at most 8 bits a value, escapes 8 more. */
typedef struct {
    uint8_t *low;
    uint32_t digits_held, digit_bytes, escape_count;
    uint8_t planes[FKV_PAGE_BYTES + 16];
    uint8_t digits[PREFIX_PAGE_VALUES + 16], escapes[PREFIX_PAGE_VALUES];
} prefix_parts;

/* What choosing looks at, of 64 channels: values by distance below each one's `top`; [15]: others. */
#define PREFIX_STEP PREFIX_GROUP
typedef struct {
    uint16_t counts[16][PREFIX_STEP];
    uint16_t negatives[PREFIX_STEP];
    uint8_t top[PREFIX_STEP];
} prefix_counts;

/* Of channels [first, first + 64), fewer at the vector's end; at most 65,535 rows. */
void fkv_prefix_count(const uint64_t *rows, uint32_t count, uint32_t values, uint32_t first,
                      bool fp16, prefix_counts *counts);

/* Kinds and bases that are tried, the bases around a channel's highest exponent. */
#define PREFIX_DELTAS 8u
#define PREFIX_COMBINATIONS (2 * PREFIX_DELTAS)
extern uint16_t fkv_prefix_prices[16][PREFIX_COMBINATIONS];

/* With a plan at hand; what the functions of flashkv_native.h do. */
void fkv_prefix_plan_costs(const uint64_t *rows, uint32_t count, const prefix_plan *plan,
                           uint16_t *bits);
uint32_t fkv_prefix_plan_encode(const uint64_t *rows, uint32_t count, const prefix_plan *plan,
                                uint8_t *out);
int fkv_prefix_plan_decode(const uint8_t *in, uint32_t length, uint32_t count,
                           const prefix_plan *plan, const uint64_t *rows);
/* What a group of 64 values is made of: bit i of each word is value i's. */
typedef struct {
    uint64_t symbol[4]; /* bit k of each value's symbol */
    uint64_t sign;
} prefix_words;

/* Puts a group's escapes in their places (row NULL: nowhere); they are read downwards from *escapes,
 * not below `begin`. False where they ran out, or a value had a code of its own. */
bool fkv_prefix_patch_group(uint64_t escape, uint32_t group, const prefix_plan *plan, uint64_t sign,
                            const uint8_t *begin, const uint8_t **escapes, uint8_t *row);

static inline uint32_t prefix_symbol(uint32_t exponent, const prefix_plan *plan, uint32_t channel)
{
    uint32_t at =
        (plan->base[channel] - exponent - (uint32_t)PREFIX_DISTANCE_FIRST) & plan->exponent_max;
    return at < PREFIX_SYMBOLS ? fkv_prefix_symbol[plan->kind[channel] & 1][at] : PREFIX_ESCAPE;
}

#if defined(__x86_64__)
void fkv_prefix_count_avx2(const uint64_t *rows, uint32_t count, uint32_t values, uint32_t first,
                           bool fp16, prefix_counts *counts);
void fkv_prefix_count_avx512(const uint64_t *rows, uint32_t count, uint32_t values, uint32_t first,
                             bool fp16, prefix_counts *counts);
void fkv_prefix_best_avx2(const prefix_counts *counts, uint32_t shift, uint8_t best[PREFIX_STEP]);
#endif

/* ---- the paths ---- */
/* Decoding returns the first of the escapes that were used, or NULL; *plane_bits: how many were. */
#define PREFIX_PATH(suffix)                                                                        \
    void fkv_prefix_costs_##suffix(const uint64_t *rows, uint32_t count, const prefix_plan *plan,  \
                                   uint16_t *bits);                                                \
    void fkv_prefix_encode_##suffix(const uint64_t *rows, uint32_t count, const prefix_plan *plan, \
                                    prefix_parts *parts);                                          \
    const uint8_t *fkv_prefix_decode_##suffix(                                                     \
        const uint8_t *in, uint32_t count, const prefix_plan *plan, const uint8_t *planes,         \
        uint64_t *plane_bits, const uint8_t *end, const uint64_t *rows);
PREFIX_PATH(portable)
#if defined(__x86_64__)
PREFIX_PATH(avx2)
PREFIX_PATH(avx512)
#endif
#endif
