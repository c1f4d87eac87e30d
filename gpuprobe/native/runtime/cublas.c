// cuBLAS and cuBLASLt: handles; products are counted and not computed.
#include "native.h"

typedef int64_t i64;
enum { STREAM_NUMBER, POINTER_MODE, MATH_MODE, SM_TARGET, ATOMICS_MODE };
int FN(cublasCreate_v2)(handle **out) { int result = ensure_context(current_device()); if (result) return 3; *out = new_handle(); return *out ? 0 : 3; }
int FN(cublasDestroy_v2)(void *h) { drop_handle(h); return 0; }
int FN(cublasSetStream_v2)(handle *h, void *s) { if (!is_handle(h)) return 1; h->stream = s; return 0; }
int FN(cublasGetStream_v2)(handle *h, void **s) { if (!is_handle(h)) return 1; *s = h->stream; return 0; }
int FN(cublasSetPointerMode_v2)(handle *h, int mode) { h->numbers[POINTER_MODE] = mode; return 0; }
int FN(cublasGetPointerMode_v2)(handle *h, int *mode) { *mode = (int)h->numbers[POINTER_MODE]; return 0; }
int FN(cublasSetMathMode)(handle *h, int mode) { h->numbers[MATH_MODE] = mode; return 0; }
int FN(cublasGetMathMode)(handle *h, int *mode) { *mode = (int)h->numbers[MATH_MODE]; return 0; }
int FN(cublasSetSmCountTarget)(handle *h, int count) { h->numbers[SM_TARGET] = count; return 0; }
int FN(cublasGetSmCountTarget)(handle *h, int *count) { *count = (int)h->numbers[SM_TARGET]; return 0; }
int FN(cublasSetAtomicsMode)(handle *h, int mode) { h->numbers[ATOMICS_MODE] = mode; return 0; }
int FN(cublasGetAtomicsMode)(handle *h, int *mode) { *mode = (int)h->numbers[ATOMICS_MODE]; return 0; }
int FN(cublasSetWorkspace_v2)(handle *h, void *workspace, size_t bytes) { return 0; }
int FN(cublasGetVersion_v2)(handle *h, int *version) { machine_count(); *version = setting("cublas", cuda_version / 1000 * 10000); return 0; }
int FN(cublasGetProperty)(int type, int *value) { int version = 0; FN(cublasGetVersion_v2)(NULL, &version); *value = type == 0 ? version / 10000 : type == 1 ? version / 100 % 100 : version % 100; return 0; }
static const char *const names[] = {"CUBLAS_STATUS_SUCCESS", "CUBLAS_STATUS_NOT_INITIALIZED", "", "CUBLAS_STATUS_ALLOC_FAILED", "", "", "", "CUBLAS_STATUS_INVALID_VALUE", "CUBLAS_STATUS_ARCH_MISMATCH",
  "", "", "CUBLAS_STATUS_MAPPING_ERROR", "", "CUBLAS_STATUS_EXECUTION_FAILED", "CUBLAS_STATUS_INTERNAL_ERROR", "CUBLAS_STATUS_NOT_SUPPORTED"};
