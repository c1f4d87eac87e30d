// Streams, events, and graphs. Every operation is complete when its call returns: only the watchdog
// of NCCL's process groups finds that out later, see `seen_done`.
#include "native.h"
#include <time.h>
#include <unistd.h>

static capture *capture_by_id(unsigned long long id);

#define STREAM_MAGIC 0x73747265u
#define EVENT_MAGIC 0x65766e74u

#define USER_OBJECT_MAGIC 0x7573726fu
typedef struct user_object { uint32_t magic; _Atomic unsigned references; void (*destroy)(void *); void *of; } user_object;
typedef struct kept_object { user_object *object; unsigned count; } kept_object;   // references that a graph has
struct graph { uint32_t magic; graph_node *nodes; size_t count, room; _Atomic int references; int device; long long driver_bytes; kept_object *kept; size_t kept_count; };
typedef struct event {
  uint32_t magic;
  unsigned flags;
  uint64_t number, stream, given;   // given: its place among the `work_given`
  bool recorded, of_collective;     // of_collective: the first one on its stream after a collective
  const void *on;
  unsigned long long captured;     // nodes of its stream before it, in its capture
  unsigned long long awaits;       // the last collective before it on its stream that was not taken, or 0
  struct timespec when;
  unsigned long long capture_id;   // of the capture in which it was recorded last, 0 outside one
} event;

static stream defaults[MAX_DEVICES][2];   // legacy and per-thread
static _Atomic uint64_t stream_numbers = 2, event_numbers = 0;
static _Atomic unsigned long long capture_ids = 0;
static _Atomic int any_captures = 0;      // in progress
#define MAX_CAPTURES 64
static capture *captures[MAX_CAPTURES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int capture_mode = 0;     // cudaThreadExchangeStreamCaptureMode

// Streams are parts of blocks that are never freed, so a handle that is none of theirs is found
// without reading what it points to: programs wrap handles of other libraries.
#define BLOCK_STREAMS 1024
#define MAX_BLOCKS 1024
static stream *_Atomic blocks[MAX_BLOCKS];
static size_t streams_made = 0;
static stream *unused_streams = NULL;   // a destroyed one holds the next in `capturing`

static stream *take_stream(void) {
  pthread_mutex_lock(&lock);
  stream *s = unused_streams;
  if (s) unused_streams = (stream *)s->capturing;
  else if (streams_made < (size_t)BLOCK_STREAMS * MAX_BLOCKS) {
    size_t block = streams_made / BLOCK_STREAMS;
    if (!blocks[block]) blocks[block] = calloc(BLOCK_STREAMS, sizeof *s);
    if (blocks[block]) s = blocks[block] + streams_made++ % BLOCK_STREAMS;
  }
  pthread_mutex_unlock(&lock);
  return s;
}
static void drop_stream(stream *s) {
  pthread_mutex_lock(&lock);
  s->magic = 0;
  s->capturing = (capture *)unused_streams;
  unused_streams = s;
  pthread_mutex_unlock(&lock);
}
static bool is_stream(const void *handle) {
  for (size_t i = 0; i < MAX_BLOCKS && blocks[i]; i++) {
    size_t offset = (size_t)((const char *)handle - (const char *)blocks[i]);
    if (offset < BLOCK_STREAMS * sizeof(stream)) return offset % sizeof(stream) == 0 && ((const stream *)handle)->magic == STREAM_MAGIC;
  }
  return false;
}

stream *stream_of(void *handle, int device_now) {
  if ((uintptr_t)handle <= 2) {
    stream *s = &defaults[device_now < 0 ? 0 : device_now % MAX_DEVICES][(uintptr_t)handle == 2];
    s->magic = STREAM_MAGIC; s->device = device_now; s->number = (uintptr_t)handle == 2 ? 1 : 0;
    return s;
  }
  return is_stream(handle) ? handle : NULL;
}
uint64_t stream_number(void *handle) { stream *s = stream_of(handle, current_device()); return s ? s->number : 0; }
// A stream that joined a capture belongs to it until the capture ends.
capture *capture_of(void *handle) {
  stream *s = stream_of(handle, current_device());
  if (s && s->capturing && !s->capturing->graph) s->capturing = NULL;
  return s ? s->capturing : NULL;
}

static bool refused_in_capture(void *handle) {   // a call that no capture has, and that ends it
  capture *c = capture_of(handle);
  if (c) c->invalid = true;
  return c != NULL;
}
// "Potentially unsafe API calls" (cudaThreadExchangeStreamCaptureMode): refused while any thread captures in
// global mode, or this one in thread-local mode, unless this thread is in relaxed mode.
static bool forbids(const capture *c) {
  if (capture_mode == 2 || c->mode == 2) return false;
  return (c->mode == 0 && capture_mode == 0) || pthread_equal(c->thread, pthread_self());
}
static int refused_everywhere(void) {
  int result = SUCCESS;
  if (!atomic_load(&any_captures)) return result;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < MAX_CAPTURES; i++) if (captures[i] && forbids(captures[i])) { captures[i]->invalid = true; result = CAPTURE_UNSUPPORTED; }
  pthread_mutex_unlock(&lock);
  return result;
}
int may_allocate(void) { return refused_everywhere(); }
int may_synchronize(void *handle) {
  if ((uintptr_t)handle > 2 || handle == (void *)2) return refused_in_capture(handle) ? CAPTURE_UNSUPPORTED : SUCCESS;
  // The legacy stream waits for all blocking streams, also those that capture in global mode.
  return refused_everywhere();
}

