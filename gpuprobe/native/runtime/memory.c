// Device memory: address ranges of this process that nothing touches until something is copied there.
#include "native.h"
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PAGE ((size_t)4096)
#define SPACE_BYTES ((size_t)64 << 40)   // address space that device memory is taken from

// A sorted array: torch has a few thousand segments at most, and looks them up far more often than
// it allocates.
typedef struct {
  range r;
  kept file;      // of memory that other processes map
  size_t offset;  // in that file
  bool imported;  // counted where it was made: by another process, a physical handle, a pool
  struct pool *pool;
  size_t known;   // where the file has `shared_known`, a byte for each block of the memory; 0: nowhere
} entry;
static entry *entries;
static size_t n_entries, room;
static pthread_rwlock_t table_lock = PTHREAD_RWLOCK_INITIALIZER;
static char *space, *next_address;

// Addresses decide which of two equal free blocks torch's allocator takes (the lower one), and so how
// blocks are split: peaks depend on them. Device memory is placed as drivers do on Linux (seen on an
// H200 with driver 580, and in public snapshots of other GPUs): in chunks of whole 32 MiB, each below
// the one before; in the newest chunk with a hole that fits, there in the smallest such hole; a chunk
// that is empty again is given back. All other memory ascends, and a freed range is not used again.
#define CHUNK ((size_t)32 << 20)
typedef struct { char *base; size_t size, kept; int device; uint64_t number; } chunk;   // kept: at its start, by the driver
static chunk *chunks;   // by address
static size_t n_chunks, chunk_room;
static uint64_t chunk_number;
static size_t rounded(size_t bytes, size_t unit) { return (bytes + unit - 1) & ~(unit - 1); }
static bool reserve_space(void) {
  for (size_t size = SPACE_BYTES; !space && size >= (size_t)1 << 38; size /= 2) {
    char *got = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) continue;   // a limit of the address space (ulimit -v)
    next_address = (char *)rounded((size_t)got, GRANULARITY);
    space = (char *)((size_t)(got + size) & ~(CHUNK - 1));   // its end
  }
  return space != NULL;
}
static char *new_addresses(size_t bytes) {
  if (!reserve_space()) return NULL;
  size_t want = bytes ? rounded(bytes, GRANULARITY) : GRANULARITY;
  if ((size_t)((n_chunks ? chunks[0].base : space) - next_address) < want) return NULL;
  char *found = next_address;
  next_address += want;
  return found;
}
static chunk *new_chunk(size_t size, size_t kept, int device) {   // at the highest free addresses
  if (n_chunks == chunk_room) {
    size_t more = chunk_room ? chunk_room * 2 : 256;
    chunk *moved = realloc(chunks, more * sizeof *moved);
    if (!moved) return NULL;
    chunks = moved; chunk_room = more;
  }
  char *end = space;
  size_t i = n_chunks;
  for (; i && (size_t)(end - (chunks[i - 1].base + chunks[i - 1].size)) < size; i--) end = chunks[i - 1].base;
  if (!i && (size_t)(end - next_address) < size) return NULL;
  memmove(chunks + i + 1, chunks + i, (n_chunks - i) * sizeof *chunks);
  chunks[i] = (chunk){end - size, size, kept, device, ++chunk_number};
  n_chunks++;
  return &chunks[i];
}
static size_t position(const char *address) {   // of the first entry that begins after it
  size_t low = 0, high = n_entries;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (entries[middle].r.base > address) high = middle; else low = middle + 1;
  }
  return low;
}
static entry *entry_of(const void *address) {
  size_t i = position(address);
  if (!i) return NULL;
  entry *e = &entries[i - 1];
  return (const char *)address < e->r.base + (e->r.size ? e->r.size : 1) ? e : NULL;
}
static bool add_entry(entry e) {
  if (n_entries == room) {
    size_t more = room ? room * 2 : 1024;
    entry *moved = realloc(entries, more * sizeof *moved);
    if (!moved) return false;
    entries = moved; room = more;
  }
  size_t i = position(e.r.base);
  memmove(entries + i + 1, entries + i, (n_entries - i) * sizeof *entries);
  entries[i] = e; n_entries++;
  return true;
}
static char *smallest_hole(const chunk *c, size_t want) {
  char *from = c->base + c->kept, *end = c->base + c->size, *best = NULL;
  size_t smallest = SIZE_MAX;
  for (size_t i = position(from - 1); ; i++) {
    bool last = i == n_entries || entries[i].r.base >= end;
    size_t hole = (size_t)((last ? end : entries[i].r.base) - from);
    if (hole >= want && hole < smallest) { best = from; smallest = hole; }
    if (last) return best;
    from = entries[i].r.base + rounded(entries[i].r.size, GRANULARITY);
  }
}
static char *device_addresses(size_t bytes, int device) {
  size_t want = rounded(bytes, GRANULARITY);
  uint64_t newest = 0;
  char *found = NULL;
  bool any = false;
  if (want < bytes || !reserve_space()) return NULL;
  for (size_t i = 0; i < n_chunks; i++) {
    if (chunks[i].device != device) continue;
    any = true;
    char *hole = chunks[i].number > newest ? smallest_hole(&chunks[i], want) : NULL;
    if (hole) { found = hole; newest = chunks[i].number; }
  }
  // What a context leaves of its own chunks, as seen on that H200.
  if (!any && new_chunk(CHUNK, CHUNK / 4, device) && new_chunk(CHUNK, CHUNK - GRANULARITY, device)) return device_addresses(bytes, device);
  if (found) return found;
  chunk *made = new_chunk(rounded(want, CHUNK), 0, device);
  return made ? made->base : NULL;
}
static void drop_empty_chunk(const char *address) {
  for (size_t i = 0; i < n_chunks; i++) {
    chunk *c = &chunks[i];
    if (address < c->base || address >= c->base + c->size) continue;
    size_t first = position(c->base - 1);
    if (c->kept || (first < n_entries && entries[first].r.base < c->base + c->size)) return;
    memmove(c, c + 1, (n_chunks - i - 1) * sizeof *c);
    n_chunks--;
    return;
  }
}
bool range_of(const void *address, range *found) {
  pthread_rwlock_rdlock(&table_lock);
  entry *e = entry_of(address);
  if (e && found) *found = e->r;
  pthread_rwlock_unlock(&table_lock);
  return e != NULL;
}

