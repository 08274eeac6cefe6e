// llama-instrumentation-memory.cpp - the hooks of KV caches and recurrent memory: cells in use

#include "llama-instrumentation-thread.h"

#include "llama-instrumentation.h"

#include "llama-kv-cache.h"
#include "llama-memory-recurrent.h"

using namespace llama_instr;

namespace {

struct cell_counts {
    uint64_t used = 0;
    uint64_t size = 0;
};

cell_counts count_cells(const cache_state & cache) {
    cell_counts counts;
    if (cache.recurrent) {
        const auto * mem = (const llama_memory_recurrent *) cache.cache;
        counts.used = mem->used;
        counts.size = mem->size;
    } else {
        const auto * kv = (const llama_kv_cache *) cache.cache;
        for (uint32_t s = 0; s < kv->get_n_stream(); s++) {
            counts.used += kv->get_cells((llama_seq_id) s).get_used();
        }
        counts.size = (uint64_t) kv->get_size() * kv->get_n_stream();
    }
    return counts;
}

// the cache's number in the context; a cache is met when it is first applied
size_t cache_index(context_state & state, const void * cache, bool recurrent, const llama_memory_i * mem) {
    for (size_t i = 0; i < state.caches.size(); i++) {
        if (state.caches[i].cache == cache) {
            return i;
        }
    }
    uint64_t bytes = 0;
    for (const auto & entry : mem->memory_breakdown()) {
        bytes += entry.second;
    }
    state.caches.push_back({ cache, recurrent, bytes });
    return state.caches.size() - 1;
}

void begin_kv_line(json_line & line, const context_state & state, int step, size_t index, const char * op) {
    const cache_state & cache  = state.caches[index];
    const cell_counts   counts = count_cells(cache);
    line.begin(LLAMA_INSTR_EV_KV, ggml_instr_clock_ns());
    line.kv(LLAMA_INSTR_K_CTX, state.id);
    if (step >= 0) {
        line.kv(LLAMA_INSTR_K_STEP, step);
    }
    if (index > 0) {
        line.kv(LLAMA_INSTR_K_CACHE, index);
    }
    if (cache.recurrent) {
        line.kv(LLAMA_INSTR_K_KIND, "recurrent");
    }
    line.kv(LLAMA_INSTR_K_OP, op).kv(LLAMA_INSTR_K_USED, counts.used).kv(LLAMA_INSTR_K_SIZE, counts.size);
    line.kv(LLAMA_INSTR_K_BYTES, counts.size > 0 ? cache.bytes / counts.size * counts.used : 0);
}

}  // namespace

void llama_instr_kv_apply_impl(const llama_kv_cache * kv, const std::vector<std::vector<uint32_t>> * cells, uint32_t n_kv) {
    auto & step = tl().step;
    if (step.depth == 0) {
        return;
    }
    recorder_clock recorder;
    const size_t index = cache_index(*step.state, kv, false, kv);
    json_line & line = line_buffer();
    begin_kv_line(line, *step.state, step.id, index, cells ? "apply" : "shift");
    if (cells) {
        line.kv(LLAMA_INSTR_K_N_KV, n_kv);
    }
    if (cells && step.s->detail == level::verbose) {
        // streams lie behind one another
        line.array(LLAMA_INSTR_K_CELLS);
        for (const auto & stream : *cells) {
            for (const uint32_t cell : stream) {
                line.item(cell);
            }
        }
        line.close_array();
    }
    step.s->write(LLAMA_INSTR_EV_KV, line);
}

void llama_instr_recurrent_apply_impl(const llama_memory_recurrent * mem) {
    auto & step = tl().step;
    if (step.depth == 0) {
        return;
    }
    recorder_clock recorder;
    const size_t index = cache_index(*step.state, mem, true, mem);
    json_line & line = line_buffer();
    begin_kv_line(line, *step.state, step.id, index, "apply");
    line.kv(LLAMA_INSTR_K_N_KV, mem->n);
    step.s->write(LLAMA_INSTR_EV_KV, line);
}

void llama_instr_memory_op::begin() {
    const auto s = current_session();
    context_state * state = s ? s->find_by_memory(mem) : nullptr;
    if (!state) {
        mem = nullptr;
        return;
    }
    for (const auto & cache : state->caches) {
        used_before += count_cells(cache).used;
    }
}

void llama_instr_memory_op::finish() {
    const auto s = current_session();
    context_state * state = s ? s->find_by_memory(mem) : nullptr;
    if (!state) {
        return;
    }
    uint64_t used_after = 0;
    for (const auto & cache : state->caches) {
        used_after += count_cells(cache).used;
    }
    // llama-cpp-python removes what lies behind its position before every eval; mostly there is nothing
    if (strcmp(op, "seq_rm") == 0 && used_after == used_before) {
        return;
    }
    const auto optional = [](json_line & line, const char * key, int value) {
        if (value != none) {
            line.kv_dynamic(key, value);
        }
    };
    for (size_t i = 0; i < state->caches.size(); i++) {
        json_line & line = line_buffer();
        begin_kv_line(line, *state, -1, i, op);
        optional(line, LLAMA_INSTR_K_SEQ, seq);
        optional(line, LLAMA_INSTR_K_SEQ_DST, seq_dst);
        optional(line, LLAMA_INSTR_K_P0, p0);
        optional(line, LLAMA_INSTR_K_P1, p1);
        optional(line, LLAMA_INSTR_K_ARG, arg);
        s->write(LLAMA_INSTR_EV_KV, line);
    }
}