const char *FN(cublasGetStatusName)(int status) { return status >= 0 && status < 16 && *names[status] ? names[status] : "CUBLAS_STATUS_UNKNOWN"; }
const char *FN(cublasGetStatusString)(int status) { return FN(cublasGetStatusName)(status); }
// --- results. Where the pointer mode says that a scalar is in host memory (0, the preset), the function
// returns when it has the result: that of vectors of zeros, which is 0. In device memory it stays as it was.
static void result(handle *h, const char *name, void *out, size_t width) {
  library_call(name, is_handle(h) ? h->stream : NULL);
  if (out && is_handle(h) && h->numbers[POINTER_MODE] == 0) memset(out, 0, width);
}
#define RESULT5(name, bytes) int FN(name)(handle *h, int n, const void *x, int step, void *out) { result(h, #name, out, bytes); return 0; }
#define RESULT7(name, bytes) int FN(name)(handle *h, int n, const void *x, int step, const void *y, int step_y, void *out) { result(h, #name, out, bytes); return 0; }
RESULT5(cublasSnrm2_v2, 4) RESULT5(cublasDnrm2_v2, 8) RESULT5(cublasScnrm2_v2, 4) RESULT5(cublasDznrm2_v2, 8)
RESULT5(cublasSasum_v2, 4) RESULT5(cublasDasum_v2, 8) RESULT5(cublasScasum_v2, 4) RESULT5(cublasDzasum_v2, 8)
RESULT5(cublasIsamax_v2, 4) RESULT5(cublasIdamax_v2, 4) RESULT5(cublasIcamax_v2, 4) RESULT5(cublasIzamax_v2, 4)
RESULT5(cublasIsamin_v2, 4) RESULT5(cublasIdamin_v2, 4) RESULT5(cublasIcamin_v2, 4) RESULT5(cublasIzamin_v2, 4)
RESULT7(cublasSdot_v2, 4) RESULT7(cublasDdot_v2, 8) RESULT7(cublasCdotu_v2, 8) RESULT7(cublasCdotc_v2, 8) RESULT7(cublasZdotu_v2, 16) RESULT7(cublasZdotc_v2, 16)
static size_t element(int type) {   // cudaDataType
  switch (type) {
    case 1: case 4: return 8;              // R_64F, C_32F
    case 5: return 16;                     // C_64F
    case 2: case 14: return 2;             // R_16F, R_16BF
    case 3: case 8: case 28: case 29: return 1;
    default: return 4;
  }
}
int FN(cublasDotEx)(handle *h, int n, const void *x, int x_type, int step, const void *y, int y_type, int step_y, void *out, int type, int compute) { result(h, "cublasDotEx", out, element(type)); return 0; }
int FN(cublasDotcEx)(handle *h, int n, const void *x, int x_type, int step, const void *y, int y_type, int step_y, void *out, int type, int compute) { result(h, "cublasDotcEx", out, element(type)); return 0; }
int FN(cublasNrm2Ex)(handle *h, int n, const void *x, int x_type, int step, void *out, int type, int compute) { result(h, "cublasNrm2Ex", out, element(type)); return 0; }

