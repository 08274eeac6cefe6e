// ggml-cuda-instrumentation.cu - see the header
//
// CUPTI's records name what they belong to in two ways. An id that a thread pushes (external correlation) comes back with
// each call that this thread makes meanwhile, and with the call come its kernels. A kernel of a CUDA graph also names its
// node; CUPTI tells of each node while it is captured, and again while the graph is instantiated. Records come in any order,
// on CUPTI's own thread. A run ends once its backend has been waited for and its records are there.
//
// libcupti is opened when the first run is recorded, and left when the session ends: only one profiler may use it.

#include "ggml-cuda-instrumentation.h"

#include "ggml-instrumentation.h"

#include <atomic>

#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA) && __has_include(<dlfcn.h>) && __has_include(<cupti.h>)
#    include <cupti.h>
#    if CUDA_VERSION >= 12000  // its library has the name by which it is opened here
#        define GGML_CUDA_INSTR_HAS_CUPTI
#    endif
#endif

#ifdef GGML_CUDA_INSTR_HAS_CUPTI

#include <algorithm>
#include <cstdlib>
#include <dlfcn.h>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unistd.h>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

#define FUNCTIONS(F)                                                                                            \
    F(Subscribe) F(Unsubscribe) F(EnableCallback) F(GetResultString) F(GetGraphNodeId)                          \
    F(ActivityRegisterCallbacks) F(ActivityRegisterTimestampCallback) F(ActivityEnable) F(ActivityDisable)      \
    F(ActivityFlushAll) F(ActivityGetNextRecord) F(ActivityGetNumDroppedRecords)                                \
    F(ActivityPushExternalCorrelationId) F(ActivityPopExternalCorrelationId)

struct cupti_functions {
#define MEMBER(name) decltype(&cupti##name) name;
    FUNCTIONS(MEMBER)
#undef MEMBER
};

// what a device does, and the calls that make it do so
constexpr CUpti_ActivityKind kinds[] = {
    CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMCPY2, CUPTI_ACTIVITY_KIND_MEMSET,
    CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION, CUPTI_ACTIVITY_KIND_RUNTIME, CUPTI_ACTIVITY_KIND_DRIVER,
};
constexpr uint32_t callbacks[] = { CUPTI_CBID_RESOURCE_GRAPHNODE_CREATED, CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED };

constexpr auto     external_kind   = CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0;
constexpr uint32_t whole_graph     = UINT32_MAX;  // in place of the kernel in an external id
constexpr size_t   buffer_size     = 1 << 20;
constexpr size_t   most_waiting    = 4096;        // runs; more are not recorded
constexpr size_t   most_early      = 1 << 16;     // records whose call is not known yet; most are of no run
constexpr int      patience        = 10;          // so often records are collected before a run without some of them ends
constexpr uint64_t least_deviation = 1000;        // nanoseconds; CUPTI does not say how well it joins the clocks

// a kernel here is what computes a node, or several: one or more kernels, copies and memsets of the device
struct interval {
    uint64_t begin = 0;
    uint64_t end   = 0;  // 0: nothing is known
};

struct kernel_times : interval {
    bool is_expected = false;  // it has calls, or nodes of the CUDA graph
};

struct captured_graph {
    std::vector<uint64_t> kernels;                     // the nodes of each (ggml_instr_nodes)
    std::unordered_map<uint64_t, uint32_t> kernel_of;  // the ids of the nodes of the CUDA graph and of its executable
};

struct cuda_run {
    ggml_instr_device_run started = {};
    ggml_backend_t backend;
    std::string    name;
    const char *   description;
    uint64_t       number = 0;
    bool           captures = false;
    bool           captured = false;        // nodes that are created from now on are copies
    std::shared_ptr<captured_graph> graph;  // null: it is launched directly
    std::vector<uint64_t> kernels;          // belongs to the thread of the run until all was submitted

    // with the mutex
    std::vector<kernel_times> times;
    bool     submitted  = false;
    bool     lost       = false;  // some of its records never come
    uint64_t settled_at = 0;      // when it was computed, at the latest; 0: nobody has waited for it
    int      collected  = 0;

    bool is_whole() const {
        return std::all_of(times.begin(), times.begin() + (ptrdiff_t) kernels.size(), [](const kernel_times & of) { return of.end != 0; });
    }
    bool misses_some() const {
        return std::any_of(times.begin(), times.end(), [](const kernel_times & of) { return of.is_expected && of.end == 0; });
    }
};

