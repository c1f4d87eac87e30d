// cuDNN: descriptors, the backend API as a store of attributes, and sizes that torch reads.
#include "native.h"

size_t FN(cudnnGetVersion)(void) { return (size_t)setting("cudnn", 91002); }
size_t FN(cudnnGetMaxDeviceVersion)(void) { return FN(cudnnGetVersion)(); }
size_t FN(cudnnGetCudartVersion)(void) { machine_count(); return (size_t)cuda_version; }
int FN(cudnnGetProperty)(int type, int *value) { int v = setting("cudnn", 91002); *value = type == 0 ? v / 10000 : type == 1 ? v / 100 % 100 : v % 100; return 0; }
int FN(cudnnCreate)(handle **out) { *out = new_handle(); return *out ? 0 : 2; }
int FN(cudnnDestroy)(void *h) { drop_handle(h); return 0; }
int FN(cudnnSetStream)(handle *h, void *s) { h->stream = s; return 0; }
int FN(cudnnGetStream)(handle *h, void **s) { *s = h->stream; return 0; }
const char *FN(cudnnGetErrorString)(int status) { return status ? "CUDNN_STATUS_NOT_SUPPORTED" : "CUDNN_STATUS_SUCCESS"; }
void FN(cudnnGetLastErrorString)(char *text, size_t size) { if (size) *text = 0; }
#define DESCRIPTOR(name) int FN(cudnnCreate##name)(handle **out) { *out = new_handle(); return *out ? 0 : 2; } int FN(cudnnDestroy##name)(void *d) { drop_handle(d); return 0; }
DESCRIPTOR(ConvolutionDescriptor) DESCRIPTOR(ActivationDescriptor) DESCRIPTOR(PoolingDescriptor) DESCRIPTOR(DropoutDescriptor)
DESCRIPTOR(CTCLossDescriptor) DESCRIPTOR(SpatialTransformerDescriptor)   // the others: cudnn_tensors.c

// --- the backend API
typedef struct attribute { int name, type; int64_t count; void *bytes; struct attribute *next; } attribute;
typedef struct { int kind; attribute *first; } descriptor;
static size_t width(int type) {   // cudnnBackendAttributeType_t
  switch (type) {
    case 0: case 3: case 5: case 6: case 15: return 8;   // handle, int64, double, void pointer, descriptor
    case 2: return 1;                                    // boolean
    default: return 4;
  }
}
int FN(cudnnBackendCreateDescriptor)(int kind, descriptor **out) { *out = calloc(1, sizeof **out); if (*out) (*out)->kind = kind; return *out ? 0 : 2; }
int FN(cudnnBackendDestroyDescriptor)(descriptor *d) {
  if (!d) return 0;
  for (attribute *a = d->first, *next; a; a = next) { next = a->next; free(a->bytes); free(a); }
  free(d);
  return 0;
}
int FN(cudnnBackendFinalize)(descriptor *d) { return 0; }
static attribute *attribute_of(descriptor *d, int name) { for (attribute *a = d->first; a; a = a->next) if (a->name == name) return a; return NULL; }
int FN(cudnnBackendSetAttribute)(descriptor *d, int name, int type, int64_t count, const void *value) {
  attribute *a = attribute_of(d, name);
  if (!a) { a = calloc(1, sizeof *a); a->next = d->first; d->first = a; a->name = name; }
  a->type = type; a->count = count;
  free(a->bytes);
  a->bytes = calloc((size_t)count + 1, 16);
  if (value) memcpy(a->bytes, value, (size_t)count * width(type));
  return 0;
}
// A heuristic has one engine configuration, without knobs; its plan needs no workspace: a model.
enum { HEURISTIC_RESULTS = 202, CONFIGURATION_KNOBS = 302, CONFIGURATION_WORKSPACE = 303, CONFIGURATION_SHARED = 304, PLAN_WORKSPACE = 402 };
int FN(cudnnBackendGetAttribute)(descriptor *d, int name, int type, int64_t wanted, int64_t *count, void *out) {
  if (count) *count = 1;
  switch (name) {
    case HEURISTIC_RESULTS: return 0;   // the caller's first descriptor becomes the configuration
    case PLAN_WORKSPACE: case CONFIGURATION_WORKSPACE: if (out) *(int64_t *)out = 0; return 0;
    case CONFIGURATION_SHARED: if (out) *(int32_t *)out = 0; return 0;
    case CONFIGURATION_KNOBS: if (count) *count = 0; return 0;
  }
  attribute *a = attribute_of(d, name);
  if (!a) {
    if (type == 15) return 0;
    if (out && type == 3 && wanted == 1) *(int64_t *)out = 0;
    if (count) *count = 0;
    return 0;
  }
  int64_t n = a->count < wanted ? a->count : wanted;
  if (out) memcpy(out, a->bytes, (size_t)n * width(a->type));
  if (count) *count = a->count;
  return 0;
}
int FN(cudnnBackendExecute)(handle *h, descriptor *plan, descriptor *variant) { return library_call("cudnnBackendExecute", is_handle(h) ? h->stream : NULL); }

// --- sizes
int FN(cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize)(void *h, int m, int o, void *x, void *z, void *y, void *s, void *a, size_t *bytes) { *bytes = 0; return 0; }
int FN(cudnnGetBatchNormalizationBackwardExWorkspaceSize)(void *h, int m, int o, void *x, void *y, void *dy, void *dz, void *dx, void *s, void *a, size_t *bytes) { *bytes = 0; return 0; }
int FN(cudnnGetBatchNormalizationTrainingExReserveSpaceSize)(void *h, int m, int o, void *a, void *x, size_t *bytes) { *bytes = 0; return 0; }
int FN(cudnnDropoutGetStatesSize)(void *h, size_t *bytes) { device *d = visible_device(current_device()); *bytes = d ? (size_t)d->multiprocessors * (size_t)d->threads_per_multiprocessor * 24 : 0; return 0; }   // a generator's state for each thread: as on an H200
