// cpu_name.cpp - the name of the processor in a text of /proc/cpuinfo
//
//     cpu_name < CPUINFO

#include "llama-instrumentation-cpus.h"

#include <iostream>

int main() {
    puts(llama_instr::cpu_name_in(std::cin).c_str());
    return 0;
}
