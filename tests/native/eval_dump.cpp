// eval_dump.cpp - the value of every node of a compute, as llama.cpp's own eval callback sees it
//
//     eval_dump MODEL.gguf OUT N_TOKENS FIRST
//
// Reads tensors exactly as llama.cpp's examples/eval-callback does (common_debug_cb_eval of common/debug.cpp) and writes
// their bytes instead of printing some of them. The tokens are (FIRST + 7 i) modulo the vocabulary.
// Each node is a line of its name, type, ne (4), nb (4) and size, separated by tabs, and then its bytes.

#include "llama.h"

#include "ggml-backend.h"

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <vector>

static bool dump(ggml_tensor * t, bool ask, void * user_data) {
    if (ask) {
        return true;
    }
    const bool is_view = t->op == GGML_OP_NONE || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_VIEW ||
                         t->op == GGML_OP_PERMUTE || t->op == GGML_OP_TRANSPOSE;
    if (is_view || ggml_is_empty(t)) {
        return true;
    }
    std::vector<uint8_t> data(ggml_nbytes(t));
    ggml_backend_tensor_get(t, data.data(), 0, data.size());
    FILE * out = (FILE *) user_data;
    fprintf(out, "%s\t%d", t->name, (int) t->type);
    for (int64_t ne : t->ne) {
        fprintf(out, "\t%" PRId64, ne);
    }
    for (size_t nb : t->nb) {
        fprintf(out, "\t%zu", nb);
    }
    fprintf(out, "\t%zu\n", data.size());
    return fwrite(data.data(), 1, data.size(), out) == data.size();
}

int main(int argc, char ** argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: %s MODEL.gguf OUT N_TOKENS FIRST\n", argv[0]);
        return 2;
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    FILE * out = fopen(argv[2], "wb");
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    llama_context_params params = llama_context_default_params();
    params.n_ctx             = 256;
    params.n_threads         = 1;
    params.n_threads_batch   = 1;
    params.cb_eval           = dump;
    params.cb_eval_user_data = out;
    llama_context * ctx = model && out ? llama_init_from_model(model, params) : nullptr;
    if (!ctx) {
        fprintf(stderr, "%s does not load\n", argv[1]);
        return 1;
    }
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    std::vector<llama_token> tokens(atoi(argv[3]));
    for (size_t i = 0; i < tokens.size(); i++) {
        tokens[i] = (int32_t) (((size_t) atoi(argv[4]) + 7 * i) % (size_t) n_vocab);
    }
    const int status = llama_decode(ctx, llama_batch_get_one(tokens.data(), (int32_t) tokens.size()));
    llama_free(ctx);
    llama_model_free(model);
    return fclose(out) == 0 ? status : 1;
}
