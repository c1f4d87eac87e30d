// Collectives between the processes of a job, through memory that they share. A communicator is one file
// without a name, which the process of its first rank has made and the others open through /proc. A rank
// posts what it contributes when its program calls the collective, and takes the result when something waits
// for the stream: so ranks wait where a GPU would, and nowhere else. What the ranks have called is compared
// when a result is taken; a collective that another rank calls otherwise, or never, is an error by name.
#include "native.h"
#include "exchange.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define SLOTS 256                        // calls of a rank that others have not taken
#define PAYLOADS ((off_t)1 << 40)        // where the first rank's data begins in the file; each rank has as much
#define POLL_NS 50000000l
#define MOST_RANKS 4096
#define KEPT 65536                       // calls of which it is remembered whether their results are known

typedef struct {
  atomic_ullong number;   // of the call in its sequence, set last
  exchange_call call;
  uint64_t offset, bytes;
  int unknown;
  char place[176];
} slot;
typedef struct {
  atomic_int pid, left, global;
  uint64_t started;
  atomic_ullong posted, taken;
  atomic_ullong waits;   // the number of the wait that the rank is in, 0 outside one
  char waits_for[288];   // what it waits for, and where
} member;
typedef struct { atomic_ullong sent, taken; slot slots[SLOTS]; } channel;   // from one rank to another
typedef struct { uint64_t magic; int size; atomic_int joined; atomic_uint bell; } header;
#define FILE_MAGIC 0x67706a6f62u
#define ID_MAGIC 0x6770696422ull
typedef struct { uint64_t magic; int pid, fd; uint64_t key; } identity;
_Static_assert(sizeof(identity) <= 128, "NCCL_UNIQUE_ID_BYTES");

struct exchange {
  int rank, size, fd;
  size_t mapped;
  header *h;
  member *members;
  slot *posts;          // of each rank, SLOTS
  channel *channels;    // from each rank to each rank
  unsigned long long calls, freed, *received, *freed_to;
  uint64_t next;        // free place in this rank's part of the file
  bool failed;
  int owner;            // the process: a child of it is no rank
  exchange *other;      // the next of this process
  pthread_mutex_t lock;
};
static exchange *exchanges;
typedef struct pending {
  struct pending *next;
  unsigned long long id, number;
  exchange *x;
  exchange_call call;
  void *to;
  const stream *on;
  int unknown;
  char place[176];
} pending;

atomic_int FN(collectives_pending);   // calls whose results were not taken
static pending *first_pending, **last_pending = &first_pending;
static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER, taking = PTHREAD_MUTEX_INITIALIZER;
static unsigned long long issued_ids;
static __thread unsigned long long first_here, last_here;   // of the calls that this thread has made since it began to count
static unsigned char known_results[KEPT];
static __thread bool next_unknown;
static char failure[1024];
static atomic_bool failed_now, ended, failed_at_end;   // failed_at_end: and no call of the program raises it
static int (*place_of_call)(char *, size_t);

// --- what gpuprobe sets and reads
// A function that writes where the program is, and returns the rank of this process in the whole job or -1.
void FN(collectives_place)(int (*function)(char *, size_t)) { place_of_call = function; }
// Whether what this thread sends from now on has values. Returns what it was.
bool FN(collectives_unknown)(bool unknown) { bool before = next_unknown; next_unknown = unknown; return before; }
// The first and the last call of this thread since the call of this function before; 0 if there was none.
void FN(collectives_issued)(unsigned long long out[2]) { out[0] = first_here; out[1] = last_here; first_here = last_here = 0; }

// The program has ended: torch frees what it holds, and nobody sees the errors of that.
void FN(collectives_end)(void) { atomic_store(&ended, true); }

const char *collective_failure(void) { return atomic_load(&failed_now) ? failure : NULL; }

static void report(const char *format, ...) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&lock);
  if (!atomic_load(&failed_now)) {
    va_list more;
    va_start(more, format);
    vsnprintf(failure, sizeof failure, format, more);
    va_end(more);
    atomic_store(&failed_now, true);
    if (atomic_load(&ended)) atomic_store(&failed_at_end, true);
    fprintf(stderr, "gpuprobe: error: %s\n", failure);
    fflush(stderr);
  }
  pthread_mutex_unlock(&lock);
}