typedef struct pool pool;
static bool pool_take(pool *p, size_t bytes);
static void pool_give(pool *p, size_t bytes);

static int allocate(void **out, size_t bytes, int ordinal, memory_kind kind, pool *from) {
  *out = NULL;
  if (kind == DEVICE_MEMORY && !(from ? pool_take(from, bytes) : take_memory(ordinal, bytes))) return OUT_OF_MEMORY;
  pthread_rwlock_wrlock(&table_lock);
  char *base = kind == DEVICE_MEMORY ? device_addresses(bytes, ordinal) : new_addresses(bytes);
  size_t mapped = (bytes + PAGE - 1) & ~(PAGE - 1);
  bool ok = base && mmap(base, mapped ? mapped : PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED;
  if (ok && kind == DEVICE_MEMORY) madvise(base, mapped, MADV_NOHUGEPAGE);   // a touched byte costs a page, not 2 MiB
  ok = ok && add_entry((entry){{base, bytes, ordinal, kind}, NO_FILE, 0, from != NULL, from, 0});
  pthread_rwlock_unlock(&table_lock);
  if (!ok) {
    if (from) pool_give(from, bytes);
    else if (kind == DEVICE_MEMORY) give_memory(ordinal, bytes);
    return OUT_OF_MEMORY;
  }
  *out = base;
  return SUCCESS;
}

// Pinned memory is memory of the host, which has no more than it has.
static _Atomic size_t pinned;
static bool take_pinned(size_t bytes) {
  size_t total = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
  bool fits = bytes <= total && atomic_fetch_add(&pinned, bytes) + bytes <= total;
  if (!fits && bytes <= total) atomic_fetch_sub(&pinned, bytes);
  return fits;
}

static int release(void *address, bool device_memory) {
  if (!address) return SUCCESS;
  pthread_rwlock_wrlock(&table_lock);
  entry *e = entry_of(address);
  if (!e || e->r.base != (char *)address || (e->r.kind == DEVICE_MEMORY) != device_memory || e->r.kind == REGISTERED_MEMORY) {
    pthread_rwlock_unlock(&table_lock);
    return INVALID_VALUE;
  }
  entry dead = *e;
  memmove(e, e + 1, (size_t)(entries + n_entries - e - 1) * sizeof *e);
  n_entries--;
  if (device_memory) drop_empty_chunk(dead.r.base);
  size_t mapped = (dead.r.size + PAGE - 1) & ~(PAGE - 1);
  mmap(dead.r.base, mapped ? mapped : PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  pthread_rwlock_unlock(&table_lock);
  drop_kept(&dead.file);
  if (dead.r.kind == PINNED_MEMORY) atomic_fetch_sub(&pinned, dead.r.size);
  if (dead.pool) pool_give(dead.pool, dead.r.size);
  else if (dead.r.kind == DEVICE_MEMORY && !dead.imported) give_memory(dead.r.device, dead.r.size);
  return SUCCESS;
}

int FN(cudaMalloc)(void **out, size_t bytes) {
  int device_now = current_device(), result = ensure_context(device_now);
  if (result) { *out = NULL; return fail(result); }
  if (!bytes) { *out = NULL; return SUCCESS; }
  if ((result = may_allocate())) { *out = NULL; return fail(result); }
  result = allocate(out, bytes, device_now, DEVICE_MEMORY, NULL);
  LOG(.kind = LOG_MALLOC, .device = device_now, .a = (uint64_t)*out, .bytes = bytes);
  return fail(result);
}
int FN(cudaFree)(void *address) {
  int result = ensure_context(current_device());   // cudaFree(0) is how programs create the context
  if (result) return fail(result);
  if (address && (result = may_allocate())) return fail(result);
  if (address && atomic_load_explicit(&FN(collectives_pending), memory_order_relaxed)) settle_all();   // cudaFree waits for the GPU
  LOG(.kind = LOG_FREE, .device = current_device(), .a = (uint64_t)address);
  return fail(release(address, true));
}
int FN(cudaMallocManaged)(void **out, size_t bytes, unsigned flags) { return FN(cudaMalloc)(out, bytes); }
int FN(cudaMallocPitch)(void **out, size_t *pitch, size_t width, size_t height) { *pitch = (width + 511) & ~(size_t)511; return FN(cudaMalloc)(out, *pitch * height); }
int FN(cudaHostAlloc)(void **out, size_t bytes, unsigned flags) {
  int result = ensure_context(current_device());
  if (!result) result = may_allocate();
  if (!result && !take_pinned(bytes)) result = OUT_OF_MEMORY;
  *out = NULL;
  if (!result && (result = allocate(out, bytes, current_device(), PINNED_MEMORY, NULL))) atomic_fetch_sub(&pinned, bytes);
  LOG(.kind = LOG_HOST_ALLOC, .device = -1, .a = (uint64_t)*out, .bytes = bytes);
  return fail(result);
}
int FN(cudaMallocHost)(void **out, size_t bytes) { return FN(cudaHostAlloc)(out, bytes, 0); }
int FN(cudaFreeHost)(void *address) { LOG(.kind = LOG_HOST_FREE, .device = -1, .a = (uint64_t)address); return fail(release(address, false)); }
int FN(cudaHostRegister)(void *address, size_t bytes, unsigned flags) {
  if (!address || !bytes) return fail(INVALID_VALUE);
  pthread_rwlock_wrlock(&table_lock);
  bool ok = !entry_of(address) && add_entry((entry){{address, bytes, current_device(), REGISTERED_MEMORY}, NO_FILE, 0, false, NULL, 0});
  pthread_rwlock_unlock(&table_lock);
  if (ok) LOG(.kind = LOG_HOST_ALLOC, .device = -1, .a = (uint64_t)address, .bytes = bytes, .name = "registered");
  return ok ? SUCCESS : fail(712);   // cudaErrorHostMemoryAlreadyRegistered
}
int FN(cudaHostUnregister)(void *address) {
  pthread_rwlock_wrlock(&table_lock);
  entry *e = entry_of(address);
  bool ok = e && e->r.kind == REGISTERED_MEMORY && e->r.base == (char *)address;
  if (ok) { memmove(e, e + 1, (size_t)(entries + n_entries - e - 1) * sizeof *e); n_entries--; }
  pthread_rwlock_unlock(&table_lock);
  if (ok) LOG(.kind = LOG_HOST_FREE, .device = -1, .a = (uint64_t)address, .name = "registered");
  return ok ? SUCCESS : fail(713);   // cudaErrorHostMemoryNotRegistered
}
int FN(cudaHostGetDevicePointer)(void **out, void *address, unsigned flags) { *out = address; return range_of(address, NULL) ? SUCCESS : fail(INVALID_VALUE); }
int FN(cudaHostGetFlags)(unsigned *flags, void *address) { *flags = 0; return range_of(address, NULL) ? SUCCESS : fail(INVALID_VALUE); }

typedef struct { int type, device; void *device_pointer, *host_pointer; } pointer_attributes;   // CUDA 13 has reserved words behind
static int pointer_of(pointer_attributes *out, const void *address) {
  range r;
  bool known = range_of(address, &r);
  memset(out, 0, sizeof *out);
  out->type = known ? (r.kind == DEVICE_MEMORY ? 2 : 1) : 0;
  out->device = known ? r.device : -2;   // cudaInvalidDeviceId
  out->device_pointer = known ? (void *)(uintptr_t)address : NULL;
  out->host_pointer = known && r.kind == DEVICE_MEMORY ? NULL : (void *)(uintptr_t)address;
  return SUCCESS;
}
int FN12(cudaPointerGetAttributes)(pointer_attributes *out, const void *address) { return pointer_of(out, address); }
int FN13(cudaPointerGetAttributes)(pointer_attributes *out, const void *address) { memset(out, 0, sizeof *out + 8 * sizeof(long)); return pointer_of(out, address); }

// --- copies
// A page of device memory that was never written reads as zeros and costs nothing. Copies keep it
// so: /proc/self/pagemap has a bit 63 for pages that are present and a bit 62 for swapped ones
// (Documentation/admin-guide/mm/pagemap.rst). Without that file everything is copied.
static int pagemap(void) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static kept file = NO_FILE;
  static pid_t owner;
  pthread_mutex_lock(&lock);
  int fd = kept_fd(&file);
  if (fd < 0 || owner != getpid()) {   // or in a forked process, whose own file differs
    drop_kept(&file);
    owner = getpid();
    file = keep(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
    fd = file.fd;
  }
  pthread_mutex_unlock(&lock);
  return fd;
}
static bool touched(const char *page, size_t count, bool *out) {
  uint64_t bits[512];
  int file = pagemap();
  if (file < 0) return false;
  for (size_t done = 0; done < count;) {
    size_t part = count - done < 512 ? count - done : 512;
    ssize_t got = pread(file, bits, part * 8, (off_t)((size_t)page / PAGE + done) * 8);
    if (got != (ssize_t)(part * 8)) return false;
    for (size_t i = 0; i < part; i++) out[done + i] = bits[i] >> 62;
    done += part;
  }
  return true;
}
#define SPARSE_FROM ((size_t)256 << 10)   // below, looking costs more than copying
static bool own_memory(const void *address, size_t bytes) {
  range r;
  return range_of(address, &r) && r.kind != REGISTERED_MEMORY && (const char *)address + bytes <= r.base + r.size;
}
void copy_bytes(void *to, const void *from, size_t bytes) {
  if (!bytes || to == from) return;
  if (bytes < SPARSE_FROM || !own_memory(from, bytes)) {
    if (bytes >= SPARSE_FROM && own_memory(to, bytes)) {
      // From host memory: pages of zeros onto pages that were never written stay unwritten.
      static const char zeros[4096];
      for (size_t at = 0; at < bytes;) {
        char *target = (char *)to + at;
        size_t part = PAGE - (size_t)target % PAGE;
        if (part > bytes - at) part = bytes - at;
        bool has = true;
        if (memcmp((const char *)from + at, zeros, part) || !touched((char *)((size_t)target & ~(PAGE - 1)), 1, &has) || has) memcpy(target, (const char *)from + at, part);
        at += part;
      }
      return;
    }
    memmove(to, from, bytes);
    return;
  }
  bool target_own = own_memory(to, bytes);
  const char *first = (const char *)((size_t)from & ~(PAGE - 1));
  bool known[512];
  for (const char *page = first; page < (const char *)from + bytes; page += 512 * PAGE) {
    size_t left = ((size_t)((const char *)from + bytes - page) + PAGE - 1) / PAGE, count = left < 512 ? left : 512;
    if (!touched(page, count, known)) memset(known, 1, sizeof known);
    for (size_t i = 0; i < count;) {
      size_t n = 1;
      while (i + n < count && known[i + n] == known[i]) n++;
      const char *begin = page + i * PAGE, *end = begin + n * PAGE;
      if (begin < (const char *)from) begin = from;
      if (end > (const char *)from + bytes) end = (const char *)from + bytes;
      char *target = (char *)to + (begin - (const char *)from);
      size_t size = (size_t)(end - begin);
      if (known[i]) memmove(target, begin, size);
      else if (target_own) set_bytes(target, 0, 1, size);
      else memset(target, 0, size);
      i += n;
    }
  }
}
void set_bytes(void *to, int value, size_t width, size_t count) {
  size_t bytes = width * count;
  if (!value && bytes >= SPARSE_FROM && own_memory(to, bytes)) {
    // Whole pages are dropped, and read as zeros again.
    char *begin = (char *)(((size_t)to + PAGE - 1) & ~(PAGE - 1)), *end = (char *)(((size_t)to + bytes) & ~(PAGE - 1));
    range r;
    range_of(to, &r);
    pthread_rwlock_rdlock(&table_lock);
    entry *e = entry_of(to);
    bool private_memory = e && e->file.fd < 0;
    pthread_rwlock_unlock(&table_lock);
    if (private_memory && begin < end && !madvise(begin, (size_t)(end - begin), MADV_DONTNEED)) {
      memset(to, 0, (size_t)(begin - (char *)to));
      memset(end, 0, (size_t)((char *)to + bytes - end));
      return;
    }
  }
  if (width == 1) memset(to, value, bytes);
  else if (width == 2) for (size_t i = 0; i < count; i++) ((uint16_t *)to)[i] = (uint16_t)value;
  else for (size_t i = 0; i < count; i++) ((uint32_t *)to)[i] = (uint32_t)value;
}

void set_output(void *stream, void *to, size_t width, size_t count) {
  if (to && !capture_node(stream, (graph_node){MEMSET_NODE, .to = to, .width = width, .count = count})) set_bytes(to, 0, width, count);
}

uint32_t memory_at(const void *address) {
  range r;
  if (!range_of(address, &r)) return 0;
  return r.kind == DEVICE_MEMORY ? 2 + (uint32_t)r.device : 1;
}
static int copied(void *to, const void *from, size_t bytes, void *stream, bool waits) {
  int result = ensure_context(current_device());
  if (result) return fail(result);
  if (is_unusable()) return fail(NO_DEVICE);
  if (waits && (result = may_synchronize(stream))) return fail(result);
  SETTLED(stream);
  if (waits) host_waited();
  LOG(.kind = LOG_MEMCPY, .device = current_device(), .stream = stream_number(stream), .a = (uint64_t)to, .b = (uint64_t)from, .bytes = bytes, .name = waits ? "sync" : "async", .grid = {memory_at(to), memory_at(from)}, .captured = capture_of(stream) != NULL);
  if (is_computed() && computed_copy(to, from, bytes)) { capture_node(stream, (graph_node){.kind = OTHER_NODE}); return SUCCESS; }
  if (capture_node(stream, (graph_node){MEMCPY_NODE, .to = to, .from = from, .bytes = bytes})) return SUCCESS;
  copy_bytes(to, from, bytes);
  return SUCCESS;
}
int FN(cudaMemcpy)(void *to, const void *from, size_t bytes, int kind) { return copied(to, from, bytes, NULL, true); }
int FN(cudaMemcpyAsync)(void *to, const void *from, size_t bytes, int kind, void *stream) { return copied(to, from, bytes, stream, false); }
int FN(cudaMemcpyPeer)(void *to, int a, const void *from, int b, size_t bytes) { return copied(to, from, bytes, NULL, true); }
int FN(cudaMemcpyPeerAsync)(void *to, int a, const void *from, int b, size_t bytes, void *stream) { return copied(to, from, bytes, stream, false); }
int FN(cudaMemcpy2DAsync)(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, int kind, void *stream) {
  for (size_t i = 0; i < height; i++) {
    int result = copied((char *)to + i * to_pitch, (const char *)from + i * from_pitch, width, stream, false);
    if (result) return result;
  }
  return SUCCESS;
}
int FN(cudaMemcpy2D)(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, int kind) { return FN(cudaMemcpy2DAsync)(to, to_pitch, from, from_pitch, width, height, kind, NULL); }

static int filled(void *to, int value, size_t width, size_t count, void *stream) {
  int result = ensure_context(current_device());
  if (result) return fail(result);
  SETTLED(stream);
  LOG(.kind = LOG_MEMSET, .device = current_device(), .stream = stream_number(stream), .a = (uint64_t)to, .bytes = width * count, .captured = capture_of(stream) != NULL);
  if (computed_fill()) { capture_node(stream, (graph_node){.kind = OTHER_NODE}); return SUCCESS; }
  if (capture_node(stream, (graph_node){MEMSET_NODE, .to = to, .value = value, .width = width, .count = count})) return SUCCESS;
  set_bytes(to, value, width, count);
  return SUCCESS;
}
int FN(cudaMemset)(void *to, int value, size_t bytes) { return filled(to, value, 1, bytes, NULL); }
int FN(cudaMemsetAsync)(void *to, int value, size_t bytes, void *stream) { return filled(to, value, 1, bytes, stream); }
int FN(cudaMemset2DAsync)(void *to, size_t pitch, int value, size_t width, size_t height, void *stream) {
  for (size_t i = 0; i < height; i++) filled((char *)to + i * pitch, value, 1, width, stream);
  return SUCCESS;
}
int FN(cuMemsetD8_v2)(uint64_t to, unsigned char value, size_t count) { return filled((void *)to, value, 1, count, NULL); }
int FN(cuMemsetD32_v2)(uint64_t to, unsigned value, size_t count) { return filled((void *)to, (int)value, 4, count, NULL); }
int FN(cuMemsetD8Async)(uint64_t to, unsigned char value, size_t count, void *stream) { return filled((void *)to, value, 1, count, stream); }
int FN(cuMemsetD16Async)(uint64_t to, unsigned short value, size_t count, void *stream) { return filled((void *)to, value, 2, count, stream); }
int FN(cuMemsetD32Async)(uint64_t to, unsigned value, size_t count, void *stream) { return filled((void *)to, (int)value, 4, count, stream); }
int FN(cuStreamWriteValue32)(void *stream, uint64_t to, uint32_t value, unsigned flags) { return filled((void *)to, (int)value, 4, 1, stream); }
int FN(cuStreamWriteValue32_v2)(void *stream, uint64_t to, uint32_t value, unsigned flags) { return filled((void *)to, (int)value, 4, 1, stream); }

// --- memory pools (cudaMallocAsync). A model: a pool reserves whole blocks and holds what its threshold
// allows, as documented; the size of a block and how free memory within the pool is found are not.
#define POOL_BLOCK ((uint64_t)32 << 20)
struct pool { uint32_t magic; int device; uint64_t threshold, reserved, reserved_high, used, used_high; int flags[3]; };
static pool default_pools[MAX_DEVICES], *current_pools[MAX_DEVICES];
static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static pool *default_pool(int ordinal) { pool *p = &default_pools[ordinal]; p->magic = 0x706f6f6c; p->device = ordinal; return p; }
static pool *current_pool(int ordinal) { return current_pools[ordinal] ? current_pools[ordinal] : default_pool(ordinal); }
static bool pool_take(pool *p, size_t bytes) {
  pthread_mutex_lock(&pool_lock);
  uint64_t want = p->used + bytes <= p->reserved ? p->reserved : (p->used + bytes + POOL_BLOCK - 1) / POOL_BLOCK * POOL_BLOCK;
  bool fits = want >= bytes && (want == p->reserved || take_memory(p->device, want - p->reserved));
  if (fits) {
    p->used += bytes; p->reserved = want;
    if (p->used > p->used_high) p->used_high = p->used;
    if (p->reserved > p->reserved_high) p->reserved_high = p->reserved;
  }
  pthread_mutex_unlock(&pool_lock);
  return fits;
}
static void pool_keep(pool *p, uint64_t keep) {   // with the lock
  uint64_t least = (p->used + POOL_BLOCK - 1) / POOL_BLOCK * POOL_BLOCK, target = keep > least ? keep / POOL_BLOCK * POOL_BLOCK : least;
  if (target < p->reserved) { give_memory(p->device, p->reserved - target); p->reserved = target; }
}
// CUDA gives memory above the threshold back at the next synchronisation; here all work is complete.
static void pool_give(pool *p, size_t bytes) {
  pthread_mutex_lock(&pool_lock);
  p->used -= bytes;
  pool_keep(p, p->threshold);
  pthread_mutex_unlock(&pool_lock);
}
static bool is_pool(const pool *p) { return p && p->magic == 0x706f6f6c; }
int FN(cudaDeviceGetDefaultMemPool)(pool **out, int ordinal) { if (!visible_device(ordinal)) return fail(INVALID_DEVICE); *out = default_pool(ordinal); return SUCCESS; }
int FN(cudaDeviceGetMemPool)(pool **out, int ordinal) { if (!visible_device(ordinal)) return fail(INVALID_DEVICE); *out = current_pool(ordinal); return SUCCESS; }
int FN(cudaDeviceSetMemPool)(int ordinal, pool *p) { if (!visible_device(ordinal) || !is_pool(p) || p->device != ordinal) return fail(INVALID_VALUE); current_pools[ordinal] = p; return SUCCESS; }
typedef struct { int allocation_type, handle_types, location_type, location_id; } pool_properties;   // the begin of cudaMemPoolProps
int FN(cudaMemPoolCreate)(pool **out, const pool_properties *properties) {
  if (!visible_device(properties->location_id)) return fail(INVALID_VALUE);
  *out = calloc(1, sizeof **out);
  if (!*out) return fail(OUT_OF_MEMORY);
  (*out)->magic = 0x706f6f6c; (*out)->device = properties->location_id;
  return SUCCESS;
}
int FN(cudaMemPoolDestroy)(pool *p) {   // its memory stays until it is freed, so the pool does too
  if (!is_pool(p) || p == default_pool(p->device)) return fail(INVALID_VALUE);
  if (current_pools[p->device] == p) current_pools[p->device] = NULL;
  pthread_mutex_lock(&pool_lock);
  p->threshold = 0;
  pool_keep(p, 0);
  pthread_mutex_unlock(&pool_lock);
  return SUCCESS;
}
static int pool_allocate(void **out, size_t bytes, pool *p, void *stream) {
  modelled(MODEL_POOL);
  int result = ensure_context(p->device);
  if (!result) result = bytes ? allocate(out, bytes, p->device, DEVICE_MEMORY, p) : (*out = NULL, SUCCESS);
  LOG(.kind = LOG_MALLOC, .device = p->device, .stream = stream_number(stream), .a = result ? 0 : (uint64_t)*out, .bytes = bytes);
  return fail(result);
}
int FN(cudaMallocAsync)(void **out, size_t bytes, void *stream) {
  *out = NULL;
  int ordinal = current_device(), result = ensure_context(ordinal);
  return result ? fail(result) : pool_allocate(out, bytes, current_pool(ordinal), stream);
}
int FN(cudaMallocFromPoolAsync)(void **out, size_t bytes, pool *p, void *stream) { *out = NULL; return is_pool(p) ? pool_allocate(out, bytes, p, stream) : fail(INVALID_VALUE); }
int FN(cudaFreeAsync)(void *address, void *stream) {
  LOG(.kind = LOG_FREE, .device = current_device(), .stream = stream_number(stream), .a = (uint64_t)address);
  return fail(release(address, true));
}
int FN(cudaMemPoolTrimTo)(pool *p, size_t keep) {
  if (!is_pool(p)) return fail(INVALID_VALUE);
  pthread_mutex_lock(&pool_lock);
  pool_keep(p, keep);
  pthread_mutex_unlock(&pool_lock);
  return SUCCESS;
}
int FN(cudaMemPoolSetAccess)(pool *p, const void *list, size_t count) { return SUCCESS; }
int FN(cudaMemPoolSetAttribute)(pool *p, int attribute, void *value) {
  if (attribute >= 1 && attribute <= 3) p->flags[attribute - 1] = *(int *)value;
  else if (attribute == 4) p->threshold = *(uint64_t *)value;
  else if (attribute == 6) p->reserved_high = p->reserved;
  else if (attribute == 8) p->used_high = p->used;
  else return fail(INVALID_VALUE);
  return SUCCESS;
}
int FN(cudaMemPoolGetAttribute)(pool *p, int attribute, void *value) {
  if (attribute >= 1 && attribute <= 3) { *(int *)value = p->flags[attribute - 1]; return SUCCESS; }
  const uint64_t known[] = {p->threshold, p->reserved, p->reserved_high, p->used, p->used_high};
  if (attribute < 4 || attribute > 8) return fail(INVALID_VALUE);
  *(uint64_t *)value = known[attribute - 4];
  return SUCCESS;
}

// --- virtual memory (expandable segments): addresses, and physical memory that is mapped to them
typedef struct { uint32_t magic; int device; size_t bytes; _Atomic int references; kept file; } physical;
typedef struct { int allocation_type, handle_types, location_type, location_id; } allocation_properties;   // the begin of CUmemAllocationProp
#define MAX_HANDLES 65536
static physical *mapped_handle(uint64_t address);

int FN(cuMemGetAllocationGranularity)(size_t *out, const void *properties, int option) { *out = GRANULARITY; return SUCCESS; }
int FN(cuMemAddressReserve)(uint64_t *out, size_t bytes, size_t alignment, uint64_t wanted, uint64_t flags) {
  pthread_rwlock_wrlock(&table_lock);
  char *base = new_addresses(bytes);
  pthread_rwlock_unlock(&table_lock);
  *out = (uint64_t)base;
  return base ? SUCCESS : OUT_OF_MEMORY;
}
int FN(cuMemAddressFree)(uint64_t address, size_t bytes) { return SUCCESS; }   // addresses are not used again
int FN(cuMemCreate)(physical **out, size_t bytes, const allocation_properties *properties, uint64_t flags) {
  int ordinal = properties->location_id;
  if (bytes % GRANULARITY) return INVALID_VALUE;
  int result = ensure_context(ordinal);
  if (result) return result;
  if (!take_memory(ordinal, bytes)) return OUT_OF_MEMORY;
  physical *p = calloc(1, sizeof *p);
  if (!p) { give_memory(ordinal, bytes); return OUT_OF_MEMORY; }
  *p = (physical){0x70687973, ordinal, bytes, 1, NO_FILE};
  if (properties->handle_types) {   // to be mapped by other processes too
    p->file = keep((int)syscall(SYS_memfd_create, "gpuprobe-device-memory", 1u /* MFD_CLOEXEC */));
    if (p->file.fd < 0 || ftruncate(p->file.fd, (off_t)bytes)) { give_memory(ordinal, bytes); drop_kept(&p->file); free(p); return NOT_SUPPORTED; }
  }
  *out = p;
  return SUCCESS;
}
static void drop_physical(physical *p) {
  if (atomic_fetch_sub(&p->references, 1) > 1) return;
  give_memory(p->device, p->bytes);
  drop_kept(&p->file);
  free(p);
}
int FN(cuMemRelease)(physical *p) { if (p->magic != 0x70687973) return INVALID_VALUE; drop_physical(p); return SUCCESS; }
static struct { uint64_t address; physical *handle; } maps[MAX_HANDLES];
static size_t n_maps;
int FN(cuMemMap)(uint64_t address, size_t bytes, size_t offset, physical *p, uint64_t flags) {
  pthread_rwlock_wrlock(&table_lock);
  int result = SUCCESS;
  void *got = n_maps == MAX_HANDLES ? MAP_FAILED
    : p->file.fd < 0 ? mmap((void *)address, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0)
    : mmap((void *)address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, kept_fd(&p->file), (off_t)offset);
  if (got == MAP_FAILED || !add_entry((entry){{(char *)address, bytes, p->device, DEVICE_MEMORY}, keep(dup(kept_fd(&p->file))), offset, true, NULL, 0})) result = OUT_OF_MEMORY;
  else { maps[n_maps].address = address; maps[n_maps++].handle = p; atomic_fetch_add(&p->references, 1); }
  pthread_rwlock_unlock(&table_lock);
  LOG(.kind = LOG_MAP, .device = p->device, .a = address, .bytes = bytes);
  return result;
}
int FN(cuMemUnmap)(uint64_t address, size_t bytes) {
  LOG(.kind = LOG_UNMAP, .device = current_device(), .a = address, .bytes = bytes);
  for (uint64_t at = address; at < address + bytes;) {
    pthread_rwlock_wrlock(&table_lock);
    physical *p = NULL;
    for (size_t i = n_maps; i-- > 0;)
      if (maps[i].address == at) { p = maps[i].handle; maps[i] = maps[--n_maps]; break; }
    pthread_rwlock_unlock(&table_lock);
    range r;
    if (!p || !range_of((void *)at, &r)) return INVALID_VALUE;
    release((void *)at, true);
    at += r.size;
    drop_physical(p);
  }
  return SUCCESS;
}
int FN(cuMemSetAccess)(uint64_t address, size_t bytes, const void *access, size_t count) { return SUCCESS; }
static physical *mapped_handle(uint64_t address) {
  for (size_t i = 0; i < n_maps; i++) if (maps[i].address == address) return maps[i].handle;
  return NULL;
}
int FN(cuMemRetainAllocationHandle)(physical **out, void *address) {
  pthread_rwlock_rdlock(&table_lock);
  physical *p = mapped_handle((uint64_t)address);
  if (p) atomic_fetch_add(&p->references, 1);
  pthread_rwlock_unlock(&table_lock);
  *out = p;
  return p ? SUCCESS : INVALID_VALUE;
}
int FN(cuMemGetAllocationPropertiesFromHandle)(allocation_properties *out, physical *p) { *out = (allocation_properties){1, p->file.fd >= 0, 1, p->device}; return SUCCESS; }
int FN(cuMemExportToShareableHandle)(void *out, physical *p, int type, uint64_t flags) {
  int fd = kept_fd(&p->file);
  if (type != 1 || fd < 0) return NOT_SUPPORTED;
  *(int *)out = dup(fd);
  return SUCCESS;
}
int FN(cuMemImportFromShareableHandle)(physical **out, void *given, int type) {
  if (type != 1) return NOT_SUPPORTED;
  kept file = keep(dup((int)(intptr_t)given));
  off_t bytes = lseek(file.fd, 0, SEEK_END);
  if (file.fd < 0 || bytes <= 0) { drop_kept(&file); return INVALID_VALUE; }
  physical *p = calloc(1, sizeof *p);
  *p = (physical){0x70687973, current_device(), (size_t)bytes, 1, file};
  take_memory(p->device, 0);
  *out = p;
  return SUCCESS;
}
int FN(cuMemGetAddressRange_v2)(uint64_t *base, size_t *bytes, uint64_t address) {
  range r;
  if (!range_of((void *)address, &r)) return INVALID_VALUE;
  if (base) *base = (uint64_t)r.base;
  if (bytes) *bytes = r.size;
  return SUCCESS;
}

// --- memory of another process. An allocation becomes a shared file when it is sent, and the handle
// names it: the process, its file descriptor, where in the file the memory begins, and `shared_known`.
#define BLOCK ((size_t)512)   // torch's allocator gives each storage whole ones
typedef struct { uint32_t magic; int pid, fd, device; uint64_t bytes, offset, file_device, inode, known; char rest[64 - 56]; } ipc_handle;
_Static_assert(sizeof(ipc_handle) == 64, "CUDA_IPC_HANDLE_SIZE");
int FN(cudaIpcGetMemHandle)(ipc_handle *out, void *address) {
  pthread_rwlock_wrlock(&table_lock);
  entry *e = entry_of(address);
  int result = e && e->r.kind == DEVICE_MEMORY ? SUCCESS : INVALID_VALUE;
  if (!result && e->file.fd < 0) {
    size_t mapped = (e->r.size + PAGE - 1) & ~(PAGE - 1);
    kept file = keep((int)syscall(SYS_memfd_create, "gpuprobe-device-memory", 1u));
    int fd = file.fd;
    bool ok = fd >= 0 && !ftruncate(fd, (off_t)(mapped + rounded(mapped / BLOCK, PAGE)));
    // What the memory holds moves into the file. Pages that were never touched stay holes.
    bool has[512];
    for (size_t at = 0; ok && at < mapped; at += 512 * PAGE) {
      size_t count = (mapped - at) / PAGE < 512 ? (mapped - at) / PAGE : 512;
      if (!touched(e->r.base + at, count, has)) memset(has, 1, sizeof has);
      for (size_t i = 0; ok && i < count; i++)
        if (has[i]) ok = pwrite(fd, e->r.base + at + i * PAGE, PAGE, (off_t)(at + i * PAGE)) == (ssize_t)PAGE;
    }
    ok = ok && mmap(e->r.base, mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd, 0) != MAP_FAILED;
    if (ok) { e->file = file; e->offset = 0; e->known = mapped; }
    else { drop_kept(&file); result = OUT_OF_MEMORY; }
  }
  if (!result) {
    memset(out, 0, sizeof *out);
    *out = (ipc_handle){.magic = 0x69706368, .pid = getpid(), .fd = e->file.fd, .device = e->r.device, .bytes = e->r.size, .offset = e->offset,
      .file_device = e->file.device, .inode = e->file.inode, .known = e->known};
  }
  pthread_rwlock_unlock(&table_lock);
  return fail(result);
}
int FN12(cudaIpcOpenMemHandle)(void **out, ipc_handle h, unsigned flags) {
  *out = NULL;
  if (h.magic != 0x69706368) return fail(INVALID_VALUE);
  if (h.pid == getpid()) return fail(INVALID_VALUE);   // as CUDA: not in the process that exported it
  int result = ensure_context(current_device());
  if (result) return fail(result);
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", h.pid, h.fd);
  kept file = keep(open(path, O_RDWR | O_CLOEXEC));
  if (file.fd < 0) return fail(INVALID_VALUE);   // the process has ended
  if (file.device != h.file_device || file.inode != h.inode) { drop_kept(&file); return fail(INVALID_VALUE); }   // or has closed it
  pthread_rwlock_wrlock(&table_lock);
  char *base = new_addresses(h.bytes);
  size_t mapped = (h.bytes + PAGE - 1) & ~(PAGE - 1);
  bool ok = base && mmap(base, mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, file.fd, (off_t)h.offset) != MAP_FAILED
    && add_entry((entry){{base, h.bytes, current_device(), DEVICE_MEMORY}, file, h.offset, true, NULL, h.known});
  pthread_rwlock_unlock(&table_lock);
  if (!ok) { drop_kept(&file); return fail(OUT_OF_MEMORY); }
  *out = base;
  return SUCCESS;
}
int FN13(cudaIpcOpenMemHandle)(void **out, ipc_handle h, unsigned flags) { return FN12(cudaIpcOpenMemHandle)(out, h, flags); }
int FN(cudaIpcCloseMemHandle)(void *address) { return fail(release(address, true)); }
// Whether the values of the storage that begins here are computed, for all processes that map it: 0 or 1; -1 if that
// is noted nowhere. `set`: what it is from now on, or -1.
int FN(shared_known)(const void *address, int set) {
  unsigned char value = set > 0;
  pthread_rwlock_rdlock(&table_lock);
  entry *e = entry_of(address);
  int fd = e && e->known ? kept_fd(&e->file) : -1;
  bool ok = false;
  if (fd >= 0) {
    off_t at = (off_t)(e->known + (size_t)((const char *)address - e->r.base) / BLOCK);
    ok = (set < 0 ? pread(fd, &value, 1, at) : pwrite(fd, &value, 1, at)) == 1;
  }
  pthread_rwlock_unlock(&table_lock);
  return ok ? value : -1;
}
