// llama-instrumentation-machine.cpp - reads the machine's counters, in the recorder's own thread

#include "llama-instrumentation-machine.h"

#include "llama-instrumentation-host.h"
#include "llama-instrumentation-records.h"

#include "ggml-instrumentation.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <dirent.h>
#include <fcntl.h>
#include <string>
#include <sys/resource.h>
#include <unistd.h>
#include <vector>

namespace llama_instr {

namespace {

std::atomic<int> recorder_thread { -1 };

uint64_t ns(const timeval & time) {
    return (uint64_t) time.tv_sec * 1000000000 + (uint64_t) time.tv_usec * 1000;
}

// the first bytes of a file of /proc, "" if there is none
std::string head_of(const char * path) {
    char text[256];
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) {
        return "";
    }
    const auto n = read(file, text, sizeof(text));
    close(file);
    return std::string(text, n > 0 ? (size_t) n : 0);
}

// the runs of digits in a text, whatever the locale: "cpu 12 3.5/7" has 12, 3, 5 and 7
std::vector<uint64_t> numbers_of(const std::string & text) {
    std::vector<uint64_t> numbers;
    bool inside = false;
    for (const char c : text) {
        const bool digit = c >= '0' && c <= '9';
        if (digit && !inside) {
            numbers.push_back(0);
        }
        if (digit) {
            numbers.back() = 10 * numbers.back() + (uint64_t) (c - '0');
        }
        inside = digit;
    }
    return numbers;
}

// /proc/loadavg: three averages with two decimals each, then running/all threads
void read_load(machine_counts & counts) {
    const auto numbers = numbers_of(head_of("/proc/loadavg"));
    if (numbers.size() > 6) {
        counts.load    = (double) numbers[0] + (double) numbers[1] / 100;
        counts.running = std::max((int64_t) numbers[6] - 1, (int64_t) 0);
    }
}

// /proc/stat: "cpu", then user, nice, system, idle, iowait, irq, softirq, steal, in ticks of the system
void read_times(machine_counts & counts) {
    const auto numbers = numbers_of(head_of("/proc/stat"));
    if (numbers.size() > 7) {
        const auto tick = 1000000000 / (uint64_t) sysconf(_SC_CLK_TCK);
        counts.busy  = (int64_t) ((numbers[0] + numbers[1] + numbers[2] + numbers[5] + numbers[6]) * tick);
        counts.steal = (int64_t) (numbers[7] * tick);
    }
}

// /proc/self/task/ID/schedstat: time on a CPU, time ready without one, number of runs
void read_delays(machine_counts & counts) {
    DIR * threads = opendir("/proc/self/task");
    if (threads == nullptr) {
        return;
    }
    while (const dirent * entry = readdir(threads)) {
        const int id = (int) strtol(entry->d_name, nullptr, 10);
        if (id <= 0 || id == recorder_thread) {
            continue;
        }
        const auto numbers = numbers_of(head_of(("/proc/self/task/" + std::to_string(id) + "/schedstat").c_str()));
        if (numbers.size() > 1) {
            counts.delays.emplace_back(id, numbers[1]);
        }
    }
    closedir(threads);
    std::sort(counts.delays.begin(), counts.delays.end());
}

}  // namespace

void is_recorder_thread() {
    recorder_thread = thread_id();
}

machine_counts machine_counts::now() {
    machine_counts counts;
    counts.t = ggml_instr_clock_ns();
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    counts.cpu    = ns(usage.ru_utime) + ns(usage.ru_stime);
    counts.nvcsw  = (uint64_t) usage.ru_nvcsw;
    counts.nivcsw = (uint64_t) usage.ru_nivcsw;
#ifdef __linux__
    read_load(counts);
    read_times(counts);
    read_delays(counts);
#endif
    return counts;
}

machine_record machine_counts::since(const machine_counts & before) const {
    machine_record record = {};
    record.t       = t;
    record.dur     = t - before.t;
    record.cpu     = cpu - before.cpu;
    record.nvcsw   = nvcsw - before.nvcsw;
    record.nivcsw  = nivcsw - before.nivcsw;
    record.load    = load;
    record.running = running;
    record.busy    = busy >= 0 && before.busy >= 0 ? std::max<int64_t>(busy - before.busy, 0) : -1;
    record.steal   = steal >= 0 && before.steal >= 0 ? std::max<int64_t>(steal - before.steal, 0) : -1;
    record.delay   = delays.empty() ? -1 : 0;
    auto old = before.delays.begin();
    for (const auto & [id, delay] : delays) {
        while (old != before.delays.end() && old->first < id) {
            ++old;
        }
        // a new thread may have the id of one that has ended
        const bool same = old != before.delays.end() && old->first == id && old->second <= delay;
        record.delay += (int64_t) (delay - (same ? old->second : 0));
    }
    return record;
}

}  // namespace llama_instr