static int make_stream(void **out, unsigned flags, int priority) {
  int result = ensure_context(current_device());
  if (result) return fail(result);
  stream *s = take_stream();
  if (!s) return fail(OUT_OF_MEMORY);
  if (priority > 0) priority = 0;
  if (priority < -5) priority = -5;
  *s = (stream){STREAM_MAGIC, current_device(), priority, flags, atomic_fetch_add(&stream_numbers, 1), false, NULL, 0, 0};
  *out = s;
  LOG(.kind = LOG_STREAM_CREATE, .device = s->device, .stream = s->number, .a = flags);
  return SUCCESS;
}
int FN(cudaStreamCreate)(void **out) { return make_stream(out, 0, 0); }
int FN(cudaStreamCreateWithFlags)(void **out, unsigned flags) { return make_stream(out, flags, 0); }
int FN(cudaStreamCreateWithPriority)(void **out, unsigned flags, int priority) { return make_stream(out, flags, priority); }
int FN(cudaStreamDestroy)(void *handle) {
  stream *s = (uintptr_t)handle > 2 ? stream_of(handle, 0) : NULL;
  if (!s) return fail(INVALID_HANDLE);
  LOG(.kind = LOG_STREAM_DESTROY, .device = s->device, .stream = s->number);
  drop_stream(s);
  return SUCCESS;
}
int FN(cudaStreamGetPriority)(void *handle, int *priority) { stream *s = stream_of(handle, current_device()); if (!s) return fail(INVALID_HANDLE); *priority = s->priority; return SUCCESS; }
// Of a stream that captures, flags and number are refused, and asking ends the capture (seen with driver 580).
int FN(cudaStreamGetFlags)(void *handle, unsigned *flags) { stream *s = stream_of(handle, current_device()); if (!s) return fail(INVALID_HANDLE); if (refused_in_capture(handle)) return fail(CAPTURE_UNSUPPORTED); *flags = s->flags; return SUCCESS; }
int FN(cudaStreamGetId)(void *handle, unsigned long long *id) { stream *s = stream_of(handle, current_device()); if (!s) return fail(INVALID_HANDLE); if (refused_in_capture(handle)) return fail(CAPTURE_UNSUPPORTED); *id = s->number; return SUCCESS; }
int FN(cudaStreamGetDevice)(void *handle, int *ordinal) { stream *s = stream_of(handle, current_device()); if (!s) return fail(INVALID_HANDLE); *ordinal = s->device; return SUCCESS; }
int FN(cudaStreamGetAttribute)(void *handle, int attribute, void *value) { memset(value, 0, 64); return SUCCESS; }
int FN(cudaStreamSetAttribute)(void *handle, int attribute, const void *value) { return SUCCESS; }
int FN(cudaStreamQuery)(void *handle) {
  stream *s = stream_of(handle, current_device());
  if (!s) return fail(INVALID_HANDLE);
  LOG(.kind = LOG_STREAM_QUERY, .device = s->device, .stream = s->number);
  int settled = settle_through(s, ~0ull, false);
  return fail(settled ? settled : may_synchronize(handle));
}
int FN(cudaStreamSynchronize)(void *handle) {
  stream *s = stream_of(handle, current_device());
  if (!s) return fail(INVALID_HANDLE);
  LOG(.kind = LOG_STREAM_SYNC, .device = s->device, .stream = s->number);
  host_waited();
  SETTLED(handle);
  return fail(may_synchronize(handle));
}
int FN(cudaDeviceSynchronize)(void) {
  int result = ensure_context(current_device());
  LOG(.kind = LOG_DEVICE_SYNC, .device = current_device());
  host_waited();
  if (!result) result = settle_all();
  return fail(result ? result : may_synchronize(NULL));
}
int FN(cudaCtxResetPersistingL2Cache)(void) { return SUCCESS; }

