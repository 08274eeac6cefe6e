// log_team.cpp - a log whose lines are formatted by several threads
//
//     log_team LOG THREADS ENTRIES
//
// Writes as many entries, lines and records in turn, in two halves; prints how many lines of each event the log
// says that it has, and how many it had to drop.

// the library keeps these names to itself
#include "llama-instrumentation-file.cpp"  // NOLINT(bugprone-suspicious-include)
#include "llama-instrumentation-log.cpp"   // NOLINT(bugprone-suspicious-include)

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

using namespace llama_instr;

static void run_on_threads(int32_t n_threads, void (*f)(int32_t i, void * data), void * data) {
    std::vector<std::thread> threads;
    for (int32_t i = 1; i < n_threads; i++) {
        threads.emplace_back(f, i, data);
    }
    f(0, data);
    for (auto & thread : threads) {
        thread.join();
    }
}

struct alignas(8) counted_record {
    uint64_t number;

    void format(std::string_view tail, log_lines & lines) const {
        uint64_t * const numbers = lines.scratch(tail.size());
        for (size_t i = 0; i < tail.size(); i++) {
            numbers[i] = (uint8_t) tail[i] * number;
        }
        json_line & line = lines.begin("record", number);
        line.column("numbers", tail.size(), [numbers](size_t i) { return numbers[i]; });
        line.end();
    }
};

int main(int argc, char ** argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: %s LOG THREADS ENTRIES\n", argv[0]);
        return 2;
    }
    const ggml_instr_team team = { run_on_threads, atoi(argv[2]) };
    const uint64_t n = strtoull(argv[3], nullptr, 10);
    log_file log;
    if (log.open(argv[1], {}) != 0) {
        return 1;
    }
    json_line line;
    for (uint64_t i = 0; i < n; i++) {
        if (i % 3 == 0) {
            log.write("line", line.begin("line", i).kv("text", "said at once").end());
        } else {
            log.add(counted_record { i }, std::string(i % 97, (char) (i % 7)));
        }
        if (i == n / 2) {
            log.flush_if_due(UINT64_MAX, team);
        }
    }
    log.flush_if_due(UINT64_MAX, team);
    log.close([](const log_file::totals & totals) {
        for (const auto & count : totals.events) {
            printf("%s %" PRIu64 "\n", count.event, count.lines);
        }
        printf("dropped %" PRIu64 "\n", totals.dropped);
        return std::string("{\"event\":\"end\"}\n");
    });
    return 0;
}
