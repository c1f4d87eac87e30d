// Descriptors that stay open while the program runs. It may close those that it does not know and
// open its own files under the same numbers: kept ones have a high number, above the soft limit if
// the hard one allows that, and are compared with their file before each use. As in
// gpuprobe/model/io/descriptors.py.
#include "native.h"
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define TOP ((rlim_t)1 << 15)
#define ROOM 4096   // for the memory that is shared with other processes

// `fd` is closed. A negative one, or one that cannot be duplicated, is kept as none.
kept keep(int fd) {
  kept k = NO_FILE;
  if (fd < 0) return k;
  struct rlimit limits, raised;
  if (!getrlimit(RLIMIT_NOFILE, &limits)) {
    rlim_t top = limits.rlim_max < TOP ? limits.rlim_max : TOP;
    raised = (struct rlimit){top, limits.rlim_max};
    bool raise = limits.rlim_cur < top;
    if (raise) setrlimit(RLIMIT_NOFILE, &raised);
    k.fd = fcntl(fd, F_DUPFD_CLOEXEC, (int)(top > 2 * ROOM ? top - ROOM : top / 2));
    if (raise) setrlimit(RLIMIT_NOFILE, &limits);
  }
  if (k.fd < 0) k.fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);   // no such number is free
  struct stat file;
  if (k.fd >= 0 && !fstat(k.fd, &file)) { k.device = file.st_dev; k.inode = file.st_ino; }
  close(fd);
  return k;
}
// The descriptor; -1 if there is none, or if the program has closed or replaced it.
int kept_fd(const kept *k) {
  struct stat file;
  return k->fd >= 0 && !fstat(k->fd, &file) && file.st_dev == k->device && file.st_ino == k->inode ? k->fd : -1;
}
void drop_kept(kept *k) {
  int fd = kept_fd(k);
  if (fd >= 0) close(fd);
  k->fd = -1;
}
