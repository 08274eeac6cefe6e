// cupti.cpp - a stand-in for libcupti, with the functions and records that its own headers declare
//
// It reports what the driver beside it does. STANDIN_CUDA names what else may happen to a real one: `held` by another
// profiler, records that come `shuffled`, `late` or not at all (`dropped`, `unstamped`), nodes of graphs that are `untold`, a
// clock that is `skewed`. Compiled with OLD, it is a version without its own clock.

#include "driver.h"

#include <cupti.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

using standin::is_asked;

namespace {

struct record {
    int age = 0;  // in flushes
    std::vector<uint8_t> bytes;
};

constexpr size_t most_in_buffer = 48;  // so that the records of a run are in several
constexpr size_t most_queued    = 500; // then they come unasked
constexpr int    late           = 3;

std::mutex mutex;
std::vector<record> queue;
size_t n_dropped = 0;
size_t n_records = 0;
std::set<CUpti_ActivityKind> kinds;
std::set<CUpti_CallbackId> callbacks;
CUpti_CallbackFunc subscriber = nullptr;
CUpti_BuffersCallbackRequestFunc  request  = nullptr;
CUpti_BuffersCallbackCompleteFunc complete = nullptr;
CUpti_TimestampCallbackFunc       stamp    = nullptr;
thread_local std::vector<uint64_t> external_ids;

uint64_t on_its_clock(uint64_t ns) {
    const uint64_t by = is_asked("skewed") ? 100000 : 0;
    return stamp ? ns - by : ns + 1600000000000000000;  // CLOCK_REALTIME otherwise
}

// returns how many records wait
template <typename R> size_t enqueue(const R & r) {
    std::lock_guard<std::mutex> lock(mutex);
    if (kinds.count(r.kind) == 0) {
        return 0;
    }
    if (is_asked("dropped") && ++n_records % 100 == 0) {
        n_dropped++;
        return 0;
    }
    record one;
    one.bytes.resize(sizeof(r));
    memcpy(one.bytes.data(), &r, sizeof(r));
    queue.push_back(std::move(one));
    return queue.size();
}

// on a thread of its own, as CUPTI does
void deliver(bool forced) {
    std::vector<record> ready;
    {
        std::lock_guard<std::mutex> lock(mutex);
        const auto waits = [forced](record & of) { return !forced && is_asked("late") && of.age++ < late; };
        const auto first = std::stable_partition(queue.begin(), queue.end(), waits);
        std::move(first, queue.end(), std::back_inserter(ready));
        queue.erase(first, queue.end());
    }
    if (is_asked("shuffled")) {
        static std::mt19937 random(1);
        std::shuffle(ready.begin(), ready.end(), random);
    }
    std::thread([&ready] {
        for (size_t i = 0; i < ready.size();) {
            uint8_t * buffer = nullptr;
            size_t size = 0, used = 0, most = 0;
            request(&buffer, &size, &most);
            for (size_t n = 0; n < most_in_buffer && i < ready.size() && used + ready[i].bytes.size() <= size; n++, i++) {
                memcpy(buffer + used, ready[i].bytes.data(), ready[i].bytes.size());
                used += ready[i].bytes.size();
            }
            complete(nullptr, 0, buffer, size, used);
        }
    }).join();
}

void tell(CUpti_CallbackIdResource id, standin::graph_node & node, standin::graph_node * original) {
    if (subscriber && callbacks.count(id) != 0 && !is_asked("untold")) {
        CUpti_GraphData graph = {};
        graph.node         = (CUgraphNode) &node;
        graph.originalNode = (CUgraphNode) original;
        graph.nodeType     = node.kind == standin::work::kernel ? CU_GRAPH_NODE_TYPE_KERNEL :
                             node.kind == standin::work::copy   ? CU_GRAPH_NODE_TYPE_MEMCPY : CU_GRAPH_NODE_TYPE_MEMSET;
        CUpti_ResourceData data = {};
        data.resourceDescriptor = &graph;
        subscriber(nullptr, CUPTI_CB_DOMAIN_RESOURCE, id, &data);
    }
}

template <typename R> void fill(R & r, uint32_t correlation, uint64_t node, uint64_t begin, uint64_t end) {
    r.correlationId = correlation;
    r.graphNodeId   = node;
    if (!is_asked("unstamped")) {
        r.start = on_its_clock(begin);
        r.end   = on_its_clock(end);
    }
    enqueue(r);
}

struct cupti : standin::tracer {
    cupti() { standin::tracing = this; }

    void captured(standin::graph_node & node) override { tell(CUPTI_CBID_RESOURCE_GRAPHNODE_CREATED, node, nullptr); }
    void cloned(standin::graph_node & node, standin::graph_node & original) override { tell(CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED, node, &original); }

    void called(uint32_t correlation) override {
        if (kinds.count(CUPTI_ACTIVITY_KIND_RUNTIME) == 0) {
            return;  // without records of calls, nothing refers to them
        }
        if (!external_ids.empty()) {
            CUpti_ActivityExternalCorrelation external = {};
            external.kind          = CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION;
            external.externalKind  = CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0;
            external.externalId    = external_ids.back();
            external.correlationId = correlation;
            enqueue(external);
        }
        CUpti_ActivityAPI call = {};
        call.kind          = CUPTI_ACTIVITY_KIND_RUNTIME;
        call.correlationId = correlation;
        if (enqueue(call) > most_queued) {
            deliver(false);
        }
    }

