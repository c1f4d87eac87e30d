"""``compute="auto"``: shapes first, and all values where a run needs one and is small enough."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from gpuprobe.errors import ProgramFailed, TooLarge, UsageError, ValueNeeded
from gpuprobe.model.plans.estimate import Estimate
from gpuprobe.planning.peers import TRIAL, Peers
from gpuprobe.reporters.json.estimate import estimate_of
from gpuprobe.sampler.program import Program

COMPUTE: Final = ("auto", "shapes", "real")

ASKED: Final = "as requested"
_ENOUGH: Final = "sufficient for this script"


def estimate_with(
    compute: str,
    attempt: Callable[[str, str], tuple[Estimate, str]],
    again: Callable[[str], Estimate],
) -> Estimate:
    """The estimate of a run. ``attempt`` makes one with ``"shapes"`` or ``"real"`` values, and is
    told why; with it comes the line of the first size that depends on values, and was the largest
    possible (`gpuprobe.virtual.reads.bounds`), ``""`` where there was none. ``again`` makes one
    with all values, of the run as it was before the first attempt, and raises `TooLarge` where it
    is too large for that.

    Raises UsageError for an unknown ``compute``, and what they raise.
    """
    if compute not in COMPUTE:
        raise UsageError(f"unknown compute {compute!r}", hint=f"one of: {', '.join(COMPUTE)}")
    if compute != "auto":
        return attempt(compute, ASKED)[0]
    try:
        found, bounded = attempt("shapes", _ENOUGH)
    except ValueNeeded as error:
        needed = error.with_traceback(None)  # its frames keep the first run's tensors alive
        needed.__context__ = None
    else:
        return _exact(found, bounded, again) if bounded else found
    place = needed.place or "the program"
    try:
        return again(f"{place} needs a value, and the run is small enough to compute all values")
    except TooLarge as large:
        reason = str(large)
    raise ValueNeeded(
        f"{needed}; too large to compute all values with --compute auto: {reason}",
        hint=needed.hint,
        place=needed.place,
    ) from needed.__cause__


def _exact(bound: Estimate, place: str, again: Callable[[str], Estimate]) -> Estimate:
    """The estimate with all values, and the ``bound`` on it where that run is too large, or fails:
    many a program cannot be run twice in one folder.
    """
    try:
        return again(f"{place} has a size that depends on values, and the run is small enough")
    except TooLarge as large:
        why = f"with all values {large}"
    except ProgramFailed as failed:
        why = f"a second run failed: {failed}"
    return replace(bound, compute_why=f"sizes as at {place} are the largest possible; {why}")


class Start:
    """How a program was started: what a second run of it, in a process of its own, is given."""

    def __init__(self, program: Program) -> None:
        self._cwd = Path.cwd()
        self._environment = dict(os.environ)
        self._program = program

    def peers(self, rank: int, meeting: str = "", **order: Any) -> Peers:
        """The other ranks of a pretended job, of which this process is one. ``order`` is that of
        every rank.
        """

        def order_of(number: int, place: str) -> dict[str, Any]:
            return {**self.order(), **order, "rank": number, "meeting": place}

        return Peers(rank, order_of, cwd=self._cwd, environment=self._environment, meeting=meeting)

    def again(self, why: str, **order: Any) -> Estimate:
        """An estimate of the program from its beginning, within the bounds of `Budget`. It prints
        where the first run did, to stderr.

        Raises `TooLarge` beyond those bounds, ProgramFailed where there is no estimate.
        """
        done = subprocess.run(
            [sys.executable, "-c", TRIAL, json.dumps({**self.order(), **order, "why": why})],
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=self._cwd,
            env=self._environment,
            check=False,
        )
        document = answer_of(done.stdout, done.returncode)
        if "too_large" in document:
            raise TooLarge(document["too_large"])
        if "error" in document:
            text = f"{document['error']} (in a second run, with all values: {why})"
            raise ProgramFailed(text, hint=document.get("hint", ""))
        return estimate_of(document)

    def order(self) -> dict[str, Any]:
        """What a process is told of the program: see `gpuprobe.planning.trial`."""
        spec = self._program.spec
        module = "" if spec is None else spec.name.removesuffix(".__main__")
        first, *arguments = self._program.argv
        order = {"script": module or first, "module": bool(module), "arguments": arguments}
        return {**order, **self._program.changes}


def answer_of(output: str, code: int, last_words: Sequence[str] = ()) -> dict[str, Any]:
    """The document that a process printed last, or ``{"error": text}`` where it has printed none.
    ``code``: how it ended; ``last_words``: its other output.
    """
    try:
        found: dict[str, Any] = json.loads(output.strip().rpartition("\n")[2])
    except ValueError:
        import signal

        how = f"with code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        words = next((line for line in reversed(last_words) if line.strip()), "")
        return {"error": words.strip() or f"the estimate ended {how}"}
    return found
