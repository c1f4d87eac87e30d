/* The fleets of gpuprobe.testing, served by a shared library with NVML's names, so that any
 * monitor can look at them. fleet_library.py writes fleet.h from the fleet's description. Tests and
 * benchmarks only. A function that is not here is "not found", as in a driver that lacks it. */
#include <stdint.h>
#include <string.h>

#include "fleet.h"

typedef unsigned int u32;
typedef unsigned long long u64;
#define EXPORT __attribute__((visibility("default")))
enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, UNSUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7 };

static int open_count;

/* A handle is 1 + device + 256 * (1 + MIG instance). */
static const Dev *device_of(uintptr_t handle, const Mig **mig) {
    uintptr_t device = (handle - 1) % 256, instance = (handle - 1) / 256;
    if (mig) *mig = 0;
    if (!handle || device >= FLEET_COUNT) return 0;
    const Dev *d = &FLEET[device];
    if (instance) {
        if (instance > (uintptr_t)d->mig_count) return 0;
        if (mig) *mig = &d->migs[instance - 1];
    }
    return d;
}

static int number(uintptr_t handle, int fact, int position, int64_t *out) {
    const Mig *mig;
    const Dev *d = device_of(handle, &mig);
    if (!open_count) return UNINITIALIZED;
    if (!d) return INVALID;
    if (d->lost) return 15;
    const Num *n = mig ? &mig->facts[fact] : &d->facts[fact];
    if (n->code) return n->code;
    if (position >= n->count) return UNSUPPORTED;
    *out = n->v[position];
    return *out == NO_VALUE ? UNSUPPORTED : OK;
}

static int text(uintptr_t handle, int which, char *buffer, u32 size) {
    const Mig *mig;
    const Dev *d = device_of(handle, &mig);
    if (!open_count) return UNINITIALIZED;
    if (!d) return INVALID;
    if (d->lost) return 15;
    const Text *t = mig ? &mig->texts[which] : &d->texts[which];
    if (t->code) return t->code;
    strncpy(buffer, t->s, size);
    if (size) buffer[size - 1] = 0;
    return OK;
}

#define SCALAR(name, fact, type)                                  \
    EXPORT int name(uintptr_t h, type *out) {                     \
        int64_t v;                                                \
        int code = number(h, fact, 0, &v);                        \
        if (!code) *out = (type)v;                                \
        return code;                                              \
    }
#define PAIR(name, fact)                                          \
    EXPORT int name(uintptr_t h, u32 *a, u32 *b) {                \
        int64_t x, y;                                             \
        int code = number(h, fact, 0, &x);                        \
        if (!code) code = number(h, fact, 1, &y);                 \
        if (!code) *a = (u32)x, *b = (u32)y;                      \
        return code;                                              \
    }
#define INDEXED(name, fact, type)                                 \
    EXPORT int name(uintptr_t h, u32 i, type *out) {              \
        int64_t v;                                                \
        int code = number(h, fact, (int)i, &v);                   \
        if (!code) *out = (type)v;                                \
        return code;                                              \
    }
#define TEXT(name, which)                                         \
    EXPORT int name(uintptr_t h, char *buffer, u32 size) { return text(h, which, buffer, size); }

