// llama-instrumentation-messages.h - what the recorder prints to standard error

#pragma once

#include <mutex>
#include <string>

namespace [[gnu::visibility("hidden")]] llama_instr {

// keeps standard error as it is now, before a library redirects it, as llama-cpp-python does
void keep_standard_error();

// prints a line to it, unless that is held up
void tell(const std::string & text);

// a -errno in words
std::string reason_of(int status);

// guards the copy of standard error
std::mutex & messages_mutex();

}  // namespace llama_instr
