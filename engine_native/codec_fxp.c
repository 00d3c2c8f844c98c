/* codec_fxp.c: the fixed-width exponent code of one stripe: portable code and the choice of the
 * path.
 *
 * A stripe of `count` rows (vectors) of n values, n = vector_bytes / 2:
 *
 *   row 0 | row 1 | ... | row count-1 | escapes
 *   row  = low bytes [n] | plane 0 | plane 1 | plane 2 | fp16 only: plane 3 | plane 4 | plane 5
 *   low byte   bf16: sign << 7 | mantissa;  fp16: mantissa bits 0..7
 *   plane      ceil(n / 8) bytes, bit i of byte j belongs to value 8j + i; bits past n are zero
 *   planes     0..2: bits 0..2 of the exponent's code; 3, 4: mantissa bits 8, 9; 5: sign
 *   code c     0..6: exponent = base[value / 16] - c;  7: the next escape is the exponent
 *   escapes    one byte each, in order of row, then value
 *
 * FKV_STREAM_PLAIN keeps the rows as they are.
 *
 * Invariants
 *  - bit-exact for every 16-bit pattern, whatever the bases;
 *  - the AVX2 path (codec_fxp_avx2.c) gives the same bases, costs and bytes;
 *  - decoding reads nothing outside in[0, length) and writes whole wanted rows only, whatever the
 *    bytes are; it accepts exactly the stripes whose escapes fit the codes and, in fp16, have five
 *    bits;
 *  - bases chosen here are >= 6: no code can wrap, which the AVX2 encoder relies on.
 */
#include "codec_fxp.h"
#include "cpu.h"
#include <string.h>

#define PLANES_BF16 3u
#define PLANES_FP16 6u

static inline uint16_t load16(const uint8_t *at)
{
    uint16_t value;
    memcpy(&value, at, 2);
    return value;
}

static inline uint32_t exponent_of(uint16_t value, uint32_t mode)
{
    return mode == FKV_STREAM_FXP_FP16 ? value >> 10 & 0x1F : value >> 7 & 0xFF;
}

/* Unlike the subtraction alone, right for bases below 6 too. */
static inline uint32_t code_of(uint32_t exponent, uint32_t base)
{
    return exponent <= base && base - exponent < FXP_SPAN ? base - exponent : FXP_ESCAPE;
}

static int bases_wrap(const uint8_t *bases, uint32_t vector_bytes)
{
    for (uint32_t i = 0; i < fkv_fxp_bases_bytes(vector_bytes); i++)
        if (bases[i] < FXP_SPAN - 1) return 1;
    return 0;
}

/* ---- choosing bases ---- */
uint8_t fkv_fxp_best_base(const uint32_t *bins, uint32_t exponent_max)
{
    uint32_t base = exponent_max, sum = 0;
    for (uint32_t i = 0; i < FXP_SPAN; i++) sum += bins[exponent_max - i];
    uint32_t best = sum;
    for (uint32_t top = exponent_max - 1; top >= FXP_SPAN - 1; top--) {
        sum += bins[top - (FXP_SPAN - 1)] - bins[top + 1];
        if (sum > best) {
            best = sum;
            base = top;
        }
    }
    return (uint8_t)base;
}

void fkv_fxp_count(const uint64_t *rows, uint32_t count, uint32_t offset, uint32_t channels,
                   uint32_t mode, uint32_t *bins)
{
    /* Neighbours often share an exponent; four tables keep their increments from waiting for each
     * other. */
    uint32_t parts[4][256];
    memset(parts, 0, sizeof parts);
    for (uint32_t r = 0; r < count; r++) {
        const uint8_t *row = (const uint8_t *)(uintptr_t)rows[r] + offset;
        uint32_t i = 0;
        for (; i + 4 <= channels; i += 4, row += 8) {
            parts[0][exponent_of(load16(row), mode)]++;
            parts[1][exponent_of(load16(row + 2), mode)]++;
            parts[2][exponent_of(load16(row + 4), mode)]++;
            parts[3][exponent_of(load16(row + 6), mode)]++;
        }
        for (; i < channels; i++, row += 2) parts[i & 3][exponent_of(load16(row), mode)]++;
    }
    for (int e = 0; e < 256; e++) bins[e] = parts[0][e] + parts[1][e] + parts[2][e] + parts[3][e];
}

