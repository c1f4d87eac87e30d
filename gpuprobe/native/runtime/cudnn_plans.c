// Workspaces of convolution plans: a model of cuDNN 9.19 on an H200 (torch 2.11, CUDA 13.0).
//
// NVIDIA does not document them. The formulas were found in 350 measured convolutions, forward and
// backward (the calls `conv` of even number in benchmarks/oracle_sizes.py of commit b31fc386), and judged on 349 others: 65%
// of their peaks are within 1% and 77% within 5%, where without workspaces it was 42% and 46%. Three
// rules ("by the whole runs") were found in recorded training runs instead; those do not judge them.
// On other GPUs and versions nothing was measured. FFTs are not modelled: some large
// filters need much more.
// Four causes explain them:
// - Tensor cores want channels last. In another layout a plan converts input, output and filter in its
//   workspace, with channels padded to 16 bytes.
// - A gradient of a filter sums over the batch: thread blocks that share one tile of it keep partial
//   sums in float32. How many do is the heuristic's secret: the least exact part.
// - A convolution 1x1 without stride is a product of matrices; nothing is converted.
// - Without tensor cores (float32 without TF32) the gradient of a 3x3 filter is Winograd's.
#include "cudnn_plans.h"

enum { FALLBACK = 2 };   // cudnnBackendHeurMode_t
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t parts(int64_t a, int64_t b) { return (a + b - 1) / b; }

typedef struct {
  operation_kind operation;
  bool half, tensor_cores, last;   // last: channels
  bool point, still, square;       // filter of one pixel; the same without stride and padding; 3x3 with neither stride nor dilation
  bool dilated, flat;              // flat: two dimensions
  int64_t n, c, k, groups, pixels, from, to;   // pixels of the filter, of one input and of one output
  int64_t extent, stride, element, processors;
  int64_t x, y, w;                 // bytes
} shape;

static bool is_last(const plan_tensor *t) { return t->stride[1] == 1 && t->stride[t->dimensions - 1] == t->size[1]; }
static shape shape_of(const convolution *c) {
  device *d = visible_device(current_device());
  int64_t spatial = c->x.dimensions - 2;
  shape s = {
    .operation = c->operation, .half = c->x.type != TYPE_FLOAT, .last = is_last(&c->x), .n = c->x.size[0], .c = c->x.size[1], .k = c->y.size[1],
    .pixels = 1, .from = 1, .to = 1, .still = true, .square = spatial == 2, .stride = 1, .element = c->x.type == TYPE_FLOAT ? 4 : 2,
    .flat = spatial == 2 && c->x.size[2] > 1, .processors = d ? d->multiprocessors : 132,
  };
  s.tensor_cores = s.half || (c->tensor_cores && d && d->major >= 8);   // TF32 needs Ampere
  s.groups = c->w.size[1] > 0 ? s.c / c->w.size[1] : 1;
  for (int64_t i = 0; i < spatial; i++) {
    int64_t filter = c->w.size[i + 2];
    s.pixels *= filter; s.from *= c->x.size[i + 2]; s.to *= c->y.size[i + 2];
    s.extent = most(s.extent, filter); s.stride = most(s.stride, c->stride[i]);
    s.dilated |= c->dilation[i] > 1;
    s.still &= c->stride[i] == 1 && !c->padding[i];
    s.square &= filter == 3 && c->stride[i] == 1 && c->dilation[i] == 1;
  }
  s.point = s.pixels == 1;
  s.still &= s.point;
  int64_t pad = s.tensor_cores && s.groups == 1 ? 16 / s.element : 1;   // to 16 bytes
  int64_t channels = parts(s.c, pad) * pad, filters = parts(s.k, pad) * pad;
  s.x = s.n * s.from * channels * s.element;
  s.y = s.n * s.to * filters * s.element;
  s.w = s.point ? 0 : channels * filters / s.groups * s.pixels * s.element;
  return s;
}

// Partial sums of a filter's gradient: up to `most_blocks` thread blocks share its tiles, each for
// `steps` steps of 32 pixels or more. Where it is converted its sums are as large as it is, else whole tiles.
static int64_t partial_sums(const shape *s, int64_t most_blocks, int64_t steps, int64_t fewest) {
  int64_t rows = s->k <= 64 ? 64 : 128, columns = s->k <= 64 && s->c <= 128 ? 64 : 128, channels = s->c;
  if (channels < 128) for (channels = 4; channels < s->c;) channels *= 2;
  int64_t tiles = parts(s->k, rows) * parts(channels * s->pixels, columns), total = s->n * s->to / 32;
  int64_t blocks = least(most_blocks / tiles, total / steps);
  if (total < fewest || blocks < 2) return 0;
  return blocks * (s->last ? tiles * rows * columns : s->c * s->k * s->pixels) * 4 + 516;   // and a flag for each block
}
// Hopper's kernels, which need 131 bytes, are chosen where there is work for four rounds.
static int64_t hopper(const shape *s) {
  int64_t pixels = s->operation == FORWARD ? s->to : s->from, channels = s->operation == FORWARD ? s->k : s->c;
  return parts(s->n * pixels, 128) * parts(channels, 128) >= 4 * s->processors ? 131 : 0;
}

