// flush_log.cpp - prints the rest of llama.cpp's own log before the process ends
//
// A library for LD_PRELOAD. llama.cpp's examples print through a thread of their own, which the end of the process
// may stop before the last lines (common/log.cpp leaks the logger on purpose).

struct common_log;

struct common_log * common_log_main();
void common_log_flush(struct common_log * log);

__attribute__((destructor)) static void flush_log() {
    common_log_flush(common_log_main());
}
