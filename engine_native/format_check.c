/* format_check.c: compile-time proof that every structure of format.h lies on disk as
 * docs/format.md says.
 *
 * Invariant: a change of size or place of any field fails to compile here. A change that is meant
 * is a new format.
 */
#include "format.h"
#include <stddef.h>

#define SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), #type " has another size")
#define AT(type, field, offset)                                                                    \
    _Static_assert(offsetof(type, field) == (offset), #type "." #field " lies elsewhere")

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the format is little-endian and the structures are written as they lie in memory"
#endif
_Static_assert(1 << FKV_PAGE_SHIFT == FKV_PAGE_BYTES, "page size and shift disagree");
_Static_assert(sizeof(fkv_superblock) <= FKV_PAGE_BYTES, "a superblock is one page");
_Static_assert(sizeof(fkv_segment_header) <= FKV_PAGE_BYTES, "a segment header is one page");
_Static_assert(sizeof(fkv_segment_footer) <= FKV_PAGE_BYTES, "a footer is one page");
_Static_assert(sizeof((fkv_segment_footer){0}.sections) / sizeof(fkv_section) == FKV_SECTIONS_MAX,
               "the footer's table holds FKV_SECTIONS_MAX sections");

SIZE(fkv_superblock, 112);
AT(fkv_superblock, magic, 0);
AT(fkv_superblock, crc, 8);
AT(fkv_superblock, version, 12);
AT(fkv_superblock, generation, 16);
AT(fkv_superblock, store_uuid, 24);
AT(fkv_superblock, page_shift, 40);
AT(fkv_superblock, checksum_id, 44);
AT(fkv_superblock, segment_bytes, 48);
AT(fkv_superblock, features_compatible, 56);
AT(fkv_superblock, features_read_only, 64);
AT(fkv_superblock, features_incompatible, 72);
AT(fkv_superblock, manifest_generation, 80);
AT(fkv_superblock, created_ms, 88);
AT(fkv_superblock, capacity_bytes, 96);
AT(fkv_superblock, geometry_bytes, 104);
AT(fkv_superblock, reserved, 108);

SIZE(fkv_manifest_entry, 16);
AT(fkv_manifest_entry, crc, 0);
AT(fkv_manifest_entry, type, 4);
AT(fkv_manifest_entry, reserved, 6);
AT(fkv_manifest_entry, length_bytes, 8);
AT(fkv_manifest_entry, ordinal, 12);

SIZE(fkv_manifest_begin, 32);
AT(fkv_manifest_begin, store_uuid, 0);
AT(fkv_manifest_begin, generation, 16);
AT(fkv_manifest_begin, next_sequence, 24);

SIZE(fkv_manifest_segment, 32);
AT(fkv_manifest_segment, segment, 0);
AT(fkv_manifest_segment, reserved, 4);
AT(fkv_manifest_segment, epoch, 8);
AT(fkv_manifest_segment, segment_uuid, 16);

SIZE(fkv_manifest_retired, 40);
AT(fkv_manifest_retired, last_sequence, 32);

SIZE(fkv_manifest_void, 32);
AT(fkv_manifest_void, segment, 0);
AT(fkv_manifest_void, reserved, 4);
AT(fkv_manifest_void, epoch, 8);
AT(fkv_manifest_void, first_sequence, 16);
AT(fkv_manifest_void, last_sequence, 24);

SIZE(fkv_manifest_kill, 32);
AT(fkv_manifest_kill, segment, 0);
AT(fkv_manifest_kill, page, 4);
AT(fkv_manifest_kill, epoch, 8);
AT(fkv_manifest_kill, sequence, 16);
AT(fkv_manifest_kill, ordinal, 24);
AT(fkv_manifest_kill, reserved, 26);

SIZE(fkv_segment_header, 120);
AT(fkv_segment_header, magic, 0);
AT(fkv_segment_header, crc, 8);
AT(fkv_segment_header, version, 12);
AT(fkv_segment_header, store_uuid, 16);
AT(fkv_segment_header, segment_uuid, 32);
AT(fkv_segment_header, segment, 48);
AT(fkv_segment_header, page_shift, 52);
AT(fkv_segment_header, epoch, 56);
AT(fkv_segment_header, segment_bytes, 64);
AT(fkv_segment_header, first_sequence, 72);
AT(fkv_segment_header, created_ms, 80);
AT(fkv_segment_header, reserved, 88);

SIZE(fkv_section, 24);
AT(fkv_section, type, 0);
AT(fkv_section, version, 2);
AT(fkv_section, crc, 4);
AT(fkv_section, offset_bytes, 8);
AT(fkv_section, length_bytes, 16);

SIZE(fkv_segment_footer, 480);
AT(fkv_segment_footer, magic, 0);
AT(fkv_segment_footer, crc, 8);
AT(fkv_segment_footer, version, 12);
AT(fkv_segment_footer, segment_uuid, 16);
AT(fkv_segment_footer, epoch, 32);
AT(fkv_segment_footer, record_count, 40);
AT(fkv_segment_footer, section_count, 44);
AT(fkv_segment_footer, block_count, 48);
AT(fkv_segment_footer, last_sequence, 56);
AT(fkv_segment_footer, reserved, 64);
AT(fkv_segment_footer, sections, 96);

SIZE(fkv_directory_record, 32);
AT(fkv_directory_record, sequence, 0);
AT(fkv_directory_record, page, 8);
AT(fkv_directory_record, pages, 12);
AT(fkv_directory_record, header_pages, 16);
AT(fkv_directory_record, block_count, 18);
AT(fkv_directory_record, tokens, 20);
AT(fkv_directory_record, namespace_ordinal, 24);
AT(fkv_directory_record, group, 26);
AT(fkv_directory_record, codec, 27);
AT(fkv_directory_record, fidelity, 28);
AT(fkv_directory_record, flags, 29);
AT(fkv_directory_record, reserved, 30);

SIZE(fkv_directory_block, 20);
AT(fkv_directory_block, digest, 0);
AT(fkv_directory_block, tokens, 16);
AT(fkv_directory_block, ordinal, 18);

SIZE(fkv_record_header, 144);
AT(fkv_record_header, magic, 0);
AT(fkv_record_header, crc, 4);
AT(fkv_record_header, header_bytes, 8);
AT(fkv_record_header, header_pages, 12);
AT(fkv_record_header, kind, 14);
AT(fkv_record_header, group, 15);
AT(fkv_record_header, pages, 16);
AT(fkv_record_header, block_count, 20);
AT(fkv_record_header, codec, 22);
AT(fkv_record_header, codec_version, 23);
AT(fkv_record_header, table_set, 24);
AT(fkv_record_header, fidelity, 26);
AT(fkv_record_header, flags, 27);
AT(fkv_record_header, tokens, 28);
AT(fkv_record_header, sequence, 32);
AT(fkv_record_header, created_ms, 40);
AT(fkv_record_header, payload_bytes, 48);
AT(fkv_record_header, logical_bytes, 56);
AT(fkv_record_header, start_token, 64);
AT(fkv_record_header, namespace_digest, 72);
AT(fkv_record_header, shard, 104);
AT(fkv_record_header, tlv_count, 120);
AT(fkv_record_header, reserved, 124);

SIZE(fkv_tlv, 8);
AT(fkv_tlv, type, 0);
AT(fkv_tlv, reserved, 2);
AT(fkv_tlv, length_bytes, 4);

SIZE(fkv_block_row, 8);
AT(fkv_block_row, first_token, 0);
AT(fkv_block_row, tokens, 4);
AT(fkv_block_row, key_bytes, 6);
AT(fkv_block_row, parent_bytes, 7);

SIZE(fkv_plane_row, 16);
AT(fkv_plane_row, role, 0);
AT(fkv_plane_row, dtype, 1);
AT(fkv_plane_row, reserved, 2);
AT(fkv_plane_row, layers, 4);
AT(fkv_plane_row, heads, 8);
AT(fkv_plane_row, vector_bytes, 12);

SIZE(fkv_order_row, 8);
AT(fkv_order_row, axes, 0);
AT(fkv_order_row, block_tokens, 4);
