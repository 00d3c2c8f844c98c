/* codec_fxp.c: the fixed-width exponent code of one stripe: portable code and the choice of the
 * path.
 *
 * A stripe of `count` rows (vectors) of n values, n = vector_bytes / 2:
 *
 *   row 0 | row 1 | ... | row count-1 | escapes
 *   row      = low bytes [n] | codes | fp16 only: high bits
 *   low byte   bf16: mantissa << 1 | sign;  fp16: mantissa bits 0..7
 *   codes      three bits a value: those of each 64 values in three words, low two bits of the first
 *              32, of the others, high bits; of the rest those of each 16 in a word of nibbles
 *   high bits  three bits a value, kept likewise: mantissa bits 8 and 9, sign
 *   code c     0..6: exponent = base of the channel - c;  7: the next escape is the exponent
 *   escapes    one byte each, in order of row, then value
 *
 * Parameters: a byte b, then a nibble d for each channel: its base is max(b - d, 6); d = 15: 6.
 *
 * FKV_STREAM_PLAIN keeps the rows as they are.
 *
 * Invariants
 *  - bit-exact for every 16-bit pattern, whatever the parameters;
 *  - the other paths (codec_fxp_avx2.c, codec_fxp_avx512.c) give the same parameters, costs and bytes;
 *  - decoding reads nothing outside in[0, length) and writes whole wanted rows only, whatever the
 *    bytes are; it accepts exactly the stripes whose escapes fit the codes and, in fp16, have five
 *    bits.
 */
#include "codec_fxp.h"
#include "codec_values.h"
#include "cpu.h"

