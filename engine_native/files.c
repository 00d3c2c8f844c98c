/* files.c: what a file system tells and grants: alignment of direct I/O, reserved space.
 *
 * Invariant: nothing here moves data of the store.
 */
#include "flashkv_native.h"
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define INTERRUPTIONS_MAX 16

/* The kernel's statx answer. Its ABI is fixed; C libraries learnt these fields after kernels. */
#define STATX_DIRECT_IO 0x2000u
typedef struct {
    uint32_t mask;
    uint8_t others[148];
    uint32_t direct_memory_alignment;
    uint32_t direct_offset_alignment;
    uint8_t rest[96];
} statx_answer;
_Static_assert(sizeof(statx_answer) == 256, "struct statx is 256 bytes");

int fkv_direct_alignment(int32_t fd, uint32_t *memory_bytes, uint32_t *offset_bytes)
{
#ifdef SYS_statx
    statx_answer answer;
    memset(&answer, 0, sizeof answer);
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_DIRECT_IO, &answer) != 0)
        return errno == ENOSYS || errno == EINVAL ? -EOPNOTSUPP : -errno;
    if ((answer.mask & STATX_DIRECT_IO) == 0) return -EOPNOTSUPP;
    *memory_bytes = answer.direct_memory_alignment;
    *offset_bytes = answer.direct_offset_alignment;
    return 0;
#else
    (void)fd, (void)memory_bytes, (void)offset_bytes;
    return -EOPNOTSUPP;
#endif
}

/* 0; 1: the file system can't reserve; or -errno. */
static int allocate(int32_t fd, int mode, uint64_t length)
{
    int result = 0;
    if (length == 0) return 0;
    /* Not posix_fallocate: the C library's substitute for it writes into every block. */
    for (int i = 0; i < INTERRUPTIONS_MAX; i++) {
        result = fallocate(fd, mode, 0, (off_t)length) == 0 ? 0 : -errno;
        if (result != -EINTR) break;
    }
    return result == -EOPNOTSUPP || result == -ENOSYS ? 1 : result;
}

int fkv_reserve(int32_t fd, uint64_t length)
{
    return allocate(fd, FALLOC_FL_KEEP_SIZE, length);
}

int fkv_preallocate(int32_t fd, uint64_t length)
{
    struct stat status;
    int result = allocate(fd, 0, length);
    if (result != 1) return result;
    if (fstat(fd, &status) != 0) return -errno;
    if ((uint64_t)status.st_size < length && ftruncate(fd, (off_t)length) != 0) return -errno;
    return 1;
}
