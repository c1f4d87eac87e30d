// cuSOLVER: handles, workspace sizes, and results that say that a matrix was factored. Nothing is
// computed. Signatures: cuSOLVER's documentation, "Dense LAPACK".
//
// A model: the sizes of workspaces, in elements. cuSOLVER publishes none. Those of potrf, getrf, geqrf, orgqr,
// ormqr, gesvdj, syevj, syevd and geev were measured on an H200 with cuSOLVER 12.0.4 for single-precision
// matrices of 4 to 1024 rows, square ones and a few others; most are exact, the others within 1.5 KiB or 0.1%
// (orgqr of 65 to 126 columns rests on one size, sytrf, and potrf and ormqr of the other side, on one of 5
// rows, syevd above 32 rows on two). Other types have as many elements (not measured), but getrf as many bytes
// (one size of a complex type). The other functions take what LAPACK's documentation gives as optimal, with
// blocks of BLOCK columns.
#include "native.h"

#define BLOCK 32
typedef int64_t i64;
static i64 most(i64 a, i64 b) { return a > b ? a : b; }
static i64 least(i64 a, i64 b) { return a < b ? a : b; }
static i64 up(i64 n, i64 to) { return (n + to - 1) / to * to; }
enum { SINGLE = 4, DOUBLE = 8, COMPLEX = 8, DOUBLE_COMPLEX = 16 };   // bytes of an element, by the letters S, D, C, Z

static i64 potrf(i64 n, int upper) { i64 tiles = up(n, 32) / 32; return 32 + up(tiles * tiles, upper ? 32 : 8); }   // a mark for each tile
static i64 potri(i64 n) { return most(1, BLOCK * n); }
static i64 getrf(i64 m, i64 n, i64 bytes) { i64 k = most(m, n); return (256 + (k <= 256 ? 16 * up(k, 32) : 4096 + 8 * up(k, 64))) / bytes; }
static i64 geqrf(i64 m, i64 n) { return 32 + (1 << 19) + 1024 * most(n, 256); }
static i64 sytrf(i64 n) { return 24576 + up(n, 32); }   // of 5 rows; others were not measured
static i64 orgqr(i64 m, i64 k) {   // up to 64 columns a copy; from 127 on, blocks of 128
  return 33024 + (k <= 64 ? up(m * k, 32) : k < 127 ? up(m * k, 32) + up(m * (k - 64), 32) : 256 * m + 128 * (k - 128));
}
static i64 ormqr(i64 m, i64 n, i64 k, bool right) {
  i64 rows = right ? n : m;
  return 65792 + 256 * rows + up(rows * k + k * k, 32) + (right ? 0 : 512 * n + (m > 32 ? up(n, 32) : 0));
}
static i64 gesvd(i64 m, i64 n) { return most(3 * least(m, n) + most(m, n), 5 * least(m, n)) + BLOCK * (m + n); }
static i64 syevj(i64 n) {   // a copy, a panel of 32 columns, and marks of pairs of blocks
  i64 padded = n <= 32 ? up(n, 32) : up(n, 64);
  return n * n + n + 32 * padded + 1024 + padded / 32 + padded * padded / 256;
}
static i64 gesvdj(i64 m, i64 n, bool complete) {   // complete: all columns of the larger of U and V
  i64 a = most(m, n), b = least(m, n), square = b <= 32 ? 992 : up(syevj(b), 32) + up(b * b + 32 * up(b, 64), 32);
  if (a == b || a <= 32) return square;
  // Of a matrix that is not square, first a QR factorisation; of a wide one, of its transpose.
  return (m < n ? up(m * n, 32) : 0) + up(b, 32) + most(square, most(geqrf(a, b), ormqr(a, complete ? a : b, b, false)));
}
static i64 gesvda(i64 m, i64 n) { i64 k = least(m, n); return most(1, m * n + k * k + 2 * k + BLOCK * (m + n)); }
static i64 syevd_each(i64 n) { return 65540 + 767 * n + 3 * n * n; }
static i64 syevd(i64 n) { return n <= 32 ? syevd_each(n) + 78 : 4 * n * n + 127 * n + 32995; }   // measured up to 32 and from 768 on
static i64 syev_batched(i64 n, i64 batch) { return batch * syevd_each(n) + 78; }
static i64 geev(i64 n) { return up(most(orgqr(n - 1, n - 1), n * n) + 4 * n + 16, 128); }   // a Hessenberg form, then a copy