/* The processor's path of a function that has three. */
#if defined(__x86_64__)
#define RUN(name, ...)                                                                             \
    (fkv_cpu_has.avx512_wide ? fkv_fxp_##name##_avx512(__VA_ARGS__)                                \
     : fkv_cpu_has.avx2      ? fkv_fxp_##name##_avx2(__VA_ARGS__)                                  \
                             : name##_portable(__VA_ARGS__))
#else
#define RUN(name, ...) name##_portable(__VA_ARGS__)
#endif

#define BASES_MAX (FXP_VALUES_MAX + FXP_GROUP)

static inline uint32_t code_of(uint32_t exponent, uint32_t base)
{
    return exponent <= base && base - exponent < FXP_SPAN ? base - exponent : FXP_ESCAPE;
}

/* ---- parameters ---- */
static void bases_of(const uint8_t *parameters, uint32_t values, uint8_t *bases)
{
    const uint8_t top = *parameters++;
    for (uint32_t i = 0; i < values; i += 2) { /* two loops without a branch: made of vectors */
        bases[i] = parameters[i / 2] & 0xF;
        bases[i + 1] = parameters[i / 2] >> 4;
    }
    for (uint32_t i = 0; i < values; i++) {
        uint8_t delta = bases[i] == FXP_DELTA_MIN ? UINT8_MAX : bases[i];
        uint8_t base = top > delta ? (uint8_t)(top - delta) : 0;
        bases[i] = base > FXP_BASE_MIN ? base : FXP_BASE_MIN;
    }
    memset(bases + values, FXP_BASE_MIN, FXP_GROUP);
}

static void parameters_of(const uint8_t *bases, uint32_t values, uint8_t *parameters)
{
    uint32_t top = FXP_BASE_MIN;
    for (uint32_t i = 0; i < values; i++) top = bases[i] > top ? bases[i] : top;
    memset(parameters, 0, fkv_stream_parameters(2 * values, FKV_STREAM_FXP_BF16));
    *parameters++ = (uint8_t)top;
    for (uint32_t i = 0; i < values; i++) {
        uint32_t delta = top - bases[i];
        if (delta >= FXP_DELTA_MIN)
            delta = bases[i] == FXP_BASE_MIN ? FXP_DELTA_MIN : FXP_DELTA_MIN - 1;
        parameters[i / 2] |= (uint8_t)(delta << 4 * (i & 1));
    }
}

/* The base whose window holds most of the channel's exponents below `limit`, and how many. */
static uint32_t best_base(const uint64_t *rows, uint32_t count, uint32_t channel, bool fp16,
                          uint32_t limit, uint32_t *kept, uint32_t *top)
{
    uint32_t bins[FXP_BINS] = {0}, stride = fxp_sample_stride(count), sum = 0, base;
    *top = 0;
    for (uint32_t r = 0; r < count; r += stride) {
        uint32_t exponent =
            exponent_of(value_at((const uint8_t *)(uintptr_t)rows[r] + 2 * channel), fp16);
        if (exponent < limit && exponent > *top) *top = exponent;
    }
    for (uint32_t r = 0; r < count; r += stride) {
        uint32_t below =
            *top - exponent_of(value_at((const uint8_t *)(uintptr_t)rows[r] + 2 * channel), fp16);
        if (below < FXP_BINS) bins[below]++;
    }
    /* A window that begins one above the top has room for rows that weren't looked at. */
    for (uint32_t k = 0; k < FXP_SPAN - 1; k++) sum += bins[k];
    *kept = sum;
    base = *top < fxp_exponent_max(fp16) ? *top + 1 : *top;
    for (uint32_t start = 0; start + FXP_SPAN <= FXP_BINS; start++) {
        sum += bins[start + FXP_SPAN - 1];
        if (sum > *kept) *kept = sum, base = *top - start;
        sum -= bins[start];
    }
    return base > FXP_BASE_MIN ? base : FXP_BASE_MIN;
}

uint8_t fkv_fxp_choose_channel(const uint64_t *rows, uint32_t count, uint32_t channel, bool fp16)
{
    uint32_t limit = 256, most = 0, base = FXP_BASE_MIN;
    const uint32_t stride = fxp_sample_stride(count), samples = (count + stride - 1) / stride;
    for (int attempt = 0; attempt < 4; attempt++) {
        uint32_t kept, top;
        uint32_t found = best_base(rows, count, channel, fp16, limit, &kept, &top);
        if (attempt == 0 || kept > most) most = kept, base = found;
        if (2 * kept >= samples || top < FXP_BINS) break;
        limit = top - (FXP_BINS - 1); /* a few outliers on top of what matters */
    }
    return (uint8_t)base;
}

void fkv_fxp_choose(const uint64_t *rows, uint32_t count, uint32_t vector_bytes, uint32_t mode,
                    uint8_t *parameters)
{
    const uint32_t values = fxp_values(vector_bytes);
    const bool fp16 = mode == FKV_STREAM_FXP_FP16;
    uint8_t bases[BASES_MAX];
    if (mode == FKV_STREAM_PLAIN || values > FXP_VALUES_MAX) return;
#if defined(__x86_64__)
    if (fkv_cpu_has.avx2)
        fkv_fxp_choose_avx2(rows, count, values, fp16, bases);
    else
#endif
        for (uint32_t i = 0; i < values; i++)
            bases[i] = fkv_fxp_choose_channel(rows, count, i, fp16);
    parameters_of(bases, values, parameters);
}

/* ---- encoding ---- */
static void costs_portable(const uint64_t *rows, uint32_t count, uint32_t values, bool fp16,
                           const uint8_t *bases, uint16_t *costs)
{
    for (uint32_t r = 0; r < count; r++) {
        const uint8_t *row = (const uint8_t *)(uintptr_t)rows[r];
        uint32_t cost = fxp_row_bytes(values, fp16);
        for (uint32_t i = 0; i < values; i++)
            cost += code_of(exponent_of(value_at(row + 2 * i), fp16), bases[i]) == FXP_ESCAPE;
        costs[r] = (uint16_t)cost;
    }
}

void fkv_fxp_costs(const uint64_t *rows, uint32_t count, uint32_t vector_bytes, uint32_t mode,
                   const uint8_t *parameters, uint16_t *costs)
{
    const uint32_t values = fxp_values(vector_bytes);
    const bool fp16 = mode == FKV_STREAM_FXP_FP16;
    uint8_t bases[BASES_MAX];
    if (mode == FKV_STREAM_PLAIN) {
        for (uint32_t r = 0; r < count; r++)
            costs[r] = vector_bytes < UINT16_MAX ? (uint16_t)vector_bytes : UINT16_MAX;
        return;
    }
    if (values > FXP_VALUES_MAX) return;
    bases_of(parameters, values, bases);
    RUN(costs, rows, count, values, fp16, bases, costs);
}

/* Where the three bits of value i of a row are: two in the word at `low`, one in that at `high`. */
typedef struct {
    uint32_t low, low_shift, high, high_shift;
} code_place;

static code_place place_of(uint32_t i, uint32_t values)
{
    const uint32_t group = i / FXP_GROUP, in_group = i % FXP_GROUP;
    const uint32_t byte = i % 8, at = group * FXP_GROUP_BYTES + byte;
    if (group < values / FXP_GROUP) {
        const uint32_t eighth = in_group / 8;
        return (code_place){at + eighth / 4 * 8, eighth % 4 * 2, at + 16, eighth};
    }
    const uint32_t part = in_group / FXP_PART * FXP_PART_BYTES, shift = i % FXP_PART / 8 * 4;
    return (code_place){at + part, shift, at + part, shift + 2};
}

static void put_code(uint8_t *codes, uint32_t i, uint32_t values, uint32_t bits)
{
    const code_place p = place_of(i, values);
    codes[p.low] |= (uint8_t)((bits & 3) << p.low_shift);
    codes[p.high] |= (uint8_t)((bits >> 2) << p.high_shift);
}

static uint32_t get_code(const uint8_t *codes, uint32_t i, uint32_t values)
{
    const code_place p = place_of(i, values);
    return (codes[p.low] >> p.low_shift & 3u) | (codes[p.high] >> p.high_shift & 1u) << 2;
}

static uint8_t *encode_row_portable(const uint8_t *row, uint32_t values, bool fp16,
                                    const uint8_t *bases, uint8_t *out, uint8_t *escapes)
{
    uint8_t *codes = out + values, *high = codes + fxp_codes_bytes(values);
    memset(codes, 0, fxp_row_bytes(values, fp16) - values);
    for (uint32_t i = 0; i < values; i++) {
        uint16_t value = value_at(row + 2 * i);
        uint32_t exponent = exponent_of(value, fp16), code = code_of(exponent, bases[i]);
        if (code == FXP_ESCAPE) *escapes++ = (uint8_t)exponent;
        put_code(codes, i, values, code);
        out[i] = (uint8_t)(fp16 ? value : (uint32_t)value << 1 | value >> 15);
        if (fp16) put_code(high, i, values, (value >> 8 & 3) | (uint32_t)(value >> 15) << 2);
    }
    return escapes;
}

static uint8_t *encode_portable(const uint64_t *rows, uint32_t count, uint32_t values, bool fp16,
                                const uint8_t *bases, uint8_t *out)
{
    const uint32_t row_bytes = fxp_row_bytes(values, fp16);
    uint8_t *escapes = out + (uint64_t)count * row_bytes;
    for (uint32_t r = 0; r < count; r++)
        escapes = encode_row_portable((const uint8_t *)(uintptr_t)rows[r], values, fp16, bases,
                                      out + (uint64_t)r * row_bytes, escapes);
    return escapes;
}

uint32_t fkv_fxp_encode(const uint64_t *rows, uint32_t count, uint32_t vector_bytes, uint32_t mode,
                        const uint8_t *parameters, uint8_t *out)
{
    const uint32_t values = fxp_values(vector_bytes);
    const bool fp16 = mode == FKV_STREAM_FXP_FP16;
    uint8_t bases[BASES_MAX];
    if (mode == FKV_STREAM_PLAIN) {
        for (uint32_t r = 0; r < count; r++)
            memcpy(out + (uint64_t)r * vector_bytes, (const uint8_t *)(uintptr_t)rows[r],
                   vector_bytes);
        return count * vector_bytes;
    }
    if (values > FXP_VALUES_MAX) return 0;
    bases_of(parameters, values, bases);
    return (uint32_t)(RUN(encode, rows, count, values, fp16, bases, out) - out);
}

/* ---- decoding ---- */
/* row may be NULL. Returns the next escape, or NULL where they ran out. */
static const uint8_t *decode_row_portable(const uint8_t *in, uint32_t values, bool fp16,
                                          const uint8_t *bases, const uint8_t *escapes,
                                          const uint8_t *end, uint8_t *row)
{
    const uint8_t *codes = in + values, *high = codes + fxp_codes_bytes(values);
    for (uint32_t i = 0; i < values; i++) {
        uint32_t code = get_code(codes, i, values);
        uint32_t exponent = (uint8_t)(bases[i] - code), value;
        if (code == FXP_ESCAPE) {
            if (escapes == end) return NULL;
            exponent = *escapes++;
        }
        if (row == NULL) continue;
        if (fp16) {
            uint32_t bits = get_code(high, i, values);
            value = in[i] | (bits & 3) << 8 | (exponent & 0x1F) << 10 | (bits >> 2) << 15;
        } else {
            value = (uint32_t)in[i] >> 1 | exponent << 7 | (in[i] & 1u) << 15;
        }
        uint16_t narrow = (uint16_t)value;
        memcpy(row + 2 * i, &narrow, 2);
    }
    return escapes;
}

static const uint8_t *decode_portable(const uint8_t *in, uint32_t length, uint32_t count,
                                      uint32_t values, bool fp16, const uint8_t *bases,
                                      const uint64_t *rows)
{
    const uint32_t row_bytes = fxp_row_bytes(values, fp16);
    const uint8_t *escapes = in + (uint64_t)count * row_bytes;
    for (uint32_t r = 0; r < count && escapes; r++)
        escapes = decode_row_portable(in + (uint64_t)r * row_bytes, values, fp16, bases, escapes,
                                      in + length, (uint8_t *)(uintptr_t)rows[r]);
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
                   uint32_t mode, const uint8_t *parameters, const uint64_t *rows)
{
    const uint32_t values = fxp_values(vector_bytes);
    const bool fp16 = mode == FKV_STREAM_FXP_FP16;
    const uint8_t *end;
    uint8_t bases[BASES_MAX];
    if (mode == FKV_STREAM_PLAIN) return decode_plain(in, length, count, vector_bytes, rows);
    if (mode != FKV_STREAM_FXP_BF16 && mode != FKV_STREAM_FXP_FP16) return -1;
    if (values > FXP_VALUES_MAX) return -1;
    const uint64_t fixed = (uint64_t)count * fxp_row_bytes(values, fp16);
    if (fixed > length) return -1;
    for (uint64_t i = fixed; fp16 && i < length; i++)
        if (in[i] > 0x1F) return -1;
    bases_of(parameters, values, bases);
    end = RUN(decode, in, length, count, values, fp16, bases, rows);
    return end == in + length ? 0 : -1;
}
