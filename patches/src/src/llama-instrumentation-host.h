// llama-instrumentation-host.h - the first line of a log: who records, on what machine

#pragma once

#include <cstdint>
#include <string>

namespace [[gnu::visibility("hidden")]] llama_instr {

class session;

void write_session_start(session & s);
std::string random_id();
uint64_t resident_bytes();
int      thread_id();

}  // namespace llama_instr
