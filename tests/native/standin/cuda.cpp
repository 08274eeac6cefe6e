// cuda.cpp - a stand-in for the CUDA backend: it computes with the CPU backend, and calls the recorder where
// patches/0018 does. STANDIN_CUDA: `graphs` captures and launches graphs, as llama.cpp does after a warm-up, `two`
// has two devices, and the driver of a `large` one takes 3 GiB when it starts.

#include "driver.h"

#include "ggml-backend-impl.h"
#include "ggml-cpu.h"
#include "ggml-cuda/ggml-cuda-instrumentation.h"
#include "ggml-impl.h"
#include "ggml-instrumentation.h"

#include <sys/mman.h>

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace {

using standin::work;

struct device_graph {
    uint64_t uid = 0;
    bool     warm = false;
    bool     has_instance = false;
    std::vector<ggml_tensor> properties;
    standin::graph graph, instance;
};

struct context {
    std::string    name;
    ggml_backend_t cpu = ggml_backend_cpu_init();
    std::vector<uint8_t> memory = std::vector<uint8_t>(1 << 16);
    std::map<const void *, device_graph> graphs;

    ~context() { ggml_backend_free(cpu); }

    // these nodes, which are no part of what the calling thread records
    void compute(const std::vector<ggml_tensor *> & nodes) {
        ggml_context * const made = ggml_init({ memory.size(), memory.data(), true });
        ggml_cgraph * const graph = ggml_new_graph_custom(made, nodes.size(), false);
        for (ggml_tensor * const node : nodes) {
            ggml_graph_add_node(graph, node);
        }
        ggml_instr_sink * const sink = ggml_instr_get_sink();
        ggml_instr_set_sink(nullptr);
        ggml_backend_graph_compute(cpu, graph);
        ggml_instr_set_sink(sink);
        ggml_free(made);
    }

    // by one kernel or several
    void launch(const std::vector<ggml_tensor *> & nodes) {
        const auto compute_nodes = [this, nodes] { compute(nodes); };
        const ggml_op     op = nodes[0]->op;
        const std::string of = std::to_string((uintptr_t) nodes[0]);
        if (op == GGML_OP_MUL_MAT) {
            standin::launch(work::set, of, [] {});
            standin::launch(work::kernel, of, compute_nodes);
            standin::launch(work::kernel, of, [] {});
        } else {
            standin::launch(op == GGML_OP_CPY || op == GGML_OP_CONT ? work::copy : work::kernel, of, compute_nodes);
        }
    }
};

bool has_changed(device_graph & known, const ggml_cgraph * graph) {
    if (graph->uid != 0 && graph->uid == known.uid) {
        return false;
    }
    known.uid = graph->uid;
    std::vector<ggml_tensor> properties;
    for (int i = 0; i < graph->n_nodes; i++) {
        properties.push_back(*graph->nodes[i]);
    }
    const bool same = properties.size() == known.properties.size() &&
                      memcmp(properties.data(), known.properties.data(), properties.size() * sizeof(ggml_tensor)) == 0;
    known.properties = std::move(properties);
    return !same;
}

ggml_status graph_compute(ggml_backend_t backend, ggml_cgraph * cgraph) {
    auto & ctx = *(context *) backend->context;
    const void * const key = cgraph->nodes[0];
    auto & graph = ctx.graphs[key];
    bool use_graph = false;
    bool captures  = false;
    if (standin::is_asked("graphs")) {
        const bool changed = has_changed(graph, cgraph);
        use_graph  = !changed;
        captures   = use_graph && (!graph.warm || !graph.has_instance);
        graph.warm = !changed;
    }
    ggml_cuda_instr_begin(backend, cgraph->n_nodes, key, use_graph, &captures);
    if (use_graph && captures) {
        standin::begin_capture();
    }
    for (int i = 0; (!use_graph || captures) && i < cgraph->n_nodes; i++) {
        ggml_tensor * const node = cgraph->nodes[i];
        if (ggml_is_empty(node) || !ggml_instr_node_runs(node)) {
            continue;
        }
        ggml_cuda_instr_node(i);
        ggml_tensor * const next = i + 1 < cgraph->n_nodes ? cgraph->nodes[i + 1] : nullptr;
        if (node->op == GGML_OP_RMS_NORM && next && next->op == GGML_OP_MUL && next->src[0] == node) {
            ctx.launch({ node, next });
            ggml_cuda_instr_fused(1);
            i++;
        } else {
            ctx.launch({ node });
        }
    }
    if (use_graph && captures) {
        graph.graph = standin::end_capture();
    }
    if (use_graph) {
        const bool is_new_instance = captures && ggml_cuda_instr_captured();
        if (is_new_instance || !graph.has_instance) {
            graph.instance     = standin::instantiate(graph.graph);
            graph.has_instance = true;
        }
        if (captures && !is_new_instance) {
            standin::update(graph.instance, graph.graph);
        }
        ggml_cuda_instr_launch();
        standin::launch(graph.instance);
    }
    ggml_cuda_instr_end();
    return GGML_STATUS_SUCCESS;
}

void get_tensor(ggml_backend_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    memcpy(data, (const char *) tensor->data + offset, size);
}

const char * backend_name(ggml_backend_t backend) { return ((context *) backend->context)->name.c_str(); }

void backend_free(ggml_backend_t backend) {
    delete (context *) backend->context;
    delete backend;
}

// memory that the CPU backend does not use by itself

const char * buffer_name(ggml_backend_buffer_type_t type) { return (const char *) type->context; }

ggml_backend_buffer_t allocate(ggml_backend_buffer_type_t type, size_t size) {
    ggml_backend_buffer_t const buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    buffer->buft = type;
    return buffer;
}

size_t alignment(ggml_backend_buffer_type_t) { return ggml_backend_buft_get_alignment(ggml_backend_cpu_buffer_type()); }

// devices

const char * const names[] = { "CUDA0", "CUDA1" };

ggml_backend_dev_t device(ggml_backend_reg_t reg, size_t index);

const char * device_name(ggml_backend_dev_t dev) { return (const char *) dev->context; }
const char * description(ggml_backend_dev_t)     { return "stand-in for a CUDA device"; }
void memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    static void * const driver = standin::is_asked("large") ? mmap(nullptr, (size_t) 3 << 30, PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) : nullptr;
    if (driver == MAP_FAILED) {
        GGML_ABORT("out of memory");
    }
    *free = *total = (size_t) 8 << 30;
}
enum ggml_backend_dev_type type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }

