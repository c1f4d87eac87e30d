// The driver API: the primary context of each device, and the way to functions by name.
#include "native.h"
#include <dlfcn.h>

int device_attribute(int *value, int attribute, int ordinal);
const char *gpn_cudaGetErrorString(int), *gpn_cudaGetErrorName(int);

// A context is the address of its device's element here.
static struct { int ordinal; } contexts[MAX_DEVICES];
static int ordinal_of(const void *context) {
  ptrdiff_t i = (const char *)context - (const char *)contexts;
  return context && i >= 0 && i < (ptrdiff_t)sizeof contexts ? (int)(i / (ptrdiff_t)sizeof contexts[0]) : -1;
}
static __thread void *stack[16];
static __thread int depth;
static __thread bool set_none;   // cuCtxSetCurrent(NULL)

int FN(cuInit)(unsigned flags) { return visible_count() ? SUCCESS : NO_DEVICE; }
int FN(cuDriverGetVersion)(int *version) { machine_count(); *version = driver_version; return SUCCESS; }
int FN(cuDeviceGetCount)(int *count) { *count = visible_count(); return SUCCESS; }
int FN(cuDeviceGet)(int *out, int ordinal) { if (!visible_device(ordinal)) return INVALID_DEVICE; *out = ordinal; return SUCCESS; }
int FN(cuDeviceGetName)(char *text, int size, int ordinal) { device *d = visible_device(ordinal); if (!d) return INVALID_DEVICE; snprintf(text, (size_t)size, "%s", d->name); return SUCCESS; }
int FN(cuDeviceTotalMem_v2)(size_t *bytes, int ordinal) { device *d = visible_device(ordinal); if (!d) return INVALID_DEVICE; *bytes = d->total_memory; return SUCCESS; }
int FN(cuDeviceGetAttribute)(int *value, int attribute, int ordinal) { return device_attribute(value, attribute, ordinal); }
int FN(cuDeviceGetUuid)(unsigned char *out, int ordinal) { device *d = visible_device(ordinal); if (!d) return INVALID_DEVICE; memcpy(out, d->uuid, 16); return SUCCESS; }
int FN(cuDeviceGetUuid_v2)(unsigned char *out, int ordinal) { return FN(cuDeviceGetUuid)(out, ordinal); }
int FN(cuDeviceComputeCapability)(int *major, int *minor, int ordinal) { device *d = visible_device(ordinal); if (!d) return INVALID_DEVICE; *major = d->major; *minor = d->minor; return SUCCESS; }
int FN(cuDeviceGetPCIBusId)(char *text, int size, int ordinal) { if (!visible_device(ordinal)) return INVALID_DEVICE; snprintf(text, (size_t)size, "0000:%02X:00.0", 0x1b + visible_index(ordinal)); return SUCCESS; }
int FN(cuDeviceGetByPCIBusId)(int *out, const char *text) { extern int gpn_cudaDeviceGetByPCIBusId(int *, const char *); return gpn_cudaDeviceGetByPCIBusId(out, text); }
int FN(cuDeviceCanAccessPeer)(int *can, int a, int b) { if (!visible_device(a) || !visible_device(b)) return INVALID_DEVICE; *can = a != b; return SUCCESS; }
int FN(cuDeviceGetP2PAttribute)(int *value, int attribute, int a, int b) { *value = attribute == 1 ? 0 : a != b; return SUCCESS; }

