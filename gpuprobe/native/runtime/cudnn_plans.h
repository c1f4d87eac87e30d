// Convolutions as torch describes them to cuDNN's backend API, and the workspaces of their plans.
#ifndef GPUPROBE_CUDNN_PLANS_H
#define GPUPROBE_CUDNN_PLANS_H
#include "native.h"
#define MAX_DIMENSIONS 8
enum { TYPE_FLOAT = 0, TYPE_HALF = 2, TYPE_BFLOAT16 = 9 };   // cudnnDataType_t
typedef enum { NO_CONVOLUTION, FORWARD, BACKWARD_DATA, BACKWARD_FILTER } operation_kind;
typedef struct { int type; int64_t dimensions, size[MAX_DIMENSIONS], stride[MAX_DIMENSIONS]; } plan_tensor;
typedef struct {
  operation_kind operation;
  plan_tensor x, w, y;   // the input's side, the filter, the output's side; gradients or not
  int64_t padding[MAX_DIMENSIONS], stride[MAX_DIMENSIONS], dilation[MAX_DIMENSIONS];
  int mode;              // cudnnBackendHeurMode_t of the heuristic that answered
  uint64_t query;        // the number of that answer
  bool tensor_cores;
  bool spare;            // the slow plan without a workspace that cuDNN has for each convolution: what runs where others do not fit
  bool attention;        // a graph without a convolution: torch makes no other one
} convolution;
int64_t plan_workspace(const convolution *c);   // bytes
bool is_only_searched(const convolution *c);    // a plan that `benchmark = True` tries and does not keep
#endif