struct activity {
    uint64_t graph_node;  // 0: of no graph
    interval time;
};

struct global_state {
    // is held while CUPTI is opened, asked for records, or left; guards what follows
    std::mutex using_cupti;
    cupti_functions cupti = {};
    CUpti_SubscriberHandle subscriber = nullptr;
    std::map<std::string, ggml_instr_device> devices;

    std::atomic<bool> open   { false };
    std::atomic<bool> failed { false };  // in this session
    pid_t process = 0;

    // guards what follows; nobody calls CUPTI with it
    std::mutex mutex;
    uint64_t n_runs = 0;
    std::map<uint64_t, std::shared_ptr<cuda_run>> runs;  // by number
    std::unordered_map<ggml_backend_t, uint64_t>  latest;  // the last run of a backend of which there are records
    std::unordered_map<const void *, std::shared_ptr<captured_graph>> graphs;
    std::unordered_map<uint32_t, uint64_t> calls;         // correlation -> external id
    std::unordered_multimap<uint32_t, activity> early;    // by correlation
};

}  // namespace

// never destroyed: CUPTI's thread may still be there when the process ends
static global_state & global() {
    static auto * const state = new global_state;
    return *state;
}

static thread_local std::shared_ptr<cuda_run> current;
static thread_local bool has_pushed = false;

//
// what CUPTI calls
//

// a node of a CUDA graph is captured, or copied into the executable graph
static void CUPTIAPI on_graph_node(void *, CUpti_CallbackDomain, CUpti_CallbackId id, const void * data) {
    if (!current || !current->captures) {
        return;
    }
    const auto & of = *(const CUpti_GraphData *) ((const CUpti_ResourceData *) data)->resourceDescriptor;
    auto & graph = *current->graph;
    uint64_t node, original;
    if (global().cupti.GetGraphNodeId(of.node, &node) != CUPTI_SUCCESS) {
        return;
    }
    if (id == CUPTI_CBID_RESOURCE_GRAPHNODE_CREATED) {
        if (!current->captured && !graph.kernels.empty()) {
            graph.kernel_of[node] = (uint32_t) graph.kernels.size() - 1;
        }
    } else if (id == CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED && global().cupti.GetGraphNodeId(of.originalNode, &original) == CUPTI_SUCCESS) {
        const auto known = graph.kernel_of.find(original);
        if (known != graph.kernel_of.end()) {
            graph.kernel_of[node] = known->second;
        }
    }
}

static void CUPTIAPI on_buffer_wanted(uint8_t ** buffer, size_t * size, size_t * most_records) {
    *buffer       = (uint8_t *) aligned_alloc(ACTIVITY_RECORD_ALIGNMENT, buffer_size);
    *size         = *buffer ? buffer_size : 0;
    *most_records = 0;
}

// with the mutex
static void add_activity(uint64_t external_id, const activity & of) {
    auto & g = global();
    const auto found = g.runs.find(external_id >> 32);
    if (found == g.runs.end()) {
        return;
    }
    cuda_run & run = *found->second;
    auto kernel = (uint32_t) external_id;
    if (kernel == whole_graph) {
        const auto node = run.graph->kernel_of.find(of.graph_node);
        if (node == run.graph->kernel_of.end()) {
            run.lost = true;  // of what it was is not known
            return;
        }
        kernel = node->second;
    }
    interval & time = run.times[kernel];
    if (of.time.end == 0) {
        run.lost = true;  // there was no memory for its stamps, or it still runs
    } else if (time.end == 0) {
        time = of.time;
    } else {
        time = { std::min(time.begin, of.time.begin), std::max(time.end, of.time.end) };
    }
    auto & latest = g.latest[run.backend];
    latest = std::max(latest, run.number);
}

template <typename R> static void add_record(const CUpti_Activity * record) {
    auto & g = global();
    const auto & r = *(const R *) record;
    const activity of = { r.graphNodeId, { r.start, r.end } };
    const auto call = g.calls.find(r.correlationId);
    if (call != g.calls.end()) {
        add_activity(call->second, of);
    } else {
        if (g.early.size() == most_early) {
            g.early.clear();
        }
        g.early.emplace(r.correlationId, of);
    }
}

