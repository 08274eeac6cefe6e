// llama-instrumentation-recorder.h - the recorder of this process: the session that is open, and the thread that writes it

#pragma once

#include "llama-instrumentation-session.h"

#include "llama.h"

#include <memory>
#include <mutex>
#include <string>

namespace [[gnu::visibility("hidden")]] llama_instr {

// the open session; opens the one that the environment asks for when there is none yet
std::shared_ptr<session> current_session();
// the same, but opens none
std::shared_ptr<session> open_session_or_null();
// the next part of the log, or `full` when there can be none
std::shared_ptr<session> next_part(std::shared_ptr<session> full);

// A model or a context is about to be freed: no session finds it any more, whoever holds that session. A rotation
// cannot take it over to the next part meanwhile.
void forget_everywhere(const llama_context * ctx);
void forget_everywhere(const llama_model * model);

// a line for the user, on the standard error that the program had before a library redirected it
void tell(const std::string & text);

// held while a mark is written, so that a rotation cuts every open span in two
std::unique_lock<std::mutex> marks_lock();

}  // namespace llama_instr