int FN(cuDevicePrimaryCtxGetState)(int ordinal, unsigned *flags, int *active) {
  if (!visible_device(ordinal)) return INVALID_DEVICE;
  if (flags) *flags = 0;
  if (active) *active = has_context(ordinal);
  return SUCCESS;
}
int FN(cuDevicePrimaryCtxRetain)(void **out, int ordinal) { int result = ensure_context(ordinal); if (!result) *out = &contexts[ordinal]; return result; }
int FN(cuDevicePrimaryCtxRelease_v2)(int ordinal) { return SUCCESS; }
int FN(cuDevicePrimaryCtxSetFlags_v2)(int ordinal, unsigned flags) { return SUCCESS; }
int FN(cuDevicePrimaryCtxReset_v2)(int ordinal) { return SUCCESS; }
static void *context_now(void) { return !set_none && has_context(current_device()) ? &contexts[current_device()] : NULL; }
int FN(cuCtxGetCurrent)(void **out) { *out = context_now(); return SUCCESS; }
int FN(cuCtxSetCurrent)(void *context) {
  set_none = !context;
  if (!context) return SUCCESS;
  int ordinal = ordinal_of(context);
  return ordinal < 0 ? DRIVER_NO_CONTEXT : use_device(ordinal);
}
int FN(cuCtxPushCurrent_v2)(void *context) {
  if (depth == 16 || ordinal_of(context) < 0) return DRIVER_NO_CONTEXT;
  stack[depth++] = context_now();
  return FN(cuCtxSetCurrent)(context);
}
int FN(cuCtxPopCurrent_v2)(void **out) {
  if (!depth) return DRIVER_NO_CONTEXT;
  if (out) *out = context_now();
  return FN(cuCtxSetCurrent)(stack[--depth]);
}
// Another context of the device is the same one here: what it holds is the process's.
int FN(cuCtxCreate_v2)(void **out, unsigned flags, int ordinal) {
  int result = ensure_context(ordinal);
  if (result) return result;
  *out = &contexts[ordinal];
  return FN(cuCtxPushCurrent_v2)(*out);
}
int FN(cuCtxCreate_v4)(void **out, void *parameters, unsigned flags, int ordinal) { return FN(cuCtxCreate_v2)(out, flags, ordinal); }
int FN(cuCtxDestroy_v2)(void *context) { return ordinal_of(context) < 0 ? DRIVER_NO_CONTEXT : SUCCESS; }
int FN(cuCtxGetDevice)(int *out) { if (!context_now()) return DRIVER_NO_CONTEXT; *out = current_device(); return SUCCESS; }
int FN(cuCtxGetFlags)(unsigned *flags) { *flags = 0; return SUCCESS; }
int FN(cuCtxGetApiVersion)(void *context, unsigned *version) { *version = 3020; return SUCCESS; }
int FN(cuCtxGetId)(void *context, unsigned long long *id) { *id = (unsigned long long)ordinal_of(context) + 1; return SUCCESS; }
int FN(cuCtxSynchronize)(void) { extern int gpn_cudaDeviceSynchronize(void); return gpn_cudaDeviceSynchronize(); }
int FN(cuCtxGetLimit)(size_t *value, int limit) { extern int gpn_cudaDeviceGetLimit(size_t *, int); return gpn_cudaDeviceGetLimit(value, limit); }
int FN(cuCtxSetLimit)(int limit, size_t value) { return SUCCESS; }
int FN(cuCtxGetCacheConfig)(int *config) { *config = 0; return SUCCESS; }
int FN(cuCtxSetCacheConfig)(int config) { return SUCCESS; }
int FN(cuCtxGetSharedMemConfig)(int *config) { *config = 1; return SUCCESS; }
int FN(cuCtxGetStreamPriorityRange)(int *least, int *greatest) { if (least) *least = 0; if (greatest) *greatest = -5; return SUCCESS; }
int FN(cuCtxEnablePeerAccess)(void *context, unsigned flags) { return SUCCESS; }

