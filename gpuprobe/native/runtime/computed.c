// Copies inside an operator whose values something else computes (gpuprobe/native/values). Kernels
// wrote nothing, so what the operator copies is no result: copies among device memory would only
// overwrite inputs, and what the host reads back is what the kernels would have written.
#include "native.h"
#include <unistd.h>

enum { SKIP_DEVICE = 1, SKIP_TO_DEVICE = 2, SKIP_TO_HOST = 4, FEED_HOST = 8 };
static __thread int mode;
static __thread unsigned long long unknown_reads;
typedef struct { size_t size; char bytes[64]; } answer;
static __thread answer answers[64];
static __thread size_t first, last;

// Begin or end such a part of this thread's work; returns the mode before.
int FN(computed_mode)(int next) { int before = mode; mode = next; return before; }
// Copies to the host that had no answer, by this thread so far. They gave zeros.
unsigned long long FN(computed_unknown_reads)(void) { return unknown_reads; }
// What the next copies of `size` bytes to the host find, in this order; `size` 0 forgets them all.
// Returns how many wait.
size_t FN(computed_answer)(const void *bytes, size_t size) {
  if (!size) { first = last = 0; return 0; }
  if (size > sizeof answers->bytes || last == sizeof answers / sizeof *answers) return 0;
  answers[last].size = size;
  memcpy(answers[last++].bytes, bytes, size);
  return last - first;
}

bool is_computed(void) { return mode != 0; }

// A process whose values should be computed, and in which gpuprobe was not started: a Python that imports no
// sitecustomize (-I, -E, -S), or a program that is not Python.
static atomic_bool begun;
void FN(values_started)(void) { atomic_store(&begun, true); }
static void check_begun(void) {
  static atomic_bool checked;
  if (atomic_exchange(&checked, true) || atomic_load(&begun) || !getenv("GPUPROBE_VALUES")) return;
  fprintf(stderr, "gpuprobe: error: process %d uses the simulated GPU without gpuprobe: its values are not computed\n", getpid());
  fflush(stderr);
}

// --- kernels that nothing computes: launched by a library outside of torch's operators
#define MOST_NAMES 256
static atomic_bool noting;
static const char *names[MOST_NAMES];
static size_t n_names;
static pthread_mutex_t names_lock = PTHREAD_MUTEX_INITIALIZER;
void FN(uncomputed_note)(bool on) {
  pthread_mutex_lock(&names_lock);
  while (on && n_names) free((void *)names[--n_names]);   // of what ran before
  pthread_mutex_unlock(&names_lock);
  atomic_store(&noting, on);
}
size_t FN(uncomputed_count)(void) { return n_names; }
const char *FN(uncomputed_name)(size_t i) { return i < n_names ? names[i] : ""; }
void launched(const char *name) {
  if (!atomic_load_explicit(&begun, memory_order_relaxed)) check_begun();
  if (mode || !atomic_load_explicit(&noting, memory_order_relaxed)) return;
  pthread_mutex_lock(&names_lock);
  size_t i = 0;
  while (i < n_names && strcmp(names[i], name)) i++;
  if (i == n_names && n_names < MOST_NAMES) names[n_names++] = strdup(name);
  pthread_mutex_unlock(&names_lock);
}

static bool on_device(const void *address) { range r; return range_of(address, &r) && r.kind == DEVICE_MEMORY; }
bool computed_copy(void *to, const void *from, size_t bytes) {
  bool to_device = on_device(to), from_device = on_device(from);
  if (from_device && !to_device) {
    if (mode & SKIP_TO_HOST) return true;
    if (!(mode & FEED_HOST)) return false;
    if (first < last && answers[first].size == bytes) {
      memcpy((void *)(uintptr_t)from, answers[first].bytes, bytes);
      memcpy(to, answers[first++].bytes, bytes);
    } else {
      memset(to, 0, bytes);
      unknown_reads++;
    }
    return true;
  }
  return from_device ? mode & SKIP_DEVICE : to_device && mode & SKIP_TO_DEVICE;
}
bool computed_fill(void) { return mode & SKIP_DEVICE; }
