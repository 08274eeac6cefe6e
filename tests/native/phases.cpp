// phases.cpp - decodes whose phases are slow, each by a wait of its own
//
//     phases MODEL.gguf LOG
//
// llama.cpp calls the functions of ggml below through this program, which waits in them and prints when each wait began
// and ended: a line for each decode, with pairs of nanoseconds of CLOCK_MONOTONIC. The last pair is that of the sampler.

#include "llama.h"

#include "ggml-backend.h"
#include "llama-instrumentation.h"

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <dlfcn.h>
#include <unistd.h>
#include <vector>

enum phase { PREPARE, BUILD, ALLOC, INPUTS, RECORDER, COMPUTE, READBACK, SAMPLE, N_PHASES };

static long long spans[N_PHASES][2];
static bool      decoding = false;

static long long now_ns() {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (long long) ts.tv_sec * 1000000000 + ts.tv_nsec;
}

// once per decode
static void wait_in(phase p) {
    if (decoding && spans[p][0] == 0) {
        spans[p][0] = now_ns();
        usleep(3000u * (p + 1u));
        spans[p][1] = now_ns();
    }
}

template <typename F> static F next(F, const char * name) {
    return (F) dlsym(RTLD_NEXT, name);
}

extern "C" {

int64_t ggml_time_us(void) {
    wait_in(PREPARE);  // a decode reads it before its first ubatch
    return next(ggml_time_us, "ggml_time_us")();
}

void ggml_build_forward_expand(ggml_cgraph * graph, ggml_tensor * t) {
    wait_in(BUILD);
    next(ggml_build_forward_expand, "ggml_build_forward_expand")(graph, t);
}

bool ggml_backend_sched_alloc_graph(ggml_backend_sched_t sched, ggml_cgraph * graph) {
    wait_in(ALLOC);
    return next(ggml_backend_sched_alloc_graph, "ggml_backend_sched_alloc_graph")(sched, graph);
}

void ggml_backend_tensor_set(ggml_tensor * t, const void * data, size_t offset, size_t size) {
    wait_in(INPUTS);
    next(ggml_backend_tensor_set, "ggml_backend_tensor_set")(t, data, offset, size);
}

int ggml_backend_sched_get_n_splits(ggml_backend_sched_t sched) {
    wait_in(RECORDER);  // while llama.cpp decodes, only the recorder asks, for a new graph
    return next(ggml_backend_sched_get_n_splits, "ggml_backend_sched_get_n_splits")(sched);
}

ggml_status ggml_backend_sched_graph_compute_async(ggml_backend_sched_t sched, ggml_cgraph * graph) {
    wait_in(COMPUTE);
    return next(ggml_backend_sched_graph_compute_async, "ggml_backend_sched_graph_compute_async")(sched, graph);
}

void ggml_backend_tensor_get_async(ggml_backend_t backend, const ggml_tensor * t, void * data, size_t offset, size_t size) {
    wait_in(READBACK);
    next(ggml_backend_tensor_get_async, "ggml_backend_tensor_get_async")(backend, t, data, offset, size);
}

}  // extern "C"

static void apply(llama_sampler *, llama_token_data_array * tokens) {
    wait_in(SAMPLE);
    tokens->selected = 0;
}

int main(int argc, char ** argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: %s MODEL.gguf LOG\n", argv[0]);
        return 2;
    }
    llama_backend_init();
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    if (llama_instr_begin(argv[2], "verbose", nullptr, nullptr, 0) != 0) {
        fprintf(stderr, "%s\n", llama_instr_error());
        return 1;
    }
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    llama_context_params params = llama_context_default_params();
    params.n_ctx     = 256;
    params.n_threads = params.n_threads_batch = 2;
    llama_context * ctx = model ? llama_init_from_model(model, params) : nullptr;
    if (!ctx) {
        fprintf(stderr, "%s does not load\n", argv[1]);
        return 1;
    }
    llama_sampler_i interface = {};
    interface.apply = apply;
    llama_sampler * sampler = llama_sampler_init(&interface, nullptr);
    std::vector<llama_token> tokens(40, 7);
    for (int i = 0; i < 4; i++) {
        std::fill(&spans[0][0], &spans[0][0] + 2 * N_PHASES, 0);
        decoding = true;
        const long long begin = now_ns();
        if (llama_decode(ctx, llama_batch_get_one(tokens.data(), i == 0 ? (int32_t) tokens.size() : 1)) != 0) {
            return 1;
        }
        llama_synchronize(ctx);
        const long long end = now_ns();
        llama_sampler_sample(sampler, ctx, -1);
        decoding = false;
        printf("%lld %lld", begin, end);
        for (const auto & span : spans) {
            printf(" %lld %lld", span[0], span[1]);
        }
        printf("\n");
    }
    llama_sampler_free(sampler);
    llama_free(ctx);
    llama_model_free(model);
    return llama_instr_end() == 0 ? 0 : 1;
}
