/* Fails I/O calls of the program that it is loaded into (LD_PRELOAD), to see what the program does
 * then.
 *
 * BALLAST_FAULT="RANK CALL PATH NTH KIND ERRNO": on the rank (PMI_RANK) RANK, the NTH call (from 1)
 * of CALL (open, pread, pwrite, fsync, ftruncate, fallocate, rename) on a file whose path contains
 * PATH.  KIND: fail (once, with ERRNO), broken (that call and all later ones), short (half of the
 * bytes), lost (success is reported, nothing is written), flip (one bit is altered on its way). NTH
 * 0 only counts.  CALL MPI_Init: the rank stops itself (SIGSTOP) before that call; MPI_Finalize: it
 * never returns; PATH, NTH, KIND and ERRNO are then any. BALLAST_FAULT_LOG: a file to which a line is added when the fault strikes, and at
 * exit the number of calls seen. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static struct {
  int active, rank, nth, error, seen;
  char call[16], path[256], kind[16];
} plan;
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;

static void note(const char* what) {
  const char* log = getenv("BALLAST_FAULT_LOG");
  char line[600];
  int fd, size = snprintf(line, sizeof line, "%s %s %s seen=%d\n", what, plan.call, plan.path,
                          plan.seen);
  if (!log) return;
  fd = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND, 0644);
  if (fd < 0) return;
  if (write(fd, line, (size_t)size) < 0) plan.seen += 0; /* nobody to tell */
  close(fd);
}

__attribute__((constructor)) static void begin(void) {
  const char *text = getenv("BALLAST_FAULT"), *rank = getenv("PMI_RANK");
  if (!text || sscanf(text, "%d %15s %255s %d %15s %d", &plan.rank, plan.call, plan.path, &plan.nth,
                      plan.kind, &plan.error) != 6)
    return;
  plan.active = rank && atoi(rank) == plan.rank;
}

__attribute__((destructor)) static void end(void) {
  if (plan.active) note("end");
}

static int strikes(const char* call, const char* path) {
  int strike = 0;
  if (!plan.active || strcmp(call, plan.call) || !strstr(path, plan.path)) return 0;
  pthread_mutex_lock(&guard);
  ++plan.seen;
  if (plan.nth > 0)
    strike = plan.seen == plan.nth || (plan.seen > plan.nth && !strcmp(plan.kind, "broken"));
  pthread_mutex_unlock(&guard);
  if (strike) note("struck");
  return strike;
}

static int strikes_fd(const char* call, int fd) {
  char link[64], path[4096];
  ssize_t size;
  if (!plan.active || strcmp(call, plan.call)) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  size = readlink(link, path, sizeof path - 1);
  if (size < 0) return 0;
  path[size] = 0;
  return strikes(call, path);
}

static int is(const char* kind) { return !strcmp(plan.kind, kind); }
#define NEXT(type, name, ...) \
  type (*next)(__VA_ARGS__) = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

ssize_t pwrite(int fd, const void* data, size_t count, off_t offset) {
  NEXT(ssize_t, "pwrite", int, const void*, size_t, off_t);
  if (!strikes_fd("pwrite", fd)) return next(fd, data, count, offset);
  if (is("lost")) return (ssize_t)count;
  if (is("short") && count > 1) return next(fd, data, count / 2, offset);
  if (is("flip") && count > 0) {
    char* copy = malloc(count);
    ssize_t done;
    memcpy(copy, data, count);
    copy[count / 2] ^= 16;
    done = next(fd, copy, count, offset);
    free(copy);
    return done;
  }
  errno = plan.error;
  return -1;
}
ssize_t pwrite64(int fd, const void* data, size_t count, off_t offset) {
  return pwrite(fd, data, count, offset);
}

ssize_t pread(int fd, void* data, size_t count, off_t offset) {
  NEXT(ssize_t, "pread", int, void*, size_t, off_t);
  ssize_t done;
  if (!strikes_fd("pread", fd)) return next(fd, data, count, offset);
  if (is("short") && count > 1) return next(fd, data, count / 2, offset);
  if (is("flip")) {
    done = next(fd, data, count, offset);
    if (done > 0) ((char*)data)[done / 2] ^= 16;
    return done;
  }
  errno = plan.error;
  return -1;
}
ssize_t pread64(int fd, void* data, size_t count, off_t offset) {
  return pread(fd, data, count, offset);
}

int fsync(int fd) {
  NEXT(int, "fsync", int);
  if (!strikes_fd("fsync", fd)) return next(fd);
  if (is("lost")) return 0;
  errno = plan.error;
  return -1;
}

int ftruncate(int fd, off_t size) {
  NEXT(int, "ftruncate", int, off_t);
  if (!strikes_fd("ftruncate", fd)) return next(fd, size);
  errno = plan.error;
  return -1;
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }

int fallocate(int fd, int mode, off_t offset, off_t size) {
  NEXT(int, "fallocate", int, int, off_t, off_t);
  if (!strikes_fd("fallocate", fd)) return next(fd, mode, offset, size);
  errno = plan.error;
  return -1;
}
int fallocate64(int fd, int mode, off_t offset, off_t size) {
  return fallocate(fd, mode, offset, size);
}

int rename(const char* from, const char* to) {
  NEXT(int, "rename", const char*, const char*);
  if (!strikes("rename", from)) return next(from, to);
  errno = plan.error;
  return -1;
}

int open(const char* path, int flags, ...) {
  NEXT(int, "open", const char*, int, ...);
  va_list rest;
  int mode;
  va_start(rest, flags);
  mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0;
  va_end(rest);
  if (!strikes("open", path)) return next(path, flags, mode);
  errno = plan.error;
  return -1;
}
int open64(const char* path, int flags, ...) {
  va_list rest;
  int mode;
  va_start(rest, flags);
  mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0;
  va_end(rest);
  return open(path, flags, mode);
}

int MPI_Init(int* argc, char*** argv) {
  NEXT(int, "MPI_Init", int*, char***);
  if (plan.active && !strcmp(plan.call, "MPI_Init")) {
    note("struck");
    raise(SIGSTOP);
  }
  return next(argc, argv);
}

int MPI_Finalize(void) {
  NEXT(int, "MPI_Finalize", void);
  if (plan.active && !strcmp(plan.call, "MPI_Finalize")) {
    note("struck");
    for (;;) pause();
  }
  return next();
}
