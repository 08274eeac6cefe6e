// llama-instrumentation-ticks.h - the CPU's counter, and how its ticks become nanoseconds
//
// Reading the counter costs a third of reading the clock, whose code has left the caches by the next decode. So
// times are recorded in ticks. Whenever the log is written, both are read. A time between two such moments lies on
// the line through them: there is no calibration that could drift. A tick is 0.2 to 1 ns on x86-64, and 1 to 52 ns on arm64.

#pragma once

#include "ggml-instrumentation.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace [[gnu::visibility("hidden")]] llama_instr {

inline uint64_t ticks_now() {
    static const bool use_counter = ggml_instr_has_counter();
    return ggml_instr_ticks(use_counter);
}

// a point in time on both clocks
struct moment {
    uint64_t ns;     // CLOCK_MONOTONIC
    uint64_t ticks;

    static moment now() { return between(ggml_instr_clock_ns, ticks_now); }

    // An interrupt or another process between the readings would bend every line through them. The counter is read between
    // two readings of the clock, so that the bound is in nanoseconds, whatever the counter's rate.
    template <typename Clock, typename Counter> static moment between(Clock clock, Counter counter) {
        constexpr uint64_t longest = 400;
        moment   found = {};
        uint64_t least = UINT64_MAX;
        for (int attempt = 0; attempt < 4 && least > longest; attempt++) {
            const uint64_t before = clock();
            const uint64_t ticks  = counter();
            const uint64_t took   = clock() - before;
            if (took < least) {
                least = took;
                found = { before + took / 2, ticks };
            }
        }
        return found;
    }
};

// The line through two moments, in fixed point: off by some nanoseconds after an hour, and never runs backwards.
struct tick_scale {
    static constexpr int      fraction_bits = 40;
    static constexpr uint64_t half = (uint64_t) 1 << (fraction_bits - 1);
    static constexpr double   one  = (double) ((uint64_t) 1 << fraction_bits);

    moment   begin;
    uint64_t ns_per_tick = 0;

    __extension__ typedef unsigned __int128 wide;

    tick_scale(const moment & begin_, const moment & end) : begin(begin_) {
        if (end.ticks > begin.ticks && end.ns > begin.ns) {
            ns_per_tick = (uint64_t) ((double) (end.ns - begin.ns) * one / (double) (end.ticks - begin.ticks));
        }
    }

    uint64_t ns(uint64_t ticks) const {
        return ticks < begin.ticks ? begin.ns - duration(begin.ticks - ticks) : begin.ns + duration(ticks - begin.ticks);
    }

    uint64_t since_begin(uint64_t ticks) const { return ticks > begin.ticks ? ticks - begin.ticks : 0; }

    uint64_t duration(uint64_t ticks) const { return (uint64_t) (((wide) ticks * ns_per_tick + half) >> fraction_bits); }

    // so many ticks can be multiplied in 64 bits
    bool is_short(uint64_t ticks) const { return ((wide) ticks * ns_per_tick) >> 63 == 0; }
};

// The line through all the moments of a log. Beyond the last moment it keeps its last slope.
class tick_clock {
  public:
    // `now` is later than all before
    void add(const moment & now) {
        if (!lines.empty() && now.ticks <= lines.back().begin.ticks) {
            return;
        }
        if (lines.size() == most) {
            thin_out();
        }
        if (!lines.empty()) {
            lines.back() = tick_scale(lines.back().begin, now);
        }
        lines.push_back(lines.empty() ? tick_scale(now, now) : lines.back());
        lines.back().begin = now;
    }

    // the line on which `ticks` lies
    const tick_scale & line_at(uint64_t ticks) const {
        size_t i = lines.size() - 1;
        while (i > 0 && lines[i].begin.ticks > ticks) {
            i--;
        }
        return lines[i];
    }

    uint64_t ns(uint64_t ticks) const { return line_at(ticks).ns(ticks); }
    moment   at(uint64_t ticks) const { return { ns(ticks), ticks }; }

    // from the first to the last moment
    tick_scale whole() const { return tick_scale(lines.front().begin, lines.back().begin); }

  private:
    // a day of moments every 100 milliseconds would be a million
    static constexpr size_t most = 1024;

    std::vector<tick_scale> lines;

    // every second moment, and the last one
    void thin_out() {
        size_t n = 0;
        for (size_t i = 0; i + 1 < lines.size(); i += 2) {
            lines[n++] = tick_scale(lines[i].begin, lines[std::min(i + 2, lines.size() - 1)].begin);
        }
        lines[n++] = lines.back();
        lines.erase(lines.begin() + (ptrdiff_t) n, lines.end());
    }
};

}  // namespace llama_instr
