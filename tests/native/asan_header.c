/* asan_header.c: real record headers, harmed and bound to their place again, through the parser.
 *
 * usage: asan_header FILE SEED ROUNDS; FILE: headers, each after its length in bytes (uint32_t).
 * Built with sanitizers by test_header_hostile.py: every buffer has exactly its size, so reading a
 * byte beyond one ends the program.
 */
#include "record.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const uint8_t uuid[16] = {1, 2, 3};
static uint64_t state;
static unsigned long accepted;

static uint32_t next(uint32_t limit)
{
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (uint32_t)(state >> 16) % limit;
}

/* Fields, heads of TLVs and rows are small numbers: so are most of the values that go there. */
static void harm(uint8_t *header, uint32_t length, uint32_t used)
{
    for (uint32_t n = 1 + next(4); n; n--) {
        uint32_t at =
            next(2) ? next(sizeof(fkv_record_header)) : next(used < length ? used : length);
        switch (next(4)) {
        case 0:
            header[at] ^= (uint8_t)(1u << next(8));
            break;
        case 1:
            header[at] = (uint8_t)next(256);
            break;
        case 2:
            header[at] = (uint8_t)next(4);
            break;
        default:
            header[at] = (uint8_t)(header[at] + (next(2) ? 1 : 255));
        }
    }
}

static void stripes_of(const uint8_t *header, uint32_t length)
{
    int64_t count = fkv_header_stripes(header, length, NULL, 0);
    fkv_stripe *stripes = count > 0 ? malloc((size_t)count * sizeof *stripes) : NULL;
    if (stripes) fkv_header_stripes(header, length, stripes, (uint64_t)count);
    free(stripes);
    for (uint32_t type = 0; type < 12; type++) {
        uint32_t offset, bytes;
        fkv_header_tlv(header, length, type, &offset, &bytes);
        if ((uint64_t)offset + bytes > length) abort();
    }
}

/* What a reader does with a header that was accepted. */
static uint64_t touch(const fkv_header *h)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < h->fixed.block_count; i++)
        for (uint32_t k = 0; k < h->blocks[i].key_bytes; k++)
            sum += h->bytes[h->key_offsets[i] + k];
    for (uint32_t i = 0; i < h->payload_pages; i++) sum += h->page_crcs[i];
    for (uint64_t i = 0; i < h->stripe_count; i++) {
        const fkv_stripe *s = &h->stripes[i];
        if (s->stream >= h->stream_count || s->page >= h->payload_pages) abort();
        if ((uint32_t)s->offset + s->length > FKV_PAGE_BYTES) abort();
        if ((uint32_t)s->first_token + s->tokens > h->fixed.tokens) abort();
    }
    for (uint32_t i = 0; i < h->stream_count; i++) {
        const fkv_plane_row *plane =
            &h->geometry.planes[fkv_entry_plane(&h->geometry, h->stream_entries[i])];
        for (uint32_t b = 0; b < fkv_plane_bases(plane); b++)
            sum += h->bytes[h->stream_offsets[i] + sizeof(fkv_stream_row) + b];
    }
    if (h->inline_payload)
        for (uint64_t i = 0; i < h->fixed.payload_bytes; i++) sum += h->inline_payload[i];
    return sum;
}

static uint64_t one(const uint8_t *source, uint32_t length)
{
    uint64_t sum = 0;
    uint8_t *header = malloc(length);
    if (!header) return 0;
    memcpy(header, source, length);
    uint32_t used;
    memcpy(&used, header + 8, 4);
    if (next(8)) harm(header, length, used);
    uint16_t pages;
    memcpy(&pages, header + 12, 2);
    if (pages && (uint64_t)pages * FKV_PAGE_BYTES <= length) fkv_record_bind(header, uuid, 5, 9);
    fkv_header *h = fkv_header_parse(header, length, uuid, 5, 9, NULL);
    if (h) sum = touch(h), accepted++;
    fkv_header_release(h);
    stripes_of(header, length);
    free(header);
    return sum;
}

int main(int count, char **arguments)
{
    if (count != 4) return 2;
    FILE *file = fopen(arguments[1], "rb");
    state = strtoull(arguments[2], NULL, 10) * 2654435761u + 1;
    unsigned long rounds = strtoul(arguments[3], NULL, 10);
    uint8_t *headers[64];
    uint32_t lengths[64], found = 0;
    while (file && found < 64 && fread(&lengths[found], 4, 1, file) == 1) {
        headers[found] = malloc(lengths[found]);
        if (fread(headers[found], 1, lengths[found], file) != lengths[found]) return 2;
        found++;
    }
    if (!found) return 2;
    fclose(file);
    uint64_t sum = 0;
    for (unsigned long i = 0; i < rounds; i++) {
        uint32_t which = next(found);
        sum += one(headers[which], lengths[which]);
    }
    for (uint32_t i = 0; i < found; i++) free(headers[i]);
    printf("%lu accepted, %llu\n", accepted, (unsigned long long)sum);
    return 0;
}
