/* A stand-in for NVIDIA's driver: the calls that runtime/transport/cuda uses, on files in shared memory.

   What it keeps to, by cuda.h and the driver's reference:
   - Device addresses are no host addresses: who touches them dies. Copies know both kinds apart.
   - Calls need cuInit, a current context where the driver needs one, and do not work in the child of a fork.
   - Streams run beside everything else, and late: a copy has not been done when its launch returns. A stream can be
     held, so that what is launched there stays undone until it is let go (standin_hold, standin_release).
   - IPC handles are of whole allocations, and work in other processes only. A second opening in the same context gives
     the same address and is counted; in another context of the process it is refused. What the owner has freed cannot
     be opened, and a copy that meets it is an error of the context: every later call fails with it.
   - A context reaches memory of another device by IPC only where the two are peers.
   - Memory can be of a kind that IPC does not share (standin_expandable): as PyTorch's expandable segments.

   Everything that starts with standin_ is for tests: to set it up, to play the part of PyTorch, and to count. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifndef CUDA_H /* gcc -include cuda.h -DCUDA_H has the compiler compare the signatures with the driver's own */
typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct { char bytes[16]; } CUuuid;
typedef struct { char reserved[64]; } CUipcMemHandle;
typedef int CUpointer_attribute;
enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_MAP_FAILED = 205,
    CUDA_ERROR_ALREADY_MAPPED = 208,
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
};
#define CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE 10
#endif

#define DEVICES 4
#define ALLOCATIONS 4096
#define DEPTH 16
#define GRAIN (2ull << 20)

struct CUctx_st { int device; };

/* Memory on a device, of this process or mapped from another. */
typedef struct {
    CUdeviceptr address;
    size_t size;
    char *bytes; /* what the host never sees, but for copies */
    int file;
    int device;  /* that has the memory */
    int context; /* that it is mapped for */
    int opened;  /* by IPC, so often; 0 for this process's own */
    int expandable;
    char name[40];
} Allocation;

typedef struct {
    uint32_t magic, owner, device, expandable;
    uint64_t size;
    char name[40];
} Handle;

enum { COPY, FILL, RECORD, AWAIT };

typedef struct Task {
    int kind;
    CUdeviceptr to, from; /* device addresses, or host addresses where the other flag says so */
    int to_host, from_host, value;
    size_t size;
    CUevent event;
    uint64_t number;
    struct Task *next;
} Task;

struct CUevent_st {
    uint64_t recorded, done;
    unsigned flags;
    int destroyed, users;
};

