// What the files of the runtime share. Interfaces are those that NVIDIA documents for CUDA 12 and 13;
// no header of CUDA is needed to build it.
#ifndef GPUPROBE_NATIVE_H
#define GPUPROBE_NATIVE_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// An answered function is exported as gpn_NAME; where CUDA 12 and 13 differ, as gpn_NAME__12 and
// gpn_NAME__13. The libraries that torch links to (gpuprobe/native/elf.py) jump there.
// Everything else stays inside (runtime.map).
#define FN(name) gpn_##name
#define FN12(name) gpn_##name##__12
#define FN13(name) gpn_##name##__13

enum {  // cudaError_t and CUresult share these numbers
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  INVALID_CONFIGURATION = 9,
  INVALID_SYMBOL = 13,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  DRIVER_NO_CONTEXT = 201,
  INVALID_HANDLE = 400,
  ILLEGAL_STATE = 401,
  SYMBOL_NOT_FOUND = 500,
  NOT_READY = 600,
  PEER_ALREADY_ENABLED = 704,
  COLLECTIVE_FAILED = 719,   // cudaErrorLaunchFailure, with a text of its own
  NOT_SUPPORTED = 801,
  CAPTURE_UNSUPPORTED = 900,
  CAPTURE_INVALIDATED = 901,
  CAPTURE_UNJOINED = 904,
  CAPTURED_EVENT = 907,
  UNKNOWN_ERROR = 999,
};

#define MAX_DEVICES 64
#define GRANULARITY ((size_t)2 << 20)  // of device memory: what cuMemGetAllocationGranularity reports

typedef struct {
  char name[256];
  unsigned char uuid[16];
  size_t total_memory;   // bytes
  size_t context_bytes;  // what a process holds once its context exists
  int major, minor, multiprocessors, threads_per_multiprocessor, blocks_per_multiprocessor;
  int registers_per_multiprocessor, threads_per_block, warp_size;
  int shared_per_multiprocessor, shared_per_block, shared_per_block_optin;
  int l2_bytes, clock_khz, memory_clock_khz, bus_bits;
} device;

// --- device.c
extern int cuda_version;      // 12040 or 13000
extern int driver_version;
int visible_count(void);      // devices after CUDA_VISIBLE_DEVICES; reads it at the first call
device *visible_device(int ordinal);   // NULL where there is none
int visible_index(int ordinal);        // its index in the machine
int machine_count(void);
device *machine_device(int index);
int current_device(void);
int use_device(int ordinal);           // makes it current and creates its context
int ensure_context(int ordinal);       // SUCCESS, NO_DEVICE, OUT_OF_MEMORY
bool has_context(int ordinal);
bool take_memory(int ordinal, size_t bytes);   // false where it does not fit
void give_memory(int ordinal, size_t bytes);
size_t free_memory(int ordinal);
void driver_memory(int ordinal, long long bytes);   // more, or less, memory of the driver's own
size_t used_memory(int index);          // of a device of the machine, by this process
int fail(int error);                   // remembers it for cudaGetLastError
int setting(const char *key, int missing);     // an integer among the settings
const char *setting_text(const char *key);     // "" where it is missing

// --- memory.c
typedef enum { DEVICE_MEMORY, PINNED_MEMORY, REGISTERED_MEMORY } memory_kind;
typedef struct {
  char *base;
  size_t size;
  int device;
  memory_kind kind;
} range;
bool range_of(const void *address, range *found);
uint32_t memory_at(const void *address);   // for the log: 0 is pageable memory of the host, 1 page-locked, 2 + n that of device n
void copy_bytes(void *to, const void *from, size_t bytes);
void set_bytes(void *to, int value, size_t width, size_t count);
void set_output(void *stream, void *to, size_t width, size_t count);   // zeros, in the stream's order; NULL is ignored

// --- stream.c
typedef struct graph graph;
typedef struct capture {
  unsigned long long id;
  int mode, streams;
  bool invalid;
  pthread_t thread;
  graph *graph;
  const void *origin;   // the stream that it began on
} capture;
typedef struct stream {
  uint32_t magic;
  int device, priority;
  unsigned flags;
  uint64_t number;
  bool sent;                                             // a collective, and no event was recorded since
  capture *capturing;
  unsigned long long captured, joined;   // nodes of this stream in its capture, and those that another stream has waited for
} stream;
stream *stream_of(void *handle, int device);   // also of the legacy and per-thread handles
capture *capture_of(void *handle);
int may_synchronize(void *handle);             // SUCCESS, or what a capture in progress forbids
int may_allocate(void);                        // the same for calls that a capture forbids whatever the stream
extern atomic_ullong work_given;               // kernels, library calls and events of this process so far
void host_waited(void);                        // for all that the GPU was given
void collective_sent(void *stream);            // of NCCL
void time_passes(void);                        // a second, for the events that are recorded from now on
enum node_kind { KERNEL_NODE, MEMCPY_NODE, MEMSET_NODE, HOST_NODE, OTHER_NODE };
typedef struct {
  enum node_kind kind;
  const char *name;
  void *to;
  const void *from;
  size_t bytes, count, width;
  int value;
  void (*call)(void *);
  uint32_t work;   // as of a log_entry
} graph_node;
bool capture_node(void *stream, graph_node node);   // false where the stream is not capturing
void count_in_graph(void *stream, atomic_int *count);   // one more until the graph that it captures, and those made of it, are destroyed