static void CUPTIAPI on_buffer(CUcontext, uint32_t, uint8_t * buffer, size_t, size_t size) {
    auto & g = global();
    {
        std::lock_guard<std::mutex> lock(g.mutex);
        CUpti_Activity * record = nullptr;
        while (size > 0 && g.cupti.ActivityGetNextRecord(buffer, size, &record) == CUPTI_SUCCESS) {
            // later versions of these structs have more at their end
            switch (record->kind) {
                case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: add_record<CUpti_ActivityKernel5>(record);     break;
                case CUPTI_ACTIVITY_KIND_MEMCPY:            add_record<CUpti_ActivityMemcpy4>(record);     break;
                case CUPTI_ACTIVITY_KIND_MEMCPY2:           add_record<CUpti_ActivityMemcpyPtoP3>(record); break;
                case CUPTI_ACTIVITY_KIND_MEMSET:            add_record<CUpti_ActivityMemset3>(record);     break;
                case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION: {
                    const auto & of = *(const CUpti_ActivityExternalCorrelation *) record;
                    if (of.externalKind != external_kind) {
                        break;
                    }
                    g.calls[of.correlationId] = of.externalId;
                    const auto run = g.runs.find(of.externalId >> 32);
                    if (run != g.runs.end() && (uint32_t) of.externalId != whole_graph) {
                        run->second->times[(uint32_t) of.externalId].is_expected = true;
                    }
                    const auto came = g.early.equal_range(of.correlationId);
                    std::for_each(came.first, came.second, [&of](const auto & one) { add_activity(of.externalId, one.second); });
                    g.early.erase(came.first, came.second);
                } break;
                default:
                    break;
            }
        }
    }
    free(buffer);
}

//
// the records of a session
//

static void leave() {
    auto & g = global();
    g.open = false;
    for (const auto kind : kinds) {
        g.cupti.ActivityDisable(kind);
    }
    g.cupti.Unsubscribe(g.subscriber);
    std::lock_guard<std::mutex> lock(g.mutex);
    g.graphs.clear();  // nobody sees what is captured from now on
    g.latest.clear();
    g.calls.clear();
    g.early.clear();
}

static void end_run(cuda_run & run) {
    std::vector<ggml_instr_device_op> ops;
    const auto first = std::find_if(run.times.begin(), run.times.end(), [](const interval & of) { return of.end != 0; });
    if (!run.lost && first != run.times.end()) {
        uint64_t at = first->begin;
        for (size_t i = 0; i < run.kernels.size(); i++) {
            // for some nodes the backend calls nothing
            const interval time = run.times[i].end != 0 ? run.times[i] : interval { at, at };
            ops.push_back({ run.kernels[i], time.begin, time.end });
            at = std::max(at, time.end);
        }
        const auto known = global().devices.emplace(run.name, ggml_instr_device {});
        auto & device = known.first->second;
        device.name        = known.first->first.c_str();
        device.description = run.description;
        device.clock       = GGML_INSTR_CLOCK_CUPTI;
        device.tick        = 1;
        device.mask        = UINT64_MAX;
        // it ran between its submission and the end of the wait, so by as much the clocks do not agree
        uint64_t deviation = least_deviation;
        deviation = std::max(deviation, run.started.begin > first->begin ? run.started.begin - first->begin : 0);
        deviation = std::max(deviation, at > run.settled_at ? at - run.settled_at : 0);
        const uint64_t now = ggml_instr_clock_ns();
        ggml_instr_device_calibrate(&device, now, now, deviation);
        ggml_instr_device_end(&run.started, &device, ops.data(), (int32_t) ops.size());
    } else {
        ggml_instr_device_end(&run.started, nullptr, nullptr, 0);
    }
}

