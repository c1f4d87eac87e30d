"""How close `gpuprobe.estimate` comes to what was recorded on real GPUs.

    python benchmarks/estimate_accuracy.py                     every truth file in tests/recorded
    python benchmarks/estimate_accuracy.py PATH... [--case 'gpt2-*'] [--json]
    python benchmarks/estimate_accuracy.py --snapshots DIR     public snapshots, see
                                                               benchmarks/gpu/snapshot_programs.py

For each truth file (``benchmarks/gpu/record_truth.py`` wrote them) the same case is estimated in
a separate process, from the start of the process on, with the allocator settings of the
recording, and held against the recorded peaks over the whole run. Of a snapshot only the peaks of
the recorded stretch are known, and neither the GPU nor the version of torch. Exit code: 0 if the
goals are met, 1 if not, 3 if there is nothing to compare or no estimator, 4 for bad files.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
if str(HERE / "gpu") not in sys.path:
    sys.path.insert(0, str(HERE / "gpu"))

if __name__ == "__main__":  # before torch, which the cases import
    from gpuprobe.catalogue.gpus import parse_spec
    from gpuprobe.native.process import load

    load(parse_spec("h100-80gb"), endless=True)

from reference_models import cases  # noqa: E402
from snapshot_programs import programs  # noqa: E402
from truth_files import Truth, read_truth, truth_files  # noqa: E402

from gpuprobe.errors import GpuprobeError  # noqa: E402
from gpuprobe.model.text import human_delta  # noqa: E402

CHILD_LIMIT = 300  # seconds for one estimate
SETTINGS = (  # environment variables that decide what is allocated: as in the recorded run
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
)

# The goals of the project: equal in at least this share of cases, and the worst difference.
ALLOCATED_GOAL = (0.90, 0.005)
RESERVED_GOAL = (0.80, 0.01)


@dataclass(frozen=True)
class Estimated:
    """Bytes. ``reserved_low`` and ``reserved_high`` bound the stated range."""

    peak_allocated: int
    peak_reserved: int
    reserved_low: int
    reserved_high: int


@dataclass(frozen=True)
class Row:
    """One case on one GPU. ``problem``: why there is no estimate."""

    case: str
    gpu: str
    torch: str
    allocated: int
    reserved: int
    estimate: Estimated | None
    problem: str = ""

    @property
    def allocated_off(self) -> int:
        """Estimate less truth, bytes."""
        return self._estimate.peak_allocated - self.allocated

    @property
    def reserved_off(self) -> int:
        return self._estimate.peak_reserved - self.reserved

    @property
    def inside(self) -> bool:
        """Whether the recorded peak of reserved memory is in the estimated range."""
        return self._estimate.reserved_low <= self.reserved <= self._estimate.reserved_high

    @property
    def _estimate(self) -> Estimated:
        if self.estimate is None:
            raise ValueError(f"{self.case} was not estimated: {self.problem}")
        return self.estimate


@dataclass(frozen=True)
class Figures:
    """``equal`` to the byte; ``median`` and ``worst`` are shares of the truth, not negative."""

    equal: int
    median: float
    worst: float


@dataclass(frozen=True)
class Summary:
    """``cases`` counts the truth files; those without an estimate count as not equal."""

    cases: int
    estimated: int
    allocated: Figures
    reserved: Figures
    inside: int

    @property
    def goals(self) -> dict[str, bool]:
        """Each goal of the project, and whether it is met."""

        def share(count: int) -> float:
            return count / self.cases if self.cases else 0.0

        return {
            f"allocated equal in {ALLOCATED_GOAL[0]:.0%}": share(self.allocated.equal)
            >= ALLOCATED_GOAL[0],
            f"allocated worst {ALLOCATED_GOAL[1]:.1%}": self.allocated.worst <= ALLOCATED_GOAL[1],
            f"reserved equal in {RESERVED_GOAL[0]:.0%}": share(self.reserved.equal)
            >= RESERVED_GOAL[0],
            f"reserved worst {RESERVED_GOAL[1]:.1%}": self.reserved.worst <= RESERVED_GOAL[1],
            "reserved inside the stated range in all": self.inside == self.cases,
            "every case estimated": self.estimated == self.cases,
        }


def row_of(truth: Truth, estimate: Estimated | None, problem: str = "") -> Row:
    """Truth and estimate side by side. The truth must have peaks."""
    if not isinstance(truth.peak_allocated, int) or not isinstance(truth.peak_reserved, int):
        raise ValueError(f"{truth.case} has no peaks")
    gpu = getattr(truth.gpu, "title", "unknown GPU")
    return Row(
        truth.case, gpu, truth.torch, truth.peak_allocated, truth.peak_reserved, estimate, problem
    )


def summarise(rows: Sequence[Row]) -> Summary:
    done = [row for row in rows if row.estimate is not None]
    return Summary(
        cases=len(rows),
        estimated=len(done),
        allocated=_figures([(row.allocated_off, row.allocated) for row in done]),
        reserved=_figures([(row.reserved_off, row.reserved) for row in done]),
        inside=sum(row.inside for row in done),
    )


def _figures(pairs: Sequence[tuple[int, int]]) -> Figures:
    """From (difference, truth) of each case."""
    if not pairs:
        return Figures(0, 0.0, 0.0)
    shares = [abs(off) / truth if truth else float(off != 0) for off, truth in pairs]
    return Figures(sum(off == 0 for off, _ in pairs), statistics.median(shares), max(shares))


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The rows as text."""
    yield (
        f"{'case':30} {'allocated':>14} {'estimate':>14} {'difference':>22}   "
        f"{'reserved':>14} {'estimate':>14} {'difference':>22}  range"
    )
    for row in rows:
        if row.estimate is None:
            yield f"{row.case:30} {row.allocated:14,} no estimate: {row.problem}"
            continue
        yield (
            f"{row.case:30} {row.allocated:14,} {row.estimate.peak_allocated:14,} "
            f"{_difference(row.allocated_off, row.allocated):>22}   "
            f"{row.reserved:14,} {row.estimate.peak_reserved:14,} "
            f"{_difference(row.reserved_off, row.reserved):>22}  "
            f"{'inside' if row.inside else 'outside'}"
        )


