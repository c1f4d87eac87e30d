// cuSPARSE and cuSPARSELt: descriptors, buffer sizes, and the counts of nonzeros that a program reads.
// Products are not computed. Signatures: cuSPARSE's and cuSPARSELt's documentation.
//
// A model: the sizes of buffers. The documentation gives what some are proportional to (the number of
// nonzeros for a solver's analysis), and no factors.
#include "native.h"

typedef int64_t i64;
enum { NOT_INITIALIZED = 1, ALLOC_FAILED = 2, BAD_VALUE = 3 };
static i64 most(i64 a, i64 b) { return a > b ? a : b; }

// --- handles and settings
int FN(cusparseCreate)(handle **out) { if (ensure_context(current_device())) return NOT_INITIALIZED; *out = new_handle(); return *out ? 0 : ALLOC_FAILED; }
int FN(cusparseDestroy)(void *h) { drop_handle(h); return 0; }
int FN(cusparseSetStream)(handle *h, void *s) { if (!is_handle(h)) return NOT_INITIALIZED; h->stream = s; return 0; }
int FN(cusparseGetStream)(handle *h, void **s) { if (!is_handle(h)) return NOT_INITIALIZED; *s = h->stream; return 0; }
int FN(cusparseSetPointerMode)(handle *h, int mode) { if (!is_handle(h)) return NOT_INITIALIZED; h->numbers[0] = mode; return 0; }
int FN(cusparseGetPointerMode)(handle *h, int *mode) { if (!is_handle(h)) return NOT_INITIALIZED; *mode = (int)h->numbers[0]; return 0; }
int FN(cusparseGetVersion)(void *h, int *version) { *version = 12600; return 0; }
int FN(cusparseGetProperty)(int type, int *value) { *value = type == 0 ? 12 : type == 1 ? 6 : 0; return 0; }
static const char *const names[] = {"CUSPARSE_STATUS_SUCCESS", "CUSPARSE_STATUS_NOT_INITIALIZED", "CUSPARSE_STATUS_ALLOC_FAILED", "CUSPARSE_STATUS_INVALID_VALUE", "CUSPARSE_STATUS_ARCH_MISMATCH",
  "CUSPARSE_STATUS_MAPPING_ERROR", "CUSPARSE_STATUS_EXECUTION_FAILED", "CUSPARSE_STATUS_INTERNAL_ERROR", "CUSPARSE_STATUS_MATRIX_TYPE_NOT_SUPPORTED", "CUSPARSE_STATUS_ZERO_PIVOT",
  "CUSPARSE_STATUS_NOT_SUPPORTED", "CUSPARSE_STATUS_INSUFFICIENT_RESOURCES"};
const char *FN(cusparseGetErrorName)(int status) { return status >= 0 && status < (int)(sizeof names / sizeof *names) ? names[status] : "unrecognized error code"; }
const char *FN(cusparseGetErrorString)(int status) { return FN(cusparseGetErrorName)(status); }

