// cuFFT: plans. A model: the work area of a plan, after 80 random transforms on an H200 with cuFFT 12.0, from
// 8 to 65536 values and of one and two dimensions. Exact but for lengths with a prime factor above 127 (up to
// 0.1% off, of an odd length and an odd batch 0.1%); where the limits lie between the lengths that were
// measured is not known.
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
static bool smooth(long long n, long long largest) {   // no prime factor above largest
  for (long long p = 2; p <= largest; p++) while (n % p == 0) n /= p;
  return n == 1;
}
// Complex elements for one transform. A large prime factor makes a long one a convolution (Bluestein) of
// transforms of a longer length, in two buffers; else short ones run as one kernel without a work area.
static size_t convolution(long long n) {
  if (n <= 1024 || smooth(n, 127)) return 0;
  long long longer = n < 4096 ? 8192 : 2 * n - 1;
  while (!smooth(longer, 5)) longer++;
  return 2 * (size_t)longer;
}
static size_t complex_area(long long n) { size_t area = convolution(n); return area ? area : n > 8192 ? (size_t)n : 0; }
// A real one of even length is a complex one of half of it, in a buffer unless it is short and its values lie
// together; of odd lengths two are done as one.
static size_t real_area(long long n, size_t batch, bool together) {
  if (n % 2) return n <= 128 ? 0 : (batch + batch % 2) * (size_t)n + batch * convolution(n);
  if (together && n <= 8192 && smooth(n, n <= 1024 ? 7 : 2)) return 0;
  return batch * ((size_t)n / 2 + convolution(n / 2));
}
int FN(cufftXtMakePlanMany)(int number, int rank, long long *n, long long *in_embed, long long in_stride, long long in_distance, int in_type,
                            long long *out_embed, long long out_stride, long long out_distance, int out_type, long long batch, size_t *bytes, int type) {
  plan *p = plan_of(number);
  if (!p) return CUFFT_INVALID_PLAN;
  if (rank < 1 || rank > 3 || batch < 1) return CUFFT_INVALID_VALUE;
  size_t all = (size_t)batch, area = 0;
  for (int i = 0; i < rank; i++) {
    if (n[i] < 1) return CUFFT_INVALID_VALUE;
    all *= (size_t)n[i];
  }
  bool real = in_type < 3 || out_type < 3;   // R_32F, R_64F, R_16F
  for (int i = 0; i < rank; i++) {
    size_t others = all / (size_t)n[i], one = real && i == rank - 1 ? real_area(n[i], others, in_stride == 1) : others * complex_area(n[i]);
    if (one > area) area = one;
  }
  modelled(MODEL_FOURIER);
  p->bytes = area * element(in_type < 3 ? out_type : in_type);
  if (bytes) *bytes = p->bytes;
  return 0;
}
int FN(cufftXtExec)(int number, void *in, void *out, int direction) {
  plan *p = plan_of(number);
  if (!p) return CUFFT_INVALID_PLAN;
  modelled(MODEL_FOURIER);   // torch keeps plans, and their sizes
  return library_call("cufftXtExec", p->stream);
}
