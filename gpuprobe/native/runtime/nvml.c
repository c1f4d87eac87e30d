// NVML: the devices of the machine, in the order of their PCI bus, without CUDA_VISIBLE_DEVICES.
#include "native.h"
#include <strings.h>
#include <unistd.h>

enum { NVML_SUCCESS = 0, NVML_INVALID = 2, NVML_NOT_SUPPORTED = 3, NVML_NOT_FOUND = 6, NVML_INSUFFICIENT = 7 };
static int index_of(const device *d) { return d ? (int)(d - machine_device(0)) : -1; }
static void uuid_text(const device *d, char *out, size_t size) {
  const unsigned char *u = d->uuid;
  snprintf(out, size, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
}
int FN(nvmlInit_v2)(void) { machine_count(); return NVML_SUCCESS; }
int FN(nvmlInit)(void) { return NVML_SUCCESS; }
int FN(nvmlInitWithFlags)(unsigned flags) { return NVML_SUCCESS; }
int FN(nvmlShutdown)(void) { return NVML_SUCCESS; }
int FN(nvmlDeviceGetCount_v2)(unsigned *count) { *count = (unsigned)machine_count(); return NVML_SUCCESS; }
int FN(nvmlDeviceGetCount)(unsigned *count) { return FN(nvmlDeviceGetCount_v2)(count); }
int FN(nvmlDeviceGetHandleByIndex_v2)(unsigned i, device **out) { *out = machine_device((int)i); return *out ? NVML_SUCCESS : NVML_INVALID; }
int FN(nvmlDeviceGetHandleByIndex)(unsigned i, device **out) { return FN(nvmlDeviceGetHandleByIndex_v2)(i, out); }
int FN(nvmlDeviceGetHandleByPciBusId_v2)(const char *text, device **out) {
  for (int i = 0; i < machine_count(); i++) {
    char own[16];
    snprintf(own, sizeof own, "%02x:00.0", 0x1b + i);
    size_t n = strlen(text), m = strlen(own);
    if (n >= m && !strcasecmp(text + n - m, own)) { *out = machine_device(i); return NVML_SUCCESS; }
  }
  return NVML_NOT_FOUND;
}
int FN(nvmlDeviceGetHandleByUUID)(const char *text, device **out) {
  for (int i = 0; i < machine_count(); i++) {
    char own[64];
    uuid_text(machine_device(i), own, sizeof own);
    if (!strcasecmp(own, text)) { *out = machine_device(i); return NVML_SUCCESS; }
  }
  return NVML_NOT_FOUND;
}
int FN(nvmlDeviceGetIndex)(device *d, unsigned *out) { *out = (unsigned)index_of(d); return NVML_SUCCESS; }
int FN(nvmlDeviceGetMinorNumber)(device *d, unsigned *out) { *out = (unsigned)index_of(d); return NVML_SUCCESS; }
int FN(nvmlDeviceGetName)(device *d, char *text, unsigned size) { snprintf(text, size, "%s", d->name); return NVML_SUCCESS; }
int FN(nvmlDeviceGetUUID)(device *d, char *text, unsigned size) { uuid_text(d, text, size); return NVML_SUCCESS; }
int FN(nvmlDeviceGetBrand)(device *d, int *out) { *out = 14; return NVML_SUCCESS; }   // NVML_BRAND_NVIDIA
int FN(nvmlDeviceGetArchitecture)(device *d, unsigned *out) {
  *out = d->major >= 10 ? 10 : d->major == 9 ? 9 : d->major == 8 ? (d->minor == 9 ? 8 : 7) : d->minor == 5 ? 6 : 5;
  return NVML_SUCCESS;
}
int FN(nvmlDeviceGetCudaComputeCapability)(device *d, int *major, int *minor) { *major = d->major; *minor = d->minor; return NVML_SUCCESS; }
typedef struct { unsigned long long total, free, used; } memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2;
int FN(nvmlDeviceGetMemoryInfo)(device *d, memory *out) {
  out->total = d->total_memory; out->used = used_memory(index_of(d)); out->free = out->total - out->used;
  return NVML_SUCCESS;
}
int FN(nvmlDeviceGetMemoryInfo_v2)(device *d, memory_v2 *out) {
  out->total = d->total_memory; out->reserved = 0; out->used = used_memory(index_of(d)); out->free = out->total - out->used;
  return NVML_SUCCESS;
}
typedef struct { char legacy[16]; unsigned domain, bus, device_number, id, subsystem; char text[32]; } pci;
int FN(nvmlDeviceGetPciInfo_v3)(device *d, pci *out) {
  memset(out, 0, sizeof *out);
  out->bus = 0x1bu + (unsigned)index_of(d);
  out->id = 0x10deu;   // the maker, without a device id
  snprintf(out->legacy, sizeof out->legacy, "0000:%02X:00.0", out->bus);
  snprintf(out->text, sizeof out->text, "00000000:%02X:00.0", out->bus);
  return NVML_SUCCESS;
}
int FN(nvmlDeviceGetP2PStatus)(device *a, device *b, int kind, int *status) { *status = 0; return NVML_SUCCESS; }
// Links: how many a GPU has, and to what, is not in the catalogue.
int FN(nvmlDeviceGetNvLinkState)(device *d, unsigned link, unsigned *on) { return NVML_NOT_SUPPORTED; }
int FN(nvmlDeviceGetNvLinkRemoteDeviceType)(device *d, unsigned link, int *type) { return NVML_NOT_SUPPORTED; }
int FN(nvmlDeviceGetNvLinkRemotePciInfo_v2)(device *d, unsigned link, pci *out) { return NVML_NOT_SUPPORTED; }
int FN(nvmlDeviceGetMigMode)(device *d, unsigned *now, unsigned *pending) { return NVML_NOT_SUPPORTED; }
int FN(nvmlDeviceGetMaxMigDeviceCount)(device *d, unsigned *out) { *out = 0; return NVML_SUCCESS; }
int FN(nvmlDeviceGetNumGpuCores)(device *d, unsigned *out) { *out = (unsigned)d->multiprocessors * 128; return NVML_SUCCESS; }
int FN(nvmlDeviceGetMemoryBusWidth)(device *d, unsigned *out) { *out = (unsigned)d->bus_bits; return NVML_SUCCESS; }
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process;
int FN(nvmlDeviceGetComputeRunningProcesses_v3)(device *d, unsigned *count, process *out) {
  unsigned room = *count;
  *count = used_memory(index_of(d)) > 0;
  if (!*count) return NVML_SUCCESS;
  if (!room || !out) return NVML_INSUFFICIENT;
  out[0] = (process){(unsigned)getpid(), used_memory(index_of(d)), ~0u, ~0u};
  return NVML_SUCCESS;
}
int FN(nvmlDeviceGetComputeRunningProcesses)(device *d, unsigned *count, void *out) {   // the first version: pid and bytes
  unsigned room = *count;
  *count = used_memory(index_of(d)) > 0;
  if (!*count) return NVML_SUCCESS;
  if (!room || !out) return NVML_INSUFFICIENT;
  struct { unsigned pid; unsigned long long used; } one = {(unsigned)getpid(), used_memory(index_of(d))};
  memcpy(out, &one, sizeof one);
  return NVML_SUCCESS;
}
int FN(nvmlDeviceGetGraphicsRunningProcesses_v3)(device *d, unsigned *count, process *out) { *count = 0; return NVML_SUCCESS; }
int FN(nvmlSystemGetCudaDriverVersion_v2)(int *version) { machine_count(); *version = driver_version; return NVML_SUCCESS; }
int FN(nvmlSystemGetCudaDriverVersion)(int *version) { return FN(nvmlSystemGetCudaDriverVersion_v2)(version); }
int FN(nvmlSystemGetDriverVersion)(char *text, unsigned size) { machine_count(); snprintf(text, size, "%s", driver_version >= 13000 ? "580.65.06" : "550.54.14"); return NVML_SUCCESS; }
int FN(nvmlSystemGetNVMLVersion)(char *text, unsigned size) { machine_count(); snprintf(text, size, "%d.%s", driver_version / 1000, driver_version >= 13000 ? "580.65.06" : "550.54.14"); return NVML_SUCCESS; }
int FN(nvmlDeviceGetNvLinkCapability)(device *d, unsigned link, int which, unsigned *out) { return NVML_NOT_SUPPORTED; }
// Fabric: there is none, and torch's allocator asks before it maps memory.
typedef struct { unsigned version; unsigned char cluster[16]; unsigned status; unsigned clique; unsigned char state; unsigned health; } fabric;
int FN(nvmlDeviceGetGpuFabricInfoV)(device *d, fabric *out) { unsigned version = out->version; memset(out, 0, sizeof *out); out->version = version; return NVML_SUCCESS; }
int FN(nvmlDeviceGetGpuFabricInfo)(device *d, void *out) { return NVML_NOT_SUPPORTED; }
const char *FN(nvmlErrorString)(int status) {
  switch (status) {
    case 0: return "The operation was successful";
    case 2: return "A supplied argument is invalid";
    case 3: return "The requested operation is not available on target device";
    case 6: return "A query to find an object was unsuccessful";
    case 7: return "An input argument is not large enough";
    default: return "Unknown Error";
  }
}
