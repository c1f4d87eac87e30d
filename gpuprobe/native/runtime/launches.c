// How often each kernel was launched, by configuration, by place in the program and by phase.
//
// Launches are added up where they happen: a training step has thousands, of a few hundred kinds. Python
// numbers places and phases (gpuprobe/sampler/tracing/launches.py); a place belongs to a thread, since an
// operator launches its kernels in the thread that runs it, and the phase to the process.
#include "native.h"

atomic_bool counting;
static atomic_uint phase;
static __thread uint32_t place;
static launch_row *rows;
static size_t n_rows, room;
static uint32_t *slots;   // of an open-addressed table: an index into rows plus one, or 0
static size_t n_slots;    // a power of two
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// A child has none of its parent's launches, nor the threads that may hold the lock.
static void in_child(void) {
  pthread_mutex_init(&lock, NULL);
  atomic_store(&counting, false);
  rows = NULL; slots = NULL;
  n_rows = room = n_slots = 0;
}
__attribute__((constructor)) static void at_fork(void) { pthread_atfork(NULL, NULL, in_child); }

static uint64_t hash(const launch_row *row) {   // FNV-1a over the key, in words
  uint64_t h = 1469598103934665603u;
  const uint32_t *word = (const uint32_t *)&row->name;
  for (size_t i = 0; i < (sizeof *row - offsetof(launch_row, name)) / sizeof *word; i++) h = (h ^ word[i]) * 1099511628211u;
  return h ^ h >> 32;
}
static bool same(const launch_row *a, const launch_row *b) { return !memcmp(&a->name, &b->name, sizeof *a - offsetof(launch_row, name)); }
static bool grow(void) {
  size_t more = room ? room * 2 : 1024;
  launch_row *moved = realloc(rows, more * sizeof *moved);
  if (!moved) return false;
  rows = moved; room = more;
  uint32_t *made = calloc(more * 2, sizeof *made);
  if (!made) return false;
  free(slots);
  slots = made; n_slots = more * 2;
  for (size_t i = 0; i < n_rows; i++) {
    size_t at = hash(&rows[i]) & (n_slots - 1);
    while (slots[at]) at = (at + 1) & (n_slots - 1);
    slots[at] = (uint32_t)i + 1;
  }
  return true;
}
void launch_add(launch_row row) {
  row.count = 1;
  row.place = place;
  row.phase = atomic_load_explicit(&phase, memory_order_relaxed);
  pthread_mutex_lock(&lock);
  if (n_rows < room || grow()) {
    size_t at = hash(&row) & (n_slots - 1);
    while (slots[at] && !same(&rows[slots[at] - 1], &row)) at = (at + 1) & (n_slots - 1);
    if (slots[at]) rows[slots[at] - 1].count++;
    else { rows[n_rows] = row; slots[at] = (uint32_t)++n_rows; }
  }
  pthread_mutex_unlock(&lock);
}
// Begin to count, from nothing, or end that.
void FN(launches_count)(bool on) {
  pthread_mutex_lock(&lock);
  n_rows = 0;
  if (n_slots) memset(slots, 0, n_slots * sizeof *slots);
  pthread_mutex_unlock(&lock);
  atomic_store(&counting, on);
}
// What this thread launches from now on is launched from there; returns the place before.
uint32_t FN(launches_place)(uint32_t number) { uint32_t before = place; place = number; return before; }
void FN(launches_phase)(uint32_t number) { atomic_store_explicit(&phase, number, memory_order_relaxed); }
size_t FN(launches_row_size)(void) { return sizeof(launch_row); }
// Moves all rows to `out` if there is room for them, and returns how many there are.
size_t FN(launches_take)(launch_row *out, size_t most) {
  pthread_mutex_lock(&lock);
  size_t n = n_rows;
  if (n <= most) {
    if (n) memcpy(out, rows, n * sizeof *out);
    n_rows = 0;
    if (n_slots) memset(slots, 0, n_slots * sizeof *slots);
  }
  pthread_mutex_unlock(&lock);
  return n;
}
