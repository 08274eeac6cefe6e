// ggml-vulkan-instrumentation.h - the times of the kernels of a Vulkan device
//
// Stamps inside of the command buffers are read after the fence for which the backend waits anyway. They add no barrier,
// no submission and no wait. The stamp after a kernel says when all commands before it were complete. So kernels that
// overlap add up: each has the time by which it ended later than the one before.

#pragma once

#include "ggml-instrumentation.h"

#include <vulkan/vulkan.hpp>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// what the stamps of a device are
struct ggml_vk_instr_device {
    std::string description;
    double   tick       = 0;  // in nanoseconds
    uint32_t valid_bits = 0;  // of a stamp of the compute queue; 0: it has none
    bool     calibrated = false;

    // before the device is created: adds the extension that reads both clocks at once, if there is one
    void init(const vk::PhysicalDevice & device, const vk::QueueFamilyProperties & family, std::vector<const char *> & extensions) {
        const vk::PhysicalDeviceProperties properties = device.getProperties();
        description = properties.deviceName.data();
        tick        = (double) properties.limits.timestampPeriod;
        valid_bits  = family.timestampValidBits;
        const char * const name = VK_EXT_CALIBRATED_TIMESTAMPS_EXTENSION_NAME;
        const auto offered = device.enumerateDeviceExtensionProperties();
        const auto is_it   = [name](const vk::ExtensionProperties & of) { return strcmp(of.extensionName, name) == 0; };
        if (getenv("GGML_VK_DISABLE_CALIBRATED_TIMESTAMPS") || std::none_of(offered.begin(), offered.end(), is_it)) {
            return;
        }
        const auto domains = device.getCalibrateableTimeDomainsEXT();
        const auto has     = [&domains](vk::TimeDomainEXT of) { return std::find(domains.begin(), domains.end(), of) != domains.end(); };
        calibrated = has(vk::TimeDomainEXT::eDevice) && has(vk::TimeDomainEXT::eClockMonotonic);
        if (calibrated) {
            extensions.push_back(name);
        }
    }
};

// the runs of a backend, which one thread at a time uses
class ggml_vk_instr {
  public:
    // ggml_backend_vk_graph_compute: before and after it submits
    void begin(const vk::Device & device_, const ggml_vk_instr_device & of, const std::string & name, int n_nodes) {
        end();  // of a compute that has failed
        ggml_instr_device_run started;
        if (of.valid_bits == 0 || waiting.size() == most_waiting || !ggml_instr_device_begin(&started)) {
            return;
        }
        device            = device_;
        clock.name        = name.c_str();
        clock.description = of.description.c_str();
        clock.clock       = of.calibrated ? GGML_INSTR_CLOCK_CALIBRATED : GGML_INSTR_CLOCK_BOUNDED;
        clock.tick        = of.tick;
        clock.mask        = of.valid_bits < 64 ? ((uint64_t) 1 << of.valid_bits) - 1 : UINT64_MAX;
        current = take((uint32_t) n_nodes);
        current->started = started;
    }

    void end() {
        if (current) {
            waiting.push_back(std::move(current));
        }
    }

    // ggml_vk_build_graph: before and after the commands of a kernel
    void kernel_begin(const vk::CommandBuffer & buf) {
        if (!current || current->is_full()) {
            return;
        }
        if (current->ops.empty()) {
            buf.resetQueryPool(current->pool, 0, 2 * current->capacity);
        }
        // the time between two command buffers belongs to no kernel
        const bool is_first = buf != buffer;
        if (is_first) {
            current->started.last_begin = ggml_instr_clock_ns();
            current->started.last       = (int32_t) current->ops.size();
        }
        if (is_first || current->started.record_begin) {
            buf.writeTimestamp(is_first ? vk::PipelineStageFlagBits::eAllCommands : vk::PipelineStageFlagBits::eTopOfPipe,
                               current->pool, current->next_query());
        }
        buffer = buf;
    }