// --- handles
int FN(cusolverDnCreate)(handle **out) { if (ensure_context(current_device())) return 1; *out = new_handle(); return *out ? 0 : 2; }
int FN(cusolverDnDestroy)(void *h) { drop_handle(h); return 0; }
int FN(cusolverDnSetStream)(handle *h, void *s) { if (!is_handle(h)) return 1; h->stream = s; return 0; }
int FN(cusolverDnGetStream)(handle *h, void **s) { if (!is_handle(h)) return 1; *s = h->stream; return 0; }
#define OBJECT(name) int FN(cusolverDnCreate##name)(handle **out) { *out = new_handle(); return *out ? 0 : 2; } int FN(cusolverDnDestroy##name)(void *p) { drop_handle(p); return 0; }
OBJECT(Params) OBJECT(GesvdjInfo) OBJECT(SyevjInfo)
int FN(cusolverGetProperty)(int type, int *value) { machine_count(); int major = cuda_version >= 13000 ? 12 : 11; *value = type == 0 ? major : type == 1 ? 6 : 0; return 0; }
int FN(cusolverGetVersion)(int *version) { machine_count(); *version = cuda_version >= 13000 ? 12000 : 11600; return 0; }

// A factorisation: a kernel, after which its status in device memory is 0.
static int ran(const char *name, void *h, int *status, i64 batch) {
  void *stream = is_handle(h) ? ((handle *)h)->stream : NULL;
  library_call(name, stream);
  set_output(stream, status, 4, (size_t)most(batch, 0));
  return 0;
}
static int size_out(int *out, i64 elements) { modelled(MODEL_LINEAR_ALGEBRA); *out = elements > INT32_MAX ? INT32_MAX : (int)elements; return 0; }

