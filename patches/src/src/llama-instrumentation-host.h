// llama-instrumentation-host.h - the first line of a log: who records, on what machine

#pragma once

#include <cstdint>
#include <ctime>
#include <string>

namespace [[gnu::visibility("hidden")]] llama_instr {

class json_line;

void write_host(json_line & line);
void write_process(json_line & line);
std::string iso_time(const timespec & wall);
std::string random_id();
uint64_t resident_bytes();
int      thread_id();

}  // namespace llama_instr
