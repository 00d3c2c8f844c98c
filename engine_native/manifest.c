/* manifest.c: the good entries of a manifest's log.
 *
 * Invariants
 *  - an entry is good if its checksum is right, its ordinal is not before its turn, its payload has a
 *    length that its type can have, and no sequence, epoch or generation in it is beyond all that
 *    are given; what else it says is for the caller to judge;
 *  - behind anything else the walk goes on 8 bytes further: damage hides only what it touches;
 *  - nothing outside the log is read, whatever it holds, and the time for a log of n bytes is that of
 *    a few passes over it and at most n / 8 joins of checksums.
 *
 * The last point needs care: any 8 bytes may look like the head of an entry of many megabytes, so a
 * log of nothing else would be read n times over. Once as many bytes were checked in vain as the log
 * has, the checksums of all its beginnings are computed, one each 8 bytes, and that of any stretch
 * follows from two of them: crc(B) = crc(AB) ^ shift(crc(A), length of B), where shift, appending
 * zero bytes, is a product of polynomials.
 */
#include "allocate.h"
#include "flashkv_native.h"
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#define ROUND8(n) (((n) + 7u) & ~(uint64_t)7u)
#define HEAD ((uint64_t)sizeof(fkv_manifest_entry))
#define CRC_FROM 4u /* the checksum covers the entry from here on */
#define POLYNOMIAL 0x82F63B78u
#define ONE 0x80000000u /* the polynomial 1, bits reversed */

typedef struct {
    const uint8_t *log;
    uint64_t length;
    uint32_t seed;          /* checksum of the store's uuid */
    uint64_t in_vain;       /* bytes that were checked and found wrong */
    uint32_t *beginnings;   /* [n]: checksum of the first 8 * n + CRC_FROM bytes, or NULL */
    bool no_memory;         /* for them: each entry is then checked by itself */
    uint32_t powers[4][256]; /* [k][d]: x^(8 * d * 256^k) */
} walk;

/* ---- checksums of stretches ---- */

/* Product modulo the polynomial, bits reversed: bit 31 is x^0. */
static uint32_t product(uint32_t a, uint32_t b)
{
    uint32_t sum = 0;
    for (; a; a <<= 1) {
        sum ^= b & (0u - (a >> 31));
        b = b >> 1 ^ (POLYNOMIAL & (0u - (b & 1)));
    }
    return sum;
}

static uint32_t shifted(const walk *w, uint32_t crc, uint32_t bytes)
{
    for (int k = 0; bytes; k++, bytes >>= 8)
        if (bytes & 0xFF) crc = product(w->powers[k][bytes & 0xFF], crc);
    return crc;
}

static void note_beginnings(walk *w)
{
    uint64_t count = (w->length - CRC_FROM) / 8 + 1;
    uint32_t base = ONE >> 8; /* x^8 */
    w->beginnings = fkv_malloc(count * sizeof *w->beginnings);
    if (!w->beginnings) {
        w->no_memory = true;
        return;
    }
    uint32_t crc = fkv_crc32c(0, w->log, CRC_FROM);
    for (uint64_t i = 0; i < count; i++) {
        w->beginnings[i] = crc;
        if (i + 1 < count) crc = fkv_crc32c(crc, w->log + 8 * i + CRC_FROM, 8);
    }
    for (int k = 0; k < 4; k++) {
        w->powers[k][0] = ONE;
        for (int d = 1; d < 256; d++) w->powers[k][d] = product(w->powers[k][d - 1], base);
        base = product(w->powers[k][255], base);
    }
}

/* Checksum of bytes [from, to), seeded by the uuid. `from` lies CRC_FROM behind a multiple of 8. */
static uint32_t stretch(const walk *w, uint64_t from, uint64_t to)
{
    if (!w->beginnings) return fkv_crc32c(w->seed, w->log + from, to - from);
    uint64_t last = (to - CRC_FROM) / 8, whole = 8 * last + CRC_FROM;
    uint32_t to_here = fkv_crc32c(w->beginnings[last], w->log + whole, to - whole);
    uint32_t before = w->beginnings[(from - CRC_FROM) / 8] ^ w->seed;
    return shifted(w, before, (uint32_t)(to - from)) ^ to_here;
}

/* ---- entries ---- */

