"""What made a session slow, in words: at most five findings, the costliest first.

Invariant: a finding is silent unless its own figure in the log exceeds a limit that its rule names.
Nothing is guessed from the machine's name.
"""

from __future__ import annotations

from llamacpp_instr.converters.analyses.findings.facts import Facts, Finding
from llamacpp_instr.converters.analyses.findings.facts import gather_facts as gather_facts
from llamacpp_instr.converters.analyses.findings.rules import RULES
from llamacpp_instr.report.report import Cell, Column, Figures, Report

MOST = 5


def find_causes(facts: Facts) -> list[Finding]:
    """The findings, the largest share first."""
    if not len(facts.steps):
        return []
    found = [finding for rule in RULES if (finding := rule(facts)) is not None]
    return sorted(found, key=lambda finding: -finding.share)[:MOST]


def compute_findings(facts: Facts) -> Report:
    """The findings as a table; without rows if there are none."""
    found = find_causes(facts)
    rows: list[list[Cell]] = [
        [finding.of, finding.share, f"{finding.what} {finding.advice}"] for finding in found
    ]
    figures: Figures = {finding.rule: (finding.share, "fraction") for finding in found}
    columns = [Column("Costs"), Column("share", "fraction"), Column("why, and what to try")]
    return Report("Findings", columns, rows, figures=figures)
