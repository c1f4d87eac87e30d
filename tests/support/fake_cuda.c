/* The device queries of the CUDA driver for the same fleet, in its CUDA order. It knows nothing
 * of CUDA_VISIBLE_DEVICES, and has no function that would create a context. */
#include <string.h>

#include "fleet.h"

#define EXPORT __attribute__((visibility("default")))
static int ready;

EXPORT int cuInit(unsigned flags) { (void)flags; ready = 1; return CUDA_COUNT ? 0 : 100; }
EXPORT int cuDriverGetVersion(int *v) { *v = FLEET_CUDA; return 0; }
EXPORT int cuDeviceGetCount(int *n) { if (!ready) return 3; *n = CUDA_COUNT; return 0; }
EXPORT int cuDeviceGet(int *d, int i) { if (i < 0 || i >= CUDA_COUNT) return 101; *d = i; return 0; }
EXPORT int cuDeviceGetName(char *b, int n, int d) { strncpy(b, CUDA[d].name, n); if (n) b[n - 1] = 0; return 0; }
EXPORT int cuDeviceGetUuid_v2(unsigned char *u, int d) { memcpy(u, CUDA[d].uuid, 16); return 0; }
EXPORT int cuDeviceGetPCIBusId(char *b, int n, int d) { strncpy(b, CUDA[d].bus, n); if (n) b[n - 1] = 0; return 0; }
EXPORT int cuDeviceTotalMem_v2(unsigned long *t, int d) { *t = CUDA[d].total; return 0; }
EXPORT int cuDeviceGetAttribute(int *v, int a, int d) {
    switch (a) {
        case 16: *v = CUDA[d].sm_count; return 0;
        case 75: *v = CUDA[d].major; return 0;
        case 76: *v = CUDA[d].minor; return 0;
        case 1: *v = 1024; return 0;
        case 10: *v = 32; return 0;
        default: return 1;
    }
}
EXPORT int cuDeviceComputeCapability(int *major, int *minor, int d) {
    *major = CUDA[d].major;
    *minor = CUDA[d].minor;
    return 0;
}
EXPORT int cuGetErrorString(int code, const char **text) { (void)code; *text = "refused by the fake driver"; return 0; }
