// What was called, in order: for tests, for the report's launches, and to prove that nothing waits.
#include "native.h"
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

// Two logs: that of tests and benchmarks, and that of a recording (gpuprobe/sampler/tracing/work.py), which
// also gets the operators, by the number that Python gave them.
typedef struct {
  log_entry *entries;
  size_t count, room, limit;
  uint64_t dropped;
} call_log;
static call_log logs[2];
atomic_uint logging;   // one bit for each log that is on
static __thread uint32_t work, thread;
uint32_t current_work(void) { return work; }
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char **unanswered;
static size_t n_unanswered;

static void append(call_log *l, const log_entry *entry) {
  if (l->count == l->room && l->room < l->limit) {
    size_t more = l->room ? l->room * 2 : 4096;
    log_entry *moved = realloc(l->entries, more * sizeof *moved);
    if (moved) { l->entries = moved; l->room = more; }
  }
  if (l->count < l->room) l->entries[l->count++] = *entry; else l->dropped++;
}
void log_add(log_entry entry) {
  struct timespec now;
  if (!thread) thread = (uint32_t)syscall(SYS_gettid);
  clock_gettime(CLOCK_MONOTONIC, &now);
  entry.time_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
  entry.thread = thread;
  if (!entry.work) entry.work = work;
  pthread_mutex_lock(&lock);
  unsigned on = atomic_load_explicit(&logging, memory_order_relaxed);
  bool call = entry.kind != LOG_OPERATOR && entry.kind != LOG_GRAPH_NODE;   // one of the program's
  for (int i = call ? 0 : 1; i < 2; i++) if (on >> i & 1) append(&logs[i], &entry);
  pthread_mutex_unlock(&lock);
}
// A child logs nothing, and has none of the threads that may hold the lock.
static void in_child(void) {
  pthread_mutex_init(&lock, NULL);
  thread = 0;
  atomic_store(&logging, 0);
  logs[0].count = logs[1].count = 0;
}
__attribute__((constructor)) static void at_fork(void) { pthread_atfork(NULL, NULL, in_child); }
static void start(int which, size_t most) { pthread_mutex_lock(&lock); logs[which].limit = most; logs[which].count = 0; logs[which].dropped = 0; pthread_mutex_unlock(&lock); atomic_fetch_or(&logging, 1u << which); }
static void stop(int which) { atomic_fetch_and(&logging, ~(1u << which)); }
static size_t take(call_log *l, log_entry *out, size_t most) {
  pthread_mutex_lock(&lock);
  size_t n = l->count < most ? l->count : most;
  memcpy(out, l->entries, n * sizeof *out);
  memmove(l->entries, l->entries + n, (l->count - n) * sizeof *l->entries);
  l->count -= n;
  pthread_mutex_unlock(&lock);
  return n;
}
static size_t length(call_log *l) { pthread_mutex_lock(&lock); size_t n = l->count; pthread_mutex_unlock(&lock); return n; }
// Start: at most `most` entries are kept until they are taken; later ones are counted as dropped.
void FN(log_start)(size_t most) { start(0, most); }
void FN(log_stop)(void) { stop(0); }
size_t FN(log_entry_size)(void) { return sizeof(log_entry); }
// Moves up to `most` entries to `out`, oldest first, and returns how many.
size_t FN(log_take)(log_entry *out, size_t most) { return take(&logs[0], out, most); }
size_t FN(log_count)(void) { return length(&logs[0]); }
unsigned long long FN(log_dropped)(void) { return logs[0].dropped; }

void FN(work_start)(size_t most) { start(1, most); }
void FN(work_stop)(void) { stop(1); }
size_t FN(work_take)(log_entry *out, size_t most) { return take(&logs[1], out, most); }
size_t FN(work_count)(void) { return length(&logs[1]); }
unsigned long long FN(work_dropped)(void) { return logs[1].dropped; }
// What this thread does from now on is the operator of that number, which begins; returns the one before.
uint32_t FN(work_begin)(uint32_t number) {
  uint32_t before = work;
  work = number;
  if (atomic_load_explicit(&logging, memory_order_relaxed) & 2u) log_add((log_entry){.kind = LOG_OPERATOR, .device = -1});
  return before;
}
void FN(work_end)(uint32_t before) { work = before; }
// An operator of that number begins and ends, without a call.
void FN(work_note)(uint32_t number) {
  if (atomic_load_explicit(&logging, memory_order_relaxed) & 2u) log_add((log_entry){.kind = LOG_OPERATOR, .device = -1, .work = number});
}

