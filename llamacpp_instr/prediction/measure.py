"""Measures the costs of kernels: records random models, and fits the costs to the recordings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from llamacpp_instr.base.system import temporary_directory
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.log.session import load_session
from llamacpp_instr.prediction.fit import fit
from llamacpp_instr.prediction.probe.file import KernelModel
from llamacpp_instr.prediction.recorded import SUBJECTS, Subject, record_subjects
from llamacpp_instr.prediction.samples import Sample, samples


def measure_kernels(
    threads: Sequence[int], on_progress: OnProgress, subjects: Sequence[Subject] = SUBJECTS
) -> KernelModel:
    """The costs for these numbers of threads; `on_progress` gets the recordings done and in total.
    Needs scipy. Must not be called while a session is recorded."""
    found: dict[str, list[Sample]] = defaultdict(list)
    joules: dict[int, float] = defaultdict(float)
    seconds: dict[int, float] = defaultdict(float)
    total = len(subjects) * len(threads)
    with temporary_directory("instr-probe-") as folder:
        for done, recorded in enumerate(record_subjects(folder, threads, subjects), 1):
            found[recorded.model] += samples(load_session(recorded.log))
            recorded.log.unlink()
            if recorded.joules is not None:
                joules[recorded.threads] += recorded.joules
                seconds[recorded.threads] += recorded.seconds
            on_progress(done, total)
    watts = {n: float(f"{joules[n] / seconds[n]:.4g}") for n in joules if joules[n] > 0}
    return fit(list(found.values()), watts)
