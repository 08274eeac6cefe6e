// llama-instrumentation-session.cpp - a session from its first line to its last

#include "llama-instrumentation-session.h"

#include "llama-instrumentation-host.h"
#include "llama-instrumentation-messages.h"
#include "llama-instrumentation-records.h"
#include "llama-instrumentation-schema.h"

#include "llama-instrumentation.h"

#include <cstring>
#include <ctime>
#include <sys/resource.h>
#include <unistd.h>
#include <utility>

namespace llama_instr {

bool parse_level(const char * text, level & out) {
    for (int i = 0; i < 3; i++) {
        if (strcmp(text, level_names[i]) == 0) {
            out = (level) i;
            return true;
        }
    }
    return false;
}

bool log_part::is_debugged() const {
    return (flags & LLAMA_INSTR_DEBUGGED) != 0;
}

void log_part::write_start() {
    timespec wall;
    const uint64_t before = ggml_instr_clock_ns();
    clock_gettime(CLOCK_REALTIME, &wall);
    const uint64_t t_start = before + (ggml_instr_clock_ns() - before) / 2;

    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    minflt = usage.ru_minflt;
    majflt = usage.ru_majflt;

    json_line & line = line_buffer();
    line.begin(LLAMA_INSTR_EV_SESSION_START, t_start);
    line.kv(LLAMA_INSTR_K_SCHEMA, LLAMA_INSTR_SCHEMA_VERSION).kv(LLAMA_INSTR_K_ID, all->id);
    if (part > 1) {
        line.kv(LLAMA_INSTR_K_PART, part);
    }
    line.kv(LLAMA_INSTR_K_TIME, iso_time(wall));
    line.kv(LLAMA_INSTR_K_WALL, (uint64_t) wall.tv_sec * 1000000000 + (uint64_t) wall.tv_nsec);
    line.kv(LLAMA_INSTR_K_LEVEL, level_names[(int) detail]);
    line.kv(LLAMA_INSTR_K_CLOCK, ggml_instr_has_counter() ? ggml_instr_counter_name() : "monotonic");
    if (reads_values() || is_debugged()) {
        line.kv(LLAMA_INSTR_K_PERTURBED, true);
    }
    line.kv_json(LLAMA_INSTR_K_PRODUCER, llama_instr_info());
    write_host(line);
    write_process(line);
    if (!all->args.empty()) {
        line.kv_json(LLAMA_INSTR_K_ARGS, all->args.c_str());
    }
    write(LLAMA_INSTR_EV_SESSION_START, line);
}

int log_part::start(const std::string & path, const held_file::existing & found) {
    machine = machine_counts::now();
    log.on_much = [this] { all->files.wake(); };
    const int status = log.open(path.c_str(), found);
    if (status != 0) {
        return status;
    }
    // a log that cannot be written is reported once, and ends the program if the user asked for that
    log.on_failure = [this](int error) {
        const bool stop = (flags & LLAMA_INSTR_STOP_ON_ERROR) != 0;
        tell(log.path() + " cannot be written (" + reason_of(-error) + "): " +
             (stop ? "stopping, as asked" : "inference goes on, events are dropped and counted"));
        if (stop) {
            _exit(74);
        }
    };
    if (log.failed()) {
        log.fail(log.failed());
    }
    return 0;
}

std::shared_ptr<log_part> log_part::next_part() const {
    auto next = std::make_shared<log_part>();
    next->all           = all;
    next->part          = part + 1;
    next->detail        = detail;
    next->flags         = flags;
    next->stats_pattern = stats_pattern;
    next->stats         = stats;
    next->write_start();
    return next;
}

void log_part::record_machine() {
    if (!worked.exchange(has_steps())) {
        return;
    }
    machine_counts now = machine_counts::now();
    add(now.since(machine));
    machine = std::move(now);
}

int log_part::close(const char * reason) {
    record_machine();
    return log.close([&](const log_file::totals & totals) {
        json_line line;
        line.begin(LLAMA_INSTR_EV_SESSION_END, ggml_instr_clock_ns());
        line.kv(LLAMA_INSTR_K_REASON, reason);
        line.object(LLAMA_INSTR_K_EVENTS);
        for (const auto & count : totals.events) {
            if (count.lines > 0) {
                line.kv(count.event, count.lines);
            }
        }
        line.close_object();
        line.kv(LLAMA_INSTR_K_BYTES, totals.bytes);
        line.kv(LLAMA_INSTR_K_DROPPED, totals.dropped + (uint64_t) steps.load());  // the ends of these steps
        line.kv(LLAMA_INSTR_K_DROPPED_OPS, dropped_ops.load());
        line.kv(LLAMA_INSTR_K_DECODE_NS, totals.scale.duration(decode_ticks));
        line.kv(LLAMA_INSTR_K_OVERHEAD_NS, totals.scale.duration(overhead_ticks + totals.spent));
        return std::string(line.end());
    });
}

void log_part::write_mark(int64_t id, const open_mark & mark, const char * phase) {
    json_line & line = line_buffer();
    line.begin(LLAMA_INSTR_EV_MARK, ggml_instr_clock_ns());
    line.kv(LLAMA_INSTR_K_MARK, id).kv(LLAMA_INSTR_K_NAME, mark.name).kv(LLAMA_INSTR_K_PHASE, phase);
    line.kv(LLAMA_INSTR_K_THREAD, mark.thread);
    if (mark.seq >= 0) {
        line.kv(LLAMA_INSTR_K_SEQ, mark.seq);
    }
    write(LLAMA_INSTR_EV_MARK, line);
}

}  // namespace llama_instr
