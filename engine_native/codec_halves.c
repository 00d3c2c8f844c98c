/* codec_halves.c: stripes of float32 and of one-byte floats, through the codes of 16-bit values.
 *
 *   type   16-bit value                                            code of            the rest
 *   fp32   upper half                                              bfloat16           lower half
 *   e4m3   sign << 15 | exponent (4 bits) << 10 | mantissa << 7    float16, no low    none
 *   e5m2   byte << 8                                               bytes stored       none
 *
 *   stripe:  | lower halves of row 0 | row 1 | ... | a stripe of the 16-bit values |
 *
 * The lower halves are stored (two bytes each) in the modes FXP_FP32 and PREFIX_FP32; in their SHORT
 * twins all of them are zero.
 *
 * Invariants
 *  - bit-exact for every pattern of a type (SHORT: whose lower half is zero);
 *  - the code paths are those of the 16-bit codes: this file has one;
 *  - decoding reads nothing outside in[0, length) and writes whole wanted rows only, whatever the
 *    bytes are; it takes exactly what the encoder gives.
 */
#include "codec_halves.h"
#include "codec_fxp.h"
#include <string.h>

static uint32_t dtype_of(uint32_t mode)
{
    return mode == FKV_STREAM_PREFIX_E4M3   ? FKV_DTYPE_E4M3
           : mode == FKV_STREAM_PREFIX_E5M2 ? FKV_DTYPE_E5M2
                                            : FKV_DTYPE_FP32;
}

void fkv_halves_cut(const uint8_t *row, uint32_t values, uint32_t dtype, uint16_t *halves)
{
    switch (dtype) {
    case FKV_DTYPE_FP32:
        for (uint32_t i = 0; i < values; i++) memcpy(&halves[i], row + 4 * i + 2, 2);
        break;
    case FKV_DTYPE_E4M3:
        for (uint32_t i = 0; i < values; i++)
            halves[i] = (uint16_t)((row[i] & 0x80) << 8 | (row[i] & 0x7F) << 7);
        break;
    default:
        for (uint32_t i = 0; i < values; i++) halves[i] = (uint16_t)(row[i] << 8);
    }
}

bool fkv_halves_enough(const uint8_t *row, uint32_t values)
{
    uint32_t any = 0;
    for (uint32_t i = 0; i < values; i++) {
        uint16_t lower;
        memcpy(&lower, row + 4 * i, 2);
        any |= lower;
    }
    return any == 0;
}

/* The opposite of cutting; rest: the row's lower halves, NULL where they are zero. */
static void join(const uint16_t *halves, const uint8_t *rest, uint32_t values, uint32_t dtype,
                 uint8_t *row)
{
    switch (dtype) {
    case FKV_DTYPE_FP32:
        for (uint32_t i = 0; i < values; i++) {
            uint16_t lower = 0;
            if (rest) memcpy(&lower, rest + 2 * i, 2);
            uint32_t value = (uint32_t)halves[i] << 16 | lower;
            memcpy(row + 4 * i, &value, 4);
        }
        break;
    case FKV_DTYPE_E4M3:
        for (uint32_t i = 0; i < values; i++)
            row[i] = (uint8_t)((halves[i] >> 8 & 0x80) | (halves[i] >> 7 & 0x7F));
        break;
    default:
        for (uint32_t i = 0; i < values; i++) row[i] = (uint8_t)(halves[i] >> 8);
    }
}

/* Places of a stripe's 16-bit values; false where no page holds so many. */
static bool places(const uint64_t *rows, uint32_t count, uint32_t values, uint16_t *halves,
                   uint64_t *half_rows)
{
    if (!values || count > FKV_STRIPE_TOKENS_MAX || (uint64_t)count * values > PREFIX_PAGE_VALUES)
        return false;
    for (uint32_t r = 0; r < count; r++)
        half_rows[r] = rows[r] ? (uint64_t)(uintptr_t)(halves + r * values) : 0;
    return true;
}

