// ggml-cuda-instrumentation.h - the times of the kernels of a CUDA device
//
// CUPTI, the library of NVIDIA's own profilers, reports when each kernel, copy and memset began and ended. CUDA graphs,
// streams and fusion stay as they are: nothing is added to a stream, and nothing waits. The calling thread has one run at
// a time.

#pragma once

#include "ggml-backend.h"

// Before a graph is computed: by launches, or by a CUDA graph, which `key` names. It is captured if `captures` is set, and
// that is set here if the recorder has not seen its capture.
void ggml_cuda_instr_begin(ggml_backend_t backend, int n_nodes, const void * key, bool use_graph, bool * captures);

// before what computes a node is launched or captured; then how many nodes after it are computed with it
void ggml_cuda_instr_node(int node);
void ggml_cuda_instr_fused(int n);

// the nodes are computed in another order than that of the graph, so their kernels are not told apart
void ggml_cuda_instr_reordered(void);

// After a capture: whether its CUDA graph must be instantiated anew. One that is updated keeps the ids of its nodes, by which
// CUPTI reports them.
bool ggml_cuda_instr_captured(void);

// before the CUDA graph is launched
void ggml_cuda_instr_launch(void);

// all was submitted
void ggml_cuda_instr_end(void);

// all that this backend has submitted is computed
void ggml_cuda_instr_synchronized(ggml_backend_t backend);