static int64_t tensor_cores_first(const shape *s) {   // channels first: converted
  int64_t all = s->x + s->y + s->w + 16;
  // One product for each sample, summed afterwards, or converted where that is less (by the whole runs).
  if (s->still) return s->operation == BACKWARD_FILTER ? least(s->n * s->c * s->k * 4, all) : 0;
  if (s->operation == BACKWARD_FILTER) {
    if (s->c < 4 && !s->half) return 0;   // images (by the whole runs)
    int64_t sums = s->half ? partial_sums(s, s->processors / 2, 48, 256) : partial_sums(s, s->processors, 32, 0);
    return all + (sums ? sums + 131 : 0);
  }
  if (s->c <= 4 && (s->operation == FORWARD || !s->half)) return 0;   // kernels of their own for images
  if (s->point && !s->half) return 0;
  // These write the output in its layout themselves (that others do not: by the whole runs).
  if (s->operation == FORWARD && !s->half && s->flat && s->n >= 16 && s->c * s->pixels <= 1024) return s->x + s->w + 16;
  return all + hopper(s);
}
static int64_t tensor_cores_last(const shape *s) {   // channels last: what has odd channels is converted
  int64_t vector = 16 / s->element;
  bool odd = s->c % vector, odd_filters = s->k % vector;
  switch (s->operation) {
    case FORWARD:
      if (s->k < vector) return s->y + s->w + 147;
      if (!s->half && !s->point && (s->c <= 4 || s->extent >= 5 || s->stride >= 4)) return (s->n * s->from * s->c + s->c * s->k * s->pixels) * 4 + 16;
      if (s->c < vector && !s->point && !s->half) return s->x + s->w + 16;
      return s->half ? 0 : hopper(s);
    case BACKWARD_DATA:
      if (s->c < vector) return s->half ? s->x + 147 : s->x + s->y + s->w + 16;
      if (s->k < vector) return s->y + s->w + 16;
      return s->point && s->half ? 0 : s->half ? hopper(s) : 131;
    default: break;
  }
  if (s->still) {
    int64_t pixels = most(s->half ? 1000 : 600, s->c * s->k / 80);   // of each block: a large filter is not summed often
    int64_t blocks = least(s->n * s->to / pixels, 2 * s->processors / (parts(s->k, 128) * parts(s->c, 128)));
    return blocks > 1 ? blocks * s->c * s->k * 4 + (s->half ? 272 : 256) : 0;
  }
  if (!s->half && (s->extent >= 5 || s->dilated)) return s->x + s->y + 432;
  int64_t sums = s->half ? partial_sums(s, s->processors, 8, 1024) : partial_sums(s, s->processors, 32, 0);
  return (sums ? sums + 147 : 0) + (odd ? s->x + s->w : 0) + (odd_filters ? s->y + s->w : 0);
}
static int64_t without_tensor_cores(const shape *s, const convolution *c) {
  int64_t all = s->x + s->y + s->w + 16, winograd = 0;
  if (s->operation == BACKWARD_FILTER && s->square && s->c > 4) {   // tiles of 6x6 pixels for 4x4 of the output
    int64_t tiles = s->n * parts(c->y.size[2], 4) * parts(c->y.size[3], 4);
    winograd = 36 * 4 * (tiles * (s->c + s->k) + s->c * s->k);
  }
  if (s->last) {   // converted to channels first
    if (s->operation == BACKWARD_DATA) return all;
    if (s->operation == BACKWARD_FILTER) return winograd && s->c >= 128 ? all + winograd : 0;
    return s->extent >= 7 || s->c <= 4 || (s->c <= 16 && s->k <= 16) ? 0 : all;
  }
  if (s->operation != BACKWARD_FILTER) return 0;
  if (winograd) return winograd;
  bool deep = c->x.dimensions == 5 && !s->point;
  return deep || (s->stride > 1 && s->c >= 128 && s->extent <= 3) ? all : 0;
}

bool is_only_searched(const convolution *c) { return c->operation && c->mode == FALLBACK && !c->spare; }
int64_t plan_workspace(const convolution *c) {
  int type = c->x.type;
  if (c->attention) return 256;   // as on that H200, forward and backward
  if (c->operation) modelled(MODEL_CONVOLUTION);
  if (c->spare || !c->operation || (type != TYPE_FLOAT && type != TYPE_HALF && type != TYPE_BFLOAT16)) return 0;
  shape s = shape_of(c);
  if (!s.c || !s.k) return 0;
  int64_t bytes;
  if (s.groups > 1) bytes = s.groups == s.c ? 0 : s.x + s.y + (s.tensor_cores && !s.half ? s.w : 0) + 64;
  else if (!s.tensor_cores) bytes = without_tensor_cores(&s, c);
  else bytes = s.last ? tensor_cores_last(&s) : tensor_cores_first(&s);
  if (!is_only_searched(c)) return bytes;
  // `benchmark = True` allocates the largest workspace of all plans once, before it tries them.
  bool sums = s.operation == BACKWARD_FILTER && s.half && !s.last && s.groups == 1;
  return most(bytes, s.x + s.y + s.w + (sums ? s.processors * 256 * 128 * 4 : 0));
}