// --- words
static const char *const KINDS[] = {"all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "split", "send", "recv"};
static const char *const TYPES[] = {"int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16", "float8_e4m3", "float8_e5m2"};
static const char *const OPERATIONS[] = {"sum", "product", "maximum", "minimum", "mean"};
static void describe(char *out, size_t size, const exchange_call *c) {
  const char *type = c->type >= 0 && c->type < 12 ? TYPES[c->type] : "bytes";
  bool reduces = c->kind == ALL_REDUCE || c->kind == REDUCE || c->kind == REDUCE_SCATTER;
  snprintf(out, size, "%s (%s%s%llu %s)", KINDS[c->kind], reduces ? OPERATIONS[c->op >= 0 && c->op < 5 ? c->op : 0] : "", reduces ? " of " : "", (unsigned long long)c->count, type);
}
static void where(char *out, size_t size, const char *place) { snprintf(out, size, "%s%s", *place ? " at " : "", place); }
static int global_rank(const exchange *x, int rank) { int known = atomic_load(&x->members[rank].global); return known >= 0 ? known : rank; }

// --- processes
static uint64_t started_at(int pid, char *state) {   // /proc/PID/stat: field 22, and 3
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  *state = 0;
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  ssize_t got = read(fd, text, sizeof text - 1);
  close(fd);
  if (got <= 0) return 0;
  text[got] = 0;
  char *at = strrchr(text, ')');
  if (!at) return 0;
  *state = at[2];
  uint64_t value = 0;
  int field = 3;
  for (char *word = at + 2; word && field <= 22; field++) {
    if (field == 22) value = strtoull(word, NULL, 10);
    word = strchr(word, ' ');
    if (word) word++;
  }
  return value;
}
static bool has_ended(const member *m) {
  char state;
  uint64_t now = started_at(atomic_load(&m->pid), &state);
  return !now || now != m->started || state == 'Z' || state == 'X';
}
static bool is_gone(const exchange *x, int rank) { return rank != x->rank && (atomic_load(&x->members[rank].left) || has_ended(&x->members[rank])); }

// --- waiting
static void ring(exchange *x) {
  atomic_fetch_add(&x->h->bell, 1);
  syscall(SYS_futex, &x->h->bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}
static void wait_ring(exchange *x, unsigned before) {
  struct timespec most = {0, POLL_NS};
  syscall(SYS_futex, &x->h->bell, FUTEX_WAIT, before, &most, NULL, 0);
}
// All ranks of a group that wait for each other wait forever. Seconds, in which none of them stirs:
#define STUCK_S 15
typedef struct { unsigned long long sum; time_t since; } stillness;
static bool is_stuck(const exchange *x, stillness *s) {
  unsigned long long sum = 0;
  for (int r = 0; r < x->size; r++) {
    unsigned long long waits = atomic_load(&x->members[r].waits);
    if (!waits) { s->since = 0; return false; }
    sum += waits;
  }
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  if (sum != s->sum || !s->since) { s->sum = sum; s->since = now.tv_sec; }
  return now.tv_sec - s->since >= STUCK_S;
}
static void report_stuck(const exchange *x) {
  char text[900] = "";
  for (int r = 0; r < x->size && r < 4; r++) {
    size_t used = strlen(text);
    snprintf(text + used, sizeof text - used, "%s rank %d waits for %s", r ? "," : "", global_rank(x, r), x->members[r].waits_for);
  }
  report("all ranks of a group wait for each other:%s%s", text, x->size > 4 ? ", and so on" : "");
}
// Whether a rank has ended that this process knows from another group and that has not joined this one: the global
// number of it, or -1. Where others may still join, only after a while: the group may be theirs.
#define JOIN_S 30
static int missed(exchange *x, time_t since) {
  int gone = -1;
  bool others = false;
  pthread_mutex_lock(&list_lock);
  for (const exchange *o = exchanges; o; o = o->other) {
    for (int r = 0; r < o->size; r++) {
      int pid = atomic_load(&o->members[r].pid);
      bool joined = !pid || pid == getpid();
      for (int i = 0; i < x->size && !joined; i++) joined = atomic_load(&x->members[i].pid) == pid;
      if (joined) continue;
      if (has_ended(&o->members[r])) gone = global_rank(o, r);
      else others = true;
    }
  }
  pthread_mutex_unlock(&list_lock);
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return others && now.tv_sec - since < JOIN_S ? -1 : gone;
}
typedef bool (*condition)(exchange *x, const pending *p, int *missing);   // missing: the rank that is waited for
// Whether the condition holds, after any time; false where the rank that is waited for is gone.
static bool wait_until(exchange *x, const pending *p, condition holds, int *missing) {
  static atomic_ullong waits;
  member *m = &x->members[x->rank];
  stillness still = {0, 0};
  struct timespec began;
  clock_gettime(CLOCK_MONOTONIC, &began);
  bool result, waiting = false;
  for (;;) {
    unsigned before = atomic_load(&x->h->bell);
    if ((result = holds(x, p, missing))) break;
    if (is_gone(x, *missing)) { result = holds(x, p, missing); break; }
    if (!waiting && p) {
      char what[96], at[192];
      describe(what, sizeof what, &p->call);
      where(at, sizeof at, p->place);
      snprintf(m->waits_for, sizeof m->waits_for, "%s%s", what, at);
      atomic_store(&m->waits, atomic_fetch_add(&waits, 1) + 1);
      waiting = true;
    }
    if (!p && missed(x, began.tv_sec) >= 0 && !holds(x, p, missing)) break;
    if (waiting && is_stuck(x, &still) && !holds(x, p, missing)) { report_stuck(x); break; }
    wait_ring(x, before);
  }
  if (waiting) atomic_store(&m->waits, 0);
  return result;
}

// --- making one
bool exchange_identity(void *id) {
  identity made = {ID_MAGIC, getpid(), (int)syscall(SYS_memfd_create, "gpuprobe-communicator", 1u /* MFD_CLOEXEC */), 0};
  if (made.fd < 0 || getentropy(&made.key, sizeof made.key) || ftruncate(made.fd, 4096) || pwrite(made.fd, &made.key, 8, 64) != 8) { if (made.fd >= 0) close(made.fd); return false; }
  memset(id, 0, 128);
  memcpy(id, &made, sizeof made);
  return true;
}
bool exchange_is_identity(const void *id) { return *(const uint64_t *)id == ID_MAGIC; }
uint32_t exchange_number(const void *id) { identity i; memcpy(&i, id, sizeof i); return (uint32_t)(i.key & 0x7fffffff) | 1; }
void exchange_forget(const void *id) { identity i; memcpy(&i, id, sizeof i); if (i.pid == getpid() && i.magic == ID_MAGIC) close(i.fd); }

static bool all_joined(exchange *x, const pending *p, int *missing) {
  *missing = x->rank;
  for (int r = 0; r < x->size; r++) if (atomic_load(&x->members[r].pid) && is_gone(x, r)) *missing = r;
  return atomic_load(&x->h->joined) >= x->size;
}
exchange *exchange_join(const void *id, int size, int rank) {
  identity i;
  memcpy(&i, id, sizeof i);
  if (size > MOST_RANKS) return NULL;
  char path[64];
  uint64_t key = 0;
  snprintf(path, sizeof path, "/proc/%d/fd/%d", i.pid, i.fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0 || pread(fd, &key, 8, 64) != 8 || key != i.key) {
    if (fd >= 0) close(fd);
    report("rank %d cannot reach the first rank of its group: simulated GPUs of one job have to be on one machine", rank);
    return NULL;
  }
  size_t members = (size_t)size * sizeof(member), posts = (size_t)size * SLOTS * sizeof(slot), channels = (size_t)size * size * sizeof(channel);
  exchange *x = calloc(1, sizeof *x);
  x->rank = rank; x->size = size; x->fd = fd;
  x->mapped = 4096 + members + posts + channels;
  struct stat now;
  if (fstat(fd, &now) || (now.st_size < PAYLOADS && ftruncate(fd, PAYLOADS))) { free(x); close(fd); return NULL; }
  char *base = mmap(NULL, x->mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) { free(x); close(fd); return NULL; }
  x->h = (header *)base;
  x->members = (member *)(base + 4096);
  x->posts = (slot *)(base + 4096 + members);
  x->channels = (channel *)(base + 4096 + members + posts);
  x->received = calloc((size_t)size * 2, sizeof *x->received);
  x->freed_to = x->received + size;
  pthread_mutex_init(&x->lock, NULL);
  x->owner = getpid();
  pthread_mutex_lock(&list_lock);
  x->other = exchanges;
  exchanges = x;
  pthread_mutex_unlock(&list_lock);
  char state, place[176] = "";
  member *m = &x->members[rank];
  m->started = started_at(getpid(), &state);
  atomic_store(&m->global, place_of_call ? place_of_call(place, sizeof place) : -1);
  atomic_store(&m->pid, getpid());
  atomic_fetch_add(&x->h->joined, 1);
  ring(x);
  int missing;
  if (!wait_until(x, NULL, all_joined, &missing)) {
    char at[192];
    where(at, sizeof at, place);
    if (missing == rank) report("rank %d has ended without joining the group of %d ranks that rank %d waits for%s", missed(x, 0), size, global_rank(x, rank), at);
    else report("rank %d has ended before all ranks have joined its group", global_rank(x, missing));
  }
  if (i.pid == getpid()) close(i.fd);
  return x;
}
int exchange_rank(const exchange *x) { return x->rank; }

// --- posting
static void punch(exchange *x, const slot *s) {
  if (s->bytes) fallocate(x->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)s->offset, (off_t)((s->bytes + 4095) & ~4095ull));
}
static unsigned long long least_taken(const exchange *x) {
  unsigned long long least = ULLONG_MAX;
  for (int r = 0; r < x->size; r++) { unsigned long long t = atomic_load(&x->members[r].taken); if (t < least) least = t; }
  return least;
}
static void reclaim(exchange *x) {   // of what all others have taken
  unsigned long long least = least_taken(x);
  for (; x->freed < least; x->freed++) punch(x, &x->posts[x->rank * SLOTS + x->freed % SLOTS]);
  for (int r = 0; r < x->size; r++) {
    channel *c = &x->channels[x->rank * x->size + r];
    for (unsigned long long taken = atomic_load(&c->taken); x->freed_to[r] < taken; x->freed_to[r]++) punch(x, &c->slots[x->freed_to[r] % SLOTS]);
  }
}
static bool store(exchange *x, slot *s, const exchange_call *call, const void *from, size_t bytes, int unknown, const char *place, unsigned long long number) {
  s->call = *call;
  s->unknown = unknown;
  s->bytes = unknown || !from ? 0 : bytes;
  s->offset = (uint64_t)PAYLOADS + (uint64_t)PAYLOADS * (uint64_t)x->rank + x->next;
  snprintf(s->place, sizeof s->place, "%s", place);
  for (size_t done = 0; done < s->bytes;) {
    ssize_t put = pwrite(x->fd, (const char *)from + done, s->bytes - done, (off_t)(s->offset + done));
    if (put <= 0) { report("a collective of %llu bytes does not fit into this machine's memory: %s", (unsigned long long)bytes, strerror(errno)); return false; }
    done += (size_t)put;
  }
  x->next += (s->bytes + 4095) & ~4095ull;
  atomic_store(&s->number, number);
  return true;
}
static bool has_room(exchange *x, const pending *p, int *missing) {
  for (int r = 0; r < x->size; r++) if (atomic_load(&x->members[r].taken) + SLOTS < p->number) { *missing = r; return false; }
  return true;
}
static bool channel_has_room(exchange *x, const pending *p, int *missing) { *missing = p->call.peer; return atomic_load(&x->channels[x->rank * x->size + p->call.peer].taken) + SLOTS >= p->number; }
static int take_all_of(exchange *x, bool wait);

// What a call sends may be what an earlier one on its stream receives.
static int settle_overlaps(const stream *on, const char *from, size_t bytes) {
  unsigned long long last = 0;
  pthread_mutex_lock(&list_lock);
  for (pending *p = first_pending; p && from; p = p->next) {
    bool many = p->call.kind == ALL_GATHER || p->call.kind == GATHER || p->call.kind == ALL_TO_ALL;
    size_t size = (size_t)p->call.count * collective_width(p->call.type) * (many ? (size_t)p->x->size : 1);
    if (p->on == on && p->to && (const char *)p->to < from + bytes && from < (const char *)p->to + size) last = p->id;
  }
  pthread_mutex_unlock(&list_lock);
  return last ? settle_through(on, last, true) : SUCCESS;
}

// Post one call; `to` is written once the result is taken. Returns an ncclResult_t.
int exchange_issue(exchange *x, exchange_call call, const void *from, size_t bytes, void *to, void *on) {
  if (atomic_load(&failed_now) || x->failed) return 5;   // ncclInvalidUsage
  pending p = {.x = x, .call = call, .to = to, .on = stream_of(on, current_device()), .unknown = next_unknown};
  if (place_of_call) {
    int rank = place_of_call(p.place, sizeof p.place);
    if (rank >= 0) atomic_store(&x->members[x->rank].global, rank);
  }
  bool ok = true;
  int missing = 0;
  if (atomic_load(&FN(collectives_pending)) && settle_overlaps(p.on, from, bytes)) return 5;
  pthread_mutex_lock(&x->lock);
  reclaim(x);
  if (call.kind == SEND) {
    channel *c = &x->channels[x->rank * x->size + call.peer];
    p.number = atomic_load(&c->sent) + 1;
    if (!channel_has_room(x, &p, &missing)) ok = wait_until(x, &p, channel_has_room, &missing);
    ok = ok && store(x, &c->slots[(p.number - 1) % SLOTS], &call, from, bytes, p.unknown, p.place, p.number);
    if (ok) atomic_store(&c->sent, p.number);
  } else if (call.kind == RECV) {
    p.number = ++x->received[call.peer];
  } else {
    p.number = x->calls + 1;
    if (!has_room(x, &p, &missing)) ok = !take_all_of(x, true) && wait_until(x, &p, has_room, &missing);
    ok = ok && store(x, &x->posts[x->rank * SLOTS + (p.number - 1) % SLOTS], &call, from, bytes, p.unknown, p.place, p.number);
    if (ok) { x->calls = p.number; atomic_store(&x->members[x->rank].posted, p.number); }
  }
  if (ok) ring(x);
  pending *kept = ok && call.kind != SEND ? malloc(sizeof *kept) : NULL;
  pthread_mutex_lock(&list_lock);
  last_here = p.id = ++issued_ids;
  if (!first_here) first_here = p.id;
  known_results[p.id % KEPT] = call.kind == SEND;
  if (kept) { *kept = p; *last_pending = kept; last_pending = &kept->next; atomic_fetch_add(&FN(collectives_pending), 1); }
  pthread_mutex_unlock(&list_lock);
  pthread_mutex_unlock(&x->lock);
  if (!ok && !collective_failure()) report("rank %d of this group has ended, and rank %d still sends to it%s%s", global_rank(x, missing), global_rank(x, x->rank), *p.place ? " at " : "", p.place);
  return ok ? 0 : 5;
}

// --- taking
static bool all_posted(exchange *x, const pending *p, int *missing) {
  for (int r = 0; r < x->size; r++) if (atomic_load(&x->members[r].posted) < p->number) { *missing = r; return false; }
  return true;
}
static bool was_sent(exchange *x, const pending *p, int *missing) { *missing = p->call.peer; return atomic_load(&x->channels[p->call.peer * x->size + x->rank].sent) >= p->number; }
static condition condition_of(const pending *p) { return p->call.kind == RECV ? was_sent : all_posted; }
static bool read_payload(exchange *x, const slot *s, uint64_t at, void *to, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    ssize_t got = pread(x->fd, (char *)to + done, bytes - done, (off_t)(s->offset + at + done));
    if (got <= 0) return false;
    done += (size_t)got;
  }
  return true;
}
static bool is_same(const exchange_call *a, const exchange_call *b) { return a->kind == b->kind && a->type == b->type && a->op == b->op && a->root == b->root && a->count == b->count; }
static slot *slot_of(exchange *x, int rank, unsigned long long number) { return &x->posts[rank * SLOTS + (number - 1) % SLOTS]; }
static size_t width_of(int type) { return collective_width(type); }

