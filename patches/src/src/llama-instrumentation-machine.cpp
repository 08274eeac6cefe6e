// llama-instrumentation-machine.cpp - the process and its machine

#include "llama-instrumentation-machine.h"

#include "llama-instrumentation-cpus.h"
#include "llama-instrumentation-json.h"
#include "llama-instrumentation-schema.h"
#include "llama-instrumentation-secrets.h"

#include "ggml-instrumentation.h"
#include "llama.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>
#include <vector>
#ifdef __APPLE__
#    include <crt_externs.h>
#    include <mach/mach.h>
#    include <pthread.h>
#    include <sys/sysctl.h>
#endif
#ifdef __linux__
#    include <sys/syscall.h>
#endif

namespace llama_instr {

//
// what they are
//

namespace {

std::string cpu_name() {
#ifdef __APPLE__
    char   name[256] = "";
    size_t size      = sizeof(name);
    sysctlbyname("machdep.cpu.brand_string", name, &size, nullptr, 0);
    return name;
#else
    std::ifstream file("/proc/cpuinfo");
    return cpu_name_in(file);
#endif
}

std::vector<std::string> arguments() {
    std::vector<std::string> argv;
#ifdef __APPLE__
    for (int i = 0; i < *_NSGetArgc(); i++) {
        argv.push_back((*_NSGetArgv())[i]);
    }
#else
    std::ifstream file("/proc/self/cmdline", std::ios::binary);
    for (std::string arg; std::getline(file, arg, '\0');) {
        argv.push_back(arg);
    }
#endif
    return argv;
}

// "CPU : SSE3 = 1 | AVX = 1 | ..." -> the names of the features that are on
std::vector<std::string> cpu_features() {
    std::vector<std::string> names;
    std::istringstream info(llama_print_system_info());
    for (std::string part; std::getline(info, part, '|');) {
        const size_t colon = part.find(" : ");
        if (colon != std::string::npos) {
            part = part.substr(colon + 3);
        }
        std::istringstream words(part);
        std::string name, equals, value;
        if (words >> name >> equals >> value && equals == "=" && value != "0") {
            if (value != "1") {
                name.append("=").append(value);
            }
            names.push_back(name);
        }
    }
    return names;
}

}  // namespace

std::string iso_time(const timespec & wall) {
    struct tm utc;
    gmtime_r(&wall.tv_sec, &utc);
    char text[64];
    const size_t n = strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%S", &utc);
    snprintf(text + n, sizeof(text) - n, ".%09ldZ", wall.tv_nsec);
    return text;
}

void write_host(json_line & line) {
    struct utsname os = {};
    uname(&os);
    line.object(LLAMA_INSTR_K_HOST);
    line.kv(LLAMA_INSTR_K_CPU, cpu_name());
    line.array(LLAMA_INSTR_K_FEATURES);
    for (const auto & name : cpu_features()) {
        line.item(name);
    }
    line.close_array();
    line.kv(LLAMA_INSTR_K_CORES, sysconf(_SC_NPROCESSORS_ONLN)).kv(LLAMA_INSTR_K_MEMORY, (uint64_t) sysconf(_SC_PHYS_PAGES) * (uint64_t) sysconf(_SC_PAGESIZE));
    line.kv(LLAMA_INSTR_K_OS, std::string(os.sysname) + " " + os.release + " " + os.machine);
    line.close_object();
}

void write_process(json_line & line) {
    line.object(LLAMA_INSTR_K_PROCESS).kv(LLAMA_INSTR_K_PID, getpid()).array(LLAMA_INSTR_K_ARGV);
    const char * keep = getenv("LLAMA_INSTR_KEEP_ARGS");
    const std::vector<std::string> argv = arguments();
    for (const auto & arg : keep && keep[0] ? argv : without_secrets(argv)) {
        line.item(arg);
    }
    line.close_array().close_object();
}

uint64_t resident_bytes() {
#ifdef __APPLE__
    mach_task_basic_info_data_t info = {};
    mach_msg_type_number_t      size = MACH_TASK_BASIC_INFO_COUNT;
    const kern_return_t status = task_info(mach_task_self(), MACH_TASK_BASIC_INFO, (task_info_t) &info, &size);
    return status == KERN_SUCCESS ? info.resident_size : 0;
#else
    unsigned long long size = 0, resident = 0;
    std::ifstream file("/proc/self/statm");
    if (!(file >> size >> resident)) {
        resident = 0;
    }
    return resident * (uint64_t) sysconf(_SC_PAGESIZE);
#endif
}

std::string random_id() {
    std::random_device random;
    char text[17];
    snprintf(text, sizeof(text), "%08x%08x", random(), random());
    return text;
}

int thread_id() {
#ifdef __linux__
    thread_local const int id = (int) syscall(SYS_gettid);
    return id;
#elif defined(__APPLE__)
    uint64_t id = 0;  // small: threads are counted from the start of the machine
    pthread_threadid_np(nullptr, &id);
    return (int) id;
#else
    return 0;
#endif
}

//
// what happened, read by the recorder's own thread
//

namespace {

std::atomic<int> recorder_thread { -1 };

uint64_t ns(const timeval & time) {
    return (uint64_t) time.tv_sec * 1000000000 + (uint64_t) time.tv_usec * 1000;
}

#ifdef __linux__

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

void read_system(machine_counts & counts) {
    read_load(counts);
    read_times(counts);
    read_delays(counts);
}

#elif defined(__APPLE__)

// it counts neither the threads that are ready nor how long they wait for a CPU
void read_system(machine_counts & counts) {
    static const host_t host = mach_host_self();  // each call would keep another right to it
    if (getloadavg(&counts.load, 1) != 1) {
        counts.load = -1;
    }
    host_cpu_load_info_data_t info = {};
    mach_msg_type_number_t    size = HOST_CPU_LOAD_INFO_COUNT;
    if (host_statistics(host, HOST_CPU_LOAD_INFO, (host_info_t) &info, &size) == KERN_SUCCESS) {
        const natural_t * ticks = info.cpu_ticks;
        const uint64_t busy = (uint64_t) ticks[CPU_STATE_USER] + ticks[CPU_STATE_NICE] + ticks[CPU_STATE_SYSTEM];
        counts.busy = (int64_t) (busy * (1000000000 / (uint64_t) sysconf(_SC_CLK_TCK)));
    }
}

#else

void read_system(machine_counts &) {}

#endif

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
    read_system(counts);
    return counts;
}

void machine_counts::write_since(const machine_counts & before, json_line & line) const {
    int64_t delay = delays.empty() ? -1 : 0;
    auto old = before.delays.begin();
    for (const auto & [id, waited] : delays) {
        while (old != before.delays.end() && old->first < id) {
            ++old;
        }
        // a new thread may have the id of one that has ended
        const bool same = old != before.delays.end() && old->first == id && old->second <= waited;
        delay += (int64_t) (waited - (same ? old->second : 0));
    }
    const auto passed = [](int64_t then, int64_t now) { return then >= 0 && now >= 0 ? std::max<int64_t>(now - then, 0) : -1; };
    line.kv(LLAMA_INSTR_K_DUR, t - before.t).kv(LLAMA_INSTR_K_CPU, cpu - before.cpu).kv_if_known(LLAMA_INSTR_K_DELAY, delay);
    line.kv(LLAMA_INSTR_K_NVCSW, nvcsw - before.nvcsw).kv(LLAMA_INSTR_K_NIVCSW, nivcsw - before.nivcsw);
    line.kv_if_known(LLAMA_INSTR_K_LOAD, load).kv_if_known(LLAMA_INSTR_K_RUNNING, running);
    line.kv_if_known(LLAMA_INSTR_K_BUSY, passed(before.busy, busy)).kv_if_known(LLAMA_INSTR_K_STEAL, passed(before.steal, steal));
}

}  // namespace llama_instr
