/* directory.c: whether a page is a segment's footer, and whether the sections that it names are a
 * directory that may be believed.
 *
 * Invariants
 *  - nothing outside the page and the data is read, whatever they hold;
 *  - rows are accepted all or none: then records lie one behind the other between the segment's
 *    first page and its footer, have a header and blocks, the blocks are theirs and sum up to their
 *    tokens, and every namespace is listed. What uses the rows need not check them again;
 *  - a checksum that is right proves only that the bytes were written so: the rest is checked all the
 *    same.
 */
#include "flashkv_native.h"
#include <stdbool.h>
#include <string.h>

#define CRC_AT 8u
#define HEADER_PAGES_MAX 1024u

static const char magic[8] = {'F', 'K', 'V', 'F', 'O', 'O', 'T', 'R'};

uint32_t fkv_footer_crc(const uint8_t *page, const uint8_t *segment_uuid, uint64_t epoch)
{
    static const uint8_t zero[4];
    uint8_t seed[FKV_UUID_BYTES + 8];
    memcpy(seed, segment_uuid, FKV_UUID_BYTES);
    memcpy(seed + FKV_UUID_BYTES, &epoch, 8);
    uint32_t crc = fkv_crc32c(fkv_crc32c(0, seed, sizeof seed), page, CRC_AT);
    crc = fkv_crc32c(crc, zero, sizeof zero);
    return fkv_crc32c(crc, page + CRC_AT + 4, FKV_PAGE_BYTES - CRC_AT - 4);
}

static bool section_known(const fkv_section *section)
{
    return section->type >= FKV_SECTION_DIR_RECORDS && section->type <= FKV_SECTION_BLOOM;
}

static bool sections_fit(const fkv_segment_footer *footer, uint64_t segment_bytes)
{
    uint32_t seen = 0;
    if (segment_bytes < 2 * FKV_PAGE_BYTES) return false;
    for (uint32_t i = 0; i < footer->section_count; i++) {
        const fkv_section *section = &footer->sections[i];
        uint64_t end = segment_bytes - FKV_PAGE_BYTES;
        if (section->offset_bytes % FKV_PAGE_BYTES || section->offset_bytes < FKV_PAGE_BYTES)
            return false;
        if (section->offset_bytes > end || section->length_bytes > end - section->offset_bytes)
            return false;
        if (!section_known(section)) continue;
        if (section->version || seen & 1u << section->type) return false;
        seen |= 1u << section->type;
    }
    return true;
}

int fkv_footer_check(const uint8_t *page, const uint8_t *segment_uuid, uint64_t epoch,
                     uint64_t segment_bytes)
{
    fkv_segment_footer footer;
    memcpy(&footer, page, sizeof footer);
    if (memcmp(footer.magic, magic, sizeof magic)
        || footer.crc != fkv_footer_crc(page, segment_uuid, epoch))
        return FKV_DAMAGED;
    if (footer.version != FKV_FORMAT_VERSION || footer.epoch != epoch
        || memcmp(footer.segment_uuid, segment_uuid, FKV_UUID_BYTES))
        return FKV_DAMAGED;
    for (uint32_t i = 0; i < sizeof footer.reserved / sizeof footer.reserved[0]; i++)
        if (footer.reserved[i]) return FKV_DAMAGED;
    if (footer.epoch >= FKV_COUNT_END || footer.last_sequence >= FKV_COUNT_END) return FKV_DAMAGED;
    if (footer.section_count < 1 || footer.section_count > FKV_SECTIONS_MAX) return FKV_DAMAGED;
    return sections_fit(&footer, segment_bytes) ? FKV_OK : FKV_DAMAGED;
}

/* ---- rows ---- */

typedef struct {
    const uint8_t *data;
    uint64_t length;
} part;

