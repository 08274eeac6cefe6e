// llama-instrumentation-machine.h - what the machine did meanwhile: CPU time, waiting for a CPU, load

#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace [[gnu::visibility("hidden")]] llama_instr {

struct machine_record;

// counts since the process or the machine began
struct machine_counts {
    uint64_t t = 0, cpu = 0, nvcsw = 0, nivcsw = 0;   // t and cpu in nanoseconds
    double   load    = -1;                            // -1: the system does not tell
    int64_t  running = -1;
    int64_t  busy    = -1, steal = -1;                // in nanoseconds
    std::vector<std::pair<int, uint64_t>> delays;     // of every thread but the recorder's, by thread id; in nanoseconds

    static machine_counts now();

    // what happened from `before` until these were read
    machine_record since(const machine_counts & before) const;
};

// the calling thread is the recorder's: its waiting disturbs no thread of the program
void is_recorder_thread();

}  // namespace llama_instr
