/* A stand-in for NVIDIA's driver library: GPUs whose numbers are files in the directory NVML_STAND_IN.
   energy-N and limit-N in mJ and mW, busy-N with a number of processes, or processes-N with a line `pid use` for each;
   celsius-N and use-N, where it tells them; a file `locked` refuses changes of limits.
   xid-N is an XID that is reported once, ecc-N a count of uncorrected errors, lost-N a GPU that is gone; watched-N is
   written when somebody asks for its events. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { int index; } device;
static device devices[8];

static char *place(char *path, const char *name, int index) {
    snprintf(path, 512, index < 0 ? "%s/%s" : "%s/%s-%d", getenv("NVML_STAND_IN"), name, index);
    return path;
}
static long long number(const char *name, int index, long long otherwise) {
    char path[512];
    long long value = otherwise;
    FILE *file = fopen(place(path, name, index), "r");
    if (file) { if (fscanf(file, "%lld", &value) != 1) value = otherwise; fclose(file); }
    return value;
}
int nvmlInitWithFlags(unsigned flags) { return getenv("NVML_STAND_IN") ? 0 : 9; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return 0; }
typedef struct { device *of; int is_told; } events;
typedef struct { device *of; unsigned long long kind, data; unsigned gpu, compute; } event;
static events sets[8];
static int num_sets;
int nvmlEventSetCreate(events **set) { *set = &sets[num_sets++]; return 0; }
int nvmlDeviceGetSupportedEventTypes(device *one, unsigned long long *kinds) { *kinds = 8; return 0; }
int nvmlDeviceRegisterEvents(device *one, unsigned long long kinds, events *set) {
    char path[512];
    set->of = one;
    FILE *file = fopen(place(path, "watched", one->index), "w");
    if (file) fclose(file);
    return 0;
}
int nvmlEventSetWait_v2(events *set, event *found, unsigned timeout_ms) {
    long long xid = number("xid", set->of->index, 0);
    if (!xid || set->is_told) return 10;
    set->is_told = 1;
    memset(found, 0, sizeof *found);
    found->of = set->of; found->kind = 8; found->data = (unsigned long long)xid;
    return 0;
}
int nvmlDeviceGetTotalEccErrors(device *one, unsigned kind, unsigned counter, unsigned long long *count) {
    *count = (unsigned long long)number("ecc", one->index, 0); return 0;
}
const char *nvmlErrorString(int code) { return code == 4 ? "Insufficient Permissions" : "stand-in"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)number("count", -1, 1); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device **handle) {
    devices[index].index = (int)index; *handle = &devices[index]; return 0;
}
int nvmlDeviceGetUUID(device *one, char *text, unsigned length) {
    if (number("lost", one->index, 0)) return 15;
    snprintf(text, length, "GPU-stand-in-%d", one->index); return 0;
}
int nvmlDeviceGetTotalEnergyConsumption(device *one, unsigned long long *mj) {
    long long value = number("energy", one->index, -1);
    if (value < 0) return 3;
    *mj = (unsigned long long)value; return 0;
}
int nvmlDeviceGetPowerManagementLimit(device *one, unsigned *mw) { *mw = (unsigned)number("limit", one->index, 650000); return 0; }
int nvmlDeviceGetPowerManagementLimitConstraints(device *one, unsigned *low, unsigned *high) { *low = 200000; *high = 700000; return 0; }
int nvmlDeviceSetPowerManagementLimit(device *one, unsigned mw) {
    char path[512], renamed[512];
    if (number("locked", -1, 0)) return 4;
    place(path, "limit", one->index);
    snprintf(renamed, sizeof renamed, "%s.new", path);
    FILE *file = fopen(renamed, "w");
    if (!file) return 999;
    fprintf(file, "%u\n", mw); fclose(file);
    return rename(renamed, path) ? 999 : 0;
}
typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } process;
typedef struct { unsigned pid; unsigned long long time; unsigned sm, memory, encoder, decoder; } process_use;

/* Lines of `pid use` in processes-N; at most 32. */
static unsigned processes(int index, unsigned *pids, unsigned *uses) {
    char path[512];
    unsigned count = 0;
    FILE *file = fopen(place(path, "processes", index), "r");
    if (!file) return 0;
    while (count < 32 && fscanf(file, "%u %u", &pids[count], &uses[count]) == 2) count++;
    fclose(file);
    return count;
}
int nvmlDeviceGetComputeRunningProcesses_v3(device *one, unsigned *count, process *found) {
    unsigned pids[32], uses[32], named = processes(one->index, pids, uses);
    unsigned present = named ? named : (unsigned)number("busy", one->index, 0);
    if (*count < present) { *count = present; return present ? 7 : 0; }
    if (found) memset(found, 0, present * sizeof *found);
    for (unsigned at = 0; found && at < named; at++) found[at].pid = pids[at];
    *count = present; return 0;
}
int nvmlDeviceGetProcessUtilization(device *one, process_use *found, unsigned *count, unsigned long long since) {
    unsigned pids[32], uses[32], present = processes(one->index, pids, uses);
    if (!present) return 6;
    if (!found || *count < present) { *count = present; return 7; }
    memset(found, 0, present * sizeof *found);
    for (unsigned at = 0; at < present; at++) {
        found[at].pid = pids[at]; found[at].sm = uses[at]; found[at].time = since + 1;
    }
    *count = present; return 0;
}
int nvmlDeviceGetTemperature(device *one, unsigned sensor, unsigned *celsius) {
    long long value = number("celsius", one->index, -1);
    if (value < 0) return 3;
    *celsius = (unsigned)value; return 0;
}
typedef struct { unsigned gpu, memory; } use_rates;
int nvmlDeviceGetUtilizationRates(device *one, use_rates *use) {
    long long value = number("use", one->index, -1);
    if (value < 0) return 3;
    use->gpu = (unsigned)value; use->memory = 0; return 0;
}
