// llama-instrumentation-digits.h - the digits of a number, three at once from a table
//
// Two columns of numbers for every kernel are most of a log: what a number costs here is what recording costs.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace [[gnu::visibility("hidden")]] llama_instr {

// The digits of 0 to 999, and how many they are: as a number begins, and as it goes on (with zeros in front).
struct digits_table {
    struct entry {
        char    digits[3];
        uint8_t n;
    };

    static constexpr size_t going_on = 1000;

    entry entries[2000] = {};

    constexpr digits_table() {
        for (size_t i = 0; i < 1000; i++) {
            const char all[] = { (char) ('0' + i / 100), (char) ('0' + i / 10 % 10), (char) ('0' + i % 10) };
            const size_t skipped = i < 10 ? 2 : i < 100 ? 1 : 0;
            entries[i].n            = (uint8_t) (3 - skipped);
            entries[going_on + i].n = 3;
            for (size_t j = 0; j < 3; j++) {
                entries[going_on + i].digits[j] = all[j];
                if (j >= skipped) {
                    entries[i].digits[j - skipped] = all[j];
                }
            }
        }
    }

    // writes four bytes at `out`, of which those before the returned end count
    char * put(char * out, size_t i) const {
        memcpy(out, &entries[i], sizeof(entry));
        return out + entries[i].n;
    }
};

inline constexpr digits_table three_digits;

char * format_long_digits(char * out, uint64_t u);

// writes the decimal digits of `u` at `out`, where 21 bytes must be free; returns the end
inline char * format_digits(char * out, uint64_t u) {
    if (u < 1000) {
        return three_digits.put(out, u);
    }
    if (u >= 1000000) {
        return format_long_digits(out, u);
    }
    const uint32_t v = (uint32_t) u, thousands = v / 1000;
    out = three_digits.put(out, thousands);
    return three_digits.put(out, v % 1000 + digits_table::going_on);
}

__attribute__((noinline)) inline char * format_long_digits(char * out, uint64_t u) {
    const uint32_t last = (uint32_t) (u % 1000000);
    out = format_digits(out, u / 1000000);
    out = three_digits.put(out, last / 1000 + digits_table::going_on);
    return three_digits.put(out, last % 1000 + digits_table::going_on);
}

}  // namespace llama_instr
