"""`stats --by expert` against counts by hand of the log of `tests.kit.experts_log`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.analyses.stats import (
    compute_stats,
    layer_filter,
    op_filter,
    where_filter,
)
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.session import load_session
from tests.kit.experts_log import EXPERT, LOG, events, without_experts
from tests.kit.reports import rows, session_of


def cells(report: Any) -> list[list[Any]]:
    return [list(row.values()) for row in rows(report)]


def test_each_layer_has_its_experts_in_each_phase() -> None:
    """The bytes of an expert are those of up and down."""
    (report,) = compute_stats(load_session(LOG), "expert")
    assert report.title == "Experts by layer, all phases"
    assert cells(report) == [
        # phase, layer, weight, experts, used, read, bytes, busiest, its share, busiest/mean
        ["prefill", 0, None, 4, 3, 3.0, 3 * 2 * EXPERT, 3, 3 / 6, 2.0],
        ["prefill", 1, None, 4, 4, 4.0, 4 * 2 * EXPERT, 0, 3 / 6, 2.0],
        ["decode", 0, None, 4, 3, 2.0, 2 * 2 * EXPERT, 3, 2 / 4, 2.0],
        ["decode", 1, None, 4, 2, 2.0, 2 * 2 * EXPERT, 0, 2 / 4, 2.0],
    ]


def test_one_layer_has_each_of_its_experts_busiest_first() -> None:
    for one in (layer_filter(0, 0), where_filter("layer=0")):
        (report,) = compute_stats(load_session(LOG), "expert", filters=[one])
        assert report.title == "Experts of layer 0, all phases"
        assert cells(report) == [
            ["3", 3, 3 / 6, 2, 2 / 4],
            ["1", 2, 2 / 6, 1, 1 / 4],
            ["0", 1, 1 / 6, 1, 1 / 4],
            ["2", 0, 0.0, 0, 0.0],
        ]


def test_a_phase_counts_alone_and_a_warm_up_does_not(tmp_path: Path) -> None:
    (report,) = compute_stats(load_session(LOG), "expert", phase="decode")
    assert [row[0] for row in cells(report)] == ["decode", "decode"]
    found = events()
    first = next(i for i, e in enumerate(found) if isinstance(e, s.StepBegin))
    second = next(i for i, e in enumerate(found) if isinstance(e, s.StepBegin) and e.step == 1)
    t = found[first].t
    found.insert(second, s.Mark(t=t + 95_000, mark=0, name="warm-up", phase="end"))
    found.insert(first, s.Mark(t=t - 1, mark=0, name="warm-up", phase="begin"))
    (report,) = compute_stats(session_of(tmp_path / "a.log", found), "expert")
    assert [row[0] for row in cells(report)] == ["decode", "decode"]
    assert "warm-up" in " ".join(report.notes)


def test_two_choices_of_one_layer_are_named_by_their_weights(tmp_path: Path) -> None:
    found = events()
    for event in found:
        if isinstance(event, s.Graph):
            event.whole.layer[:] = [-1] + [0] * (len(event.whole.layer) - 1)
            (up,) = (leaf for leaf in event.leafs if leaf.name == "blk.1.ffn_up_exps.weight")
            up.name = "blk.0.ffn_up_chexps.weight"
        elif isinstance(event, s.Layers):
            event.layer, event.dur = [-1, 0], [900, 52400]
    (report,) = compute_stats(session_of(tmp_path / "a.log", found), "expert")
    assert [row[1:3] for row in cells(report)] == [[0, "ffn_up_exps"], [0, "ffn_up_chexps"]] * 2


def test_a_log_without_experts_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a.log: the log lacks the experts of the steps"):
        compute_stats(without_experts(tmp_path / "a.log"), "expert")
    dense = [e for e in events() if not isinstance(e, s.Experts)]
    at = next(i for i, e in enumerate(dense) if isinstance(e, s.Model))
    dense[at] = msgspec.structs.replace(dense[at], hparams={"n_expert": 0})
    with pytest.raises(UsageError, match=r"b.log: no model of this log has experts"):
        compute_stats(session_of(tmp_path / "b.log", dense), "expert")
    with pytest.raises(UsageError, match=r"experts.log: no experts in these layers"):
        compute_stats(load_session(LOG), "expert", filters=[layer_filter(5, 9)])
    with pytest.raises(UsageError, match="leave out --ops and --where"):
        compute_stats(load_session(LOG), "expert", filters=[op_filter("MUL_MAT_ID")])
    with pytest.raises(UsageError, match="expert cannot be combined with another key"):
        compute_stats(load_session(LOG), "layer,expert")
