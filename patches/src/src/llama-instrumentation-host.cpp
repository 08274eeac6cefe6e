// llama-instrumentation-host.cpp - the first line of a log: who records, on what machine

#include "llama-instrumentation-host.h"

#include "llama-instrumentation.h"
#include "llama-instrumentation-schema.h"
#include "llama-instrumentation-secrets.h"
#include "llama-instrumentation-json.h"

#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <random>
#include <sstream>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>
#ifdef __APPLE__
#    include <crt_externs.h>
#    include <sys/sysctl.h>
#endif
#ifdef __linux__
#    include <sys/syscall.h>
#endif

namespace llama_instr {

namespace {

std::string cpu_name() {
#ifdef __APPLE__
    char   name[256] = "";
    size_t size      = sizeof(name);
    sysctlbyname("machdep.cpu.brand_string", name, &size, nullptr, 0);
    return name;
#else
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);) {
        // x86 has "model name"; Arm has only a part number
        for (const char * key : { "model name", "CPU part" }) {
            if (line.compare(0, strlen(key), key) == 0) {
                const size_t colon = line.find(':');
                return colon == std::string::npos || colon + 2 > line.size() ? "" : line.substr(colon + 2);
            }
        }
    }
    return "";
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
    unsigned long long size = 0, resident = 0;
    std::ifstream file("/proc/self/statm");
    if (!(file >> size >> resident)) {
        resident = 0;
    }
    return resident * (uint64_t) sysconf(_SC_PAGESIZE);
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
#else
    return 0;
#endif
}

}  // namespace llama_instr