static void fail_missing(exchange *x, const pending *p, int missing) {
  char mine[96], at[192], last[320] = "";
  describe(mine, sizeof mine, &p->call);
  where(at, sizeof at, p->place);
  int me = global_rank(x, x->rank), other = global_rank(x, missing);
  const char *how = atomic_load(&x->members[missing].left) ? "left the group" : "ended";
  if (p->call.kind == RECV) {
    report("rank %d waits for %llu %s from rank %d%s, which has %s without sending them", me, (unsigned long long)p->call.count, TYPES[p->call.type < 12 ? p->call.type : 1], other, at, how);
    return;
  }
  unsigned long long posted = atomic_load(&x->members[missing].posted);
  if (posted) {
    const slot *s = slot_of(x, missing, posted);
    char its[96], its_place[192];
    describe(its, sizeof its, &s->call);
    where(its_place, sizeof its_place, s->place);
    snprintf(last, sizeof last, "; its last one was %s%s", its, its_place);
  }
  report("rank %d has %s without the %s that rank %d called%s%s", other, how, mine, me, at, last);
}
static void fail_other(exchange *x, const pending *p, int rank, const slot *s) {
  char mine[96], its[96], at[192], its_at[192];
  describe(mine, sizeof mine, &p->call);
  describe(its, sizeof its, &s->call);
  where(at, sizeof at, p->place);
  where(its_at, sizeof its_at, s->place);
  const char *why = p->call.kind == s->call.kind && p->call.root != s->call.root ? ", with another root" : "";
  if (p->call.kind == RECV) report("rank %d receives %llu %s%s, and rank %d has sent %llu %s%s", global_rank(x, x->rank), (unsigned long long)p->call.count, TYPES[p->call.type < 12 ? p->call.type : 1], at, global_rank(x, rank), (unsigned long long)s->call.count, TYPES[s->call.type < 12 ? s->call.type : 1], its_at);
  else report("the ranks have called different collectives: rank %d %s%s, and rank %d %s%s%s", global_rank(x, x->rank), mine, at, global_rank(x, rank), its, its_at, why);
}

