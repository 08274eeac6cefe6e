// driver.h - what a CUDA driver does, as far as CUPTI reports it: launches, captures and graphs
//
// It is for tests, and computes what it is told on the CPU, at once. It is shared by the stand-ins for a device and for
// libcupti.

#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace standin {

enum class work { kernel, copy, set };

struct graph_node {
    uint64_t id;
    work     kind;
    std::function<void()> compute;
    std::string of;  // what it belongs to, for the truth
};

using graph = std::vector<graph_node>;

// what CUPTI wants to know
struct tracer {
    virtual void captured(graph_node & node) = 0;
    virtual void cloned(graph_node & node, graph_node & original) = 0;
    virtual void called(uint32_t correlation) = 0;
    virtual void ran(work kind, uint32_t correlation, uint64_t node, uint64_t begin, uint64_t end) = 0;
};

extern tracer * tracing;

// whether the environment's STANDIN_CUDA names this; a kernel of a `slow` device takes 0.3 ms
bool is_asked(const std::string & what);

uint64_t now();  // CLOCK_MONOTONIC

// The calling thread's launches go to a graph from begin_capture() to end_capture(). When each ran, the file STANDIN_TRUTH
// has: a line with what it belongs to, its begin and end.
void  launch(work kind, const std::string & of, std::function<void()> compute);
void  begin_capture();
graph end_capture();

// what is instantiated has nodes of its own; an update keeps their ids
graph instantiate(graph & from);
void  update(graph & instance, const graph & from);
void  launch(const graph & instance);

}  // namespace standin
