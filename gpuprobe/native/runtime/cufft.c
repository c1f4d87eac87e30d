// cuFFT: plans. A model: the work area of a plan is one copy of the larger of its input and output
// (cuFFT's documentation promises no size; its own estimates are of this order).
#include "native.h"

enum { CUFFT_INVALID_PLAN = 1, CUFFT_ALLOC_FAILED = 2, CUFFT_INVALID_VALUE = 4 };
#define MAX_PLANS 65536   // torch keeps 4096 for each device at most
typedef struct { bool used; void *stream; size_t bytes; } plan;
static plan *plans;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static plan *plan_of(int number) { return plans && number > 0 && number < MAX_PLANS && plans[number].used ? &plans[number] : NULL; }

int FN(cufftCreate)(int *out) {
  int found = 0;
  pthread_mutex_lock(&lock);
  if (!plans) plans = calloc(MAX_PLANS, sizeof *plans);
  for (int i = 1; plans && i < MAX_PLANS && !found; i++) if (!plans[i].used) { plans[i] = (plan){.used = true}; found = i; }
  pthread_mutex_unlock(&lock);
  *out = found;
  return found ? 0 : CUFFT_ALLOC_FAILED;
}
int FN(cufftDestroy)(int number) {
  pthread_mutex_lock(&lock);
  plan *p = plan_of(number);
  if (p) p->used = false;
  pthread_mutex_unlock(&lock);
  return p ? 0 : CUFFT_INVALID_PLAN;
}
int FN(cufftSetStream)(int number, void *stream) { plan *p = plan_of(number); if (!p) return CUFFT_INVALID_PLAN; p->stream = stream; return 0; }
int FN(cufftSetAutoAllocation)(int number, int automatic) { return plan_of(number) ? 0 : CUFFT_INVALID_PLAN; }   // torch turns it off
int FN(cufftSetWorkArea)(int number, void *area) { return plan_of(number) ? 0 : CUFFT_INVALID_PLAN; }
int FN(cufftGetSize)(int number, size_t *bytes) { plan *p = plan_of(number); if (!p) return CUFFT_INVALID_PLAN; *bytes = p->bytes; return 0; }
int FN(cufftGetVersion)(int *version) { machine_count(); *version = cuda_version >= 13000 ? 12000 : 11200; return 0; }

static size_t element(int type) {   // cudaDataType
  switch (type) {
    case 2: return 2;    // R_16F
    case 0: case 6: return 4;    // R_32F, C_16F
    case 1: case 4: return 8;    // R_64F, C_32F
    default: return 16;
  }
}
int FN(cufftXtMakePlanMany)(int number, int rank, long long *n, long long *in_embed, long long in_stride, long long in_distance, int in_type,
                            long long *out_embed, long long out_stride, long long out_distance, int out_type, long long batch, size_t *bytes, int type) {
  plan *p = plan_of(number);
  if (!p) return CUFFT_INVALID_PLAN;
  if (rank < 1 || rank > 3 || batch < 1) return CUFFT_INVALID_VALUE;
  size_t full = (size_t)batch, half = (size_t)batch;   // elements of a complex and of a one-sided result
  for (int i = 0; i < rank; i++) {
    if (n[i] < 1) return CUFFT_INVALID_VALUE;
    full *= (size_t)n[i];
    half *= (size_t)(i == rank - 1 ? n[i] / 2 + 1 : n[i]);
  }
  bool real_in = in_type < 3, real_out = out_type < 3;   // R_32F, R_64F, R_16F
  size_t in = (real_out && !real_in ? half : full) * element(in_type), out = (real_in && !real_out ? half : full) * element(out_type);
  p->bytes = in > out ? in : out;
  if (bytes) *bytes = p->bytes;
  return 0;
}
int FN(cufftXtExec)(int number, void *in, void *out, int direction) { plan *p = plan_of(number); return p ? library_call("cufftXtExec", p->stream) : CUFFT_INVALID_PLAN; }
