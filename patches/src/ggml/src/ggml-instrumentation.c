// ggml-instrumentation.c - the sink's memory, the clock, and the thread-local that hands it over

#include "ggml-instrumentation.h"

#include "ggml-backend.h"
#include "ggml-impl.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#    include <cpuid.h>
#endif

static _Thread_local struct ggml_instr_sink * ggml_instr_current_sink = NULL;

uint64_t ggml_instr_clock_ns(void) {
#ifdef __APPLE__
    return clock_gettime_nsec_np(CLOCK_UPTIME_RAW);
#else
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t) ts.tv_sec * 1000000000 + (uint64_t) ts.tv_nsec;
#endif
}

// Linux measures whether the counters of all cores agree and takes "tsc" off this list when they do not
#if defined(__x86_64__) && defined(__linux__)
static bool ggml_instr_kernel_trusts_tsc(void) {
    char line[256] = "";
    FILE * file = fopen("/sys/devices/system/clocksource/clocksource0/available_clocksource", "r");
    if (file == NULL) {
        return false;
    }
    const bool ok = fgets(line, sizeof(line), file) != NULL && strstr(line, "tsc") != NULL;
    fclose(file);
    return ok;
}
#endif

bool ggml_instr_has_counter(void) {
#if defined(__x86_64__) && defined(__linux__)
    unsigned eax, ebx, ecx, edx;
    // CPUID 8000_0007h, EDX bit 8: the time stamp counter runs at a constant rate in all power states
    const bool invariant = __get_cpuid(0x80000007, &eax, &ebx, &ecx, &edx) && (edx & (1u << 8)) != 0;
    return invariant && ggml_instr_kernel_trusts_tsc();
#elif defined(__aarch64__)
    return true;  // the architecture's generic timer is shared by all cores
#else
    return false;
#endif
}

const char * ggml_instr_counter_name(void) {
#if defined(__aarch64__)
    return "cntvct";
#else
    return "tsc";
#endif
}

double ggml_instr_tick_ns(void) {
#if defined(__aarch64__) && defined(__APPLE__)
    mach_timebase_info_data_t ns_per_tick;
    mach_timebase_info(&ns_per_tick);
    return (double) ns_per_tick.numer / ns_per_tick.denom;
#elif defined(__aarch64__)
    uint64_t per_second;
    __asm__ volatile("mrs %0, cntfrq_el0" : "=r"(per_second));
    return per_second > 0 ? 1e9 / (double) per_second : 0;
#else
    return 0;
#endif
}

void ggml_instr_set_sink(struct ggml_instr_sink * sink) {
    ggml_instr_current_sink = sink;
}

struct ggml_instr_sink * ggml_instr_get_sink(void) {
    return ggml_instr_current_sink;
}

// only grows: a session that alternates between two graphs allocates once
static bool ggml_instr_reserve_threads(struct ggml_instr_sink * sink, int32_t n_threads) {
    if (n_threads <= sink->n_threads) {
        return true;
    }
    struct ggml_instr_thread * threads = realloc(sink->threads, (size_t) n_threads * sizeof(*threads));
    if (threads == NULL) {
        return false;
    }
    memset(threads + sink->n_threads, 0, (size_t) (n_threads - sink->n_threads) * sizeof(*threads));
    sink->threads   = threads;
    sink->n_threads = n_threads;
    return true;
}

static bool ggml_instr_reserve_ops(struct ggml_instr_thread * th, int32_t n_ops) {
    if (n_ops <= th->capacity) {
        return true;
    }
    // one block for both; what was recorded before is no longer needed
    const size_t size = (size_t) n_ops * (sizeof(*th->nodes) + 3 * sizeof(*th->times));
    uint64_t * block = malloc(size);
    if (block == NULL) {
        return false;
    }
    // touch the pages now, not inside the compute (calloc would leave them untouched)
    memset(block, 0xff, size);
    free(th->nodes);
    th->nodes    = block;
    th->times    = (uint32_t *) (block + n_ops);
    th->capacity = n_ops;
    th->version++;
    return true;
}

bool ggml_instr_sink_reset(struct ggml_instr_sink * sink, int32_t n_threads, int32_t n_ops, int32_t n_splits) {
    if (!ggml_instr_reserve_threads(sink, n_threads)) {
        return false;
    }
    for (int32_t i = 0; i < sink->n_threads; i++) {
        struct ggml_instr_thread * th = &sink->threads[i];
        if (!ggml_instr_reserve_ops(th, n_ops)) {
            return false;
        }
        th->n           = 0;
        th->dropped     = 0;
        th->record_wait = sink->record_wait;
        th->use_counter = sink->use_counter;
    }
    if (n_splits > sink->n_splits_capacity) {
        struct ggml_instr_split * splits = realloc(sink->splits, (size_t) n_splits * sizeof(*splits));
        if (splits == NULL) {
            return false;
        }
        sink->splits            = splits;
        sink->n_splits_capacity = n_splits;
    }
    sink->n_splits    = 0;
    sink->node_offset = 0;
    return true;
}

