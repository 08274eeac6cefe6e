// recorder_stress.cpp - the recorder under a sanitizer: contexts that decode at once, all levels,
// sessions that begin and end while they do, a disk that is full, a reader that went away or stalls
//
//     recorder_stress MODEL.gguf DIRECTORY
//     LLAMA_INSTR_LOG=... LLAMA_INSTR_ROTATE=... recorder_stress MODEL.gguf
//
// The second form decodes into a log that rotates.
//
// Exits with 1 and a line when a call answers something else than the API promises. The sanitizer ends
// the program at its first finding.

#include "llama.h"

#include "llama-instrumentation.h"

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <string>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <vector>

static void require(bool ok, const char * what) {
    if (!ok) {
        fprintf(stderr, "recorder_stress: %s (%s)\n", what, llama_instr_error());
        exit(1);
    }
}

static llama_context * new_context(llama_model * model, int n_threads) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx           = 128;
    params.n_batch         = 64;
    params.n_ubatch        = 32;
    params.n_threads       = n_threads;
    params.n_threads_batch = n_threads;
    llama_context * ctx = llama_init_from_model(model, params);
    require(ctx != nullptr, "no context");
    return ctx;
}

// a prompt of two ubatches, then single tokens through the sampler; then parts of the cache go
static void generate(llama_context * ctx, int n_tokens) {
    const llama_vocab * vocab = llama_model_get_vocab(llama_get_model(ctx));
    const int n_vocab = llama_vocab_n_tokens(vocab);
    llama_sampler * sampler = llama_sampler_chain_init(llama_sampler_chain_default_params());
    llama_sampler_chain_add(sampler, llama_sampler_init_temp(0.8f));
    llama_sampler_chain_add(sampler, llama_sampler_init_dist(1));

    std::vector<llama_token> tokens;
    for (int i = 0; i < 40; i++) {
        tokens.push_back((llama_token) (7 * i % n_vocab));
    }
    llama_memory_clear(llama_get_memory(ctx), true);
    require(llama_decode(ctx, llama_batch_get_one(tokens.data(), (int32_t) tokens.size())) == 0, "prefill");
    for (int i = 0; i < n_tokens; i++) {
        llama_token token = llama_sampler_sample(sampler, ctx, -1);
        require(llama_decode(ctx, llama_batch_get_one(&token, 1)) == 0, "decode");
    }
    llama_memory_t memory = llama_get_memory(ctx);
    llama_memory_seq_rm(memory, 0, 10, 20);
    if (llama_memory_can_shift(memory)) {
        llama_memory_seq_add(memory, 0, 20, -1, -10);
    }
    llama_token token = 1;
    require(llama_decode(ctx, llama_batch_get_one(&token, 1)) == 0, "decode after the shift");
    llama_sampler_free(sampler);
}

static void generate_in_two_contexts(llama_model * model, int n_tokens) {
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; i++) {
        threads.emplace_back([model, n_tokens] {
            llama_context * ctx = new_context(model, 2);
            const int64_t span = llama_instr_mark(0, 0, "generate", 0);
            generate(ctx, n_tokens);
            llama_instr_note("done", "{\"ok\": true,\n \"text\": \"\\u00e9\"}");
            llama_instr_mark(1, span, "generate", 0);
            llama_free(ctx);
        });
    }
    for (auto & thread : threads) {
        thread.join();
    }
}

static void record_every_level(llama_model * model, const std::string & directory) {
    for (const char * level : { "minimal", "detailed", "verbose" }) {
        for (const char * stats : { "", "^(l_out|kq|ffn_out)" }) {
            const std::string path = directory + "/" + level + (stats[0] ? "-stats" : "") + ".log";
            require(llama_instr_begin(path.c_str(), level, "{\"by\":\"recorder_stress\"}", stats, 0) == 0, "begin");
            require(llama_instr_begin(path.c_str(), level, nullptr, nullptr, 0) == -EBUSY, "a second session must be refused");
            generate_in_two_contexts(model, 8);
            require(llama_instr_status() == LLAMA_INSTR_ACTIVE, "status");
            require(llama_instr_end() == 0, "end");
            require(llama_instr_end() == -ENOENT, "a second end must be refused");
        }
    }
}

// sessions come and go while two contexts decode: no step may be torn, no memory touched after its end
static void record_while_decoding(llama_model * model, const std::string & directory) {
    std::atomic<bool> stop { false };
    std::thread decoder([&] {
        llama_context * ctx = new_context(model, 2);
        while (!stop) {
            generate(ctx, 4);
        }
        llama_free(ctx);
    });
    for (int i = 0; i < 20; i++) {
        const std::string path = directory + "/interleaved-" + std::to_string(i) + ".log";
        require(llama_instr_begin(path.c_str(), i % 2 ? "verbose" : "detailed", nullptr, nullptr, 0) == 0, "begin");
        usleep(20000);
        require(llama_instr_end() == 0, "end");
    }
    stop = true;
    decoder.join();
}