// --- when ProcessGroupNCCL sees that a collective is done
// A host is ahead of its GPU. torch keeps the tensors of an asynchronous collective until its
// watchdog thread has seen that it is done (WorkNCCL::isCompleted, Watchdog::runLoop in
// ProcessGroupNCCL.cpp), since 2.15 also the thread that begins the next one
// (WorkNCCLQueue::garbageCollect in nccl2/WorkNCCLQueue.cpp): on a GPU that is after the host has
// waited for something, or when it has given the GPU so much more that the oldest must be done
// (CUDA's queue takes 1,024 launches), or while it gives it nothing. If everything were done at
// once, memory would be free here that is still held on a GPU.
#define QUEUED 1024
#define ASLEEP_NS 300000000ull   // the other threads of this process wait for something
#define BUSY_NS 5000000000ull    // they do something else: operators are slower here than on a GPU
#define POLLED_NS 10000000ull    // any other thread asks again and again
atomic_ullong work_given;
static atomic_ullong waited_for;
static bool is_watchdog(void) {
  static _Thread_local int known = -1;
  char name[16] = "";
  if (known < 0) known = !pthread_getname_np(pthread_self(), name, sizeof name) && !strncmp(name, "pt_nccl_watchdg", 15);
  return known;
}
static atomic_ullong sent, seen;   // places of the last collective, and of the last event that the watchdog saw done
void collective_sent(void *handle) {
  stream *s = stream_of(handle, current_device());
  if (s) s->sent = true;
  atomic_store_explicit(&sent, atomic_fetch_add_explicit(&work_given, 1, memory_order_relaxed) + 1, memory_order_relaxed);
}
// The host waits for the GPU, which takes longer than the watchdog's pauses: it is given the time to
// look, in the first steps, so that the same program has the same memory each time.
void host_waited(void) {
  static atomic_int left = 50;
  atomic_store_explicit(&waited_for, atomic_load_explicit(&work_given, memory_order_relaxed), memory_order_relaxed);
  if (atomic_load_explicit(&sent, memory_order_relaxed) <= atomic_load_explicit(&seen, memory_order_relaxed) || is_watchdog()) return;
  if (atomic_fetch_sub_explicit(&left, 1, memory_order_relaxed) <= 0) return;
  for (int ms = 0; ms < 250; ms++) {
    usleep(1000);
    if (atomic_load_explicit(&sent, memory_order_relaxed) <= atomic_load_explicit(&seen, memory_order_relaxed)) return;
  }
  atomic_store_explicit(&left, 0, memory_order_relaxed);   // there is no watchdog
}
static uint64_t nanoseconds(clockid_t clock) {
  struct timespec now;
  clock_gettime(clock, &now);
  return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}
static bool seen_done(const event *e) {
  if (!is_watchdog() && !e->of_collective) return true;
  static _Thread_local uint64_t last, since;
  static _Thread_local int64_t spent;
  uint64_t given = atomic_load_explicit(&work_given, memory_order_relaxed);
  uint64_t now = nanoseconds(CLOCK_MONOTONIC);
  int64_t others = (int64_t)(nanoseconds(CLOCK_PROCESS_CPUTIME_ID) - nanoseconds(CLOCK_THREAD_CPUTIME_ID));
  if (given != last || !since) { last = given; since = now; spent = others; }
  uint64_t idle = now - since;
  bool asleep = is_watchdog() ? idle > ASLEEP_NS && (others - spent) * 10 < (int64_t)idle : idle > POLLED_NS;
  bool done = atomic_load_explicit(&waited_for, memory_order_relaxed) >= e->given || given - e->given > QUEUED || asleep || idle > BUSY_NS;
  if (done && is_watchdog() && e->given > atomic_load_explicit(&seen, memory_order_relaxed)) atomic_store_explicit(&seen, e->given, memory_order_relaxed);
  return done;
}

