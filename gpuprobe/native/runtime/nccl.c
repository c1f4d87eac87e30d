// NCCL: communicators of any size, whose other ranks are taken to hold what this one holds: a sum
// over N ranks is N times its own, what is gathered is N copies, and a rank that it exchanges with
// sends as much as it is sent. So checks of consistency hold. Large buffers are left as they are.
#include "native.h"

// size: 0 where it is unknown. together: its ranks are devices of this process, whose values
// gpuprobe/native/values/collectives.py computes.
typedef struct { uint32_t magic; int rank, size, parent, device, together; } communicator;
#define COMMUNICATOR_MAGIC 0x636f6d6du
static _Atomic size_t small = (size_t)1 << 20;   // bytes, up to which buffers are written
void FN(ncclWriteUpTo)(size_t bytes) { small = bytes; }
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
  *c = (communicator){COMMUNICATOR_MAGIC, rank, size, size, current_device(), 0};
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
    out[i]->together = 1;
  }
  use_device(before);
  return 0;
}
int FN(ncclCommSplit)(communicator *parent, int color, int key, communicator **out, void *config) {
  // The other ranks' colors are unknown, and so is the size: gpuprobe/native/jobs/groups.py has torch
  // make groups without splits. The key is this rank's number in the new one, as torch calls it.
  if (color < 0) { *out = NULL; return 0; }
  int status = make(out, parent->parent, key >= 0 && key < parent->parent ? key : 0);
  if (!status) (*out)->size = 0;
  return status;
}
int FN(ncclCommShrink)(communicator *parent, int *excluded, int count, communicator **out, void *config, int flags) { return make(out, parent->size - count, parent->rank < parent->size - count ? parent->rank : 0); }
int FN(ncclCommDestroy)(communicator *c) { if (c) { c->magic = 0; free(c); } return 0; }
int FN(ncclCommAbort)(communicator *c) { return FN(ncclCommDestroy)(c); }
int FN(ncclCommFinalize)(communicator *c) { return 0; }
int FN(ncclCommRevoke)(communicator *c, int flags) { return 0; }
int FN(ncclCommCount)(communicator *c, int *size) { *size = c->size ? c->size : c->parent; return 0; }
int FN(ncclCommCuDevice)(communicator *c, int *device_out) { *device_out = c->device; return 0; }
int FN(ncclCommUserRank)(communicator *c, int *rank) { *rank = c->rank; return 0; }
int FN(ncclCommGetAsyncError)(communicator *c, int *status) { *status = 0; return 0; }
int FN(ncclCommRegister)(communicator *c, void *buffer, size_t bytes, void **out) { *out = buffer; return 0; }
int FN(ncclCommDeregister)(communicator *c, void *registration) { return 0; }
int FN(ncclCommWindowRegister)(communicator *c, void *buffer, size_t bytes, void **out, int flags) { *out = buffer; return 0; }
int FN(ncclCommWindowDeregister)(communicator *c, void *window) { return 0; }
int FN(ncclMemAlloc)(void **out, size_t bytes) { extern int gpn_cudaMalloc(void **, size_t); return gpn_cudaMalloc(out, bytes) ? 1 : 0; }
int FN(ncclMemFree)(void *address) { extern int gpn_cudaFree(void *); return gpn_cudaFree(address) ? 1 : 0; }
enum { SUM, PRODUCT, MAX, MIN, MEAN, OWN_OPERATIONS };   // ncclRedOp_t
#define MOST_SCALARS 4096
static struct { void *at; double now; int type; } scalars[MOST_SCALARS];
static _Atomic unsigned scalar_count;
int FN(ncclRedOpDestroy)(int op, communicator *c) { return 0; }
const char *FN(ncclGetErrorString)(int status) {
  static const char *const texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error", "invalid argument", "invalid usage", "remote process exited or there was a network error", "NCCL operation in progress"};
  return status >= 0 && status < 8 ? texts[status] : "unknown result code";
}
const char *FN(ncclGetLastError)(communicator *c) { return ""; }
int FN(ncclCommMemStats)(communicator *c, int which, uint64_t *value) { *value = 0; return 0; }

static const size_t WIDTH[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};   // ncclDataType_t
static size_t width(int type) { return type >= 0 && type < (int)(sizeof WIDTH / sizeof *WIDTH) ? WIDTH[type] : 1; }
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, HALF, FLOAT, DOUBLE, BFLOAT16 };