def _difference(off: int, truth: int) -> str:
    if not off:
        return "equal"
    return f"{human_delta(off)} ({off / truth:+.2%})" if truth else human_delta(off)


def summary_lines(summary: Summary) -> Iterator[str]:
    count = summary.cases
    for name, figures in (("allocated", summary.allocated), ("reserved", summary.reserved)):
        yield (
            f"{name:10} equal in {figures.equal} of {count}, median {figures.median:.3%}, "
            f"worst {figures.worst:.3%}"
        )
    yield f"reserved   inside the stated range in {summary.inside} of {count}"
    for goal, met in summary.goals.items():
        yield f"{'met    ' if met else 'NOT MET'} {goal}"


# -- one estimate, in a separate process


def estimate_case(truth: Truth) -> Estimated:
    """What gpuprobe estimates for the run that ``truth`` describes."""

    case = cases()[truth.case]

    def program() -> None:
        # The run of record_truth.py, but for reading the loss, which takes no device memory.
        step = case.build("cuda", tiny=truth.tiny)
        for _ in truth.steps:
            loss = step()
            del loss

    return _estimate(program, gpu_name(truth), "real" if case.values else "shapes")


def estimate_program(name: str) -> Estimated:
    """What gpuprobe estimates for a program of ``snapshot_programs``."""
    chosen = programs()[name]

    def program() -> None:
        for _ in chosen.run("cuda", chosen.sizes):
            pass

    return _estimate(program, chosen.gpu, "shapes")


