/* Makes calls to the C library fail as bad disks and clocks do, by a seeded generator.

   Built and preloaded by chaos.py, and asleep until a process calls chaos_begin: then files below `root` are touched,
   with a chance of `share` in ten thousand for each call and kind, and only by the kinds of faults that are named:
   s(pace) i(o) n(terrupt) h(alf) w(ait) c(lock). `counts`, shared with the parent, has the faults by these kinds. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static const char KINDS[] = "sinhwc";
static const char *root, *kinds;
static int share, *counts;
static __thread uint64_t state;
static uint64_t seed;

void chaos_begin(const char *below, const char *which, int chance, uint64_t from, int *struck) {
  root = strdup(below);
  kinds = strdup(which);
  share = chance;
  seed = from;
  counts = struck;
}

static uint64_t draw(void) { /* splitmix64; every thread has its own row of numbers */
  if (!state) state = seed * 0x9e3779b97f4a7c15ull + (uint64_t)gettid() % 64 + 1;
  uint64_t z = (state += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

static int strikes(char kind) {
  if (!kinds || !strchr(kinds, kind) || draw() % 10000 >= (uint64_t)share) return 0;
  __atomic_fetch_add(counts + (strchr(KINDS, kind) - KINDS), 1, __ATOMIC_RELAXED);
  return 1;
}

static int is_ours(const char *path) {
  char whole[PATH_MAX];
  if (!root || !path) return 0;
  if (path[0] == '/') return !strncmp(path, root, strlen(root));
  return getcwd(whole, sizeof whole) && !strncmp(whole, root, strlen(root));
}

static int is_open_below(int fd) {
  char link[64], path[PATH_MAX];
  if (!root) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n <= 0) return 0;
  path[n] = 0;
  return !strncmp(path, root, strlen(root));
}

#define REAL(name) static __typeof__(name) *real; if (!real) real = dlsym(RTLD_NEXT, #name)
#define FAIL(kind, number) if (strikes(kind)) { errno = number; return -1; }

static int fails(int fd, int writes) {
  if (!is_open_below(fd)) return 0;
  if (strikes('w')) usleep(20000);
  if (strikes('n')) return EINTR;
  if (writes && strikes('s')) return ENOSPC;
  if (strikes('i')) return EIO;
  return 0;
}

static size_t some(int fd, size_t n) { return n > 1 && is_open_below(fd) && strikes('h') ? n / 2 : n; }

#define CALL(result, name, parameters, fd, writes, call) \
  result name parameters { REAL(name); int e = fails(fd, writes); if (e) { errno = e; return -1; } return call; }

CALL(ssize_t, read, (int fd, void *p, size_t n), fd, 0, real(fd, p, some(fd, n)))
CALL(ssize_t, write, (int fd, const void *p, size_t n), fd, 1, real(fd, p, some(fd, n)))
CALL(ssize_t, pread, (int fd, void *p, size_t n, off_t o), fd, 0, real(fd, p, some(fd, n), o))
CALL(ssize_t, pread64, (int fd, void *p, size_t n, off64_t o), fd, 0, real(fd, p, some(fd, n), o))
CALL(ssize_t, pwrite, (int fd, const void *p, size_t n, off_t o), fd, 1, real(fd, p, some(fd, n), o))
CALL(ssize_t, pwrite64, (int fd, const void *p, size_t n, off64_t o), fd, 1, real(fd, p, some(fd, n), o))
CALL(ssize_t, preadv, (int fd, const struct iovec *v, int n, off_t o), fd, 0, real(fd, v, n, o))
CALL(ssize_t, preadv64, (int fd, const struct iovec *v, int n, off64_t o), fd, 0, real(fd, v, n, o))
CALL(ssize_t, preadv2, (int fd, const struct iovec *v, int n, off_t o, int f), fd, 0, real(fd, v, n, o, f))
CALL(ssize_t, preadv64v2, (int fd, const struct iovec *v, int n, off64_t o, int f), fd, 0, real(fd, v, n, o, f))
CALL(int, fsync, (int fd), fd, 1, real(fd))
CALL(int, fdatasync, (int fd), fd, 1, real(fd))

int posix_fallocate64(int fd, off64_t o, off64_t n) { /* gives the error, and sets none */
  REAL(posix_fallocate64);
  int e = fails(fd, 1);
  return e ? e : real(fd, o, n);
}
int posix_fallocate(int fd, off_t o, off_t n) { return posix_fallocate64(fd, o, n); }

int rename(const char *a, const char *b) {
  REAL(rename);
  if (is_ours(b)) { FAIL('s', ENOSPC) FAIL('i', EIO) }
  return real(a, b);
}

static int opened(const char *path, int flags) {
  if (!is_ours(path)) return 0;
  if (strikes('n')) return EINTR;
  if ((flags & O_CREAT) && strikes('s')) return ENOSPC;
  return strikes('i') ? EIO : 0;
}

#define OPEN(name) \
  int name(const char *path, int flags, ...) { \
    REAL(name); va_list list; va_start(list, flags); int mode = va_arg(list, int); va_end(list); \
    int e = opened(path, flags); if (e) { errno = e; return -1; } return real(path, flags, mode); }
OPEN(open)
OPEN(open64)

int clock_gettime(clockid_t id, struct timespec *t) { /* the wall clock jumps by up to a day, either way */
  REAL(clock_gettime);
  int found = real(id, t);
  if (!found && id == CLOCK_REALTIME && strikes('c')) t->tv_sec += (int64_t)(draw() % 172800) - 86400;
  return found;
}
