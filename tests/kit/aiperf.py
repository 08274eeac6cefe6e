"""aiperf (PyPI), a client of servers that notes what it sees: clients that each ask again when
their answer has arrived."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf


@dataclass(frozen=True)
class Seen:
    """One request as aiperf saw it; times in ns, by its own clock."""

    begin: int
    first: int
    """when the first token arrived"""
    end: int
    """when the last token arrived"""
    prompt: int
    cached: int
    """tokens of the prompt that the server already had"""
    output: int


def load_server(
    port: int, clients: int, tokenizer: Path, folder: Path, *options: object, aiperf: str = ""
) -> list[Seen]:
    """What clients saw of a server, in the order in which they asked. `folder` keeps what aiperf
    writes; `options` say how many requests there are, and how long."""
    program = aiperf or find_aiperf()
    assert program is not None, "no aiperf on PATH"
    command = [
        program, "profile", "--model", "any", "--url", f"http://127.0.0.1:{port}", "--streaming",
        "--endpoint-type", "chat", "--tokenizer", tokenizer, "--concurrency", clients,
        # the tokenizer only makes prompts; an answer is as long as it should be; llama-server may
        # close a connection just when the next request comes
        "--use-server-token-count", "--extra-inputs", "ignore_eos:true",
        "--random-seed", 7, "--artifact-dir", folder, "--ui", "none", "--workers-max", 1,
        "--record-processors", 1, "--no-gpu-telemetry", "--no-server-metrics",
        "--connection-reuse-strategy", "never", *options,
    ]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return read_seen(folder)


def find_aiperf() -> str | None:
    """The program that AIPERF names, or the one on PATH."""
    return os.environ.get("AIPERF") or shutil.which("aiperf")


def read_seen(folder: Path) -> list[Seen]:
    """The requests that aiperf wrote down, in the order in which clients asked."""
    found = []
    with (folder / "profile_export.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            values = {name: of["value"] for name, of in record["metrics"].items()}
            begin = record["metadata"]["request_start_ns"]
            times = (values["time_to_first_token"], values["request_latency"])
            first, end = (begin + round(ms * 1e6) for ms in times)
            found.append(
                Seen(
                    begin, first, end, values["usage_prompt_tokens"],
                    values["usage_prompt_cache_read_tokens"], values["output_sequence_length"],
                )
            )  # fmt: skip
    return sorted(found, key=lambda of: of.begin)


def write_tokenizer(folder: Path, model: Path) -> None:
    """Writes a tokenizer with which aiperf makes prompts: that of a model with merges of bytes
    (BPE), otherwise one in which each letter is a token."""
    fields = gguf.GGUFReader(model).fields
    tokens: Sequence[str] = [chr(of) for of in range(33, 127)] + ["Ġ", "Ċ"]
    merges: Sequence[str] = []
    if "tokenizer.ggml.merges" in fields:
        tokens = fields["tokenizer.ggml.tokens"].contents()
        merges = fields["tokenizer.ggml.merges"].contents()
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    made = {
        "version": "1.0", "added_tokens": [], "pre_tokenizer": bytes_of, "decoder": bytes_of,
        "model": {
            "type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [of.split(" ", 1) for of in merges],
        },
    }  # fmt: skip
    # aiperf puts a text of tokens between these two
    ends = {"bos_token": tokens[0], "eos_token": tokens[1]}
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **ends}
    for name, content in (("tokenizer", made), ("tokenizer_config", settings)):
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