#define FOUR(X) X(S, SINGLE, or, sy) X(D, DOUBLE, or, sy) X(C, COMPLEX, un, he) X(Z, DOUBLE_COMPLEX, un, he)
#define LEGACY(T, bytes, orthogonal, symmetric) \
int FN(cusolverDn##T##potrf_bufferSize)(void *h, int uplo, int n, void *a, int lda, int *out) { return size_out(out, potrf(n, uplo)); } \
int FN(cusolverDn##T##potrf)(void *h, int uplo, int n, void *a, int lda, void *work, int size, int *status) { return ran("cusolverDn" #T "potrf", h, status, 1); } \
int FN(cusolverDn##T##potrs)(void *h, int uplo, int n, int nrhs, const void *a, int lda, void *b, int ldb, int *status) { return ran("cusolverDn" #T "potrs", h, status, 1); } \
int FN(cusolverDn##T##potrfBatched)(void *h, int uplo, int n, void *a, int lda, int *status, int batch) { return ran("cusolverDn" #T "potrfBatched", h, status, batch); } \
int FN(cusolverDn##T##potrsBatched)(void *h, int uplo, int n, int nrhs, void *a, int lda, void *b, int ldb, int *status, int batch) { return ran("cusolverDn" #T "potrsBatched", h, status, 1); } \
int FN(cusolverDn##T##potri_bufferSize)(void *h, int uplo, int n, void *a, int lda, int *out) { return size_out(out, potri(n)); } \
int FN(cusolverDn##T##potri)(void *h, int uplo, int n, void *a, int lda, void *work, int size, int *status) { return ran("cusolverDn" #T "potri", h, status, 1); } \
int FN(cusolverDn##T##getrf_bufferSize)(void *h, int m, int n, void *a, int lda, int *out) { return size_out(out, getrf(m, n, bytes)); } \
int FN(cusolverDn##T##getrf)(void *h, int m, int n, void *a, int lda, void *work, int *pivots, int *status) { return ran("cusolverDn" #T "getrf", h, status, 1); } \
int FN(cusolverDn##T##getrs)(void *h, int trans, int n, int nrhs, const void *a, int lda, const int *pivots, void *b, int ldb, int *status) { return ran("cusolverDn" #T "getrs", h, status, 1); } \
int FN(cusolverDn##T##geqrf_bufferSize)(void *h, int m, int n, void *a, int lda, int *out) { return size_out(out, geqrf(m, n)); } \
int FN(cusolverDn##T##geqrf)(void *h, int m, int n, void *a, int lda, void *tau, void *work, int size, int *status) { return ran("cusolverDn" #T "geqrf", h, status, 1); } \
int FN(cusolverDn##T##orthogonal##gqr_bufferSize)(void *h, int m, int n, int k, const void *a, int lda, const void *tau, int *out) { return size_out(out, orgqr(m, k)); } \
int FN(cusolverDn##T##orthogonal##gqr)(void *h, int m, int n, int k, void *a, int lda, const void *tau, void *work, int size, int *status) { return ran("cusolverDn" #T #orthogonal "gqr", h, status, 1); } \
int FN(cusolverDn##T##orthogonal##mqr_bufferSize)(void *h, int side, int trans, int m, int n, int k, const void *a, int lda, const void *tau, const void *c, int ldc, int *out) { return size_out(out, ormqr(m, n, k, side)); } \
int FN(cusolverDn##T##orthogonal##mqr)(void *h, int side, int trans, int m, int n, int k, const void *a, int lda, const void *tau, void *c, int ldc, void *work, int size, int *status) { return ran("cusolverDn" #T #orthogonal "mqr", h, status, 1); } \
int FN(cusolverDn##T##sytrf_bufferSize)(void *h, int n, void *a, int lda, int *out) { return size_out(out, sytrf(n)); } \
int FN(cusolverDn##T##sytrf)(void *h, int uplo, int n, void *a, int lda, int *pivots, void *work, int size, int *status) { return ran("cusolverDn" #T "sytrf", h, status, 1); } \
int FN(cusolverDn##T##gesvd_bufferSize)(void *h, int m, int n, int *out) { return size_out(out, gesvd(m, n)); } \
int FN(cusolverDn##T##gesvd)(void *h, signed char u, signed char vt, int m, int n, void *a, int lda, void *s, void *left, int ldu, void *right, int ldvt, void *work, int size, void *rwork, int *status) { return ran("cusolverDn" #T "gesvd", h, status, 1); } \
int FN(cusolverDn##T##gesvdj_bufferSize)(void *h, int jobz, int econ, int m, int n, const void *a, int lda, const void *s, const void *u, int ldu, const void *v, int ldv, int *out, void *info) { return size_out(out, gesvdj(m, n, jobz && !econ)); } \
int FN(cusolverDn##T##gesvdj)(void *h, int jobz, int econ, int m, int n, void *a, int lda, void *s, void *u, int ldu, void *v, int ldv, void *work, int size, int *status, void *info) { return ran("cusolverDn" #T "gesvdj", h, status, 1); } \
int FN(cusolverDn##T##gesvdjBatched_bufferSize)(void *h, int jobz, int m, int n, const void *a, int lda, const void *s, const void *u, int ldu, const void *v, int ldv, int *out, void *info, int batch) { return size_out(out, gesvdj(m, n, jobz)); } \
int FN(cusolverDn##T##gesvdjBatched)(void *h, int jobz, int m, int n, void *a, int lda, void *s, void *u, int ldu, void *v, int ldv, void *work, int size, int *status, void *info, int batch) { return ran("cusolverDn" #T "gesvdjBatched", h, status, batch); } \
int FN(cusolverDn##T##gesvdaStridedBatched_bufferSize)(void *h, int jobz, int rank, int m, int n, const void *a, int lda, long long sa, const void *s, long long ss, const void *u, int ldu, long long su, const void *v, int ldv, long long sv, int *out, int batch) { return size_out(out, gesvda(m, n) * batch); } \
int FN(cusolverDn##T##gesvdaStridedBatched)(void *h, int jobz, int rank, int m, int n, const void *a, int lda, long long sa, void *s, long long ss, void *u, int ldu, long long su, void *v, int ldv, long long sv, void *work, int size, int *status, double *norms, int batch) { \
  if (norms) memset(norms, 0, (size_t)most(batch, 0) * sizeof *norms); \
  return ran("cusolverDn" #T "gesvdaStridedBatched", h, status, batch); } \
int FN(cusolverDn##T##symmetric##evd_bufferSize)(void *h, int jobz, int uplo, int n, const void *a, int lda, const void *w, int *out) { return size_out(out, syevd(n)); } \
int FN(cusolverDn##T##symmetric##evd)(void *h, int jobz, int uplo, int n, void *a, int lda, void *w, void *work, int size, int *status) { return ran("cusolverDn" #T #symmetric "evd", h, status, 1); } \
int FN(cusolverDn##T##symmetric##evj_bufferSize)(void *h, int jobz, int uplo, int n, const void *a, int lda, const void *w, int *out, void *info) { return size_out(out, syevj(n)); } \
int FN(cusolverDn##T##symmetric##evj)(void *h, int jobz, int uplo, int n, void *a, int lda, void *w, void *work, int size, int *status, void *info) { return ran("cusolverDn" #T #symmetric "evj", h, status, 1); } \
int FN(cusolverDn##T##symmetric##evjBatched_bufferSize)(void *h, int jobz, int uplo, int n, const void *a, int lda, const void *w, int *out, void *info, int batch) { return size_out(out, syevj(n) * batch); } \
int FN(cusolverDn##T##symmetric##evjBatched)(void *h, int jobz, int uplo, int n, void *a, int lda, void *w, void *work, int size, int *status, void *info, int batch) { return ran("cusolverDn" #T #symmetric "evjBatched", h, status, batch); }
FOUR(LEGACY)

// --- the 64-bit interface: sizes in bytes, of workspaces on the device and on the host
static i64 element(int type) {   // cudaDataType
  switch (type) {
    case 0: return 4;    // R_32F
    case 1: return 8;    // R_64F
    case 4: return 8;    // C_32F
    case 5: return 16;   // C_64F
    default: return 16;
  }
}
static int sizes(size_t *on_device, size_t *on_host, i64 elements, int type) { modelled(MODEL_LINEAR_ALGEBRA); *on_device = (size_t)(elements * element(type)); *on_host = 0; return 0; }
int FN(cusolverDnXgeqrf_bufferSize)(void *h, void *p, i64 m, i64 n, int type, const void *a, i64 lda, int tau_type, const void *tau, int compute, size_t *d, size_t *host) { return sizes(d, host, geqrf(m, n), compute); }
int FN(cusolverDnXgeqrf)(void *h, void *p, i64 m, i64 n, int type, void *a, i64 lda, int tau_type, void *tau, int compute, void *work, size_t bytes, void *host, size_t host_bytes, int *status) { return ran("cusolverDnXgeqrf", h, status, 1); }
int FN(cusolverDnXpotrf_bufferSize)(void *h, void *p, int uplo, i64 n, int type, const void *a, i64 lda, int compute, size_t *d, size_t *host) { return sizes(d, host, potrf(n, uplo), compute); }
int FN(cusolverDnXpotrf)(void *h, void *p, int uplo, i64 n, int type, void *a, i64 lda, int compute, void *work, size_t bytes, void *host, size_t host_bytes, int *status) { return ran("cusolverDnXpotrf", h, status, 1); }
int FN(cusolverDnXpotrs)(void *h, void *p, int uplo, i64 n, i64 nrhs, int type, const void *a, i64 lda, int b_type, void *b, i64 ldb, int *status) { return ran("cusolverDnXpotrs", h, status, 1); }
int FN(cusolverDnXgetrf_bufferSize)(void *h, void *p, i64 m, i64 n, int type, const void *a, i64 lda, int compute, size_t *d, size_t *host) { return sizes(d, host, getrf(m, n, element(compute)), compute); }
int FN(cusolverDnXgetrf)(void *h, void *p, i64 m, i64 n, int type, void *a, i64 lda, i64 *pivots, int compute, void *work, size_t bytes, void *host, size_t host_bytes, int *status) { return ran("cusolverDnXgetrf", h, status, 1); }
int FN(cusolverDnXgetrs)(void *h, void *p, int trans, i64 n, i64 nrhs, int type, const void *a, i64 lda, const i64 *pivots, int b_type, void *b, i64 ldb, int *status) { return ran("cusolverDnXgetrs", h, status, 1); }
int FN(cusolverDnXsyevd_bufferSize)(void *h, void *p, int jobz, int uplo, i64 n, int type, const void *a, i64 lda, int w_type, const void *w, int compute, size_t *d, size_t *host) { return sizes(d, host, syevd(n), compute); }
int FN(cusolverDnXsyevd)(void *h, void *p, int jobz, int uplo, i64 n, int type, void *a, i64 lda, int w_type, void *w, int compute, void *work, size_t bytes, void *host, size_t host_bytes, int *status) { return ran("cusolverDnXsyevd", h, status, 1); }
int FN(cusolverDnXsyevBatched_bufferSize)(void *h, void *p, int jobz, int uplo, i64 n, int type, const void *a, i64 lda, int w_type, const void *w, int compute, size_t *d, size_t *host, i64 batch) { return sizes(d, host, syev_batched(n, batch), compute); }
int FN(cusolverDnXsyevBatched)(void *h, void *p, int jobz, int uplo, i64 n, int type, void *a, i64 lda, int w_type, void *w, int compute, void *work, size_t bytes, void *host, size_t host_bytes, int *status, i64 batch) { return ran("cusolverDnXsyevBatched", h, status, batch); }
int FN(cusolverDnXgeev_bufferSize)(void *h, void *p, int left, int right, i64 n, int type, const void *a, i64 lda, int w_type, const void *w, int vl_type, const void *vl, i64 ldvl, int vr_type, const void *vr, i64 ldvr, int compute, size_t *d, size_t *host) {
  // The eigenvalues of a Hessenberg matrix are found on the host: a copy of the matrix there.
  sizes(d, host, geev(n), compute);
  *host = (size_t)(n * n * element(compute));
  return 0;
}
int FN(cusolverDnXgeev)(void *h, void *p, int left, int right, i64 n, int type, void *a, i64 lda, int w_type, void *w, int vl_type, void *vl, i64 ldvl, int vr_type, void *vr, i64 ldvr, int compute, void *work, size_t bytes, void *host, size_t host_bytes, int *status) { return ran("cusolverDnXgeev", h, status, 1); }
int FN(cusolverDnXsytrs_bufferSize)(void *h, int uplo, i64 n, i64 nrhs, int type, const void *a, i64 lda, const i64 *pivots, int b_type, void *b, i64 ldb, size_t *d, size_t *host) { return sizes(d, host, 0, type); }
int FN(cusolverDnXsytrs)(void *h, int uplo, i64 n, i64 nrhs, int type, const void *a, i64 lda, const i64 *pivots, int b_type, void *b, i64 ldb, void *work, size_t bytes, void *host, size_t host_bytes, int *status) { return ran("cusolverDnXsytrs", h, status, 1); }
