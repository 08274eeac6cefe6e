// log_threads.cpp - a log to which threads add while another writes it
//
//     log_threads LOG THREADS ENTRIES BYTES
//
// Every thread adds so many entries, lines and records in turn, the records with tails below BYTES. Meanwhile the
// main thread writes what was added, unless there is but one thread: then nothing writes before the end. Prints how
// many lines of each event the log says that it has, how many it dropped, and the most memory that the process had,
// in KiB. A line that is added while the log is closed is neither written nor counted.

// the library keeps these names to itself
#include "llama-instrumentation-file.cpp"  // NOLINT(bugprone-suspicious-include)
#include "llama-instrumentation-log.cpp"   // NOLINT(bugprone-suspicious-include)

#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

using namespace llama_instr;

struct alignas(8) counted_record {
    const uint64_t * thread;  // owned by the log
    uint64_t number;

    void format(std::string_view tail, log_lines & lines) const {
        json_line & line = lines.begin("record", number);
        line.kv("thread", *thread).column("numbers", tail.size(), [&](size_t i) { return (uint8_t) tail[i] * number; });
        line.end();
    }
};

static std::atomic<long> kept { 0 };  // what the log owns

static void add_entries(log_file & log, uint64_t thread, uint64_t n, uint64_t bytes) {
    json_line line;
    for (uint64_t i = 0; i < n; i++) {
        if (i % 3 == 0) {
            log.write("line", line.begin("line", i).kv("thread", thread).end());
        } else {
            const std::shared_ptr<uint64_t> owned(new uint64_t(thread), [](const uint64_t * number) { delete number; kept--; });
            kept++;
            log.add(counted_record { owned.get(), i }, std::string(i % bytes, (char) (i % 7)), owned);
        }
    }
}

static std::string most_memory() {
    std::ifstream status("/proc/self/status");
    std::string word, value;
    while (status >> word && word != "VmHWM:") {
    }
    status >> value;
    return value;
}

int main(int argc, char ** argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: %s LOG THREADS ENTRIES BYTES\n", argv[0]);
        return 2;
    }
    const uint64_t n_threads = strtoull(argv[2], nullptr, 10), n = strtoull(argv[3], nullptr, 10), bytes = strtoull(argv[4], nullptr, 10);
    log_file log;
    if (log.open(argv[1], {}) != 0) {
        return 1;
    }
    std::atomic<uint64_t> running { n_threads };
    std::vector<std::thread> threads;
    for (uint64_t t = 0; t < n_threads; t++) {
        threads.emplace_back([&, t] {
            add_entries(log, t, n, bytes);
            running--;
        });
    }
    while (n_threads > 1 && running > 0) {
        log.flush();
    }
    for (auto & thread : threads) {
        thread.join();
    }
    log.close([&log](const log_file::totals & totals) {
        log.write("late", "{\"event\":\"late\"}\n");
        for (const auto & count : totals.events) {
            printf("%s %" PRIu64 "\n", count.event.data(), count.lines);
        }
        printf("dropped %" PRIu64 "\n", totals.dropped);
        return std::string("{\"event\":\"end\"}\n");
    });
    printf("unwritten %" PRIu64 "\n", log.unwritten());
    printf("memory %s\n", most_memory().c_str());
    return kept == 0 ? 0 : 1;
}
