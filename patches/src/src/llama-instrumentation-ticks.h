// llama-instrumentation-ticks.h - the CPU's counter, and how its ticks become nanoseconds
//
// A tick costs a third of what the clock costs to read. Ticks become nanoseconds by the line through two
// moments close by, at which both were read: no calibration that could drift.

#pragma once

#include "ggml-instrumentation.h"

#include <cstdint>

namespace llama_instr {

inline uint64_t ticks_now() {
    static const bool use_counter = ggml_instr_has_counter();
    return ggml_instr_ticks(use_counter);
}

// a point in time on both clocks
struct moment {
    uint64_t ns;     // CLOCK_MONOTONIC
    uint64_t ticks;

    // one copy: see log_file::add_entry()
    [[gnu::noinline]] static moment now() {
        // what is put between the two, another process or an interrupt, would bend every line through them
        constexpr uint64_t longest = 1000;
        for (int attempt = 0;; attempt++) {
            const uint64_t before = ticks_now();
            const uint64_t ns     = ggml_instr_clock_ns();
            const uint64_t took   = ticks_now() - before;
            if (took <= longest || attempt == 3) {
                return { ns, before + took / 2 };
            }
        }
    }
};

// In fixed point with 32 fractional bits: off by less than a nanosecond in the billions of ticks of a second,
// and never running backwards.
struct tick_scale {
    static constexpr uint64_t half = (uint64_t) 1 << 31;

    uint64_t begin_ns;
    uint64_t begin_ticks;
    uint64_t ns_per_tick = 0;

    __extension__ typedef unsigned __int128 wide;

    tick_scale(const moment & begin, const moment & end) : begin_ns(begin.ns), begin_ticks(begin.ticks) {
        if (end.ticks > begin.ticks && end.ns > begin.ns) {
            ns_per_tick = (uint64_t) ((double) (end.ns - begin.ns) * 4294967296.0 / (double) (end.ticks - begin.ticks));
        }
    }

    uint64_t ns(uint64_t ticks) const { return begin_ns + duration(since_begin(ticks)); }

    uint64_t since_begin(uint64_t ticks) const { return ticks > begin_ticks ? ticks - begin_ticks : 0; }

    uint64_t duration(uint64_t ticks) const { return (uint64_t) (((wide) ticks * ns_per_tick + half) >> 32); }

    // so many ticks can be multiplied in 64 bits
    bool is_short(uint64_t ticks) const { return ((wide) ticks * ns_per_tick) >> 63 == 0; }
};

}  // namespace llama_instr
