/* fuzz_header.c: record headers of any bytes.
 *
 * Input: control (bit 0: the checksum is made right), the header's pages.
 * Promises: nothing outside the header is read; of one that is accepted every offset, count and
 * length that a reader uses lies inside.
 */
#include "fuzz.h"
#include "record.h"

#define EPOCH 5
#define PAGE 9
static const uint8_t uuid[16] = {1, 2, 3};

static void touch_streams(const fkv_header *h)
{
    uint64_t sum = 0, stripes = 0;
    for (uint64_t i = 0; i < h->stripe_count; i++) {
        const fkv_stripe *s = &h->stripes[i];
        PROMISE(s->stream < h->stream_count && s->page < h->payload_pages && s->tokens);
        PROMISE((uint32_t)s->offset + s->length <= FKV_PAGE_BYTES);
        PROMISE((uint32_t)s->first_token + s->tokens <= h->fixed.tokens);
    }
    for (uint32_t i = 0; i < h->stream_count; i++) {
        PROMISE(h->stream_entries[i] < fkv_geometry_entries(&h->geometry));
        const uint32_t *full = &h->stream_stripes[i], *rest = full + h->stream_count + 1;
        PROMISE(full[0] <= full[1] && rest[0] <= rest[1] && rest[1] <= h->stripe_count);
        for (uint32_t k = full[0]; k < full[1]; k++) PROMISE(h->stripes[k].stream == i);
        for (uint32_t k = rest[0]; k < rest[1]; k++) PROMISE(h->stripes[k].stream == i);
        stripes += full[1] - full[0] + rest[1] - rest[0];
        const fkv_plane_row *plane =
            &h->geometry.planes[fkv_entry_plane(&h->geometry, h->stream_entries[i])];
        fkv_stream_row row;
        const uint8_t *parameters = h->bytes + h->stream_offsets[i] + sizeof row;
        memcpy(&row, parameters - sizeof row, sizeof row);
        uint8_t unpacked[1 + FKV_CODABLE_VECTOR_MAX / 2];
        if (row.packed) fkv_prefix_unpack(parameters, plane->vector_bytes / fkv_mode_element(row.mode), unpacked);
        for (uint32_t b = 0; b < fkv_stream_parameters(plane->vector_bytes, row.mode); b++)
            sum += row.packed ? unpacked[b] : parameters[b];
    }
    PROMISE(stripes == h->stripe_count || sum == UINT64_MAX);
}

/* What a reader does with a header that was accepted. */
static void touch(const fkv_header *h)
{
    uint64_t sum = 0;
    if (h->fixed.kind != FKV_KIND_DATA) return;
    for (uint32_t i = 0; i < h->fixed.block_count; i++) {
        for (uint32_t k = 0; k < h->blocks[i].key_bytes; k++)
            sum += h->bytes[h->key_offsets[i] + k];
        PROMISE((uint64_t)h->blocks[i].first_token + h->blocks[i].tokens <= h->fixed.tokens);
    }
    for (uint32_t i = 0; i < h->payload_pages; i++) sum += h->page_crcs[i];
    if (h->inline_payload)
        for (uint64_t i = 0; i < h->fixed.payload_bytes; i++) sum += h->inline_payload[i];
    if (h->fixed.codec == FKV_CODEC_RAW) {
        uint64_t end = h->block_offsets[h->fixed.block_count];
        PROMISE(h->inline_payload || end <= (uint64_t)h->payload_pages * FKV_PAGE_BYTES);
        for (uint32_t i = 0; i < h->fixed.block_count; i++)
            PROMISE(h->block_offsets[i] + fkv_block_bytes(&h->geometry, h->blocks[i].tokens)
                    <= h->block_offsets[i + 1]);
        fkv_order_row order = h->order;
        order.block_tokens = h->blocks[0].tokens;
        PROMISE(fkv_view_fill(&h->geometry, &order, 0, NULL, NULL) == 1);
    } else {
        touch_streams(h);
    }
    PROMISE(sum != UINT64_MAX);
}

static void as_tools_do(const uint8_t *header, uint64_t length)
{
    int64_t count = fkv_header_stripes(header, length, NULL, 0);
    fkv_stripe *stripes = count > 0 ? exactly((size_t)count * sizeof *stripes) : NULL;
    if (stripes) {
        PROMISE(fkv_header_stripes(header, length, stripes, (uint64_t)count) == count);
        give_back(stripes, (size_t)count * sizeof *stripes);
    }
    for (uint32_t type = 0; type < 12; type++) {
        uint32_t offset, bytes;
        fkv_header_tlv(header, length, type, &offset, &bytes);
        PROMISE((uint64_t)offset + bytes <= length);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_input in = {data, size};
    uint32_t count;
    uint8_t control = take8(&in), *header = take_pages(&in, 4, &count);
    uint64_t length = (uint64_t)count * FKV_PAGE_BYTES;
    fkv_record_header f = {0};
    if (count) memcpy(&f, header, sizeof f);
    if (control & 1 && f.header_pages && f.header_pages <= count)
        fkv_record_bind(header, uuid, EPOCH, PAGE);
    fkv_header *h = fkv_header_parse(header, length, uuid, EPOCH, PAGE, NULL);
    PROMISE((fkv_header_check(header, length, uuid, EPOCH, PAGE) == FKV_OK) == (h != NULL));
    if (h) touch(h);
    fkv_header_release(h);
    as_tools_do(header, length);
    give_back(header, length);
    return 0;
}
