// llama-instrumentation-recorder.h - the recorder of this process: the session that is open

#pragma once

#include "llama-instrumentation-session.h"

#include "llama.h"

#include <memory>
#include <mutex>
#include <string>

namespace [[gnu::visibility("hidden")]] llama_instr {

// the part of the log that is open; opens the session that the environment asks for when there is none yet
std::shared_ptr<log_part> current_part();
// the part that is open; never opens a session, nor waits for one that is opened
std::shared_ptr<log_part> open_part_or_null();
// the part of a step that begins, maybe the next one of the log
std::shared_ptr<log_part> part_of_step();

// Makes every part forget a model or a context that is about to be freed. A rotation cannot copy it to the next
// part meanwhile.
void forget_everywhere(const llama_context * ctx);
void forget_everywhere(const llama_model * model);

// held while a mark is written, so that a rotation cuts every open span in two
std::unique_lock<std::mutex> marks_lock();

}  // namespace llama_instr
