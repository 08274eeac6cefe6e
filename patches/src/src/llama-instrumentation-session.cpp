// llama-instrumentation-session.cpp - a session from its first line to its last

#include "llama-instrumentation-session.h"

#include "llama-instrumentation-schema.h"

#include <ctime>
#include <sys/resource.h>
#include <unistd.h>
#include <utility>

namespace llama_instr {

void log_part::write_start() {
    timespec wall;
    const uint64_t before = ggml_instr_clock_ns();
    clock_gettime(CLOCK_REALTIME, &wall);
    const uint64_t t_start = before + (ggml_instr_clock_ns() - before) / 2;

    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    minflt = usage.ru_minflt;
    majflt = usage.ru_majflt;

    json_line & line = line_buffer().begin(LLAMA_INSTR_EV_SESSION_START, t_start);
    line.kv(LLAMA_INSTR_K_SCHEMA, LLAMA_INSTR_SCHEMA_VERSION).kv(LLAMA_INSTR_K_ID, all->id);
    if (part > 1) {
        line.kv(LLAMA_INSTR_K_PART, part);
    }
    line.kv(LLAMA_INSTR_K_TIME, iso_time(wall));
    line.kv(LLAMA_INSTR_K_WALL, (uint64_t) wall.tv_sec * 1000000000 + (uint64_t) wall.tv_nsec);
    line.kv(LLAMA_INSTR_K_LEVEL, level_names[(int) detail]);
    line.kv(LLAMA_INSTR_K_CLOCK, ggml_instr_has_counter() ? ggml_instr_counter_name() : "monotonic");
    if (ggml_instr_has_counter() && ggml_instr_tick_ns() > 0) {
        line.kv(LLAMA_INSTR_K_TICK, ggml_instr_tick_ns());
    }
    if (reads_values() || has_flag(LLAMA_INSTR_DEBUGGED)) {
        line.kv(LLAMA_INSTR_K_PERTURBED, true);
    }
    line.kv_json(LLAMA_INSTR_K_PRODUCER, llama_instr_info());
    write_host(line);
    write_process(line);
    if (!all->asked.args.empty()) {
        line.kv_json(LLAMA_INSTR_K_ARGS, all->asked.args.c_str());
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
        const bool stop = has_flag(LLAMA_INSTR_STOP_ON_ERROR);
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

std::shared_ptr<log_part> log_part::next_part(log_file::buffers && memory) const {
    auto next = std::make_shared<log_part>();
    next->log.reuse(std::move(memory));
    next->all    = all;
    next->part   = part + 1;
    next->detail = detail;
    next->write_start();
    return next;
}

void log_part::record_machine() {
    if (!worked.exchange(steps > 0)) {
        return;
    }
    machine_counts now = machine_counts::now();
    json_line & line = line_buffer().begin(LLAMA_INSTR_EV_MACHINE, now.t);
    now.write_since(machine, line);
    write(LLAMA_INSTR_EV_MACHINE, line);
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
                line.kv(count.event.data(), count.lines);
            }
        }
        line.close_object();
        line.kv(LLAMA_INSTR_K_BYTES, totals.bytes);
        line.kv(LLAMA_INSTR_K_DROPPED, totals.dropped + (uint64_t) n_under_way());  // their ends
        line.kv(LLAMA_INSTR_K_DROPPED_OPS, dropped_ops + ops_under_way);
        line.kv(LLAMA_INSTR_K_DECODE_NS, totals.scale.duration(decode_ticks));
        line.kv(LLAMA_INSTR_K_OVERHEAD_NS, totals.scale.duration(overhead_ticks + totals.spent));
        return std::string(line.end());
    });
}

void log_part::write_mark(int64_t id, const open_mark & mark, const char * phase) {
    json_line & line = line_buffer().begin(LLAMA_INSTR_EV_MARK, ggml_instr_clock_ns());
    line.kv(LLAMA_INSTR_K_MARK, id).kv(LLAMA_INSTR_K_NAME, mark.name).kv(LLAMA_INSTR_K_PHASE, phase);
    line.kv(LLAMA_INSTR_K_THREAD, mark.thread).kv_if_known(LLAMA_INSTR_K_SEQ, mark.seq);
    write(LLAMA_INSTR_EV_MARK, line);
}

}  // namespace llama_instr
