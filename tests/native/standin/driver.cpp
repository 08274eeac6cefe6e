#include "driver.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <thread>
#include <utility>

namespace standin {

tracer * tracing = nullptr;

static std::atomic<uint32_t> n_calls { 0 };
static std::atomic<uint64_t> n_nodes { 1 << 20 };
static thread_local bool  capturing = false;
static thread_local graph capture;

bool is_asked(const std::string & what) {
    const char * const asked = getenv("STANDIN_CUDA");
    return asked && ("," + std::string(asked) + ",").find("," + what + ",") != std::string::npos;
}

uint64_t now() {
    timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t) ts.tv_sec * 1000000000 + (uint64_t) ts.tv_nsec;
}

static void run(work kind, uint32_t correlation, uint64_t node, const std::string & of, const std::function<void()> & compute) {
    static FILE * const truth = getenv("STANDIN_TRUTH") ? fopen(getenv("STANDIN_TRUTH"), "w") : nullptr;
    const uint64_t begin = now();
    if (is_asked("slow")) {
        std::this_thread::sleep_for(std::chrono::microseconds(300));
    }
    compute();
    const uint64_t end = std::max(now(), begin + 1);
    if (truth) {
        fprintf(truth, "%s %llu %llu\n", of.c_str(), (unsigned long long) begin, (unsigned long long) end);
    }
    if (tracing) {
        tracing->ran(kind, correlation, node, begin, end);
    }
}

static uint32_t call() {
    const uint32_t correlation = ++n_calls;
    if (tracing) {
        tracing->called(correlation);
    }
    return correlation;
}

void launch(work kind, const std::string & of, std::function<void()> compute) {
    const uint32_t correlation = call();
    if (!capturing) {
        run(kind, correlation, 0, of, compute);
        return;
    }
    capture.push_back({ n_nodes++, kind, std::move(compute), of });
    if (tracing) {
        tracing->captured(capture.back());
    }
}

void begin_capture() {
    capturing = true;
    capture.clear();
}

graph end_capture() {
    capturing = false;
    return std::move(capture);
}

graph instantiate(graph & from) {
    call();
    graph instance;
    for (graph_node & node : from) {
        instance.push_back({ n_nodes++, node.kind, node.compute, node.of });
        if (tracing) {
            // a copy is reported as created, too: NVIDIA's sample cuda_graphs_trace passes over these
            tracing->cloned(instance.back(), node);
            tracing->captured(instance.back());
        }
    }
    return instance;
}

void update(graph & instance, const graph & from) {
    call();
    for (size_t i = 0; i < from.size(); i++) {
        const uint64_t id = i < instance.size() ? instance[i].id : n_nodes++;
        instance.resize(from.size());
        instance[i] = { id, from[i].kind, from[i].compute, from[i].of };
    }
}

void launch(const graph & instance) {
    const uint32_t correlation = call();
    for (const graph_node & node : instance) {
        run(node.kind, correlation, node.id, node.of, node.compute);
    }
}

}  // namespace standin
