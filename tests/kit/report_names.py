"""The names in the JSON of reports.

`python -m tests.kit.report_names` writes docs/reference/json.md.
"""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.kit.in_process import printed
from tests.kit.native_kit import ROOT
from tests.kit.tiny_models import write_llama

PAGE = ROOT / "docs" / "reference" / "json.md"
TESTS = ROOT / "tests"
LOG = TESTS / "fixtures" / "demo-verbose.log"
MODEL = TESTS / "fuzz" / "corpus" / "gguf" / "seed-types.gguf"
LOGS = TemporaryDirectory(prefix="instr-names-")
IMATRIX = TESTS / "fuzz" / "corpus" / "imatrix" / "seed-imatrix.gguf"
TINY = write_llama(Path(LOGS.name) / "tiny.gguf")
FASTER = ROOT / "docs" / "tutorials" / "faster-server.log.gz"
EXPERTS = TESTS / "fixtures" / "experts.log"
MACHINE = TESTS / "fixtures" / "machine.json"


def word(path: Path | str) -> str:
    """A path as a word of a command line; a clone may be in a folder whose name has a space."""
    return shlex.quote(str(path))


REPORTS = {
    "summary": f"summary {word(LOG)}",
    "summary of llama-bench": f"summary {word(TESTS / 'fixtures' / 'llama-bench.log.gz')}",
    "summary with a device": f"summary {word(TESTS / 'fixtures' / 'devices.log')}",
    "summary over machines": f"summary {word(TESTS / 'fixtures' / 'machines.log.gz')}",
    "stats": f"stats {word(LOG)} --by layer,op",
    "experts": f"stats {word(EXPERTS)} --by expert",
    "experts of a layer": f"stats {word(EXPERTS)} --by expert --layers 0",
    "requests": f"requests {word(LOG)}",
    "values": f"values {word(TESTS / 'fixtures' / 'every-event.log')}",
    "tree": f"tree {word(LOG)}",
    "roofline": f"roofline {word(LOG)} --machine {word(TESTS / 'fixtures' / 'probe.json')}",
    "schedule": f"schedule {word(LOG)} --split rows",
    "capacity": f"capacity {word(FASTER)} --clients 1-2",
    "capacity for a goal": f"capacity {word(FASTER)} --clients 1 --goal 1tokens/s",
    "predict": f"predict demo --machine {word(MACHINE)} --batch 8 --ctx 8",
    "diff": f"diff {word(LOG)} {word(LOG)}",
    "compare": f"compare {word(LOG)} {word(LOG)}",
    "ops": f"ops {word(LOG)}",
    "sql": f"sql {word(TESTS / 'fixtures' / 'fleet')} speed",
    "validate": "validate demo -n 1 --threads 1",
    "diverge": "diverge demo demo --tokens 16 --threads 1",
    "inspect": "inspect demo",
    "inspect of an importance matrix": f"inspect {word(IMATRIX)}",
    "memory": f"memory {word(LOG)}",
    "blocks": f"blocks {word(MODEL)} blk.1.q4_k.weight",
    "weights": "weights demo blk.0.* --reference demo",
    "one block": f"blocks {word(MODEL)} blk.1.q4_k.weight --block 0",
    "quality": "quality demo demo --only weights",
    "quantize": "quantize demo --types Q8_0,Q4_0 --dry-run",
}
"""each command that prints a report, with little to do"""
MEASURED = {
    "bench": f"bench demo -p 8 -n 2 --threads 1 --rounds 1 --force --logs {word(LOGS.name)}",
    "types": f"recipe {word(TINY)} --chunks 1 --threads 1 --machine {word(MACHINE)}",
    "recipe": f"recipe {word(TINY)} --bpw 9 --memory 1GB --ctx 64 --cache-type-k f16,bf16"
    f" --chunks 1 --threads 1 --force -o {word(LOGS.name)}/recipe.gguf",
}
"""those whose numbers differ each time, or that take seconds"""


@cache
def in_json(name: str) -> str:
    """The reports of a command, which runs once."""
    return printed(*shlex.split((REPORTS | MEASURED)[name]), "--json")


def listed(page: str) -> str:
    """The page with the names that the commands have now."""
    rows = ["| command | id of the table | ids of its columns |", "|---|---|---|"]
    seen = set()
    for name, line in (REPORTS | MEASURED).items():
        command = line.split()[0]
        for report in json.loads(in_json(name)):
            columns = ", ".join(f"`{column['id']}`" for column in report["columns"])
            if columns and (command, report["id"], columns) not in seen:
                seen.add((command, report["id"], columns))
                rows.append(f"| `{command}` | `{report['id']}` | {columns} |")
    return re.sub(r"\| command \|.*?\n\n", "\n".join(rows) + "\n\n", page, flags=re.DOTALL)


if __name__ == "__main__":
    Path(PAGE).write_text(listed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