bool ggml_instr_sink_expect(struct ggml_instr_sink * sink, const struct ggml_instr_experts * experts, int32_t n_experts) {
    sink->n_experts = sink->next_experts = 0;
    if (n_experts == 0) {
        return true;
    }
    const size_t n_uses = (size_t) experts[n_experts - 1].offset + (size_t) experts[n_experts - 1].n;
    if (n_uses > sink->uses_capacity) {
        uint32_t * uses = realloc(sink->uses, n_uses * sizeof(*uses));
        if (uses == NULL) {
            return false;
        }
        sink->uses          = uses;
        sink->uses_capacity = n_uses;
    }
    memset(sink->uses, 0, n_uses * sizeof(*sink->uses));
    sink->experts   = experts;
    sink->n_experts = n_experts;
    return true;
}

void ggml_instr_count_experts(struct ggml_instr_sink * sink, int32_t node, const struct ggml_tensor * ids) {
    node += sink->node_offset;
    // what another backend has computed is passed over
    while (sink->next_experts < sink->n_experts && sink->experts[sink->next_experts].node < node) {
        sink->next_experts++;
    }
    if (sink->next_experts == sink->n_experts || sink->experts[sink->next_experts].node != node) {
        return;  // they were counted with a node before it
    }
    const struct ggml_instr_experts * of = &sink->experts[sink->next_experts++];
    uint32_t * uses = sink->uses + of->offset;
    for (int64_t i1 = 0; i1 < ids->ne[1]; i1++) {
        for (int64_t i0 = 0; i0 < ids->ne[0]; i0++) {
            const int32_t id = *(const int32_t *) ((const char *) ids->data + i1 * (int64_t) ids->nb[1] + i0 * (int64_t) ids->nb[0]);
            if (id >= 0 && id < of->n) {
                uses[id]++;
            }
        }
    }
}

void ggml_instr_sink_free(struct ggml_instr_sink * sink) {
    for (int32_t i = 0; i < sink->n_threads; i++) {
        free(sink->threads[i].nodes);  // and `times`, in the same block
    }
    free(sink->threads);
    free(sink->splits);
    free(sink->uses);
    memset(sink, 0, sizeof(*sink));
}

uint32_t ggml_instr_pack_long(uint64_t ticks) {
    // the counters of two cores may differ by some ticks; time must not run backwards
    if (ticks >> 63) {
        return 0;
    }
    const uint64_t units = ticks >> 12;
    return (uint32_t) 1 << 31 | (uint32_t) (units < 0x7fffffff ? units : 0x7fffffff);
}

void ggml_instr_split_begin(int32_t split, int32_t i_start, bool asynchronous) {
    struct ggml_instr_sink * sink = ggml_instr_current_sink;
    if (sink == NULL) {
        return;
    }
    sink->split       = split;
    sink->node_offset = i_start;
    if (!sink->record_splits) {
        return;
    }
    // the parts of a split that an eval callback cuts out count as one
    if (sink->n_splits > 0 && sink->splits[sink->n_splits - 1].split == split) {
        return;
    }
    if (sink->n_splits < sink->n_splits_capacity) {
        struct ggml_instr_split * s = &sink->splits[sink->n_splits++];
        s->split        = split;
        s->asynchronous = asynchronous;
        s->begin        = ggml_instr_ticks(sink->use_counter);
        s->end          = s->begin;
    }
}

void ggml_instr_split_end(void) {
    struct ggml_instr_sink * sink = ggml_instr_current_sink;
    if (sink != NULL && sink->n_splits > 0) {
        sink->splits[sink->n_splits - 1].end = ggml_instr_ticks(sink->use_counter);
    }
}

//
// devices that compute behind the caller
//

bool ggml_instr_device_begin(struct ggml_instr_device_run * run) {
    const struct ggml_instr_sink * sink = ggml_instr_current_sink;
    memset(run, 0, sizeof(*run));
    if (sink == NULL || sink->recorder == NULL) {
        return false;
    }
    run->recorded = sink->recorder->begin(sink->split);
    if (run->recorded == NULL) {
        return false;
    }
    run->recorder     = sink->recorder;
    run->split        = sink->split;
    run->node_offset  = sink->node_offset;
    run->record_begin = sink->record_wait;
    run->begin        = run->last_begin = ggml_instr_clock_ns();
    return true;
}

static _Atomic(ggml_instr_collector) ggml_instr_current_collector;

void ggml_instr_set_collector(ggml_instr_collector collect) {
    ggml_instr_current_collector = collect;
}

void ggml_instr_collect(bool is_last) {
    const ggml_instr_collector collect = ggml_instr_current_collector;
    if (collect != NULL) {
        collect(is_last);
    }
}

// ticks since another stamp, less than half of all that the clock can count
static double ggml_instr_ticks_since(const struct ggml_instr_device * device, uint64_t before, uint64_t ticks) {
    const uint64_t since = (ticks - before) & device->mask;
    return since <= device->mask / 2 ? (double) since : -(double) ((before - ticks) & device->mask);
}

