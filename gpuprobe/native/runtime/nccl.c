// NCCL. The ranks of a job are processes, which exchange their data: exchange.c. The one rank of an
// estimate is alone: its other ranks are assumed to hold what it holds, so a sum over N ranks is N times its
// own, what is gathered is N copies, and a rank that it exchanges with sends as much as it is sent. So
// checks of consistency hold. Large buffers are not written.
#include "exchange.h"
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

// size: 0 where it is unknown. together: its ranks are devices of this process, whose values
// gpuprobe/native/values/collectives.py computes. x: NULL for a rank that is alone; group: the same number in
// all ranks of its group, 0 for one that is alone. in_graphs: its collectives in graphs that exist.
typedef struct { uint32_t magic; int rank, size, parent, device, together; uint32_t group; exchange *x; atomic_int in_graphs; } communicator;
static atomic_bool alone;
// Whether this process is the one rank of an estimate.
void FN(ncclAlone)(bool on) { atomic_store(&alone, on); }
#define COMMUNICATOR_MAGIC 0x636f6d6du
static _Atomic size_t small = (size_t)1 << 20;   // bytes, up to which buffers are written
void FN(ncclWriteUpTo)(size_t bytes) { small = bytes; }
typedef struct { char bytes[128]; } unique_id;

int FN(ncclGetVersion)(int *version) { *version = setting("nccl", 22707); return 0; }
int FN(ncclGetUniqueId)(unique_id *id) {
  if (!atomic_load(&alone)) return exchange_identity(id) ? 0 : 2;
  FILE *file = fopen("/dev/urandom", "rb");
  size_t got = file ? fread(id, 1, sizeof *id, file) : 0;
  if (file) fclose(file);
  return got == sizeof *id ? 0 : 2;
}
static int make(communicator **out, int size, int rank) {
  if (rank < 0 || rank >= size) return 4;   // ncclInvalidArgument
  if (ensure_context(current_device())) return 1;
  communicator *c = calloc(1, 4096);   // torch reads nothing of it
  *c = (communicator){COMMUNICATOR_MAGIC, rank, size, size, current_device(), 0, 0, NULL, 0};
  *out = c;
  return 0;
}
static int join(communicator **out, int size, int rank, const void *id) {
  int status = make(out, size, rank);
  if (status || atomic_load(&alone) || !exchange_is_identity(id)) return status;
  if (size == 1) exchange_forget(id);
  else if (!((*out)->x = exchange_join(id, size, rank))) return 2;   // ncclSystemError
  else (*out)->group = exchange_number(id);
  return 0;
}
int FN(ncclCommInitRank)(communicator **out, int size, unique_id id, int rank) { return join(out, size, rank, &id); }
int FN(ncclCommInitRankConfig)(communicator **out, int size, unique_id id, int rank, void *config) { return join(out, size, rank, &id); }
int FN(ncclCommInitRankScalable)(communicator **out, int size, int rank, int ids, void *id, void *config) { return join(out, size, rank, id); }
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
  if (parent->x) {
    unique_id id;
    int size, rank;
    *out = NULL;
    if (!exchange_split(parent->x, color, key, &id, &size, &rank)) return 5;
    return color < 0 ? 0 : join(out, size, rank, &id);
  }
  // Alone, the other ranks' colors are unknown, and so is the size: gpuprobe/native/jobs/groups.py has
  // torch make groups without splits. The key is this rank's number in the new one, as torch calls it.
  if (color < 0) { *out = NULL; return 0; }
  int status = make(out, parent->parent, key >= 0 && key < parent->parent ? key : 0);
  if (!status) (*out)->size = 0;
  return status;
}
int FN(ncclCommShrink)(communicator *parent, int *excluded, int count, communicator **out, void *config, int flags) {
  if (parent->x) return refused("ncclCommShrink", 5);
  return make(out, parent->size - count, parent->rank < parent->size - count ? parent->rank : 0);
}
// NCCL waits there until no graph has a collective of the communicator: for ever in the main thread, which would destroy
// the graph later. Another thread has 15 seconds, as exchange.c has for ranks that wait for each other.
static int await_graphs(communicator *c) {
  for (int waits = 0; atomic_load(&c->in_graphs); waits++) {
    if (syscall(SYS_gettid) == getpid() || waits == 1500) return exchange_kept_by_graphs();
    nanosleep(&(struct timespec){0, 10000000}, NULL);
  }
  return 0;
}
int FN(ncclCommDestroy)(communicator *c) {
  if (!c) return 0;
  if (await_graphs(c)) return 5;
  int result = c->x ? exchange_leave(c->x) : 0;
  if (c->x) exchange_free(c->x);
  c->magic = 0;
  free(c);
  return result ? 5 : 0;
}
int FN(ncclCommAbort)(communicator *c) { return FN(ncclCommDestroy)(c); }
int FN(ncclCommFinalize)(communicator *c) { return c->x && exchange_settle(c->x) ? 5 : 0; }
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
enum { SUM, PRODUCT, MAXIMUM, MINIMUM, MEAN, OWN_OPERATIONS };   // ncclRedOp_t
#define MOST_SCALARS 4096
static struct { void *at; double now; int type; } scalars[MOST_SCALARS];
static _Atomic unsigned scalar_count;
int FN(ncclRedOpDestroy)(int op, communicator *c) { return 0; }
const char *FN(ncclGetErrorString)(int status) {
  static const char *const texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error", "invalid argument", "invalid usage", "remote process exited or there was a network error", "NCCL operation in progress"};
  return status >= 0 && status < 8 ? texts[status] : "unknown result code";
}
const char *FN(ncclGetLastError)(communicator *c) { const char *text = collective_failure(); return text ? text : ""; }
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
size_t collective_width(int type) { return width(type); }
#define EACH(ctype, expression) { ctype *t = total; const ctype *m = more; for (size_t i = 0; i < n; i++) { ctype a = t[i], b = m[i]; t[i] = (ctype)(expression); } return; }
#define OPERATIONS_ON(ctype) switch (op) { \
  case PRODUCT: EACH(ctype, a * b) \
  case MAXIMUM: EACH(ctype, a > b || a != a ? a : b) \
  case MINIMUM: EACH(ctype, a < b || a != a ? a : b) \
  default: EACH(ctype, a + b) }
