"""Sessions over several machines: the time of each machine and link, and what made them slow.

Invariant: times are selections from the one account (`log.steps.Account`). What only a machine's
own log shows is empty while that log is not merged, and a note says so. As in `findings`, a rule is
silent unless its own figure exceeds a limit that it names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator

import numpy as np

from llamacpp_instr.converters.analyses.device_causes import Cause
from llamacpp_instr.converters.analyses.tables import header
from llamacpp_instr.log.machines import (
    AWAY,
    GRAPH_COMPUTE,
    GRAPH_RECOMPUTE,
    PARTS,
    WAITING,
    WIRE,
    Link,
)
from llamacpp_instr.log.session import Session
from llamacpp_instr.log.steps import Account
from llamacpp_instr.model.file import role_of
from llamacpp_instr.report.report import Cell, Figures, Report, shown

AGAIN, AGAIN_COST = 0.5, 0.01
"""shares of the graphs that decodes compute, and of the time of the steps"""
RECOMPUTE_BYTES = 13
"""size of the command that computes the latest graph of a device again"""
SLOW_LINK = 0.2
"""share of the time of the steps"""
SLOWER, SLOWER_COST = 1.5, 0.05
"""ratio of the times of the same kernels, and share of the time of the steps"""


def machine_names(session: Session) -> list[str]:
    """Each machine that served the session, with its CPU if its log was merged."""
    served = (of for of in session.connections.values() if of.side == "client")
    cpus = {of.endpoint: of.host.cpu if of.host else "" for of in served}
    return [", ".join(filter(None, of)) for of in cpus.items()]


def machine_reports(account: Account) -> Iterator[Report]:
    """The time of each machine and the links to them, or, for a machine's own log, what it served;
    nothing for a session on one machine."""
    yield from _served(account)
    if not account.machines.names:
        return
    known = [name for name in account.machines.names if account.machines.is_known(name)]
    yield _times(account, known)
    yield _links(account, known)


def _served(account: Account) -> Iterator[Report]:
    """What this process did for clients."""
    calls = account.session.calls
    took = dict(account.session.computes.tuples("compute", "dur"))
    clients: dict[str, list[int]] = {}
    for number, of in account.session.connections.items():
        if of.side == "server":
            clients.setdefault(of.peer.rpartition(":")[0], []).append(number)
    rows: list[list[Cell]] = []
    for client, numbers in clients.items():
        mine = calls.rows(np.isin(calls["connection"], numbers))
        computed = sum(took.get(compute, 0) for compute in mine["compute"].tolist())
        worked = int((mine["done"] - mine["started"]).sum())
        sizes = (int(mine[name].sum()) for name in ("out", "in"))
        rows.append([client, len(numbers), len(mine), *sizes, computed, worked - computed])
    columns = header(
        "Client", ("count", "connections", "commands"), ("bytes", "received", "sent"),
        ("ns", "compute", "serialization"),
    )  # fmt: skip
    notes = ["This is the log of a server. Steps are in its client's: instr merge joins the two."]
    if rows:
        yield Report("Served", columns, rows, notes)


def _times(account: Account, known: list[str]) -> Report:
    rows: list[list[Cell]] = []
    for name, parts in account.by_machine.items():
        for phase in account.phases:
            there = account.steps["phase"] == phase
            spent = {part: int(ns[there].sum()) for part, ns in parts.items()}
            unknown = (AWAY,) if name in known else PARTS[:3]
            cells = [None if of in unknown and not ns else ns for of, ns in spent.items()]
            rows.append([name, phase, *cells])
    notes, figures = [], Figures()
    for phase in account.phases:
        there = account.steps["phase"] == phase
        whole = max(int(account.total[there].sum()), 1)
        spent = {part: int(ns[there].sum()) for part, ns in account.of_machines.items()}
        spent["the client"] = spent.pop(WAITING)
        figures |= {f"{part}, {phase}": (ns, "ns") for part, ns in spent.items()}
        shares = [
            f"{part} {100 * ns / whole:.1f} %"
            for part, ns in sorted(spent.items(), key=lambda of: -of[1])
            if ns
        ]
        notes.append(
            f"Where the time of {phase} went, each moment counted once: {', '.join(shares)}."
        )
    notes.append(
        "A machine waits while it has no command: the client or another machine is at work."
    )
    for name in account.machines.names:
        if name not in known:
            notes.append(
                f"The log of {name} was not merged (instr merge), so its time cannot be divided"
                " between the wire and the machine."
            )
    notes += _endings(account)
    return Report(
        "Machines", header("Machine", "phase", ("ns", *PARTS)), rows, notes,
        figures=figures, labels=2,
    )  # fmt: skip


def _endings(account: Account) -> Iterator[str]:
    """Machines that went away."""
    session = account.session
    for number, end in session.connections_ended.items():
        of = session.connections[number]
        if of.side == "client" and end.reason != "closed":
            yield f"{of.endpoint} went away: {_WHY[end.reason]}."


_WHY = {"peer": "it closed the connection", "failed": "a command failed"}


def _links(account: Account, known: list[str]) -> Report:
    phase = account.phases[-1] if "decode" not in account.phases else "decode"
    there = account.steps["phase"] == phase
    n = max(int(there.sum()), 1)
    rows: list[list[Cell]] = []
    n_bytes: list[float] = []
    links = [account.machines.link(name) for name in account.machines.names]
    for link in links:
        traffic = [int(of[there].sum()) / n for of in account.machines.traffic(link.machine)]
        n_bytes.append(traffic[1] + traffic[2])
        rows.append([
            link.machine, link.round_trip, link.rate_out, link.rate_in, *traffic, link.uncertainty,
        ])  # fmt: skip
    notes = [
        _slowest(account, links, n_bytes),
        f"Commands and bytes are those of one {phase}, on average.",
    ]
    if len(known) < len(links):
        notes.append(
            "A round trip to a machine whose log was not merged includes the machine's own time."
        )
    if known:
        notes.append("Clock: the largest error of a machine's times on the client's clock.")
    columns = header(
        "Machine", ("ns", "round trip"), ("bytes_per_second", "out/s", "in/s"),
        ("number", "commands"), ("bytes", "out", "in"), ("ns", "clock"),
    )  # fmt: skip
    return Report("Links", columns, rows, notes)


def _slowest(account: Account, links: list[Link], n_bytes: list[float]) -> str:
    """The link that took the most time of the steps, or whose round trip is the longest."""
    took = [_on_the_wire(account, link.machine) for link in links]
    slow = took
    if not all(account.machines.is_known(link.machine) for link in links):
        slow = [int(link.round_trip or 0) for link in links]  # `took` has a machine's own time
    at = slow.index(max(slow))
    link, share = links[at], took[at] / max(int(account.total.sum()), 1)
    has = [f"{shown(round(n_bytes[at]), 'bytes')} each time"]
    if link.round_trip is not None:
        has.insert(0, f"a round trip of {shown(link.round_trip, 'ns')}")
    if rates := [rate for rate in (link.rate_out, link.rate_in) if rate is not None]:
        has.append(f"{shown(min(rates), 'bytes_per_second')} per second")
    return (
        f"The slowest link is that to {link.machine}: {', '.join(has)};"
        f" {_WIRES[account.machines.is_known(link.machine)]} took {100 * share:.1f} % of the steps'"
        " time."
    )


_WIRES = {True: "its wire", False: "its wire and the machine"}


def _on_the_wire(account: Account, machine: str) -> int:
    parts = account.by_machine[machine]
    return int(parts[WIRE].sum() + parts[AWAY].sum())


# --- findings ---


def graph_again(account: Account) -> Cause:
    """Decodes send graphs that a machine already has (AGAIN, AGAIN_COST)."""
    decodes = account.steps.rows(account.steps["phase"] == "decode")
    n = again = n_bytes = cost = n_devices = 0
    for name, calls in account.machines.calls.items():
        inside = calls.rows(np.isin(calls["step"], decodes["step"]))
        sent = inside.rows(inside["command"] == GRAPH_COMPUTE)
        n += len(sent) + int((inside["command"] == GRAPH_RECOMPUTE).sum())
        again += len(sent)
        n_bytes += int(sent["out"].sum())
        known = sent["ran"] >= 0
        built = np.where(known, sent["ran"] - sent["started"], 0)
        wire = np.where(known, sent["received"], sent["written"]) - sent["sent"]
        cost += int(built.sum() + wire.sum())
        n_devices += len(_devices(account, name))
    share = cost / max(int(account.total.sum()), 1)
    if n < 2 * n_devices or not again or again / max(n, 1) < AGAIN or share < AGAIN_COST:
        return None
    what = (
        f"Decodes send {again:,} of {n:,} graphs again, {shown(n_bytes / again, 'bytes')} each"
        f" instead of {RECOMPUTE_BYTES} B, which took {shown(cost, 'ns')}."
    )
    contexts = account.session.contexts.values()
    advice = (
        "A machine keeps one graph for each device: give each a single run of layers, and keep"
        " the batches the same, so that graphs are reused."
    )
    if not all(of.offload_kqv for of in contexts):
        advice = (
            "The KV cache is on the client, which cuts each layer in two: leave it with the layers"
            " (offload_kqv, not --no-kv-offload)."
        )
    return what, share, advice


def slow_link(account: Account) -> Cause:
    """Steps wait for a link (SLOW_LINK)."""
    known = [name for name in account.machines.names if account.machines.is_known(name)]
    if not known:
        return None
    name = max(known, key=lambda of: int(account.by_machine[of][WIRE].sum()))
    ns = int(account.by_machine[name][WIRE].sum())
    share = ns / max(int(account.total.sum()), 1)
    if share < SLOW_LINK:
        return None
    link = account.machines.link(name)
    commands, out, back = (int(of.sum()) for of in account.machines.traffic(name))
    trip = shown(link.round_trip, "ns") if link.round_trip else "unknown"
    what = (
        f"The wire to {name} takes {shown(ns, 'ns')}: {commands:,} commands of"
        f" {shown(out + back, 'bytes')} in all, a round trip of {trip}."
    )
    pairs = (out, link.rate_out), (back, link.rate_in)
    moving = sum(n / rate * 1e9 for n, rate in pairs if rate)
    advice = "Only a shorter path helps, or fewer machines: each token crosses the link."
    if moving > ns / 2:
        advice = "Its rate is the limit: use a faster network, or smaller batches for prompts."
    return what, share, advice


def slow_machine(account: Account) -> Cause:
    """One machine takes longer than the others for the same kernels (SLOWER, SLOWER_COST)."""
    spent = _by_kernel(account)
    found: dict[str, tuple[int, float]] = {}
    for name in account.machines.names:
        own, usual = 0, 0.0
        for of_machines in spent.values():
            n, ns = of_machines.get(name, (0, 0))
            others = [of for other, of in of_machines.items() if other != name]
            if n and others:
                own += ns
                usual += n * sum(ns for _, ns in others) / sum(n for n, _ in others)
        if usual:
            found[name] = own, usual
    if not found:
        return None
    slowest = max(found, key=lambda name: found[name][0] / found[name][1])
    own, usual = found[slowest]
    share = (own - usual) / max(int(account.total.sum()), 1)
    if own < SLOWER * usual or share < SLOWER_COST:
        return None
    what = (
        f"{slowest} takes {own / usual:.1f} times as long as the others for the same kernels,"
        f" {shown(own - usual, 'ns')} more in decodes: each token waits for it."
    )
    return what, share, "Give it fewer layers (--tensor-split), or find what else it computes."


def _by_kernel(account: Account) -> dict[Hashable, dict[str, tuple[int, int]]]:
    """By op, role of the weight, and bytes: how many such kernels each machine ran in decodes, and
    their ns."""
    decode = account.steps["phase"] == "decode"
    names = {device: name for name in account.machines.names for device in _devices(account, name)}
    found: dict[Hashable, dict[str, tuple[int, int]]] = defaultdict(dict)
    for ops in account.device_ops:
        rows = np.flatnonzero(decode[account.rows_of(ops)])
        if ops.device not in names or not len(rows):
            continue
        name, kernels = names[ops.device], account.session.kernels(ops.plan)
        column = ops.dur[rows].sum(axis=0, dtype=np.int64).tolist()
        for i, ns in enumerate(column):
            weight = kernels.weight[i]
            key = kernels.label[i], weight and role_of(weight), int(kernels.bytes[i])
            before = found[key].get(name, (0, 0))
            found[key][name] = before[0] + len(rows), before[1] + ns
    return found


def _devices(account: Account, machine: str) -> list[str]:
    """The devices of a machine, as graphs name them: ggml calls them `RPC0[host:port]`."""
    names = {split.backend for of in account.session.graphs.values() for split in of.splits}
    return sorted(name for name in names if name.endswith(f"[{machine}]"))
