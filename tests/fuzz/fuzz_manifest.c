/* fuzz_manifest.c: manifest logs of any bytes.
 *
 * Input: control (bit 0: checksums are made right; bits 1-2: how often the log is repeated), the log.
 * The checksum of whatever looks like an entry is set before the walk, from the front on, so that
 * what lies behind it is met.
 * Promises: nothing outside the log is read; the walk finds what a plain one finds, entry by entry,
 * however often the same bytes look like heads; with too little room it says how many there are.
 */
#include "fuzz.h"

static const uint8_t uuid[16] = {7, 7, 7};

/* Whether all sequences, epochs and generations of an entry lie below 2^62. */
static bool given(const fkv_manifest_entry *e, const uint8_t *payload)
{
    const uint64_t end = UINT64_C(1) << 62;
    fkv_manifest_begin begin;
    fkv_manifest_segment segment;
    fkv_manifest_retired retired;
    fkv_manifest_kill kill;
    fkv_manifest_void gone;
    switch (e->type) {
    case FKV_MANIFEST_BEGIN:
        memcpy(&begin, payload, sizeof begin);
        return begin.generation < end && begin.next_sequence < end;
    case FKV_MANIFEST_OPENED:
    case FKV_MANIFEST_FREED:
        memcpy(&segment, payload, sizeof segment);
        return segment.epoch < end;
    case FKV_MANIFEST_RETIRED:
        memcpy(&retired, payload, sizeof retired);
        return retired.last_sequence < end;
    case FKV_MANIFEST_VOID:
        memcpy(&gone, payload, sizeof gone);
        return gone.epoch < end && gone.last_sequence < end;
    case FKV_MANIFEST_KILL:
        for (uint32_t at = 0; at < e->length_bytes; at += sizeof kill) {
            memcpy(&kill, payload + at, sizeof kill);
            if (kill.epoch >= end || kill.sequence >= end) return false;
        }
        return true;
    default:
        return true;
    }
}

/* A plain walk, by the words of docs/format.md: (offset, length, type, behind damage) in rows. */
static uint64_t plain(const uint8_t *log, uint64_t length, fkv_manifest_row *rows, uint64_t room)
{
    uint64_t at = 0, least = 0, count = 0;
    uint32_t seed = fkv_crc32c_portable(0, uuid, 16);
    bool damaged = false;
    while (at + 16 <= length) {
        fkv_manifest_entry e;
        memcpy(&e, log + at, sizeof e);
        uint64_t end = at + 16 + e.length_bytes;
        bool fits = e.type == 1 || e.type == 2 || e.type == 3 ? e.length_bytes == 32
                    : e.type == 4                ? e.length_bytes > 0 && e.length_bytes % 32 == 0
                    : e.type == 5 || e.type == 7 ? e.length_bytes > 32
                    : e.type == 8                ? e.length_bytes == 32
                                                 : e.type != 6 || e.length_bytes == 40;
        if (e.reserved || e.ordinal < least || e.ordinal >= least + length || end > length || !fits
            || fkv_crc32c(seed, log + at + 4, end - at - 4) != e.crc) {
            damaged = true;
            at += 8;
            continue;
        }
        if (!given(&e, log + at + 16)) { /* whole, and still not to be believed */
            damaged = true;
            least = (uint64_t)e.ordinal + 1;
            at = (end + 7) / 8 * 8;
            continue;
        }
        PROMISE(count < room);
        rows[count++] = (fkv_manifest_row){.offset = at + 16,
                                           .length_bytes = e.length_bytes,
                                           .ordinal = e.ordinal,
                                           .type = e.type,
                                           .behind_damage = damaged};
        least = (uint64_t)e.ordinal + 1;
        at = (end + 7) / 8 * 8;
    }
    return count;
}

/* Entries one behind the other get their checksums; what can't be one is left alone. */
static void set_right(uint8_t *log, uint64_t length)
{
    uint32_t seed = fkv_crc32c(0, uuid, 16);
    for (uint64_t at = 0; at + 16 <= length;) {
        fkv_manifest_entry e;
        memcpy(&e, log + at, sizeof e);
        if (e.reserved || e.length_bytes > length - at - 16) {
            at += 8;
            continue;
        }
        e.crc = fkv_crc32c(seed, log + at + 4, e.length_bytes + 12u);
        memcpy(log + at, &e.crc, 4);
        at += (16u + (uint64_t)e.length_bytes + 7) / 8 * 8;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_input in = {data, size};
    uint8_t control = take8(&in);
    uint64_t times = (uint64_t)1 << (control >> 1 & 3) * 2, part = in.left, length = part * times;
    uint8_t *log = exactly(length);
    if (length > 1 << 13) { /* the plain walk is quadratic */
        give_back(log, length);
        return -1;
    }
    for (uint64_t i = 0; i < times && part; i++) memcpy(log + i * part, in.at, part);
    if (control & 1) set_right(log, length);
    uint64_t room = length / 16 + 1;
    fkv_manifest_row *expected = exactly(room * sizeof *expected);
    uint64_t count = plain(log, length, expected, room);
    fkv_manifest_row *rows = exactly(count * sizeof *rows);
    PROMISE(fkv_manifest_walk(log, length, uuid, NULL, 0) == count);
    PROMISE(fkv_manifest_walk(log, length, uuid, rows, count) == count);
    PROMISE(!memcmp(rows, expected, count * sizeof *rows));
    give_back(rows, count * sizeof *rows);
    give_back(expected, room * sizeof *expected);
    give_back(log, length);
    return 0;
}
