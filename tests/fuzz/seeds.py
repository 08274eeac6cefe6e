"""Writes the seeds of the corpus: `python -m tests.fuzz.seeds`. Deterministic.

Small real lines and real headers, with text that would be markup or control a terminal if it were
not escaped.
"""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import zstandard

from llamacpp_instr.debugger.dap.transports import write_message
from llamacpp_instr.log import schema as s
from llamacpp_instr.model.types import TYPES
from tests.kit.gguf_files import save
from tests.kit.made_log import encode, make_log
from tests.kit.tiny_models import write_vocabulary

CORPUS = Path(__file__).parent / "corpus"
FIXTURES = Path(__file__).parent.parent / "fixtures"
HOSTILE = "<script>alert(1)</script>\x1b[31m\x9b2J\u202e[bold]`|a|`\n=1+1"


def write_logs(directory: Path) -> None:
    for level in s.LEVELS:
        made = encode(make_log(Random(2).randint, n_contexts=1, level=level))
        (directory / f"seed-{level}.log").write_bytes(made)
    events = make_log(Random(2).randint, n_contexts=2, level="verbose")
    for event in events:
        for name in ("name", "path", "text", "arch", "ftype", "buffer", "type"):
            if isinstance(getattr(event, name, None), str) and name in event.__struct_fields__:
                setattr(event, name, HOSTILE)
        if isinstance(event, s.Graph) and event.nodes is not None:
            event.nodes.name[3] = event.nodes.op[3] = HOSTILE
    (directory / "seed-hostile.log").write_bytes(encode(events))
    real = (FIXTURES / "demo-verbose.log").read_bytes().splitlines(keepends=True)
    (directory / "seed-recorded.log").write_bytes(b"".join(real[:12]))
    every = (FIXTURES / "every-event.log").read_bytes()
    (directory / "seed-every-event.log").write_bytes(every)
    (directory / "seed-every-event.log.gz").write_bytes(gzip.compress(every, mtime=0))
    (directory / "seed-every-event.log.zst").write_bytes(zstandard.compress(every))
    (directory / "seed-devices.log").write_bytes((FIXTURES / "devices.log").read_bytes())
    for path in (FIXTURES / "dialects").glob("*.log"):
        (directory / f"seed-{path.name}").write_bytes(path.read_bytes())


_KNOWN = {type_.value for type_ in gguf.GGMLQuantizationType} - {9, 15}
"""types that a file may contain, from gguf-py; Q8_1 and Q8_K occur only during a compute"""


