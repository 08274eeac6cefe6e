// llama-instrumentation-values.h - stops computes after nodes: reads their values, or lets a debugger do so

#pragma once

#include "llama-instrumentation-thread.h"

namespace [[gnu::visibility("hidden")]] llama_instr {

// the scheduler's eval callback that reads the values of matching nodes
bool stats_callback(ggml_tensor * t, bool ask, void * user_data);

// before a compute: the attached debugger chooses its nodes, and the scheduler gets an eval callback if there are any
void tell_debugger(const llama_context & ctx, thread_state & t);

}  // namespace llama_instr