void collective_add(void *total, const void *more, size_t n, int type, int op) {
  switch (type) {
    case INT8: OPERATIONS_ON(int8_t)
    case UINT8: OPERATIONS_ON(uint8_t)
    case INT32: OPERATIONS_ON(int32_t)
    case UINT32: OPERATIONS_ON(uint32_t)
    case INT64: OPERATIONS_ON(int64_t)
    case UINT64: OPERATIONS_ON(uint64_t)
    case FLOAT: OPERATIONS_ON(float)
    case DOUBLE: OPERATIONS_ON(double)
  }
  size_t each = width(type);   // narrow: rounded after each rank
  for (size_t i = 0; i < n; i++) {
    double a = number_at((char *)total + i * each, type), b = number_at((const char *)more + i * each, type);
    put_number((char *)total + i * each, type, op == PRODUCT ? a * b : op == MAXIMUM ? (a > b || a != a ? a : b) : op == MINIMUM ? (a < b || a != a ? a : b) : a + b);
  }
}
void collective_finish(void *total, size_t n, int type, int op, int ranks) {
  if (op != MEAN) return;
  size_t each = width(type);
  for (size_t i = 0; i < n; i++) {
    char *at = (char *)total + i * each;
    switch (type) {
      case INT8: *(int8_t *)at /= ranks; break;
      case UINT8: *(uint8_t *)at /= ranks; break;
      case INT32: *(int32_t *)at /= ranks; break;
      case UINT32: *(uint32_t *)at /= (unsigned)ranks; break;
      case INT64: *(int64_t *)at /= ranks; break;
      case UINT64: *(uint64_t *)at /= (unsigned)ranks; break;
      default: put_number(at, type, number_at(at, type) / ranks);
    }
  }
}
// What a rank contributes to a reduction with a factor of its own (ncclRedOpCreatePreMulSum): a copy, or NULL.
static void *multiplied(const void *from, size_t n, int type, int op) {
  if (op < OWN_OPERATIONS || type < HALF || type > BFLOAT16) return NULL;
  int which = (op - OWN_OPERATIONS) % MOST_SCALARS;
  double factor = scalars[which].at ? number_at(scalars[which].at, scalars[which].type) : scalars[which].now;
  size_t each = width(type);
  char *made = malloc(n * each + 1);
  for (size_t i = 0; made && i < n; i++) put_number(made + i * each, type, number_at((const char *)from + i * each, type) * factor);
  return made;
}
// Reduces n values in place over the ranks of a group, each of which holds the same.
static void reduce(void *values, size_t n, int type, int op, const communicator *c) {
  if (op == MAXIMUM || op == MINIMUM || op == MEAN || c->together || c->size < 1 || type < 0 || type > BFLOAT16) return;
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

static __thread int depth;         // of ncclGroupStart
static __thread uint32_t groups;   // of calls, so far

// bytes: of a collective that gathers or scatters, the part of one rank. peer: of a send or receipt, else -1.
// An entry's grid: ranks, the group's number, this rank; block: one more than the peer, and of calls from
// ncclGroupStart to ncclGroupEnd a number, another one for the next.
static void noted(communicator *c, const char *name, void *stream, size_t bytes, const void *from, void *to, int peer) {
  LOG(.kind = LOG_COLLECTIVE, .device = current_device(), .stream = stream_number(stream), .name = name, .a = (uint64_t)from, .b = (uint64_t)to, .bytes = bytes, .grid = {c ? (uint32_t)c->size : 0, c ? c->group : 0, c ? (uint32_t)c->rank : 0}, .block = {(uint32_t)(peer + 1), depth ? groups % 8 + 1 : 0}, .captured = capture_of(stream) != NULL);
  collective_sent(stream);
  if (c) count_in_graph(stream, &c->in_graphs);
  COUNT(.kind = LOG_COLLECTIVE, .name = name, .device = current_device(), .captured = capture_of(stream) != NULL);
}
static int sent(communicator *c, const char *name, void *stream, size_t bytes, const void *from, void *to, size_t copy) {
  noted(c, name, stream, bytes, from, to, -1);
  if (from && to && from != to && copy && copy <= small) {
    if (!capture_node(stream, (graph_node){MEMCPY_NODE, .name = name, .to = to, .from = from, .bytes = copy})) copy_bytes(to, from, copy);
  } else {
    capture_node(stream, (graph_node){KERNEL_NODE, .name = name});
  }
  return 0;
}

// --- between processes
typedef struct { exchange *x; exchange_call call; const void *from; size_t bytes; void *to; bool owned; } captured_call;
#define MOST_CAPTURED 256
static __thread captured_call *captured[MOST_CAPTURED];
static __thread int captured_count;
static int issue(exchange *x, exchange_call call, const void *from, size_t bytes, void *to, void *stream) {
  if (call.op >= OWN_OPERATIONS && settle_stream(stream)) return 5;
  void *made = call.kind == ALL_REDUCE || call.kind == REDUCE || call.kind == REDUCE_SCATTER ? multiplied(from, bytes / width(call.type), call.type, call.op) : NULL;
  if (call.op >= OWN_OPERATIONS) call.op = SUM;
  int status = exchange_issue(x, call, bytes <= small ? (made ? made : from) : NULL, bytes, to, stream);
  free(made);
  return status;
}
static void play(captured_call *c) { if (!issue(c->x, c->call, c->from, c->bytes, c->to, NULL)) exchange_settle(c->x); }
static void play_in_graph(void *c) { if (!((captured_call *)c)->owned) play(c); }
// The collectives that this thread has captured since the last call of this function: gpuprobe plays them in their
// place among operators whose values it computes.
int FN(collectives_captured)(void **out, int most) {
  int count = captured_count < most ? captured_count : most;
  for (int i = 0; i < count; i++) { captured[i]->owned = true; out[i] = captured[i]; }
  captured_count = 0;
  return count;
}
void FN(collectives_play)(void *c) { play(c); }
static int exchanged_call(communicator *c, const char *name, exchange_call call, const void *from, size_t bytes, void *to, void *stream) {
  noted(c, name, stream, call.kind == REDUCE_SCATTER || call.kind == SCATTER ? call.count * width(call.type) : bytes, from, to, call.peer);
  if (!capture_of(stream)) return issue(c->x, call, from, bytes, to, stream);
  captured_call *kept = malloc(sizeof *kept);   // as long as the process: graphs are copied
  *kept = (captured_call){c->x, call, from, bytes, to, false};
  capture_node(stream, (graph_node){HOST_NODE, .name = name, .call = play_in_graph, .to = kept});
  if (captured_count < MOST_CAPTURED) captured[captured_count++] = kept;
  return 0;
}
#define EXCHANGED(name, k, t, o, r, n, from, bytes, to) if (c->x) return exchanged_call(c, name, (exchange_call){.kind = k, .type = t, .op = o, .root = r, .peer = -1, .count = n}, from, bytes, to, s)

static int reduced(const char *name, void *s, const void *from, void *to, size_t n, int type, int op, communicator *c, size_t bytes) {
  size_t b = n * width(type);
  int status = sent(c, name, s, bytes, from, to, b);
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
int FN(ncclAllReduce)(const void *from, void *to, size_t n, int type, int op, communicator *c, void *s) {
  EXCHANGED("ncclAllReduce", ALL_REDUCE, type, op, 0, n, from, n * width(type), to);
  return reduced("ncclAllReduce", s, from, to, n, type, op, c, n * width(type));
}
int FN(ncclReduce)(const void *from, void *to, size_t n, int type, int op, int root, communicator *c, void *s) {
  EXCHANGED("ncclReduce", REDUCE, type, op, root, n, from, n * width(type), to);
  return reduced("ncclReduce", s, from, root == c->rank ? to : NULL, n, type, op, c, n * width(type));
}
// Broadcasts of one group of calls, one from each rank and all of one size: so torch 2.15 gathers to a list of tensors.
#define MOST_BROADCASTS 1024
typedef struct { const communicator *c; const void *from; void *to; size_t bytes; int root; void *stream; } lone_broadcast;
static __thread lone_broadcast broadcasts[MOST_BROADCASTS];
static __thread int broadcast_count;
static void gather_broadcasts(void) {
  int first = 0;
  while (first < broadcast_count) {
    const lone_broadcast *own = NULL, *all = broadcasts + first;
    int size = all->c->size, count = 0;
    while (first + count < broadcast_count && count < size && all[count].c == all->c && all[count].root == count && all[count].bytes == all->bytes) {
      if (count == all->c->rank) own = all + count;
      count++;
    }
    if (own && count == size && own->bytes <= small && !capture_of(own->stream))
      for (int i = 0; i < size; i++) if (all[i].to != own->to) copy_bytes(all[i].to, own->from, own->bytes);
    first += count ? count : 1;
  }
  broadcast_count = 0;
}
int FN(ncclBroadcast)(const void *from, void *to, size_t n, int type, int root, communicator *c, void *s) {
  size_t b = n * width(type);
  EXCHANGED("ncclBroadcast", BROADCAST, type, 0, root, n, root == c->rank ? from : NULL, b, to);
  if (depth && broadcast_count < MOST_BROADCASTS) broadcasts[broadcast_count++] = (lone_broadcast){c, from, to, b, root, s};
  return sent(c, "ncclBroadcast", s, b, root == c->rank ? from : NULL, to, b);
}
int FN(ncclBcast)(void *buffer, size_t n, int type, int root, communicator *c, void *s) {
  if (c->x) return FN(ncclBroadcast)(buffer, buffer, n, type, root, c, s);
  return sent(c, "ncclBroadcast", s, n * width(type), buffer, buffer, 0);
}
int FN(ncclAllGather)(const void *from, void *to, size_t n, int type, communicator *c, void *s) {
  size_t b = n * width(type);
  EXCHANGED("ncclAllGather", ALL_GATHER, type, 0, 0, n, from, b, to);
  if (b <= small && b * (size_t)(c->size ? c->size : 1) <= 4 * (small > SIZE_MAX / 4 ? SIZE_MAX / 4 : small)) copies(to, from, b, c);
  return sent(c, "ncclAllGather", s, b, from, to, 0);
}
int FN(ncclReduceScatter)(const void *from, void *to, size_t n, int type, int op, communicator *c, void *s) {
  size_t b = n * width(type);
  EXCHANGED("ncclReduceScatter", REDUCE_SCATTER, type, op, 0, n, from, b * (size_t)c->size, to);
  return reduced("ncclReduceScatter", s, (const char *)from + (size_t)c->rank * b, to, n, type, op, c, b);
}
int FN(ncclAlltoAll)(const void *from, void *to, size_t n, int type, communicator *c, void *s) {
  size_t b = n * width(type) * (size_t)c->size;
  EXCHANGED("ncclAlltoAll", ALL_TO_ALL, type, 0, 0, n, from, b, to);
  return sent(c, "ncclAlltoAll", s, b, from, to, b);
}
int FN(ncclGather)(const void *from, void *to, size_t n, int type, int root, communicator *c, void *s) {
  size_t b = n * width(type);
  EXCHANGED("ncclGather", GATHER, type, 0, root, n, from, b, to);
  if (root == c->rank && b <= small) copies(to, from, b, c);
  return sent(c, "ncclGather", s, b, from, to, 0);
}
int FN(ncclScatter)(const void *from, void *to, size_t n, int type, int root, communicator *c, void *s) {
  size_t b = n * width(type);
  EXCHANGED("ncclScatter", SCATTER, type, 0, root, n, root == c->rank ? from : NULL, b * (size_t)c->size, to);
  return sent(c, "ncclScatter", s, b, root == c->rank ? (const char *)from + (size_t)root * b : NULL, to, b);
}

// Sends and receipts of one group of calls (ncclGroupStart to ncclGroupEnd), of which collectives from
// rank to rank are made (all-to-all): a rank that this one sends to sends as much.
#define MOST_CALLS 4096
typedef struct { const void *from; void *to; size_t bytes; int peer; void *stream; } lone_call;
static __thread lone_call calls[MOST_CALLS];
static __thread int call_count;
static void received(void *to, size_t bytes, void *stream) {
  if (to && bytes <= small && !capture_of(stream)) set_bytes(to, 0, 1, bytes);   // so that results repeat
}
int FN(ncclGroupStart)(void) { depth++; return 0; }
int FN(ncclGroupEnd)(void) {
  if (depth > 0 && --depth) return 0;
  groups++;
  gather_broadcasts();
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
static int exchanged(communicator *c, const char *name, const void *from, void *to, size_t bytes, int peer, void *s) {
  int status = sent(c, name, s, bytes, from, to, 0);
  if (depth && call_count < MOST_CALLS) calls[call_count++] = (lone_call){from, to, bytes, peer, s};
  else if (to) received(to, bytes, s);
  return status;
}
int FN(ncclSend)(const void *from, size_t n, int type, int peer, communicator *c, void *s) {
  size_t b = n * width(type);
  if (c->x) return exchanged_call(c, "ncclSend", (exchange_call){.kind = SEND, .type = type, .peer = peer, .count = n}, from, b, NULL, s);
  return exchanged(c, "ncclSend", from, NULL, b, peer, s);
}
int FN(ncclRecv)(void *to, size_t n, int type, int peer, communicator *c, void *s) {
  size_t b = n * width(type);
  if (c->x) return exchanged_call(c, "ncclRecv", (exchange_call){.kind = RECV, .type = type, .peer = peer, .count = n}, NULL, b, to, s);
  return exchanged(c, "ncclRecv", NULL, to, b, peer, s);
}
