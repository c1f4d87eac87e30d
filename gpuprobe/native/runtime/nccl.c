// NCCL: communicators of any size. A rank that has no peers receives what it would send itself, so
// that checks of consistency hold; large buffers are left as they are.
#include "native.h"

typedef struct { uint32_t magic; int rank, size, device; } communicator;
#define COMMUNICATOR_MAGIC 0x636f6d6du
#define SMALL ((size_t)1 << 20)   // bytes
typedef struct { char bytes[128]; } unique_id;

int FN(ncclGetVersion)(int *version) { *version = setting("nccl", 22707); return 0; }
int FN(ncclGetUniqueId)(unique_id *id) {
  FILE *file = fopen("/dev/urandom", "rb");
  size_t got = file ? fread(id, 1, sizeof *id, file) : 0;
  if (file) fclose(file);
  return got == sizeof *id ? 0 : 2;
}
static int make(communicator **out, int size, int rank) {
  if (rank < 0 || rank >= size) return 4;   // ncclInvalidArgument
  if (ensure_context(current_device())) return 1;
  communicator *c = calloc(1, 4096);   // torch reads nothing of it
  *c = (communicator){COMMUNICATOR_MAGIC, rank, size, current_device()};
  *out = c;
  return 0;
}
int FN(ncclCommInitRank)(communicator **out, int size, unique_id id, int rank) { return make(out, size, rank); }
int FN(ncclCommInitRankConfig)(communicator **out, int size, unique_id id, int rank, void *config) { return make(out, size, rank); }
int FN(ncclCommInitRankScalable)(communicator **out, int size, int rank, int ids, void *id, void *config) { return make(out, size, rank); }
int FN(ncclCommInitAll)(communicator **out, int count, const int *devices) {
  int before = current_device();
  for (int i = 0; i < count; i++) {
    if (use_device(devices ? devices[i] : i)) return 1;
    int status = make(&out[i], count, i);
    if (status) return status;
  }
  use_device(before);
  return 0;
}
int FN(ncclCommSplit)(communicator *parent, int color, int key, communicator **out, void *config) {
  // The other ranks' colors are unknown: all of them are taken to be in this one's group.
  if (color < 0) { *out = NULL; return 0; }
  int size = setting("split", 0);
  return make(out, size > 0 ? size : parent->size, size > 0 ? parent->rank % size : parent->rank);
}
int FN(ncclCommShrink)(communicator *parent, int *excluded, int count, communicator **out, void *config, int flags) { return make(out, parent->size - count, parent->rank < parent->size - count ? parent->rank : 0); }
int FN(ncclCommDestroy)(communicator *c) { if (c) { c->magic = 0; free(c); } return 0; }
int FN(ncclCommAbort)(communicator *c) { return FN(ncclCommDestroy)(c); }
int FN(ncclCommFinalize)(communicator *c) { return 0; }
int FN(ncclCommRevoke)(communicator *c, int flags) { return 0; }
int FN(ncclCommCount)(communicator *c, int *size) { *size = c->size; return 0; }
int FN(ncclCommCuDevice)(communicator *c, int *device_out) { *device_out = c->device; return 0; }
int FN(ncclCommUserRank)(communicator *c, int *rank) { *rank = c->rank; return 0; }
int FN(ncclCommGetAsyncError)(communicator *c, int *status) { *status = 0; return 0; }
int FN(ncclCommRegister)(communicator *c, void *buffer, size_t bytes, void **out) { *out = buffer; return 0; }
int FN(ncclCommDeregister)(communicator *c, void *registration) { return 0; }
int FN(ncclCommWindowRegister)(communicator *c, void *buffer, size_t bytes, void **out, int flags) { *out = buffer; return 0; }
int FN(ncclCommWindowDeregister)(communicator *c, void *window) { return 0; }
int FN(ncclMemAlloc)(void **out, size_t bytes) { extern int gpn_cudaMalloc(void **, size_t); return gpn_cudaMalloc(out, bytes) ? 1 : 0; }
int FN(ncclMemFree)(void *address) { extern int gpn_cudaFree(void *); return gpn_cudaFree(address) ? 1 : 0; }
int FN(ncclGroupStart)(void) { return 0; }
int FN(ncclGroupEnd)(void) { return 0; }
int FN(ncclRedOpCreatePreMulSum)(int *out, void *scalar, int type, int residence, communicator *c) { *out = 5; return 0; }
int FN(ncclRedOpDestroy)(int op, communicator *c) { return 0; }
const char *FN(ncclGetErrorString)(int status) {
  static const char *const texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error", "invalid argument", "invalid usage", "remote process exited or there was a network error", "NCCL operation in progress"};
  return status >= 0 && status < 8 ? texts[status] : "unknown result code";
}
const char *FN(ncclGetLastError)(communicator *c) { return ""; }
int FN(ncclCommMemStats)(communicator *c, int which, uint64_t *value) { *value = 0; return 0; }

