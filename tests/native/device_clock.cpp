// device_clock.cpp - the clock of a device, joined with the log's
//
//     device_clock TICK BITS < COMMANDS
//
// `calibrate NS TICKS DEVIATION` tells a moment on both clocks, `run BEGIN FIRST LAST` the stamps of a run without
// calibration that was submitted at BEGIN and ends now; `ns TICKS` prints the nanoseconds of a stamp, `uncertainty` by
// how much they may be wrong.

#include "ggml-instrumentation.h"

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>

static void end(const ggml_instr_device_run *, const ggml_instr_device *, const ggml_instr_device_op *, int32_t) {}

int main(int, char ** argv) {
    const int bits = atoi(argv[2]);
    const ggml_instr_recorder recorder = { nullptr, end, nullptr };
    ggml_instr_device device = {};
    device.name = device.description = "device";
    device.clock = GGML_INSTR_CLOCK_CALIBRATED;
    device.tick  = atof(argv[1]);
    device.mask  = bits < 64 ? ((uint64_t) 1 << bits) - 1 : UINT64_MAX;
    char command[16];
    uint64_t a, b, c;
    while (scanf("%15s", command) == 1) {
        if (strcmp(command, "uncertainty") == 0) {
            printf("%" PRIu64 "\n", device.uncertainty);
        } else if (scanf("%" SCNu64, &a) == 1 && strcmp(command, "ns") == 0) {
            printf("%" PRIu64 "\n", ggml_instr_device_ns(&device, a));
        } else if (scanf("%" SCNu64 "%" SCNu64, &b, &c) == 2 && strcmp(command, "calibrate") == 0) {
            ggml_instr_device_calibrate(&device, a, b, c);
        } else {
            const ggml_instr_device_op ops[] = { { 0, b, b }, { 1, 0, c } };
            ggml_instr_device_run run = {};
            run.recorder = &recorder;
            run.begin = run.last_begin = a;
            device.clock = GGML_INSTR_CLOCK_BOUNDED;
            ggml_instr_device_end(&run, &device, ops, 2);
        }
    }
    return 0;
}
