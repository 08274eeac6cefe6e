"""`instr quality` with types of the cache: ranges of positions, and the reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Instr
from tests.kit.in_process import titled
from tests.kit.native_kit import DEMO
from tests.kit.quality_kit import CHUNKS, text
from tests.parts.recipes.test_cache_memory import measured

__all__ = ["text"]  # a fixture


@pytest.mark.native
def test_the_last_range_is_what_the_other_figures_are_about(text: Path) -> None:
    outputs, _ = measured(text.read_text().rstrip())
    *before, last = outputs.by_position
    assert (last.perplexity, last.divergences) == (outputs.perplexity, outputs.divergences)
    assert [(at.first, at.last) for at in before] == [(1, 32), (33, 64), (65, 128), (129, 256)]
    assert [at.n_scored for at in outputs.by_position] == [
        CHUNKS * n for n in (32, 32, 64, 128, 255)
    ]


@pytest.mark.native
def test_reports_of_caches_and_of_models_with_them(instr: Instr, tmp_path: Path) -> None:
    """Two names of the demo model are two models."""
    (tmp_path / "other.gguf").write_bytes(DEMO.read_bytes())
    small = ("--ctx", 64, "--chunks", 1, "--threads", 1, "--cache-type-v", "f16,q8_0")
    done = instr("quality", "demo", *small, "--json")
    assert done.returncode == 0, done.stderr
    reports = {report["id"]: report for report in titled(json.loads(done.stdout))}
    plain, q8_0 = reports["caches"]["rows"]
    assert (plain["cache"], q8_0["cache"]) == ("f16", "K f16, V q8_0")
    assert q8_0["of f16"] == q8_0["memory"] / plain["memory"] == (16 + 8.5) / 32
    assert q8_0["mean KL"] == reports["outputs"]["rows"][1]["mean KL"] > 0
    assert [row["test"] for row in reports["bench"]["rows"]] == ["pp48", "tg16 @ d48"] * 2
    assert plain["decode t/s"] == pytest.approx(reports["bench"]["rows"][1]["t/s"])

    named = ("quality", "demo", "other.gguf", *small)
    page = instr(*named, "-o", "it.html")
    assert page.returncode == 0, page.stderr
    html = (tmp_path / "it.html").read_text()
    for words in ("demo.gguf, f16", "other.gguf, f16", "other.gguf, K f16, V q8_0"):
        assert words in html
    assert html.count("<svg") >= 3
    only = instr(*named, "--only", "outputs").stdout
    assert max(map(len, only.splitlines())) <= 80