// --- what the runtime has under other names
#define SAME(name, arguments, call) int FN(name) arguments { return call; }
extern int gpn_cudaMalloc(void **, size_t), gpn_cudaFree(void *), gpn_cudaMemGetInfo(size_t *, size_t *), gpn_cudaHostAlloc(void **, size_t, unsigned), gpn_cudaFreeHost(void *),
  gpn_cudaMemcpy(void *, const void *, size_t, int), gpn_cudaMemcpyAsync(void *, const void *, size_t, int, void *), gpn_cudaStreamCreateWithPriority(void **, unsigned, int), gpn_cudaStreamDestroy(void *),
  gpn_cudaStreamQuery(void *), gpn_cudaStreamSynchronize(void *), gpn_cudaStreamWaitEvent(void *, void *, unsigned), gpn_cudaStreamGetPriority(void *, int *), gpn_cudaStreamGetFlags(void *, unsigned *),
  gpn_cudaEventCreateWithFlags(void **, unsigned), gpn_cudaEventDestroy(void *), gpn_cudaEventRecord(void *, void *), gpn_cudaEventQuery(void *), gpn_cudaEventSynchronize(void *),
  gpn_cudaEventElapsedTime(float *, void *, void *), gpn_cudaHostRegister(void *, size_t, unsigned), gpn_cudaHostUnregister(void *), gpn_cudaMallocAsync(void **, size_t, void *), gpn_cudaFreeAsync(void *, void *),
  gpn_cudaHostGetDevicePointer(void **, void *, unsigned), gpn_cudaStreamIsCapturing(void *, int *), gpn_cudaMallocPitch(void **, size_t *, size_t, size_t), gpn_cudaLaunchHostFunc(void *, void (*)(void *), void *);
