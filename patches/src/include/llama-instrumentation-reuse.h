// llama-instrumentation-reuse.h - what a server's caches held for a prompt when a slot took it
//
// A request computes the tokens of its prompt that its slot does not hold. Whether another slot holds them, or whether
// they were there before, only the server can say: a log has no tokens of prompts. It also moves prompts between its
// slots and copies in RAM (--cache-ram).

#pragma once

#include "llama-instrumentation-programs.h"

#include <algorithm>
#include <chrono>
#include <unordered_set>

// Which tokens the server has held. It remembers blocks of tokens, as hashes, of the last LIMIT to 2 * LIMIT blocks.
class llama_instr_history {
  public:
    static constexpr size_t BLOCK = 16;       // tokens
    static constexpr size_t LIMIT = 1 << 15;  // blocks

    // a slot has these tokens
    template <typename Tokens> void add(const Tokens & tokens) {
        if (!llama_instr_note) {
            return;
        }
        uint64_t before = 0;
        for (size_t begin = 0; begin + BLOCK <= tokens.size(); begin += BLOCK) {
            const uint64_t of = hash(tokens, begin);
            if (of == 0) {
                break;
            }
            before = chain(before, of);
            prefixes.insert(before);
            blocks.insert(of);
        }
    }

    // the length of the longest beginning of these tokens that a slot had, in whole blocks
    template <typename Tokens> size_t prefix(const Tokens & tokens) const {
        uint64_t before = 0;
        size_t   begin  = 0;
        for (; begin + BLOCK <= tokens.size(); begin += BLOCK) {
            before = chain(before, hash(tokens, begin));
            if (!prefixes.has(before)) {
                break;
            }
        }
        return begin;
    }

    // the number of tokens from `begin` on that a slot had, at any position, in whole blocks
    template <typename Tokens> size_t moved(const Tokens & tokens, size_t begin) const {
        size_t   n      = 0;
        size_t   filled = 0;
        uint64_t window = 0;
        for (size_t i = begin; i < tokens.size(); ++i) {
            window = window * BASE + value(tokens[i]);
            if (++filled > BLOCK) {
                window -= value(tokens[i - BLOCK]) * power();
            }
            if (filled >= BLOCK && blocks.has(window)) {
                n += BLOCK;
                filled = 0;
                window = 0;
            }
        }
        return n;
    }

  private:
    static constexpr uint64_t BASE = 0x9E3779B97F4A7C15;

    // two sets: the older one is forgotten when the newer one is full
    class generations {
      public:
        void insert(uint64_t value) {
            if (newer.size() >= LIMIT) {
                older = std::exchange(newer, {});
            }
            newer.insert(value);
        }

        bool has(uint64_t value) const { return newer.count(value) || older.count(value); }

      private:
        std::unordered_set<uint64_t> newer, older;
    };

    static uint64_t value(llama_token token) { return (uint64_t) token + 0x100000001; }

    static uint64_t power() {
        uint64_t result = 1;
        for (size_t i = 0; i < BLOCK; ++i) {
            result *= BASE;
        }
        return result;
    }

    // 0 for a block with a part of an image, whose tokens are all alike
    template <typename Tokens> static uint64_t hash(const Tokens & tokens, size_t begin) {
        uint64_t result = 0;
        for (size_t i = begin; i < begin + BLOCK; ++i) {
            if (tokens[i] < 0) {
                return 0;
            }
            result = result * BASE + value(tokens[i]);
        }
        return result;
    }

    static uint64_t chain(uint64_t before, uint64_t of) { return (before ^ (before >> 29) ^ of) * BASE; }

    generations prefixes, blocks;
};

// of the server, whose slots belong to one thread
inline llama_instr_history & llama_instr_held() {
    static llama_instr_history history;
    return history;
}

// the longest beginning of these tokens that a slot holds, but for the slot that takes them
template <typename Slots, typename Slot, typename Tokens>
size_t llama_instr_elsewhere(const Slots & slots, const Slot & taken, const Tokens & tokens) {
    size_t longest = 0;
    for (const auto & slot : slots) {
        if (&slot != &taken) {
            longest = std::max(longest, slot.prompt.tokens.get_common_prefix(tokens));
        }
    }
    return longest;
}

// A prompt that may move between a slot and the server's copies in RAM: what the log has of it, if it did.
template <typename Cache> class llama_instr_copy {
  public:
    llama_instr_copy(const Cache & cache_, int slot_) : cache(cache_), slot(slot_), size(cache_.size()), n(cache_.states.size()), begin(clock::now()) {}

    // the slot's prompt has a copy now
    void saved() const { note("save", cache.states.back().prompt.tokens.size(), cache.states.back().size()); }

    // the slot has these tokens, if it took a copy
    template <typename Tokens> void loaded(const Tokens & tokens) const {
        if (cache.states.size() < n) {
            note("load", tokens.size(), size - cache.size());
        }
    }

  private:
    using clock = std::chrono::steady_clock;

    const Cache &     cache;
    int               slot;
    size_t            size, n;  // of all copies, before
    clock::time_point begin;

    void note(const char * op, size_t tokens, size_t bytes) const {
        const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(clock::now() - begin).count();
        llama_instr_facts("prompt-copy", "\"op\":\"%s\",\"slot\":%d,\"tokens\":%zu,\"bytes\":%zu,\"dur\":%" PRId64 ",\"copies\":%zu,\"held\":%zu,\"limit\":%zu",
            op, slot, tokens, bytes, (int64_t) ns, cache.states.size(), cache.size(), cache.limit_size);
    }
};
