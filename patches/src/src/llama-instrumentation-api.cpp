// llama-instrumentation-api.cpp - the part of the C API that only asks, or adds a line; llama.cpp's messages

#include "llama-instrumentation.h"

#include "llama-instrumentation-build.h"
#include "llama-instrumentation-graph.h"
#include "llama-instrumentation-host.h"
#include "llama-instrumentation-recorder.h"
#include "llama-instrumentation-schema.h"
#include "llama-instrumentation-thread.h"

#include "llama-context.h"
#include "llama-memory.h"

#include <cstdio>

using namespace llama_instr;

int32_t llama_instr_abi(void) {
    return LLAMA_INSTR_ABI;
}

const char * llama_instr_info(void) {
    static const std::string info = std::string("{\"llama_cpp\":\"" LLAMA_INSTR_BUILD_LLAMA_CPP "\",\"commit\":\"" LLAMA_INSTR_BUILD_COMMIT
        "\",\"patches\":\"" LLAMA_INSTR_BUILD_PATCHES "\",\"abi\":") + std::to_string(LLAMA_INSTR_ABI) + "}";
    return info.c_str();
}

int32_t llama_instr_status(void) {
    const auto s = open_part_or_null();
    return s ? LLAMA_INSTR_ACTIVE | (s->log.failed() ? LLAMA_INSTR_FAILED : 0) | (s->all->nan_seen ? LLAMA_INSTR_NAN : 0) : 0;
}

int64_t llama_instr_dropped(void) {
    const auto s = open_part_or_null();
    return s ? (int64_t) s->log.dropped() : 0;
}

int64_t llama_instr_mark(int32_t phase, int64_t id, const char * name, int32_t seq) {
    static const char * phases[] = { "begin", "end", "instant" };
    const auto lock = marks_lock();
    auto s = llama_instr_enabled() ? current_part() : nullptr;
    if (!s || phase < 0 || phase > 2) {
        return -1;
    }
    auto & all = *s->all;
    const open_mark mark = { name, thread_id(), seq };
    if (phase == 1) {
        all.marks.erase(id);
    } else {
        id = all.next_mark++;
    }
    if (phase == 0) {
        all.marks[id] = mark;
    }
    s->write_mark(id, mark, phases[phase]);
    return id;
}

int32_t llama_instr_note(const char * name, const char * json) {
    auto s = llama_instr_enabled() ? current_part() : nullptr;
    if (!s) {
        return -1;
    }
    json_line & line = line_buffer();
    line.begin(LLAMA_INSTR_EV_NOTE, ggml_instr_clock_ns());
    line.kv(LLAMA_INSTR_K_NAME, name).kv_json(LLAMA_INSTR_K_DATA, json);
    s->write(LLAMA_INSTR_EV_NOTE, line);
    return 0;
}

int32_t llama_instr_memory(const struct llama_context * ctx, char * buf, int32_t size) {
    const std::string json = memory_json(ctx);
    if (buf && size > 0) {
        snprintf(buf, (size_t) size, "%s", json.c_str());
    }
    return (int32_t) json.size();
}

int32_t llama_instr_reserve_graph(struct llama_context * ctx, uint32_t n_tokens, uint32_t n_seqs, uint32_t n_outputs) {
    const auto s = llama_instr_enabled() ? current_part() : nullptr;
    if (!s) {
        return -1;
    }
    llama_memory_context_ptr cells;
    if (llama_memory_t memory = ctx->get_memory()) {
        cells = memory->init_full();
    }
    auto & build = tl().build;
    build.begin();
    ggml_cgraph * gf = ctx->graph_reserve(n_tokens, n_seqs, n_outputs, cells.get(), /*split_only=*/true);
    build.open = false;
    return graph_of(*s, s->known.of(ctx), gf, "reserve", false, &build.layers).id;
}

//
// messages
//

void llama_instr_message(enum ggml_log_level level, const char * text) {
    if (!llama_instr_enabled() || (level != GGML_LOG_LEVEL_WARN && level != GGML_LOG_LEVEL_ERROR)) {
        return;
    }
    // not current_part(): opening a session may print a message
    const auto s = open_part_or_null();
    if (!s) {
        return;
    }
    std::string trimmed = text;
    while (!trimmed.empty() && trimmed.back() == '\n') {
        trimmed.pop_back();
    }
    json_line line;  // not the thread's line: a message may come while that one is built
    line.begin(LLAMA_INSTR_EV_MESSAGE, ggml_instr_clock_ns());
    line.kv(LLAMA_INSTR_K_LEVEL, level == GGML_LOG_LEVEL_WARN ? "warn" : "error").kv(LLAMA_INSTR_K_TEXT, trimmed);
    s->write(LLAMA_INSTR_EV_MESSAGE, line);
}