static void collect(bool is_last) {
    auto & g = global();
    if (is_last) {
        g.failed = false;
    }
    if (!g.open || g.process != getpid()) {
        return;
    }
    std::lock_guard<std::mutex> exclusive(g.using_cupti);
    std::vector<std::shared_ptr<cuda_run>> settled;
    std::unique_lock<std::mutex> lock(g.mutex);
    const uint64_t n_runs = g.n_runs;
    for (const auto & entry : g.runs) {
        if (entry.second->settled_at != 0) {
            settled.push_back(entry.second);
        }
    }
    const bool was_idle = settled.size() == g.runs.size();
    lock.unlock();
    size_t dropped = 0;
    if (is_last || !settled.empty()) {
        g.cupti.ActivityFlushAll(is_last ? CUPTI_ACTIVITY_FLAG_FLUSH_FORCED : 0);
        g.cupti.ActivityGetNumDroppedRecords(nullptr, 0, &dropped);
    }
    lock.lock();
    const bool is_idle = was_idle && g.n_runs == n_runs;
    std::vector<std::shared_ptr<cuda_run>> ended;
    for (const auto & run : settled) {
        // CUPTI keeps a buffer until all of its records are complete, unless forced. So those of a run may have to wait for
        // what was submitted after it.
        const bool has_all = run->is_whole() && (is_idle || g.latest[run->backend] > run->number);
        if (has_all || is_last || ++run->collected == patience) {
            run->lost = run->lost || run->misses_some();
            ended.push_back(run);
            g.runs.erase(run->number);
        }
    }
    if (dropped > 0) {  // they may have been of any run
        const auto lose = [](const std::shared_ptr<cuda_run> & run) { run->lost = true; };
        std::for_each(ended.begin(), ended.end(), lose);
        std::for_each(g.runs.begin(), g.runs.end(), [lose](const auto & entry) { lose(entry.second); });
    }
    if (is_last) {  // the session does not wait for these
        for (auto & entry : g.runs) {
            entry.second->lost = true;
            ended.push_back(std::move(entry.second));
        }
        g.runs.clear();
    }
    for (auto call = g.calls.begin(); call != g.calls.end();) {
        call = g.runs.count(call->second >> 32) ? std::next(call) : g.calls.erase(call);
    }
    lock.unlock();
    for (const auto & run : ended) {
        end_run(*run);
    }
    if (is_last) {
        leave();
    }
}

//
// libcupti
//

// where the CUDA runtime of this process lies, or beside it, as the toolkit has it
static std::vector<std::string> names_of_library() {
    const std::string name = "libcupti.so." + std::to_string(CUDA_VERSION / 1000);
    std::vector<std::string> names = { name };
    Dl_info runtime;
    void * const function = dlsym(RTLD_DEFAULT, "cudaRuntimeGetVersion");
    if (function && dladdr(function, &runtime) != 0 && runtime.dli_fname) {
        const std::string path   = runtime.dli_fname;
        const std::string folder = path.substr(0, path.rfind('/') + 1);
        names.push_back(folder + name);
        names.push_back(folder + "../extras/CUPTI/lib64/" + name);
    }
    return names;
}

// opens libcupti and begins to record; returns what is wrong, or nothing
static std::string try_open() {
    auto & g = global();
    void * library = nullptr;
    std::string problem;
    for (const auto & name : names_of_library()) {
        library = library ? library : dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!library && problem.empty()) {
            problem = dlerror();
        }
    }
    if (!library) {
        return problem + "; install CUPTI, or add its folder to LD_LIBRARY_PATH";
    }
#define RESOLVE(name)                                                          \
    g.cupti.name = (decltype(g.cupti.name)) dlsym(library, "cupti" #name);     \
    if (!g.cupti.name) {                                                       \
        return "this version of CUPTI is too old: it has no cupti" #name;      \
    }
    FUNCTIONS(RESOLVE)
#undef RESOLVE
    CUptiResult result = g.cupti.Subscribe(&g.subscriber, on_graph_node, nullptr);
    if (result == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED) {
        return "another profiler uses CUPTI";
    }
    const bool is_subscribed = result == CUPTI_SUCCESS;
    if (is_subscribed) {
        result = g.cupti.ActivityRegisterTimestampCallback(ggml_instr_clock_ns);
    }
    if (result == CUPTI_SUCCESS) {
        result = g.cupti.ActivityRegisterCallbacks(on_buffer_wanted, on_buffer);
    }
    for (const auto callback : callbacks) {
        result = result != CUPTI_SUCCESS ? result : g.cupti.EnableCallback(1, g.subscriber, CUPTI_CB_DOMAIN_RESOURCE, callback);
    }
    for (const auto kind : kinds) {
        result = result != CUPTI_SUCCESS ? result : g.cupti.ActivityEnable(kind);
    }
    if (result != CUPTI_SUCCESS) {
        const char * text = nullptr;
        g.cupti.GetResultString(result, &text);
        if (is_subscribed) {
            leave();
        }
        return "CUPTI cannot be used: " + (text && *text ? std::string(text) : "error " + std::to_string(result));
    }
    // what the process registers later ends earlier: this ends before CUPTI
    static const struct at_exit {
        ~at_exit() {
            ggml_instr_set_collector(nullptr);
            collect(true);
        }
    } instance;
    return "";
}

static bool is_open(const ggml_instr_recorder * recorder) {
    auto & g = global();
    if (!g.open) {
        std::lock_guard<std::mutex> exclusive(g.using_cupti);
        if (!g.open && !g.failed) {
            ggml_instr_set_collector(collect);
            const std::string problem = try_open();
            g.failed  = !problem.empty();
            g.process = getpid();
            g.open    = !g.failed;
            if (g.failed) {
                recorder->tell(("the kernels of CUDA are not timed: " + problem).c_str());
            }
        }
    }
    return g.open && g.process == getpid();
}