static float of_half(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
  float out;
  if (exponent == 0) { out = (float)fraction * 0x1p-24f; return sign ? -out : out; }
  uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
  memcpy(&out, &bits, 4);
  return out;
}
static uint16_t to_half(float value) {   // to the nearest, ties to even
  uint32_t bits;
  memcpy(&bits, &value, 4);
  uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return sign | 0x7e00;
  if (bits >= 0x477ff000u) return sign | 0x7c00;
  if (bits < 0x38800000u) {
    float small_value;
    memcpy(&small_value, &bits, 4);
    small_value += 0.5f;   // whose last bit is 2**-24, the unit of denormal numbers
    memcpy(&bits, &small_value, 4);
    return sign | (uint16_t)(bits - 0x3f000000u);
  }
  bits += 0xc8000fffu + (bits >> 13 & 1);   // the exponent's bias from 127 to 15
  return sign | (uint16_t)(bits >> 13);
}
static double number_at(const void *at, int type) {
  uint32_t bits;
  float f;
  switch (type) {
    case HALF: return of_half(*(const uint16_t *)at);
    case BFLOAT16: bits = (uint32_t)*(const uint16_t *)at << 16; memcpy(&f, &bits, 4); return f;
    case FLOAT: memcpy(&f, at, 4); return f;
    default: return *(const double *)at;
  }
}
static void put_number(void *at, int type, double value) {
  float f = (float)value;
  uint32_t bits;
  switch (type) {
    case HALF: *(uint16_t *)at = to_half(f); return;
    case BFLOAT16:
      memcpy(&bits, &f, 4);
      *(uint16_t *)at = f != f ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
      return;
    case FLOAT: memcpy(at, &f, 4); return;
    case DOUBLE: *(double *)at = value;
  }
}
static uint64_t whole_at(const void *at, int type) {
  switch (type) {
    case INT8: case UINT8: return *(const uint8_t *)at;
    case INT32: case UINT32: return *(const uint32_t *)at;
    default: return *(const uint64_t *)at;
  }
}
static void put_whole(void *at, int type, uint64_t value) {   // modulo its width, signed or not
  switch (type) {
    case INT8: case UINT8: *(uint8_t *)at = (uint8_t)value; return;
    case INT32: case UINT32: *(uint32_t *)at = (uint32_t)value; return;
    case INT64: case UINT64: *(uint64_t *)at = value;
  }
}
// Reduces n values in place over the ranks of a group, each of which holds the same.
static void reduce(void *values, size_t n, int type, int op, const communicator *c) {
  if (op == MAX || op == MIN || op == MEAN || c->together || c->size < 1 || type < 0 || type > BFLOAT16) return;
  double factor = c->size;
  if (op >= OWN_OPERATIONS && (unsigned)(op - OWN_OPERATIONS) < MOST_SCALARS) {
    int which = op - OWN_OPERATIONS;
    double scalar = scalars[which].at ? number_at(scalars[which].at, scalars[which].type) : scalars[which].now;
    factor *= scalar;
  }
  size_t each = width(type);
  for (size_t i = 0; i < n; i++) {
    char *at = (char *)values + i * each;
    if (type >= HALF) {
      double value = number_at(at, type), result = op == PRODUCT ? 1 : value * factor;
      for (int r = 0; op == PRODUCT && r < c->size; r++) result *= value;
      put_number(at, type, result);
    } else {
      uint64_t value = whole_at(at, type), result = op == PRODUCT ? 1 : value * (uint64_t)c->size;
      for (int r = 0; op == PRODUCT && r < c->size; r++) result *= value;
      put_whole(at, type, result);
    }
  }
}
int FN(ncclRedOpCreatePreMulSum)(int *out, void *scalar, int type, int residence, communicator *c) {
  unsigned which = atomic_fetch_add(&scalar_count, 1) % MOST_SCALARS;   // torch destroys it after its call
  bool real = type >= HALF && type <= BFLOAT16;
  // residence 0: on the device, where it is read when the operation runs
  scalars[which].at = residence == 0 && real ? scalar : NULL;
  scalars[which].now = real ? number_at(scalar, type) : 1;
  scalars[which].type = type;
  *out = OWN_OPERATIONS + (int)which;
  return 0;
}