struct CUstream_st {
    int device, held, ending, idle;
    Task *first, *last;
    pthread_t thread;
    struct CUstream_st *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static char folder[512];
static int devices, peers, first_device;
static unsigned late_us;
static pid_t initialised;
static CUresult sticky;
static struct CUctx_st contexts[DEVICES];
static Allocation allocations[ALLOCATIONS];
static CUdeviceptr next_address = 0x7e0000000000ull;
static unsigned next_name;
static int opens, closes, spins, copies, launched, events;
static CUstream streams;
static __thread CUcontext stack[DEPTH];
static __thread int depth;

/* -- for tests ---------------------------------------------------------------------------------------------------- */

/* So many devices, of which this process sees those from number `first` on, as with CUDA_VISIBLE_DEVICES. Each task of
   a stream is done `late` microseconds after it could be. */
void standin_setup(const char *where, int count, int first, int reach_each_other, unsigned late) {
    snprintf(folder, sizeof folder, "%s", where);
    devices = count;
    first_device = first;
    peers = reach_each_other;
    late_us = late;
}

int standin_opens(void) { return opens; }
int standin_closes(void) { return closes; }
int standin_spins(void) { return spins; }
int standin_copies(void) { return copies; }
int standin_launched(void) { return launched; } /* copies */
int standin_events(void) { return events; }     /* that there are */

static int files_of(CUdeviceptr address, size_t size, Allocation **found) {
    for (int at = 0; at < ALLOCATIONS; at++) {
        Allocation *one = &allocations[at];
        if (one->bytes && one->address <= address && address + size <= one->address + one->size) {
            *found = one;
            return 1;
        }
    }
    return 0;
}

/* The host's view of device memory, at once and whatever streams do. Gives 0 where there is none. */
int standin_peek(CUdeviceptr address, void *to, size_t size) {
    Allocation *one;
    pthread_mutex_lock(&lock);
    int found = files_of(address, size, &one);
    if (found) memcpy(to, one->bytes + (address - one->address), size);
    pthread_mutex_unlock(&lock);
    return found;
}

int standin_poke(CUdeviceptr address, const void *from, size_t size) {
    Allocation *one;
    pthread_mutex_lock(&lock);
    int found = files_of(address, size, &one);
    if (found) memcpy(one->bytes + (address - one->address), from, size);
    pthread_mutex_unlock(&lock);
    return found;
}

static CUresult allocate(CUdeviceptr *address, size_t size, int expandable);

CUresult standin_expandable(CUdeviceptr *address, size_t size) { return allocate(address, size, 1); }

static void push(CUstream stream, Task *task) {
    pthread_mutex_lock(&lock);
    if (stream->last) stream->last->next = task;
    else stream->first = task;
    stream->last = task;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static Task *task(int kind) {
    Task *made = calloc(1, sizeof *made);
    made->kind = kind;
    return made;
}

/* A kernel: fills memory with a byte, in its turn. */
void standin_fill(CUstream stream, CUdeviceptr address, int value, size_t size) {
    Task *fill = task(FILL);
    fill->to = address;
    fill->value = value;
    fill->size = size;
    push(stream, fill);
}

void standin_hold(CUstream stream) {
    pthread_mutex_lock(&lock);
    stream->held = 1;
    pthread_mutex_unlock(&lock);
}

void standin_release(CUstream stream) {
    pthread_mutex_lock(&lock);
    stream->held = 0;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static int stands(CUstream stream) {
    Task *it = stream->first;
    return !it || stream->held || (it->kind == AWAIT && it->event->done < it->number && !sticky);
}

/* Return when no stream can do more: each has nothing to do, is held, or waits for an event. */
void standin_settle(void) {
    pthread_mutex_lock(&lock);
    for (CUstream stream = streams; stream;) {
        if (stands(stream)) {
            stream = stream->next;
        } else {
            pthread_cond_wait(&changed, &lock);
            stream = streams;
        }
    }
    pthread_mutex_unlock(&lock);
}

/* -- contexts ----------------------------------------------------------------------------------------------------- */

static CUresult ready(void) {
    if (!initialised || initialised != getpid()) return CUDA_ERROR_NOT_INITIALIZED;
    return sticky;
}

static CUresult in_context(void) {
    CUresult status = ready();
    if (status) return status;
    return depth ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

static int here(void) { return stack[depth - 1]->device; }

CUresult cuInit(unsigned int flags) {
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    if (initialised && initialised != getpid()) return CUDA_ERROR_NOT_INITIALIZED;
    if (devices - first_device <= 0) return CUDA_ERROR_NO_DEVICE;
    initialised = getpid();
    for (int at = 0; at < DEVICES; at++) contexts[at].device = at;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    CUresult status = ready();
    if (!status) *count = devices - first_device;
    return status;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    CUresult status = ready();
    if (status) return status;
    if (ordinal < 0 || ordinal >= devices - first_device) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal + first_device; /* no more than a name: need not be the ordinal */
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    CUresult status = ready();
    if (status) return status;
    memset(uuid->bytes, 0x50 + device, sizeof uuid->bytes);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    CUresult status = ready();
    if (status) return status;
    if (device < first_device || device >= devices) return CUDA_ERROR_INVALID_DEVICE;
    *context = &contexts[device];
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    CUresult status = ready();
    if (status) return status;
    if (!context || depth == DEPTH) return CUDA_ERROR_INVALID_VALUE;
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
    CUcontext popped = stack[--depth];
    if (context) *context = popped;
    return CUDA_SUCCESS;
}

/* -- memory ------------------------------------------------------------------------------------------------------- */

static Allocation *slot(void) {
    for (int at = 0; at < ALLOCATIONS; at++)
        if (!allocations[at].bytes) return &allocations[at];
    return NULL;
}

static Allocation *map(int file, size_t size, int device, int context, const char *name) {
    Allocation *one = slot();
    char *bytes = one ? mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
    if (bytes == MAP_FAILED) return NULL;
    *one = (Allocation){.address = next_address, .size = size, .bytes = bytes, .file = file};
    one->device = device;
    one->context = context;
    snprintf(one->name, sizeof one->name, "%s", name);
    next_address += (size + GRAIN - 1) / GRAIN * GRAIN + GRAIN; /* with a hole behind it */
    return one;
}

static void unmap(Allocation *one) {
    munmap(one->bytes, one->size);
    close(one->file);
    memset(one, 0, sizeof *one);
}

static CUresult allocate(CUdeviceptr *address, size_t size, int expandable) {
    CUresult status = in_context();
    if (status) return status;
    if (!size) return CUDA_ERROR_INVALID_VALUE;
    char name[40], path[600];
    pthread_mutex_lock(&lock);
    snprintf(name, sizeof name, "memory-%d-%u", (int)getpid(), next_name++);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    Allocation *one = NULL;
    if (file >= 0 && !ftruncate(file, (off_t)size)) one = map(file, size, here(), here(), name);
    if (one) {
        one->expandable = expandable;
        *address = one->address;
    } else if (file >= 0) {
        close(file);
    }
    pthread_mutex_unlock(&lock);
    return one ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size) { return allocate(address, size, 0); }

CUresult cuMemFree_v2(CUdeviceptr address) {
    CUresult status = in_context();
    if (status) return status;
    Allocation *one;
    char path[600];
    pthread_mutex_lock(&lock);
    status = CUDA_ERROR_INVALID_VALUE;
    if (files_of(address, 0, &one) && one->address == address && !one->opened) {
        snprintf(path, sizeof path, "%s/%s", folder, one->name);
        unlink(path);
        unmap(one);
        status = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    CUresult status = in_context();
    if (status) return status;
    Allocation *one;
    pthread_mutex_lock(&lock);
    int found = files_of(address, 1, &one);
    if (found) {
        if (base) *base = one->address;
        if (size) *size = one->size;
    }
    pthread_mutex_unlock(&lock);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr address) {
    CUresult status = in_context();
    if (status) return status;
    Allocation *one;
    pthread_mutex_lock(&lock);
    int found = attribute == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE && files_of(address, 1, &one);
    if (found) *(int *)data = !one->expandable;
    pthread_mutex_unlock(&lock);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    CUresult status = in_context();
    if (status) return status;
    Allocation *one;
    Handle made = {.magic = 0x43554d48, .owner = (uint32_t)getpid()};
    pthread_mutex_lock(&lock);
    int found = files_of(address, 1, &one) && one->address == address && !one->expandable && !one->opened;
    if (found) {
        made.device = (uint32_t)one->device;
        made.size = one->size;
        memcpy(made.name, one->name, sizeof made.name);
        memset(handle, 0, sizeof *handle);
        memcpy(handle, &made, sizeof made);
    }
    pthread_mutex_unlock(&lock);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags) {
    _Static_assert(sizeof(Handle) <= sizeof(CUipcMemHandle), "a handle has 64 bytes");
    CUresult status = in_context();
    if (status) return status;
    Handle said;
    memcpy(&said, &handle, sizeof said);
    if (flags != 1) return CUDA_ERROR_INVALID_VALUE;
    if (said.magic != 0x43554d48 || memchr(said.name, 0, sizeof said.name) == NULL) return CUDA_ERROR_INVALID_HANDLE;
    if (said.owner == (uint32_t)getpid()) return CUDA_ERROR_INVALID_CONTEXT;
    if ((int)said.device != here() && !peers) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    char path[600];
    pthread_mutex_lock(&lock);
    for (int at = 0; at < ALLOCATIONS; at++) {
        Allocation *one = &allocations[at];
        if (!one->bytes || strcmp(one->name, said.name)) continue;
        status = one->context == here() ? CUDA_SUCCESS : CUDA_ERROR_ALREADY_MAPPED;
        if (!status) {
            one->opened++;
            opens++;
            *address = one->address;
        }
        pthread_mutex_unlock(&lock);
        return status;
    }
    snprintf(path, sizeof path, "%s/%s", folder, said.name);
    int file = open(path, O_RDWR | O_CLOEXEC);
    Allocation *one = file < 0 ? NULL : map(file, said.size, (int)said.device, here(), said.name);
    if (one) {
        one->opened = 1;
        opens++;
        *address = one->address;
    } else if (file >= 0) {
        close(file);
    }
    pthread_mutex_unlock(&lock);
    return one ? CUDA_SUCCESS : CUDA_ERROR_MAP_FAILED;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    CUresult status = in_context();
    if (status) return status;
    Allocation *one;
    pthread_mutex_lock(&lock);
    status = CUDA_ERROR_INVALID_VALUE;
    if (files_of(address, 0, &one) && one->address == address && one->opened) {
        closes++;
        if (!--one->opened) unmap(one);
        status = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

/* -- streams and events ------------------------------------------------------------------------------------------- */

/* The bytes at an address, or NULL: not mapped, or freed by its owner meanwhile. With the lock held. */
static char *bytes_at(CUdeviceptr address, int host, size_t size) {
    Allocation *one;
    struct stat about;
    if (host) return (char *)(uintptr_t)address;
    if (!files_of(address, size, &one) || fstat(one->file, &about) || !about.st_nlink) return NULL;
    return one->bytes + (address - one->address);
}

static void forget(CUevent event) {
    if (event->destroyed && !event->users) free(event);
}

static void carry_out(Task *it) {
    if (it->kind == RECORD) {
        it->event->done = it->number;
    } else if (it->kind != AWAIT) {
        char *to = bytes_at(it->to, it->to_host, it->size);
        char *from = it->kind == FILL ? to : bytes_at(it->from, it->from_host, it->size);
        if (!to || !from) {
            sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
        } else if (it->kind == FILL) {
            memset(to, it->value, it->size);
        } else {
            memmove(to, from, it->size);
            copies++;
        }
    }
    if (it->event) {
        it->event->users--;
        forget(it->event);
    }
}

static void *serve(void *argument) {
    CUstream stream = argument;
    struct timespec late = {.tv_nsec = late_us * 1000l};
    pthread_mutex_lock(&lock);
    for (;;) {
        Task *it = stream->first;
        if (stands(stream) && (it || !stream->ending)) {
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        if (!it) break;
        pthread_mutex_unlock(&lock);
        nanosleep(&late, NULL);
        pthread_mutex_lock(&lock);
        stream->first = it->next;
        if (!stream->first) stream->last = NULL;
        carry_out(it);
        free(it);
        pthread_cond_broadcast(&changed);
    }
    CUstream *at = &streams;
    while (*at != stream) at = &(*at)->next;
    *at = stream->next;
    pthread_mutex_unlock(&lock);
    free(stream);
    return NULL;
}

CUresult cuStreamCreate(CUstream *made, unsigned int flags) {
    CUresult status = in_context();
    if (status) return status;
    if (flags > 1) return CUDA_ERROR_INVALID_VALUE;
    CUstream stream = calloc(1, sizeof *stream);
    stream->device = here();
    pthread_mutex_lock(&lock);
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&lock);
    pthread_create(&stream->thread, NULL, serve, stream);
    pthread_detach(stream->thread);
    *made = stream;
    return CUDA_SUCCESS;
}

/* What was launched there is still done. */
CUresult cuStreamDestroy_v2(CUstream stream) {
    CUresult status = in_context();
    pthread_mutex_lock(&lock);
    stream->ending = 1;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return status;
}

CUresult cuEventCreate(CUevent *made, unsigned int flags) {
    CUresult status = in_context();
    if (status) return status;
    *made = calloc(1, sizeof **made);
    (*made)->flags = flags;
    pthread_mutex_lock(&lock);
    events++;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent event) {
    CUresult status = in_context();
    pthread_mutex_lock(&lock);
    event->destroyed = 1;
    events--;
    forget(event);
    pthread_mutex_unlock(&lock);
    return status;
}

static CUresult with_event(int kind, CUstream stream, CUevent event) {
    CUresult status = in_context();
    if (status) return status;
    if (!stream || !event) return CUDA_ERROR_INVALID_HANDLE;
    if (kind == RECORD && stream->device != here()) return CUDA_ERROR_INVALID_HANDLE;
    Task *made = task(kind);
    pthread_mutex_lock(&lock);
    made->event = event;
    made->number = kind == RECORD ? ++event->recorded : event->recorded;
    event->users++;
    pthread_mutex_unlock(&lock);
    push(stream, made);
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream) { return with_event(RECORD, stream, event); }

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
    return flags ? CUDA_ERROR_INVALID_VALUE : with_event(AWAIT, stream, event);
}

CUresult cuEventSynchronize(CUevent event) {
    CUresult status = in_context();
    if (status) return status;
    pthread_mutex_lock(&lock);
    if (!(event->flags & 1)) spins++; /* without CU_EVENT_BLOCKING_SYNC the driver may spin */
    uint64_t number = event->recorded;
    event->users++;
    while (event->done < number && !sticky) pthread_cond_wait(&changed, &lock);
    event->users--;
    forget(event);
    status = sticky;
    pthread_mutex_unlock(&lock);
    return status;
}

/* -- copies ------------------------------------------------------------------------------------------------------- */

static CUresult copy(CUdeviceptr to, int to_host, CUdeviceptr from, int from_host, size_t size, CUstream stream) {
    CUresult status = in_context();
    if (status) return status;
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&lock);
    int fine = bytes_at(to, to_host, size) && bytes_at(from, from_host, size);
    pthread_mutex_unlock(&lock);
    if (!fine) return CUDA_ERROR_INVALID_VALUE;
    Task *made = task(COPY);
    made->to = to;
    made->from = from;
    made->to_host = to_host;
    made->from_host = from_host;
    made->size = size;
    pthread_mutex_lock(&lock);
    launched++;
    pthread_mutex_unlock(&lock);
    push(stream, made);
    return CUDA_SUCCESS;
}

static int mapped_for(CUdeviceptr address) {
    Allocation *one;
    pthread_mutex_lock(&lock);
    int context = files_of(address, 1, &one) ? one->context : -1;
    pthread_mutex_unlock(&lock);
    return context;
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, CUstream stream) {
    return copy(to, 0, (CUdeviceptr)(uintptr_t)from, 1, size, stream);
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, CUstream stream) {
    return copy((CUdeviceptr)(uintptr_t)to, 1, from, 0, size, stream);
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    if (mapped_for(to) != mapped_for(from)) return CUDA_ERROR_INVALID_VALUE;
    return copy(to, 0, from, 0, size, stream);
}

CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t size,
                           CUstream stream) {
    if (!to_context || !from_context) return CUDA_ERROR_INVALID_CONTEXT;
    if (mapped_for(to) != to_context->device || mapped_for(from) != from_context->device)
        return CUDA_ERROR_INVALID_VALUE;
    return copy(to, 0, from, 0, size, stream);
}
