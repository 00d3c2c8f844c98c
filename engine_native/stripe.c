/* stripe.c: stripes to vectors: one by its stream's mode, or all of a record in memory.
 *
 * Invariants
 *  - every mode that a checked header can name is decoded here and nowhere else;
 *  - a page is decoded only after its checksum was right.
 */
#include "stripe.h"
#include "cpu.h"
#include "codec_halves.h"

static bool decode_bounded(const fkv_stripe *s, const fkv_stream_row *stream, uint32_t vector_bytes,
                           fkv_last_plan *last, const uint8_t *in, const uint8_t *parameters,
                           const uint64_t *rows)
{
    if (last->stream != s->stream) {
        last->stream = FKV_NO_STREAM;
        if (!fkv_bounded_plan_make(&last->bounded, parameters, vector_bytes, stream->mode))
            return false;
        last->stream = s->stream;
    }
    const uint32_t exact = last->bounded.exact, first = s->first_token;
    return fkv_bounded_plan_decode(in, s->length, s->tokens, exact > first ? exact - first : 0,
                                   &last->bounded, rows)
           == 0;
}

bool fkv_stripe_decode(const fkv_header *h, const fkv_stripe *s, uint32_t vector_bytes,
                       fkv_last_plan *last, const uint8_t *in, const uint64_t *rows)
{
    fkv_stream_row stream;
    const uint8_t *row = h->bytes + h->stream_offsets[s->stream], *parameters = row + sizeof stream;
    memcpy(&stream, row, sizeof stream);
    if (stream.mode == FKV_STREAM_DELTA)
        return fkv_delta_decode(in, s->length, s->tokens, vector_bytes, rows) == 0;
    if (fkv_mode_bounded(stream.mode)) {
        const uint32_t before = fkv_denormals_keep();
        const bool good = decode_bounded(s, &stream, vector_bytes, last, in, parameters, rows);
        fkv_denormals_as(before);
        return good;
    }
    const uint32_t half_mode = fkv_mode_of_halves(stream.mode);
    const bool prefix = fkv_mode_is_prefix(stream.mode), cuts = fkv_mode_cuts(stream.mode);
    if (prefix && last->stream != s->stream) {
        const uint32_t values = vector_bytes / fkv_mode_element(stream.mode);
        last->stream = FKV_NO_STREAM;
        if (stream.packed) {
            fkv_prefix_unpack(parameters, values, last->parameters);
            parameters = last->parameters;
        }
        if (!fkv_prefix_plan_make(&last->plan, parameters, 2 * values, half_mode)) return false;
        last->stream = s->stream;
    }
    if (cuts)
        return fkv_halves_plan_decode(in, s->length, s->tokens, vector_bytes, stream.mode,
                                      parameters, &last->plan, rows)
               == 0;
    if (!prefix)
        return fkv_fxp_decode(in, s->length, s->tokens, vector_bytes, stream.mode, parameters, rows)
               == 0;
    return fkv_prefix_plan_decode(in, s->length, s->tokens, &last->plan, rows) == 0;
}

/* Decodes the stripes of a checked header; streams one behind the other in `out`. */
static int decode_all(const fkv_header *h, const uint8_t *payload, uint8_t *out)
{
    uint64_t rows[FKV_STRIPE_TOKENS_MAX], stream_at = 0;
    uint32_t checked = UINT32_MAX, stream = 0;
    fkv_last_plan last;
    last.stream = FKV_NO_STREAM;
    /* A stream's full stripes and its others lie apart: two passes over the streams' order. */
    for (uint32_t part = 0; part < 2; part++)
        for (stream = 0, stream_at = 0; stream < h->stream_count; stream++) {
            const uint32_t *range = &h->stream_stripes[stream + part * (h->stream_count + 1)];
            uint32_t entry = h->stream_entries[stream];
            uint32_t bytes = h->geometry.planes[fkv_entry_plane(&h->geometry, entry)].vector_bytes;
            for (uint32_t i = range[0]; i < range[1]; i++) {
                const fkv_stripe *s = &h->stripes[i];
                const uint8_t *page = payload + (uint64_t)s->page * FKV_PAGE_BYTES;
                if (s->page != checked
                    && fkv_page_crc(h->fixed.sequence, s->page, page) != h->page_crcs[s->page])
                    return FKV_DAMAGED;
                checked = s->page;
                uint8_t *to = out + stream_at + (uint64_t)s->first_token * bytes;
                for (uint32_t t = 0; t < s->tokens; t++, to += bytes)
                    rows[t] = (uint64_t)(uintptr_t)to;
                if (!fkv_stripe_decode(h, s, bytes, &last, page + s->offset, rows))
                    return FKV_DAMAGED;
            }
            stream_at += (uint64_t)h->fixed.tokens * bytes;
        }
    return FKV_OK;
}

int fkv_record_decode(const uint8_t *record, uint64_t length, const uint8_t *segment_uuid,
                      uint64_t epoch, uint32_t page, uint8_t *out, uint64_t room)
{
    int status;
    fkv_header *h = fkv_header_parse(record, length, segment_uuid, epoch, page, &status);
    if (!h) return status;
    status = FKV_DAMAGED;
    if (h->fixed.kind == FKV_KIND_DATA && !fkv_holds_blocks(h) && h->fixed.logical_bytes <= room
        && (uint64_t)h->fixed.pages * FKV_PAGE_BYTES <= length)
        status = decode_all(h, record + (uint64_t)h->fixed.header_pages * FKV_PAGE_BYTES, out);
    fkv_header_release(h);
    return status;
}
