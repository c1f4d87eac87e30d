// Kernels: registered and counted, never run.
#include "native.h"

typedef struct { unsigned x, y, z; } dim3;
typedef struct { const void *host; const char *name; } kernel;
static kernel *kernels;
static size_t n_kernels, room;
static bool sorted;
static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;

// A module or library that was loaded, and a function of it.
typedef struct { uint32_t magic; char name[252]; int dynamic_shared; } function;
#define FUNCTION_MAGIC 0x66756e63u

void **FN(__cudaRegisterFatBinary)(void *binary) { static void *none[1]; return none; }
void FN(__cudaRegisterFatBinaryEnd)(void **binary) {}
void FN(__cudaUnregisterFatBinary)(void **binary) {}
char FN(__cudaInitModule)(void **binary) { return 0; }
void FN(__cudaRegisterFunction)(void **binary, const char *host, char *device_name, const char *name, int limit, void *a, void *b, void *c, void *d, int *e) {
  pthread_rwlock_wrlock(&lock);
  if (n_kernels == room) { room = room ? room * 2 : 65536; kernels = realloc(kernels, room * sizeof *kernels); }
  kernels[n_kernels++] = (kernel){host, name};
  sorted = false;
  pthread_rwlock_unlock(&lock);
}
typedef struct variable { const void *host; size_t bytes; void *address; struct variable *next; } variable;
static variable *variables;
void FN(__cudaRegisterVar)(void **binary, char *host, char *address, const char *name, int external, size_t bytes, int constant, int global) {
  variable *v = malloc(sizeof *v);
  pthread_rwlock_wrlock(&lock);
  *v = (variable){host, bytes, NULL, variables};
  variables = v;
  pthread_rwlock_unlock(&lock);
}
void FN(__cudaRegisterManagedVar)(void **binary, void **host, char *address, const char *name, int external, size_t bytes, int constant, int global) { *host = calloc(1, bytes); }

static int by_address(const void *a, const void *b) { const char *x = ((const kernel *)a)->host, *y = ((const kernel *)b)->host; return (x > y) - (x < y); }
static const char *kernel_name(const void *host) {
  if (!sorted) {
    pthread_rwlock_wrlock(&lock);
    if (!sorted && n_kernels) { qsort(kernels, n_kernels, sizeof *kernels, by_address); sorted = true; }
    pthread_rwlock_unlock(&lock);
  }
  pthread_rwlock_rdlock(&lock);
  kernel wanted = {host, NULL}, *found = n_kernels ? bsearch(&wanted, kernels, n_kernels, sizeof *kernels, by_address) : NULL; // neither takes NULL
  const char *name = found ? found->name : NULL;
  pthread_rwlock_unlock(&lock);
  if (name) return name;
  const function *f = host;
  return f && f->magic == FUNCTION_MAGIC ? f->name : "unknown kernel";
}

static __thread struct { dim3 grid, block; size_t shared; void *stream; } configurations[16];
static __thread int depth;
unsigned FN(__cudaPushCallConfiguration)(dim3 grid, dim3 block, size_t shared, void *stream) {
  if (depth == 16) return 1;
  configurations[depth].grid = grid; configurations[depth].block = block; configurations[depth].shared = shared; configurations[depth++].stream = stream;
  return 0;
}
int FN(__cudaPopCallConfiguration)(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  if (!depth) return fail(UNKNOWN_ERROR);
  depth--;
  *grid = configurations[depth].grid; *block = configurations[depth].block; *shared = configurations[depth].shared; *(void **)stream = configurations[depth].stream;
  return SUCCESS;
}
int FN(__cudaGetKernel)(void **out, const void *host) { *out = (void *)(uintptr_t)host; return SUCCESS; }

// Between the sessions of a GPU that parts of a program use, nobody computes what kernels would: they are refused,
// and after a library's, whose status torch does not read everywhere, so are copies.
static atomic_bool hidden, used_while_hidden;
void FN(set_hidden)(bool on) { atomic_store(&hidden, on); atomic_store(&used_while_hidden, false); }
bool is_unusable(void) { return atomic_load_explicit(&used_while_hidden, memory_order_relaxed); }

