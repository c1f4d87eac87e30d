// Devices: the settings of this process, CUDA_VISIBLE_DEVICES, contexts, and the memory in use.
#include "native.h"
#include <strings.h>
#include <unistd.h>

int cuda_version = 13000, driver_version = 13000;
static device devices[MAX_DEVICES];
static bool endless;
static int n_devices, visible[MAX_DEVICES], n_visible;
static _Atomic size_t used[MAX_DEVICES];   // by index in the machine: memory of this process, its context included
static size_t driver_bytes[MAX_DEVICES];   // by index in the machine; of `used`, beyond the context
static atomic_bool contexts[MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t settings_once = PTHREAD_ONCE_INIT, visible_once = PTHREAD_ONCE_INIT;
static __thread int current;
static __thread int last_error;
static char *settings;
static atomic_bool devices_counted, devices_read;   // the devices: their number alone, or more

// The settings are KEY=VALUE;… in GPUPROBE_NATIVE; each "device" starts a group of its own:
// cuda=13000;device=NVIDIA H100 80GB HBM3;total_memory=85029158912;…
static const char *find_text(const char *key, char *out, size_t size) {
  size_t n = strlen(key);
  for (const char *at = settings; at && *at;) {
    const char *end = strchrnul(at, ';');
    if (!strncmp(at, "device=", 7)) break;   // what follows belongs to devices
    if ((size_t)(end - at) > n && !strncmp(at, key, n) && at[n] == '=') {
      snprintf(out, size, "%.*s", (int)(end - at - n - 1), at + n + 1);
      return out;
    }
    at = *end ? end + 1 : end;
  }
  return NULL;
}

// Python imports gpuprobe at its start in every process with the engine, also where PYTHONPATH was replaced.
__attribute__((constructor)) static void set_startup(void) {
  const char *folder = getenv("GPUPROBE_STARTUP"), *paths = getenv("PYTHONPATH");
  if (!folder || !getenv("GPUPROBE_NATIVE") || (paths && strstr(paths, folder))) return;
  size_t size = strlen(folder) + (paths ? strlen(paths) : 0) + 2;
  char *text = malloc(size);
  if (!text) return;
  snprintf(text, size, paths && *paths ? "%s:%s" : "%s", folder, paths);
  setenv("PYTHONPATH", text, 1);
  free(text);
}

static void add_device(void) {
  device *d = &devices[n_devices];
  *d = (device){.name = "NVIDIA H100 80GB HBM3", .total_memory = 85029158912ull, .context_bytes = 500ull << 20,
    .major = 9, .multiprocessors = 132, .threads_per_multiprocessor = 2048, .blocks_per_multiprocessor = 32,
    .registers_per_multiprocessor = 65536, .threads_per_block = 1024, .warp_size = 32,
    .shared_per_multiprocessor = 233472, .shared_per_block = 49152, .shared_per_block_optin = 232448,
    .l2_bytes = 52428800, .clock_khz = 1980000, .memory_clock_khz = 2619000, .bus_bits = 5120};
  for (int i = 0; i < 16; i++) d->uuid[i] = (unsigned char)(0x67 + 29 * i);   // the same in every process
  d->uuid[15] = (unsigned char)n_devices++;
}

static void set_number(device *d, const char *key, const char *value) {
#define SIZE(field) if (!strcmp(key, #field)) { d->field = strtoull(value, NULL, 10); return; }
#define NUMBER(field) if (!strcmp(key, #field)) { d->field = (int)strtol(value, NULL, 10); return; }
  SIZE(total_memory) SIZE(context_bytes)
  NUMBER(major) NUMBER(minor) NUMBER(multiprocessors) NUMBER(threads_per_multiprocessor)
  NUMBER(blocks_per_multiprocessor) NUMBER(registers_per_multiprocessor) NUMBER(threads_per_block)
  NUMBER(warp_size) NUMBER(shared_per_multiprocessor) NUMBER(shared_per_block)
  NUMBER(shared_per_block_optin) NUMBER(l2_bytes) NUMBER(clock_khz) NUMBER(memory_clock_khz) NUMBER(bus_bits)
#undef SIZE
#undef NUMBER
}

static void apply_settings(void) {
  n_devices = 0;
  char text[64];
  if (find_text("cuda", text, sizeof text)) cuda_version = atoi(text);
  driver_version = cuda_version;
  endless = find_text("endless", text, sizeof text) && atoi(text);
  if (find_text("driver", text, sizeof text)) driver_version = atoi(text);
  for (const char *at = settings; *at;) {
    const char *end = strchrnul(at, ';');
    char part[320];
    snprintf(part, sizeof part, "%.*s", (int)(end - at), at);
    char *value = strchr(part, '=');
    if (value) {
      *value++ = 0;
      if (!strcmp(part, "device") && n_devices < MAX_DEVICES) {
        add_device();
        if (*value) snprintf(devices[n_devices - 1].name, sizeof devices[0].name, "%s", value);
      } else if (n_devices) {
        set_number(&devices[n_devices - 1], part, value);
      }
    }
    at = *end ? end + 1 : end;
  }
}

static void read_settings(void) {
  if (settings) return;   // gpuprobe has set them in this process
  const char *given = getenv("GPUPROBE_NATIVE");
  settings = strdup(given ? given : "");
  apply_settings();
}

static void read_visible(void) {
  pthread_once(&settings_once, read_settings);
  const char *given = getenv("CUDA_VISIBLE_DEVICES");
  if (!given) {
    for (n_visible = 0; n_visible < n_devices; n_visible++) visible[n_visible] = n_visible;
    return;
  }
  // As documented: indices or UUIDs (or their beginnings), up to the first that is invalid.
  for (const char *at = given; *at && n_visible < MAX_DEVICES;) {
    const char *end = strchrnul(at, ',');
    char part[64];
    snprintf(part, sizeof part, "%.*s", (int)(end - at), at);
    int found = -1;
    if (!strncasecmp(part, "GPU-", 4)) {
      for (int i = 0; i < n_devices && found < 0; i++) {
        char text[48], *to = text + sprintf(text, "GPU-");
        for (int k = 0; k < 16; k++) to += sprintf(to, k == 4 || k == 6 || k == 8 || k == 10 ? "-%02x" : "%02x", devices[i].uuid[k]);
        if (!strncasecmp(text, part, strlen(part))) found = i;
      }
    } else {
      char *stop;
      long value = strtol(part, &stop, 10);
      if (stop != part && value >= 0 && value < n_devices) found = (int)value;
    }
    for (int i = 0; i < n_visible; i++)
      if (visible[i] == found) { n_visible = 0; return; }   // named twice: none is visible
    if (found < 0) return;
    visible[n_visible++] = found;
    at = *end ? end + 1 : end;
  }
}

int visible_count(void) { devices_counted = true; pthread_once(&visible_once, read_visible); return n_visible; }
int visible_index(int ordinal) { return ordinal >= 0 && ordinal < visible_count() ? visible[ordinal] : -1; }
device *visible_device(int ordinal) { devices_read = true; int i = visible_index(ordinal); return i < 0 ? NULL : &devices[i]; }
int FN(visible_devices)(void) { return visible_count(); }
int FN(machine_index)(int ordinal) { return visible_index(ordinal); }
int machine_count(void) { pthread_once(&settings_once, read_settings); return n_devices; }
device *machine_device(int index) { devices_read = true; return index >= 0 && index < machine_count() ? &devices[index] : NULL; }
int current_device(void) { return current; }
int fail(int error) { if (error != SUCCESS && error != NOT_READY) last_error = error; return error; }

int setting(const char *key, int missing) {
  pthread_once(&settings_once, read_settings);
  char text[64];
  return find_text(key, text, sizeof text) ? atoi(text) : missing;
}

const char *setting_text(const char *key) {
  pthread_once(&settings_once, read_settings);
  static __thread char text[4096];
  return find_text(key, text, sizeof text) ? text : "";
}

bool has_context(int ordinal) { int i = visible_index(ordinal); return i >= 0 && atomic_load(&contexts[i]); }

int ensure_context(int ordinal) {
  int i = visible_index(ordinal);
  if (i < 0) return visible_count() ? INVALID_DEVICE : NO_DEVICE;
  if (atomic_load(&contexts[i])) return SUCCESS;
  int result = SUCCESS;
  pthread_mutex_lock(&lock);
  if (!atomic_load(&contexts[i])) {
    if (devices[i].context_bytes > devices[i].total_memory) result = OUT_OF_MEMORY;
    else { atomic_fetch_add(&used[i], devices[i].context_bytes); atomic_store(&contexts[i], true); }
  }
  pthread_mutex_unlock(&lock);
  return result;
}

int use_device(int ordinal) {
  int result = ensure_context(ordinal);
  if (result == SUCCESS) current = ordinal;
  return result;
}

static size_t whole(size_t bytes) { return (bytes + GRANULARITY - 1) & ~(GRANULARITY - 1); }

bool take_memory(int ordinal, size_t bytes) {
  int i = visible_index(ordinal);
  bool fits = false;
  pthread_mutex_lock(&lock);
  // Endless devices (settings): an estimate finds out how much a program would need.
  if (i >= 0 && (endless || (bytes <= devices[i].total_memory && whole(bytes) + atomic_load(&used[i]) <= devices[i].total_memory))) {
    atomic_fetch_add(&used[i], whole(bytes));
    fits = true;
  }
  pthread_mutex_unlock(&lock);
  return fits;
}

void give_memory(int ordinal, size_t bytes) { int i = visible_index(ordinal); if (i >= 0) atomic_fetch_sub(&used[i], whole(bytes)); }

// Memory of the driver and of libraries that no function's documentation tells: graphs, NCCL's buffers. It adds up in
// bytes, and takes whole granules from the device, whether they fit or not: the driver has taken it before it is counted.
void driver_memory(int ordinal, long long bytes) {
  int i = visible_index(ordinal);
  if (i < 0) return;
  pthread_mutex_lock(&lock);
  size_t before = whole(driver_bytes[i]);
  driver_bytes[i] = bytes < 0 && (size_t)-bytes > driver_bytes[i] ? 0 : driver_bytes[i] + bytes;
  atomic_fetch_add(&used[i], whole(driver_bytes[i]) - before);
  pthread_mutex_unlock(&lock);
}
size_t used_memory(int index) { return index >= 0 && index < MAX_DEVICES ? atomic_load(&used[index]) : 0; }
size_t free_memory(int ordinal) {
  int i = visible_index(ordinal);
  size_t taken = i < 0 ? 0 : atomic_load(&used[i]);
  return i < 0 || taken > devices[i].total_memory ? 0 : devices[i].total_memory - taken;
}

// --- the runtime's functions about devices
int FN(cudaGetDeviceCount)(int *count) { *count = visible_count(); return *count ? SUCCESS : fail(NO_DEVICE); }
int FN(cudaGetDevice)(int *ordinal) { if (!visible_count()) return fail(NO_DEVICE); *ordinal = current; return SUCCESS; }
int FN(cudaSetDevice)(int ordinal) { return fail(use_device(ordinal)); }
int FN(cudaInitDevice)(int ordinal, unsigned a, unsigned b) { return fail(ensure_context(ordinal)); }
int FN(cudaDeviceReset)(void) { return SUCCESS; }
int FN(cudaSetDeviceFlags)(unsigned flags) { return SUCCESS; }
int FN(cudaGetDeviceFlags)(unsigned *flags) { *flags = 0; return SUCCESS; }
int FN(cudaDriverGetVersion)(int *version) { machine_count(); *version = driver_version; return SUCCESS; }
int FN(cudaRuntimeGetVersion)(int *version) { machine_count(); *version = cuda_version; return SUCCESS; }
int FN(cudaDeviceCanAccessPeer)(int *can, int a, int b) {
  if (!visible_device(a) || !visible_device(b)) return fail(INVALID_DEVICE);
  *can = a != b;
  return SUCCESS;
}
int FN(cudaDeviceEnablePeerAccess)(int peer, unsigned flags) {
  static atomic_bool enabled[MAX_DEVICES][MAX_DEVICES];
  if (!visible_device(peer) || peer == current) return fail(INVALID_DEVICE);
  if (atomic_exchange(&enabled[current][peer], true)) return fail(PEER_ALREADY_ENABLED);
  return SUCCESS;
}
int FN(cudaDeviceGetP2PAttribute)(int *value, int attribute, int a, int b) { *value = attribute == 1 ? 0 : a != b; return SUCCESS; }
int FN(cudaDeviceGetStreamPriorityRange)(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return SUCCESS;
}
int FN(cudaDeviceGetPCIBusId)(char *text, int size, int ordinal) {
  if (!visible_device(ordinal)) return fail(INVALID_DEVICE);
  snprintf(text, (size_t)size, "0000:%02X:00.0", 0x1b + visible_index(ordinal));
  return SUCCESS;
}
int FN(cudaDeviceGetByPCIBusId)(int *ordinal, const char *text) {
  for (int i = 0; i < visible_count(); i++) {
    char own[32];
    snprintf(own, sizeof own, "%02x:00.0", 0x1b + visible_index(i));
    size_t n = strlen(text), m = strlen(own);
    if (n >= m && !strcasecmp(text + n - m, own)) { *ordinal = i; return SUCCESS; }
  }
  return fail(INVALID_DEVICE);
}
int FN(cudaDeviceGetLimit)(size_t *value, int limit) { static const size_t known[] = {1024, 1 << 20, 8 << 20, 2, 2048, 128}; *value = limit >= 0 && limit < 6 ? known[limit] : 0; return limit >= 0 && limit < 7 ? SUCCESS : fail(INVALID_VALUE); }
int FN(cudaDeviceSetLimit)(int limit, size_t value) { return SUCCESS; }
int FN(cudaDeviceGetCacheConfig)(int *config) { *config = 0; return SUCCESS; }
int FN(cudaDeviceSetCacheConfig)(int config) { return SUCCESS; }
int FN(cudaMemGetInfo)(size_t *free_bytes, size_t *total) {
  int result = ensure_context(current);
  if (result) return fail(result);
  if (total) *total = visible_device(current)->total_memory;
  if (free_bytes) *free_bytes = free_memory(current);
  return SUCCESS;
}

// The numbers are those of cudaDeviceAttr and CUdevice_attribute, which are equal.
int device_attribute(int *value, int attribute, int ordinal) {
  device *d = visible_device(ordinal);
  if (!d) return INVALID_DEVICE;
  switch (attribute) {
    case 1: *value = d->threads_per_block; break;
    case 2: case 3: *value = 1024; break;
    case 4: *value = 64; break;
    case 5: *value = 2147483647; break;
    case 6: case 7: *value = 65535; break;
    case 8: *value = d->shared_per_block; break;
    case 9: *value = 65536; break;
    case 10: *value = d->warp_size; break;
    case 11: *value = 2147483647; break;
    case 12: *value = d->registers_per_multiprocessor; break;
    case 13: *value = d->clock_khz; break;
    case 14: *value = 512; break;
    case 15: *value = 1; break;
    case 16: *value = d->multiprocessors; break;
    case 17: case 18: *value = 0; break;
    case 19: *value = 1; break;
    case 20: *value = 0; break;
    case 21: case 22: case 23: *value = attribute == 21 ? 131072 : attribute == 22 ? 131072 : 65536; break;
    case 24: case 25: case 26: *value = 16384; break;
    case 27: case 28: *value = 32768; break;
    case 29: *value = 2048; break;
    case 30: *value = 512; break;
    case 31: case 32: *value = 1; break;
    case 33: *value = 0x1b + visible_index(ordinal); break;
    case 34: case 35: *value = 0; break;
    case 36: *value = d->memory_clock_khz; break;
    case 37: *value = d->bus_bits; break;
    case 38: *value = d->l2_bytes; break;
    case 39: *value = d->threads_per_multiprocessor; break;
    case 40: *value = 3; break;
    case 41: *value = 1; break;
    case 50: *value = 0; break;
    case 51: *value = 32; break;
    case 75: *value = d->major; break;
    case 76: *value = d->minor; break;
    case 78: case 79: case 80: *value = 1; break;
    case 81: *value = d->shared_per_multiprocessor; break;
    case 82: *value = d->registers_per_multiprocessor; break;
    case 83: *value = 1; break;
    case 84: case 85: case 86: *value = 0; break;
    case 87: *value = d->minor || d->major >= 12 ? 64 : 2; break;
    case 88: *value = 0; break;
    case 89: case 90: case 91: *value = 1; break;
    case 95: case 96: *value = 1; break;
    case 97: *value = d->shared_per_block_optin; break;
    case 98: case 99: *value = 1; break;
    case 100: case 101: *value = 0; break;
    case 102: *value = 1; break;   // virtual memory management
    case 103: *value = 1; break;   // POSIX file descriptors
    case 104: case 105: *value = 0; break;
    case 106: *value = d->blocks_per_multiprocessor; break;
    case 107: *value = 0; break;
    case 108: *value = d->l2_bytes * 3 / 4; break;
    case 109: *value = 134213632; break;
    case 110: *value = 0; break;   // GPUDirect RDMA with virtual memory
    case 111: *value = 1024; break;
    case 112: case 113: case 114: case 115: *value = 1; break;
    case 116: case 117: case 118: *value = 0; break;
    case 119: *value = 1; break;
    case 120: *value = d->major >= 9; break;
    case 121: *value = 1; break;
    case 123: *value = 0; break;
    case 124: *value = 0; break;
    case 125: *value = 1; break;
    case 126: *value = d->major >= 9 ? 4 : 1; break;
    case 127: *value = d->major >= 9; break;   // tensor maps
    case 128: *value = 0; break;   // fabric handles
    case 129: *value = 1; break;
    case 130: case 131: *value = attribute == 131 ? -1 : 0; break;
    case 132: *value = 0; break;   // multicast
    case 133: *value = 0; break;
    case 134: *value = -1; break;
    default:
      if (attribute < 1 || attribute > 160) return INVALID_VALUE;
      *value = 0;
  }
  return SUCCESS;
}
int FN(cudaDeviceGetAttribute)(int *value, int attribute, int ordinal) { return fail(device_attribute(value, attribute, ordinal)); }

// cudaDeviceProp of CUDA 12 and 13: the latter dropped the fields marked OLD. Textures and surfaces stay 0.
#define PROPERTIES(NAME, OLD, TAIL) \
  typedef struct { char name[256]; unsigned char uuid[16]; char luid[8]; unsigned luid_mask; size_t total_memory, shared_per_block; int registers_per_block, warp_size; \
    size_t pitch; int threads_per_block, block[3], grid[3]; OLD(clock) size_t constant_memory; int major, minor; size_t texture_alignment, texture_pitch; OLD(overlap) int multiprocessors; \
    OLD(timeout) int integrated, maps_host; OLD(mode) int texture_1d, texture_1d_mip; OLD(texture_1d_linear) int textures[2 + 2 + 3 + 2 + 3 + 3 + 1 + 2 + 3 + 2], surfaces[1 + 2 + 3 + 2 + 3 + 1 + 2]; size_t surface_alignment; \
    int concurrent, ecc, pci_bus, pci_device, pci_domain, tcc, async_engines, unified; OLD(memory_clock) int bus_bits, l2_bytes, persisting_l2, threads_per_multiprocessor, priorities, global_l1, local_l1; \
    size_t shared_per_multiprocessor; int registers_per_multiprocessor, managed, board, board_group, atomics; OLD(double_ratio) int pageable, concurrent_managed, preemption, registered_pointer, cooperative; \
    OLD(cooperative_multi) size_t shared_optin; int host_tables, direct_managed, blocks_per_multiprocessor, window; size_t reserved_shared; int host_register, sparse, read_only_register, semaphores, pools, \
    rdma; unsigned rdma_flush; int rdma_order; unsigned pool_handles; int deferred, ipc_events, cluster, function_pointers; TAIL } NAME;
#define KEEP(field) int field;
#define DROP(field)
PROPERTIES(properties12, KEEP, int reserved[63];)
PROPERTIES(properties13, DROP, int numa_config; int numa_id; int mps; int host_numa; unsigned pci_id; unsigned pci_subsystem; int multinode_ipc; int reserved[56];)
_Static_assert(sizeof(properties12) == 1032, "cudaDeviceProp of CUDA 12 has 1032 bytes");
_Static_assert(sizeof(properties13) == 1008, "cudaDeviceProp of CUDA 13 has 1008 bytes");

#define FILL(p, d, ordinal) do { \
    memset(p, 0, sizeof *(p)); memcpy((p)->name, (d)->name, sizeof (p)->name); memcpy((p)->uuid, (d)->uuid, 16); \
    (p)->total_memory = (d)->total_memory; (p)->shared_per_block = (size_t)(d)->shared_per_block; (p)->registers_per_block = (d)->registers_per_multiprocessor; \
    (p)->warp_size = (d)->warp_size; (p)->pitch = 2147483647; (p)->threads_per_block = (d)->threads_per_block; (p)->block[0] = (p)->block[1] = 1024; (p)->block[2] = 64; \
    (p)->grid[0] = 2147483647; (p)->grid[1] = (p)->grid[2] = 65535; (p)->constant_memory = 65536; (p)->major = (d)->major; (p)->minor = (d)->minor; (p)->texture_alignment = 512; \
    (p)->texture_pitch = 32; (p)->multiprocessors = (d)->multiprocessors; (p)->maps_host = 1; (p)->surface_alignment = 512; (p)->concurrent = 1; (p)->ecc = 1; \
    (p)->pci_bus = 0x1b + visible_index(ordinal); (p)->async_engines = 3; (p)->unified = 1; (p)->bus_bits = (d)->bus_bits; (p)->l2_bytes = (d)->l2_bytes; (p)->persisting_l2 = (d)->l2_bytes * 3 / 4; \
    (p)->threads_per_multiprocessor = (d)->threads_per_multiprocessor; (p)->priorities = (p)->global_l1 = (p)->local_l1 = 1; (p)->shared_per_multiprocessor = (size_t)(d)->shared_per_multiprocessor; \
    (p)->registers_per_multiprocessor = (d)->registers_per_multiprocessor; (p)->managed = (p)->concurrent_managed = (p)->preemption = (p)->registered_pointer = (p)->cooperative = 1; \
    (p)->shared_optin = (size_t)(d)->shared_per_block_optin; (p)->blocks_per_multiprocessor = (d)->blocks_per_multiprocessor; (p)->window = 134213632; (p)->reserved_shared = 1024; (p)->host_register = 1; \
    (p)->sparse = (p)->read_only_register = (p)->semaphores = (p)->pools = 1; (p)->pool_handles = 1; (p)->deferred = (p)->ipc_events = 1; (p)->cluster = (d)->major >= 9; (p)->function_pointers = 0; } while (0)