SCALAR(nvmlDeviceGetArchitecture, F_architecture, u32)
SCALAR(nvmlDeviceGetBrand, F_brand, u32)
SCALAR(nvmlDeviceGetComputeInstanceId, F_ci, u32)
SCALAR(nvmlDeviceGetComputeMode, F_compute_mode, u32)
SCALAR(nvmlDeviceGetCurrPcieLinkGeneration, F_pcie_generation, u32)
SCALAR(nvmlDeviceGetCurrPcieLinkWidth, F_pcie_width, u32)
SCALAR(nvmlDeviceGetCurrentClocksEventReasons, F_throttle, u64)
SCALAR(nvmlDeviceGetCurrentClocksThrottleReasons, F_throttle, u64)
SCALAR(nvmlDeviceGetDisplayActive, F_display, u32)
SCALAR(nvmlDeviceGetDisplayMode, F_display, u32)
SCALAR(nvmlDeviceGetEnforcedPowerLimit, F_power_limit, u32)
SCALAR(nvmlDeviceGetGpuInstanceId, F_gi, u32)
SCALAR(nvmlDeviceGetMaxMigDeviceCount, F_mig_max, u32)
SCALAR(nvmlDeviceGetMaxPcieLinkGeneration, F_pcie_max_generation, u32)
SCALAR(nvmlDeviceGetMaxPcieLinkWidth, F_pcie_max_width, u32)
SCALAR(nvmlDeviceGetMinorNumber, F_minor, u32)
SCALAR(nvmlDeviceGetNumaNodeId, F_numa, u32)
SCALAR(nvmlDeviceGetPcieReplayCounter, F_pcie_replays, u32)
SCALAR(nvmlDeviceGetPerformanceState, F_pstate, u32)
SCALAR(nvmlDeviceGetPersistenceMode, F_persistence, u32)
SCALAR(nvmlDeviceGetPowerManagementDefaultLimit, F_power_default, u32)
SCALAR(nvmlDeviceGetPowerManagementLimit, F_power_limit, u32)
SCALAR(nvmlDeviceGetPowerUsage, F_power_draw, u32)
SCALAR(nvmlDeviceGetRetiredPagesPendingStatus, F_retired_pending, u32)
SCALAR(nvmlDeviceGetTotalEnergyConsumption, F_energy, u64)
SCALAR(nvmlDeviceGetFanSpeed, F_fans, u32)
PAIR(nvmlDeviceGetCudaComputeCapability, F_compute_capability)
PAIR(nvmlDeviceGetDecoderUtilization, F_decoder)
PAIR(nvmlDeviceGetEncoderUtilization, F_encoder)
PAIR(nvmlDeviceGetEccMode, F_ecc_mode)
PAIR(nvmlDeviceGetMigMode, F_mig_mode)
PAIR(nvmlDeviceGetPowerManagementLimitConstraints, F_power_constraints)
PAIR(nvmlDeviceGetUtilizationRates_parts, F_utilisation)
INDEXED(nvmlDeviceGetClockInfo, F_clocks, u32)
INDEXED(nvmlDeviceGetMaxClockInfo, F_max_clocks, u32)
INDEXED(nvmlDeviceGetFanSpeed_v2, F_fans, u32)
INDEXED(nvmlDeviceGetPcieThroughput, F_pcie_throughput, u32)
INDEXED(nvmlDeviceGetTemperatureThreshold, F_temperature_thresholds, u32)
TEXT(nvmlDeviceGetName, T_name)
TEXT(nvmlDeviceGetSerial, T_serial)
TEXT(nvmlDeviceGetUUID, T_uuid)
TEXT(nvmlDeviceGetVbiosVersion, T_vbios)

EXPORT int nvmlInitWithFlags(u32 flags) { (void)flags; if (FLEET_INIT) return FLEET_INIT; open_count++; return OK; }
EXPORT int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
EXPORT int nvmlShutdown(void) { if (!open_count) return UNINITIALIZED; open_count--; return OK; }
EXPORT const char *nvmlErrorString(int code) { (void)code; return "fake NVML error"; }

