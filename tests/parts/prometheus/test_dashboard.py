"""Prometheus accepts every query of the dashboard for Grafana."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit.prometheus import promtool
from tests.live.test_dashboard import QUERIES


@pytest.mark.native
def test_prometheus_takes_every_query(tmp_path: Path) -> None:
    rules = [
        {"record": f"query:{i}", "expr": expression.replace("$__rate_interval", "5m")}
        for i, expression in enumerate(QUERIES.values())
    ]
    path = tmp_path / "rules.json"  # JSON is YAML
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", path)
