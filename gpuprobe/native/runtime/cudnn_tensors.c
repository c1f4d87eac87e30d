// cuDNN: tensors, recurrent networks, CTC loss, and convolutions of the API before the backend's.
#include "native.h"

enum { CUDNN_BAD_PARAM = 2000, CUDNN_ALLOC_FAILED = 1003 };
static size_t width(int type) {   // cudnnDataType_t
  switch (type) {
    case 1: case 10: return 8;           // double, int64
    case 2: case 9: return 2;            // half, bfloat16
    case 3: case 6: case 11: case 12: case 13: return 1;
    default: return 4;
  }
}

// --- tensors and filters: what is set is read back
#define MAX_DIMENSIONS 8
typedef struct { int type, format, count, sizes[MAX_DIMENSIONS], strides[MAX_DIMENSIONS]; } tensor;
#define OBJECT(name, type) int FN(cudnnCreate##name)(type **out) { *out = calloc(1, sizeof **out); return *out ? 0 : CUDNN_ALLOC_FAILED; } int FN(cudnnDestroy##name)(type *d) { free(d); return 0; }
OBJECT(TensorDescriptor, tensor)
OBJECT(FilterDescriptor, tensor)
int FN(cudnnSetTensorNdDescriptor)(tensor *t, int type, int count, const int *sizes, const int *strides) {
  if (!t || count < 1 || count > MAX_DIMENSIONS) return CUDNN_BAD_PARAM;
  t->type = type; t->count = count;
  memcpy(t->sizes, sizes, (size_t)count * sizeof *sizes);
  memcpy(t->strides, strides, (size_t)count * sizeof *strides);
  return 0;
}
int FN(cudnnGetTensorNdDescriptor)(const tensor *t, int wanted, int *type, int *count, int *sizes, int *strides) {
  if (!t || wanted < 0) return CUDNN_BAD_PARAM;
  size_t n = (size_t)(wanted < t->count ? wanted : t->count);
  *type = t->type; *count = t->count;
  memcpy(sizes, t->sizes, n * sizeof *sizes);
  memcpy(strides, t->strides, n * sizeof *strides);
  return 0;
}
int FN(cudnnSetTensor4dDescriptor)(tensor *t, int format, int type, int n, int c, int h, int w) {
  if (!t) return CUDNN_BAD_PARAM;
  bool last = format == 1;   // NHWC
  *t = (tensor){type, format, 4, {n, c, h, w}, {c * h * w, last ? 1 : h * w, last ? w * c : w, last ? c : 1}};
  return 0;
}
int FN(cudnnSetFilterNdDescriptor)(tensor *t, int type, int format, int count, const int *sizes) {
  if (!t || count < 1 || count > MAX_DIMENSIONS) return CUDNN_BAD_PARAM;
  t->type = type; t->format = format; t->count = count;
  memcpy(t->sizes, sizes, (size_t)count * sizeof *sizes);
  return 0;
}
int FN(cudnnGetFilterNdDescriptor)(const tensor *t, int wanted, int *type, int *format, int *count, int *sizes) {
  if (!t || wanted < 0) return CUDNN_BAD_PARAM;
  *type = t->type; *format = t->format; *count = t->count;
  memcpy(sizes, t->sizes, (size_t)(wanted < t->count ? wanted : t->count) * sizeof *sizes);
  return 0;
}
static size_t tensor_bytes(const tensor *t) {
  size_t bytes = t ? width(t->type) : 0;
  for (int i = 0; t && i < t->count; i++) bytes *= (size_t)t->sizes[i];
  return bytes;
}

