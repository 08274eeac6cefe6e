// ggml-instrumentation.h - where a graph compute leaves the time of every kernel
//
// The caller of a graph compute owns a sink and sets it in a thread-local of ggml-base. The compute copies the
// pointer into its thread pool, and every worker writes only into its own array, which has its full size: nothing
// is allocated, formatted or locked between the first kernel and the last. The caller reads the arrays after the
// compute has returned; ggml's last barrier orders the writes before that.

#pragma once

#include "ggml.h"

#include <stdbool.h>
#include <stdint.h>

#if defined(__x86_64__)
#    include <x86intrin.h>
#elif defined(__APPLE__)
#    include <mach/mach_time.h>
#endif

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_cgraph;
struct ggml_backend_sched;
struct ggml_backend;

// One worker. Times are ticks of ggml_instr_ticks(). `nodes` keeps the values of the previous compute, so that a
// graph that runs in the same order writes nothing there. `times` is as narrow as possible, one kernel after the
// other, because it leaves the caches between two kernels. The struct is padded so that two workers never write to
// the same cache line.
struct ggml_instr_thread {
    uint64_t * nodes;  // of the graph that the kernel computed: the first, and how many (ggml_instr_nodes)
    uint32_t * times;  // ggml_instr_n_times() for every kernel, see there
    int32_t  n;
    int32_t  capacity;
    uint64_t version;  // counts the changes of `nodes`
    int64_t  dropped;  // kernels without room
    uint64_t begin;    // of the first kernel
    uint64_t end;      // of the last one
    uint64_t next;     // when another kernel may begin; of thread 0 also when the compute has ended
    uint64_t waited;   // inside barriers since `next`
    bool     record_wait;
    bool     use_counter;
    uint8_t  pad[54];
};

// times per kernel: its duration, the gap before it and, only with sink->record_wait, the part of the duration that
// it waited inside barriers
static inline int32_t ggml_instr_n_times(bool record_wait) {
    return record_wait ? 3 : 2;
}

// more than one node when they were fused
static inline uint64_t ggml_instr_nodes(int32_t first, int32_t n) {
    return (uint64_t) first << 32 | (uint32_t) n;
}

// one compute of a split
struct ggml_instr_split {
    int32_t  split;
    bool     asynchronous;  // `end` is when it was submitted, not when it was computed
    uint64_t begin;
    uint64_t end;
};

// The experts that a MUL_MAT_ID chooses among. Nodes that read the same ids, such as those of gate, up and down, use the
// same experts: they are counted once.
struct ggml_instr_experts {
    int32_t node;    // of the whole graph: the first that reads these ids
    int32_t n;
    int32_t offset;  // in the uses of the sink
};

struct ggml_instr_sink {
    struct ggml_instr_thread * threads;
    int32_t n_threads;     // threads that are recorded: 1 or all
    int32_t split;         // that is computed now
    int32_t node_offset;   // of its sub-graph within the whole graph
    bool    record_wait;
    bool    record_splits;
    bool    use_counter;   // time with the CPU's counter, not with clock_gettime

    struct ggml_instr_split * splits;
    int32_t n_splits;
    int32_t n_splits_capacity;

    const struct ggml_instr_experts * experts;  // of the graph, in the order of its nodes
    int32_t    n_experts;
    int32_t    next_experts;   // that may be counted next
    uint32_t * uses;           // of each expert, how many ids name it
    size_t     uses_capacity;

    const struct ggml_instr_recorder * recorder;  // of devices, NULL: only the caller's own kernels are recorded
};

// CLOCK_MONOTONIC in nanoseconds. On macOS that clock has microseconds and goes on while the machine sleeps, so it is
// CLOCK_UPTIME_RAW there.
GGML_API uint64_t ggml_instr_clock_ns(void);

// whether the CPU has a counter of constant rate that all cores share, and its name
GGML_API bool         ggml_instr_has_counter(void);
GGML_API const char * ggml_instr_counter_name(void);

// nanoseconds of one tick of that counter as the CPU states them, 0 if it does not
GGML_API double ggml_instr_tick_ns(void);

// the sink of the calling thread, or NULL if nothing is recorded
GGML_API void                     ggml_instr_set_sink(struct ggml_instr_sink * sink);
GGML_API struct ggml_instr_sink * ggml_instr_get_sink(void);

// makes room for `n_threads` times `n_ops` kernels and for `n_splits` splits, and forgets what was recorded;
// returns false when memory runs out
GGML_API bool ggml_instr_sink_reset(struct ggml_instr_sink * sink, int32_t n_threads, int32_t n_ops, int32_t n_splits);
GGML_API void ggml_instr_sink_free (struct ggml_instr_sink * sink);

// makes room for the uses of these experts, which must outlive the compute, and sets them to 0; returns false when memory
// runs out. Without experts, nothing is counted.
GGML_API bool ggml_instr_sink_expect(struct ggml_instr_sink * sink, const struct ggml_instr_experts * experts, int32_t n_experts);

