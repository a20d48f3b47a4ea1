/* LD_PRELOAD stand-in for a clock that jumps, renames that fail, and a file system that becomes
   read-only while a run uses it. The environment is read at every call; without it nothing changes.

   FAULT_CLOCK=N      every N readings the time of day jumps: a year ahead, a year back, and again
   FAULT_FOLDER=PATH  the folder of the next two
   FAULT_RENAME=N     the N-th rename of a process to a name below the folder fails (EIO)
   FAULT_READONLY=N   from the N-th file on that a process opens for writing below the folder,
                      nothing can be opened for writing, made or renamed there (EROFS) */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
static const time_t YEAR = 365 * 24 * 3600;
static long readings, renames, opens;

static long wanted(const char *name) {
    const char *text = getenv(name);
    return text ? atol(text) : 0;
}

static int below(const char *path) {
    const char *folder = getenv("FAULT_FOLDER");
    return folder && path && strncmp(path, folder, strlen(folder)) == 0;
}

static time_t jump(void) {
    static const int offsets[] = {0, 1, 0, -1};
    long every = wanted("FAULT_CLOCK");
    return every ? YEAR * offsets[__atomic_fetch_add(&readings, 1, __ATOMIC_RELAXED) / every % 4] : 0;
}

int clock_gettime(clockid_t clock, struct timespec *out) {
    int code = REAL(clock_gettime)(clock, out);
    if (clock == CLOCK_REALTIME && code == 0) out->tv_sec += jump();
    return code;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    int code = REAL(gettimeofday)(out, zone);
    if (code == 0) out->tv_sec += jump();
    return code;
}

time_t time(time_t *out) {
    time_t now = REAL(time)(NULL) + jump();
    if (out) *out = now;
    return now;
}

static int refuses_rename(const char *to) {
    long number = wanted("FAULT_RENAME"), readonly = wanted("FAULT_READONLY");
    if (!below(to)) return 0;
    if (readonly && opens >= readonly) return errno = EROFS;
    return number && __atomic_add_fetch(&renames, 1, __ATOMIC_RELAXED) == number ? (errno = EIO) : 0;
}

int rename(const char *from, const char *to) {
    return refuses_rename(to) ? -1 : REAL(rename)(from, to);
}

int renameat(int in, const char *from, int out, const char *to) {
    return refuses_rename(to) ? -1 : REAL(renameat)(in, from, out, to);
}

static int refuses_writing(const char *path, int flags) {
    long number = wanted("FAULT_READONLY");
    if (!number || !(flags & (O_WRONLY | O_RDWR | O_CREAT)) || !below(path)) return 0;
    return __atomic_add_fetch(&opens, 1, __ATOMIC_RELAXED) >= number ? (errno = EROFS) : 0;
}

#define MODE(last) \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, last); mode = va_arg(rest, mode_t); va_end(rest); }

int open(const char *path, int flags, ...) {
    MODE(flags)
    return refuses_writing(path, flags) ? -1 : REAL(open)(path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    MODE(flags)
    return refuses_writing(path, flags) ? -1 : REAL(open64)(path, flags, mode);
}

int openat(int folder, const char *path, int flags, ...) {
    MODE(flags)
    return refuses_writing(path, flags) ? -1 : REAL(openat)(folder, path, flags, mode);
}

int openat64(int folder, const char *path, int flags, ...) {
    MODE(flags)
    return refuses_writing(path, flags) ? -1 : REAL(openat64)(folder, path, flags, mode);
}

int mkdir(const char *path, mode_t mode) {
    return refuses_writing(path, O_CREAT) ? -1 : REAL(mkdir)(path, mode);
}