// --- events
static event *event_of(void *handle) { event *e = handle; return e && e->magic == EVENT_MAGIC ? e : NULL; }
int FN(cudaEventCreateWithFlags)(void **out, unsigned flags) {
  int result = ensure_context(current_device());
  if (result) return fail(result);
  event *e = calloc(1, sizeof *e);
  if (!e) return fail(OUT_OF_MEMORY);
  e->magic = EVENT_MAGIC; e->flags = flags; e->number = atomic_fetch_add(&event_numbers, 1) + 1;
  *out = e;
  return SUCCESS;
}
int FN(cudaEventCreate)(void **out) { return FN(cudaEventCreateWithFlags)(out, 0); }
int FN(cudaEventDestroy)(void *handle) {
  event *e = event_of(handle);
  if (!e) return fail(INVALID_HANDLE);
  e->magic = 0;
  free(e);
  return SUCCESS;
}
static atomic_int seconds_passed;
void time_passes(void) { atomic_fetch_add(&seconds_passed, 1); }
int FN(cudaEventRecordWithFlags)(void *handle, void *on, unsigned flags) {
  event *e = event_of(handle);
  stream *s = stream_of(on, current_device());
  if (!e || !s) return fail(INVALID_HANDLE);
  capture *c = flags & 1 ? NULL : capture_of(on);   // 1: cudaEventRecordExternal
  if (c && c->invalid) return fail(CAPTURE_INVALIDATED);
  clock_gettime(CLOCK_MONOTONIC, &e->when);
  e->when.tv_sec += atomic_load(&seconds_passed);
  e->recorded = true;
  e->given = atomic_fetch_add_explicit(&work_given, 1, memory_order_relaxed) + 1;
  e->stream = s->number;
  e->of_collective = s->sent;
  s->sent = false;
  e->capture_id = c ? c->id : 0;
  e->on = s;
  e->captured = c ? s->captured : 0;
  e->awaits = last_issued(s);
  LOG(.kind = LOG_EVENT_RECORD, .device = s->device, .stream = s->number, .a = e->number, .captured = c != NULL);
  return SUCCESS;
}
int FN(cudaEventRecord)(void *handle, void *on) { return FN(cudaEventRecordWithFlags)(handle, on, 0); }
int FN(cudaEventQuery)(void *handle) {
  event *e = event_of(handle);
  if (!e) return fail(INVALID_HANDLE);
  int result = CAPTURED_EVENT;
  if (!e->capture_id) {
    // Not for the watchdog: it would end a rank whose others take long to compute on this host.
    result = e->awaits && !is_watchdog() ? settle_through(e->on, e->awaits, false) : SUCCESS;
    if (!result && !seen_done(e)) result = NOT_READY;
  }
  LOG(.kind = LOG_EVENT_QUERY, .device = current_device(), .stream = e->stream, .a = e->number, .b = (uint64_t)result);
  return fail(result);
}
int FN(cudaEventSynchronize)(void *handle) {
  event *e = event_of(handle);
  if (!e) return fail(INVALID_HANDLE);
  LOG(.kind = LOG_EVENT_SYNC, .device = current_device(), .stream = e->stream, .a = e->number);
  host_waited();
  if (e->capture_id) return fail(CAPTURED_EVENT);
  return e->awaits ? fail(settle_through(e->on, e->awaits, true)) : SUCCESS;
}
int FN(cudaEventElapsedTime)(float *ms, void *from, void *to) {
  event *a = event_of(from), *b = event_of(to);
  if (!a || !b || !a->recorded || !b->recorded || (a->flags | b->flags) & 2) return fail(INVALID_HANDLE);   // 2: cudaEventDisableTiming
  *ms = (float)((double)(b->when.tv_sec - a->when.tv_sec) * 1e3 + (double)(b->when.tv_nsec - a->when.tv_nsec) * 1e-6);
  return SUCCESS;
}
int FN(cudaEventElapsedTime_v2)(float *ms, void *from, void *to) { return FN(cudaEventElapsedTime)(ms, from, to); }
int FN(cudaStreamWaitEvent)(void *on, void *handle, unsigned flags) {
  event *e = event_of(handle);
  stream *s = stream_of(on, current_device());
  if (!e || !s) return fail(INVALID_HANDLE);
  LOG(.kind = LOG_EVENT_WAIT, .device = s->device, .stream = s->number, .a = e->number, .b = e->stream, .captured = capture_of(on) != NULL || e->capture_id);
  if (e->capture_id && !capture_of(on)) {   // the stream joins the capture that the event belongs to
    pthread_mutex_lock(&lock);
    capture *c = capture_by_id(e->capture_id);
    if (c) { s->capturing = c; c->streams++; s->captured = s->joined = 0; }
    pthread_mutex_unlock(&lock);
    if (!c) return fail(INVALID_VALUE);
  }
  stream *from = (stream *)e->on;
  if (e->capture_id && from != s && from->capturing == s->capturing) {
    pthread_mutex_lock(&lock);
    if (e->captured > from->joined) {
      from->joined = e->captured;
      if (from->capturing->origin != from) s->captured++;   // to be joined in its turn
    }
    pthread_mutex_unlock(&lock);
  }
  return e->awaits && e->on != s ? fail(settle_through(e->on, e->awaits, true)) : SUCCESS;
}
typedef struct { uint64_t magic; char rest[56]; } ipc_event;
int FN(cudaIpcGetEventHandle)(ipc_event *out, void *handle) {
  event *e = event_of(handle);
  if (!e || !(e->flags & 4)) return fail(INVALID_HANDLE);   // 4: cudaEventInterprocess
  memset(out, 0, sizeof *out);
  out->magic = EVENT_MAGIC;
  return SUCCESS;
}
// What the other process has recorded is complete: a new event that is, too.
static int open_event(void **out, ipc_event h) {
  if (h.magic != EVENT_MAGIC) return fail(INVALID_VALUE);
  return FN(cudaEventCreateWithFlags)(out, 2 | 4);
}
int FN(cudaIpcOpenEventHandle)(void **out, ipc_event h) { return open_event(out, h); }

