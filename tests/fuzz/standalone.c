/* standalone.c: runs a target on files, and on harmed copies of them, where libFuzzer isn't to be
 * had.
 *
 *   TARGET SEED ROUNDS FILE...
 *
 * Every file runs once as it is; then ROUNDS times one of them with a few bytes changed, cut out,
 * repeated or added. No coverage guides it: it finds less than libFuzzer does.
 */
#include "fuzz.h"

#define INPUT_MAX (1u << 18)
static uint64_t state;

static uint32_t below(uint32_t bound)
{
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return bound ? (uint32_t)(state >> 16) % bound : 0;
}

static size_t harm(uint8_t *bytes, size_t length)
{
    static const uint8_t telling[] = {0, 1, 2, 4, 8, 16, 32, 64, 127, 128, 254, 255};
    for (uint32_t n = 1 + below(5); n && length > 4; n--) {
        uint32_t at = below((uint32_t)length), part = 1 + below(16), to = below((uint32_t)length);
        if (part > length - at) part = (uint32_t)length - at;
        switch (below(6)) {
        case 0: bytes[at] ^= (uint8_t)(1u << below(8)); break;
        case 1: bytes[at] = telling[below(sizeof telling)]; break;
        case 2: bytes[at] = (uint8_t)below(256); break;
        case 3: bytes[at] = (uint8_t)(bytes[at] + (below(2) ? 1 : 255)); break;
        case 4: /* over another place */
            memmove(bytes + to, bytes + at, part < length - to ? part : length - to);
            break;
        default: /* cut out */
            if (below(4)) break;
            memmove(bytes + at, bytes + at + part, length - at - part);
            length -= part;
        }
    }
    return length;
}

static uint8_t *read_file(const char *path, size_t *length)
{
    FILE *file = fopen(path, "rb");
    uint8_t *bytes = malloc(INPUT_MAX);
    PROMISE(file && bytes);
    *length = fread(bytes, 1, INPUT_MAX, file);
    fclose(file);
    return bytes;
}

int main(int count, char **arguments)
{
    if (count < 4) return 2;
    state = strtoull(arguments[1], NULL, 10) * 2654435761u + 1;
    uint64_t rounds = strtoull(arguments[2], NULL, 10);
    uint32_t files = (uint32_t)count - 3;
    uint8_t *scratch = malloc(INPUT_MAX), **bytes = calloc(files, sizeof *bytes);
    size_t *lengths = calloc(files, sizeof *lengths);
    PROMISE(scratch && bytes && lengths);
    for (uint32_t i = 0; i < files; i++) {
        bytes[i] = read_file(arguments[i + 3], &lengths[i]);
        LLVMFuzzerTestOneInput(bytes[i], lengths[i]);
    }
    for (uint64_t round = 0; round < rounds; round++) {
        uint32_t which = below(files);
        memcpy(scratch, bytes[which], lengths[which]);
        size_t length = harm(scratch, lengths[which]);
        uint8_t *exact = copied(scratch, length);
        LLVMFuzzerTestOneInput(exact, length);
        give_back(exact, length);
    }
    for (uint32_t i = 0; i < files; i++) free(bytes[i]);
    free(bytes), free(lengths), free(scratch);
    printf("%u files, %llu rounds\n", files, (unsigned long long)rounds);
    return 0;
}
