// llama-instrumentation-cpus.h - the name of the processor in Linux's /proc/cpuinfo, as llamacpp_instr/base/cpus.py has it

#pragma once

#include "llama-instrumentation-cores.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <istream>
#include <string>
#include <vector>

namespace [[gnu::visibility("hidden")]] llama_instr {

inline std::string core_name(unsigned long maker, unsigned long part) {
    for (const arm_core & core : arm_cores) {
        if (core.maker == maker && core.part == part) {
            return core.name;
        }
    }
    char text[32];
    for (const arm_maker & of : arm_makers) {
        if (of.maker == maker) {
            snprintf(text, sizeof(text), " 0x%03lx", part);
            return of.name + std::string(text);
        }
    }
    snprintf(text, sizeof(text), "0x%02lx 0x%03lx", maker, part);
    return text;
}

// x86 has "model name"; Arm has two numbers for each core, and some kernels a name that says only "ARMv8 Processor"
inline std::string cpu_name_in(std::istream & cpuinfo) {
    std::string   model, names;
    unsigned long maker = 0;
    std::vector<std::string> cores;
    for (std::string line; std::getline(cpuinfo, line);) {
        const size_t      colon = line.find(':');
        const std::string value = colon == std::string::npos || colon + 2 > line.size() ? "" : line.substr(colon + 2);
        if (model.empty() && line.compare(0, 10, "model name") == 0) {
            model = value;
        } else if (line.compare(0, 15, "CPU implementer") == 0) {
            maker = strtoul(value.c_str(), nullptr, 16);
        } else if (line.compare(0, 8, "CPU part") == 0) {
            const std::string core = core_name(maker, strtoul(value.c_str(), nullptr, 16));
            if (std::find(cores.begin(), cores.end(), core) == cores.end()) {
                cores.push_back(core);
                names.append(names.empty() ? "" : " + ").append(core);
            }
        }
    }
    return names.empty() ? model : names;
}

}  // namespace llama_instr