def write_models(directory: Path) -> None:
    write_vocabulary(directory / "seed-vocabulary.gguf")
    random = np.random.default_rng(3)
    writer = gguf.GGUFWriter(directory / "seed-types.gguf", "llama")
    _add_metadata(writer)
    for type_ in TYPES.values():
        if type_.number not in _KNOWN:
            continue
        if type_.name in ("F32", "F16", "F64", "I8", "I16", "I32", "I64"):
            code = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}.get(type_.name)
            data = np.ones((2, 32), code or type_.name.lower().replace("i", "int"))
            writer.add_tensor(f"blk.0.{type_.name.lower()}.weight", data)
            continue
        size = type_.block_bytes * max(1, 64 // type_.block)
        rows = random.integers(0, 256, (2, size), np.uint8)
        number = gguf.GGMLQuantizationType(type_.number)
        writer.add_tensor(f"blk.1.{type_.name.lower()}.weight", rows, raw_dtype=number)
    save(writer)
    writer = gguf.GGUFWriter(directory / "seed-hostile.gguf", HOSTILE[:40])
    _add_metadata(writer)
    writer.add_string("general.name", HOSTILE)
    writer.add_string(HOSTILE, HOSTILE)
    writer.add_file_type(15)
    for i, name in enumerate((HOSTILE[:30], HOSTILE[30:], "token_embd.weight")):
        writer.add_tensor(name, np.full((1 + i, 32), 0.5, np.float32))
    rows = random.integers(0, 256, (2, 34), np.uint8)
    writer.add_tensor("blk.0.\x1b[1m", rows, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    save(writer)


def _add_metadata(writer: gguf.GGUFWriter) -> None:
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_file_type(7)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", HOSTILE, "b"])
    writer.add_token_scores([0.5, float("nan"), -1.0])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(7_000_000)
    writer.add_chat_template(HOSTILE)
    for i, code in enumerate(("uint8", "int8", "uint16", "int16", "uint64", "int64", "float64")):
        getattr(writer, f"add_{code}")(f"llama.key_{code}", i)
    writer.add_bool("llama.yes", True)
    writer.add_array("llama.numbers", [1, 2, 3])
    writer.add_float32("llama.rope.freq_base", float("inf"))


def write_importance(directory: Path) -> None:
    writer = gguf.GGUFWriter(directory / "seed-imatrix.gguf", "llama")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", [HOSTILE])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name in ("blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight"):
        n_experts = 2 if "exps" in name else 1
        writer.add_tensor(f"{name}.in_sum2", np.ones((n_experts, 8), np.float32))
        writer.add_tensor(f"{name}.counts", np.full((n_experts, 1), 4, np.float32))
    save(writer)
    name, values = b"blk.0.attn_q.weight", struct.pack("<4f", 1, 2, 3, 4)
    entry = struct.pack("<i", len(name)) + name + struct.pack("<ii", 2, 4) + values
    tail = struct.pack("<ii", 3, 4) + b"text"
    (directory / "seed-imatrix.dat").write_bytes(struct.pack("<i", 1) + entry + tail)


CONSOLE = (
    "help", "tensors ffn", "break l_out-2 if nan", "delete 1", "ffn_out-1", "print [0, :8]",
    "set 1 [0, 3]", "scale 2 ffn_out-1", "tokens", "lens 0", "attention 1 head=0", "next",
    "ablate layer=1 head=0", "step page",
)  # fmt: skip


def write_protocol(directory: Path) -> None:
    """A client that asks about everything at a stop."""
    result, row = {"variablesReference": 1}, {"variablesReference": 7}
    points = [
        {"name": "ffn_out-* if absmax > 60 or nan", "hitCondition": ">= 2"},
        {"name": f"{HOSTILE[:30]} layer=1-3 op=MUL_MAT", "condition": "mean < 0"},
    ]
    lines = [{"line": 30, "condition": "max > 1", "hitCondition": "2"}, {"line": 5}]
    paged = {"supportsVariablePaging": True, "supportsInvalidatedEvent": True}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("initialize", {"adapterID": "instr", "linesStartAt1": True} | paged),
        ("launch", {"prompt": HOSTILE, "n": 2, "ctx": 64, "temp": 0.5, "stopOnEntry": True}),
        ("setBreakpoints", {"source": {"path": "graph-1"}, "breakpoints": lines, "lines": [30]}),
        ("setFunctionBreakpoints", {"breakpoints": points}),
        ("setExceptionBreakpoints", {"filters": ["nan", "inf"]}),
        ("configurationDone", {}), ("threads", {}), ("loadedSources", {}),
        ("source", {"source": {"sourceReference": 1}, "sourceReference": 1}),
        ("stackTrace", {"threadId": 1, "startFrame": 0, "levels": 20}),
        ("scopes", {"frameId": 1}), ("scopes", {"frameId": 3}),
        *(("variables", {"variablesReference": n, "start": 0, "count": 9}) for n in range(1, 8)),
        ("variables", row | {"filter": "indexed", "start": 3, "count": 5}),
        ("setVariable", result | {"name": "[0]", "value": "1e-3"}),
        ("setVariable", row | {"name": "[3]", "value": "nan"}),
        *(
            ("evaluate", {"expression": text, "context": "repl", "frameId": 1})
            for text in CONSOLE
        ),
        ("evaluate", {"expression": HOSTILE, "context": "hover"}),
        ("instr/tensor", {"name": "ffn_out-1", "slice": "[0, :8]", "rows": 4, "columns": 9}),
        ("pause", {"threadId": 1}), ("next", {"threadId": 1, "granularity": "layer"}),
        ("continue", {"threadId": 1}), ("disconnect", {"terminateDebuggee": True}),
    ]  # fmt: skip
    with (directory / "seed-session.dap").open("wb") as file:
        for number, (command, arguments) in enumerate(asked, 1):
            message = {"seq": number, "type": "request", "command": command}
            write_message(file, message | {"arguments": arguments})


if __name__ == "__main__":
    for kind, write in (
        ("log", write_logs), ("gguf", write_models), ("imatrix", write_importance),
        ("dap", write_protocol),
    ):  # fmt: skip
        (CORPUS / kind).mkdir(parents=True, exist_ok=True)
        write(CORPUS / kind)