// --- recurrent networks (cudnnSetRNNDescriptor_v8)
typedef struct { int algorithm, mode, bias, two_ways, skip, type, input, hidden, projection, layers; bool dropout; } network;
typedef struct { int rows, columns; } shape;
typedef struct { int type, layout, steps, batch, vector; } sequence;
OBJECT(RNNDescriptor, network)
OBJECT(RNNDataDescriptor, sequence)
int FN(cudnnSetDropoutDescriptor)(handle *d, void *h, float dropout, void *states, size_t bytes, unsigned long long seed) { if (is_handle(d)) d->numbers[0] = dropout > 0; return 0; }
int FN(cudnnRestoreDropoutDescriptor)(handle *d, void *h, float dropout, void *states, size_t bytes, unsigned long long seed) { return FN(cudnnSetDropoutDescriptor)(d, h, dropout, states, bytes, seed); }
int FN(cudnnSetRNNDescriptor_v8)(network *r, int algorithm, int mode, int bias, int direction, int input_mode, int type, int precision, int math, int input, int hidden, int projection, int layers, handle *dropout, unsigned flags) {
  if (!r || mode < 0 || mode > 3 || layers < 1 || hidden < 1) return CUDNN_BAD_PARAM;
  *r = (network){algorithm, mode, bias, direction == 1, input_mode == 1, type, input, hidden, projection > 0 ? projection : hidden, layers, is_handle(dropout) && dropout->numbers[0]};
  return 0;
}
int FN(cudnnSetRNNDataDescriptor)(sequence *s, int type, int layout, int steps, int batch, int vector, const int *lengths, void *padding) {
  if (!s) return CUDNN_BAD_PARAM;
  *s = (sequence){type, layout, steps, batch, vector};
  return 0;
}
static int gates(const network *r) { return r->mode == 2 ? 4 : r->mode == 3 ? 3 : 1; }   // LSTM, GRU, one
static int directions(const network *r) { return r->two_ways ? 2 : 1; }
static bool projects(const network *r) { return r->mode == 2 && r->projection != r->hidden; }
// Rows and columns of a matrix, by its number among those of a layer: those of the input for each gate,
// those of the state, and an LSTM's projection. 0 columns where there is none.
static void matrix(const network *r, int layer, int number, shape *out) {
  int n = gates(r), input = layer / directions(r) == 0 ? r->input : r->projection * directions(r);
  *out = (shape){r->hidden, number < n ? input : r->projection};
  if (number < n && r->skip && layer / directions(r) == 0) out->columns = 0;
  if (number == 2 * n) *out = projects(r) ? (shape){r->projection, r->hidden} : (shape){0, 0};
}
static bool has_bias(const network *r, int number) {   // cudnnRNNBiasMode_t: none, of the input, both, of the state
  int n = gates(r);
  return number < 2 * n && (r->bias == 2 || (r->bias == 1 && number < n) || (r->bias == 3 && number >= n));
}
// Elements before a matrix or bias. All matrices, layer by layer, then all biases: the order that torch
// relies on within a layer; the one among layers changes no size.
static size_t elements_before(const network *r, int layer, int number, bool bias) {
  size_t total = 0;
  int all = r->layers * directions(r);
  for (int pass = 0; pass < 2; pass++)
    for (int l = 0; l < all; l++)
      for (int i = 0; i <= 2 * gates(r); i++) {
        if (pass == (int)bias && l == layer && i == number) return total;
        shape m;
        matrix(r, l, i, &m);
        total += pass ? (has_bias(r, i) ? (size_t)r->hidden : 0) : (size_t)m.rows * (size_t)m.columns;
      }
  return total;
}
int FN(cudnnGetRNNWeightSpaceSize)(void *h, const network *r, size_t *bytes) { *bytes = elements_before(r, -1, 0, false) * width(r->type); return 0; }
int FN(cudnnGetRNNWeightParams)(void *h, const network *r, int layer, size_t bytes, const void *weights, int number, tensor *m, void **matrix_out, tensor *b, void **bias_out) {
  if (!r || layer < 0 || layer >= r->layers * directions(r) || number < 0 || number > 2 * gates(r)) return CUDNN_BAD_PARAM;
  shape s;
  matrix(r, layer, number, &s);
  bool bias = has_bias(r, number), any = s.rows && s.columns;
  if (m) *m = any ? (tensor){r->type, 0, 3, {1, s.rows, s.columns}, {s.rows * s.columns, s.columns, 1}} : (tensor){.type = r->type};
  if (b) *b = bias ? (tensor){r->type, 0, 3, {1, r->hidden, 1}, {r->hidden, 1, 1}} : (tensor){.type = r->type};
  if (matrix_out) *matrix_out = any ? (char *)(uintptr_t)weights + elements_before(r, layer, number, false) * width(r->type) : NULL;
  if (bias_out) *bias_out = bias ? (char *)(uintptr_t)weights + elements_before(r, layer, number, true) * width(r->type) : NULL;
  return 0;
}
static size_t up(size_t n, size_t to) { return (n + to - 1) / to * to; }
static size_t most(size_t a, size_t b) { return a > b ? a : b; }
static size_t least(size_t a, size_t b) { return a < b ? a : b; }
// Measured on an H200 with cuDNN 9.19: 360 random networks of one to three layers, with 1, 4, 32 or 128
// sequences. All reserves are exact, and all workspaces but one, which is 0.1% off; the formulas were found
// with all of them in view, so that others may differ. Not measured, and taken to be alike: projections,
// doubles, inference, other GPUs, algorithms 1 and 2 (cudnnRNNAlgo_t), hidden sizes that are no multiple of 32,
// other numbers of sequences.
//
// Of every step the gates and states are kept for the backward pass, and the results of all layers but the
// last; with dropout also a bit for each element of those.
static size_t reserve_bytes(const network *r, const sequence *x) {
  size_t ways = (size_t)directions(r), below = (size_t)r->layers - 1, kept = r->mode == 2 ? 5 : r->mode == 3 ? 6 : 1;
  size_t cells = (size_t)x->steps * (size_t)x->batch * ways, hidden = (size_t)r->hidden, out = (size_t)r->projection;
  size_t mask = r->dropout ? below * ways * up((cells * out + 7) / 8, 32) : 0;
  return cells * (hidden * kept * (size_t)r->layers + out * below) * width(r->type) + 256 + mask;
}
// A workspace is 8 MiB for each layer and direction, a copy of the matrices, and buffers for the sequences of
// the inputs (`in`), of the hidden states (`y`), and of states of one step. Three sets of buffers occur, of
// which the largest counts; the formulas do not say which passes need them. What the numbers show: algorithm
// 3, of small networks, has more buffers (not for bfloat16); layers above each other in one direction run a
// few steps at a time, and so share a buffer of that many steps.
static size_t workspace_bytes(const network *r, const sequence *x) {
  bool lstm = r->mode == 2, gru = r->mode == 3, both = r->two_ways, several = r->layers > 1;
  bool small = r->algorithm == 3 && r->type != 9;
  size_t layers = (size_t)r->layers, batch = (size_t)x->batch, steps = (size_t)x->steps, bytes = width(r->type), fixed = 0;
  for (int l = 0; l < r->layers * directions(r); l++)
    for (int i = 0; i <= 2 * gates(r); i++) {
      shape m;
      matrix(r, l, i, &m);
      fixed += (size_t)m.rows * (size_t)m.columns * bytes;
    }
  fixed += ((size_t)8 << 20) * layers * (size_t)directions(r) + 256 + up(8 * batch, 32);
  size_t state = batch * (size_t)r->hidden * bytes, y = steps * state, in = up(steps * batch * (size_t)r->input * bytes, 32);
  size_t extra = small ? (lstm ? 12 : gru ? 14 : 9) * y : 0, a, b, c = 0;
  if (both) {
    size_t all = extra + (several ? 2 * y : 0) + layers * (lstm ? 26 : 14) * state;
    a = 10 * y + 2 * in + all;
    b = 6 * y + 6 * in + all;
    if (lstm) c = small ? 30 * y + in + 18 * layers * state : 14 * y + in + 24 * layers * state;
    if (gru) c = 12 * y + in + 14 * layers * state;
  } else {
    size_t together = batch < 2 ? 32 : batch < 8 ? 16 : batch < 64 || steps >= 128 ? 8 : 4;
    size_t shared = several && !small ? least(steps, (layers + 1) * together) * state : y;
    size_t all = shared + extra + layers * (lstm ? 11 : 5) * state + (small ? layers * state + (several ? y : 0) : 0);
    a = 3 * y + 2 * in + all;
    b = 2 * y + 3 * in + all;
    size_t dropped = several && r->dropout ? y : 0;
    if (lstm && small) c = 21 * y + in + dropped + 8 * layers * state;
    else if (lstm || gru) c = y + in + dropped + (size_t)gates(r) * least(steps, 256) * state + layers * (lstm ? 10 : 5) * state;
  }
  return fixed + most(a, most(b, c));
}
int FN(cudnnGetRNNTempSpaceSizes)(void *h, const network *r, int mode, const sequence *x, size_t *workspace, size_t *reserve) {
  modelled(MODEL_RECURRENT);
  if (workspace) *workspace = workspace_bytes(r, x);
  if (reserve) *reserve = mode ? reserve_bytes(r, x) : 0;   // 1: training
  return 0;
}