/* The sections' bytes by type; false where one is not all there or its checksum is wrong. */
static bool sections_read(const fkv_segment_footer *footer, const uint8_t *data, uint64_t length,
                          uint64_t first_byte, part parts[FKV_SECTION_BLOOM + 1])
{
    for (uint32_t i = 0; i < footer->section_count; i++) {
        const fkv_section *section = &footer->sections[i];
        if (section->offset_bytes < first_byte) return false;
        uint64_t at = section->offset_bytes - first_byte;
        if (at > length || section->length_bytes > length - at) return false;
        if (fkv_crc32c(0, data + at, section->length_bytes) != section->crc) return false;
        if (section_known(section))
            parts[section->type] = (part){data + at, section->length_bytes};
    }
    return true;
}

/* from: the first page that is not an earlier record's; end: the footer's page. */
static bool record_fits(const fkv_directory_record *r, uint64_t from, uint64_t end,
                        uint64_t namespaces)
{
    if (r->page < from || r->page >= end || r->pages > end - r->page) return false;
    if (!r->header_pages || r->header_pages > HEADER_PAGES_MAX || r->header_pages > r->pages)
        return false;
    if (!r->block_count || r->block_count > FKV_BLOCKS_PER_RECORD_MAX) return false;
    return r->sequence < FKV_COUNT_END && r->namespace_ordinal < namespaces && !r->reserved;
}

/* Whether the next block_count rows at `blocks` are blocks of this record. */
static bool blocks_fit(const fkv_directory_record *r, const uint8_t *blocks)
{
    uint64_t tokens = 0;
    for (uint32_t i = 0; i < r->block_count; i++) {
        fkv_directory_block b;
        memcpy(&b, blocks + i * sizeof b, sizeof b);
        if (!b.tokens || b.ordinal >= r->block_count) return false;
        tokens += b.tokens;
    }
    return tokens == r->tokens;
}

int fkv_directory_check(const uint8_t *page, uint64_t segment_bytes, const uint8_t *data,
                        uint64_t length, uint64_t first_byte, fkv_directory_rows *rows)
{
    fkv_segment_footer footer;
    part parts[FKV_SECTION_BLOOM + 1] = {{data, 0}, {data, 0}, {data, 0}, {data, 0}, {data, 0}};
    memcpy(&footer, page, sizeof footer);
    if (footer.section_count > FKV_SECTIONS_MAX || segment_bytes < 2 * FKV_PAGE_BYTES
        || !sections_read(&footer, data, length, first_byte, parts))
        return FKV_DAMAGED;
    const part *records = &parts[FKV_SECTION_DIR_RECORDS], *blocks = &parts[FKV_SECTION_DIR_BLOCKS];
    const part *names = &parts[FKV_SECTION_DIR_NAMESPACES];
    if (records->length / sizeof(fkv_directory_record) != footer.record_count
        || records->length % sizeof(fkv_directory_record)
        || blocks->length / sizeof(fkv_directory_block) != footer.block_count
        || blocks->length % sizeof(fkv_directory_block) || names->length % FKV_NAMESPACE_BYTES)
        return FKV_DAMAGED;
    *rows = (fkv_directory_rows){.records_offset = (uint64_t)(records->data - data),
                                 .blocks_offset = (uint64_t)(blocks->data - data),
                                 .namespaces_offset = (uint64_t)(names->data - data),
                                 .record_count = footer.record_count,
                                 .block_count = footer.block_count,
                                 .namespace_count = names->length / FKV_NAMESPACE_BYTES};
    uint64_t from = 1, block = 0;
    for (uint64_t i = 0; i < rows->record_count; i++) {
        fkv_directory_record r;
        memcpy(&r, records->data + i * sizeof r, sizeof r);
        if (!record_fits(&r, from, segment_bytes / FKV_PAGE_BYTES - 1, rows->namespace_count)
            || r.block_count > rows->block_count - block
            || !blocks_fit(&r, blocks->data + block * sizeof(fkv_directory_block)))
            return FKV_DAMAGED;
        from = (uint64_t)r.page + r.pages;
        block += r.block_count;
    }
    return block == rows->block_count ? FKV_OK : FKV_DAMAGED;
}
