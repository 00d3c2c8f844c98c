/* fuzz_directory.c: footers and directories of any bytes, and what the index makes of those that are
 * believed.
 *
 * Input: control (bit 0: the footer's checksum is made right; bit 1: the sections'; bit 2: uuid,
 * version, epoch and magic too), segment pages (16 bits), length of the footer (16 bits), the footer,
 * the pages from that on which the lowest section names.
 * Promises: nothing outside is read; rows that are accepted lie where the records may lie, and the
 * index takes and gives them.
 */
#include "fuzz.h"

#define EPOCH 5
static const uint8_t uuid[16] = {9, 8, 7};

static void set_right(uint8_t *page, uint8_t control)
{
    fkv_segment_footer *f = (fkv_segment_footer *)page;
    if (control & 4) {
        memcpy(f->magic, "FKVFOOTR", 8);
        memcpy(f->segment_uuid, uuid, 16);
        f->version = FKV_FORMAT_VERSION;
        f->epoch = EPOCH;
        memset(f->reserved, 0, sizeof f->reserved);
    }
    if (control & 1) f->crc = fkv_footer_crc(page, uuid, EPOCH);
}

static void set_sections_right(fkv_segment_footer *f, const uint8_t *data, uint64_t length,
                               uint64_t first)
{
    for (uint32_t i = 0; i < f->section_count && i < FKV_SECTIONS_MAX; i++) {
        fkv_section *s = &f->sections[i];
        uint64_t at = s->offset_bytes - first;
        if (s->offset_bytes < first || at > length || s->length_bytes > length - at) continue;
        s->crc = fkv_crc32c(0, data + at, s->length_bytes);
    }
}

static void into_the_index(const uint8_t *data, const fkv_directory_rows *rows)
{
    fkv_index *index = fkv_index_new();
    PROMISE(index && fkv_index_begin_segment(index, 3, EPOCH) == 0);
    /* Copies: what a caller has are arrays of just these rows. */
    size_t records_bytes = rows->record_count * sizeof(fkv_directory_record);
    size_t blocks_bytes = rows->block_count * sizeof(fkv_directory_block);
    fkv_directory_record *records = (void *)copied(data + rows->records_offset, records_bytes);
    fkv_directory_block *blocks = (void *)copied(data + rows->blocks_offset, blocks_bytes);
    uint32_t *ids = exactly(rows->namespace_count * sizeof *ids);
    for (uint64_t i = 0; i < rows->namespace_count; i++) ids[i] = (uint32_t)(i % 1000);
    fkv_dropped *dropped = exactly(rows->block_count * sizeof *dropped);
    uint64_t dropped_count = 0;
    PROMISE(fkv_index_add(index, 3, records, rows->record_count, blocks, rows->block_count, ids,
                          NULL, 0, dropped, &dropped_count)
            == 0);
    fkv_place *places = exactly(rows->block_count * sizeof *places);
    uint8_t *digests = exactly(rows->block_count * FKV_DIGEST_BYTES);
    for (uint64_t i = 0; i < rows->block_count; i++)
        memcpy(digests + i * FKV_DIGEST_BYTES, blocks[i].digest, FKV_DIGEST_BYTES);
    fkv_index_lookup(index, digests, rows->block_count, 1, places);
    for (uint64_t i = 0; i < rows->block_count; i++) {
        const fkv_place *p = &places[i];
        PROMISE(p->record != FKV_NONE && p->header_pages >= 1 && p->header_pages <= p->pages);
        PROMISE(p->ordinal < p->record_blocks && p->tokens >= 1 && p->tokens <= p->record_tokens);
    }
    fkv_index_totals totals;
    fkv_index_totals_get(index, &totals);
    PROMISE(totals.blocks + dropped_count == rows->block_count);
    PROMISE(fkv_index_drop_segment(index, 3) == totals.blocks);
    fkv_index_free(index);
    give_back(records, records_bytes);
    give_back(blocks, blocks_bytes);
    give_back(ids, rows->namespace_count * sizeof *ids);
    give_back(dropped, rows->block_count * sizeof *dropped);
    give_back(places, rows->block_count * sizeof *places);
    give_back(digests, rows->block_count * FKV_DIGEST_BYTES);
}

static void rows_lie_right(const uint8_t *data, const fkv_directory_rows *rows, uint64_t pages)
{
    uint64_t end = 1, blocks = 0;
    for (uint64_t i = 0; i < rows->record_count; i++) {
        fkv_directory_record r;
        memcpy(&r, data + rows->records_offset + i * sizeof r, sizeof r);
        PROMISE(r.page >= end && (uint64_t)r.page + r.pages < pages);
        PROMISE(r.namespace_ordinal < rows->namespace_count);
        end = (uint64_t)r.page + r.pages;
        blocks += r.block_count;
    }
    PROMISE(blocks == rows->block_count);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_input in = {data, size};
    uint8_t control = take8(&in), *page = exactly(FKV_PAGE_BYTES);
    uint64_t pages = take16(&in), used = take16(&in), first = UINT64_MAX;
    memset(page, 0, FKV_PAGE_BYTES);
    take(&in, page, used < FKV_PAGE_BYTES ? used : FKV_PAGE_BYTES);
    uint32_t count;
    uint8_t *body = take_pages(&in, 16, &count);
    size_t length = (size_t)count * FKV_PAGE_BYTES;
    fkv_segment_footer *f = (fkv_segment_footer *)page;
    for (uint32_t i = 0; i < f->section_count && i < FKV_SECTIONS_MAX; i++)
        if (f->sections[i].offset_bytes < first) first = f->sections[i].offset_bytes;
    if (control & 2) set_sections_right(f, body, length, first);
    set_right(page, control);
    fkv_directory_rows rows;
    int verdict = fkv_footer_check(page, uuid, EPOCH, pages * FKV_PAGE_BYTES);
    PROMISE(verdict == FKV_OK || verdict == FKV_DAMAGED);
    /* A caller checks the footer first; without that it must stay inside all the same. */
    if (fkv_directory_check(page, pages * FKV_PAGE_BYTES, body, length, first, &rows) == FKV_OK) {
        PROMISE(rows.records_offset + rows.record_count * sizeof(fkv_directory_record) <= length);
        PROMISE(rows.blocks_offset + rows.block_count * sizeof(fkv_directory_block) <= length);
        PROMISE(rows.namespaces_offset + rows.namespace_count * FKV_NAMESPACE_BYTES <= length);
        rows_lie_right(body, &rows, pages);
        into_the_index(body, &rows);
    }
    give_back(body, length);
    give_back(page, FKV_PAGE_BYTES);
    return 0;
}
