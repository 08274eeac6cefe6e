// llama-instrumentation-debug.h - a debugger that stops computes after the nodes that it asks for

#pragma once

#include "llama-instrumentation-thread.h"

struct llama_context;

namespace [[gnu::visibility("hidden")]] llama_instr {

// before a compute: the attached debugger chooses its nodes, and the scheduler gets an eval callback if there are any
void tell_debugger(const llama_context & ctx, thread_state & t);

}  // namespace llama_instr