static void record_into_a_full_disk(llama_model * model) {
    require(llama_instr_begin("/dev/full", "verbose", nullptr, nullptr, 0) == 0, "begin");
    generate_in_two_contexts(model, 40);
    require((llama_instr_status() & LLAMA_INSTR_FAILED) != 0, "the failure must show");
    require(llama_instr_dropped() > 0, "what was dropped must be counted");
    require(llama_instr_end() == -ENOSPC, "the end must tell of the failure");
}

static void record_into_a_closed_pipe(llama_model * model) {
    int ends[2];
    require(pipe(ends) == 0, "pipe");
    close(ends[0]);
    const std::string path = "/proc/self/fd/" + std::to_string(ends[1]);
    // without a reader a pipe can be opened for writing only by what holds it already
    const int status = llama_instr_begin(path.c_str(), "verbose", nullptr, nullptr, 0);
    if (status == 0) {
        generate_in_two_contexts(model, 40);
        require(llama_instr_end() == -EPIPE, "the end must tell of the closed pipe");
    }
    close(ends[1]);
}

// the reader takes nothing: decoding goes on, the end does not wait for long, and the next session is whole
static void record_into_a_stalled_pipe(llama_model * model, const std::string & directory) {
    const std::string path = directory + "/pipe";
    require(mkfifo(path.c_str(), 0600) == 0, "mkfifo");
    require(llama_instr_begin(path.c_str(), "verbose", nullptr, nullptr, 0) == -ENXIO, "a pipe without a reader");
    const int reader = open(path.c_str(), O_RDONLY | O_NONBLOCK);
    require(llama_instr_begin(path.c_str(), "verbose", nullptr, nullptr, 0) == 0, "begin");
    const std::string text = "\"" + std::string(1 << 20, 'x') + "\"";
    for (int i = 0; i < 80; i++) {
        require(llama_instr_note("large", text.c_str()) == 0, "note");
    }
    generate_in_two_contexts(model, 8);
    require((llama_instr_status() & LLAMA_INSTR_FAILED) != 0, "the failure must show");
    require(llama_instr_dropped() > 0, "what was dropped must be counted");
    require(llama_instr_end() == -ETIMEDOUT, "the end must tell of the reader");
    require(llama_instr_begin((directory + "/after.log").c_str(), "verbose", nullptr, nullptr, 0) == 0, "begin");
    close(reader);  // the first log's writer ends meanwhile
    generate_in_two_contexts(model, 8);
    require(llama_instr_end() == 0, "end");
}

static void refuse_wrong_arguments(const std::string & directory) {
    require(llama_instr_begin((directory + "/x.log").c_str(), "loud", nullptr, nullptr, 0) == -EINVAL, "a wrong level");
    require(llama_instr_begin((directory + "/x.log").c_str(), "detailed", nullptr, "(", 0) == -EINVAL, "a wrong pattern");
    require(llama_instr_begin((directory + "/none/x.log").c_str(), "detailed", nullptr, nullptr, 0) == -ENOENT, "a missing directory");
    require(llama_instr_begin((directory + "/minimal.log").c_str(), "detailed", nullptr, nullptr, 0) == -EEXIST, "an existing log");
    require(llama_instr_mark(2, 0, "x", -1) == -1 && llama_instr_note("x", "1") == -1, "no session");
}

int main(int argc, char ** argv) {
    const bool rotates = getenv("LLAMA_INSTR_ROTATE") != nullptr;
    if (argc != (rotates ? 2 : 3)) {
        fprintf(stderr, "usage: %s MODEL.gguf DIRECTORY\n", argv[0]);
        return 2;
    }
    llama_backend_init();
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level == GGML_LOG_LEVEL_ERROR) {
            fputs(text, stderr);
        }
    }, nullptr);
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    require(model != nullptr, "no model");

    if (rotates) {
        for (int part = 0; part < 4; part++) {
            generate_in_two_contexts(model, 80);
            usleep(300 * 1000);  // the recorder's thread writes what is still in memory: a part is full
        }
    } else {
        record_every_level(model, argv[2]);
        record_while_decoding(model, argv[2]);
        record_into_a_full_disk(model);
        record_into_a_closed_pipe(model);
        record_into_a_stalled_pipe(model, argv[2]);
        refuse_wrong_arguments(argv[2]);
    }

    llama_model_free(model);
    llama_backend_free();
    puts("recorder_stress: passed");
    return 0;
}
