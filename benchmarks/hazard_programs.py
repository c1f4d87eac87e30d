"""The programs of the hazard corpora, run in processes forked from one that has torch.

A program that ends its process loses only itself, and each begins with the first of torch's
streams, whatever ran before it.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "hazards")]

from native_operators import in_child  # noqa: E402

GPUS = "2xh100-80gb"


class Program(NamedTuple):
    """``kinds``: those that must be found, None for a bug, of which ``kind`` and ``lines`` must be
    among them. ``latent``: whether races that did not happen in this run count.
    """

    corpus: str
    name: str
    text: str
    kinds: tuple[str, ...] | None = ()
    kind: str = ""
    lines: tuple[int, int] = (0, 0)
    latent: bool = False


def programs() -> list[Program]:
    """All of `tests/hazards`. Imports torch."""
    import ordinary_workloads
    import upstream_corpus
    import variants_indices
    import variants_streams
    from hazard_corpus import CASES

    found = [Program("own", case.name, case.text, case.kinds) for case in CASES]
    families = (variants_indices, variants_streams)
    for corpus, groups, latent in (
        ("upstream", (upstream_corpus,), False),
        ("variants", families, True),
    ):
        for group in groups:
            for bug in group.BUGS:
                found += [
                    Program(
                        f"{corpus}, bugs",
                        f"{bug.name} (buggy)",
                        bug.buggy,
                        None,
                        bug.kind,
                        bug.lines,
                        latent,
                    ),
                    Program(f"{corpus}, mended", f"{bug.name} (mended)", bug.mended, latent=latent),
                ]
            correct = group.CASES if latent else group.CORRECT
            found += [
                Program(f"{corpus}, correct", f"{case.name} (correct)", case.text, latent=latent)
                for case in correct
            ]
    for name in ordinary_workloads.WORKLOADS:
        text = f"import ordinary_workloads\nordinary_workloads.WORKLOADS[{name!r}]()\n"
        found.append(Program("workloads", f"{name} (workload)", text))
    return found


def chosen(names: Collection[str], done: Collection[str]) -> list[Program]:
    """The programs of these names, or all, without those that are done. Raises SystemExit for an
    unknown name.
    """
    found = programs()
    unknown = set(names) - {one.name for one in found}
    if unknown:
        raise SystemExit(f"no such program: {', '.join(sorted(unknown))}")
    return [one for one in found if one.name not in done and (not names or one.name in names)]


def begin() -> None:
    """Load the simulated GPUs, and then all that programs import, before `run_each`."""
    from gpuprobe.catalogue.gpus import parse_spec
    from gpuprobe.native.process import load

    load(parse_spec(GPUS))
    programs()
    import test_hazard_corpus  # noqa: F401 - `run` does


def gpus() -> AbstractContextManager[Any]:
    """Two GPUs. In a program's process: they run backward passes at their start, and autograd's
    threads do not survive a fork.
    """
    from gpuprobe.native.session import EngineOptions, session

    return session(EngineOptions(GPUS))


def run(program: Program) -> Any:
    """Run a program as the tests do, and return what was found."""
    import torch
    from hazard_case import Case
    from test_hazard_corpus import judge

    torch.manual_seed(0)
    return judge(Case(program.name, "", (), program.text), program.text)


def run_each(
    left: Sequence[Program],
    account: Callable[[Program], Any],
    *,
    batch: int = 25,
    limit: float = 300.0,
) -> Iterator[tuple[Program, Any]]:
    """Each program with the result of ``account``, which must be data for JSON; ``{"error":
    ...}`` where it raises, ends its process, or takes more than ``limit`` seconds. A process runs
    ``batch`` of them, or as many until one ends it.
    """
    at = 0
    while at < len(left):
        part = left[at : at + batch]
        entries = in_child(functools.partial(_run_all, part, account), limit)
        for program in part:
            entry = next(entries, {"lost": "ended its process"})
            at += 1
            if "lost" in entry:
                yield program, {"error": entry["lost"]}
                break
            yield program, entry["result"]
        deque(entries, maxlen=0)  # until the process has ended


def _run_all(
    part: Sequence[Program],
    account: Callable[[Program], Any],
    report: Callable[[dict[str, Any]], None],
) -> None:
    with gpus():
        rewind = rewinding()
        for program in part:
            rewind()
            try:
                found = account(program)
            except Exception as error:  # noqa: BLE001 - a result like any other
                at = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{Path(at.filename).name}:{at.lineno}"
                found = {"error": f"{type(error).__name__}: {error} ({where})"[:400]}
            report({"result": found})


def rewinding() -> Callable[[], None]:
    """A function that makes the next stream of each device and priority the first of torch's again:
    torch returns 32 of them in turn, findings name them by their position, and each has its memory.
    """
    import torch

    pools = [(device, more) for device in range(torch.cuda.device_count()) for more in (0, -1)]
    last = {}
    for device, priority in pools:
        for _ in range(32):
            last[device, priority] = torch.cuda.Stream(device, priority).cuda_stream

    def rewind() -> None:
        for device, priority in pools:
            while torch.cuda.Stream(device, priority).cuda_stream != last[device, priority]:
                pass

    return rewind