static const size_t WIDTH[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};   // ncclDataType_t
static size_t width(int type) { return type >= 0 && type < (int)(sizeof WIDTH / sizeof *WIDTH) ? WIDTH[type] : 1; }
static int sent(const char *name, void *stream, size_t bytes, const void *from, void *to, size_t copy) {
  LOG(.kind = LOG_COLLECTIVE, .device = current_device(), .stream = stream_number(stream), .name = name, .a = (uint64_t)from, .b = (uint64_t)to, .bytes = bytes);
  if (from && to && from != to && copy && copy <= SMALL) {
    if (!capture_node(stream, (graph_node){MEMCPY_NODE, .name = name, .to = to, .from = from, .bytes = copy})) copy_bytes(to, from, copy);
  } else {
    capture_node(stream, (graph_node){KERNEL_NODE, .name = name});
  }
  return 0;
}
int FN(ncclAllReduce)(const void *from, void *to, size_t n, int type, int op, communicator *c, void *s) { size_t b = n * width(type); return sent("ncclAllReduce", s, b, from, to, b); }
int FN(ncclReduce)(const void *from, void *to, size_t n, int type, int op, int root, communicator *c, void *s) { size_t b = n * width(type); return sent("ncclReduce", s, b, from, root == c->rank ? to : NULL, b); }
int FN(ncclBroadcast)(const void *from, void *to, size_t n, int type, int root, communicator *c, void *s) { size_t b = n * width(type); return sent("ncclBroadcast", s, b, root == c->rank ? from : NULL, to, b); }
int FN(ncclBcast)(void *buffer, size_t n, int type, int root, communicator *c, void *s) { return sent("ncclBroadcast", s, n * width(type), buffer, buffer, 0); }
int FN(ncclAllGather)(const void *from, void *to, size_t n, int type, communicator *c, void *s) {
  size_t b = n * width(type);
  if (b > SMALL || b * (size_t)c->size > 4 * SMALL) return sent("ncclAllGather", s, b, from, to, 0);
  char *own = malloc(b ? b : 1);   // the input may be a part of the output
  memcpy(own, from, b);
  for (int i = 0; i < c->size; i++) memcpy((char *)to + (size_t)i * b, own, b);
  free(own);
  return sent("ncclAllGather", s, b, from, to, 0);
}
int FN(ncclReduceScatter)(const void *from, void *to, size_t n, int type, int op, communicator *c, void *s) { size_t b = n * width(type); return sent("ncclReduceScatter", s, b, (const char *)from + (size_t)c->rank * b, to, b); }
int FN(ncclAlltoAll)(const void *from, void *to, size_t n, int type, communicator *c, void *s) { size_t b = n * width(type) * (size_t)c->size; return sent("ncclAlltoAll", s, b, from, to, b); }
int FN(ncclGather)(const void *from, void *to, size_t n, int type, int root, communicator *c, void *s) { size_t b = n * width(type); return sent("ncclGather", s, b, from, root == c->rank ? (char *)to + (size_t)root * b : NULL, b); }
int FN(ncclScatter)(const void *from, void *to, size_t n, int type, int root, communicator *c, void *s) { size_t b = n * width(type); return sent("ncclScatter", s, b, root == c->rank ? (const char *)from + (size_t)root * b : NULL, to, b); }
int FN(ncclSend)(const void *from, size_t n, int type, int peer, communicator *c, void *s) { return sent("ncclSend", s, n * width(type), from, NULL, 0); }
int FN(ncclRecv)(void *to, size_t n, int type, int peer, communicator *c, void *s) { return sent("ncclRecv", s, n * width(type), NULL, to, 0); }