    void ran(standin::work kind, uint32_t correlation, uint64_t node, uint64_t begin, uint64_t end) override {
        if (kind == standin::work::kernel) {
            CUpti_ActivityKernel10 kernel = {};
            kernel.kind = CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL;
            fill(kernel, correlation, node, begin, end);
        } else if (kind == standin::work::copy) {
            CUpti_ActivityMemcpy6 copy = {};
            copy.kind = CUPTI_ACTIVITY_KIND_MEMCPY;
            fill(copy, correlation, node, begin, end);
        } else {
            CUpti_ActivityMemset4 set = {};
            set.kind = CUPTI_ACTIVITY_KIND_MEMSET;
            fill(set, correlation, node, begin, end);
        }
    }
} instance;

size_t size_of(CUpti_ActivityKind kind) {
    switch (kind) {
        case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL:    return sizeof(CUpti_ActivityKernel10);
        case CUPTI_ACTIVITY_KIND_MEMCPY:               return sizeof(CUpti_ActivityMemcpy6);
        case CUPTI_ACTIVITY_KIND_MEMSET:               return sizeof(CUpti_ActivityMemset4);
        case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION: return sizeof(CUpti_ActivityExternalCorrelation);
        default:                                       return sizeof(CUpti_ActivityAPI);
    }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

CUptiResult CUPTIAPI cuptiSubscribe(CUpti_SubscriberHandle * handle, CUpti_CallbackFunc callback, void *) {
    if (subscriber || is_asked("held")) {
        return CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED;
    }
    subscriber = callback;
    *handle    = (CUpti_SubscriberHandle) &instance;
    return CUPTI_SUCCESS;
}

CUptiResult CUPTIAPI cuptiUnsubscribe(CUpti_SubscriberHandle) {
    subscriber = nullptr;
    callbacks.clear();
    return CUPTI_SUCCESS;
}

CUptiResult CUPTIAPI cuptiEnableCallback(uint32_t, CUpti_SubscriberHandle, CUpti_CallbackDomain domain, CUpti_CallbackId id) {
    if (domain != CUPTI_CB_DOMAIN_RESOURCE) {
        return CUPTI_ERROR_INVALID_PARAMETER;
    }
    callbacks.insert(id);
    return CUPTI_SUCCESS;
}

CUptiResult CUPTIAPI cuptiGetResultString(CUptiResult, const char ** text) {
    *text = "CUPTI_ERROR_UNKNOWN";
    return CUPTI_SUCCESS;
}

CUptiResult CUPTIAPI cuptiGetGraphNodeId(CUgraphNode node, uint64_t * id) {
    *id = ((const standin::graph_node *) node)->id;
    return CUPTI_SUCCESS;
}

CUptiResult CUPTIAPI cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc wants, CUpti_BuffersCallbackCompleteFunc has) {
    request  = wants;
    complete = has;
    return CUPTI_SUCCESS;
}

#ifndef OLD
CUptiResult CUPTIAPI cuptiActivityRegisterTimestampCallback(CUpti_TimestampCallbackFunc function) {
    stamp = function;
    return CUPTI_SUCCESS;
}
#endif

CUptiResult CUPTIAPI cuptiActivityEnable(CUpti_ActivityKind kind) {
    std::lock_guard<std::mutex> lock(mutex);
    kinds.insert(kind);
    return CUPTI_SUCCESS;
}

CUptiResult CUPTIAPI cuptiActivityDisable(CUpti_ActivityKind kind) {
    std::lock_guard<std::mutex> lock(mutex);
    kinds.erase(kind);
    return CUPTI_SUCCESS;
}

CUptiResult CUPTIAPI cuptiActivityFlushAll(uint32_t flag) {
    deliver((flag & CUPTI_ACTIVITY_FLAG_FLUSH_FORCED) != 0);
    return CUPTI_SUCCESS;
}

CUptiResult CUPTIAPI cuptiActivityGetNextRecord(uint8_t * buffer, size_t size, CUpti_Activity ** record) {
    uint8_t * const next = *record ? (uint8_t *) *record + size_of((*record)->kind) : buffer;
    if (next >= buffer + size) {
        return CUPTI_ERROR_MAX_LIMIT_REACHED;
    }
    *record = (CUpti_Activity *) next;
    return CUPTI_SUCCESS;
}

CUptiResult CUPTIAPI cuptiActivityGetNumDroppedRecords(CUcontext, uint32_t, size_t * dropped) {
    std::lock_guard<std::mutex> lock(mutex);
    *dropped  = n_dropped;
    n_dropped = 0;
    return CUPTI_SUCCESS;
}

CUptiResult CUPTIAPI cuptiActivityPushExternalCorrelationId(CUpti_ExternalCorrelationKind kind, uint64_t id) {
    if (kind != CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0) {
        return CUPTI_ERROR_INVALID_PARAMETER;
    }
    external_ids.push_back(id);
    return CUPTI_SUCCESS;
}

CUptiResult CUPTIAPI cuptiActivityPopExternalCorrelationId(CUpti_ExternalCorrelationKind, uint64_t * last) {
    if (external_ids.empty()) {
        return CUPTI_ERROR_QUEUE_EMPTY;
    }
    *last = external_ids.back();
    external_ids.pop_back();
    return CUPTI_SUCCESS;
}

}  // extern "C"
