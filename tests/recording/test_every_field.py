"""Every field of the log has a test that compares it with the source that knows it: the kernel,
ggml, llama.cpp, gguf-py, or the program that was recorded."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import msgspec

from llamacpp_instr.log import schema
from tests.kit.native_kit import ROOT

CHECKS = {
    "batches": {
        "a_step_is_the_batch_that_was_given": """step_begin: t step ctx kind phase n_tokens
            n_outputs n_seqs pos thread seq seq_pos; step_end: t step status n_ubatch n_reused""",
        "computes_are_the_ubatches": "compute: compute ctx step source reused n_tokens n_threads",
        "the_cache_is_what_was_put_into_it": "kv: ctx op used size bytes seq seq_dst p0 p1 arg",
        "a_ubatch_takes_the_cells_that_are_free": "kv: t step n_kv cells",
        "the_caches_of_a_context_are_told_apart": "kv: cache kind",
        "a_step_that_fails_has_its_status": "step_end: status; compute: status",
        "a_token_is_what_the_sampler_gave": "token: t ctx step seq index id text hex p dur",
    },
    "sequences": {
        "a_step_names_its_sequences_and_a_token_its_own": "step_begin: seq_tokens seq_outputs",
        "a_mark_names_its_sequence_at_its_end": "mark: seq",
    },
    "times": {
        "each_phase_has_its_own_time": """step_end: prepare readback recorder;
            compute: t apply build alloc inputs start dur""",
        "kernels_run_inside_of_the_compute": "ops: t compute gap dur wait tail thread; layers: t",
        "the_totals_are_the_sums": "session_end: decode_ns overhead_ns",
        "splits_are_the_backends_of_their_nodes": """splits: t compute split gap dur asynchronous;
            graph.splits: start end backend""",
        "a_wait_for_a_device_lies_inside_of_the_callers": "sync: t ctx dur",
    },
    "devices_vulkan": {
        "every_node_is_timed_once_and_no_logit_changes": """ops: device split;
            device: t name description clock tick uncertainty""",
        "the_memory_of_a_device_is_what_llama_cpp_prints": """memory: devices;
            memory.buffers: device; memory.devices: device total free""",
    },
    "rpc": {
        "both_ends_have_the_same_commands": """connection: t connection side local peer;
            rpc: t connection first command request reply gap queue send wait receive;
            rpc: work answer; connection_end: t connection reason commands""",
        "every_op_is_in_one_log_once": "connection: endpoint; rpc: compute",
        "a_command_names_what_queued_it": "rpc: step split",
    },
    "rpc_merge": {
        "a_clock_an_hour_ahead_is_known_within_the_stated_bound": """connection: id host offset
            drift uncertainty; connection.host: cpu features cores memory os""",
        "the_commands_have_the_times_of_both_ends": "rpc: arrive start run",
    },
    "adapters": {
        "the_adapters_of_a_context_are_those_that_were_set": """adapters: t ctx adapters;
            adapters.adapters: file name rank n_weights bytes alpha scale""",
    },
    "accounting": {
        "layers_are_the_sums_of_their_ops": "layers: compute layer gap dur",
    },
    "graphs": {
        "a_graph_is_ggmls": """graph: uid n_nodes n_exec splits buffers leafs nodes like leafs_at
            changes; plan: like; graph.changes: op type ne bytes params nb;
            graph.changes.op: values at; graph.changes.type: values at;
            graph.changes.ne: values at; graph.changes.bytes: values at;
            graph.changes.params: values at; graph.changes.nb: values at;
            graph.leafs: name type ne bytes buffer tensor;
            graph.nodes: name op type ne bytes src buffer params exec nb""",
        "the_layer_of_a_node_is_that_of_its_name": "graph.nodes: layer",
        "where_a_graph_comes_from": "graph: t graph ctx source why; compute: graph",
        "a_plan_has_every_node_that_runs_once": "plan: t plan graph node n; ops: plan",
    },
    "every_architecture": {
        "experts_are_those_that_an_eval_callback_finds": "experts: t compute node expert uses",
    },
    "llama_server": {
        "nothing_appears_that_no_user_caused": "model: dry",
    },
    "llama_server_reuse": {
        "drafts_belong_to_requests_and_are_those_of_the_server": "context: target",
    },
    "machine": {
        "the_machine_is_what_the_kernel_counts": "machine: t dur cpu delay nvcsw nivcsw",
        "load_and_times_are_those_of_the_kernels_files": "machine: load running busy steal",
        "page_faults_are_what_the_kernel_counts": "step_end: minflt majflt",
    },
    "read_values": {
        "the_values_of_nodes_are_numpys": """tensor_stats: t compute graph node name layer n min max
            mean std nan inf zero hist""",
    },
    "facts": {
        "the_first_and_the_last_line": """session_start: t schema id time wall;
            session_end: t reason events bytes dropped_ops""",
        "the_clock_is_the_counter_if_the_kernel_trusts_it": "session_start: clock tick",
        "the_producer_the_host_and_the_process": """session_start: producer host process;
            session_start.producer: llama_cpp commit patches abi;
            session_start.host: cpu features cores memory os; session_start.process: pid""",
        "what_disturbs_the_times_is_recorded": "session_start: level perturbed",
        "a_model_is_what_llama_cpp_says": """model: t model path arch name description params bytes
            ftype dur n_tensors""",
        "hyper_parameters_are_those_of_the_file": "model: hparams",
        "weights_are_those_of_the_file": "tensor: t model tensor name type ne bytes buffer layer",
        "contexts_are_what_llama_cpp_says": """context: t ctx model n_ctx n_ctx_seq n_batch n_ubatch
            n_seq_max n_threads n_threads_batch type_k type_v flash_attn causal embeddings
            kv_unified offload_kqv backends""",
        "the_memory_of_contexts_is_what_llama_cpp_prints": """memory: t ctx buffers rss;
            memory.buffers: buffer model context compute""",
        "messages_are_llama_cpps": "message: t level text",
        "marks_name_their_thread_and_notes_their_time": "mark: t thread; note: t",
    },
    "text": {
        "every_argument_of_exec_leaves_a_log_that_can_be_read": "session_start.process: argv",
    },
    "recording": {
        "any_use_of_llama_cpp_is_recorded": "session_start: args",
        "marks_and_notes": "mark: mark name phase; note: name data",
    },
    "rotation": {
        "a_log_rotates_without_a_lost_event": "session_start: part",
    },
    "faults": {
        "a_full_disk_is_reported_once_and_inference_goes_on": "session_end: dropped",
    },
}  # fmt: skip
"""the fields that a test checks, by the file of the test and its name"""


def parts_of(type_: Any) -> Iterator[type[msgspec.Struct]]:
    """The struct in a field's type, or in its lists."""
    for inner in (type_, *get_args(type_)):
        if inner is not type_:
            yield from parts_of(inner)
        elif isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            yield inner


def fields_of(struct: type[msgspec.Struct], name: str) -> set[tuple[str, str]]:
    found = set()
    for key, type_ in get_type_hints(struct).items():
        found.add((name, key))
        for part in parts_of(type_):
            found |= fields_of(part, f"{name}.{key}")
    return found


FIELDS = {
    field
    for event in schema.EVENTS
    for field in fields_of(event, schema.event_name(event))
}  # fmt: skip


def test_every_field_has_a_check() -> None:
    checked = {
        (event.strip(), key)
        for tests in CHECKS.values()
        for text in tests.values()
        for event, _, keys in (line.partition(":") for line in text.split(";"))
        for key in keys.split()
    }
    assert FIELDS - checked == set(), "a field that no test compares with the truth"
    assert checked - FIELDS == set(), "no field"


def test_the_named_tests_exist() -> None:
    folders = [ROOT / "tests" / "recording", *(ROOT / "tests" / "parts").iterdir()]
    for name, tests in CHECKS.items():
        files = [file for folder in folders if (file := folder / f"test_{name}.py").is_file()]
        trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
        nodes = [node for tree in trees for node in tree.body]
        functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        assert {f"test_{test}" for test in tests} <= functions, name