SAME(cuMemAlloc_v2, (uint64_t *out, size_t n), n ? gpn_cudaMalloc((void **)out, n) : INVALID_VALUE)
SAME(cuMemAllocPitch_v2, (uint64_t *out, size_t *pitch, size_t w, size_t h, unsigned element), gpn_cudaMallocPitch((void **)out, pitch, w, h))
SAME(cuMemAllocManaged, (uint64_t *out, size_t n, unsigned flags), gpn_cudaMalloc((void **)out, n))
SAME(cuMemFree_v2, (uint64_t p), gpn_cudaFree((void *)p))
SAME(cuMemAllocAsync, (uint64_t *out, size_t n, void *s), gpn_cudaMallocAsync((void **)out, n, s))
SAME(cuMemFreeAsync, (uint64_t p, void *s), gpn_cudaFreeAsync((void *)p, s))
SAME(cuMemGetInfo_v2, (size_t *f, size_t *t), gpn_cudaMemGetInfo(f, t))
SAME(cuMemAllocHost_v2, (void **out, size_t n), gpn_cudaHostAlloc(out, n, 0))
SAME(cuMemHostAlloc, (void **out, size_t n, unsigned flags), gpn_cudaHostAlloc(out, n, flags))
SAME(cuMemFreeHost, (void *p), gpn_cudaFreeHost(p))
SAME(cuMemHostRegister_v2, (void *p, size_t n, unsigned flags), gpn_cudaHostRegister(p, n, flags))
SAME(cuMemHostUnregister, (void *p), gpn_cudaHostUnregister(p))
SAME(cuMemHostGetDevicePointer_v2, (uint64_t *out, void *p, unsigned flags), gpn_cudaHostGetDevicePointer((void **)out, p, flags))
SAME(cuMemcpy, (uint64_t to, uint64_t from, size_t n), gpn_cudaMemcpy((void *)to, (void *)from, n, 4))
SAME(cuMemcpyAsync, (uint64_t to, uint64_t from, size_t n, void *s), gpn_cudaMemcpyAsync((void *)to, (void *)from, n, 4, s))
SAME(cuMemcpyHtoD_v2, (uint64_t to, const void *from, size_t n), gpn_cudaMemcpy((void *)to, from, n, 1))
SAME(cuMemcpyDtoH_v2, (void *to, uint64_t from, size_t n), gpn_cudaMemcpy(to, (void *)from, n, 2))
SAME(cuMemcpyDtoD_v2, (uint64_t to, uint64_t from, size_t n), gpn_cudaMemcpy((void *)to, (void *)from, n, 3))
SAME(cuMemcpyHtoDAsync_v2, (uint64_t to, const void *from, size_t n, void *s), gpn_cudaMemcpyAsync((void *)to, from, n, 1, s))
SAME(cuMemcpyDtoHAsync_v2, (void *to, uint64_t from, size_t n, void *s), gpn_cudaMemcpyAsync(to, (void *)from, n, 2, s))
SAME(cuMemcpyDtoDAsync_v2, (uint64_t to, uint64_t from, size_t n, void *s), gpn_cudaMemcpyAsync((void *)to, (void *)from, n, 3, s))
SAME(cuStreamCreate, (void **out, unsigned flags), gpn_cudaStreamCreateWithPriority(out, flags, 0))
SAME(cuStreamCreateWithPriority, (void **out, unsigned flags, int priority), gpn_cudaStreamCreateWithPriority(out, flags, priority))
SAME(cuStreamDestroy_v2, (void *s), gpn_cudaStreamDestroy(s))
SAME(cuStreamQuery, (void *s), gpn_cudaStreamQuery(s))
SAME(cuStreamSynchronize, (void *s), gpn_cudaStreamSynchronize(s))
SAME(cuStreamWaitEvent, (void *s, void *e, unsigned flags), gpn_cudaStreamWaitEvent(s, e, flags))
SAME(cuStreamGetPriority, (void *s, int *priority), gpn_cudaStreamGetPriority(s, priority))
SAME(cuStreamGetFlags, (void *s, unsigned *flags), gpn_cudaStreamGetFlags(s, flags))
SAME(cuStreamIsCapturing, (void *s, int *status), gpn_cudaStreamIsCapturing(s, status))
SAME(cuLaunchHostFunc, (void *s, void (*call)(void *), void *data), gpn_cudaLaunchHostFunc(s, call, data))
SAME(cuEventCreate, (void **out, unsigned flags), gpn_cudaEventCreateWithFlags(out, flags))
SAME(cuEventDestroy_v2, (void *e), gpn_cudaEventDestroy(e))
SAME(cuEventRecord, (void *e, void *s), gpn_cudaEventRecord(e, s))
SAME(cuEventQuery, (void *e), gpn_cudaEventQuery(e))
SAME(cuEventSynchronize, (void *e), gpn_cudaEventSynchronize(e))
SAME(cuEventElapsedTime, (float *ms, void *a, void *b), gpn_cudaEventElapsedTime(ms, a, b))
SAME(cuEventElapsedTime_v2, (float *ms, void *a, void *b), gpn_cudaEventElapsedTime(ms, a, b))
int FN(cuStreamGetCtx)(void *s, void **out) { stream *own = stream_of(s, current_device()); if (!own || own->device < 0) return INVALID_HANDLE; *out = &contexts[own->device]; return SUCCESS; }

int FN(cuPointerGetAttribute)(void *out, int attribute, uint64_t address) {
  range r;
  if (!range_of((void *)address, &r)) return INVALID_VALUE;
  switch (attribute) {   // CUpointer_attribute
    case 1: *(void **)out = &contexts[r.device]; break;
    case 2: *(int *)out = r.kind == DEVICE_MEMORY ? 2 : 1; break;
    case 3: *(uint64_t *)out = address; break;
    case 4: if (r.kind == DEVICE_MEMORY) return INVALID_VALUE; *(uint64_t *)out = address; break;
    case 6: break;   // SYNC_MEMOPS
    case 7: *(uint64_t *)out = (uint64_t)r.base; break;
    case 8: *(int *)out = 0; break;
    case 9: *(int *)out = r.device; break;
    case 10: *(int *)out = r.kind == DEVICE_MEMORY; break;
    case 11: *(uint64_t *)out = (uint64_t)r.base; break;
    case 12: *(size_t *)out = r.size; break;
    case 13: *(int *)out = 1; break;
    case 14: *(int *)out = 1; break;
    default: return NOT_SUPPORTED;
  }
  return SUCCESS;
}
int FN(cuPointerGetAttributes)(unsigned count, const int *attributes, void **out, uint64_t address) {
  for (unsigned i = 0; i < count; i++) FN(cuPointerGetAttribute)(out[i], attributes[i], address);
  return SUCCESS;
}
int FN(cuPointerSetAttribute)(const void *value, int attribute, uint64_t address) { return SUCCESS; }
int FN(cuGetErrorString)(int error, const char **out) { *out = gpn_cudaGetErrorString(error); return SUCCESS; }
int FN(cuGetErrorName)(int error, const char **out) { *out = gpn_cudaGetErrorName(error); return SUCCESS; }
int FN(cuFlushGPUDirectRDMAWrites)(int target, int scope) { return SUCCESS; }
int FN(cuProfilerStart)(void) { return SUCCESS; }
int FN(cuProfilerStop)(void) { return SUCCESS; }
int FN(cudaProfilerStart)(void) { return SUCCESS; }
int FN(cudaProfilerStop)(void) { return SUCCESS; }