static int ran(const char *name, void *h) { return library_call(name, is_handle(h) ? ((handle *)h)->stream : NULL); }
#define RAN(name, ...) int FN(name)(void *h, ##__VA_ARGS__) { return ran(#name, h); }
#define OBJECT(create, destroy) int FN(create)(handle **out) { *out = new_handle(); return *out ? 0 : ALLOC_FAILED; } int FN(destroy)(void *p) { drop_handle(p); return 0; }
OBJECT(cusparseCreateMatDescr, cusparseDestroyMatDescr)
OBJECT(cusparseCreateBsrsv2Info, cusparseDestroyBsrsv2Info)
OBJECT(cusparseCreateBsrsm2Info, cusparseDestroyBsrsm2Info)
OBJECT(cusparseSpGEMM_createDescr, cusparseSpGEMM_destroyDescr)
OBJECT(cusparseSpSV_createDescr, cusparseSpSV_destroyDescr)
OBJECT(cusparseSpSM_createDescr, cusparseSpSM_destroyDescr)
#define MATRIX_SETTING(name, slot, preset) \
  int FN(cusparseSetMat##name)(handle *d, int value) { d->numbers[slot] = value; return 0; } \
  int FN(cusparseGetMat##name)(const handle *d) { return (int)d->numbers[slot]; }
MATRIX_SETTING(Type, 0, 0) MATRIX_SETTING(FillMode, 1, 0) MATRIX_SETTING(DiagType, 2, 0) MATRIX_SETTING(IndexBase, 3, 0)

// --- matrices of the generic interface
enum { ROWS, COLUMNS, NONZEROS, OFFSETS, INDICES, VALUES, INDEX_TYPE, BASE, FORMAT, VALUE_TYPE };
enum { CSR, CSC, COO, DENSE };
enum { INDEX_32 = 2, INDEX_64 = 3 };   // cusparseIndexType_t
static int sparse(handle **out, i64 rows, i64 columns, i64 nonzeros, const void *offsets, const void *indices, const void *values, int index_type, int base, int value_type, int format) {
  if (rows < 0 || columns < 0 || nonzeros < 0) return BAD_VALUE;
  handle *h = new_handle();
  if (!h) return ALLOC_FAILED;
  const i64 all[] = {rows, columns, nonzeros, (i64)offsets, (i64)indices, (i64)values, index_type, base, format, value_type};
  memcpy(h->numbers, all, sizeof all);
  *out = h;
  return 0;
}
int FN(cusparseCreateCsr)(handle **out, i64 rows, i64 columns, i64 nonzeros, void *offsets, void *indices, void *values, int offset_type, int index_type, int base, int type) { return sparse(out, rows, columns, nonzeros, offsets, indices, values, index_type, base, type, CSR); }
int FN(cusparseCreateConstCsr)(handle **out, i64 rows, i64 columns, i64 nonzeros, const void *offsets, const void *indices, const void *values, int offset_type, int index_type, int base, int type) { return sparse(out, rows, columns, nonzeros, offsets, indices, values, index_type, base, type, CSR); }
int FN(cusparseCreateCsc)(handle **out, i64 rows, i64 columns, i64 nonzeros, void *offsets, void *indices, void *values, int offset_type, int index_type, int base, int type) { return sparse(out, rows, columns, nonzeros, offsets, indices, values, index_type, base, type, CSC); }
int FN(cusparseCreateCoo)(handle **out, i64 rows, i64 columns, i64 nonzeros, void *row_indices, void *indices, void *values, int index_type, int base, int type) { return sparse(out, rows, columns, nonzeros, row_indices, indices, values, index_type, base, type, COO); }
int FN(cusparseDestroySpMat)(void *p) { drop_handle(p); return 0; }
int FN(cusparseCreateDnMat)(handle **out, i64 rows, i64 columns, i64 leading, void *values, int type, int order) { return sparse(out, rows, columns, rows * columns, NULL, NULL, values, 0, 0, type, DENSE); }
int FN(cusparseCreateConstDnMat)(handle **out, i64 rows, i64 columns, i64 leading, const void *values, int type, int order) { return sparse(out, rows, columns, rows * columns, NULL, NULL, values, 0, 0, type, DENSE); }
int FN(cusparseDestroyDnMat)(void *p) { drop_handle(p); return 0; }
int FN(cusparseCreateDnVec)(handle **out, i64 size, void *values, int type) { return sparse(out, size, 1, size, NULL, NULL, values, 0, 0, type, DENSE); }
int FN(cusparseCreateConstDnVec)(handle **out, i64 size, const void *values, int type) { return sparse(out, size, 1, size, NULL, NULL, values, 0, 0, type, DENSE); }
int FN(cusparseDestroyDnVec)(void *p) { drop_handle(p); return 0; }
int FN(cusparseCsrSetPointers)(handle *m, void *offsets, void *indices, void *values) {
  if (!is_handle(m)) return BAD_VALUE;
  m->numbers[OFFSETS] = (i64)offsets; m->numbers[INDICES] = (i64)indices; m->numbers[VALUES] = (i64)values;
  return 0;
}
int FN(cusparseSpMatGetSize)(const handle *m, i64 *rows, i64 *columns, i64 *nonzeros) {
  if (!is_handle(m)) return BAD_VALUE;
  *rows = m->numbers[ROWS]; *columns = m->numbers[COLUMNS]; *nonzeros = m->numbers[NONZEROS];
  return 0;
}
int FN(cusparseCsrSetStridedBatch)(void *m, int batch, i64 offsets, i64 values) { return is_handle(m) ? 0 : BAD_VALUE; }
int FN(cusparseDnMatSetStridedBatch)(void *m, int batch, i64 stride) { return is_handle(m) ? 0 : BAD_VALUE; }
int FN(cusparseSpMatSetAttribute)(void *m, int attribute, void *value, size_t bytes) { return is_handle(m) ? 0 : BAD_VALUE; }

// --- products and solvers
static size_t rows_of(const handle *m) { return is_handle(m) ? (size_t)m->numbers[ROWS] : 0; }
static size_t nonzeros_of(const handle *m) { return is_handle(m) ? (size_t)m->numbers[NONZEROS] : 0; }
int FN(cusparseSpMV_bufferSize)(void *h, int op, const void *alpha, const handle *a, const handle *x, const void *beta, const handle *y, int type, int algorithm, size_t *bytes) { modelled(MODEL_SPARSE); *bytes = 8 * rows_of(a); return 0; }
RAN(cusparseSpMV, int op, const void *alpha, void *a, void *x, const void *beta, void *y, int type, int algorithm, void *buffer)
int FN(cusparseSpMM_bufferSize)(void *h, int op, int op_b, const void *alpha, const handle *a, const handle *b, const void *beta, const handle *c, int type, int algorithm, size_t *bytes) { modelled(MODEL_SPARSE); *bytes = 8 * rows_of(a); return 0; }
RAN(cusparseSpMM, int op, int op_b, const void *alpha, void *a, void *b, const void *beta, void *c, int type, int algorithm, void *buffer)
int FN(cusparseSDDMM_bufferSize)(void *h, int op, int op_b, const void *alpha, const handle *a, const handle *b, const void *beta, const handle *c, int type, int algorithm, size_t *bytes) { modelled(MODEL_SPARSE); *bytes = 0; return 0; }
RAN(cusparseSDDMM_preprocess, int op, int op_b, const void *alpha, void *a, void *b, const void *beta, void *c, int type, int algorithm, void *buffer)
RAN(cusparseSDDMM, int op, int op_b, const void *alpha, void *a, void *b, const void *beta, void *c, int type, int algorithm, void *buffer)
int FN(cusparseSpSV_bufferSize)(void *h, int op, const void *alpha, const handle *a, void *x, void *y, int type, int algorithm, void *d, size_t *bytes) { modelled(MODEL_SPARSE); *bytes = 4 * nonzeros_of(a) + 8 * rows_of(a); return 0; }
RAN(cusparseSpSV_analysis, int op, const void *alpha, void *a, void *x, void *y, int type, int algorithm, void *d, void *buffer)
RAN(cusparseSpSV_solve, int op, const void *alpha, void *a, void *x, void *y, int type, int algorithm, void *d)
int FN(cusparseSpSM_bufferSize)(void *h, int op, int op_b, const void *alpha, const handle *a, const handle *b, void *c, int type, int algorithm, void *d, size_t *bytes) { modelled(MODEL_SPARSE); *bytes = 4 * nonzeros_of(a) + 8 * rows_of(a) + 8 * nonzeros_of(b); return 0; }
RAN(cusparseSpSM_analysis, int op, int op_b, const void *alpha, void *a, void *b, void *c, int type, int algorithm, void *d, void *buffer)
RAN(cusparseSpSM_solve, int op, int op_b, const void *alpha, void *a, void *b, void *c, int type, int algorithm, void *d)

// The nonzeros of a product or sum decide sizes on the host, so their pattern is found from the
// indices as memory holds them; indices out of bounds, which only memory without values holds, are left out.
typedef struct { i64 rows, columns, nonzeros; const void *offsets, *indices; bool wide; i64 base; } pattern;
static i64 at(const pattern *p, const void *list, i64 i) { return (p->wide ? ((const i64 *)list)[i] : ((const int32_t *)list)[i]) - p->base; }
static void span(const pattern *p, i64 row, i64 *begin, i64 *end) {
  *begin = most(at(p, p->offsets, row), 0);
  *end = at(p, p->offsets, row + 1);
  if (*end > p->nonzeros) *end = p->nonzeros;
}
static bool readable(const pattern *p) { return p->offsets && range_of(p->offsets, NULL) && (!p->nonzeros || (p->indices && range_of(p->indices, NULL))); }
static pattern pattern_of(const handle *m) {
  const i64 *n = m->numbers;
  return (pattern){n[ROWS], n[COLUMNS], n[NONZEROS], (const void *)n[OFFSETS], (const void *)n[INDICES], n[INDEX_TYPE] == INDEX_64, n[BASE]};
}
// Offsets of the result's rows go to `offsets`, where that is given. -1 without memory for it.
static i64 merged(const pattern *a, const pattern *b, bool product, int32_t *offsets, i64 base) {
  i64 width = most(b->columns, 1), total = 0;
  i64 *seen = calloc((size_t)width, sizeof *seen);   // the last row that has the column, from 1
  if (!seen) return -1;
  for (i64 row = 0; row < a->rows; row++) {
    if (offsets) offsets[row] = (int32_t)(total + base);
    i64 begin, end;
    span(a, row, &begin, &end);
    for (i64 i = begin; i < end; i++) {
      i64 column = at(a, a->indices, i);
      if (column < 0 || column >= a->columns) continue;
      if (!product) {
        if (column < width && seen[column] != row + 1) { seen[column] = row + 1; total++; }
        continue;
      }
      if (column >= b->rows) continue;
      i64 first, last;
      span(b, column, &first, &last);
      for (i64 k = first; k < last; k++) {
        i64 target = at(b, b->indices, k);
        if (target >= 0 && target < width && seen[target] != row + 1) { seen[target] = row + 1; total++; }
      }
    }
    if (product) continue;
    span(b, row, &begin, &end);
    for (i64 i = begin; i < end; i++) {
      i64 column = at(b, b->indices, i);
      if (column >= 0 && column < width && seen[column] != row + 1) { seen[column] = row + 1; total++; }
    }
  }
  if (offsets) offsets[a->rows] = (int32_t)(total + base);
  free(seen);
  return total;
}
int FN(cusparseSpGEMM_workEstimation)(void *h, int op, int op_b, const void *alpha, const handle *a, const handle *b, const void *beta, handle *c, int type, int algorithm, void *d, size_t *bytes, void *buffer) {
  if (!buffer) { modelled(MODEL_SPARSE); *bytes = 8 * (rows_of(a) + 1) + 4 * nonzeros_of(a); return 0; }
  return ran("cusparseSpGEMM_workEstimation", h);
}
int FN(cusparseSpGEMM_compute)(void *h, int op, int op_b, const void *alpha, const handle *a, const handle *b, const void *beta, handle *c, int type, int algorithm, void *d, size_t *bytes, void *buffer) {
  if (!is_handle(a) || !is_handle(b) || !is_handle(c)) return BAD_VALUE;
  if (!buffer) { *bytes = 16 * (nonzeros_of(a) + nonzeros_of(b)); if (*bytes) return 0; }
  pattern left = pattern_of(a), right = pattern_of(b);
  i64 found = readable(&left) && readable(&right) ? merged(&left, &right, true, NULL, 0) : 0;
  if (found < 0) return ALLOC_FAILED;
  c->numbers[NONZEROS] = found;
  return ran("cusparseSpGEMM_compute", h);
}
RAN(cusparseSpGEMM_copy, int op, int op_b, const void *alpha, void *a, void *b, const void *beta, void *c, int type, int algorithm, void *d)

// --- the older interface: sums of CSR matrices, block matrices, conversions
#define SUM(T) \
int FN(cusparse##T##csrgeam2_bufferSizeExt)(void *h, int m, int n, const void *alpha, void *da, int na, const void *va, const int *oa, const int *ia, const void *beta, void *db, int nb, const void *vb, const int *ob, const int *ib, void *dc, const void *vc, const int *oc, const int *ic, size_t *bytes) { modelled(MODEL_SPARSE); *bytes = 4 * ((size_t)m + 1); return 0; } \
RAN(cusparse##T##csrgeam2) \
int FN(cusparse##T##bsrsv2_bufferSize)(void *h, int dir, int op, int mb, int nnzb, void *d, void *values, const int *offsets, const int *indices, int block, void *info, int *bytes) { modelled(MODEL_SPARSE); *bytes = 4 * (nnzb + mb + 1); return 0; } \
RAN(cusparse##T##bsrsv2_analysis) RAN(cusparse##T##bsrsv2_solve) \
int FN(cusparse##T##bsrsm2_bufferSize)(void *h, int dir, int op, int op_x, int mb, int n, int nnzb, void *d, void *values, const int *offsets, const int *indices, int block, void *info, int *bytes) { modelled(MODEL_SPARSE); *bytes = 4 * (nnzb + mb + 1); return 0; } \
RAN(cusparse##T##bsrsm2_analysis) RAN(cusparse##T##bsrsm2_solve) RAN(cusparse##T##bsrmm) RAN(cusparse##T##bsrmv)
SUM(S) SUM(D) SUM(C) SUM(Z)
int FN(cusparseXcsrgeam2Nnz)(handle *h, int m, int n, const handle *da, int na, const int *oa, const int *ia, const handle *db, int nb, const int *ob, const int *ib, const handle *dc, int *offsets, int *total, void *work) {
  pattern a = {m, n, na, oa, ia, false, is_handle(da) ? da->numbers[3] : 0}, b = {m, n, nb, ob, ib, false, is_handle(db) ? db->numbers[3] : 0};
  i64 found = readable(&a) && readable(&b) && range_of(offsets, NULL) ? merged(&a, &b, false, offsets, is_handle(dc) ? dc->numbers[3] : 0) : 0;
  if (found < 0) return ALLOC_FAILED;
  *total = (int)found;   // host or device memory: both are this process's
  return ran("cusparseXcsrgeam2Nnz", h);
}
int FN(cusparseXbsrsv2_zeroPivot)(void *h, void *info, int *position) { *position = -1; return 0; }   // none was found
int FN(cusparseXbsrsm2_zeroPivot)(void *h, void *info, int *position) { *position = -1; return 0; }
RAN(cusparseXcoo2csr, const int *rows, int nonzeros, int m, int *offsets, int base)
RAN(cusparseXcsr2coo, const int *offsets, int nonzeros, int m, int *rows, int base)
RAN(cusparseCreateIdentityPermutation, int n, int *out)
int FN(cusparseXcoosort_bufferSizeExt)(void *h, int m, int n, int nonzeros, const int *rows, const int *columns, size_t *bytes) { modelled(MODEL_SPARSE); *bytes = 16 * (size_t)most(nonzeros, 0); return 0; }
RAN(cusparseXcoosortByRow, int m, int n, int nonzeros, int *rows, int *columns, int *order, void *buffer)
RAN(cusparseXcoosortByColumn, int m, int n, int nonzeros, int *rows, int *columns, int *order, void *buffer)
int FN(cusparseXcsrsort_bufferSizeExt)(void *h, int m, int n, int nonzeros, const int *offsets, const int *columns, size_t *bytes) { modelled(MODEL_SPARSE); *bytes = 16 * (size_t)most(nonzeros, 0); return 0; }
RAN(cusparseXcsrsort, int m, int n, int nonzeros, void *d, const int *offsets, int *columns, int *order, void *buffer)

// --- cuSPARSELt. Its objects are opaque bytes of the caller's, at least 512: what is needed is kept there.
typedef struct { uint32_t magic; int type; i64 rows, columns; bool structured; } lt_matrix;
#define LT_MAGIC 0x73704c74u
int FN(cusparseLtInit)(void *h) { return ensure_context(current_device()) ? NOT_INITIALIZED : 0; }
int FN(cusparseLtDestroy)(const void *h) { return 0; }
int FN(cusparseLtGetVersion)(const void *h, int *version) { machine_count(); *version = cuda_version >= 13000 ? 801 : 602; return 0; }
static int lt_matrix_init(lt_matrix *m, i64 rows, i64 columns, int type, bool structured) { *m = (lt_matrix){LT_MAGIC, type, rows, columns, structured}; return 0; }
int FN(cusparseLtDenseDescriptorInit)(const void *h, lt_matrix *m, i64 rows, i64 columns, i64 leading, uint32_t alignment, int type, int order) { return lt_matrix_init(m, rows, columns, type, false); }
int FN(cusparseLtStructuredDescriptorInit)(const void *h, lt_matrix *m, i64 rows, i64 columns, i64 leading, uint32_t alignment, int type, int order, int sparsity) { return lt_matrix_init(m, rows, columns, type, true); }
int FN(cusparseLtMatDescriptorDestroy)(const void *m) { return 0; }
int FN(cusparseLtMatmulDescriptorInit)(const void *h, void *d, int op_a, int op_b, const void *a, const void *b, const void *c, const void *out, int compute) { return 0; }
int FN(cusparseLtMatmulDescSetAttribute)(const void *h, void *d, int attribute, const void *value, size_t bytes) { return 0; }
int FN(cusparseLtMatmulAlgSelectionInit)(const void *h, void *selection, const void *d, int algorithm) { return 0; }
int FN(cusparseLtMatmulAlgSetAttribute)(const void *h, void *selection, int attribute, const void *value, size_t bytes) { return 0; }
int FN(cusparseLtMatmulAlgGetAttribute)(const void *h, const void *selection, int attribute, void *value, size_t bytes) {
  if (bytes != 4) return BAD_VALUE;
  *(int *)value = attribute == 1 || attribute == 3;   // ALG_CONFIG_MAX_ID: one algorithm; SPLIT_K: 1
  return 0;
}
int FN(cusparseLtMatmulPlanInit)(const void *h, void *plan, const void *d, const void *selection) { return 0; }
int FN(cusparseLtMatmulPlanDestroy)(const void *plan) { return 0; }
int FN(cusparseLtMatmulGetWorkspace)(const void *h, const void *plan, size_t *bytes) { modelled(MODEL_STRUCTURED_SPARSE); *bytes = 0; return 0; }
static int lt_ran(const char *name, void *const *streams, int count) { return library_call(name, count > 0 && streams ? streams[0] : NULL); }
int FN(cusparseLtMatmul)(const void *h, const void *plan, const void *alpha, const void *a, const void *b, const void *beta, const void *c, void *out, void *work, void **streams, int count) { return lt_ran("cusparseLtMatmul", streams, count); }
int FN(cusparseLtMatmulSearch)(const void *h, void *plan, const void *alpha, const void *a, const void *b, const void *beta, const void *c, void *out, void *work, void **streams, int count) { return lt_ran("cusparseLtMatmulSearch", streams, count); }
// Two of four elements (one of two of 32 bits) and two bits for the place of each kept one.
int FN(cusparseLtSpMMACompressedSize2)(const void *h, const lt_matrix *m, size_t *bytes, size_t *buffer) {
  if (m->magic != LT_MAGIC || !m->structured) return BAD_VALUE;
  size_t elements = (size_t)(m->rows * m->columns);
  bool byte = m->type == 3 || m->type == 8 || m->type == 28 || m->type == 29;   // R_8I, R_8U, R_8F_E4M3, R_8F_E5M2
  size_t width = m->type == 0 ? 4 : byte ? 1 : 2;
  *bytes = elements / 2 * width + elements / 8;
  *buffer = 0;
  return 0;
}
int FN(cusparseLtSpMMACompress2)(const void *h, const void *m, int structured, int op, const void *dense, void *out, void *buffer, void *stream) { return library_call("cusparseLtSpMMACompress2", stream); }
