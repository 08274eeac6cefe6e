// llama-instrumentation-machine.h - the process and its machine: what they are, for the first line of a log, and what
// happened meanwhile: CPU time, waiting for a CPU, load

#pragma once

#include <cstdint>
#include <ctime>
#include <string>
#include <utility>
#include <vector>

namespace [[gnu::visibility("hidden")]] llama_instr {

class json_line;

void write_host(json_line & line);
void write_process(json_line & line);
std::string iso_time(const timespec & wall);
std::string random_id();
uint64_t resident_bytes();
int      thread_id();

// counts since the process or the machine began
struct machine_counts {
    uint64_t t = 0, cpu = 0, nvcsw = 0, nivcsw = 0;   // t and cpu in nanoseconds
    double   load    = -1;                            // -1: the system does not tell
    int64_t  running = -1;
    int64_t  busy    = -1, steal = -1;                // in nanoseconds
    std::vector<std::pair<int, uint64_t>> delays;     // of every thread but the recorder's, by thread id; in nanoseconds

    static machine_counts now();

    // what happened from `before` until these were read
    void write_since(const machine_counts & before, json_line & line) const;
};

// the calling thread is the recorder's: its waiting disturbs no thread of the program
void is_recorder_thread();

}  // namespace llama_instr
