"""Every command that writes, and a folder to run it in: inputs, files that look like the command's
own, and other files."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from llamacpp_instr.cli import COMMANDS
from llamacpp_instr.converters.exports.tables import NAMES
from llamacpp_instr.converters.exports.torch.stream import NAMES as TORCH
from llamacpp_instr.prediction.probe.file import probe_json
from tests.kit import tiny_models
from tests.kit.made_machine import made_machine
from tests.kit.made_probe import probe_of
from tests.kit.native_kit import ROOT
from tests.kit.quantize_kit import importances, write_imatrix

PARTS = [f"split-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
SPLIT = PARTS[0]
MODELS = ["model.gguf", "named.gguf", "linked.gguf", *PARTS]
"""only a log, `named.log`, names the second; the third is a symbolic link to the first"""
OTHER_INPUTS = [
    "session.log", "named.log", "values.log", "probe.json", "engines.toml", "graph.toml",
    "machine.json", "text.txt", "program.py",
]  # fmt: skip
TENSOR = "blk.0.attn_q.weight"
RECORDS = "import llama_cpp\nllama_cpp.Llama('model.gguf', n_ctx=32, verbose=False)\n"


@dataclass(frozen=True)
class Case:
    """A command line that writes to `{}`."""

    line: str
    output: str = "out"
    """replaces `{}` if nothing is wrong"""
    creates: tuple[str, ...] = ()
    """the files that it should write; by default the output"""

    @property
    def option(self) -> tuple[str, str]:
        """The command, and its option that names the output."""
        command, *words = self.line.split()
        option = [command, *words][words.index("{}")]
        return command, "--output" if option == "-o" else option

    @property
    def reads(self) -> set[str]:
        """The inputs in the line."""
        return set(self.line.split()) & {*MODELS, *OTHER_INPUTS}

    @property
    def told(self) -> tuple[str, ...]:
        return self.creates or (self.output,)


EVERY_EVENT = ROOT / "tests" / "fixtures" / "every-event.log"
TABLES = tuple(f"data/{name}.csv" for name in NAMES)
PROFILE = tuple(f"profile/{name}" for name in TORCH)
KEPT = ("kept/model-Q8_0.gguf", "kept/source-1.log", "kept/Q8_0-1.log")
RUN = "-n 1"
OTHER_EXPORTS = ("to-flashinfer", "to-onnx", "to-parquet", "to-torch")
"""exports that write more than one file"""

ALL = [
    *(
        Case(f"{command} session.log -o {{}}")
        for command in (
            "cat", "summary", "stats", "requests", "tree", "page", "ops",
            *(name for name in COMMANDS if name.startswith("to-") and name not in OTHER_EXPORTS),
        )
    ),
    Case("values values.log -o {}"),
    Case("roofline session.log --machine probe.json -o {}"),
    Case("schedule session.log --phase prefill --engines engines.toml -o {}"),
    Case("schedule graph.toml -o {}"),
    Case("schedule model.gguf --machine machine.json -o {}"),
    Case("schedule session.log --phase prefill --engines engines.toml --perfetto {}"),
    *(
        Case(f"predict {name} --machine machine.json --batch 4 --ctx 4 -o {{}}")
        for name in ("model.gguf", SPLIT)
    ),
    Case("diff session.log named.log -o {}"),
    Case("to-parquet --csv session.log -o {}", "data", TABLES),
    Case("to-torch session.log -o {}", "profile", PROFILE),
    Case("to-onnx model.gguf -o {}", "out.onnx", ("out.onnx", "out.data")),
    Case("sql fleet logs -o {}"),
    Case("validate model.gguf -n 1 -o {}"),
    Case(f"diverge {SPLIT} model.gguf --text text.txt --tokens 8 -o {{}}"),
    *(Case(f"inspect {name} -o {{}}") for name in ("model.gguf", SPLIT)),
    *(
        Case(f"memory {name} -o {{}}")
        for name in ("model.gguf", SPLIT, "session.log", "named.log")
    ),
    Case(f"compare named.log model.gguf --reference {SPLIT} -o {{}}"),
    Case("compare model.gguf named.gguf --log session.log --log named.log -o {}"),
    Case("compare --types Q8_0 model.gguf --rounds 1 -n 1 --keep {}", "kept", KEPT),
    Case(f"quality {SPLIT} model.gguf --text text.txt --ctx 16 --chunks 1 -o {{}}"),
    Case(f"blocks quantized.gguf {TENSOR} --reference {SPLIT} -o {{}}"),
    Case(f"blocks quantized.gguf {TENSOR} --reference {SPLIT} --heat-map {{}}", "out.svg"),
    Case(f"weights quantized.gguf --reference {SPLIT} -o {{}}"),
    Case("weights quantized.gguf -o {}", "out.npz"),
    Case(f"weights {SPLIT} -o {{}}", "out.safetensors"),
    Case("quantize model.gguf --types Q8_0,F16 -o {}", "kept",
         ("kept/model-Q8_0.gguf", "kept/model-F16.gguf")),
    Case(f"quantize {SPLIT} --types Q8_0 --imatrix imatrix.gguf -o {{}}", "out.gguf"),
    Case(f"run {SPLIT} --prompt-file text.txt {RUN} --log {{}}", "old.log"),
    Case(f"run {SPLIT} --prompt-file text.txt {RUN} --log new.log --perfetto {{}}",
         creates=("out", "new.log")),
    Case(f"run {SPLIT} --prompt-file text.txt {RUN} --log new.log --capture l_out-* -o {{}}",
         "captured", ("captured", "captured/*", "new.log")),
    Case(f"debug {SPLIT} -p hello {RUN} --log {{}}", "old.log"),
    *(
        Case(f"exec --log {{}} {rotate} -- {sys.executable} program.py", "old.log",
             ("old.log", "old.part2.log"))
        for rotate in ("", "--rotate 1MB")
    ),
    Case("build --wheel-dir {}", "wheels", ("wheels/*.whl",)),
]  # fmt: skip
CASES = {case.option for case in ALL}
READ_ONLY = {
    ("run", "--prompt-file"), ("compare", "--log"), ("compare", "--reference"),
    ("diverge", "--text"),
    ("quality", "--text"), ("blocks", "--reference"), ("quantize", "--imatrix"),
    ("weights", "--reference"), ("roofline", "--machine"), ("schedule", "--engines"),
    ("schedule", "--machine"), ("predict", "--machine"), ("diff", "--before"), ("diff", "--after"),
    ("import", "--base"), ("validate", "--reference"), ("to-flashinfer", "--dataset"),
}  # fmt: skip
NO_INPUT = {("probe", "--output")}
"""commands that read no file; this one takes a minute"""
PEERS = {("import", "--output")}
"""needs PyTorch; tests/peers runs it"""
NO_FILE = {
    "A,B,...", "ADDRESS", "ARGS", "A[-B]", "COLUMN", "DATASET", "KEY=PATTERN",
    "KEY[,KEY]", "N", "N,...", "NAME", "OP,…", "PATTERN", "PERCENT", "PATTERN=TYPE",
    "SIZE", "TEXT", "TOKENS", "TYPE", "TYPE,...", "TYPE,…",
}  # fmt: skip
"""metavars of the other options"""


def write_stock(place: Path) -> None:
    """Inputs, files that look like outputs of a command, and other files."""
    tiny_models.write_llama(place / "model.gguf")
    shutil.copyfile(place / "model.gguf", place / "named.gguf")
    (place / "linked.gguf").symlink_to("model.gguf")
    (place / "part.svg").symlink_to(PARTS[1])
    tiny_models.write_llama(place / "split.gguf", part=8)
    assert sorted(path.name for path in place.glob("split*")) == PARTS
    write_imatrix(place / "imatrix.gguf", importances(place / "model.gguf"))
    (place / "text.txt").write_text("hello " * 60)
    (place / "program.py").write_text(RECORDS)
    shutil.copyfile(EVERY_EVENT, place / "values.log")
    for line in (
        f"run model.gguf -p hello {RUN} --log session.log",
        f"run named.gguf -p hello {RUN} --log named.log",
        "quantize model.gguf --types Q8_0 -o quantized.gguf",
        "collect session.log -o fleet",
    ):
        command = [sys.executable, "-m", "llamacpp_instr", *line.split()]
        subprocess.run(command, cwd=place, check=True, capture_output=True)
    (place / "probe.json").write_bytes(probe_json(probe_of()))
    (place / "engines.toml").write_text('[[engine]]\nname = "engine"\ncount = 2\n')
    (place / "graph.toml").write_text('[[task]]\nname = "a"\nns = 10\n')
    (place / "machine.json").write_bytes(probe_json(made_machine()))
    # outputs of an earlier call, which may be replaced
    for name in ("out", "out.svg", "new.log"):
        (place / name).write_text("old")
    shutil.copyfile(place / "quantized.gguf", place / "out.gguf")
    for name in ("old.log", "new.log"):
        shutil.copyfile(place / "session.log", place / name)
    for name in (*TABLES, *PROFILE):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text("old")
    # files of other programs
    for name in (
        "mine.csv", "archive.csv/ops.csv", ".hidden", ".out", "out.1", "out.gguf.part", "core",
        "old2.part2.log", "old7.part9.log", "old-2025.part3.log", "old.partx.log", "xold.part2.log",
        "old.log.gz", "old.part2.log.bak", "old.part2.txt", "old", "demo", "demo.gguf",
        "kept/model.gguf", "kept/notes", "kept/Q8_0-2.log", "kept/model-Q4_0.gguf", "wheels/mine",
    ):  # fmt: skip
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(name)
    (place / "mine.csv").chmod(0o400)
    (place / "old").chmod(0o755)
    (place / "link").symlink_to("mine.csv")
    (place / "to nowhere").symlink_to("nowhere")
    (place / "folder").symlink_to("archive.csv")
    os.mkfifo(place / "pipe")


Files = dict[str, tuple[int, bytes]]


def files(place: Path) -> Files:
    """Every file below a directory: its type and mode, and its content or link target."""
    found = {}
    for path in place.rglob("*"):
        mode, content = path.lstat().st_mode, b""
        if stat.S_ISLNK(mode):
            content = os.fsencode(path.readlink())
        elif stat.S_ISREG(mode):
            content = path.read_bytes()
        found[path.relative_to(place).as_posix()] = (mode, content)
    return found


def changed(before: Files, after: Files) -> set[str]:
    """The names of files that were created, changed or removed."""
    return {name for name in before | after if before.get(name) != after.get(name)}