static int launch(const char *name, dim3 grid, dim3 block, size_t shared, void *stream) {
  int ordinal = current_device(), result = ensure_context(ordinal);
  if (result) return fail(result);
  if (atomic_load_explicit(&hidden, memory_order_relaxed)) return fail(NO_DEVICE);
  device *d = visible_device(ordinal);
  // The limits that CUDA checks before a launch (Programming Guide, technical specifications).
  size_t threads = (size_t)block.x * block.y * block.z;
  if (!grid.x || !grid.y || !grid.z || !threads || threads > (size_t)d->threads_per_block || block.z > 64 || block.x > 1024 || block.y > 1024
      || grid.x > 2147483647u || grid.y > 65535 || grid.z > 65535) return fail(INVALID_CONFIGURATION);
  if (shared > (size_t)d->shared_per_block_optin) return fail(INVALID_VALUE);
  SETTLED(stream);
  atomic_fetch_add_explicit(&work_given, 1, memory_order_relaxed);
  LOG(.kind = LOG_LAUNCH, .device = ordinal, .stream = stream_number(stream), .name = name, .grid = {grid.x, grid.y, grid.z}, .block = {block.x, block.y, block.z}, .shared = (uint32_t)shared, .captured = capture_of(stream) != NULL);
  launched(name);
  bool captured = capture_node(stream, (graph_node){KERNEL_NODE, .name = name});
  COUNT(.kind = LOG_LAUNCH, .name = name, .device = ordinal, .grid = {grid.x, grid.y, grid.z}, .block = {block.x, block.y, block.z}, .shared = (uint32_t)shared, .captured = captured, .multiprocessors = (uint32_t)d->multiprocessors);
  return SUCCESS;
}
int library_call(const char *name, void *stream) {
  if (atomic_load_explicit(&hidden, memory_order_relaxed)) atomic_store(&used_while_hidden, true);
  if (atomic_load_explicit(&FN(collectives_pending), memory_order_relaxed)) settle_stream(stream);   // an error is that of the next launch
  atomic_fetch_add_explicit(&work_given, 1, memory_order_relaxed);
  LOG(.kind = LOG_LIBRARY, .device = current_device(), .stream = stream_number(stream), .name = name, .captured = capture_of(stream) != NULL);
  bool captured = capture_node(stream, (graph_node){KERNEL_NODE, .name = name});
  COUNT(.kind = LOG_LIBRARY, .name = name, .device = current_device(), .captured = captured);
  return SUCCESS;
}
int FN(cudaLaunchKernel)(const void *host, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) { return launch(kernel_name(host), grid, block, shared, stream); }
int FN(__cudaLaunchKernel)(const void *host, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) { return launch(kernel_name(host), grid, block, shared, stream); }
int FN(cudaLaunchKernel_ptsz)(const void *host, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) { return launch(kernel_name(host), grid, block, shared, stream); }
int FN(cudaLaunchCooperativeKernel)(const void *host, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) { return launch(kernel_name(host), grid, block, shared, stream); }
typedef struct { dim3 grid, block; size_t shared; void *stream, *attributes; unsigned count; } launch_config;   // cudaLaunchConfig_t
int FN(cudaLaunchKernelExC)(const launch_config *c, const void *host, void **arguments) { return launch(kernel_name(host), c->grid, c->block, c->shared, c->stream); }

