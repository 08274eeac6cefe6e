"""The names in the JSON of reports.

`python -m tests.kit.report_names` writes docs/reference/json.md.
"""

from __future__ import annotations

import json
import re
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
MACHINE = TESTS / "fixtures" / "machine.json"
REPORTS = {
    "summary": f"summary {LOG}",
    "summary of llama-bench": f"summary {TESTS / 'fixtures' / 'llama-bench.log.gz'}",
    "summary with a device": f"summary {TESTS / 'fixtures' / 'devices.log'}",
    "summary over machines": f"summary {TESTS / 'fixtures' / 'machines.log.gz'}",
    "stats": f"stats {LOG} --by layer,op",
    "experts": f"stats {TESTS / 'fixtures' / 'experts.log'} --by expert",
    "experts of a layer": f"stats {TESTS / 'fixtures' / 'experts.log'} --by expert --layers 0",
    "requests": f"requests {LOG}",
    "values": f"values {TESTS / 'fixtures' / 'every-event.log'}",
    "tree": f"tree {LOG}",
    "roofline": f"roofline {LOG} --machine {TESTS / 'fixtures' / 'probe.json'}",
    "schedule": f"schedule {LOG} --split rows",
    "capacity": f"capacity {FASTER} --clients 1-2",
    "capacity for a goal": f"capacity {FASTER} --clients 1 --goal 1tokens/s",
    "predict": f"predict demo --machine {TESTS / 'fixtures' / 'machine.json'} --batch 8 --ctx 8",
    "diff": f"diff {LOG} {LOG}",
    "compare": f"compare {LOG} {LOG}",
    "ops": f"ops {LOG}",
    "sql": f"sql {TESTS / 'fixtures' / 'fleet'} speed",
    "validate": "validate demo -n 1 --threads 1",
    "diverge": "diverge demo demo --tokens 16 --threads 1",
    "inspect": "inspect demo",
    "inspect of an importance matrix": f"inspect {IMATRIX}",
    "memory": f"memory {LOG}",
    "blocks": f"blocks {MODEL} blk.1.q4_k.weight",
    "weights": "weights demo blk.0.* --reference demo",
    "one block": f"blocks {MODEL} blk.1.q4_k.weight --block 0",
    "quality": "quality demo demo --only weights",
    "quantize": "quantize demo --types Q8_0,Q4_0 --dry-run",
}
"""each command that prints a report, with little to do"""
MEASURED = {
    "bench": f"bench demo -p 8 -n 2 --threads 1 --rounds 1 --force --logs {LOGS.name}",
    "types": f"recipe {TINY} --chunks 1 --threads 1 --machine {MACHINE}",
    "recipe": f"recipe {TINY} --bpw 9 --memory 1GB --ctx 64 --cache-type-k f16,bf16 --chunks 1"
    f" --threads 1 --force -o {LOGS.name}/recipe.gguf",
}
"""those whose numbers differ each time, or that take seconds"""


@cache
def in_json(name: str) -> str:
    """The reports of a command, which runs once."""
    return printed(*(REPORTS | MEASURED)[name].split(), "--json")


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
