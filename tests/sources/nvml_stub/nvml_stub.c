/*
 * A stub of NVIDIA's libnvidia-ml.so.1: just the calls that autoscaler/sources/nvml.py makes through nvidia-ml-py.
 *
 * It is driven by the text file that the environment variable NVML_STUB names, read anew on every call:
 *
 *   driver                              without this line nothing is initialised: "driver not loaded"
 *   gpu  UUID TOTAL USED RESERVED BUSY  one card; MiB, percent
 *   mig  GPU SLOT GI TOTAL USED         an instance in one of the card's 7 slots; a card with any is in MIG mode
 *   proc GPU SLOT PID USED              a process, SLOT -1 on the card itself, USED -1 when it cannot be told
 *   fail SYMBOL CODE [GPU]              that call returns CODE, for that card or for all
 *
 * What it lacks: every other call, reference counts, threads, drivers that block, real structures behind the handles
 * (a handle is only a number), and compute instances (each instance has one).
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, NO_DRIVER = 9, MAX = 16, SLOTS = 7 };
#define MIB 1048576ULL
#define UNKNOWN_MEMORY UINT64_MAX

typedef struct { uint64_t total, free, used; } memory_v1;
typedef struct { unsigned version; uint64_t total, reserved, free, used; } memory_v2;
typedef struct { unsigned gpu, memory; } rates;
typedef struct { unsigned pid; uint64_t used; unsigned gi, ci; } process;

static struct card { char uuid[96]; long total, used, reserved, busy; int mig; } cards[MAX];
static struct instance { int there; unsigned gi; long total, used; } instances[MAX][SLOTS];
static struct running { int gpu, slot; unsigned pid; long used; } running[MAX];
static int n_cards, n_running, driver;

/* A handle is 1 + 8 x card for a card, and 2 to 8 + 8 x card for its slots. */
static void *handle_of(int gpu, int slot) { return (void *)(uintptr_t)(1 + 8 * gpu + 1 + slot); }
static int gpu_of(void *handle) { return (int)(((uintptr_t)handle - 1) / 8); }
static int slot_of(void *handle) { return (int)(((uintptr_t)handle - 1) % 8) - 1; }

/* Read the file; return what `symbol` shall return before it does anything. */
static int load(const char *symbol, int gpu)
{
    char line[256], name[96];
    int code, which, result = OK, slot;
    FILE *file = fopen(getenv("NVML_STUB") ? getenv("NVML_STUB") : "", "r");
    memset(cards, 0, sizeof cards);
    memset(instances, 0, sizeof instances);
    n_cards = n_running = driver = 0;
    while (file && fgets(line, sizeof line, file)) {
        struct card *card = &cards[n_cards % MAX];
        struct running *one = &running[n_running % MAX];
        struct instance mig = {.there = 1};
        if (strncmp(line, "driver", 6) == 0)
            driver = 1;
        else if (sscanf(line, "gpu %95s %ld %ld %ld %ld", card->uuid, &card->total, &card->used, &card->reserved,
                        &card->busy) == 5)
            n_cards++;
        else if (sscanf(line, "mig %d %d %u %ld %ld", &which, &slot, &mig.gi, &mig.total, &mig.used) == 5) {
            instances[which % MAX][slot % SLOTS] = mig;
            cards[which % MAX].mig = 1;
        } else if (sscanf(line, "proc %d %d %u %ld", &one->gpu, &one->slot, &one->pid, &one->used) == 4)
            n_running++;
        else if (sscanf(line, "fail %95s %d %d", name, &code, &which) == 3) {
            if (strcmp(name, symbol) == 0 && which == gpu)
                result = code;
        } else if (sscanf(line, "fail %95s %d", name, &code) == 2 && strcmp(name, symbol) == 0)
            result = code;
    }
    if (file)
        fclose(file);
    return driver ? result : NO_DRIVER;
}

#define LOAD(gpu)                        \
    int code_ = load(__func__, (gpu));   \
    if (code_ != OK)                     \
    return code_

const char *nvmlErrorString(int code) { return code == OK ? "Success" : "Error of the stub"; }
int nvmlInitWithFlags(unsigned flags) { (void)flags; LOAD(-1); return OK; }
int nvmlShutdown(void) { LOAD(-1); return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { LOAD(-1); *count = (unsigned)n_cards; return OK; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    LOAD((int)index);
    *handle = handle_of((int)index, -1);
    return (int)index < n_cards ? OK : INVALID;
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned length)
{
    LOAD(gpu_of(handle));
    snprintf(uuid, length, "%s", cards[gpu_of(handle)].uuid);
    return OK;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending)
{
    LOAD(gpu_of(handle));
    *current = *pending = 1;
    return cards[gpu_of(handle)].mig ? OK : NOT_SUPPORTED;
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) { LOAD(gpu_of(handle)); *count = SLOTS; return OK; }

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **device)
{
    LOAD(gpu_of(handle));
    *device = handle_of(gpu_of(handle), (int)index);
    return instances[gpu_of(handle)][index].there ? OK : NOT_FOUND;
}

int nvmlDeviceGetGpuInstanceId(void *handle, unsigned *gi)
{
    LOAD(gpu_of(handle));
    *gi = instances[gpu_of(handle)][slot_of(handle)].gi;
    return OK;
}

static memory_v2 memory_of(void *handle)
{
    struct card *card = &cards[gpu_of(handle)];
    memory_v2 found = {0, card->total * MIB, card->reserved * MIB, 0, card->used * MIB};
    if (slot_of(handle) >= 0) {
        struct instance *mig = &instances[gpu_of(handle)][slot_of(handle)];
        found = (memory_v2){0, mig->total * MIB, 0, 0, mig->used * MIB};
    }
    found.free = found.total - found.reserved - found.used;
    return found;
}

int nvmlDeviceGetMemoryInfo(void *handle, memory_v1 *memory)
{
    LOAD(gpu_of(handle));
    memory_v2 found = memory_of(handle);
    *memory = (memory_v1){found.total, found.free, found.used + found.reserved};
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_v2 *memory)
{
    LOAD(gpu_of(handle));
    *memory = memory_of(handle);
    return OK;
}

int nvmlDeviceGetUtilizationRates(void *handle, rates *busy)
{
    LOAD(gpu_of(handle));
    *busy = (rates){(unsigned)cards[gpu_of(handle)].busy, 0};
    return slot_of(handle) < 0 ? OK : NOT_SUPPORTED;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, process *processes)
{
    LOAD(gpu_of(handle));
    unsigned room = *count, found = 0;
    for (int index = 0; index < n_running; index++) {
        struct running *one = &running[index];
        if (one->gpu != gpu_of(handle) || one->slot != slot_of(handle))
            continue;
        if (found < room)
            processes[found] = (process){one->pid, one->used < 0 ? UNKNOWN_MEMORY : one->used * MIB, 0, 0};
        found++;
    }
    *count = found;
    return found <= room ? OK : TOO_SMALL;
}
