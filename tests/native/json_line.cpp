// json_line.cpp - what the recorder's json_line makes of numbers and of a text
//
//     json_line TEXT < NUMBERS
//
// Prints two lines: every number as a 64-bit unsigned field's and column's value, then the same as signed.

#include "llama-instrumentation-json.h"

#include <cinttypes>
#include <vector>

template <typename T> static void print(const std::vector<uint64_t> & numbers, const char * text) {
    llama_instr::json_line line;
    line.begin("numbers", numbers.empty() ? 0 : numbers[0]);
    line.kv("text", text);
    line.column("column", numbers.size(), [&](size_t i) { return (T) numbers[i]; });
    line.array("fields");
    for (const uint64_t number : numbers) {
        line.item((T) number);
    }
    line.close_array();
    const std::string_view whole = line.end();
    fwrite(whole.data(), 1, whole.size(), stdout);
}

int main(int argc, char ** argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: %s TEXT < NUMBERS\n", argv[0]);
        return 2;
    }
    std::vector<uint64_t> numbers;
    uint64_t number;
    while (scanf("%" SCNu64, &number) == 1) {
        numbers.push_back(number);
    }
    print<uint64_t>(numbers, argv[1]);
    print<int64_t>(numbers, argv[1]);
    return 0;
}