static void choose_portable(const uint64_t *rows, uint32_t count, uint32_t vector_bytes,
                            uint32_t mode, uint8_t *bases)
{
    uint32_t values = fkv_fxp_values(vector_bytes), bins[256];
    for (uint32_t first = 0; first < values; first += FKV_STREAM_GROUP) {
        uint32_t channels = values - first < FKV_STREAM_GROUP ? values - first : FKV_STREAM_GROUP;
        fkv_fxp_count(rows, count, 2 * first, channels, mode, bins);
        bases[first / FKV_STREAM_GROUP] = fkv_fxp_best_base(bins, fkv_fxp_exponent_max(mode));
    }
}

void fkv_fxp_choose(const uint64_t *rows, uint32_t count, uint32_t vector_bytes, uint32_t mode,
                    uint8_t *bases)
{
    if (mode == FKV_STREAM_PLAIN) return;
#if defined(__x86_64__)
    if (fkv_cpu_has.avx2) {
        fkv_fxp_choose_avx2(rows, count, vector_bytes, mode, bases);
        return;
    }
#endif
    choose_portable(rows, count, vector_bytes, mode, bases);
}

/* ---- encoding ---- */
static void costs_portable(const uint64_t *rows, uint32_t count, uint32_t vector_bytes,
                           uint32_t mode, const uint8_t *bases, uint16_t *costs)
{
    uint32_t values = fkv_fxp_values(vector_bytes);
    uint64_t fixed = fkv_fxp_row_bytes(vector_bytes, mode);
    for (uint32_t r = 0; r < count; r++) {
        const uint8_t *row = (const uint8_t *)(uintptr_t)rows[r];
        uint64_t cost = fixed;
        for (uint32_t i = 0; i < values; i++)
            cost += code_of(exponent_of(load16(row + 2 * i), mode), bases[i / FKV_STREAM_GROUP])
                    == FXP_ESCAPE;
        costs[r] = cost < UINT16_MAX ? (uint16_t)cost : UINT16_MAX;
    }
}

/* Costs that don't fit 16 bits are given as 65535: such a row fits no page. */
void fkv_fxp_costs(const uint64_t *rows, uint32_t count, uint32_t vector_bytes, uint32_t mode,
                   const uint8_t *bases, uint16_t *costs)
{
    if (mode == FKV_STREAM_PLAIN) {
        for (uint32_t r = 0; r < count; r++)
            costs[r] = vector_bytes < UINT16_MAX ? (uint16_t)vector_bytes : UINT16_MAX;
        return;
    }
#if defined(__x86_64__)
    if (fkv_cpu_has.avx2 && !bases_wrap(bases, vector_bytes)) {
        fkv_fxp_costs_avx2(rows, count, vector_bytes, mode, bases, costs);
        return;
    }
#endif
    costs_portable(rows, count, vector_bytes, mode, bases, costs);
}

static uint8_t *encode_row_portable(const uint8_t *row, uint32_t values, uint32_t mode,
                                    const uint8_t *bases, uint8_t *out, uint8_t *escapes)
{
    uint32_t plane_bytes = (values + 7) / 8;
    uint8_t *planes = out + values;
    memset(planes, 0, plane_bytes * (mode == FKV_STREAM_FXP_FP16 ? PLANES_FP16 : PLANES_BF16));
    for (uint32_t i = 0; i < values; i++) {
        uint16_t value = load16(row + 2 * i);
        uint32_t exponent = exponent_of(value, mode);
        uint32_t bits = code_of(exponent, bases[i / FKV_STREAM_GROUP]); /* bit k goes to plane k */
        if (bits == FXP_ESCAPE) *escapes++ = (uint8_t)exponent;
        if (mode == FKV_STREAM_FXP_FP16) {
            out[i] = (uint8_t)value;
            bits |= (value >> 8 & 3) << 3 | (value >> 15) << 5;
        } else {
            out[i] = (uint8_t)(value >> 8 & 0x80) | (value & 0x7F);
        }
        for (uint32_t k = 0; bits; k++, bits >>= 1)
            planes[k * plane_bytes + i / 8] |= (uint8_t)((bits & 1) << (i & 7));
    }
    return escapes;
}

uint32_t fkv_fxp_encode(const uint64_t *rows, uint32_t count, uint32_t vector_bytes, uint32_t mode,
                        const uint8_t *bases, uint8_t *out)
{
    uint64_t row_bytes = fkv_fxp_row_bytes(vector_bytes, mode);
    if (mode == FKV_STREAM_PLAIN) {
        for (uint32_t r = 0; r < count; r++)
            memcpy(out + r * row_bytes, (const uint8_t *)(uintptr_t)rows[r], vector_bytes);
        return (uint32_t)(count * row_bytes);
    }
#if defined(__x86_64__)
    if (fkv_cpu_has.avx2 && !bases_wrap(bases, vector_bytes))
        return (uint32_t)(fkv_fxp_encode_avx2(rows, count, vector_bytes, mode, bases, out) - out);
#endif
    uint8_t *escapes = out + count * row_bytes;
    for (uint32_t r = 0; r < count; r++)
        escapes =
            encode_row_portable((const uint8_t *)(uintptr_t)rows[r], fkv_fxp_values(vector_bytes),
                                mode, bases, out + r * row_bytes, escapes);
    return (uint32_t)(escapes - out);
}

