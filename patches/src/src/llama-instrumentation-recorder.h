// llama-instrumentation-recorder.h - the recorder of this process: the session that is open

#pragma once

#include "llama-instrumentation-session.h"

#include "llama.h"

#include <memory>
#include <mutex>
#include <string>

namespace [[gnu::visibility("hidden")]] llama_instr {

// the open session; opens the one that the environment asks for when there is none yet
std::shared_ptr<session> current_session();
// the open session; never opens one, nor waits for one that is opened
std::shared_ptr<session> open_session_or_null();
// the session of a step that begins, maybe the next part of the log
std::shared_ptr<session> session_of_step();

// Makes every session forget a model or a context that is about to be freed. A rotation cannot copy it to the next
// part meanwhile.
void forget_everywhere(const llama_context * ctx);
void forget_everywhere(const llama_model * model);

// prints a line to the standard error that the program had before a library redirected it, unless that is held up
void tell(const std::string & text);
// a -errno in words
std::string reason_of(int status);

// held while a mark is written, so that a rotation cuts every open span in two
std::unique_lock<std::mutex> marks_lock();

}  // namespace llama_instr
