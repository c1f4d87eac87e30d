// cuFile: files read into device memory, which is memory of this process, and written from there.
#include "native.h"
#include <unistd.h>

typedef struct { int error, driver_error; } status;   // CUfileError_t
enum { CU_FILE_INVALID_VALUE = 5022 };
typedef struct { int type; union { int fd; void *pointer; } of; const void *operations; } description;   // CUfileDescr_t
static const status OK = {0, 0};

status FN(cuFileDriverOpen)(void) { return OK; }
status FN(cuFileDriverClose)(void) { return OK; }
status FN(cuFileHandleRegister)(handle **out, description *d) {
  if (!out || !d || d->type != 1) return (status){CU_FILE_INVALID_VALUE, 0};   // 1: a file descriptor of Linux
  *out = new_handle();
  (*out)->numbers[0] = d->of.fd;
  return OK;
}
void FN(cuFileHandleDeregister)(void *h) { drop_handle(h); }
status FN(cuFileBufRegister)(const void *address, size_t bytes, int flags) { return OK; }
status FN(cuFileBufDeregister)(const void *address) { return OK; }
ssize_t FN(cuFileRead)(handle *h, void *base, size_t bytes, off_t at, off_t offset) { return is_handle(h) ? pread((int)h->numbers[0], (char *)base + offset, bytes, at) : -CU_FILE_INVALID_VALUE; }
ssize_t FN(cuFileWrite)(handle *h, const void *base, size_t bytes, off_t at, off_t offset) { return is_handle(h) ? pwrite((int)h->numbers[0], (const char *)base + offset, bytes, at) : -CU_FILE_INVALID_VALUE; }
