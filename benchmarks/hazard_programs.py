"""The programs of the hazard corpora, each run in a process forked from one that has torch.

A program that ends its process loses only itself, and each begins with the first of torch's
streams, whatever ran before it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "hazards")]
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
    import variants_autograd
    import variants_indices
    import variants_streams
    from hazard_corpus import CASES

    found = [Program("own", case.name, case.text, case.kinds) for case in CASES]
    families = (variants_autograd, variants_indices, variants_streams)
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


def begin(engine: str) -> None:
    """Load ``engine``, and then all that programs import, before `run_each`."""
    from gpuprobe.engines.base import Order
    from gpuprobe.engines.choice import prepare

    prepare(engine, Order(GPUS))
    programs()
    import test_hazard_corpus  # noqa: F401 - `run` does


def gpus(engine: str) -> AbstractContextManager[Any]:
    """Two GPUs. In a program's process: the native engine's runs backward passes at its start, and
    autograd's threads do not survive a fork.
    """
    from gpuprobe.engines.base import Order
    from gpuprobe.engines.choice import session

    return session(engine, Order(GPUS))


def run(program: Program) -> Any:
    """Run a program as the tests do, and return what was found."""
    from hazard_case import Case
    from test_hazard_corpus import judge

    return judge(Case(program.name, "", (), program.text), program.text)


def run_each(
    chosen: Iterable[Program], account: Callable[[Program], Any], limit: float = 300.0
) -> Iterator[tuple[Program, Any]]:
    """Each program with what ``account`` returns of it in a process of its own, which must be data
    for JSON; ``{"error": ...}`` where there is none within ``limit`` seconds.
    """
    for program in chosen:
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            _in_child(program, account, writing)
        os.close(writing)
        data, overdue = _read(reading, limit)
        if overdue:
            os.kill(child, signal.SIGKILL)
        os.close(reading)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if data:
            yield program, json.loads(data)
        else:
            why = f"not done after {limit:.0f} s" if overdue else f"ended its process ({status})"
            yield program, {"error": why}


def _in_child(program: Program, account: Callable[[Program], Any], writing: int) -> None:
    try:
        try:
            found = account(program)
        except Exception as error:  # noqa: BLE001 - a result like any other
            at = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(at.filename).name}:{at.lineno}"
            found = {"error": f"{type(error).__name__}: {error} ({where})"[:400]}
        with os.fdopen(writing, "w") as file:
            file.write(json.dumps(found))
        sys.stdout.flush()
    finally:
        os._exit(0)  # without what the forked process would do at its end


def _read(reading: int, limit: float) -> tuple[bytes, bool]:
    """What the child writes until it closes the pipe, and whether it took too long."""
    data = b""
    end = time.monotonic() + limit
    while True:
        ready, _, _ = select.select([reading], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return b"", True
        part = os.read(reading, 1 << 16)
        if not part:
            return data, False
        data += part