    void kernel_end(const vk::CommandBuffer & buf, int node, int n) {
        if (current && !current->is_full()) {
            buf.writeTimestamp(vk::PipelineStageFlagBits::eAllCommands, current->pool, current->next_query() + 1);
            current->ops.push_back({ ggml_instr_nodes(node, n), 0, 0 });
            buffer = buf;
        }
    }

    // ggml_vk_synchronize: after the wait
    void collect() {
        buffer = nullptr;  // it may be used again
        if (!waiting.empty() && clock.clock == GGML_INSTR_CLOCK_CALIBRATED && ggml_instr_device_is_due(&clock)) {
            calibrate();
        }
        for (auto & of : waiting) {
            const int32_t n = read(*of) ? (int32_t) of->ops.size() : 0;
            ggml_instr_device_end(&of->started, &clock, of->ops.data(), n);
            idle.push_back(std::move(of));
        }
        waiting.clear();
    }

    // ggml_vk_cleanup: after the last wait
    void free() {
        end();
        collect();
        for (const auto & of : idle) {
            device.destroyQueryPool(of->pool);
        }
        idle.clear();
    }

  private:
    // so many may wait to be collected; more are not recorded
    static constexpr size_t most_waiting = 64;

    struct run {
        ggml_instr_device_run started = {};
        vk::QueryPool pool;
        uint32_t capacity = 0;  // in kernels, which have two queries each
        std::vector<ggml_instr_device_op> ops;

        bool     is_full() const { return ops.size() == capacity; }
        uint32_t next_query() const { return 2 * (uint32_t) ops.size(); }
    };

    vk::Device        device;
    ggml_instr_device clock = {};
    vk::CommandBuffer buffer;  // with the last stamp
    std::unique_ptr<run> current;
    std::vector<std::unique_ptr<run>> waiting, idle;
    std::vector<uint64_t> stamps;

    std::unique_ptr<run> take(uint32_t n_nodes) {
        std::unique_ptr<run> taken;
        if (idle.empty()) {
            taken = std::make_unique<run>();
        } else {
            taken = std::move(idle.back());
            idle.pop_back();
        }
        taken->ops.clear();
        if (taken->capacity < n_nodes) {
            device.destroyQueryPool(std::exchange(taken->pool, nullptr));
            const vk::QueryPoolCreateInfo info({}, vk::QueryType::eTimestamp, 2 * n_nodes);
            const bool made = device.createQueryPool(&info, nullptr, &taken->pool) == vk::Result::eSuccess;
            taken->capacity = made ? n_nodes : 0;
        }
        return taken;
    }

    void calibrate() {
        const vk::CalibratedTimestampInfoEXT clocks[] = { { vk::TimeDomainEXT::eDevice }, { vk::TimeDomainEXT::eClockMonotonic } };
        uint64_t both[2];
        uint64_t deviation;
        if (device.getCalibratedTimestampsEXT(2, clocks, both, &deviation) == vk::Result::eSuccess) {
            ggml_instr_device_calibrate(&clock, both[1], both[0], deviation);
        } else if (!clock.joined) {
            clock.clock = GGML_INSTR_CLOCK_BOUNDED;
        }
    }

    // the stamps of a run; returns false if the device has not written them
    bool read(run & of) {
        const auto n = (uint32_t) of.ops.size();
        constexpr size_t query = 2;  // numbers: a stamp, and whether it was written
        stamps.assign(2 * n * query, 0);
        if (n > 0) {
            // those that no kernel needs are not written
            (void) device.getQueryPoolResults(of.pool, 0, 2 * n, stamps.size() * sizeof(stamps[0]), stamps.data(), query * sizeof(stamps[0]),
                                              vk::QueryResultFlagBits::e64 | vk::QueryResultFlagBits::eWithAvailability);
        }
        const uint64_t * at = stamps.data();
        for (auto & op : of.ops) {
            op.begin = at[1] ? at[0] : 0;
            op.end   = at[2];
            if (!at[3]) {
                return false;
            }
            at += 2 * query;
        }
        return n > 0;
    }
};
