// Runtime compilation: a program is its lowered names; its code is a few bytes that cuModuleLoadData accepts.
#include "native.h"

typedef struct name { char text[1024]; struct name *next; } name;
typedef struct { uint32_t magic; name *names; } program;
int FN(nvrtcVersion)(int *major, int *minor) { machine_count(); *major = cuda_version / 1000; *minor = cuda_version / 10 % 100; return 0; }
int FN(nvrtcGetNumSupportedArchs)(int *count) { *count = 8; return 0; }
int FN(nvrtcGetSupportedArchs)(int *archs) { static const int known[] = {75, 80, 86, 87, 89, 90, 100, 120}; memcpy(archs, known, sizeof known); return 0; }
int FN(nvrtcCreateProgram)(program **out, const char *source, const char *label, int count, const char *const *headers, const char *const *includes) { *out = calloc(1, sizeof **out); return *out ? 0 : 1; }
int FN(nvrtcDestroyProgram)(program **p) { for (name *n = (*p)->names, *next; n; n = next) { next = n->next; free(n); } free(*p); *p = NULL; return 0; }
int FN(nvrtcCompileProgram)(program *p, int count, const char *const *options) { return 0; }
int FN(nvrtcAddNameExpression)(program *p, const char *text) { name *n = calloc(1, sizeof *n); snprintf(n->text, sizeof n->text, "%s", text); n->next = p->names; p->names = n; return 0; }
int FN(nvrtcGetLoweredName)(program *p, const char *text, const char **out) {
  for (name *n = p->names; n; n = n->next) if (!strncmp(n->text, text, sizeof n->text - 1)) { *out = n->text; return 0; }
  return 10;   // NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID
}
#define CODE_BYTES 64
int FN(nvrtcGetCUBINSize)(program *p, size_t *bytes) { *bytes = CODE_BYTES; return 0; }
int FN(nvrtcGetCUBIN)(program *p, char *out) { memset(out, 0, CODE_BYTES); return 0; }
int FN(nvrtcGetPTXSize)(program *p, size_t *bytes) { *bytes = CODE_BYTES; return 0; }
int FN(nvrtcGetPTX)(program *p, char *out) { memset(out, 0, CODE_BYTES); return 0; }
int FN(nvrtcGetLTOIRSize)(program *p, size_t *bytes) { *bytes = CODE_BYTES; return 0; }
int FN(nvrtcGetLTOIR)(program *p, char *out) { memset(out, 0, CODE_BYTES); return 0; }
int FN(nvrtcGetProgramLogSize)(program *p, size_t *bytes) { *bytes = 1; return 0; }
int FN(nvrtcGetProgramLog)(program *p, char *out) { *out = 0; return 0; }
const char *FN(nvrtcGetErrorString)(int status) { return status ? "NVRTC_ERROR_INTERNAL_ERROR" : "NVRTC_SUCCESS"; }