// --- attributes. A model: the registers are 32 a thread, which limits no block of up to 1024 threads; a
// cubin is not read, as the format of a library's fat binaries is not documented.
//
// The binary of a function is the one that CUDA would load (Programming Guide, "Binary Compatibility" and
// "PTX Compatibility"): of the cubins of the device's major version the newest that is not newer than the
// device; otherwise the newest PTX, compiled for the device. The setting "architectures" lists what torch
// was built for; missing, it is what the wheels on PyPI are built for.
static void architecture(const device *d, int *ptx, int *binary) {
  const char *built = setting_text("architectures");
  if (!*built) built = cuda_version >= 13000 ? "75,80,86,90,100,120" : cuda_version >= 12080 ? "70,75,80,86,90,100,120" : "50,60,70,75,80,86,90";
  int own = d->major * 10 + d->minor, newest = 0;
  *ptx = *binary = 0;
  for (const char *at = built; *at;) {
    char *end;
    int found = (int)strtol(at, &end, 10);
    if (end == at) break;
    if (found <= own && found / 10 == d->major && found > *binary) *ptx = *binary = found;
    if (found <= own && found > newest) newest = found;
    at = *end ? end + 1 : end;
  }
  if (!*binary) { *binary = own; *ptx = newest ? newest : own; }
}
typedef struct { size_t shared, constant, local; int threads, registers, ptx, binary, cache, dynamic_shared, carveout, cluster_set, cluster[3], policy, non_portable, reserved[16]; } function_attributes;
_Static_assert(sizeof(function_attributes) == 144, "cudaFuncAttributes has 144 bytes");
int FN(cudaFuncGetAttributes)(function_attributes *out, const void *host) {
  int ordinal = current_device(), result = ensure_context(ordinal);
  if (result) return fail(result);
  device *d = visible_device(ordinal);
  memset(out, 0, sizeof *out);
  out->threads = d->threads_per_block; out->registers = 32; out->dynamic_shared = d->shared_per_block;
  architecture(d, &out->ptx, &out->binary);
  return SUCCESS;
}
int FN(cudaFuncSetAttribute)(const void *host, int attribute, int value) { return SUCCESS; }
int FN(cudaFuncSetCacheConfig)(const void *host, int config) { return SUCCESS; }
int FN(cudaFuncSetSharedMemConfig)(const void *host, int config) { return SUCCESS; }
int FN(cudaKernelSetAttributeForDevice)(const void *kernel_handle, int attribute, int value, int ordinal) { return SUCCESS; }
int FN(cudaFuncGetName)(const char **out, const void *host) { *out = kernel_name(host); return SUCCESS; }
static int occupancy(int *blocks, int threads, size_t shared) {
  int ordinal = current_device(), result = ensure_context(ordinal);
  if (result) return result;
  device *d = visible_device(ordinal);
  if (threads <= 0 || threads > d->threads_per_block) { *blocks = 0; return threads <= 0 ? INVALID_VALUE : SUCCESS; }
  int warps = (threads + d->warp_size - 1) / d->warp_size;
  int most = d->threads_per_multiprocessor / (warps * d->warp_size);
  int by_registers = d->registers_per_multiprocessor / (32 * warps * d->warp_size);
  if (by_registers < most) most = by_registers;
  if (d->blocks_per_multiprocessor < most) most = d->blocks_per_multiprocessor;
  if (shared) {
    size_t each = shared + 1024;   // each block's share that the system reserves
    int by_shared = (int)((size_t)d->shared_per_multiprocessor / each);
    if (by_shared < most) most = by_shared;
  }
  *blocks = most;
  return SUCCESS;
}
int FN(cudaOccupancyMaxActiveBlocksPerMultiprocessor)(int *blocks, const void *host, int threads, size_t shared) { return fail(occupancy(blocks, threads, shared)); }
int FN(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags)(int *blocks, const void *host, int threads, size_t shared, unsigned flags) { return fail(occupancy(blocks, threads, shared)); }
int FN(cudaOccupancyAvailableDynamicSMemPerBlock)(size_t *bytes, const void *host, int blocks, int threads) { device *d = visible_device(current_device()); *bytes = d && blocks > 0 ? (size_t)(d->shared_per_multiprocessor / blocks - 1024) : 0; return SUCCESS; }
int FN(cudaOccupancyMaxActiveClusters)(int *clusters, const void *host, const launch_config *c) { *clusters = 16; return SUCCESS; }

// --- variables in device memory
static variable *variable_of(const void *host) { for (variable *v = variables; v; v = v->next) if (v->host == host) return v; return NULL; }
int FN(cudaGetSymbolAddress)(void **out, const void *host) {
  pthread_rwlock_wrlock(&lock);
  variable *v = variable_of(host);
  if (v && !v->address) v->address = calloc(1, v->bytes ? v->bytes : 1);
  pthread_rwlock_unlock(&lock);
  if (!v) return fail(INVALID_SYMBOL);
  *out = v->address;
  return SUCCESS;
}
int FN(cudaGetSymbolSize)(size_t *out, const void *host) { variable *v = variable_of(host); if (!v) return fail(INVALID_SYMBOL); *out = v->bytes; return SUCCESS; }
int FN(cudaMemcpyToSymbol)(const void *host, const void *from, size_t bytes, size_t offset, int kind) {
  void *address;
  int result = FN(cudaGetSymbolAddress)(&address, host);
  if (!result) memcpy((char *)address + offset, from, bytes);
  return result;
}
int FN(cudaMemcpyToSymbolAsync)(const void *host, const void *from, size_t bytes, size_t offset, int kind, void *stream) { return FN(cudaMemcpyToSymbol)(host, from, bytes, offset, kind); }
int FN(cudaMemcpyFromSymbol)(void *to, const void *host, size_t bytes, size_t offset, int kind) {
  void *address;
  int result = FN(cudaGetSymbolAddress)(&address, host);
  if (!result) memcpy(to, (char *)address + offset, bytes);
  return result;
}