/* ---- decoding ---- */
static inline uint32_t plane_bit(const uint8_t *planes, uint32_t plane_bytes, uint32_t k,
                                 uint32_t i)
{
    return planes[k * plane_bytes + i / 8] >> (i & 7) & 1;
}

/* row may be NULL. Returns the next escape, or NULL where they ran out. */
static const uint8_t *decode_row_portable(const uint8_t *in, uint32_t values, uint32_t mode,
                                          const uint8_t *bases, const uint8_t *escapes,
                                          const uint8_t *end, uint8_t *row)
{
    uint32_t plane_bytes = (values + 7) / 8;
    const uint8_t *planes = in + values;
    for (uint32_t i = 0; i < values; i++) {
        uint32_t code = plane_bit(planes, plane_bytes, 0, i)
                        | plane_bit(planes, plane_bytes, 1, i) << 1
                        | plane_bit(planes, plane_bytes, 2, i) << 2;
        uint32_t exponent = (uint8_t)(bases[i / FKV_STREAM_GROUP] - code), value;
        if (code == FXP_ESCAPE) {
            if (escapes == end) return NULL;
            exponent = *escapes++;
        }
        if (row == NULL) continue;
        if (mode == FKV_STREAM_FXP_FP16)
            value = in[i] | plane_bit(planes, plane_bytes, 3, i) << 8
                    | plane_bit(planes, plane_bytes, 4, i) << 9
                    | plane_bit(planes, plane_bytes, 5, i) << 15 | (exponent & 0x1F) << 10;
        else
            value = (uint32_t)(in[i] & 0x80) << 8 | exponent << 7 | (in[i] & 0x7F);
        uint16_t narrow = (uint16_t)value;
        memcpy(row + 2 * i, &narrow, 2);
    }
    return escapes;
}

static const uint8_t *decode_portable(const uint8_t *in, uint32_t length, uint32_t count,
                                      uint32_t vector_bytes, uint32_t mode, const uint8_t *bases,
                                      const uint64_t *rows)
{
    uint64_t row_bytes = fkv_fxp_row_bytes(vector_bytes, mode);
    const uint8_t *escapes = in + count * row_bytes;
    for (uint32_t r = 0; r < count && escapes; r++)
        escapes = decode_row_portable(in + r * row_bytes, fkv_fxp_values(vector_bytes), mode, bases,
                                      escapes, in + length, (uint8_t *)(uintptr_t)rows[r]);
    return escapes;
}

static int decode_plain(const uint8_t *in, uint32_t length, uint32_t count, uint32_t vector_bytes,
                        const uint64_t *rows)
{
    if ((uint64_t)count * vector_bytes != length) return -1;
    for (uint32_t r = 0; r < count; r++)
        if (rows[r])
            memcpy((uint8_t *)(uintptr_t)rows[r], in + (uint64_t)r * vector_bytes, vector_bytes);
    return 0;
}

int fkv_fxp_decode(const uint8_t *in, uint32_t length, uint32_t count, uint32_t vector_bytes,
                   uint32_t mode, const uint8_t *bases, const uint64_t *rows)
{
    const uint8_t *end;
    if (mode == FKV_STREAM_PLAIN) return decode_plain(in, length, count, vector_bytes, rows);
    if (mode != FKV_STREAM_FXP_BF16 && mode != FKV_STREAM_FXP_FP16) return -1;
    uint64_t fixed = fkv_fxp_row_bytes(vector_bytes, mode); /* < 2^33, so the product can't wrap */
    if (fixed != 0 && count > length / fixed) return -1;
    if (mode == FKV_STREAM_FXP_FP16)
        for (uint64_t i = count * fixed; i < length; i++)
            if (in[i] > 0x1F) return -1;
#if defined(__x86_64__)
    if (fkv_cpu_has.avx2)
        end = fkv_fxp_decode_avx2(in, length, count, vector_bytes, mode, bases, rows);
    else
#endif
        end = decode_portable(in, length, count, vector_bytes, mode, bases, rows);
    return end == in + length ? 0 : -1;
}