// --- host functions
int FN(cudaLaunchHostFunc)(void *on, void (*call)(void *), void *data) {
  SETTLED(on);
  LOG(.kind = LOG_HOST_FUNCTION, .device = current_device(), .stream = stream_number(on));
  if (capture_node(on, (graph_node){HOST_NODE, .call = call, .to = data})) return SUCCESS;
  call(data);
  return SUCCESS;
}
int FN(cudaStreamAddCallback)(void *on, void (*call)(void *, int, void *), void *data, unsigned flags) {
  LOG(.kind = LOG_HOST_FUNCTION, .device = current_device(), .stream = stream_number(on));
  if (capture_of(on)) return fail(CAPTURE_UNSUPPORTED);
  SETTLED(on);
  call(on, SUCCESS, data);
  return SUCCESS;
}

// --- capture
static capture *capture_by_id(unsigned long long id) {
  for (int i = 0; i < MAX_CAPTURES; i++) if (captures[i] && captures[i]->id == id) return captures[i];
  return NULL;
}
static graph *new_graph(void) { graph *g = calloc(1, sizeof *g); g->magic = 0x67726170; g->references = 1; return g; }
static void one_less(void *count) { atomic_fetch_sub((atomic_int *)count, 1); }
// The destructor of a user object runs where the last reference is released: the driver has a thread for it. Not where
// a GPU would not have come to: torch 2.15 has freed what its own reads, a group that a graph has outlived.
static void release_object(user_object *o, unsigned count) {
  if (atomic_fetch_sub(&o->references, count) != count) return;
  o->magic = 0;
  if (o->destroy == one_less || !collective_failure()) o->destroy(o->of);
  free(o);
}
static void drop_graph(graph *g) {
  if (atomic_fetch_sub(&g->references, 1) != 1) return;
  g->magic = 0;
  if (g->driver_bytes) driver_memory(g->device, -g->driver_bytes);
  // The last first: an end of waiting in ncclCommDestroy comes after what torch registers for the same collective.
  while (g->kept_count--) release_object(g->kept[g->kept_count].object, g->kept[g->kept_count].count);
  free(g->kept);
  free(g->nodes);
  free(g);
}
static void add_node(graph *g, graph_node node) {
  if (g->count == g->room) { g->room = g->room ? g->room * 2 : 64; g->nodes = realloc(g->nodes, g->room * sizeof *g->nodes); }
  g->nodes[g->count++] = node;
}
static void keep_object(graph *g, user_object *o, unsigned count, bool move);
void count_in_graph(void *on, atomic_int *count) {
  capture *c = capture_of(on);
  if (!c) return;
  user_object *o = calloc(1, sizeof *o);
  *o = (user_object){USER_OBJECT_MAGIC, 1, one_less, count};
  atomic_fetch_add(count, 1);
  pthread_mutex_lock(&lock);
  keep_object(c->graph, o, 1, true);
  pthread_mutex_unlock(&lock);
}
bool capture_node(void *on, graph_node node) {
  capture *c = capture_of(on);
  if (!c) return false;
  pthread_mutex_lock(&lock);
  node.work = current_work();
  add_node(c->graph, node);
  stream_of(on, current_device())->captured++;
  pthread_mutex_unlock(&lock);
  return true;
}
static int begin(void *on, int mode, graph *into) {
  stream *s = stream_of(on, current_device());
  if (!s) return fail(INVALID_HANDLE);
  if (capture_of(on)) return fail(ILLEGAL_STATE);
  if ((uintptr_t)on < 2) return fail(CAPTURE_UNSUPPORTED);   // the legacy stream
  pthread_mutex_lock(&lock);
  int slot = 0;
  while (slot < MAX_CAPTURES && captures[slot]) slot++;
  if (slot == MAX_CAPTURES) { pthread_mutex_unlock(&lock); return fail(OUT_OF_MEMORY); }
  capture *c = calloc(1, sizeof *c);
  *c = (capture){atomic_fetch_add(&capture_ids, 1) + 1, mode, 1, false, pthread_self(), into ? into : new_graph(), s};
  if (into) atomic_fetch_add(&into->references, 1);
  captures[slot] = c;
  s->capturing = c;
  atomic_fetch_add(&any_captures, 1);
  s->captured = s->joined = 0;
  pthread_mutex_unlock(&lock);
  LOG(.kind = LOG_CAPTURE_BEGIN, .device = s->device, .stream = s->number, .a = c->id);
  return SUCCESS;
}
int FN(cudaStreamBeginCapture)(void *on, int mode) { return begin(on, mode, NULL); }
int FN(cudaStreamBeginCaptureToGraph)(void *on, graph *into, const void *dependencies, const void *edges, size_t count, int mode) { return begin(on, mode, into); }