static void pop() {
    if (std::exchange(has_pushed, false)) {
        uint64_t last;
        global().cupti.ActivityPopExternalCorrelationId(external_kind, &last);
    }
}

static void push(uint32_t kernel) {
    pop();
    has_pushed = global().cupti.ActivityPushExternalCorrelationId(external_kind, current->number << 32 | kernel) == CUPTI_SUCCESS;
}

//
// what the backend calls
//

void ggml_cuda_instr_begin(ggml_backend_t backend, int n_nodes, const void * key, bool use_graph, bool * captures) {
    auto & g = global();
    current.reset();
    const auto * const sink = ggml_instr_get_sink();
    const bool records = sink && sink->recorder && is_open(sink->recorder);
    if (!records && (!g.open || g.process != getpid())) {
        return;
    }
    std::unique_lock<std::mutex> lock(g.mutex);
    auto run = std::make_shared<cuda_run>();
    if (!records || g.runs.size() >= most_waiting || !ggml_instr_device_begin(&run->started)) {
        g.graphs.erase(key);  // it may be captured now
        return;
    }
    run->backend     = backend;
    run->name        = ggml_backend_name(backend);
    run->description = ggml_backend_dev_description(ggml_backend_get_device(backend));
    run->times.resize((size_t) n_nodes);
    if (use_graph) {
        auto & graph = g.graphs[key];
        *captures = *captures || !graph;
        if (*captures) {
            graph = std::make_shared<captured_graph>();
        }
        run->captures = *captures;
        run->graph    = graph;
    }
    run->number = ++g.n_runs;
    g.runs.emplace(run->number, run);
    current = std::move(run);
}

void ggml_cuda_instr_node(int node) {
    if (!current) {
        return;
    }
    auto & kernels = current->captures ? current->graph->kernels : current->kernels;
    kernels.push_back(ggml_instr_nodes(node, 1));
    if (!current->captures) {
        push((uint32_t) kernels.size() - 1);
    }
}

void ggml_cuda_instr_fused(int n) {
    if (current) {
        (current->captures ? current->graph->kernels : current->kernels).back() += (uint32_t) n;
    }
}

void ggml_cuda_instr_reordered(void) {
    if (current) {
        std::lock_guard<std::mutex> lock(global().mutex);
        current->lost = true;
    }
}

bool ggml_cuda_instr_captured(void) {
    if (current) {
        current->captured = true;
    }
    return current != nullptr;
}

void ggml_cuda_instr_launch(void) {
    if (current) {
        push(whole_graph);
        std::lock_guard<std::mutex> lock(global().mutex);
        current->kernels = current->graph->kernels;
        for (const auto & node : current->graph->kernel_of) {
            current->times[node.second].is_expected = true;
        }
    }
}

void ggml_cuda_instr_end(void) {
    if (current) {
        pop();
        std::lock_guard<std::mutex> lock(global().mutex);
        current->submitted = true;
        current.reset();
    }
}

void ggml_cuda_instr_synchronized(ggml_backend_t backend) {
    auto & g = global();
    if (!g.open || g.process != getpid()) {
        return;
    }
    const uint64_t now = ggml_instr_clock_ns();
    std::lock_guard<std::mutex> lock(g.mutex);
    for (auto & entry : g.runs) {
        auto & run = *entry.second;
        if (run.backend == backend && run.submitted && run.settled_at == 0) {
            run.settled_at = now;
        }
    }
}

#else

void ggml_cuda_instr_begin(ggml_backend_t, int, const void *, bool, bool *) {
    const auto * const sink = ggml_instr_get_sink();
    static std::atomic_flag was_told = ATOMIC_FLAG_INIT;
    if (sink && sink->recorder && !was_told.test_and_set()) {
        sink->recorder->tell("the kernels of this device are not timed: it was built without CUPTI");
    }
}

void ggml_cuda_instr_node(int) {}
void ggml_cuda_instr_fused(int) {}
void ggml_cuda_instr_reordered(void) {}
bool ggml_cuda_instr_captured(void) { return false; }
void ggml_cuda_instr_launch(void) {}
void ggml_cuda_instr_end(void) {}
void ggml_cuda_instr_synchronized(ggml_backend_t) {}

#endif
