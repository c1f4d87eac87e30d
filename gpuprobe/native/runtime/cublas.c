// cuBLAS and cuBLASLt: handles; products are counted and not computed.
#include "native.h"

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
// Results on the host: a kernel that is not run leaves 0, the first element's index is 1.
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
// A model: one algorithm, with no workspace beyond the one that torch allocates for it in advance.
typedef struct { uint64_t algorithm[8]; size_t workspace; int status; float waves; int reserved[4]; } heuristic;
_Static_assert(sizeof(heuristic) == 96, "cublasLtMatmulHeuristicResult_t has 96 bytes");
int FN(cublasLtMatmulAlgoGetHeuristic)(void *h, void *d, void *a, void *b, void *c, void *out, void *preference, int wanted, heuristic *results, int *count) {
  if (wanted < 1) return 7;
  memset(results, 0, (size_t)wanted * sizeof *results);
  results[0].waves = 1;
  *count = 1;
  return 0;
}
int FN(cublasLtMatmulAlgoGetIds)(void *h, int compute, int scale, int a, int b, int c, int d, int wanted, int *ids, int *count) { *count = 0; return 0; }
int FN(cublasLtMatmul)(void *h, void *d, const void *alpha, const void *a, void *al, const void *b, void *bl, const void *beta, const void *c, void *cl, void *out, void *dl, const void *algorithm, void *workspace, size_t bytes, void *s) {
  return library_call("cublasLtMatmul", s);
}
