"""What ran on a device is a task of that device, with its time there; the others do not change."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from statistics import median

import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.scheduling.schedule import Schedule
from llamacpp_instr.converters.scheduling.sources import Wanted, tasks_of_session
from llamacpp_instr.converters.scheduling.tasks import Engines, Tasks, equal_engines, read_engines
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.session import load_session
from tests.kit.log_readers import whole_events

FIXTURES = Path(__file__).parent.parent / "fixtures"
LOGS = ["vulkan-timed.log.gz", "vulkan-partly.log.gz"]
WANTED = Wanted("none", "list", 1, None, None, None, 1, 1, False)


def medians(log: Path) -> dict[str, Counter[int]]:
    """By device, empty for thread 0: how often each median time of a kernel occurs in the computes
    of the graph of most decodes, from the lines alone."""
    decodes: dict[int, int] = {}
    steps: set[int] = set()
    ops: dict[int, list[s.Ops]] = defaultdict(list)
    for e in whole_events(log):
        if isinstance(e, s.StepBegin) and e.phase == "decode":
            steps.add(e.step)
        elif isinstance(e, s.Compute) and e.step in steps:
            decodes[e.compute] = e.graph
        elif isinstance(e, s.Ops) and e.thread == 0:
            ops[e.compute].append(e)
    (graph, _), *_ = Counter(decodes.values()).most_common()
    computes = [compute for compute, of in decodes.items() if of == graph]
    found: dict[str, Counter[int]] = defaultdict(Counter)
    in_order = (sorted(ops[of], key=lambda e: (e.device, e.split)) for of in computes)
    for parts in zip(*in_order, strict=True):
        assert len({(of.device, of.split, of.plan) for of in parts}) == 1
        for times in zip(*(of.dur for of in parts), strict=True):
            found[parts[0].device][max(1, round(median(times)))] += 1
    return found


def tasks_of(log: Path, engines: Engines) -> Tasks:
    made, _ = tasks_of_session(load_session(log), WANTED, lambda *_: {})(engines)
    return made


@pytest.mark.parametrize("name", LOGS)
def test_each_kernel_is_a_task_where_it_ran(name: str) -> None:
    tasks = tasks_of(FIXTURES / name, equal_engines(2))
    found: dict[str, Counter[int]] = defaultdict(Counter)
    for i, ns in enumerate(tasks.ns.tolist()):
        found[tasks.label_of(i).device][ns] += 1
    assert found == medians(FIXTURES / name)


@pytest.mark.parametrize("name", LOGS)
def test_a_device_runs_its_tasks_and_no_others(name: str, tmp_path: Path) -> None:
    tasks = tasks_of(FIXTURES / name, equal_engines(2))
    made = WANTED.plan(tasks, equal_engines(2))
    assert [(kind.name, kind.count) for kind in made.engines.kinds] == [
        ("engine", 2), ("Vulkan0", 1),
    ]  # fmt: skip
    for i, engine in enumerate(made.engine.tolist()):
        assert made.engines.name(engine).startswith(tasks.label_of(i).device or "engine")
    (tmp_path / "two.toml").write_text(
        '[[engine]]\nname = "CPU"\n[[engine]]\nname = "GPUs"\ncount = 2\nruns = ["Vulkan0"]\n'
        'speed = { "*" = 10 }\n'
    )
    engines = read_engines(tmp_path / "two.toml")
    assert WANTED.plan(tasks, engines).engines == engines
    assert WANTED.plan(tasks, engines).makespan < made.makespan


def test_what_crosses_between_a_device_and_the_cpu_is_waited_for() -> None:
    """The copy that the scheduler makes is looked through: one chain leads through all layers."""
    tasks = tasks_of(FIXTURES / "vulkan-partly.log.gz", equal_engines(2))
    reached = {0}
    for i in range(1, len(tasks)):
        if reached.intersection(tasks.sources[tasks.first[i] : tasks.first[i + 1]].tolist()):
            reached.add(i)
    devices = Counter(tasks.label_of(i).device for i in reached)
    assert devices == {"": 51, "Vulkan0": 20}
    assert len(reached) == len(tasks)


def test_a_device_whose_kernels_are_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="Vulkan0 ran part of the graph, but the log does not"):
        tasks_of(FIXTURES / "vulkan-mixed.log.gz", equal_engines(1))


def plan_on(path: Path, text: str) -> Schedule:
    """The schedule of the demo model's decode, on the engines of a file with this text."""
    path.write_text(text)
    engines = read_engines(path)
    return WANTED.plan(tasks_of(FIXTURES / "demo-verbose.log", engines), engines)


MORE_MACHINES = """handover_ns = 5_000_000
[[engine]]
name = "client"
layers = "0"
[[engine]]
name = "a"
layers = "1"
[[engine]]
name = "b"
layers = "2-3"
"""


def test_layers_are_put_on_machines_that_were_not_there(tmp_path: Path) -> None:
    """A log of one machine on three: each gets its layers, and what crosses to another one takes
    the hand-over."""
    made = plan_on(tmp_path / "more.toml", MORE_MACHINES)
    tasks = made.tasks
    where: dict[int, set[str]] = defaultdict(set)
    for i, engine in enumerate(made.engine.tolist()):
        where[tasks.label_of(i).layer].add(made.engines.name(engine))
    del where[-1]
    assert where == {0: {"client 0"}, 1: {"a 0"}, 2: {"b 0"}, 3: {"b 0"}}
    alone = WANTED.plan(tasks, equal_engines(1))
    crossings = made.makespan - int(tasks.ns.sum())
    assert crossings >= 2 * 5_000_000
    assert made.makespan < alone.makespan + 4 * 5_000_000


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ("a-b", "engine a: layers must be like 7 or 0-7, got a-b"),
        ("3-1", "engine a: layers must be like 7 or 0-7, got 3-1"),
        ("900", "engine a: it runs all in layers 900, but there is no such task"),
        ("0-2", "no engine runs .* of layer 3; add the layer to what one of them runs"),
    ],
)
def test_layers_that_fit_nothing_are_named(layers: str, problem: str, tmp_path: Path) -> None:
    text = f'[[engine]]\nname = "a"\nlayers = "{layers}"\n'
    if layers == "900":
        text += '[[engine]]\nname = "client"\n'
    with pytest.raises(UsageError, match=problem):
        plan_on(tmp_path / "x.toml", text)