// called by thread 0 after the node of a sub-graph, a MUL_MAT_ID that reads these ids, and before the next may overwrite them
GGML_API void ggml_instr_count_experts(struct ggml_instr_sink * sink, int32_t node, const struct ggml_tensor * ids);

// called by the scheduler around the compute of a split, or of a part of it that begins at node `i_start`
GGML_API void ggml_instr_split_begin(int32_t split, int32_t i_start, bool asynchronous);
GGML_API void ggml_instr_split_end(void);

// facts that the scheduler and the graph do not offer otherwise
GGML_API void     ggml_instr_sched_get_split(struct ggml_backend_sched * sched, int32_t split, int32_t * i_start, int32_t * i_end, struct ggml_backend ** backend);
GGML_API uint64_t ggml_instr_graph_uid(const struct ggml_cgraph * graph);
GGML_API bool     ggml_instr_node_runs(const struct ggml_tensor * node);  // a CPU kernel runs for it

// A duration in 32 bits: exact below 2^31 ticks (about a second), beyond that in units of 4096 ticks.
GGML_API uint32_t ggml_instr_pack_long(uint64_t ticks);

static inline uint32_t ggml_instr_pack(uint64_t ticks) {
    return ticks < (uint64_t) 1 << 31 ? (uint32_t) ticks : ggml_instr_pack_long(ticks);
}

static inline uint64_t ggml_instr_unpack(uint32_t packed) {
    return packed >> 31 ? (uint64_t) (packed & 0x7fffffff) << 12 : packed;
}

//
// devices that compute behind the caller
//
// Such a device times its kernels with a clock of its own. A run is a split, or a part of it that an eval callback cuts
// out, from its submission until its results are there. That may be after the compute, on another thread, or after the
// session. Its backend owns it. Backends that compute in the caller use ggml_instr_thread_begin(sink, 0) instead.

struct ggml_instr_device_run {
    const struct ggml_instr_recorder * recorder;  // NULL: it is not recorded
    void *   recorded;      // the recorder's part of it
    int32_t  split;
    int32_t  node_offset;   // of the sub-graph within the whole graph
    bool     record_begin;  // of each kernel, too; otherwise only where one does not begin at the end of the one before
    uint64_t begin;         // of its submission, in nanoseconds
    uint64_t last_begin;    // a later one, of a part of it, if the backend sets it
    int32_t  last;          // the first kernel of that part
};

// a kernel, in ticks of the device
struct ggml_instr_device_op {
    uint64_t nodes;  // of the sub-graph (ggml_instr_nodes)
    uint64_t begin;  // 0: the end of the one before
    uint64_t end;
};

enum ggml_instr_device_clock {
    GGML_INSTR_CLOCK_CALIBRATED,  // the driver reads both clocks at once
    GGML_INSTR_CLOCK_BOUNDED,     // a run lies between its submission and the end of the wait
    GGML_INSTR_CLOCK_CUPTI,       // CUPTI takes its stamps from the log's clock
};

// a device as its backend knows it; one thread at a time ends its runs
struct ggml_instr_device {
    const char * name;         // of the backend
    const char * description;
    enum ggml_instr_device_clock clock;
    double   tick;             // nanoseconds, as the driver says
    uint64_t mask;             // the bits of a stamp that are valid

    // the rest belongs to ggml_instr_device_calibrate() and ggml_instr_device_end()
    bool     joined;
    uint64_t ns, ticks;                // the last moment that is known on both clocks
    uint64_t ns_before, ticks_before;  // an earlier one, from which the rate is measured
    double   ns_per_tick;
    uint64_t uncertainty;              // nanoseconds by which a time may be wrong
};

// what records a run; all may be called on any thread
struct ggml_instr_recorder {
    void * (*begin)(int32_t split);
    void   (*end)(const struct ggml_instr_device_run * run, const struct ggml_instr_device * device, const struct ggml_instr_device_op * ops, int32_t n);
    void   (*tell)(const char * text);  // to the user, in a line
};

// called inside of the compute, before the submission; returns whether kernels are to be timed
GGML_API bool ggml_instr_device_begin(struct ggml_instr_device_run * run);
// called when the results are there, with the kernels in the order of their ends, or with none if they never will be
GGML_API void ggml_instr_device_end(struct ggml_instr_device_run * run, struct ggml_instr_device * device, const struct ggml_instr_device_op * ops, int32_t n);

// A backend whose results do not come with a wait of its own sets a function that ends the runs whose results are there. A
// thread of the recorder calls it ten times a second, and a last time when the session ends.
typedef void (*ggml_instr_collector)(bool is_last);
GGML_API void ggml_instr_set_collector(ggml_instr_collector collect);
GGML_API void ggml_instr_collect(bool is_last);

// a moment on both clocks, off by at most `deviation` nanoseconds; is_due() says when another one is needed
GGML_API bool ggml_instr_device_is_due(const struct ggml_instr_device * device);
GGML_API void ggml_instr_device_calibrate(struct ggml_instr_device * device, uint64_t ns, uint64_t ticks, uint64_t deviation);