// --- functions that are exported and not answered: see gpuprobe/native/answers.py
// Messages go to the stderr of the beginning: the program may open a file of its own as 2.
static uint64_t stderr_device, stderr_inode;
static bool stderr_is(uint64_t *device, uint64_t *inode) {
  struct stat file;
  if (fstat(2, &file)) return false;
  bool same = file.st_dev == *device && file.st_ino == *inode;
  *device = file.st_dev; *inode = file.st_ino;
  return same;
}
__attribute__((constructor)) static void note_stderr(void) { stderr_is(&stderr_device, &stderr_inode); }
static bool stderr_is_ours(void) {
  uint64_t device = stderr_device, inode = stderr_inode;
  return stderr_is(&device, &inode);
}
int refused(const char *name, int status) {
  LOG(.kind = LOG_UNANSWERED, .name = name, .device = -1);
  pthread_mutex_lock(&lock);
  bool known = false;
  for (size_t i = 0; i < n_unanswered && !known; i++) known = !strcmp(unanswered[i], name);
  if (!known) {
    char **moved = realloc(unanswered, (n_unanswered + 1) * sizeof *moved);
    if (moved) { unanswered = moved; unanswered[n_unanswered++] = strdup(name); }
  }
  pthread_mutex_unlock(&lock);
  if (!known && stderr_is_ours()) { fprintf(stderr, "gpuprobe: %s is not answered by the simulated GPU\n", name); fflush(stderr); }
  return status;
}
static atomic_uint models;
void modelled(enum model which) { atomic_fetch_or_explicit(&models, 1u << which, memory_order_relaxed); }
unsigned FN(models_used)(void) { return atomic_load(&models); }
void FN(models_forget)(void) { atomic_store(&models, 0); }
size_t FN(unanswered_count)(void) { return n_unanswered; }
const char *FN(unanswered_name)(size_t i) { return i < n_unanswered ? unanswered[i] : ""; }

// One for each kind of status, "not supported" where the library has such a number.
int FN(refuse_cuda)(const char *name, void *first) { return fail(refused(name, NOT_SUPPORTED)); }
int FN(refuse_cublas)(const char *name, void *first) { return refused(name, 15); }
int FN(refuse_cudnn)(const char *name, void *first) { return refused(name, 3000); }
int FN(refuse_cusolver)(const char *name, void *first) { return refused(name, 9); }
int FN(refuse_cusparse)(const char *name, void *first) { return refused(name, 10); }
int FN(refuse_cufft)(const char *name, void *first) { return refused(name, 16); }
int FN(refuse_curand)(const char *name, void *first) { return refused(name, 999); }
int FN(refuse_nccl)(const char *name, void *first) { return refused(name, 3); }
int FN(refuse_nvrtc)(const char *name, void *first) { return refused(name, 11); }
int FN(refuse_nvml)(const char *name, void *first) { return refused(name, 3); }
int FN(refuse_cupti)(const char *name, void *first) { return refused(name, 27); }
int FN(refuse_other)(const char *name, void *first) { return refused(name, 1); }
// Functions that return a pointer: to text about a status, or to memory, NULL if there is none.
const char *FN(refuse_text)(const char *name, void *first) { refused(name, 0); return "not answered by the simulated GPU"; }
void *FN(refuse_memory)(const char *name, void *first) { refused(name, 0); return NULL; }
// Kernels of libraries. The first argument of cuBLAS, cuSOLVER, cuSPARSE and cuDNN is a handle.
int FN(library_kernel)(const char *name, void *first) { return library_call(name, is_handle(first) ? ((handle *)first)->stream : NULL); }
int FN(succeed)(const char *name, void *first) { return SUCCESS; }
