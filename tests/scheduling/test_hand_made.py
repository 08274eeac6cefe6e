"""Hand-made graphs and engines: what is right is read, what is wrong is one clear line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.scheduling import tasks as hand_made
from llamacpp_instr.converters.scheduling.schedule import schedule_list
from llamacpp_instr.converters.scheduling.tasks import (
    EngineKind,
    Engines,
    Label,
    check_usable,
    equal_engines,
    parse_engines,
    read_engines,
    read_hand_made,
)
from tests.kit.schedule_kit import assert_valid, graphs, make_tasks, sources_of

GRAPH = """
[[task]]
name = "out"
ns = 7
after = ["q", "k"]
[[task]]
name = "q"
ns = 100
op = "MUL_MAT"
kind = "matrix"
layer = 3
block = "attention"
bytes = 64
load = 32
[[task]]
name = "k"
ns = 50
load = 16
"""
ENGINES = """
handover_ns = 200
transfers = true
[[engine]]
name = "matrix"
count = 4
runs = ["matrix"]
speed = { MUL_MAT = 2.0, "*" = 1.5 }
bandwidth = 50e9
local_memory = 1048576
[[engine]]
name = "dma"
runs = ["memory"]
bandwidth = 10000000000
[[engine]]
name = "any"
"""


def test_a_graph_is_read_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "graph.toml").write_text(GRAPH)
    tasks = read_hand_made(tmp_path / "graph.toml")
    assert [label.name for label in tasks.labels] == ["q", "k", "out"]
    assert tasks.ns.tolist() == [100, 50, 7]
    assert (tasks.bytes.tolist(), tasks.load.tolist()) == ([64, 16, 0], [32, 16, 0])
    assert (tasks.first.tolist(), tasks.sources.tolist()) == ([0, 0, 0, 2], [0, 1])
    q = tasks.labels[0]
    assert (q.title, q.op, q.kind, q.layer, q.block) == (
        "MUL_MAT q", "MUL_MAT", "matrix", 3, "attention",
    )  # fmt: skip
    made = schedule_list(tasks, equal_engines(2))
    assert_valid(made)
    assert made.makespan == 107


@settings(max_examples=25)
@given(graphs(), st.randoms(use_true_random=False))
def test_a_graph_written_in_any_order_has_the_same_dependencies(tmp_path_factory, tasks, random):
    expected = {
        label.name: (int(tasks.ns[i]), {f"t{source}" for source in sources_of(tasks, i)})
        for i, label in enumerate(tasks.labels)
    }
    blocks = [
        f'[[task]]\nname = "{name}"\nns = {ns}\nafter = {sorted(after)}\n'
        for name, (ns, after) in expected.items()
    ]
    random.shuffle(blocks)
    path = tmp_path_factory.mktemp("graph") / "graph.toml"
    path.write_text("".join(blocks))
    read = read_hand_made(path)
    found = {}
    for i, label in enumerate(read.labels):
        sources = sources_of(read, i)
        assert all(source < i for source in sources)
        found[label.name] = (int(read.ns[i]), {read.labels[s].name for s in sources})
    assert found == expected


TASK = '[[task]]\nname = "a"\nns = 1\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"no tasks; add a \[\[task\]\] with a name and its ns"),
        ("[[task]", "Expected ']]' at the end of an array declaration"),
        ("tasks = 1\n" + TASK, "unknown field `tasks`"),
        (TASK + TASK, "task a appears twice"),
        (TASK + 'after = ["b"]', "task a is after b, but there is no such task"),
        (TASK + 'after = ["a"]', "tasks wait for each other: a before a"),
        (TASK + "ns_ = 1", r"unknown field `ns_` - at `\$.task\[0\]`"),
        ('[[task]]\nname = "a"\nns = 0', r"Expected `int` >= 1 - at `\$.task\[0\].ns`"),
        ('[[task]]\nname = "a"\nns = "1"', r"Expected `int`, got `str`"),
        ('[[task]]\nname = "a"\nns = 1.5', r"Expected `int`, got `float`"),
        ('[[task]]\nname = " "\nns = 1', "the name or op of task 1 is empty"),
        ("[[task]]\nns = 1", "missing required field `name`"),
        (TASK + 'kind = "tensor"', r"Invalid enum value 'tensor' - at `\$.task\[0\].kind`"),
        (TASK + "bytes = 5\nload = 6", "task a loads 6 bytes, but it moves only 5 bytes"),
        (TASK + 'after = "b"', "Expected `array`, got `str`"),
        ('name = "a\x1b[2J"', "graph.toml: "),
    ],
)
def test_a_wrong_graph_is_one_clear_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "graph.toml").write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        read_hand_made(tmp_path / "graph.toml")
    assert str(caught.value).startswith(f"{tmp_path / 'graph.toml'}: ")
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "least", "most"),
    [
        ("ns", 1, 10**12),
        ("bytes", 0, 10**15),
        ("load", 0, 10**15),
        ("layer", -1, 2**31 - 1),
    ],
)
def test_a_number_of_a_task_is_within_its_bounds(
    field: str, least: int, most: int, tmp_path: Path
) -> None:
    path = tmp_path / "graph.toml"
    task = {"name": '"a"', "ns": 5}

    def read(value: int) -> int:
        path.write_text(
            "[[task]]\n" + "".join(f"{k} = {v}\n" for k, v in (task | {field: value}).items())
        )
        tasks = read_hand_made(path)
        return tasks.labels[0].layer if field == "layer" else int(getattr(tasks, field)[0])

    assert [read(least), read(most)] == [least, most]
    for beyond in (least - 1, most + 1):
        with pytest.raises(UsageError, match=rf"task\[0\]\.{field}"):
            read(beyond)


def test_a_task_of_which_only_name_and_time_are_given_has_no_layer(tmp_path: Path) -> None:
    (tmp_path / "graph.toml").write_text(TASK)
    tasks = read_hand_made(tmp_path / "graph.toml")
    (label,) = tasks.labels
    assert (label.op, label.kind, label.layer, label.block) == ("TASK", "vector", -1, "other")
    assert label.title == "TASK a"
    assert [int(of[0]) for of in (tasks.ns, tasks.bytes, tasks.load, tasks.copy)] == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("given", "moved"), [("bytes = 5\nload = 5", 5), ("bytes = 0\nload = 6", 6), ("bytes = 7", 7)]
)
def test_a_task_moves_its_bytes_or_else_its_load(given: str, moved: int, tmp_path: Path) -> None:
    (tmp_path / "graph.toml").write_text(TASK + given)
    assert read_hand_made(tmp_path / "graph.toml").bytes.tolist() == [moved]


def test_an_empty_op_is_refused_and_a_source_named_twice_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "graph.toml"
    path.write_text(TASK + 'op = " "')
    with pytest.raises(UsageError, match="the name or op of task 1 is empty"):
        read_hand_made(path)
    path.write_text(TASK + '[[task]]\nname = "b"\nns = 1\nafter = ["a", "a"]')
    assert read_hand_made(path).sources.tolist() == [0]


@pytest.mark.parametrize(("n", "hidden"), [(7, 0), (8, 1), (9, 2)])
def test_a_cycle_of_more_than_eight_names_is_shortened(n: int, hidden: int, tmp_path: Path) -> None:
    """A cycle names its first task again at its end."""
    path = tmp_path / "graph.toml"
    path.write_text(
        "".join(f'[[task]]\nname = "t{i}"\nns = 1\nafter = ["t{(i + 1) % n}"]\n' for i in range(n))
    )
    with pytest.raises(UsageError) as caught:
        read_hand_made(path)
    names = str(caught.value).partition("each other: ")[2].split(" before ")
    assert names[0] == names[-1]
    shown = [name for name in names if not name.startswith("…")]
    assert len(shown) == n + 1 - hidden
    assert [name for name in names if name not in shown] == [f"… {hidden} more …"] * bool(hidden)


def test_as_many_tasks_as_are_possible_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_made, "MOST_TASKS", 3)
    (tmp_path / "graph.toml").write_text(
        "".join(f'[[task]]\nname = "t{i}"\nns = 1\n' for i in range(3))
    )
    assert len(read_hand_made(tmp_path / "graph.toml")) == 3


def test_the_tasks_of_a_cycle_are_named_in_order(tmp_path: Path) -> None:
    after = {"a": [], "b": ["a", "d"], "c": ["b"], "d": ["c"], "e": ["d"]}
    text = "".join(f'[[task]]\nname = "{n}"\nns = 1\nafter = {a}\n' for n, a in after.items())
    (tmp_path / "graph.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        read_hand_made(tmp_path / "graph.toml")
    _, _, cycle = str(caught.value).partition("tasks wait for each other: ")
    names = cycle.split(" before ")
    assert names[0] == names[-1]
    assert sorted(names[1:]) == ["b", "c", "d"]
    for one, other in zip(names, names[1:], strict=False):  # noqa: RUF007
        assert one in after[other]


def test_a_long_cycle_is_shortened_and_too_many_tasks_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "graph.toml"
    tasks = [f'[[task]]\nname = "t{i}"\nns = 1\n' for i in range(101)]
    cycle = [f'{task}after = ["t{(i + 1) % 50}"]\n' for i, task in enumerate(tasks[:50])]
    path.write_text("".join(cycle))
    with pytest.raises(UsageError, match=r" before … 43 more … before t\d+$"):
        read_hand_made(path)
    monkeypatch.setattr(hand_made, "MOST_TASKS", 100)
    path.write_text("".join(tasks))
    with pytest.raises(UsageError, match="101 tasks; at most 100 are possible"):
        read_hand_made(path)


def test_engines_are_a_number_or_a_file(tmp_path: Path) -> None:
    assert parse_engines("4") == equal_engines(4) == Engines((EngineKind("engine", 4),))
    path = tmp_path / "engines.toml"
    path.write_text(ENGINES)
    engines = parse_engines(str(path))
    speed = {"MUL_MAT": 2.0, "*": 1.5}
    assert engines == Engines(
        (
            EngineKind("matrix", 4, frozenset({"matrix"}), speed, 50e9, 1 << 20),
            EngineKind("dma", 1, frozenset({"memory"}), {}, 1e10),
            EngineKind("any", 1),
        ),
        200,
        True,
    )
    assert engines.count() == 6
    assert [engines.name(i) for i in (0, 3, 4, 5)] == ["matrix 0", "matrix 3", "dma 0", "any 0"]


A = '[[engine]]\nname = "a"\n'
DMA = f'transfers = true\n{A}local_memory = 64\n[[engine]]\nname = "dma"\nruns = ["memory"]\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"no engines; add an \[\[engine\]\] with a name"),
        ("engines = 4", "unknown field `engines`"),
        (A + "speeds = 1", r"unknown field `speeds` - at `\$.engine\[0\]`"),
        (A + "count = 0", "engine a: count must be at least 1, got 0"),
        (A + "count = 5000", "5000 engines; at most 4096 are possible"),
        (A + "speed = { MUL_MAT = 0 }", "engine a: speed of MUL_MAT must be 1e-06 to 1e.06, got 0"),
        (A + "speed = { '*' = nan }", r"speed of \* must be 1e-06 to 1e.06, got nan"),
        (A + "speed = { mul_mat = 1 }", "'mul_mat' is neither a kind .matrix, vector, memory. nor"),
        (A + A, "engine a appears twice; use count for engines that are alike"),
        (A + 'runs = ["matrx"]', "'matrx' is neither a kind .matrix, vector, memory. nor an op"),
        (A + "runs = []", "engine a: runs is empty; leave it out"),
        (A + "bandwidth = -1", "bandwidth, in bytes per second, must be 1000 to 1e.18, got -1"),
        (A + "local_memory = 64", "engine a has local_memory; add transfers = true"),
        (A + "local_memory = 1", "local_memory must be 2 to 1152921504606846976 bytes, got 1"),
        ("handover_ns = -1\n" + A, "handover_ns must be 0 to 1000000000000, got -1"),
        ("transfers = true\n" + A, "transfers = true, but no engine has local_memory"),
        ("transfers = true\n" + A + "local_memory = 64", 'no engine has runs = ."memory".'),
        (DMA, "engine dma brings loads, so it needs a bandwidth"),
        (
            DMA + "bandwidth = 1e9\nlocal_memory = 64",
            "engine dma brings loads; it has no local_memory",
        ),
    ],
)
def test_wrong_engines_are_one_clear_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "engines.toml").write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        read_engines(tmp_path / "engines.toml")
    assert str(caught.value).startswith(f"{tmp_path / 'engines.toml'}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        A + "count = 4096",
        A + 'count = 4095\n[[engine]]\nname = "b"',
        "handover_ns = 1000000000000\n" + A,
        A + "bandwidth = 1000",
        A + "bandwidth = 1e18",
        A + "speed = { '*' = 1e-6, MUL_MAT = 1e6, vector = 1 }",
        DMA.replace("64", "2") + "bandwidth = 1e9",
        DMA.replace("64", "1152921504606846976") + "bandwidth = 1e9",
    ],
)
def test_engines_at_the_bounds_are_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "engines.toml").write_text(text)
    assert read_engines(tmp_path / "engines.toml").count() > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (A + 'count = 4096\n[[engine]]\nname = "b"', "4097 engines; at most 4096 are possible"),
        ("handover_ns = 1000000000001\n" + A, "handover_ns must be 0 to 1000000000000"),
        (A + "bandwidth = 999", "bandwidth, in bytes per second, must be 1000 to"),
        (A + "bandwidth = 2e18", r"must be 1000 to 1e.18, got 2e.18"),
        (A + "speed = { '*' = 1e7 }", "speed of . must be 1e-06 to"),
        (A + "local_memory = 1152921504606846977", "local_memory must be 2 to"),
        (A + 'runs = [""]', "'' is neither a kind"),
        ('[[engine]]\nname = " "', "an engine's name is empty"),
    ],
)
def test_engines_beyond_the_bounds_are_one_clear_line(
    text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "engines.toml").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_engines(tmp_path / "engines.toml")


def test_a_number_of_engines_is_1_to_4096() -> None:
    assert parse_engines("1").count() == 1
    assert parse_engines("4096").count() == 4096
    for text, got in (("999999999", 999999999), ("1234567890", 10**9)):
        with pytest.raises(UsageError, match=f"expected 1 to 4096, got {got}$"):
            parse_engines(text)


def test_an_engine_beyond_the_last_has_no_name() -> None:
    with pytest.raises(IndexError):
        equal_engines(2).name(2)


@pytest.mark.parametrize(("n", "ending"), [(8, "OP7 (vector)"), (9, "and 1 more")])
def test_up_to_eight_ops_are_named_if_an_engine_has_nothing_to_do(n: int, ending: str) -> None:
    labels = [Label(f"t{i}", f"OP{i} t", f"OP{i}", "vector", 0, "other") for i in range(n)]
    made = make_tasks([("ADD", 1, [])] * n)
    tasks = replace(made, labels=labels)
    idle = Engines((EngineKind("any", 1), EngineKind("m", 1, frozenset({"MUL_MAT", "matrix"}))))
    with pytest.raises(UsageError) as caught:
        check_usable(tasks, idle)
    text = str(caught.value)
    assert text.startswith("engine m: it runs MUL_MAT, matrix, but there is no such task;")
    assert text.endswith(ending)
    assert ("OP8" in text, "OP7" in text) == (False, True)


@pytest.mark.parametrize(
    "text", ["0", "4097", "99999999999999999999", "-1", "", "4.5", "none.toml"]
)
def test_what_is_neither_a_number_nor_a_file_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="engines: expected"):
        parse_engines(text)


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Is a directory"):
        read_engines(tmp_path)
    with pytest.raises(UsageError, match="No such file or directory"):
        read_hand_made(tmp_path / "none.toml")