// a stamp of the device on CLOCK_MONOTONIC, in nanoseconds
GGML_API uint64_t ggml_instr_device_ns(const struct ggml_instr_device * device, uint64_t ticks);

//
// the RPC backend
//
// Both ends of a connection count its commands from HELLO on, so a number names the same command at both, and nothing is
// sent for that. Times are nanoseconds of ggml_instr_clock_ns().

// what the thread that queues a command does, -1: nothing
struct ggml_instr_rpc_origin {
    uint64_t queued;
    int32_t  step;
    int32_t  compute;
    int32_t  split;  // that was computed last
};

struct ggml_instr_rpc_command {
    uint64_t request;   // bytes on the wire
    uint64_t reply;     // 0: none
    uint64_t begin;     // a client: of sending; a server: the first byte is there
    uint64_t complete;  // the request
    uint64_t done;      // only a server: the command, but for its reply
    uint64_t end;       // of the reply
    struct ggml_instr_rpc_origin origin;  // only a client
    int32_t  code;
};

enum ggml_instr_rpc_reason {
    GGML_INSTR_RPC_CLOSED,  // by this end
    GGML_INSTR_RPC_PEER,    // by the other one, between two commands
    GGML_INSTR_RPC_FAILED,  // within a command
};

// What records connections. libllama sets it, so that no backend depends on that library.
struct ggml_instr_rpc_recorder {
    void * (*open)(int socket, const char * endpoint);  // an end of a connection; no endpoint: of a server
    void   (*command)(void * connection, const struct ggml_instr_rpc_command * command);
    void   (*close)(void * connection, enum ggml_instr_rpc_reason reason);
    void   (*origin)(struct ggml_instr_rpc_origin * origin);  // of the calling thread
    void   (*serve)(int n_threads);
    // around a compute that a client asked for; `again`: of the graph that this backend computed before
    void   (*compute_begin)(struct ggml_backend * backend, struct ggml_cgraph * graph, bool again);
    void   (*compute_end)(void);
};

GGML_API void ggml_instr_set_rpc_recorder(const struct ggml_instr_rpc_recorder * recorder);
GGML_API const struct ggml_instr_rpc_recorder * ggml_instr_get_rpc_recorder(void);  // NULL without libllama

// ---- in the compute loop

static inline uint64_t ggml_instr_ticks(bool use_counter) {
#if defined(__x86_64__)
    if (use_counter) {
        return __rdtsc();
    }
#elif defined(__aarch64__)
    if (use_counter) {
#    ifdef __APPLE__
        return mach_absolute_time();  // cntvct_el0 without the time that the machine slept, as the clock
#    else
        uint64_t ticks;
        __asm__ volatile("mrs %0, cntvct_el0" : "=r"(ticks));
        return ticks;
#    endif
    }
#endif
    (void) use_counter;
    return ggml_instr_clock_ns();
}

// the worker's array, or NULL if this worker is not recorded
static inline struct ggml_instr_thread * ggml_instr_thread_begin(struct ggml_instr_sink * sink, int ith) {
    if (sink == NULL || ith >= sink->n_threads) {
        return NULL;
    }
    struct ggml_instr_thread * th = &sink->threads[ith];
    th->waited = 0;
    th->next   = ggml_instr_ticks(th->use_counter);
    if (th->n == 0) {
        th->begin = th->end = th->next;
    }
    return th;
}

static inline void ggml_instr_op_end(struct ggml_instr_thread * th, int32_t node_offset, int32_t node, int32_t n) {
    const uint64_t now = ggml_instr_ticks(th->use_counter);
    if (th->n < th->capacity) {
        const int32_t i = th->n++;
        const uint64_t nodes = ggml_instr_nodes(node_offset + node, n);
        if (th->nodes[i] != nodes) {
            th->nodes[i] = nodes;
            th->version++;
        }
        uint32_t * times = th->times + i * ggml_instr_n_times(th->record_wait);
        times[0] = ggml_instr_pack(now - th->next);
        times[1] = ggml_instr_pack(th->next - th->end);
        if (th->record_wait) {
            times[2] = ggml_instr_pack(th->waited);
        }
    } else {
        th->dropped++;
    }
    th->waited = 0;
    th->next   = th->end = now;
}

// The barrier between two kernels belongs to neither. The one after the last kernel ends at `next` of thread 0: when the
// others leave it, that thread may already have returned to the caller, who owns the arrays.
static inline void ggml_instr_barrier_end(struct ggml_instr_thread * th) {
    th->next = ggml_instr_ticks(th->use_counter);
}

// around a barrier inside a kernel: the wait is part of the kernel's time
static inline uint64_t ggml_instr_wait_begin(const struct ggml_instr_thread * th) {
    return ggml_instr_ticks(th->use_counter);
}

static inline void ggml_instr_wait_end(struct ggml_instr_thread * th, uint64_t begin) {
    th->waited += ggml_instr_ticks(th->use_counter) - begin;
}

#ifdef __cplusplus
}
#endif