// --- modules and libraries
static function *new_function(const char *name) {
  function *f = calloc(1, sizeof *f);
  f->magic = FUNCTION_MAGIC;
  snprintf(f->name, sizeof f->name, "%s", name);
  return f;
}
static int new_module(void **out) { *out = new_handle(); return *out ? SUCCESS : OUT_OF_MEMORY; }
int FN(cudaLibraryLoadData)(void **out, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) { return fail(new_module(out)); }
int FN(cudaLibraryGetKernel)(void **out, void *library, const char *name) { *out = new_function(name); return SUCCESS; }
int FN(cudaLibraryUnload)(void *library) { drop_handle(library); return SUCCESS; }
int FN(cuModuleLoad)(void **out, const char *path) { return new_module(out); }
int FN(cuModuleLoadData)(void **out, const void *code) { return new_module(out); }
int FN(cuModuleLoadDataEx)(void **out, const void *code, unsigned count, void *options, void *values) { return new_module(out); }
int FN(cuModuleLoadFatBinary)(void **out, const void *code) { return new_module(out); }
int FN(cuModuleUnload)(void *module) { drop_handle(module); return SUCCESS; }
int FN(cuModuleGetFunction)(void **out, void *module, const char *name) { *out = new_function(name); return SUCCESS; }
int FN(cuModuleGetGlobal_v2)(uint64_t *address, size_t *bytes, void *module, const char *name) { return SYMBOL_NOT_FOUND; }
int FN(cuLibraryLoadData)(void **out, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) { return new_module(out); }
int FN(cuLibraryGetKernel)(void **out, void *library, const char *name) { *out = new_function(name); return SUCCESS; }
int FN(cuLibraryUnload)(void *library) { drop_handle(library); return SUCCESS; }
int FN(cuKernelGetFunction)(void **out, void *kernel_handle) { *out = kernel_handle; return SUCCESS; }
int FN(cuLaunchKernel)(const function *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream, void **arguments, void **extra) {
  return launch(kernel_name(f), (dim3){gx, gy, gz}, (dim3){bx, by, bz}, shared, stream);
}
int FN(cuLaunchCooperativeKernel)(const function *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream, void **arguments) {
  return launch(kernel_name(f), (dim3){gx, gy, gz}, (dim3){bx, by, bz}, shared, stream);
}
typedef struct { unsigned grid[3], block[3], shared; void *stream, *attributes; unsigned count; } driver_config;   // CUlaunchConfig
int FN(cuLaunchKernelEx)(const driver_config *c, const function *f, void **arguments, void **extra) {
  return launch(kernel_name(f), (dim3){c->grid[0], c->grid[1], c->grid[2]}, (dim3){c->block[0], c->block[1], c->block[2]}, c->shared, c->stream);
}
int FN(cuFuncGetAttribute)(int *value, int attribute, const void *f) {
  device *d = visible_device(current_device());
  switch (attribute) {   // CUfunction_attribute
    case 0: *value = d ? d->threads_per_block : 1024; break;
    case 4: *value = 32; break;
    case 5: case 6: *value = d ? d->major * 10 + d->minor : 0; break;
    case 8: *value = d ? d->shared_per_block_optin : 0; break;
    default: *value = 0;
  }
  return SUCCESS;
}
int FN(cuFuncSetAttribute)(void *f, int attribute, int value) { return SUCCESS; }
int FN(cuFuncSetCacheConfig)(void *f, int config) { return SUCCESS; }
int FN(cuFuncGetModule)(void **module, void *f) { *module = f; return SUCCESS; }
int FN(cuKernelSetAttribute)(int attribute, int value, void *f, int ordinal) { return SUCCESS; }
int FN(cuOccupancyMaxActiveBlocksPerMultiprocessor)(int *blocks, void *f, int threads, size_t shared) { return occupancy(blocks, threads, shared); }
int FN(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags)(int *blocks, void *f, int threads, size_t shared, unsigned flags) { return occupancy(blocks, threads, shared); }
int FN(cuOccupancyMaxActiveClusters)(int *clusters, void *f, void *config) { *clusters = 16; return SUCCESS; }
int FN(cuLinkCreate_v2)(unsigned count, void *options, void *values, void **out) { return new_module(out); }
int FN(cuLinkAddData_v2)(void *state, int type, void *data, size_t bytes, const char *name, unsigned count, void *options, void *values) { return SUCCESS; }
int FN(cuLinkComplete)(void *state, void **cubin, size_t *bytes) { static char none[64]; *cubin = none; *bytes = sizeof none; return SUCCESS; }
int FN(cuLinkDestroy)(void *state) { drop_handle(state); return SUCCESS; }
int FN(cuTensorMapEncodeTiled)(void *map, int type, unsigned rank, void *address, const uint64_t *sizes, const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int a, int b, int c, int d) { memset(map, 0, 128); return SUCCESS; }
int FN(cuTensorMapEncodeIm2col)(void *map) { memset(map, 0, 128); return SUCCESS; }
