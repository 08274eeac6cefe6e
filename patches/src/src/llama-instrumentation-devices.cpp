// llama-instrumentation-devices.cpp - see the header

#include "llama-instrumentation-devices.h"

#include "llama-instrumentation-file.h"
#include "llama-instrumentation-schema.h"
#include "llama-instrumentation-thread.h"

#include "llama-context.h"

#include <algorithm>
#include <unistd.h>
#include <utility>

namespace llama_instr {

namespace {

// of a run, until it ends
struct recorded_run {
    std::shared_ptr<device_compute> of;
    uint64_t kernels;  // at most
    pid_t    process;
};

// the tail holds the columns
struct alignas(8) device_record {
    const device_plan * plan;  // the log owns it with the record
    uint64_t t;
    int32_t  compute;
    int32_t  split;

    void format(std::string_view tail, log_lines & lines) const {
        const size_t n = plan->nodes.size();
        const auto * gap = (const uint64_t *) tail.data();
        const auto * dur = gap + n;
        json_line & line = lines.begin(LLAMA_INSTR_EV_OPS, t);
        line.kv(LLAMA_INSTR_K_COMPUTE, compute).kv(LLAMA_INSTR_K_PLAN, plan->id);
        line.kv(LLAMA_INSTR_K_DEVICE, plan->device).kv(LLAMA_INSTR_K_SPLIT, split);
        if (std::any_of(gap, dur, [](uint64_t ns) { return ns > 0; })) {
            line.column(LLAMA_INSTR_K_GAP, n, [gap](size_t i) { return gap[i]; });
        }
        line.column(LLAMA_INSTR_K_DUR, n, [dur](size_t i) { return dur[i]; });
        line.end();
    }
};

// the nodes of a split that run: there are no more kernels
uint64_t most_kernels(const compute_state & c, int32_t split) {
    int32_t begin = 0, end = ggml_graph_n_nodes(c.gf);
    ggml_backend_t backend;
    if (c.state->ctx) {
        ggml_instr_sched_get_split(c.state->ctx->get_sched(), split, &begin, &end, &backend);
    }
    uint64_t n = 0;
    for (int32_t i = begin; i < end; i++) {
        n += ggml_instr_node_runs(ggml_graph_node(c.gf, i));
    }
    return n;
}

void * begin_run(int32_t split) {
    auto & c = tl().compute;
    const uint64_t begin = ticks_now();
    if (!c.devices) {
        c.devices = std::make_shared<device_compute>(c.s, c.graph->device_plans, c.times.compute);
    }
    auto * const run = new recorded_run { c.devices, most_kernels(c, split), getpid() };
    c.s->ops_under_way += run->kernels;
    c.s->overhead_ticks += ticks_now() - begin;
    return run;
}

// the device's first line in this part, or another one if its times have become less certain
void write_device(log_part & s, const ggml_instr_device & device) {
    static const char * const clocks[] = { "calibrated", "bounded", "cupti" };
    std::lock_guard<std::mutex> lock(s.devices_mutex);
    const auto [known, is_new] = s.devices.emplace(device.name, device.uncertainty);
    if (!is_new && known->second >= device.uncertainty) {
        return;
    }
    known->second = device.uncertainty;
    json_line & line = line_buffer().begin(LLAMA_INSTR_EV_DEVICE, ggml_instr_clock_ns());
    line.kv(LLAMA_INSTR_K_NAME, device.name).kv(LLAMA_INSTR_K_DESCRIPTION, device.description);
    line.kv(LLAMA_INSTR_K_CLOCK, clocks[device.clock]).kv(LLAMA_INSTR_K_TICK, device.tick);
    line.kv(LLAMA_INSTR_K_UNCERTAINTY, device.uncertainty);
    s.write(LLAMA_INSTR_EV_DEVICE, line);
}

device_times times_of(device_compute & of, const ggml_instr_device_run & run, const ggml_instr_device & device, const ggml_instr_device_op * ops, size_t n) {
    std::vector<uint64_t> nodes(n);
    for (size_t i = 0; i < n; i++) {
        nodes[i] = ops[i].nodes + ggml_instr_nodes(run.node_offset, 0);
    }
    device_times times = {};
    times.plan  = of.plans->plan_of(*of.part, device.name, std::move(nodes));
    times.split = run.split;
    times.columns.resize(2 * n);
    times.t = ggml_instr_device_ns(&device, ops[0].begin ? ops[0].begin : ops[0].end);
    uint64_t at = times.t;
    for (size_t i = 0; i < n; i++) {
        // kernels may overlap: the time of the later one begins at the end of the earlier
        const uint64_t begin = ops[i].begin ? std::max(at, ggml_instr_device_ns(&device, ops[i].begin)) : at;
        const uint64_t end   = std::max(begin, ggml_instr_device_ns(&device, ops[i].end));
        times.columns[i]     = begin - at;
        times.columns[n + i] = end - begin;
        at = end;
    }
    return times;
}

void end_run(const ggml_instr_device_run * run, const ggml_instr_device * device, const ggml_instr_device_op * ops, int32_t n) {
    auto * const recorded = (recorded_run *) run->recorded;
    if (recorded->process != getpid()) {
        return;  // in the child of a fork: the locks of its parent's session may be held forever
    }
    const uint64_t begin = ticks_now();
    const std::unique_ptr<recorded_run> own(recorded);
    log_part & s = *own->of->part;
    s.ops_under_way -= own->kernels;
    if (n > 0) {
        write_device(s, *device);
        own->of->add(times_of(*own->of, *run, *device, ops, (size_t) n));
    } else {
        s.dropped_ops += own->kernels;
    }
    s.overhead_ticks += ticks_now() - begin;
}

void tell_user(const char * text) {
    tell(text);
}

}  // namespace

const ggml_instr_recorder device_recorder = { begin_run, end_run, tell_user };

std::shared_ptr<const device_plan> device_plan_table::plan_of(log_part & s, const std::string & device, std::vector<uint64_t> && nodes) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto known = std::find_if(plans.begin(), plans.end(), [&nodes](const auto & plan) { return plan->nodes == nodes; });
    if (known != plans.end()) {
        return *known;
    }
    const auto plan = std::make_shared<const device_plan>(device_plan { s.all->next_plan++, device, std::move(nodes) });
    write_plan(s, plan->id, graph, plan->nodes);
    plans.push_back(plan);
    return plan;
}

void device_compute::add(device_times && times) {
    std::lock_guard<std::mutex> lock(mutex);
    if (written) {
        write(times);
    } else {
        waiting.push_back(std::move(times));
    }
}

void device_compute::compute_is_written() {
    std::lock_guard<std::mutex> lock(mutex);
    written = true;
    for (const device_times & times : waiting) {
        write(times);
    }
    waiting.clear();
}

void device_compute::write(const device_times & times) {
    const device_record record = { times.plan.get(), times.t, compute, times.split };
    const auto & columns = times.columns;
    part->add(record, std::string_view((const char *) columns.data(), columns.size() * sizeof(columns[0])), times.plan);
}

}  // namespace llama_instr