static int copy(char *to, u32 size, const char *from) {
    strncpy(to, from, size);
    if (size) to[size - 1] = 0;
    return OK;
}
EXPORT int nvmlSystemGetDriverVersion(char *b, u32 n) { return copy(b, n, FLEET_DRIVER); }
EXPORT int nvmlSystemGetNVMLVersion(char *b, u32 n) { return copy(b, n, FLEET_NVML); }
EXPORT int nvmlSystemGetCudaDriverVersion(int *v) { *v = FLEET_CUDA; return OK; }
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = FLEET_CUDA; return OK; }
EXPORT int nvmlDeviceGetCount_v2(u32 *n) { if (!open_count) return UNINITIALIZED; *n = FLEET_COUNT; return OK; }
EXPORT int nvmlDeviceGetHandleByIndex_v2(u32 i, uintptr_t *h) {
    if (!open_count) return UNINITIALIZED;
    if (i >= FLEET_COUNT) return INVALID;
    if (FLEET[i].handle_code) return FLEET[i].handle_code;
    *h = i + 1;
    return OK;
}
static int find(int which, const char *s, uintptr_t *h) {
    for (u32 i = 0; i < FLEET_COUNT; i++)
        if (!FLEET[i].texts[which].code && !strcmp(FLEET[i].texts[which].s, s)) { *h = i + 1; return OK; }
    return NOT_FOUND;
}
EXPORT int nvmlDeviceGetHandleByUUID(const char *s, uintptr_t *h) { return find(T_uuid, s, h); }
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *s, uintptr_t *h) { return find(T_pci, s, h); }
EXPORT int nvmlDeviceGetIndex(uintptr_t h, u32 *i) {
    if (!device_of(h, 0)) return INVALID;
    *i = (u32)((h - 1) % 256);
    return OK;
}
EXPORT int nvmlDeviceIsMigDeviceHandle(uintptr_t h, u32 *is) {
    const Mig *mig;
    if (!device_of(h, &mig)) return INVALID;
    *is = mig != 0;
    return OK;
}
EXPORT int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(uintptr_t h, uintptr_t *out) {
    if (!device_of(h, 0)) return INVALID;
    *out = (h - 1) % 256 + 1;
    return OK;
}
EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(uintptr_t h, u32 i, uintptr_t *out) {
    const Dev *d = device_of(h, 0);
    if (!d) return INVALID;
    for (int m = 0; m < d->mig_count; m++)
        if (d->migs[m].slot == (int)i) { *out = (h - 1) % 256 + 1 + 256 * (m + 1); return OK; }
    return NOT_FOUND;
}
EXPORT int nvmlDeviceGetNumFans(uintptr_t h, u32 *n) {
    const Dev *d = device_of(h, 0);
    if (!d) return INVALID;
    if (d->lost) return 15;
    if (d->facts[F_fans].code) return d->facts[F_fans].code;
    *n = (u32)d->facts[F_fans].count;
    return OK;
}

typedef struct { char legacy[16]; u32 domain, bus, device, id, sub; char busId[32]; } PciInfo;
static int fill_pci(PciInfo *p, const char *s) {
    unsigned v[3] = {0, 0, 0};
    const char *c = s;
    for (int part = 0; part < 3; part++) {
        for (; *c && *c != ':' && *c != '.'; c++)
            v[part] = v[part] * 16 + (*c <= '9' ? *c - '0' : (*c | 32) - 'a' + 10);
        c++;
    }
    memset(p, 0, sizeof *p);
    p->domain = v[0]; p->bus = v[1]; p->device = v[2];
    strncpy(p->busId, s, sizeof p->busId - 1);
    strncpy(p->legacy, s + 4, sizeof p->legacy - 1);
    return OK;
}
EXPORT int nvmlDeviceGetPciInfo_v3(uintptr_t h, PciInfo *p) {
    char s[32];
    int code = text(h, T_pci, s, sizeof s);
    return code ? code : fill_pci(p, s);
}

