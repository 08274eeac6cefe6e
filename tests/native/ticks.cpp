// ticks.cpp - what is recorded in ticks, and what it becomes
//
//     ticks < COMMANDS
//
// `moment TICKS NS` tells the clock of a moment, `ns TICKS` prints the nanoseconds of these ticks, `packed TICKS`
// the duration that a kernel's 32 bits keep.

#include "llama-instrumentation-ticks.h"

#include <cinttypes>
#include <cstdio>
#include <cstring>

using namespace llama_instr;

int main() {
    tick_clock clock;
    char command[16];
    uint64_t ticks, ns;
    while (scanf("%15s %" SCNu64, command, &ticks) == 2) {
        if (strcmp(command, "packed") == 0) {
            printf("%" PRIu64 "\n", ggml_instr_unpack(ggml_instr_pack(ticks)));
        } else if (strcmp(command, "ns") == 0) {
            printf("%" PRIu64 "\n", clock.ns(ticks));
        } else if (scanf("%" SCNu64, &ns) == 1) {
            clock.add({ ns, ticks });
        }
    }
    return 0;
}