static int sent(const char *name, void *stream, size_t bytes, const void *from, void *to, size_t copy) {
  LOG(.kind = LOG_COLLECTIVE, .device = current_device(), .stream = stream_number(stream), .name = name, .a = (uint64_t)from, .b = (uint64_t)to, .bytes = bytes);
  collective_sent();
  COUNT(.kind = LOG_COLLECTIVE, .name = name, .device = current_device(), .captured = capture_of(stream) != NULL);
  if (from && to && from != to && copy && copy <= small) {
    if (!capture_node(stream, (graph_node){MEMCPY_NODE, .name = name, .to = to, .from = from, .bytes = copy})) copy_bytes(to, from, copy);
  } else {
    capture_node(stream, (graph_node){KERNEL_NODE, .name = name});
  }
  return 0;
}
static int reduced(const char *name, void *s, const void *from, void *to, size_t n, int type, int op, communicator *c, size_t bytes) {
  size_t b = n * width(type);
  int status = sent(name, s, bytes, from, to, b);
  if (to && b <= small && !capture_of(s)) reduce(to, n, type, op, c);
  return status;
}
// N copies of b bytes, one after the other. Only this rank's own where the group's size is unknown.
static void copies(void *to, const void *from, size_t b, const communicator *c) {
  char *own = malloc(b ? b : 1);   // the input may be a part of the output
  if (!own) return;
  memcpy(own, from, b);
  if (c->size) for (int i = 0; i < c->size; i++) memcpy((char *)to + (size_t)i * b, own, b);
  free(own);
}
int FN(ncclAllReduce)(const void *from, void *to, size_t n, int type, int op, communicator *c, void *s) { return reduced("ncclAllReduce", s, from, to, n, type, op, c, n * width(type)); }
int FN(ncclReduce)(const void *from, void *to, size_t n, int type, int op, int root, communicator *c, void *s) { return reduced("ncclReduce", s, from, root == c->rank ? to : NULL, n, type, op, c, n * width(type)); }
int FN(ncclBroadcast)(const void *from, void *to, size_t n, int type, int root, communicator *c, void *s) { size_t b = n * width(type); return sent("ncclBroadcast", s, b, root == c->rank ? from : NULL, to, b); }
int FN(ncclBcast)(void *buffer, size_t n, int type, int root, communicator *c, void *s) { return sent("ncclBroadcast", s, n * width(type), buffer, buffer, 0); }
int FN(ncclAllGather)(const void *from, void *to, size_t n, int type, communicator *c, void *s) {
  size_t b = n * width(type);
  if (b <= small && b * (size_t)(c->size ? c->size : 1) <= 4 * (small > SIZE_MAX / 4 ? SIZE_MAX / 4 : small)) copies(to, from, b, c);
  return sent("ncclAllGather", s, b, from, to, 0);
}
int FN(ncclReduceScatter)(const void *from, void *to, size_t n, int type, int op, communicator *c, void *s) {
  size_t b = n * width(type);
  return reduced("ncclReduceScatter", s, (const char *)from + (size_t)c->rank * b, to, n, type, op, c, b);
}
int FN(ncclAlltoAll)(const void *from, void *to, size_t n, int type, communicator *c, void *s) { size_t b = n * width(type) * (size_t)c->size; return sent("ncclAlltoAll", s, b, from, to, b); }
int FN(ncclGather)(const void *from, void *to, size_t n, int type, int root, communicator *c, void *s) {
  size_t b = n * width(type);
  if (root == c->rank && b <= small) copies(to, from, b, c);
  return sent("ncclGather", s, b, from, to, 0);
}
int FN(ncclScatter)(const void *from, void *to, size_t n, int type, int root, communicator *c, void *s) { size_t b = n * width(type); return sent("ncclScatter", s, b, root == c->rank ? (const char *)from + (size_t)root * b : NULL, to, b); }

// Sends and receipts of one group of calls (ncclGroupStart to ncclGroupEnd), of which collectives from
// rank to rank are made (all-to-all): a rank that this one sends to sends as much.
#define MOST_CALLS 4096
typedef struct { const void *from; void *to; size_t bytes; int peer; void *stream; } exchange;
static __thread exchange calls[MOST_CALLS];
static __thread int depth, call_count;
static void received(void *to, size_t bytes, void *stream) {
  if (to && bytes <= small && !capture_of(stream)) set_bytes(to, 0, 1, bytes);   // so that results repeat
}
int FN(ncclGroupStart)(void) { depth++; return 0; }
int FN(ncclGroupEnd)(void) {
  if (depth > 0 && --depth) return 0;
  for (int i = 0; i < call_count; i++) {
    if (!calls[i].to) continue;
    const void *from = NULL;
    for (int j = 0; j < call_count && !from; j++) {
      if (calls[j].from && calls[j].peer == calls[i].peer && calls[j].bytes == calls[i].bytes) { from = calls[j].from; calls[j].from = NULL; }
    }
    if (!from) received(calls[i].to, calls[i].bytes, calls[i].stream);
    else if (calls[i].bytes <= small && !capture_of(calls[i].stream)) copy_bytes(calls[i].to, from, calls[i].bytes);
  }
  call_count = 0;
  return 0;
}
static int exchanged(const char *name, const void *from, void *to, size_t bytes, int peer, void *s) {
  int status = sent(name, s, bytes, from, to, 0);
  if (depth && call_count < MOST_CALLS) calls[call_count++] = (exchange){from, to, bytes, peer, s};
  else if (to) received(to, bytes, s);
  return status;
}
int FN(ncclSend)(const void *from, size_t n, int type, int peer, communicator *c, void *s) { return exchanged("ncclSend", from, NULL, n * width(type), peer, s); }
int FN(ncclRecv)(void *to, size_t n, int type, int peer, communicator *c, void *s) { return exchanged("ncclRecv", NULL, to, n * width(type), peer, s); }
