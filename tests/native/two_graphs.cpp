// Computes two graphs on the first device of a backend, by ggml alone: 64 products, then 300 sums. The buffer of the first
// is freed in between.
//
//   two_graphs MODULE
//
// Compile it with -I…/ggml/include -I…/ggml/src and the library libggml-base. On Mesa 22.3's lavapipe, valgrind
// (--smc-check=all-non-file, MESA_SHADER_CACHE_DISABLE=true) finds that the driver's own thread frees a buffer twice.

#include "ggml-alloc.h"
#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <dlfcn.h>

#include <cstdio>
#include <vector>

namespace {

enum class op { product, sum };

bool compute(ggml_backend_t backend, op of, int n) {
    ggml_context * const ctx   = ggml_init({ 4 << 20, nullptr, true });
    ggml_cgraph * const  graph = ggml_new_graph_custom(ctx, 1024, false);
    const bool           is_product = of == op::product;
    ggml_tensor * const  a = is_product ? ggml_new_tensor_2d(ctx, GGML_TYPE_Q4_0, 4096, 256)
                                        : ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 1);
    ggml_tensor * const  b = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, is_product ? 4096 : 1);
    for (int i = 0; i < n; i++) {
        ggml_build_forward_expand(graph, is_product ? ggml_mul_mat(ctx, a, b) : ggml_add(ctx, a, b));
    }
    ggml_backend_buffer_t const buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    bool done = buffer != nullptr;
    if (done) {
        for (ggml_tensor * tensor : { a, b }) {
            const std::vector<char> zeros(ggml_nbytes(tensor));
            ggml_backend_tensor_set(tensor, zeros.data(), 0, zeros.size());
        }
        for (int i = 0; i < 2; i++) {
            done = done && ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS;
        }
        ggml_backend_buffer_free(buffer);
    }
    ggml_free(ctx);
    return done;
}

}  // namespace

int main(int, char ** argv) {
    void * const module = dlopen(argv[1], RTLD_NOW);
    if (!module) {
        fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    auto * const init = (ggml_backend_reg_t (*)()) dlsym(module, "ggml_backend_init");
    ggml_backend_t const backend = ggml_backend_dev_init(ggml_backend_reg_dev_get(init(), 0), nullptr);
    const bool done = compute(backend, op::product, 64) && compute(backend, op::sum, 300);
    ggml_backend_free(backend);
    return done ? 0 : 1;
}