uint32_t fkv_halves_plan_encode(const uint64_t *rows, uint32_t count, uint32_t vector_bytes,
                                uint32_t mode, const uint8_t *parameters, const prefix_plan *plan,
                                uint8_t *out)
{
    uint16_t halves[PREFIX_PAGE_VALUES];
    uint64_t half_rows[FKV_STRIPE_TOKENS_MAX];
    const uint32_t values = vector_bytes / fkv_mode_element(mode);
    const uint32_t rest = count * values * fkv_mode_rest(mode),
                   half_mode = fkv_mode_of_halves(mode);
    if (!places(rows, count, values, halves, half_rows) || rest > FKV_PAGE_BYTES) return 0;
    for (uint32_t r = 0; r < count; r++) {
        const uint8_t *row = (const uint8_t *)(uintptr_t)rows[r];
        fkv_halves_cut(row, values, dtype_of(mode), halves + r * values);
        if (rest)
            for (uint32_t i = 0; i < values; i++)
                memcpy(out + 2 * (r * values + i), row + 4 * i, 2);
    }
    uint32_t length =
        prefix_mode(half_mode)
            ? fkv_prefix_plan_encode(half_rows, count, plan, out + rest)
            : fkv_fxp_encode(half_rows, count, 2 * values, half_mode, parameters, out + rest);
    return length ? rest + length : 0;
}

int fkv_halves_plan_decode(const uint8_t *in, uint32_t length, uint32_t count,
                           uint32_t vector_bytes, uint32_t mode, const uint8_t *parameters,
                           const prefix_plan *plan, const uint64_t *rows)
{
    uint16_t halves[PREFIX_PAGE_VALUES];
    uint64_t half_rows[FKV_STRIPE_TOKENS_MAX];
    const uint32_t values = vector_bytes / fkv_mode_element(mode);
    if (!places(rows, count, values, halves, half_rows)) return -1;
    const uint32_t rest = count * values * fkv_mode_rest(mode),
                   half_mode = fkv_mode_of_halves(mode);
    if (rest > length) return -1;
    int verdict = prefix_mode(half_mode)
                      ? fkv_prefix_plan_decode(in + rest, length - rest, count, plan, half_rows)
                      : fkv_fxp_decode(in + rest, length - rest, count, 2 * values, half_mode,
                                       parameters, half_rows);
    for (uint32_t r = 0; verdict == 0 && r < count; r++)
        if (rows[r])
            join(halves + r * values, rest ? in + 2 * (size_t)r * values : NULL, values,
                 dtype_of(mode), (uint8_t *)(uintptr_t)rows[r]);
    return verdict;
}

/* ---- for tests ---- */

static bool plan_of(prefix_plan *plan, uint32_t vector_bytes, uint32_t mode,
                    const uint8_t *parameters)
{
    const uint32_t element = fkv_mode_element(mode);
    if (!fkv_mode_cuts(mode) || vector_bytes % element) return false;
    if (!prefix_mode(fkv_mode_of_halves(mode))) return true;
    return fkv_prefix_plan_make(plan, parameters, vector_bytes / element * 2,
                                fkv_mode_of_halves(mode));
}

uint32_t fkv_halves_encode(const uint64_t *rows, uint32_t count, uint32_t vector_bytes,
                           uint32_t mode, const uint8_t *parameters, uint8_t *out)
{
    prefix_plan plan;
    if (!plan_of(&plan, vector_bytes, mode, parameters)) return 0;
    return fkv_halves_plan_encode(rows, count, vector_bytes, mode, parameters, &plan, out);
}

int fkv_halves_decode(const uint8_t *in, uint32_t length, uint32_t count, uint32_t vector_bytes,
                      uint32_t mode, const uint8_t *parameters, const uint64_t *rows)
{
    prefix_plan plan;
    if (!plan_of(&plan, vector_bytes, mode, parameters)) return -1;
    return fkv_halves_plan_decode(in, length, count, vector_bytes, mode, parameters, &plan, rows);
}