EXPORT int nvmlDeviceGetMemoryInfo(uintptr_t h, u64 *m) {
    int64_t total, free_;
    int code = number(h, F_memory, 0, &total);
    if (!code) code = number(h, F_memory, 2, &free_);
    if (!code) m[0] = total, m[1] = free_, m[2] = total - free_;
    return code;
}
typedef struct { u32 version; u64 total, reserved, free, used; } Memory2;
EXPORT int nvmlDeviceGetMemoryInfo_v2(uintptr_t h, Memory2 *m) {
    int64_t total, reserved, free_;
    const Mig *mig;
    if (device_of(h, &mig) && mig) return UNSUPPORTED;
    int code = number(h, F_memory, 0, &total);
    if (!code) code = number(h, F_memory, 1, &reserved);
    if (!code) code = number(h, F_memory, 2, &free_);
    if (!code) m->total = total, m->reserved = reserved, m->free = free_, m->used = total - reserved - free_;
    return code;
}
EXPORT int nvmlDeviceGetBAR1MemoryInfo(uintptr_t h, u64 *m) {
    int64_t total, used;
    int code = number(h, F_bar1, 0, &total);
    if (!code) code = number(h, F_bar1, 1, &used);
    if (!code) m[0] = total, m[1] = total - used, m[2] = used;
    return code;
}
EXPORT int nvmlDeviceGetUtilizationRates(uintptr_t h, u32 *rates) {
    return nvmlDeviceGetUtilizationRates_parts(h, rates, rates + 1);
}
EXPORT int nvmlDeviceGetTemperature(uintptr_t h, u32 sensor, u32 *t) {
    int64_t v;
    if (sensor) return INVALID;
    int code = number(h, F_temperature, 0, &v);
    if (!code) *t = (u32)v;
    return code;
}
EXPORT int nvmlDeviceGetTotalEccErrors(uintptr_t h, u32 error, u32 counter, u64 *n) {
    int64_t v;
    int code = number(h, counter ? F_ecc_aggregate : F_ecc_volatile, (int)error, &v);
    if (!code) *n = v;
    return code;
}
EXPORT int nvmlDeviceGetRemappedRows(uintptr_t h, u32 *a, u32 *b, u32 *c, u32 *d) {
    u32 *out[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++) {
        int64_t v;
        int code = number(h, F_remapped_rows, i, &v);
        if (code) return code;
        *out[i] = (u32)v;
    }
    return OK;
}
EXPORT int nvmlDeviceGetRetiredPages(uintptr_t h, u32 cause, u32 *n, u64 *pages) {
    int64_t v;
    int code = number(h, F_retired_pages, (int)cause, &v);
    if (code) return code;
    if (!pages || *n < v) { *n = (u32)v; return v ? TOO_SMALL : OK; }
    for (int64_t i = 0; i < v; i++) pages[i] = 4096 * (i + 1);
    *n = (u32)v;
    return OK;
}
/* nvmlDeviceAttributes_t begins with the SM count; the rest is of no use here. */
EXPORT int nvmlDeviceGetAttributes_v2(uintptr_t h, u32 *attributes) {
    int64_t v;
    int code = number(h, F_sm_count, 0, &v);
    if (!code) attributes[0] = (u32)v;
    return code;
}
EXPORT int nvmlDeviceGetCpuAffinity(uintptr_t h, u32 words, unsigned long *set) {
    int64_t first, last;
    int code = number(h, F_cpus, 0, &first);
    if (!code) code = number(h, F_cpus, 1, &last);
    if (code) return code;
    for (int64_t cpu = first; cpu <= last; cpu++)
        if (cpu / 64 < words) set[cpu / 64] |= 1ul << (cpu % 64);
    return OK;
}

typedef struct { u32 id, scope; int64_t time, latency; u32 type, code; union { double d; u64 u; } value; } Field;
EXPORT int nvmlDeviceGetFieldValues(uintptr_t h, int n, Field *fields) {
    const Dev *d = device_of(h, 0);
    if (!d) return INVALID;
    if (d->lost) return 15;
    for (int i = 0; i < n; i++) {
        int64_t v = 0;
        int code = UNSUPPORTED;
        if (fields[i].id == 82) code = number(h, F_memory_temperature, 0, &v);
        if ((fields[i].id == 138 || fields[i].id == 139) && (int)fields[i].scope < d->link_count) {
            const Link *l = &d->links[fields[i].scope];
            v = fields[i].id == 138 ? l->tx : l->rx;
            code = OK;
        }
        fields[i].code = (u32)code;
        fields[i].type = 3;
        fields[i].value.u = (u64)v;
    }
    return OK;
}

static const Link *link_of(uintptr_t h, u32 i, int *code) {
    const Dev *d = device_of(h, 0);
    *code = INVALID;
    if (!d) return 0;
    if (d->lost || d->link_code) { *code = d->lost ? 15 : d->link_code; return 0; }
    if ((int)i >= d->link_count) return 0;
    *code = OK;
    return &d->links[i];
}
EXPORT int nvmlDeviceGetNvLinkState(uintptr_t h, u32 i, u32 *out) {
    int code; const Link *l = link_of(h, i, &code);
    if (l) *out = (u32)l->active;
    return code;
}
EXPORT int nvmlDeviceGetNvLinkVersion(uintptr_t h, u32 i, u32 *out) {
    int code; const Link *l = link_of(h, i, &code);
    if (l) *out = (u32)l->version;
    return code;
}
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(uintptr_t h, u32 i, u32 *out) {
    int code; const Link *l = link_of(h, i, &code);
    if (l) *out = (u32)l->kind;
    return code;
}
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(uintptr_t h, u32 i, PciInfo *p) {
    int code; const Link *l = link_of(h, i, &code);
    return l ? fill_pci(p, l->remote) : code;
}

