// CUPTI: programs subscribe and enable kinds of activity; no kernel runs, so there are no records.
#include "native.h"
#include <time.h>

enum { CUPTI_INVALID_PARAMETER = 1, CUPTI_NO_RECORD = 12, CUPTI_QUEUE_EMPTY = 18 };
int FN(cuptiGetVersion)(uint32_t *version) {   // CUPTI_API_VERSION: 130001 in CUDA 13.0, 24 in CUDA 12.4
  machine_count();
  *version = cuda_version >= 13000 ? (uint32_t)(cuda_version * 10 + 1) : 24;
  return SUCCESS;
}
int FN(cuptiSubscribe)(handle **out, void *callback, void *data) { *out = new_handle(); return *out ? SUCCESS : CUPTI_INVALID_PARAMETER; }
int FN(cuptiUnsubscribe)(void *subscriber) { drop_handle(subscriber); return SUCCESS; }
int FN(cuptiActivityGetNextRecord)(uint8_t *buffer, size_t valid, void **record) { *record = NULL; return CUPTI_NO_RECORD; }
int FN(cuptiActivityGetNumDroppedRecords)(void *context, uint32_t stream, size_t *count) { *count = 0; return SUCCESS; }
int FN(cuptiGetTimestamp)(uint64_t *ns) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  *ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
  return SUCCESS;
}
int FN(cuptiGetDeviceId)(void *context, uint32_t *out) { *out = (uint32_t)current_device(); return SUCCESS; }
int FN(cuptiGetCallbackName)(int domain, uint32_t id, const char **name) { *name = "unknown"; return SUCCESS; }
int FN(cuptiGetResultString)(int status, const char **text) {
  *text = status == SUCCESS ? "CUPTI_SUCCESS" : status == 27 ? "CUPTI_ERROR_NOT_SUPPORTED" : status == CUPTI_NO_RECORD ? "CUPTI_ERROR_MAX_LIMIT_REACHED" : "CUPTI_ERROR_UNKNOWN";
  return SUCCESS;
}
// A stack of numbers for each kind and thread: Pop returns the one that Push put there last.
#define KINDS 8
#define DEPTH 64
static __thread struct { uint64_t ids[DEPTH]; unsigned count; } pushed[KINDS];
int FN(cuptiActivityPushExternalCorrelationId)(int kind, uint64_t id) {
  if (kind < 0 || kind >= KINDS) return CUPTI_INVALID_PARAMETER;
  if (pushed[kind].count < DEPTH) pushed[kind].ids[pushed[kind].count] = id;
  pushed[kind].count++;
  return SUCCESS;
}
int FN(cuptiActivityPopExternalCorrelationId)(int kind, uint64_t *id) {
  if (kind < 0 || kind >= KINDS) return CUPTI_INVALID_PARAMETER;
  if (!pushed[kind].count) return CUPTI_QUEUE_EMPTY;
  pushed[kind].count--;
  if (id) *id = pushed[kind].count < DEPTH ? pushed[kind].ids[pushed[kind].count] : 0;
  return SUCCESS;
}
