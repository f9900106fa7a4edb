/* Fails I/O calls of the program that it is loaded into (LD_PRELOAD), to see what the program does
 * then.
 *
 * BALLAST_FAULT="RANK CALL PATH NTH KIND ERRNO", several separated by ";": on the rank (PMI_RANK)
 * RANK, the NTH call (from 1) of CALL (open, pread, pwrite, fsync, ftruncate, fallocate, flock,
 * rename, stat) on a file whose path contains PATH, or ends in it where a "$" follows.  PATH may
 * end in @STEP: then only calls made since the path of a checkpoint of that step (step_STEP) was
 * last seen count, until another step's is; @0 is any. KIND: fail (once, with ERRNO), broken (that
 * call and all later ones), short (half of the bytes), lost (success is reported, nothing is
 * written), flip (one bit is altered on its way).
 * NTH 0 only counts.  CALL MPI_Init: the rank stops itself (SIGSTOP) before that call;
 * MPI_Finalize: it never returns; exit: the rank stops itself after MPI_Finalize; PATH, NTH, KIND
 * and ERRNO are then any. BALLAST_FAULT_LOG: a file to which a line is added when a fault strikes,
 * and at exit the number of calls seen by each. */
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
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MOST_FAULTS = 64, NAME = 16, PATH = 256 };
struct fault {
  int rank, nth, error, seen, step; /* step: 0 where any counts */
  char call[NAME], path[PATH], kind[NAME];
};
static struct fault faults[MOST_FAULTS]; /* of this rank */
static int fault_count, step_at;         /* step_at: of the checkpoint whose path was seen last */
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;

static void note(const char* what, const struct fault* fault) {
  const char* log = getenv("BALLAST_FAULT_LOG");
  char line[600];
  int fd, size = snprintf(line, sizeof line, "%s %s %s@%d seen=%d\n", what, fault->call,
                          fault->path, fault->step, fault->seen);
  if (!log) return;
  fd = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND, 0644);
  if (fd < 0) return;
  if (write(fd, line, (size_t)size) < 0) fault_count += 0; /* nobody to tell */
  close(fd);
}

__attribute__((constructor)) static void begin(void) {
  const char *text = getenv("BALLAST_FAULT"), *rank = getenv("PMI_RANK");
  for (; text && rank && fault_count < MOST_FAULTS; text = strchr(text, ';')) {
    struct fault fault = {0};
    char* step;
    if (*text == ';') ++text;
    if (sscanf(text, "%d %15s %255s %d %15s %d", &fault.rank, fault.call, fault.path, &fault.nth,
               fault.kind, &fault.error) != 6)
      return;
    step = strchr(fault.path, '@');
    if (step) {
      fault.step = atoi(step + 1);
      *step = 0;
    }
    if (fault.rank == atoi(rank)) faults[fault_count++] = fault;
  }
}

__attribute__((destructor)) static void end(void) {
  for (int i = 0; i < fault_count; ++i) note("end", &faults[i]);
}

/* Whether a path contains what a fault names, or ends in it where a "$" follows. */
static int names(const struct fault* fault, const char* path) {
  const size_t size = strlen(fault->path), whole = strlen(path);
  if (size == 0 || fault->path[size - 1] != '$') return strstr(path, fault->path) != NULL;
  return whole + 1 >= size && !strncmp(path + whole + 1 - size, fault->path, size - 1);
}

/* The fault that strikes a call on a path, or none. */
static const struct fault* struck(const char* call, const char* path) {
  const char* step = strstr(path, "step_");
  const struct fault* found = NULL;
  pthread_mutex_lock(&guard);
  if (step) step_at = atoi(step + strlen("step_"));
  for (int i = 0; i < fault_count; ++i) {
    struct fault* fault = &faults[i];
    if (strcmp(call, fault->call) || !names(fault, path)) continue;
    if (fault->step && fault->step != step_at) continue;
    ++fault->seen;
    if (fault->nth == 0 || fault->seen < fault->nth) continue;
    if (fault->seen == fault->nth || !strcmp(fault->kind, "broken")) found = fault;
  }
  pthread_mutex_unlock(&guard);
  if (found) note("struck", found);
  return found;
}

static const struct fault* struck_fd(const char* call, int fd) {
  char link[64], path[4096];
  ssize_t size;
  if (fault_count == 0) return NULL;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  size = readlink(link, path, sizeof path - 1);
  if (size < 0) return NULL;
  path[size] = 0;
  return struck(call, path);
}

/* The fault of a call of MPI that this rank shall not leave, or none. */
static const struct fault* struck_mpi(const char* call) {
  for (int i = 0; i < fault_count; ++i)
    if (!strcmp(faults[i].call, call)) return &faults[i];
  return NULL;
}

