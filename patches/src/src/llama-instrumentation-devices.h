// llama-instrumentation-devices.h - the kernels of devices that compute behind the caller
//
// A backend ends a run whenever it has its results: within the compute, after it, on a thread of its own, when the
// context is freed, or never. A run keeps the part of the log in which its compute is. What it leaves is written after the
// compute's own line, in the same part.

#pragma once

#include "ggml-instrumentation.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace [[gnu::visibility("hidden")]] llama_instr {

class log_part;

// the order in which the kernels of a split ran on a device; never changes
struct device_plan {
    int id;
    std::string device;
    std::vector<uint64_t> nodes;  // as in the sink
};

// those of a graph, for all its runs
class device_plan_table {
  public:
    explicit device_plan_table(int graph_) : graph(graph_) {}

    // the plan with these kernels; writes it if it is new
    std::shared_ptr<const device_plan> plan_of(log_part & s, const std::string & device, std::vector<uint64_t> && nodes);

  private:
    const int  graph;
    std::mutex mutex;
    std::vector<std::shared_ptr<const device_plan>> plans;
};

// what a run has left
struct device_times {
    std::shared_ptr<const device_plan> plan;
    int32_t  split;
    uint64_t t;                     // of the first kernel, in nanoseconds
    std::vector<uint64_t> columns;  // the gaps before the kernels, then their durations
};

// the runs of a compute
class device_compute {
  public:
    device_compute(std::shared_ptr<log_part> part_, std::shared_ptr<device_plan_table> plans_, int compute_) :
        part(std::move(part_)), plans(std::move(plans_)), compute(compute_) {}

    const std::shared_ptr<log_part>     part;
    const std::shared_ptr<device_plan_table> plans;

    void add(device_times && times);

    // from now on, what runs leave need not wait
    void compute_is_written();

  private:
    const int  compute;
    std::mutex mutex;
    bool       written = false;
    std::vector<device_times> waiting;

    void write(const device_times & times);
};

// takes the runs of the compute that the calling thread is in
extern const ggml_instr_recorder device_recorder;

}  // namespace llama_instr