void properties(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    props->name        = device_name(dev);
    props->description = description(dev);
    props->type        = type(dev);
    memory(dev, &props->memory_free, &props->memory_total);
    props->caps.async  = true;
}

ggml_backend_t init(ggml_backend_dev_t dev, const char *) {
    static ggml_guid guid = { 0x57, 0xa9, 0xd1, 0x4e };
    ggml_backend_i iface = {};
    iface.get_name         = backend_name;
    iface.free             = backend_free;
    iface.get_tensor_async = get_tensor;
    iface.synchronize      = ggml_cuda_instr_synchronized;
    iface.graph_compute    = graph_compute;
    auto * const ctx = new context;
    ctx->name = device_name(dev);
    ggml_backend_cpu_set_n_threads(ctx->cpu, 1);
    return new ggml_backend { &guid, iface, dev, ctx };
}

ggml_backend_buffer_type_t buffer_type(ggml_backend_dev_t dev) {
    static ggml_backend_buffer_type types[2];
    auto & type = types[strcmp(device_name(dev), names[0]) != 0];
    type.iface.get_name      = buffer_name;
    type.iface.alloc_buffer  = allocate;
    type.iface.get_alignment = alignment;
    type.device  = dev;
    type.context = dev->context;
    return &type;
}

bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    return ggml_backend_dev_supports_op(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), op);
}

bool supports_buffer(ggml_backend_dev_t dev, ggml_backend_buffer_type_t type) { return type == buffer_type(dev); }

const char * reg_name(ggml_backend_reg_t) { return "CUDA"; }
size_t n_devices(ggml_backend_reg_t) { return standin::is_asked("two") ? 2 : 1; }

ggml_backend_dev_t device(ggml_backend_reg_t reg, size_t index) {
    static ggml_backend_device devices[2];
    auto & dev = devices[index];
    dev.iface.get_name        = device_name;
    dev.iface.get_description = description;
    dev.iface.get_memory      = memory;
    dev.iface.get_type        = type;
    dev.iface.get_props       = properties;
    dev.iface.init_backend    = init;
    dev.iface.get_buffer_type = buffer_type;
    dev.iface.supports_op     = supports_op;
    dev.iface.supports_buft   = supports_buffer;
    dev.reg     = reg;
    dev.context = (void *) names[index];
    return &dev;
}

ggml_backend_reg_t reg() {
    static ggml_backend_reg made;
    made.api_version = GGML_BACKEND_API_VERSION;
    made.iface.get_name         = reg_name;
    made.iface.get_device_count = n_devices;
    made.iface.get_device       = device;
    return &made;
}

}  // namespace

GGML_BACKEND_DL_IMPL(reg)
