"""What made a session slow, in words: at most five findings, the costliest first.

Invariant: a finding is silent unless its own figure in the log exceeds a limit that its rule names.
Nothing is guessed from the machine's name.
"""

from __future__ import annotations

from converters.analyses.findings.facts import Facts, Finding
from converters.analyses.findings.facts import gather_facts as gather_facts
from converters.analyses.findings.rules import RULES
from converters.report.report import Cell, Column, Figures, Report
from llamacpp_instr.log.session import Session, Table
from llamacpp_instr.probe.file import Probe

MOST = 5


def find_causes(session: Session, steps: Table, probe: Probe | None = None) -> list[Finding]:
    """The findings of `steps`, which are those that count, the largest share first. Without a probe
    of the machine that recorded the session, nothing is said about its memory."""
    return _causes(gather_facts(session, steps, probe))


def _causes(facts: Facts) -> list[Finding]:
    if not len(facts.steps):
        return []
    found = [finding for rule in RULES if (finding := rule(facts)) is not None]
    return sorted(found, key=lambda finding: -finding.share)[:MOST]


def compute_findings(facts: Facts) -> Report:
    """The findings as a table; without rows if there are none."""
    found = _causes(facts)
    rows: list[list[Cell]] = [
        [finding.of, finding.share, f"{finding.what} {finding.advice}"] for finding in found
    ]
    figures: Figures = {finding.rule: (finding.share, "fraction") for finding in found}
    columns = [Column("Costs"), Column("share", "fraction"), Column("why, and what to try")]
    return Report("Findings", columns, rows, figures=figures)