static int is(const struct fault* fault, const char* kind) { return !strcmp(fault->kind, kind); }
static int fails(const struct fault* fault) {
  errno = fault->error;
  return -1;
}
#define NEXT(type, name, ...) \
  type (*next)(__VA_ARGS__) = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

ssize_t pwrite(int fd, const void* data, size_t count, off_t offset) {
  NEXT(ssize_t, "pwrite", int, const void*, size_t, off_t);
  const struct fault* fault = struck_fd("pwrite", fd);
  if (!fault) return next(fd, data, count, offset);
  if (is(fault, "lost")) return (ssize_t)count;
  if (is(fault, "short") && count > 1) return next(fd, data, count / 2, offset);
  if (is(fault, "flip") && count > 0) {
    char* copy = malloc(count);
    ssize_t done;
    memcpy(copy, data, count);
    copy[count / 2] ^= 16;
    done = next(fd, copy, count, offset);
    free(copy);
    return done;
  }
  return fails(fault);
}
ssize_t pwrite64(int fd, const void* data, size_t count, off_t offset) {
  return pwrite(fd, data, count, offset);
}

ssize_t pread(int fd, void* data, size_t count, off_t offset) {
  NEXT(ssize_t, "pread", int, void*, size_t, off_t);
  ssize_t done;
  const struct fault* fault = struck_fd("pread", fd);
  if (!fault) return next(fd, data, count, offset);
  if (is(fault, "short") && count > 1) return next(fd, data, count / 2, offset);
  if (is(fault, "flip")) {
    done = next(fd, data, count, offset);
    if (done > 0) ((char*)data)[done / 2] ^= 16;
    return done;
  }
  return fails(fault);
}
ssize_t pread64(int fd, void* data, size_t count, off_t offset) {
  return pread(fd, data, count, offset);
}

int fsync(int fd) {
  NEXT(int, "fsync", int);
  const struct fault* fault = struck_fd("fsync", fd);
  if (!fault) return next(fd);
  if (is(fault, "lost")) return 0;
  return fails(fault);
}

int ftruncate(int fd, off_t size) {
  NEXT(int, "ftruncate", int, off_t);
  const struct fault* fault = struck_fd("ftruncate", fd);
  if (!fault) return next(fd, size);
  return fails(fault);
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }

int fallocate(int fd, int mode, off_t offset, off_t size) {
  NEXT(int, "fallocate", int, int, off_t, off_t);
  const struct fault* fault = struck_fd("fallocate", fd);
  if (!fault) return next(fd, mode, offset, size);
  return fails(fault);
}
int fallocate64(int fd, int mode, off_t offset, off_t size) {
  return fallocate(fd, mode, offset, size);
}

int flock(int fd, int operation) {
  NEXT(int, "flock", int, int);
  const struct fault* fault = struck_fd("flock", fd);
  if (!fault) return next(fd, operation);
  return fails(fault);
}

int rename(const char* from, const char* to) {
  NEXT(int, "rename", const char*, const char*);
  const struct fault* fault = struck("rename", from);
  if (!fault) return next(from, to);
  return fails(fault);
}

int renameat(int from_fd, const char* from, int to_fd, const char* to) {
  NEXT(int, "renameat", int, const char*, int, const char*);
  char link[64], path[8192];
  const struct fault* fault;
  ssize_t size;
  snprintf(link, sizeof link, "/proc/self/fd/%d", from_fd);
  size = readlink(link, path, sizeof path / 2);
  snprintf(path + (size < 0 ? 0 : size), sizeof path / 2, "/%s", from);
  fault = struck("rename", path);
  if (!fault) return next(from_fd, from, to_fd, to);
  return fails(fault);
}

int stat(const char* path, struct stat* status) {
  NEXT(int, "stat", const char*, struct stat*);
  const struct fault* fault = struck("stat", path);
  if (!fault) return next(path, status);
  return fails(fault);
}

int open(const char* path, int flags, ...) {
  NEXT(int, "open", const char*, int, ...);
  const struct fault* fault = struck("open", path);
  va_list rest;
  int mode;
  va_start(rest, flags);
  mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0;
  va_end(rest);
  if (!fault) return next(path, flags, mode);
  return fails(fault);
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
  const struct fault* fault = struck_mpi("MPI_Init");
  if (fault) {
    note("struck", fault);
    raise(SIGSTOP);
  }
  return next(argc, argv);
}

int MPI_Finalize(void) {
  NEXT(int, "MPI_Finalize", void);
  const struct fault* fault = struck_mpi("MPI_Finalize");
  if (fault) {
    note("struck", fault);
    for (;;) pause();
  }
  const int result = next();
  if ((fault = struck_mpi("exit"))) {
    note("struck", fault);
    raise(SIGSTOP);
  }
  return result;
}
