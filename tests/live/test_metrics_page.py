"""docs/reference/metrics.md has every metric with its type and labels, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from llamacpp_instr.converters.live.metrics import metrics_text
from llamacpp_instr.log.schema import DeviceMemory
from tests.kit.native_kit import ROOT
from tests.live.server_log import END
from tests.live.test_slots import state_at

PAGE = (ROOT / "docs" / "reference" / "metrics.md").read_text()


def test_the_table_is_what_is_exported(tmp_path: Path) -> None:
    state = state_at(END, tmp_path / "server.log")
    state.devices["Vulkan0"] += 1
    memory = next(iter(state.memory.values()))
    memory.devices.append(DeviceMemory(device="Vulkan0", total=9, free=5))
    text = metrics_text(state).decode()
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = re.sub("_(bucket|sum|count)$", "", sample.name)
            labels.setdefault(name, set()).update(sample.labels.keys() - {"le"})
    named = dict(re.findall(r"^\| (\w+) \| `(\w+)`", PAGE, re.MULTILINE))
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([^|]*)\|", PAGE, re.MULTILINE)
    assert {name: kind for name, kind, _ in rows} == types
    assert {
        name: {named.get(label, label) for label in of.replace(",", " ").split()}
        for name, _, of in rows
    } == labels
