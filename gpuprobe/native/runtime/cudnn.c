// cuDNN: descriptors, the backend API as a store of attributes, and sizes that torch reads.
#include "native.h"
#include "cudnn_plans.h"

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
enum {  // cudnnBackendAttributeName_t
  CONVOLUTION_DILATION = 102, CONVOLUTION_STRIDE = 103, CONVOLUTION_PADDING = 105, HEURISTIC_MODE = 200, HEURISTIC_GRAPH = 201, CONFIGURATION_ENGINE = 300,
  PLAN_CONFIGURATION = 401, GRAPH_OPERATIONS = 801, TENSOR_TYPE = 901, TENSOR_DIMENSIONS = 902, TENSOR_STRIDES = 903, ENGINE_GRAPH = 1300,
  ENGINE_NOTES = 1303,
  CONFIGURATION = 3, PLAN = 5,   // cudnnBackendDescriptorType_t
  TENSOR_CORE_NOTE = 0,          // cudnnBackendNumericalNote_t
  NOT_SUPPORTED_BY_CUDNN = 3000,
};
typedef struct attribute { int name, type; int64_t count; void *bytes; struct attribute *next; } attribute;
typedef struct { int kind; attribute *first; convolution of; } descriptor;
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
static attribute *attribute_of(const descriptor *d, int name) { for (attribute *a = d ? d->first : NULL; a; a = a->next) if (a->name == name) return a; return NULL; }
static descriptor *part_of(const descriptor *d, int name) { attribute *a = attribute_of(d, name); return a && a->type == 15 && a->count == 1 ? *(descriptor **)a->bytes : NULL; }
static int64_t numbers_of(const descriptor *d, int name, int64_t *into) {
  attribute *a = attribute_of(d, name);
  if (!a || a->type != 3 || a->count > MAX_DIMENSIONS) return 0;
  memcpy(into, a->bytes, (size_t)a->count * 8);
  return a->count;
}
static bool tensor_of(const descriptor *d, int name, plan_tensor *t) {
  descriptor *part = part_of(d, name);
  attribute *type = attribute_of(part, TENSOR_TYPE);
  t->dimensions = numbers_of(part, TENSOR_DIMENSIONS, t->size);
  if (!type || t->dimensions < 3 || numbers_of(part, TENSOR_STRIDES, t->stride) != t->dimensions) return false;
  t->type = *(int32_t *)type->bytes;
  return true;
}
// What a plan is asked about has to be kept when a descriptor is finalised: cudnn-frontend frees the
// descriptors of tensors before it makes plans.
static const struct { int convolution, x, w, y; } OPERATIONS[] = {{702, 704, 703, 705}, {708, 710, 709, 711}, {714, 716, 715, 717}};
int FN(cudnnBackendFinalize)(descriptor *d) {
  const int from[] = {GRAPH_OPERATIONS, HEURISTIC_GRAPH, ENGINE_GRAPH, CONFIGURATION_ENGINE, PLAN_CONFIGURATION};
  for (int i = 0; i < 5; i++) { descriptor *part = part_of(d, from[i]); if (part) d->of = part->of; }
  attribute *operations = attribute_of(d, GRAPH_OPERATIONS), *mode = attribute_of(d, HEURISTIC_MODE);
  if (operations && operations->type == 15) {
    d->of.attention = true;
    for (int64_t i = 0; i < operations->count; i++) { descriptor *part = ((descriptor **)operations->bytes)[i]; if (part && part->of.operation) d->of = part->of; }
  }
  if (mode) d->of.mode = *(int32_t *)mode->bytes;
  if (d->kind == PLAN) {   // where torch compares plans, TF32 is allowed if a plan with it was made
    static _Thread_local uint64_t allowed;
    if (d->of.tensor_cores) allowed = d->of.query;
    else d->of.tensor_cores = d->of.operation && d->of.query == allowed;
  }
  for (int i = 0; i < 3; i++) {
    descriptor *c = part_of(d, OPERATIONS[i].convolution);
    convolution of = {.operation = (operation_kind)(FORWARD + i)};
    if (!c || !tensor_of(d, OPERATIONS[i].x, &of.x) || !tensor_of(d, OPERATIONS[i].w, &of.w) || !tensor_of(d, OPERATIONS[i].y, &of.y)) continue;
    numbers_of(c, CONVOLUTION_PADDING, of.padding); numbers_of(c, CONVOLUTION_STRIDE, of.stride); numbers_of(c, CONVOLUTION_DILATION, of.dilation);
    d->of = of;
  }
  return 0;
}
int FN(cudnnBackendSetAttribute)(descriptor *d, int name, int type, int64_t count, const void *value) {
  attribute *a = attribute_of(d, name);
  if (!a) { a = calloc(1, sizeof *a); a->next = d->first; d->first = a; a->name = name; }
  a->type = type; a->count = count;
  free(a->bytes);
  a->bytes = calloc((size_t)count + 1, 16);
  if (value) memcpy(a->bytes, value, (size_t)count * width(type));
  return 0;
}
// A heuristic has one engine configuration, without knobs. Of a convolution of float32 it has two: torch
// drops the first one, which computes with TF32 on tensor cores, where TF32 is not allowed. The last one
// needs no workspace: torch tries one configuration after the other until one finds the memory it needs.
enum { HEURISTIC_RESULTS = 202, CONFIGURATION_KNOBS = 302, CONFIGURATION_WORKSPACE = 303, CONFIGURATION_SHARED = 304, PLAN_WORKSPACE = 402 };
int FN(cudnnBackendGetAttribute)(descriptor *d, int name, int type, int64_t wanted, int64_t *count, void *out) {
  if (count) *count = 1;
  switch (name) {
    case HEURISTIC_RESULTS: {   // the caller's first descriptors become the configurations
      static atomic_ullong queries;
      int64_t plans = d->of.operation && d->of.x.type == TYPE_FLOAT ? 2 : 1, results = plans + (d->of.operation != NO_CONVOLUTION);
      if (out) d->of.query = atomic_fetch_add(&queries, 1) + 1;
      for (int64_t i = 0; out && i < wanted && i < results; i++) {
        descriptor *configuration = ((descriptor **)out)[i];
        configuration->of = d->of;
        configuration->of.tensor_cores = !i;
        configuration->of.spare = i == plans;
      }
      if (count) *count = out && wanted < results ? wanted : results;
      return 0;
    }
    case CONFIGURATION_ENGINE: if (d->kind == CONFIGURATION && out && wanted == 1) (*(descriptor **)out)->of = d->of; return 0;
    case ENGINE_NOTES: {
      bool noted = d->of.operation && d->of.tensor_cores;
      if (noted && out && wanted > 0) *(int32_t *)out = TENSOR_CORE_NOTE;
      if (count) *count = noted;
      return 0;
    }
    case PLAN_WORKSPACE: case CONFIGURATION_WORKSPACE: if (out) *(int64_t *)out = plan_workspace(&d->of); return 0;
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
int FN(cudnnBackendExecute)(handle *h, descriptor *plan, descriptor *variant) {
  if (plan && is_only_searched(&plan->of)) return NOT_SUPPORTED_BY_CUDNN;
  if (plan && plan->of.spare) time_passes();   // so that `benchmark = True` prefers every other plan
  if (plan && plan->of.operation) modelled(MODEL_CONVOLUTION);   // torch keeps plans, and their sizes
  return library_call("cudnnBackendExecute", is_handle(h) ? h->stream : NULL);
}

// --- sizes
int FN(cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize)(void *h, int m, int o, void *x, void *z, void *y, void *s, void *a, size_t *bytes) { modelled(MODEL_NORMALISATION); *bytes = 0; return 0; }
int FN(cudnnGetBatchNormalizationBackwardExWorkspaceSize)(void *h, int m, int o, void *x, void *y, void *dy, void *dz, void *dx, void *s, void *a, size_t *bytes) { modelled(MODEL_NORMALISATION); *bytes = 0; return 0; }
int FN(cudnnGetBatchNormalizationTrainingExReserveSpaceSize)(void *h, int m, int o, void *a, void *x, size_t *bytes) { modelled(MODEL_NORMALISATION); *bytes = 0; return 0; }
int FN(cudnnDropoutGetStatesSize)(void *h, size_t *bytes) { device *d = visible_device(current_device()); *bytes = d ? (size_t)d->multiprocessors * (size_t)d->threads_per_multiprocessor * 24 : 0; return 0; }   // a generator's state for each thread: as on an H200