EXPORT int nvmlDeviceGetTopologyCommonAncestor(uintptr_t a, uintptr_t b, u32 *out) {
    static const u32 levels[] = {50, 40, 30, 10};
    int shared = 0;
    for (; shared < 3; shared++) {
        int64_t x, y;
        int code = number(a, F_pcie_group, shared, &x);
        if (!code) code = number(b, F_pcie_group, shared, &y);
        if (code) return code;
        if (x != y) break;
    }
    *out = levels[shared];
    return OK;
}
EXPORT int nvmlDeviceGetP2PStatus(uintptr_t a, uintptr_t b, u32 cap, u32 *out) {
    int64_t x, y;
    (void)cap;
    int code = number(a, F_p2p, 0, &x);
    if (!code) code = number(b, F_p2p, 0, &y);
    if (!code) *out = (u32)(x > y ? x : y);
    return code;
}

typedef struct { u32 pid; u64 memory; u32 gi, ci; } ProcessInfo;
static int processes(uintptr_t h, int kind, u32 *n, ProcessInfo *out) {
    const Mig *mig;
    const Dev *d = device_of(h, &mig);
    u32 found = 0;
    if (!d) return INVALID;
    if (d->lost) return 15;
    if (d->process_code) return d->process_code;
    for (int pass = 0; pass < 2; pass++) {
        u32 at = 0;
        for (int i = 0; i < d->process_count; i++) {
            const Proc *p = &d->processes[i];
            int64_t gi = 0;
            if (!(p->kinds & kind)) continue;
            if (mig && (number(h, F_gi, 0, &gi) || (u32)gi != p->gi)) continue;
            if (pass) { out[at].pid = p->pid; out[at].memory = p->memory; out[at].gi = p->gi; out[at].ci = p->ci; }
            at++;
        }
        found = at;
        if (!pass && (!out || *n < found)) { *n = found; return found ? TOO_SMALL : OK; }
    }
    *n = found;
    return OK;
}
#define PROCESSES(name, kind) \
    EXPORT int name(uintptr_t h, u32 *n, ProcessInfo *out) { return processes(h, kind, n, out); }
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, 1)
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, 1)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, 2)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, 2)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2, 4)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, 4)

/* Asked by other monitors: answered as a Linux driver does on an idle system, so that they do
 * not spend their time on reporting a function that is missing. */
EXPORT int nvmlDeviceGetDriverModel(uintptr_t h, u32 *a, u32 *b) { (void)h; (void)a; (void)b; return UNSUPPORTED; }
EXPORT int nvmlDeviceGetDriverModel_v2(uintptr_t h, u32 *a, u32 *b) { (void)h; (void)a; (void)b; return UNSUPPORTED; }

typedef struct { u32 pid; u64 time; u32 sm, memory, encoder, decoder; } ProcessWork;
EXPORT int nvmlDeviceGetProcessUtilization(uintptr_t h, ProcessWork *out, u32 *n, u64 since) {
    const Mig *mig;
    const Dev *d = device_of(h, &mig);
    u32 found = 0;
    if (!d) return INVALID;
    if (d->lost) return 15;
    if (d->work_code) return d->work_code;
    for (int i = 0; i < d->process_count; i++) found += d->processes[i].sm > 0;
    if (!found) { *n = 0; return NOT_FOUND; }
    if (!out || *n < found) { *n = found; return TOO_SMALL; }
    *n = 0;
    for (int i = 0; i < d->process_count; i++) {
        const Proc *p = &d->processes[i];
        if (p->sm) out[(*n)++] = (ProcessWork){p->pid, since + 1, p->sm, p->sm / 2, 0, 0};
    }
    return OK;
}
