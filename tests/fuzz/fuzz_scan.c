/* fuzz_scan.c: a segment of any pages, scanned as recovery and fsck do.
 *
 * Input: control (bit 0: what begins like a record is made right for its place; bit 1: without the
 * check of every page), the pages.
 * Promises: nothing outside is read; what is reported lies inside the segment, is consistent, and
 * the index takes it.
 */
#include "memory_engine.h"
#include "record.h"

#define EPOCH 5
#define PAGES_MAX 40u
static const uint8_t uuid[16] = {1, 2, 3};

/* What recovery gives to the index: the data records. */
static void into_the_index(const fkv_scan *scan)
{
    uint64_t records = fkv_scan_record_count(scan), blocks = fkv_scan_block_count(scan), data = 0;
    fkv_directory_record *rows = exactly(records * sizeof *rows);
    for (uint64_t i = 0; i < records; i++)
        if (fkv_scan_records(scan)[i].kind == FKV_KIND_DATA)
            rows[data++] = fkv_scan_records(scan)[i].row;
    fkv_index *index = fkv_index_new();
    uint32_t *ids = exactly(fkv_scan_namespace_count(scan) * sizeof *ids);
    memset(ids, 0, fkv_scan_namespace_count(scan) * sizeof *ids);
    PROMISE(index && fkv_index_begin_segment(index, 0, EPOCH) == 0);
    PROMISE(fkv_index_add(index, 0, rows, data, fkv_scan_blocks(scan), blocks, ids, NULL, 0, NULL,
                          NULL)
            == 0);
    fkv_index_free(index);
    give_back(rows, records * sizeof *rows);
    give_back(ids, fkv_scan_namespace_count(scan) * sizeof *ids);
}

static void check(const fkv_scan *scan, uint32_t end_page, bool verified)
{
    uint64_t blocks = 0;
    uint32_t from = 1;
    for (uint64_t i = 0; i < fkv_scan_record_count(scan); i++) {
        const fkv_scan_record *r = &fkv_scan_records(scan)[i];
        PROMISE(r->row.page >= from && r->row.page < end_page && r->first_block == blocks);
        PROMISE(r->row.header_pages >= 1 && r->row.header_pages <= r->row.pages);
        PROMISE(r->row.namespace_ordinal < fkv_scan_namespace_count(scan));
        PROMISE(!r->bad_pages || !verified);
        if (!r->bad_pages) PROMISE(r->row.pages <= end_page - r->row.page);
        from = r->row.page + (r->bad_pages ? 1 : r->row.pages);
        uint64_t tokens = 0;
        for (uint32_t b = 0; b < r->row.block_count; b++) {
            PROMISE(fkv_scan_blocks(scan)[blocks + b].ordinal == b);
            tokens += fkv_scan_blocks(scan)[blocks + b].tokens;
        }
        PROMISE(tokens == r->row.tokens);
        blocks += r->row.block_count;
    }
    PROMISE(blocks == fkv_scan_block_count(scan));
    PROMISE(fkv_scan_end_page(scan) >= 1 && fkv_scan_end_page(scan) <= (end_page > 1 ? end_page : 1));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_input in = {data, size};
    uint32_t count;
    uint8_t control = take8(&in), *pages = take_pages(&in, PAGES_MAX, &count);
    uint64_t length = (uint64_t)count * FKV_PAGE_BYTES;
    for (uint32_t i = 1; control & 1 && i < count; i++) {
        uint8_t *record = pages + (uint64_t)i * FKV_PAGE_BYTES;
        if (!memcmp(record, "FKVR", 4))
            set_record_right(record, length - (uint64_t)i * FKV_PAGE_BYTES, uuid, EPOCH, i);
    }
    memory_device(pages, length, 0);
    fkv_engine *engine = memory_engine_new(4096);
    uint32_t flags = control & 2 ? 0 : FKV_SCAN_VERIFY_PAGES, end = count ? count : 1;
    int32_t status;
    fkv_scan *scan = fkv_scan_segment(engine, 3, uuid, EPOCH, 1, end, flags, &status);
    PROMISE(scan && status == 0);
    check(scan, end, flags);
    into_the_index(scan);
    fkv_scan_free(scan);
    memory_engine_free(engine);
    give_back(pages, length);
    return 0;
}