// One result, of which all parts are there.
static bool combine(pending *p) {
  exchange *x = p->x;
  const exchange_call *c = &p->call;
  size_t each = (size_t)c->count * width_of(c->type);
  bool unknown = false, ok = true;
  for (int r = 0; r < x->size; r++) {
    bool gives = c->kind != BROADCAST && c->kind != SCATTER ? true : r == c->root;
    slot *s = slot_of(x, r, p->number);
    if (gives && (s->unknown || (each && !s->bytes))) unknown = true;
  }
  p->unknown = unknown || ((c->kind == ALL_REDUCE || c->kind == REDUCE || c->kind == REDUCE_SCATTER) && c->type > 9);   // float8
  unknown = p->unknown;
  bool takes = p->to && !unknown && each && !((c->kind == REDUCE || c->kind == GATHER) && c->root != x->rank);
  if (!takes) return true;
  uint64_t at = c->kind == REDUCE_SCATTER || c->kind == ALL_TO_ALL || c->kind == SCATTER ? (uint64_t)x->rank * each : 0;
  switch (c->kind) {
    case BROADCAST: case SCATTER:
      ok = read_payload(x, slot_of(x, c->root, p->number), at, p->to, each);
      break;
    case ALL_GATHER: case ALL_TO_ALL: case GATHER:
      for (int r = 0; r < x->size && ok; r++) ok = read_payload(x, slot_of(x, r, p->number), at, (char *)p->to + (size_t)r * each, each);
      break;
    default: {   // reductions, in the order of the ranks: all have the same result
      size_t part = (size_t)1 << 20, step = part / width_of(c->type);
      char *total = malloc(part * 2 + step * sizeof(double)), *more = total + part;
      for (uint64_t done = 0; done < c->count && ok; done += step) {
        size_t n = c->count - done < step ? (size_t)(c->count - done) : step, bytes = n * width_of(c->type);
        for (int r = 0; r < x->size && ok; r++) {
          ok = read_payload(x, slot_of(x, r, p->number), at + done * width_of(c->type), r ? more : total, bytes);
          if (ok && r) collective_add(total, more, n, c->type, c->op);
        }
        if (ok) { collective_finish(total, n, c->type, c->op, x->size); memcpy((char *)p->to + done * width_of(c->type), total, bytes); }
      }
      free(total);
    }
  }
  return ok;
}
// Take one. 0, an error, or NOT_READY where it must not wait.
static int take(pending *p, bool wait) {
  exchange *x = p->x;
  int missing = 0;
  condition holds = condition_of(p);
  if (!holds(x, p, &missing)) {
    if (!wait) return NOT_READY;
    if (!wait_until(x, p, holds, &missing)) {
      x->failed = true;
      if (!collective_failure()) fail_missing(x, p, missing);
      return COLLECTIVE_FAILED;
    }
  }
  bool ok = true;
  if (p->call.kind == RECV) {
    channel *c = &x->channels[p->call.peer * x->size + x->rank];
    slot *s = &c->slots[(p->number - 1) % SLOTS];
    size_t bytes = (size_t)p->call.count * width_of(p->call.type);
    if (s->call.count * width_of(s->call.type) != bytes) { x->failed = true; fail_other(x, p, p->call.peer, s); return COLLECTIVE_FAILED; }
    p->unknown = s->unknown || s->bytes != bytes;
    if (!p->unknown && p->to) ok = read_payload(x, s, 0, p->to, bytes);
    atomic_store(&c->taken, p->number);
  } else {
    for (int r = 0; r < x->size; r++) {
      slot *s = slot_of(x, r, p->number);
      if (!is_same(&s->call, &p->call)) { x->failed = true; fail_other(x, p, r, s); return COLLECTIVE_FAILED; }
    }
    ok = p->call.kind == SPLIT || combine(p);
    if (p->call.kind != SPLIT) atomic_store(&x->members[x->rank].taken, p->number);
  }
  ring(x);
  if (!ok) { report("gpuprobe cannot read what the ranks have sent: %s", strerror(errno)); return COLLECTIVE_FAILED; }
  return SUCCESS;
}
static bool in_one_sequence(const pending *a, const pending *b) {
  return a->x == b->x && (a->call.kind == RECV) == (b->call.kind == RECV) && (a->call.kind != RECV || a->call.peer == b->call.peer);
}
static void drop(pending *p) {
  pthread_mutex_lock(&list_lock);
  for (pending **at = &first_pending; *at; at = &(*at)->next)
    if (*at == p) { *at = p->next; if (last_pending == &p->next) last_pending = at; break; }
  known_results[p->id % KEPT] = !p->unknown;
  atomic_fetch_sub(&FN(collectives_pending), 1);
  pthread_mutex_unlock(&list_lock);
  free(p);
}
// Take those that `chosen` chooses, and what comes before them in the same sequence.
typedef struct { const stream *on; const exchange *x; unsigned long long from, to; } choice;
static bool is_chosen(const pending *p, const choice *c) { return (!c->on || p->on == c->on) && (!c->x || p->x == c->x) && p->id > c->from && p->id <= c->to; }
static int take_chosen(choice c, bool wait) {
  if (!atomic_load(&FN(collectives_pending))) return atomic_load(&failed_now) ? COLLECTIVE_FAILED : SUCCESS;
  pthread_mutex_lock(&list_lock);   // other threads may wait for what this one has to do
  const pending *any = first_pending;
  while (any && !is_chosen(any, &c)) any = any->next;
  pthread_mutex_unlock(&list_lock);
  if (!any) return atomic_load(&failed_now) ? COLLECTIVE_FAILED : SUCCESS;
  if (wait) pthread_mutex_lock(&taking); else if (pthread_mutex_trylock(&taking)) return NOT_READY;
  int result = atomic_load(&failed_now) ? COLLECTIVE_FAILED : SUCCESS;
  while (!result) {
    pthread_mutex_lock(&list_lock);
    pending *wanted = first_pending, *p = first_pending;
    while (wanted && !is_chosen(wanted, &c)) wanted = wanted->next;
    while (wanted && p != wanted && !in_one_sequence(p, wanted)) p = p->next;
    pthread_mutex_unlock(&list_lock);
    if (!wanted) break;
    result = take(p, wait);
    if (!result) drop(p);
  }
  pthread_mutex_unlock(&taking);
  return result;
}
static int take_all_of(exchange *x, bool wait) { return take_chosen((choice){NULL, x, 0, ULLONG_MAX}, wait); }