// --- CTC loss. A model: a forward and a backward variable for each probability.
int FN(cudnnGetCTCLossWorkspaceSize)(void *h, const tensor *p, const tensor *g, const int *labels, const int *label_lengths, const int *lengths, int algorithm, void *d, size_t *bytes) { modelled(MODEL_CTC); *bytes = 2 * tensor_bytes(p); return 0; }
int FN(cudnnGetCTCLossWorkspaceSize_v8)(void *h, int algorithm, void *d, const tensor *p, const tensor *g, size_t *bytes) { modelled(MODEL_CTC); *bytes = 2 * tensor_bytes(p); return 0; }

// --- convolutions with TORCH_CUDNN_V8_API_DISABLED. A model: one algorithm, without a workspace.
typedef struct { int algorithm, status; float time; size_t memory; int determinism, math, reserved[3]; } performance;   // cudnnConvolution*AlgoPerf_t
_Static_assert(sizeof(performance) == 48, "cudnnConvolutionFwdAlgoPerf_t has 48 bytes");
static int found(int wanted, int *count, performance *out) {
  if (wanted < 1 || !count || !out) return CUDNN_BAD_PARAM;
  modelled(MODEL_CONVOLUTION_BEFORE_9);
  *out = (performance){.algorithm = 1, .time = 1, .determinism = 1};   // 1: a deterministic one in all three directions
  *count = 1;
  return 0;
}
#define SEARCH(direction) \
int FN(cudnnGetConvolution##direction##WorkspaceSize)(void *h, void *a, void *b, void *c, void *d, int algorithm, size_t *bytes) { *bytes = 0; return 0; } \
int FN(cudnnGetConvolution##direction##Algorithm_v7)(void *h, void *a, void *b, void *c, void *d, int wanted, int *count, performance *out) { return found(wanted, count, out); } \
int FN(cudnnGetConvolution##direction##AlgorithmMaxCount)(void *h, int *count) { *count = 1; return 0; }
SEARCH(Forward) SEARCH(BackwardData) SEARCH(BackwardFilter)
int FN(cudnnFindConvolutionForwardAlgorithmEx)(void *h, void *xd, const void *x, void *wd, const void *w, void *conv, void *yd, void *y, int wanted, int *count, performance *out, void *workspace, size_t bytes) { return found(wanted, count, out); }
int FN(cudnnFindConvolutionBackwardDataAlgorithmEx)(void *h, void *wd, const void *w, void *dyd, const void *dy, void *conv, void *dxd, void *dx, int wanted, int *count, performance *out, void *workspace, size_t bytes) { return found(wanted, count, out); }
int FN(cudnnFindConvolutionBackwardFilterAlgorithmEx)(void *h, void *xd, const void *x, void *dyd, const void *dy, void *conv, void *dwd, void *dw, int wanted, int *count, performance *out, void *workspace, size_t bytes) { return found(wanted, count, out); }
