// llama-instrumentation-memory.cpp - the hooks of KV caches and recurrent memory: cells in use

#include "llama-instrumentation-records.h"
#include "llama-instrumentation-thread.h"

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
        const auto * mem = static_cast<const llama_memory_recurrent *>(cache.cache);
        counts.used = mem->used;
        counts.size = mem->size;
    } else {
        const auto * kv = static_cast<const llama_kv_cache *>(cache.cache);
        for (uint32_t s = 0; s < kv->get_n_stream(); s++) {
            counts.used += kv->get_cells((llama_seq_id) s).get_used();
        }
        counts.size = (uint64_t) kv->get_size() * kv->get_n_stream();
    }
    return counts;
}

uint64_t used_cells(const context_state & state) {
    uint64_t used = 0;
    for (const auto & cache : state.caches) {
        used += count_cells(cache).used;
    }
    return used;
}

// the cache's number in the context; a cache is met when it is first applied
size_t cache_index(log_part & s, context_state & state, const llama_memory_i * cache, bool recurrent) {
    for (size_t i = 0; i < state.caches.size(); i++) {
        if (state.caches[i].cache == cache) {
            return i;
        }
    }
    uint64_t bytes = 0;
    for (const auto & entry : cache->memory_breakdown()) {
        bytes += entry.second;
    }
    s.known.add_cache(state, { cache, recurrent, bytes });
    return state.caches.size() - 1;
}

kv_record make_record(const context_state & state, int step, size_t index, const char * op, uint64_t now) {
    const cache_state & cache  = state.caches[index];
    const cell_counts   counts = count_cells(cache);
    kv_record record = {};
    record.op        = op;
    record.t         = now;
    record.used      = counts.used;
    record.size      = counts.size;
    record.bytes     = counts.size > 0 ? cache.bytes / counts.size * counts.used : 0;
    record.n_kv      = -1;
    record.ctx       = state.id;
    record.step      = step;
    record.cache     = (int32_t) index;
    record.recurrent = cache.recurrent;
    return record;
}

// `cells`: nullptr if a ubatch takes none
void write_apply(const llama_memory_i * cache, bool recurrent, const char * op, int64_t n_kv, const std::vector<std::vector<uint32_t>> * cells) {
    auto & t = tl();
    if (t.step.depth != 1) {
        return;
    }
    recorder_clock recorder(t);
    log_part &   s      = *t.step.s;
    const size_t index  = cache_index(s, *t.step.state, cache, recurrent);
    kv_record    record = make_record(*t.step.state, t.step.id, index, op, ticks_now());
    record.n_kv      = n_kv;
    record.has_cells = cells && s.detail == level::verbose;
    t.cells.clear();
    if (record.has_cells) {
        for (const auto & stream : *cells) {
            t.cells.insert(t.cells.end(), stream.begin(), stream.end());
        }
    }
    s.add(record, std::string_view((const char *) t.cells.data(), t.cells.size() * sizeof(t.cells[0])));
}

}  // namespace

void llama_instr_kv_apply_impl(const llama_kv_cache * kv, const std::vector<std::vector<uint32_t>> * cells, uint32_t n_kv) {
    write_apply(kv, false, cells ? "apply" : "shift", cells ? (int64_t) n_kv : -1, cells);
}

void llama_instr_recurrent_apply_impl(const llama_memory_recurrent * mem) {
    write_apply(mem, true, "apply", mem->n, nullptr);
}

void llama_instr_memory_op::begin() {
    const auto s = current_part();
    context_state * state = s ? s->known.find_by_memory(mem) : nullptr;
    if (!state) {
        mem = nullptr;
        return;
    }
    used_before = used_cells(*state);
}

void llama_instr_memory_op::finish() {
    const auto s = current_part();
    context_state * state = s ? s->known.find_by_memory(mem) : nullptr;
    if (!state) {
        return;
    }
    // llama-cpp-python removes what lies behind its position before every eval; mostly there is nothing
    if (strcmp(op, "seq_rm") == 0 && used_cells(*state) == used_before) {
        return;
    }
    const uint64_t now = ticks_now();
    static_assert(none == kv_record::none, "an argument that the operation does not have");
    for (size_t i = 0; i < state->caches.size(); i++) {
        kv_record record = make_record(*state, -1, i, op, now);
        record.seq     = seq;
        record.seq_dst = seq_dst;
        record.p0      = p0;
        record.p1      = p1;
        record.arg     = arg;
        s->add(record);
    }
}