int settle_stream(void *handle) { return take_chosen((choice){stream_of(handle, current_device()), NULL, 0, ULLONG_MAX}, true); }
int settle_all(void) { return take_chosen((choice){NULL, NULL, 0, ULLONG_MAX}, true); }
int settle_through(const void *on, unsigned long long id, bool wait) { return take_chosen((choice){on, NULL, 0, id}, wait); }
unsigned long long last_issued(const void *on) {   // on a stream, and not taken; 0 if there is none
  if (!atomic_load(&FN(collectives_pending))) return 0;
  unsigned long long found = 0;
  pthread_mutex_lock(&list_lock);
  for (pending *p = first_pending; p; p = p->next) if (p->on == on) found = p->id;
  pthread_mutex_unlock(&list_lock);
  return found;
}
int exchange_settle(exchange *x) { return take_all_of(x, true); }
// Wait for the calls from `first` to `to`: whether the results have values.
bool FN(collectives_known)(unsigned long long first, unsigned long long to) {
  if (take_chosen((choice){NULL, NULL, first - 1, to}, true)) return true;   // the error is raised at the next call
  bool known = true;
  pthread_mutex_lock(&list_lock);
  for (unsigned long long id = first; id <= to && id - first < KEPT; id++) known = known && known_results[id % KEPT];
  pthread_mutex_unlock(&list_lock);
  return known;
}
int FN(collectives_settle)(void) { return settle_all(); }