uint64_t ggml_instr_device_ns(const struct ggml_instr_device * device, uint64_t ticks) {
    const double since = ggml_instr_ticks_since(device, device->ticks, ticks) * device->ns_per_tick;
    return device->ns + (uint64_t) (int64_t) (since < 0 ? since - 0.5 : since + 0.5);
}

static void ggml_instr_device_join(struct ggml_instr_device * device, uint64_t ns, uint64_t ticks, uint64_t uncertainty) {
    if (!device->joined) {
        device->ns_before    = ns;
        device->ticks_before = ticks;
        device->ns_per_tick  = device->tick;
    }
    device->joined      = true;
    device->ns          = ns;
    device->ticks       = ticks;
    device->uncertainty = uncertainty;
}

bool ggml_instr_device_is_due(const struct ggml_instr_device * device) {
    return !device->joined || ggml_instr_clock_ns() - device->ns > 100 * 1000 * 1000;
}

void ggml_instr_device_calibrate(struct ggml_instr_device * device, uint64_t ns, uint64_t ticks, uint64_t deviation) {
    const double second = 1e9;
    uint64_t uncertainty = deviation + (uint64_t) device->tick + 1;
    const double passed = (double) (ns - device->ns);
    if (device->joined && passed > (double) (device->mask / 2) * device->tick) {
        device->joined = false;  // its stamps may have begun anew meanwhile
    }
    if (device->joined) {
        // how far the clock has strayed from the line, in the second for which a run may follow it
        const double strayed = fabs((double) ggml_instr_device_ns(device, ticks) - (double) ns);
        uncertainty += (uint64_t) (passed > second ? strayed * second / passed : strayed);
        if (uncertainty < device->uncertainty) {
            uncertainty = device->uncertainty;
        }
        if ((double) (ns - device->ns_before) > second) {
            const double rate = (double) (ns - device->ns_before) / ggml_instr_ticks_since(device, device->ticks_before, ticks);
            // a clock that stood still while the machine slept has no rate
            device->ns_per_tick  = fabs(rate / device->tick - 1) < 1e-3 ? rate : device->tick;
            device->ns_before    = device->ns;
            device->ticks_before = device->ticks;
        }
    }
    ggml_instr_device_join(device, ns, ticks, uncertainty);
}

// Without calibration: what ran between two moments of the log's clock bounds the other one.
static void ggml_instr_device_bound(struct ggml_instr_device * device, const struct ggml_instr_device_run * run, const struct ggml_instr_device_op * ops, int32_t n) {
    const double   drift = 2e-5;  // of two clocks, at most
    const uint64_t end   = ggml_instr_clock_ns();
    const uint64_t begin = run->begin;
    const uint64_t first = ops[0].begin ? ops[0].begin : ops[0].end;
    // of the first stamp, since `begin`
    double earliest = 0;
    double latest   = (double) (end - begin) - ggml_instr_ticks_since(device, first, ops[n - 1].end) * device->tick;
    if (run->last < n) {
        const uint64_t last  = ops[run->last].begin ? ops[run->last].begin : ops[run->last].end;
        const double   since = (double) (run->last_begin - begin) - ggml_instr_ticks_since(device, first, last) * device->tick;
        earliest = since > 0 ? since : 0;
    }
    if (device->joined && (double) (begin - device->ns) < (double) (device->mask / 2) * device->tick) {
        const double expected = (double) (int64_t) (ggml_instr_device_ns(device, first) - begin);
        const double margin   = (double) device->uncertainty + drift * (double) (end - device->ns);
        const double from = expected - margin > earliest ? expected - margin : earliest;
        const double to   = expected + margin < latest   ? expected + margin : latest;
        if (from <= to) {
            earliest = from;
            latest   = to;
        }
    }
    const double middle = latest > earliest ? (earliest + latest) / 2 : earliest;
    ggml_instr_device_join(device, begin + (uint64_t) middle, first, (uint64_t) (latest - middle > 0 ? latest - middle : 0) + 1);
}

void ggml_instr_device_end(struct ggml_instr_device_run * run, struct ggml_instr_device * device, const struct ggml_instr_device_op * ops, int32_t n) {
    if (run->recorder == NULL) {
        return;
    }
    if (n > 0 && device->clock == GGML_INSTR_CLOCK_BOUNDED) {
        ggml_instr_device_bound(device, run, ops, n);
    }
    run->recorder->end(run, device, ops, n);
    run->recorder = NULL;
}

static _Atomic(const struct ggml_instr_rpc_recorder *) ggml_instr_current_rpc_recorder;

void ggml_instr_set_rpc_recorder(const struct ggml_instr_rpc_recorder * recorder) {
    ggml_instr_current_rpc_recorder = recorder;
}

const struct ggml_instr_rpc_recorder * ggml_instr_get_rpc_recorder(void) {
    return ggml_instr_current_rpc_recorder;
}

uint64_t ggml_instr_graph_uid(const struct ggml_cgraph * graph) {
    return graph->uid;
}

bool ggml_instr_node_runs(const struct ggml_tensor * node) {
    return !ggml_op_is_empty(node->op) && (node->flags & GGML_TENSOR_FLAG_COMPUTE) != 0;
}