int FN13(cudaGetDeviceProperties)(properties13 *p, int ordinal) {
  device *d = visible_device(ordinal);
  if (!d) return fail(INVALID_DEVICE);
  FILL(p, d, ordinal);
  return SUCCESS;
}
int FN12(cudaGetDeviceProperties_v2)(properties12 *p, int ordinal) {
  device *d = visible_device(ordinal);
  if (!d) return fail(INVALID_DEVICE);
  FILL(p, d, ordinal);
  p->clock = d->clock_khz; p->memory_clock = d->memory_clock_khz; p->overlap = 1; p->cooperative_multi = 1;
  p->double_ratio = d->minor || d->major >= 12 ? 64 : 2;
  return SUCCESS;
}

// --- errors
#define ERRORS(X) X(0, cudaSuccess, "no error") X(1, cudaErrorInvalidValue, "invalid argument") X(2, cudaErrorMemoryAllocation, "out of memory") \
  X(3, cudaErrorInitializationError, "initialization error") X(9, cudaErrorInvalidConfiguration, "invalid configuration argument") X(13, cudaErrorInvalidSymbol, "invalid device symbol") \
  X(98, cudaErrorInvalidDeviceFunction, "invalid device function") X(100, cudaErrorNoDevice, "no CUDA-capable device is detected") X(101, cudaErrorInvalidDevice, "invalid device ordinal") \
  X(201, cudaErrorDeviceUninitialized, "invalid device context") X(400, cudaErrorInvalidResourceHandle, "invalid resource handle") X(401, cudaErrorIllegalState, "the operation cannot be performed in the present state") \
  X(500, cudaErrorSymbolNotFound, "named symbol not found") X(600, cudaErrorNotReady, "device not ready") X(704, cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled") \
  X(801, cudaErrorNotSupported, "operation not supported") X(900, cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing") \
  X(901, cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture") X(904, cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work") \
  X(907, cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream") X(999, cudaErrorUnknown, "unknown error")
int FN(cudaGetLastError)(void) { int error = last_error; last_error = SUCCESS; return error; }
int FN(cudaPeekAtLastError)(void) { return last_error; }
const char *FN(cudaGetErrorName)(int error) {
  switch (error) {
#define X(number, name, text) case number: return #name;
    ERRORS(X)
#undef X
  }
  return "unrecognized error code";
}
const char *FN(cudaGetErrorString)(int error) {
  if (error == COLLECTIVE_FAILED && collective_failure()) return collective_failure();
  switch (error) {
#define X(number, name, text) case number: return text;
    ERRORS(X)
#undef X
  }
  return "unrecognized error code";
}

// --- what gpuprobe sets and reads
int FN(version)(void) { return 1; }
int FN(devices)(void) { return machine_count(); }
unsigned long long FN(used)(int index) { return used_memory(index); }
void FN(driver_memory)(int ordinal, long long bytes) { driver_memory(ordinal, bytes); }
void FN(set_endless)(bool on) { endless = on; }
bool FN(settings_read)(void) { return devices_counted || devices_read; }
// Autograd's first backward pass counts the devices, also on the CPU: until more was read, others of the same
// number can replace them.
bool FN(set_settings)(const char *text) {
  int more = 0;
  for (const char *at = text; at; at = strchr(at, ';')) {
    if (*at == ';') at++;
    more += !strncmp(at, "device=", 7);
  }
  if (devices_read || (devices_counted && more != n_devices)) return false;
  settings = strdup(text);
  apply_settings();
  return true;
}
