/* A disk that fails: the N-th call that changes something under a folder, and those after it, fail
 * with an error, or write less than they should. For LD_PRELOAD; `disk_faults.py` sets it up. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX];
static long first, count;
static int error_number; /* 0: a short write */
static struct { atomic_long calls, failed; } *counts; /* of this process and those it forks */

/* Start: fail `how_many` calls from the `from`-th on (1: the first). */
void disk_faults_set(const char *under, long from, long how_many, int error)
{
    first = from;
    count = how_many;
    error_number = error;
    counts = mmap(NULL, sizeof *counts, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    strncpy(folder, under, sizeof folder - 1);
}

/* How many calls there were. */
long disk_faults_calls(void) { return atomic_load(&counts->calls); }

/* How many of them failed. */
long disk_faults_failed(void) { return atomic_load(&counts->failed); }

static int is_under(const char *path)
{
    size_t length = strlen(folder);
    return length && !strncmp(path, folder, length);
}

static int is_path_under(int at, const char *path)
{
    char name[64], whole[2 * PATH_MAX];
    ssize_t length;

    if (!folder[0] || path == NULL)
        return 0;
    if (path[0] == '/')
        return is_under(path);
    snprintf(name, sizeof name, at == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", at);
    length = readlink(name, whole, PATH_MAX);
    if (length < 0)
        return 0;
    snprintf(whole + length, sizeof whole - length, "/%s", path);
    return is_under(whole);
}

static int is_descriptor_under(int descriptor)
{
    char name[64], path[PATH_MAX];
    ssize_t length;
    int before = errno;

    if (!folder[0])
        return 0;
    snprintf(name, sizeof name, "/proc/self/fd/%d", descriptor);
    length = readlink(name, path, sizeof path - 1);
    errno = before;
    if (length < 0)
        return 0;
    path[length] = 0;
    return is_under(path);
}

/* Count a call; whether it fails. */
static int fails(void)
{
    long number = atomic_fetch_add(&counts->calls, 1) + 1;

    if (number < first || number >= first + count)
        return 0;
    atomic_fetch_add(&counts->failed, 1);
    if (error_number)
        errno = error_number;
    return 1;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int descriptor, const void *data, size_t size)
{
    if (is_descriptor_under(descriptor) && fails()) {
        if (error_number)
            return -1;
        size = size > 1 ? size / 2 : size;
    }
    return syscall(SYS_write, descriptor, data, size);
}

ssize_t pwrite(int descriptor, const void *data, size_t size, off_t at)
{
    if (is_descriptor_under(descriptor) && fails()) {
        if (error_number)
            return -1;
        size = size > 1 ? size / 2 : size;
    }
    return NEXT(pwrite)(descriptor, data, size, at);
}

ssize_t writev(int descriptor, const struct iovec *parts, int how_many)
{
    if (is_descriptor_under(descriptor) && fails()) {
        if (error_number)
            return -1;
        return syscall(SYS_write, descriptor, parts[0].iov_base, parts[0].iov_len);
    }
    return NEXT(writev)(descriptor, parts, how_many);
}

#define OPEN(name, parameters, arguments, at, path)                                                \
    int name parameters                                                                            \
    {                                                                                              \
        va_list more;                                                                              \
        mode_t mode;                                                                               \
        va_start(more, flags);                                                                     \
        mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;                           \
        va_end(more);                                                                              \
        if (flags & (O_CREAT | O_WRONLY | O_RDWR) && is_path_under(at, path) && fails()       \
            && error_number)                                                                       \
            return -1;                                                                             \
        return NEXT(name) arguments;                                                               \
    }

OPEN(open, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD, path)
OPEN(open64, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD, path)
OPEN(openat, (int at, const char *path, int flags, ...), (at, path, flags, mode), at, path)
OPEN(openat64, (int at, const char *path, int flags, ...), (at, path, flags, mode), at, path)

int rename(const char *from, const char *to)
{
    if (is_path_under(AT_FDCWD, to) && fails() && error_number)
        return -1;
    return NEXT(rename)(from, to);
}

int renameat(int from_at, const char *from, int to_at, const char *to)
{
    if (is_path_under(to_at, to) && fails() && error_number)
        return -1;
    return NEXT(renameat)(from_at, from, to_at, to);
}

int mkdir(const char *path, mode_t mode)
{
    if (is_path_under(AT_FDCWD, path) && fails() && error_number)
        return -1;
    return NEXT(mkdir)(path, mode);
}

int mkdirat(int at, const char *path, mode_t mode)
{
    if (is_path_under(at, path) && fails() && error_number)
        return -1;
    return NEXT(mkdirat)(at, path, mode);
}

int fsync(int descriptor)
{
    if (is_descriptor_under(descriptor) && fails() && error_number)
        return -1;
    return NEXT(fsync)(descriptor);
}

int fdatasync(int descriptor)
{
    if (is_descriptor_under(descriptor) && fails() && error_number)
        return -1;
    return NEXT(fdatasync)(descriptor);
}