// --- parts of a group: every rank of the parent calls it
bool exchange_split(exchange *x, int color, int key, void *id, int *size, int *rank) {
  struct { int color, key, global; char id[128]; } mine = {color, key, 0, {0}}, its, first = {0};
  if (!exchange_identity(mine.id)) return false;
  if (take_all_of(x, true)) return false;
  exchange_call call = {.kind = SPLIT, .type = 1, .count = sizeof mine};
  bool before = next_unknown;
  next_unknown = false;
  int status = exchange_issue(x, call, &mine, sizeof mine, NULL, NULL);
  next_unknown = before;
  if (status || take_all_of(x, true)) { exchange_forget(mine.id); return false; }
  int before_me = 0, count = 0, leader = -1;
  for (int r = 0; r < x->size; r++) {
    if (!read_payload(x, slot_of(x, r, x->calls), 0, &its, sizeof its)) return false;
    if (its.color != color || color < 0) continue;
    count++;
    if (its.key < key || (its.key == key && r < x->rank)) before_me++;
    if (leader < 0 || its.key < first.key) { leader = r; first = its; }
  }
  atomic_store(&x->members[x->rank].taken, x->calls);
  ring(x);
  if (leader != x->rank) exchange_forget(mine.id);
  memcpy(id, first.id, 128);
  *size = count;
  *rank = before_me;
  return true;
}