// --- looked up by name together with others, so they have to exist: multicast memory and green
// contexts, which no device here has (attributes 132 and 161 of devices are 0)
#define REFUSED(name) int FN(name)(void) { return refused(#name, NOT_SUPPORTED); }
REFUSED(cuMulticastCreate) REFUSED(cuMulticastAddDevice) REFUSED(cuMulticastBindMem) REFUSED(cuMulticastBindAddr) REFUSED(cuMulticastUnbind) REFUSED(cuMulticastGetGranularity)
REFUSED(cuGreenCtxCreate) REFUSED(cuGreenCtxDestroy) REFUSED(cuGreenCtxStreamCreate) REFUSED(cuCtxFromGreenCtx) REFUSED(cuDevResourceGenerateDesc) REFUSED(cuDevSmResourceSplitByCount) REFUSED(cuDeviceGetDevResource)
REFUSED(cuStreamBatchMemOp_v2)
int FN(cuStreamWaitValue32_v2)(void *s, uint64_t address, uint32_t value, unsigned flags) { return SUCCESS; }   // what would write it is complete

// --- functions by name. A driver gives the newest version of a function that the caller may use.
static void *function_named(const char *name) {
  static void *self;
  if (!self) {
    Dl_info own;
    if (!dladdr((void *)function_named, &own)) return NULL;
    self = dlopen(own.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    if (!self) return NULL;
  }
  static const char *const endings[] = {"", "_v4", "_v3", "_v2"};
  for (size_t i = 0; i < sizeof endings / sizeof *endings; i++) {
    char full[256];
    snprintf(full, sizeof full, "gpn_%s%s", name, endings[i]);
    void *found = dlsym(self, full);
    if (found) return found;
  }
  return NULL;
}
static int entry_point(const char *name, void **out, int *status) {
  *out = function_named(name);
  if (status) *status = *out ? 0 : 1;   // found, not found
  return SUCCESS;
}
int FN(cuGetProcAddress_v2)(const char *name, void **out, int version, uint64_t flags, int *status) { entry_point(name, out, status); return *out ? SUCCESS : SYMBOL_NOT_FOUND; }
int FN(cuGetProcAddress)(const char *name, void **out, int version, uint64_t flags) { entry_point(name, out, NULL); return *out ? SUCCESS : SYMBOL_NOT_FOUND; }
int FN(cudaGetDriverEntryPoint)(const char *name, void **out, unsigned long long flags, int *status) { return entry_point(name, out, status); }
int FN(cudaGetDriverEntryPoint_ptsz)(const char *name, void **out, unsigned long long flags, int *status) { return entry_point(name, out, status); }
int FN(cudaGetDriverEntryPointByVersion)(const char *name, void **out, unsigned version, unsigned long long flags, int *status) { return entry_point(name, out, status); }
int FN(cudaGetDriverEntryPointByVersion_ptsz)(const char *name, void **out, unsigned version, unsigned long long flags, int *status) { return entry_point(name, out, status); }