int FN(cudaStreamEndCapture)(void *on, graph **out) {
  stream *s = stream_of(on, current_device());
  capture *c = capture_of(on);
  if (out) *out = NULL;
  if (!c) return fail(ILLEGAL_STATE);
  pthread_mutex_lock(&lock);
  for (int i = 0; i < MAX_CAPTURES; i++) if (captures[i] == c) captures[i] = NULL;
  atomic_fetch_sub(&any_captures, 1);
  s->capturing = NULL;
  bool unjoined = false;
  for (size_t i = 0; i < streams_made; i++) {
    const stream *t = blocks[i / BLOCK_STREAMS] + i % BLOCK_STREAMS;
    unjoined = unjoined || (t->magic == STREAM_MAGIC && t->capturing == c && t->joined < t->captured);
  }
  pthread_mutex_unlock(&lock);
  LOG(.kind = LOG_CAPTURE_END, .device = s->device, .stream = s->number, .a = c->id, .b = c->graph->count);
  bool invalid = c->invalid;
  if (invalid || unjoined) drop_graph(c->graph); else if (out) *out = c->graph;
  c->graph = NULL;   // streams that joined it see that it has ended: see capture_of
  return invalid ? fail(CAPTURE_INVALIDATED) : unjoined ? fail(CAPTURE_UNJOINED) : SUCCESS;
}
int FN(cudaStreamIsCapturing)(void *on, int *status) { capture *c = capture_of(on); *status = c ? (c->invalid ? 2 : 1) : 0; return SUCCESS; }
static int capture_info(void *on, int *status, unsigned long long *id, graph **g, const void **dependencies, const void **edges, size_t *count) {
  capture *c = capture_of(on);
  if (status) *status = c ? (c->invalid ? 2 : 1) : 0;
  if (id) *id = c ? c->id : 0;
  if (g) *g = c ? c->graph : NULL;
  if (dependencies) *dependencies = NULL;
  if (edges) *edges = NULL;
  if (count) *count = 0;
  return SUCCESS;
}
int FN13(cudaStreamGetCaptureInfo)(void *on, int *status, unsigned long long *id, graph **g, const void **dependencies, const void **edges, size_t *count) { return capture_info(on, status, id, g, dependencies, edges, count); }
int FN(cudaStreamGetCaptureInfo_v3)(void *on, int *status, unsigned long long *id, graph **g, const void **dependencies, const void **edges, size_t *count) { return capture_info(on, status, id, g, dependencies, edges, count); }
int FN(cudaStreamGetCaptureInfo_v2)(void *on, int *status, unsigned long long *id, graph **g, const void **dependencies, size_t *count) { return capture_info(on, status, id, g, dependencies, NULL, count); }
int FN12(cudaStreamGetCaptureInfo)(void *on, int *status, unsigned long long *id) { return capture_info(on, status, id, NULL, NULL, NULL, NULL); }
int FN12(cudaStreamUpdateCaptureDependencies)(void *on, void *dependencies, size_t count, unsigned flags) { return SUCCESS; }
int FN13(cudaStreamUpdateCaptureDependencies)(void *on, void *dependencies, const void *edges, size_t count, unsigned flags) { return SUCCESS; }
int FN(cudaThreadExchangeStreamCaptureMode)(int *mode) { int before = capture_mode; capture_mode = *mode; *mode = before; return SUCCESS; }