// --- exchange.c: collectives between processes. Their results are taken when something waits for them
extern atomic_int FN(collectives_pending);
int settle_stream(void *handle);               // take those of a stream: SUCCESS or COLLECTIVE_FAILED
int settle_all(void);
int settle_through(const void *on, unsigned long long id, bool wait);   // those of a stream up to one; NOT_READY
unsigned long long last_issued(const void *on);
const char *collective_failure(void);          // NULL without one
#define SETTLED(handle) do { if (atomic_load_explicit(&FN(collectives_pending), memory_order_relaxed) || collective_failure()) { int settled = settle_stream(handle); if (settled) return fail(settled); } } while (0)

// --- computed.c: operators whose values something else computes
bool is_computed(void);                                            // in this thread, now
bool computed_copy(void *to, const void *from, size_t bytes);      // whether a copy is done with
bool computed_fill(void);                                          // the same of a memset
void launched(const char *name);                                   // a kernel

// --- log.c
enum log_kind {
  LOG_LAUNCH, LOG_LIBRARY, LOG_MALLOC, LOG_FREE, LOG_HOST_ALLOC, LOG_HOST_FREE, LOG_MEMCPY, LOG_MEMSET,
  LOG_EVENT_RECORD, LOG_EVENT_WAIT, LOG_EVENT_SYNC, LOG_EVENT_QUERY, LOG_STREAM_CREATE,
  LOG_STREAM_DESTROY, LOG_STREAM_SYNC, LOG_STREAM_QUERY, LOG_DEVICE_SYNC, LOG_HOST_FUNCTION,
  LOG_CAPTURE_BEGIN, LOG_CAPTURE_END, LOG_GRAPH_LAUNCH, LOG_COLLECTIVE, LOG_UNANSWERED, LOG_MAP, LOG_UNMAP,
  LOG_OPERATOR, LOG_GRAPH_NODE,
};
typedef struct {
  uint64_t time_ns;     // CLOCK_MONOTONIC
  uint64_t stream;      // number; 0 is the default stream
  uint64_t a, b, bytes; // addresses, an event's number: see log.c
  const char *name;
  uint32_t kind, thread;
  int32_t device;
  uint32_t grid[3], block[3], shared;
  uint32_t work;        // the operator that this thread runs, by its number; 0 for none
  uint32_t captured;    // 1: into a graph, instead of being given to the GPU
} log_entry;
extern atomic_uint logging;
void log_add(log_entry entry);
uint32_t current_work(void);
#define LOG(...) do { if (atomic_load_explicit(&logging, memory_order_relaxed)) log_add((log_entry){__VA_ARGS__}); } while (0)
uint64_t stream_number(void *handle);

// --- launches.c
typedef struct {
  uint64_t count;
  // From here on the key; no padding, as it is compared byte by byte.
  const char *name;
  uint32_t kind;              // LOG_LAUNCH, LOG_LIBRARY, LOG_COLLECTIVE or LOG_GRAPH_LAUNCH
  int32_t device;
  uint32_t grid[3], block[3], shared;
  uint32_t captured;          // 1: into a graph, instead of being launched
  uint32_t nodes;             // of a graph: the kernels that one launch replays
  uint32_t multiprocessors;   // of the device
  uint32_t place, phase;
} launch_row;
_Static_assert(sizeof(launch_row) == 72, "launch_row has no padding");
extern atomic_bool counting;
void launch_add(launch_row row);
#define COUNT(...) do { if (atomic_load_explicit(&counting, memory_order_relaxed)) launch_add((launch_row){__VA_ARGS__}); } while (0)

int refused(const char *name, int status);   // prints and keeps the name of a function without an answer
// Answers that NVIDIA documents no rule for, in the order of MODELS in gpuprobe/native/answers.py.
enum model {
  MODEL_MATRIX_PRODUCT, MODEL_CONVOLUTION, MODEL_CONVOLUTION_BEFORE_9, MODEL_NORMALISATION, MODEL_RECURRENT, MODEL_CTC,
  MODEL_LINEAR_ALGEBRA, MODEL_FOURIER, MODEL_SPARSE, MODEL_STRUCTURED_SPARSE, MODEL_POOL
};
void modelled(enum model which);   // notes that the program got such an answer

// --- kernel.c
int library_call(const char *name, void *stream);   // a kernel of a library: logged, not run
bool is_unusable(void);                              // a library's kernel was called while GPUs are hidden

// --- descriptors.c
typedef struct { int fd; uint64_t device, inode; } kept;
#define NO_FILE {-1, 0, 0}
kept keep(int fd);
int kept_fd(const kept *k);
void drop_kept(kept *k);

// --- handles.c: an opaque object of a library that remembers its stream and a few numbers
typedef struct {
  uint32_t magic;
  void *stream;
  int64_t numbers[13];
} handle;
handle *new_handle(void);
bool is_handle(const void *pointer);
void drop_handle(void *pointer);

#endif