// --- factorisations of batches: the status of each matrix, 0, goes to device memory where it is an array,
// and to the host where the documentation says that it tells of wrong arguments.
static int factored(const char *name, handle *h, int *statuses, int batch, int *on_host) {
  void *stream = is_handle(h) ? h->stream : NULL;
  library_call(name, stream);
  if (statuses && batch > 0) set_output(stream, statuses, 4, (size_t)batch);
  if (on_host) *on_host = 0;
  return 0;
}
#define BATCHES(T) \
int FN(cublas##T##getrfBatched)(handle *h, int n, void *a, int lda, int *pivots, int *statuses, int batch) { return factored("cublas" #T "getrfBatched", h, statuses, batch, NULL); } \
int FN(cublas##T##getriBatched)(handle *h, int n, void *a, int lda, const int *pivots, void *c, int ldc, int *statuses, int batch) { return factored("cublas" #T "getriBatched", h, statuses, batch, NULL); } \
int FN(cublas##T##matinvBatched)(handle *h, int n, void *a, int lda, void *inverse, int ldi, int *statuses, int batch) { return factored("cublas" #T "matinvBatched", h, statuses, batch, NULL); } \
int FN(cublas##T##getrsBatched)(handle *h, int trans, int n, int nrhs, void *a, int lda, const int *pivots, void *b, int ldb, int *status, int batch) { return factored("cublas" #T "getrsBatched", h, NULL, 0, status); } \
int FN(cublas##T##geqrfBatched)(handle *h, int m, int n, void *a, int lda, void *tau, int *status, int batch) { return factored("cublas" #T "geqrfBatched", h, NULL, 0, status); } \
int FN(cublas##T##gelsBatched)(handle *h, int trans, int m, int n, int nrhs, void *a, int lda, void *c, int ldc, int *status, int *statuses, int batch) { return factored("cublas" #T "gelsBatched", h, statuses, batch, status); }
BATCHES(S) BATCHES(D) BATCHES(C) BATCHES(Z)

// --- copies between the host and the device, element by element where the steps are not 1
static int copied(i64 count, size_t bytes, const char *from, i64 from_step, char *to, i64 to_step, void *stream) {
  if (count < 0 || !bytes || from_step < 1 || to_step < 1) return 7;   // CUBLAS_STATUS_INVALID_VALUE
  extern int gpn_cudaMemcpyAsync(void *, const void *, size_t, int, void *);
  if (from_step == 1 && to_step == 1) return gpn_cudaMemcpyAsync(to, from, (size_t)count * bytes, 4, stream) ? 11 : 0;
  for (i64 i = 0; i < count; i++)
    if (gpn_cudaMemcpyAsync(to + (size_t)(i * to_step) * bytes, from + (size_t)(i * from_step) * bytes, bytes, 4, stream)) return 11;   // CUBLAS_STATUS_MAPPING_ERROR
  return 0;
}
static int columns_copied(int rows, int columns, int bytes, const char *from, int from_leading, char *to, int to_leading, void *stream) {
  for (int i = 0; i < columns; i++) {
    int status = copied(rows, (size_t)bytes, from + (size_t)i * (size_t)from_leading * (size_t)bytes, 1, to + (size_t)i * (size_t)to_leading * (size_t)bytes, 1, stream);
    if (status) return status;
  }
  return 0;
}
#define COPIES(Way) \
int FN(cublas##Way##Vector)(int n, int bytes, const char *from, int from_step, char *to, int to_step) { return copied(n, (size_t)bytes, from, from_step, to, to_step, NULL); } \
int FN(cublas##Way##VectorAsync)(int n, int bytes, const char *from, int from_step, char *to, int to_step, void *s) { return copied(n, (size_t)bytes, from, from_step, to, to_step, s); } \
int FN(cublas##Way##Matrix)(int rows, int columns, int bytes, const char *from, int a, char *to, int b) { return columns_copied(rows, columns, bytes, from, a, to, b, NULL); } \
int FN(cublas##Way##MatrixAsync)(int rows, int columns, int bytes, const char *from, int a, char *to, int b, void *s) { return columns_copied(rows, columns, bytes, from, a, to, b, s); }
COPIES(Set) COPIES(Get)
int FN(cublasLoggerConfigure)(int a, int b, int c, const char *d) { return 0; }

// --- cuBLASLt. Descriptors are small structures of the caller's, of which only addresses count here.
int FN(cublasLtCreate)(handle **out) { *out = new_handle(); return *out ? 0 : 3; }
int FN(cublasLtDestroy)(void *h) { drop_handle(h); return 0; }
size_t FN(cublasLtGetVersion)(void) { int version; FN(cublasGetVersion_v2)(NULL, &version); return (size_t)version; }
size_t FN(cublasLtGetCudartVersion)(void) { machine_count(); return (size_t)cuda_version; }
int FN(cublasLtMatmulDescCreate)(handle **out, int compute, int scale) { *out = new_handle(); return 0; }
int FN(cublasLtMatmulDescDestroy)(void *d) { drop_handle(d); return 0; }
int FN(cublasLtMatmulDescSetAttribute)(void *d, int attribute, const void *value, size_t bytes) { return 0; }
int FN(cublasLtMatrixLayoutCreate)(handle **out, int type, uint64_t rows, uint64_t columns, int64_t leading) { *out = new_handle(); return 0; }
int FN(cublasLtMatrixLayoutDestroy)(void *d) { drop_handle(d); return 0; }
int FN(cublasLtMatrixLayoutSetAttribute)(void *d, int attribute, const void *value, size_t bytes) { return 0; }
int FN(cublasLtMatmulPreferenceCreate)(handle **out) { *out = new_handle(); return 0; }
int FN(cublasLtMatmulPreferenceDestroy)(void *d) { drop_handle(d); return 0; }
int FN(cublasLtMatmulPreferenceSetAttribute)(handle *d, int attribute, const void *value, size_t bytes) {
  if (attribute == 1 && bytes == 8) d->numbers[0] = *(const int64_t *)value;   // CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
  return 0;
}
// A model: one algorithm, with no workspace beyond the one that torch keeps (before 2.15).
typedef struct { uint64_t algorithm[8]; size_t workspace; int status; float waves; int reserved[4]; } heuristic;
_Static_assert(sizeof(heuristic) == 96, "cublasLtMatmulHeuristicResult_t has 96 bytes");
int FN(cublasLtMatmulAlgoGetHeuristic)(void *h, void *d, void *a, void *b, void *c, void *out, void *preference, int wanted, heuristic *results, int *count) {
  if (wanted < 1) return 7;
  modelled(MODEL_MATRIX_PRODUCT);
  memset(results, 0, (size_t)wanted * sizeof *results);
  results[0].waves = 1;
  *count = 1;
  return 0;
}
int FN(cublasLtMatmulAlgoGetIds)(void *h, int compute, int scale, int a, int b, int c, int d, int wanted, int *ids, int *count) { *count = 0; return 0; }
int FN(cublasLtMatmul)(void *h, void *d, const void *alpha, const void *a, void *al, const void *b, void *bl, const void *beta, const void *c, void *cl, void *out, void *dl, const void *algorithm, void *workspace, size_t bytes, void *s) {
  return library_call("cublasLtMatmul", s);
}
