/* A libnvidia-ml.so.1 of eight GPUs. What is wrong with them is in MUSTER_STUB: "kind:gpu ...". Functions that are not
 * here are not found, as with an old driver. Signatures: nvml.h of driver 535. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;
typedef struct { unsigned long long total, free, used; } memory_t;
enum { SUCCESS = 0, NOT_SUPPORTED = 3, LOST = 15 };

static int index_of(void *gpu) { return (int)(long)gpu - 1; }

static int is(const char *kind, void *gpu) {
    char word[64];
    const char *states = getenv("MUSTER_STUB");
    snprintf(word, sizeof word, "%s:%d ", kind, index_of(gpu));
    return states && strstr(states, word) != NULL;
}

int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
int nvmlInit_v2(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return "stub"; }
int nvmlSystemGetDriverVersion(char *out, unsigned size) { snprintf(out, size, "580.65.06"); return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *out) { *out = 8; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
    *out = (void *)(long)(index + 1);
    return is("gone", *out) ? LOST : SUCCESS;
}
int nvmlDeviceGetName(void *gpu, char *out, unsigned size) { snprintf(out, size, "NVIDIA H100 80GB HBM3"); return SUCCESS; }
int nvmlDeviceGetUUID(void *gpu, char *out, unsigned size) {
    if (is("lost", gpu)) return LOST;
    snprintf(out, size, "GPU-%d", index_of(gpu));
    return SUCCESS;
}
int nvmlDeviceGetPciInfo_v3(void *gpu, pci_t *out) {
    memset(out, 0, sizeof *out);
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", 16 * index_of(gpu) + 11);
    return SUCCESS;
}
int nvmlDeviceGetRemappedRows(void *gpu, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    *corrected = *uncorrected = 0;
    *pending = is("pending", gpu);
    *failed = is("failed", gpu);
    return SUCCESS;
}
int nvmlDeviceGetTotalEccErrors(void *gpu, int kind, int counter, unsigned long long *out) {
    *out = kind == 1 && is("ecc", gpu) ? 3 : 0;
    return SUCCESS;
}
/* The old name alone: the reader has to fall back to it. */
int nvmlDeviceGetCurrentClocksThrottleReasons(void *gpu, unsigned long long *out) {
    *out = is("brake", gpu) ? 0x80 : is("hot", gpu) ? 0x40 : 0x1;
    return SUCCESS;
}
int nvmlDeviceGetCurrPcieLinkWidth(void *gpu, unsigned *out) { *out = is("narrow", gpu) ? 8 : 16; return SUCCESS; }
int nvmlDeviceGetMaxPcieLinkWidth(void *gpu, unsigned *out) { *out = 16; return SUCCESS; }
int nvmlDeviceGetMigMode(void *gpu, unsigned *now, unsigned *next) { *now = *next = is("mig", gpu); return SUCCESS; }
int nvmlDeviceGetPersistenceMode(void *gpu, int *out) { *out = 1; return SUCCESS; }
int nvmlDeviceGetComputeMode(void *gpu, int *out) { *out = is("exclusive", gpu) ? 3 : 0; return SUCCESS; }
int nvmlDeviceGetMemoryInfo(void *gpu, memory_t *out) { memset(out, 0, sizeof *out); return SUCCESS; }
/* The field of the recovery action: what nvml.h calls nvmlFieldValue_t. */
typedef struct { unsigned field, scope; long long at, took; int kind, code; unsigned long long value; } field_t;
int nvmlDeviceGetFieldValues(void *gpu, int count, field_t *out) {
    for (int i = 0; i < count; i++) {
        out[i].code = SUCCESS;
        out[i].value = is("reboot", gpu) ? 2 : 0;
    }
    return SUCCESS;
}