// --- graphs
int FN(cudaGraphCreate)(graph **out, unsigned flags) { *out = new_graph(); return SUCCESS; }
int FN(cudaGraphDestroy)(graph *g) { if (!g || g->magic != 0x67726170) return fail(INVALID_VALUE); drop_graph(g); return SUCCESS; }
static _Atomic unsigned long long graphs_made, graph_nodes_made;
static pthread_once_t graph_costs_once = PTHREAD_ONCE_INIT;
static int graph_bytes, graph_node_bytes;   // settings: what the driver holds for an executable graph, and for each of its nodes
static void read_graph_costs(void) { graph_bytes = setting("graph_bytes", 0); graph_node_bytes = setting("graph_node_bytes", 0); }
static void keep_object(graph *g, user_object *o, unsigned count, bool move) {
  if (!move) atomic_fetch_add(&o->references, count);
  g->kept = realloc(g->kept, (g->kept_count + 1) * sizeof *g->kept);
  g->kept[g->kept_count++] = (kept_object){o, count};
}
static bool is_object(const user_object *o) { return o && o->magic == USER_OBJECT_MAGIC; }
int FN(cudaUserObjectCreate)(user_object **out, void *of, void (*destroy)(void *), unsigned references, unsigned flags) {
  if (!out || !destroy || !references || flags != 1) return fail(INVALID_VALUE);   // 1: cudaUserObjectNoDestructorSync
  user_object *o = calloc(1, sizeof *o);
  *o = (user_object){USER_OBJECT_MAGIC, references, destroy, of};
  *out = o;
  return SUCCESS;
}
int FN(cudaUserObjectRetain)(user_object *o, unsigned count) { if (!is_object(o)) return fail(INVALID_VALUE); atomic_fetch_add(&o->references, count); return SUCCESS; }
int FN(cudaUserObjectRelease)(user_object *o, unsigned count) { if (!is_object(o)) return fail(INVALID_VALUE); release_object(o, count); return SUCCESS; }
int FN(cudaGraphRetainUserObject)(graph *g, user_object *o, unsigned count, unsigned flags) {
  if (!g || g->magic != 0x67726170 || !is_object(o) || !count) return fail(INVALID_VALUE);
  keep_object(g, o, count, flags == 1);   // cudaGraphUserObjectMove: the caller's references become the graph's
  return SUCCESS;
}
int FN(cudaGraphReleaseUserObject)(graph *g, user_object *o, unsigned count) {
  if (!g || g->magic != 0x67726170 || !is_object(o)) return fail(INVALID_VALUE);
  for (size_t i = 0; i < g->kept_count; i++) {
    kept_object *one = &g->kept[i];
    if (one->object != o || one->count < count) continue;
    one->count -= count;
    if (!one->count) *one = g->kept[--g->kept_count];
    release_object(o, count);
    return SUCCESS;
  }
  return fail(INVALID_VALUE);
}
static int instantiate(graph **out, graph *g) {
  if (!g || g->magic != 0x67726170) return fail(INVALID_VALUE);
  graph *x = new_graph();
  x->nodes = malloc((g->count ? g->count : 1) * sizeof *x->nodes);
  if (g->count) memcpy(x->nodes, g->nodes, g->count * sizeof *x->nodes);
  x->count = x->room = g->count;
  for (size_t i = 0; i < g->kept_count; i++) keep_object(x, g->kept[i].object, g->kept[i].count, false);
  atomic_fetch_add(&graphs_made, 1);
  atomic_fetch_add(&graph_nodes_made, g->count);
  pthread_once(&graph_costs_once, read_graph_costs);
  x->device = current_device();
  x->driver_bytes = graph_bytes + (long long)graph_node_bytes * g->count;
  if (x->driver_bytes) driver_memory(x->device, x->driver_bytes);
  *out = x;
  return SUCCESS;
}
int FN(cudaGraphInstantiateWithFlags)(graph **out, graph *g, unsigned long long flags) { return instantiate(out, g); }
int FN(cudaGraphInstantiate)(graph **out, graph *g, unsigned long long flags) { return instantiate(out, g); }
int FN(cudaGraphExecDestroy)(graph *x) { return FN(cudaGraphDestroy)(x); }
int FN(cudaGraphUpload)(graph *x, void *on) { return SUCCESS; }
int FN(cudaGraphLaunch)(graph *x, void *on) {
  if (!x || x->magic != 0x67726170) return fail(INVALID_VALUE);
  SETTLED(on);
  LOG(.kind = LOG_GRAPH_LAUNCH, .device = current_device(), .stream = stream_number(on), .a = (uint64_t)x, .b = x->count);
  uint32_t kernels = 0;
  for (size_t i = 0; i < x->count; i++) kernels += x->nodes[i].kind == KERNEL_NODE || (x->nodes[i].kind != KERNEL_NODE && x->nodes[i].name);   // others with a name are collectives
  COUNT(.kind = LOG_GRAPH_LAUNCH, .name = "cudaGraphLaunch", .device = current_device(), .nodes = kernels);
  for (size_t i = 0; i < x->count; i++) {
    graph_node *n = &x->nodes[i];
    LOG(.kind = LOG_GRAPH_NODE, .device = current_device(), .stream = stream_number(on), .a = n->kind, .bytes = n->bytes + n->width * n->count, .name = n->name, .work = n->work, .grid = {memory_at(n->to), memory_at(n->from)});
    if (n->kind == MEMCPY_NODE) copy_bytes(n->to, n->from, n->bytes);
    else if (n->kind == MEMSET_NODE) set_bytes(n->to, n->value, n->width, n->count);
    else if (n->kind == HOST_NODE) n->call(n->to);
  }
  return SUCCESS;
}
int FN(cudaGraphGetNodes)(graph *g, void **nodes, size_t *count) {
  if (!g || g->magic != 0x67726170) return fail(INVALID_VALUE);
  size_t room = nodes ? *count : 0;
  *count = g->count;
  for (size_t i = 0; nodes && i < room && i < g->count; i++) nodes[i] = &g->nodes[i];
  return SUCCESS;
}
int FN(cudaGraphDebugDotPrint)(graph *g, const char *path, unsigned flags) {
  FILE *file = fopen(path, "w");
  if (!file) return fail(UNKNOWN_ERROR);
  fprintf(file, "digraph dot {\n");
  for (size_t i = 0; i < g->count; i++) fprintf(file, "  node_%zu [label=\"%s\"];\n", i, g->nodes[i].name ? g->nodes[i].name : "node");
  fprintf(file, "}\n");
  fclose(file);
  return SUCCESS;
}

// --- what gpuprobe reads
unsigned long long FN(graphs_made)(void) { return graphs_made; }
unsigned long long FN(graph_nodes_made)(void) { return graph_nodes_made; }
