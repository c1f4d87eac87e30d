// What was called, in order: for tests, for the report's launches, and to prove that nothing waits.
#include "native.h"
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

atomic_bool logging;
static log_entry *entries;
static size_t count, room;
static size_t limit;
static uint64_t dropped;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char **unanswered;
static size_t n_unanswered;

void log_add(log_entry entry) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  entry.time_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
  entry.thread = (uint32_t)syscall(SYS_gettid);
  pthread_mutex_lock(&lock);
  if (count == room && room < limit) {
    size_t more = room ? room * 2 : 4096;
    log_entry *moved = realloc(entries, more * sizeof *moved);
    if (moved) { entries = moved; room = more; }
  }
  if (count < room) entries[count++] = entry; else dropped++;
  pthread_mutex_unlock(&lock);
}
// Start: at most `most` entries are kept until they are taken; later ones are counted as dropped.
void FN(log_start)(size_t most) { pthread_mutex_lock(&lock); limit = most; count = 0; dropped = 0; pthread_mutex_unlock(&lock); atomic_store(&logging, true); }
void FN(log_stop)(void) { atomic_store(&logging, false); }
size_t FN(log_entry_size)(void) { return sizeof(log_entry); }
// Moves up to `most` entries to `out`, oldest first, and returns how many.
size_t FN(log_take)(log_entry *out, size_t most) {
  pthread_mutex_lock(&lock);
  size_t n = count < most ? count : most;
  memcpy(out, entries, n * sizeof *out);
  memmove(entries, entries + n, (count - n) * sizeof *entries);
  count -= n;
  pthread_mutex_unlock(&lock);
  return n;
}
size_t FN(log_count)(void) { pthread_mutex_lock(&lock); size_t n = count; pthread_mutex_unlock(&lock); return n; }
unsigned long long FN(log_dropped)(void) { return dropped; }

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