static bool length_fits(uint16_t type, uint32_t length)
{
    switch (type) {
    case FKV_MANIFEST_BEGIN:
        return length == sizeof(fkv_manifest_begin);
    case FKV_MANIFEST_OPENED:
    case FKV_MANIFEST_FREED:
        return length == sizeof(fkv_manifest_segment);
    case FKV_MANIFEST_KILL:
        return length && length % sizeof(fkv_manifest_kill) == 0;
    case FKV_MANIFEST_NAMESPACE:
        return length > FKV_NAMESPACE_BYTES;
    case FKV_MANIFEST_PROFILE:
        return length > FKV_PROFILE_BYTES;
    case FKV_MANIFEST_RETIRED:
        return length == sizeof(fkv_manifest_retired);
    case FKV_MANIFEST_VOID:
        return length == sizeof(fkv_manifest_void);
    default: /* of a later version: passed over */
        return true;
    }
}

static uint64_t number_at(const uint8_t *payload, uint64_t offset)
{
    uint64_t number;
    memcpy(&number, payload + offset, sizeof number);
    return number;
}

/* Whether its sequences, epochs and generations can have been given. The length fits its type. */
static bool numbers_fit(uint16_t type, const uint8_t *payload, uint64_t length)
{
    uint64_t most = 0, number;
    switch (type) {
    case FKV_MANIFEST_BEGIN:
        most = number_at(payload, offsetof(fkv_manifest_begin, generation));
        number = number_at(payload, offsetof(fkv_manifest_begin, next_sequence));
        if (number > most) most = number;
        break;
    case FKV_MANIFEST_OPENED:
    case FKV_MANIFEST_FREED:
        most = number_at(payload, offsetof(fkv_manifest_segment, epoch));
        break;
    case FKV_MANIFEST_KILL:
        for (uint64_t at = 0; at < length; at += sizeof(fkv_manifest_kill)) {
            number = number_at(payload + at, offsetof(fkv_manifest_kill, epoch));
            if (number > most) most = number;
            number = number_at(payload + at, offsetof(fkv_manifest_kill, sequence));
            if (number > most) most = number;
        }
        break;
    case FKV_MANIFEST_RETIRED:
        most = number_at(payload, offsetof(fkv_manifest_retired, last_sequence));
        break;
    case FKV_MANIFEST_VOID:
        most = number_at(payload, offsetof(fkv_manifest_void, epoch));
        number = number_at(payload, offsetof(fkv_manifest_void, last_sequence));
        if (number > most) most = number;
        break;
    default:
        break;
    }
    return most < FKV_COUNT_END;
}

/* Whether an entry with a right checksum that is not before `least` lies at `at`. */
static bool entry_at(walk *w, uint64_t at, uint64_t least, fkv_manifest_entry *entry)
{
    memcpy(entry, w->log + at, sizeof *entry);
    if (entry->reserved || entry->ordinal < least || entry->ordinal - least >= w->length)
        return false;
    if (entry->length_bytes > w->length - at - HEAD
        || !length_fits(entry->type, entry->length_bytes))
        return false;
    if (w->in_vain > w->length && !w->beginnings && !w->no_memory) note_beginnings(w);
    if (stretch(w, at + CRC_FROM, at + HEAD + entry->length_bytes) == entry->crc) return true;
    w->in_vain += HEAD + entry->length_bytes;
    return false;
}

uint64_t fkv_manifest_walk(const uint8_t *log, uint64_t length, const uint8_t *store_uuid,
                           fkv_manifest_row *rows, uint64_t room)
{
    walk w = {.log = log, .length = length, .seed = fkv_crc32c(0, store_uuid, FKV_UUID_BYTES)};
    uint64_t count = 0, least = 0;
    bool damaged = false;
    for (uint64_t at = 0; at < length && length - at >= HEAD;) {
        fkv_manifest_entry entry;
        if (!entry_at(&w, at, least, &entry)) {
            damaged = true;
            at += 8;
            continue;
        }
        /* One that was written so is passed over whole: it takes its time once. */
        bool good = numbers_fit(entry.type, log + at + HEAD, entry.length_bytes);
        damaged |= !good;
        if (good && count < room)
            rows[count] = (fkv_manifest_row){.offset = at + HEAD,
                                             .length_bytes = entry.length_bytes,
                                             .ordinal = entry.ordinal,
                                             .type = entry.type,
                                             .behind_damage = damaged};
        count += good;
        at += HEAD + ROUND8((uint64_t)entry.length_bytes);
        least = (uint64_t)entry.ordinal + 1;
    }
    fkv_free(w.beginnings);
    return count;
}
