"""The dashboard for Grafana: each query is one that Prometheus accepts, of metrics that exist."""

from __future__ import annotations

import json
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llamacpp_instr.converters.live.metrics import metrics_text
from tests.kit.native_kit import ROOT
from tests.live.server_log import END
from tests.live.test_slots import state_at

DASHBOARD = json.loads((ROOT / "docker" / "grafana.json").read_text())
QUERIES = {
    f"{panel['title']} {target['refId']}": target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
}
OF_PROMETHEUS = {"instance", "le"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The labels of each metric of a live session with requests."""
    state = state_at(END, tmp_path_factory.mktemp("log") / "server.log")
    families = text_string_to_metric_families(metrics_text(state).decode())
    found: dict[str, set[str]] = {}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def names(expression: str) -> tuple[set[str], set[str]]:
    """The metrics of a query, and the labels that it chooses or groups by."""
    words = set(re.findall(r"\b(?:gen_ai_server|llamacpp_instr)_\w+", expression))
    labels = set(re.findall(r"(\w+)=~?\"", expression))
    for group in re.findall(r"by \(([^)]*)\)", expression):
        labels |= set(group.replace(" ", "").split(","))
    return words, labels


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_names_what_is_exported(query: str, exported: dict[str, set[str]]) -> None:
    metrics, labels = names(QUERIES[query])
    assert metrics
    assert metrics <= exported.keys()
    for metric in metrics:
        assert labels - OF_PROMETHEUS <= exported[metric]


def test_variables_are_labels_that_are_exported(exported: dict[str, set[str]]) -> None:
    variables = [of["query"] for of in DASHBOARD["templating"]["list"] if of["type"] == "query"]
    for query in variables:
        metric, label = re.findall(r"label_values\((\w+), (\w+)\)", query)[0]
        assert label in exported[metric] | OF_PROMETHEUS


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