// --- the end
// Leave a group. What others still wait for is taken first: 0, or an error.
int exchange_leave(exchange *x) {
  bool failed_before = atomic_load(&failed_now);
  atomic_store(&x->members[x->rank].left, 1);
  ring(x);
  int result = x->failed ? SUCCESS : take_all_of(x, true);
  pthread_mutex_lock(&list_lock);   // after a failure some are left
  for (pending **at = &first_pending; *at;) {
    pending *p = *at;
    if (p->x != x) { at = &p->next; continue; }
    *at = p->next;
    atomic_fetch_sub(&FN(collectives_pending), 1);
    free(p);
  }
  last_pending = &first_pending;
  while (*last_pending) last_pending = &(*last_pending)->next;
  pthread_mutex_unlock(&list_lock);
  for (int r = 0; r < x->size && !result && !x->failed; r++) {   // messages that this rank has never received
    channel *c = &x->channels[r * x->size + x->rank];
    unsigned long long taken = atomic_load(&c->taken);
    if (atomic_load(&c->sent) <= taken) continue;
    const slot *s = &c->slots[taken % SLOTS];
    char at[192];
    where(at, sizeof at, s->place);
    report("rank %d has left the group without receiving the %llu %s that rank %d sent%s", global_rank(x, x->rank), (unsigned long long)s->call.count, TYPES[s->call.type < 12 ? s->call.type : 1], global_rank(x, r), at);
    result = COLLECTIVE_FAILED;
  }
  if (!failed_before && atomic_load(&failed_now)) atomic_store(&failed_at_end, true);   // torch raises no error for it
  return result;
}
int exchange_kept_by_graphs(void) {
  char place[176] = "", at[192], who[32] = "a process";
  int rank = place_of_call ? place_of_call(place, sizeof place) : -1;
  if (rank >= 0) snprintf(who, sizeof who, "rank %d", rank);
  where(at, sizeof at, place);
  report("%s destroys a process group%s while a CUDA graph with collectives of it exists, until whose end NCCL waits: delete the graph first", who, at);
  atomic_store(&failed_at_end, true);   // torch 2.15 raises no error for it
  return COLLECTIVE_FAILED;
}
// A process that ends is no rank any more. What it has called and not waited for, it waits for now.
__attribute__((destructor)) static void leave_all(void) {
  FN(collectives_end)();
  for (exchange *x = exchanges; x; x = x->other) if (x->owner == getpid()) exchange_leave(x);
  if (atomic_load(&failed_at_end)) _exit(1);
}
void exchange_free(exchange *x) {
  pthread_mutex_lock(&list_lock);
  for (exchange **at = &exchanges; *at; at = &(*at)->other) if (*at == x) { *at = x->other; break; }
  pthread_mutex_unlock(&list_lock);
  munmap(x->h, x->mapped);
  close(x->fd);
  free(x->received);
  free(x);
}
