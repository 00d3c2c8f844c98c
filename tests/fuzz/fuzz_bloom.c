/* fuzz_bloom.c: the Bloom filter in memory of any length.
 *
 * Input: length of the filter (16 bits), bytes between digests, count of those that are added; the
 * digests; what the filter holds at first.
 * Promises: nothing outside the filter and the digests is touched; what was added is found; a filter
 * shorter than a block excludes nothing.
 */
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_input in = {data, size};
    uint32_t length = take16(&in) % 5000u, stride = 16u + take8(&in) % 16u, count = take8(&in);
    uint32_t added = take8(&in);
    added = added < count ? added : count;
    uint64_t apart_bytes = count ? (uint64_t)(count - 1) * stride + FKV_DIGEST_BYTES : 0;
    uint8_t *apart = exactly(apart_bytes), *tight = exactly(count * FKV_DIGEST_BYTES);
    uint8_t *filter = exactly(length), *found = exactly(count);
    take(&in, apart, apart_bytes);
    take(&in, filter, length);
    for (uint32_t i = 0; i < count; i++)
        memcpy(tight + i * FKV_DIGEST_BYTES, apart + (uint64_t)i * stride, FKV_DIGEST_BYTES);
    memset(found, 7, count);
    fkv_bloom_test(filter, length, tight, count, found);
    for (uint32_t i = 0; i < count; i++) PROMISE(found[i] <= 1);
    fkv_bloom_add(filter, length, apart, added, stride);
    fkv_bloom_test(filter, length, tight, count, found);
    for (uint32_t i = 0; i < added; i++) PROMISE(found[i] == 1);
    for (uint32_t i = 0; length < 32 && i < count; i++) PROMISE(found[i] == 1);
    PROMISE(fkv_bloom_bytes(count, 10) % 32 == 0 && fkv_bloom_bytes(count, 10) * 8 >= count * 10u);
    give_back(apart, apart_bytes);
    give_back(tight, count * FKV_DIGEST_BYTES);
    give_back(filter, length);
    give_back(found, count);
    return 0;
}
