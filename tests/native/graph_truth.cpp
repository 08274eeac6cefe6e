// graph_truth.cpp - the graphs that ggml computes, read through ggml's own structs
//
//     graph_truth MODEL.gguf LOG LEVEL
//
// Records a prompt, a token, and a token after a shift of the cache. The debugger's hook, which asks for no node,
// gives the graph of each compute. Prints a line of JSON for each: its nodes, and what they read.

#include "llama.h"

#include "ggml-backend.h"
#include "ggml-impl.h"
#include "llama-instrumentation.h"

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <map>
#include <vector>

template <typename T> static void list(const char * key, const T * values, int n) {
    printf("\"%s\":[", key);
    for (int i = 0; i < n; i++) {
        printf("%s%lld", i ? "," : "", (long long) values[i]);
    }
    printf("],");
}

static void tensor(const ggml_tensor * t) {
    ggml_backend_buffer_t buffer = t->view_src ? t->view_src->buffer : t->buffer;
    printf("\"name\":\"%s\",\"type\":\"%s\",\"bytes\":%zu,", t->name, ggml_type_name(t->type), ggml_nbytes(t));
    printf("\"buffer\":\"%s\",", buffer ? ggml_backend_buffer_name(buffer) : "");
    list("ne", t->ne, GGML_MAX_DIMS);
}

static void on_compute(const llama_instr_debug_info * info) {
    ggml_cgraph * gf = info->graph;
    std::map<const ggml_tensor *, int> number;  // leafs count downwards from -1
    std::vector<const ggml_tensor *> leafs;
    for (int i = 0; i < gf->n_nodes; i++) {
        number[gf->nodes[i]] = i;
    }
    printf("{\"compute\":%d,\"graph\":%d,\"step\":%d,\"n_tokens\":%d,", info->compute, info->graph_id, info->step, info->n_tokens);
    printf("\"uid\":%" PRIu64 ",\"nodes\":[", gf->uid);
    for (int i = 0; i < gf->n_nodes; i++) {
        const ggml_tensor * t = gf->nodes[i];
        printf("%s{", i ? "," : "");
        tensor(t);
        list("nb", t->nb, GGML_MAX_DIMS);
        list("params", t->op_params, GGML_MAX_OP_PARAMS / sizeof(int32_t));
        std::vector<int> src;
        for (const ggml_tensor * s : t->src) {
            if (s && !number.count(s)) {
                leafs.push_back(s);
                number[s] = -(int) leafs.size();
            }
            if (s) {
                src.push_back(number[s]);
            }
        }
        list("src", src.data(), (int) src.size());
        const bool is_view = t->op == GGML_OP_NONE || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_VIEW ||
                             t->op == GGML_OP_PERMUTE || t->op == GGML_OP_TRANSPOSE;
        printf("\"layer\":%d,\"op\":\"%s\",\"exec\":%d}", info->layers[i], ggml_op_name(t->op), !is_view && (t->flags & GGML_TENSOR_FLAG_COMPUTE));
    }
    printf("],\"leafs\":[");
    for (size_t i = 0; i < leafs.size(); i++) {
        printf("%s{", i ? "," : "");
        tensor(leafs[i]);
        printf("\"is_leaf\":1}");
    }
    printf("]}\n");
}

int main(int argc, char ** argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: %s MODEL.gguf LOG LEVEL\n", argv[0]);
        return 2;
    }
    llama_backend_init();
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_instr_debug(on_compute, nullptr);
    if (llama_instr_begin(argv[2], argv[3], nullptr, nullptr, LLAMA_INSTR_DEBUGGED) != 0) {
        fprintf(stderr, "%s\n", llama_instr_error());
        return 1;
    }
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    llama_context_params params = llama_context_default_params();
    params.n_ctx     = 256;
    params.n_threads = params.n_threads_batch = 1;
    llama_context * ctx = model ? llama_init_from_model(model, params) : nullptr;
    if (!ctx) {
        fprintf(stderr, "%s does not load\n", argv[1]);
        return 1;
    }
    std::vector<llama_token> tokens = { 1, 2, 3, 4, 5 };
    int status = llama_decode(ctx, llama_batch_get_one(tokens.data(), (int32_t) tokens.size()));
    status |= llama_decode(ctx, llama_batch_get_one(tokens.data(), 1));
    status |= llama_decode(ctx, llama_batch_get_one(tokens.data(), 1));
    llama_memory_t memory = llama_get_memory(ctx);
    if (llama_memory_can_shift(memory)) {
        llama_memory_seq_rm(memory, 0, 1, 3);
        llama_memory_seq_add(memory, 0, 3, -1, -2);
    }
    status |= llama_decode(ctx, llama_batch_get_one(tokens.data(), 1));
    llama_free(ctx);
    llama_model_free(model);
    return llama_instr_end() == 0 ? status : 1;
}