def _estimate(program: Callable[[], None], gpu: str, compute: str) -> Estimated:
    import gpuprobe

    result: Any = gpuprobe.estimate(program, gpu=gpu, steps=1, compute=compute)
    return Estimated(
        result.peak_allocated, result.peak_reserved, result.reserved_low, result.reserved_high
    )


def gpu_name(truth: Truth) -> str:
    """The catalogue's name of the GPU of a truth file. Raises ConfigError for an unknown one."""
    from gpuprobe.catalogue.gpus import find

    return find(getattr(truth.gpu, "title", "")).name


def estimate_apart(target: str, settings: Mapping[str, str]) -> tuple[Estimated | None, str]:
    """An estimate in a fresh process: (estimate, "") or (None, why not).

    ``target`` is a truth file or the name of a program; ``settings`` are the environment
    variables of the recorded run that decide what is allocated.
    """
    environment = {name: text for name, text in os.environ.items() if name not in SETTINGS}
    environment.update((name, settings[name]) for name in SETTINGS if settings.get(name))
    try:
        done = subprocess.run(
            [sys.executable, str(HERE / "estimate_accuracy.py"), "--child", target],
            capture_output=True,
            text=True,
            timeout=CHILD_LIMIT,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer in {CHILD_LIMIT} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return None, lines[-1] if lines else f"exit code {done.returncode}"
    return Estimated(**json.loads(done.stdout.splitlines()[-1])), ""


# -- what there is to compare


def truth_rows(roots: Sequence[Path], pattern: str) -> Iterator[Row]:
    """A row for each truth file with peaks. Raises DataError for a damaged one."""
    for root in roots:
        for path in truth_files(root):
            truth = read_truth(path)
            has_peaks = truth.outcome == "ok" and isinstance(truth.peak_allocated, int)
            if has_peaks and fnmatch.fnmatchcase(truth.case, pattern):
                settings = {**truth.flags, "PYTORCH_CUDA_ALLOC_CONF": truth.allocator_conf}
                yield row_of(truth, *estimate_apart(str(path), settings))


def snapshot_rows(folder: Path, pattern: str) -> Iterator[Row]:
    """A row for each snapshot in ``folder`` that there is a program for."""
    import gpuprobe

    for name in programs():
        path = folder / f"{name}.pickle"
        if path.exists() and fnmatch.fnmatchcase(name, pattern):
            recorded = gpuprobe.replay(path)
            estimate, problem = estimate_apart(name, {})
            peaks = recorded.peak_allocated, recorded.peak_reserved
            yield Row(name, "unknown", "unknown", *peaks, estimate, problem)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", nargs="*", type=Path, help="truth files, or folders of them")
    parser.add_argument("--case", default="*", help="only cases of this name (with * and ?)")
    parser.add_argument("--json", action="store_true", help="rows and summary as JSON")
    parser.add_argument("--snapshots", type=Path, help="folder of public snapshots, instead")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        known = args.child in programs()
        made = (
            estimate_program(args.child) if known else estimate_case(read_truth(Path(args.child)))
        )
        print(json.dumps(asdict(made)))
        return 0
    import gpuprobe

    if not hasattr(gpuprobe, "estimate"):
        print("this gpuprobe has no estimate()", file=sys.stderr)
        return 3
    roots = args.path or [ROOT / "tests" / "recorded"]
    try:
        if args.snapshots:
            rows = list(snapshot_rows(args.snapshots, args.case))
        else:
            rows = list(truth_rows(roots, args.case))
    except GpuprobeError as error:
        print(error, file=sys.stderr)
        return 4
    if not rows:
        where = ", ".join(str(root) for root in ([args.snapshots] if args.snapshots else roots))
        print(
            f"no truth recorded on a GPU under {where}: benchmarks/gpu/record_truth.py does it",
            file=sys.stderr,
        )
        return 3
    summary = summarise(rows)
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "summary": asdict(summary)}))
    else:
        print("\n".join((*table(rows), "", *summary_lines(summary))))
    return 0 if all(summary.goals.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
