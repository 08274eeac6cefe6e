// ticks.cpp - what is recorded in ticks, and what it becomes
//
//     ticks < COMMANDS
//
// `moment TICKS NS` tells the clock of a moment, `ns TICKS` prints the nanoseconds of these ticks, `packed TICKS`
// the duration that a kernel's 32 bits keep. `read KHZ DELAY ATTEMPTS` prints the moment that is read from a counter of
// that rate when an interrupt delays so many attempts, `rate NS` how many ticks the CPU's counter has in that time, and
// a million times how many ns a tick has by the CPU's own account.

#include "llama-instrumentation-ticks.h"

#include <cinttypes>
#include <cstdio>
#include <cstring>

using namespace llama_instr;

// A machine on which only the readings take time: 20 ns that of the clock, 10 ns that of the counter.
static moment simulated(uint64_t khz, uint64_t delay, uint64_t attempts) {
    uint64_t now = 1000000000;
    const auto clock   = [&] { return now += 20; };
    const auto counter = [&] {
        if (attempts > 0) {
            attempts--;
            now += delay;
        }
        const uint64_t ticks = now * khz / 1000000;
        now += 10;
        return ticks;
    };
    return moment::between(clock, counter);
}

int main() {
    tick_clock clock;
    char command[16];
    uint64_t ticks, ns, n;
    while (scanf("%15s %" SCNu64, command, &ticks) == 2) {
        if (strcmp(command, "packed") == 0) {
            printf("%" PRIu64 "\n", ggml_instr_unpack(ggml_instr_pack(ticks)));
        } else if (strcmp(command, "ns") == 0) {
            printf("%" PRIu64 "\n", clock.ns(ticks));
        } else if (strcmp(command, "rate") == 0) {
            const moment begin = moment::now();
            moment       end   = begin;
            while (end.ns - begin.ns < ticks) {
                end = moment::now();
            }
            printf("%" PRIu64 " %" PRIu64 "\n", end.ns - begin.ns, end.ticks - begin.ticks);
            printf("%" PRIu64 "\n", (uint64_t) (ggml_instr_tick_ns() * 1e6));
        } else if (strcmp(command, "read") == 0 && scanf("%" SCNu64 " %" SCNu64, &ns, &n) == 2) {
            const moment read = simulated(ticks, ns, n);
            printf("%" PRIu64 " %" PRIu64 "\n", read.ticks, read.ns);
        } else if (scanf("%" SCNu64, &ns) == 1) {
            clock.add({ ns, ticks });
        }
    }
    return 0;
}
