// llama-instrumentation-programs.h - what llama.cpp's own programs call
//
// These functions are weak in programs: a program that was built with the recorder also runs with libraries that lack
// it, and records nothing.

#pragma once

#include "llama.h"

#include <algorithm>
#include <cctype>
#include <cinttypes>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>

#ifdef LLAMA_INSTR_LIBRARY
#    define LLAMA_INSTR_WEAK
#else
#    define LLAMA_INSTR_WEAK __attribute__((weak))
#endif

extern "C" {

// phase: 0 begins a span and returns its id, 1 ends the span `id`, 2 is an instant; -1 without a session.
// seq: the sequence whose request the span is, or -1
LLAMA_API LLAMA_INSTR_WEAK int64_t llama_instr_mark(int32_t phase, int64_t id, const char * name, int32_t seq);

// writes an event of the application; `json` is one JSON value. Returns 0, or -1 without a session
LLAMA_API LLAMA_INSTR_WEAK int32_t llama_instr_note(const char * name, const char * json);

// The time of a sampler that llama.cpp does not know: from its start, after the wait for the logits, to its token.
// output: as llama_get_logits_ith() takes it; p: the probability, 0 if the sampler computed none.
LLAMA_API LLAMA_INSTR_WEAK uint64_t llama_instr_sample_begin(void);  // 0 without a session
LLAMA_API LLAMA_INSTR_WEAK void     llama_instr_sample_end(struct llama_context * ctx, int32_t output, llama_token token, float p, uint64_t begin);
// the next token of this thread is of this sequence: a copy of a sequence takes its first token from the other's logits
LLAMA_API LLAMA_INSTR_WEAK void llama_instr_sample_for(int32_t seq);

}  // extern "C"

#ifndef LLAMA_INSTR_LIBRARY

// a note with these members of a JSON object, as printf() formats them
__attribute__((format(printf, 2, 3))) inline void llama_instr_facts(const char * name, const char * format, ...) {
    if (!llama_instr_note) {
        return;
    }
    char members[1000];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(members, sizeof(members), format, arguments);
    va_end(arguments);
    llama_instr_note(name, (std::string("{") + members + "}").c_str());
}

inline void llama_instr_sampled_for(int32_t seq) {
    if (llama_instr_sample_for) {
        llama_instr_sample_for(seq);
    }
}

// the life of an object as a span
class llama_instr_span {
  public:
    explicit llama_instr_span(const char * name_) : name(name_), id(llama_instr_mark ? llama_instr_mark(0, -1, name, -1) : -1) {}

    llama_instr_span(const llama_instr_span &) = delete;
    llama_instr_span & operator=(const llama_instr_span &) = delete;

    ~llama_instr_span() {
        if (id >= 0) {
            llama_instr_mark(1, id, name, -1);
        }
    }

    // the id of its mark, -1 if it is not recorded
    int64_t mark() const { return id; }

  private:
    const char * name;
    int64_t      id;
};

// clip_image_batch_encode: around it. `parts` images of `width` x `height` pixels, or pieces of audio of `width` frames
// and `height` bins, become `tokens` embeddings.
class llama_instr_encode : public llama_instr_span {
  public:
    llama_instr_encode(bool is_audio, size_t parts, int width, int height, size_t tokens) : llama_instr_span("encode") {
        if (mark() >= 0) {
            llama_instr_facts("encode", "\"mark\":%" PRId64 ",\"kind\":\"%s\",\"parts\":%zu,\"width\":%d,\"height\":%d,\"tokens\":%zu",
                mark(), is_audio ? "audio" : "image", parts, width, height, tokens);
        }
    }
};

// A request from its arrival to its end. It moves with the server's task. One that is dropped before a slot took it
// ends without a sequence.
class llama_instr_request {
  public:
    llama_instr_request() = default;

    llama_instr_request(llama_instr_request && other) noexcept : id(std::exchange(other.id, -1)), origin(std::move(other.origin)) {}

    llama_instr_request & operator=(llama_instr_request && other) noexcept {
        std::swap(id, other.id);
        std::swap(origin, other.origin);
        return *this;
    }

    ~llama_instr_request() { end(-1); }

    void begin() {
        if (llama_instr_mark && id < 0) {
            id = llama_instr_mark(0, -1, "request", -1);
        }
    }

    // a child, which shares the prompt of another request
    void begin(const llama_instr_request & parent) {
        origin = parent.origin;
        begin();
    }

    // the id of its mark, -1 if it is not recorded
    int64_t mark() const { return id; }

    // what the client asks for, and its trace, from the header of W3C Trace Context:
    // https://www.w3.org/TR/trace-context/#traceparent-header
    template <typename Http> void follow(const Http & http) {
        if (http.path.size() < 100 && http.path.find_first_of("\"\\") == std::string::npos) {
            origin = ",\"path\":\"" + http.path + "\"";
        }
        for (const auto & header : http.headers) {
            std::string name = header.first;
            std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
            const std::string & value = header.second;
            if (name == "traceparent" && value.size() == 55 && value.find_first_not_of("0123456789abcdef-") == std::string::npos) {
                origin += ",\"traceparent\":\"" + value + "\"";
            }
        }
    }

    // the same as members of a JSON object
    const std::string & asked() const { return origin; }

    // seq: the sequence that served it; -1 if it left before that
    void end(int32_t seq) const {
        if (id < 0) {
            return;
        }
        if (seq < 0) {
            llama_instr_facts("request", "\"mark\":%" PRId64 ",\"task\":-1,\"slot\":-1,\"cached\":0,\"computed\":0,\"generated\":0,\"drafted\":0,\"accepted\":0,\"verified\":0,\"stream\":false,\"truncated\":false,\"stop\":\"none\"%s",
                id, origin.c_str());
        }
        llama_instr_mark(1, id, "request", seq);
        id = -1;
    }

  private:
    mutable int64_t id = -1;  // a slot's task is constant
    std::string     origin;
};

// common_sampler_sample: `token` and `candidates` are what it returns
class llama_instr_sampling {
  public:
    llama_instr_sampling(llama_context * ctx_, int32_t output_, const llama_token & token_, const llama_token_data_array & candidates_) :
        ctx(ctx_), output(output_), token(token_), candidates(candidates_), t_begin(llama_instr_sample_begin ? llama_instr_sample_begin() : 0) {}

    llama_instr_sampling(const llama_instr_sampling &) = delete;
    llama_instr_sampling & operator=(const llama_instr_sampling &) = delete;

    ~llama_instr_sampling() {
        if (t_begin != 0) {
            llama_instr_sample_end(ctx, output, token, candidates.selected >= 0 ? candidates.data[candidates.selected].p : 0.0f, t_begin);
        }
    }

  private:
    llama_context *                ctx;
    int32_t                        output;
    const llama_token &            token;
    const llama_token_data_array & candidates;
    uint64_t                       t_begin;
};

#endif  // LLAMA_INSTR_LIBRARY
