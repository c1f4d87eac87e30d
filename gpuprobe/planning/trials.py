"""Estimates in separate processes: a second run of a program, and variations of a request.

A process makes one estimate, or forks a process for each of many
(`gpuprobe.planning.worker`): importing torch takes a few seconds, most of an estimate of a small
script, and a search makes a dozen. Requests and documents are JSON.
"""

from __future__ import annotations

import json
import math
import subprocess
from dataclasses import replace
from typing import Any, Final

from gpuprobe import processes
from gpuprobe.errors import DataError, DoesNotFit, ProgramFailed, TooLarge
from gpuprobe.model.io.codec import to_plain
from gpuprobe.model.plans.estimate import Estimate
from gpuprobe.model.plans.request import EstimateRequest, PriceList
from gpuprobe.planning.program import ProgramStart
from gpuprobe.reporters.json.plans import ESTIMATE

Document = processes.Document
"""The JSON document of an estimate; or ``error`` (with ``hint`` and ``needs_value``) or
``too_large``."""

WORKER: Final = "gpuprobe.planning.worker"
_LIMIT: Final = 1800  # seconds for one estimate
_SHORT: Final = 60.0
"""Seconds that each second run may take."""
_LATE: Final = 2.5
"""How many times as long as its floating-point operations predict: this machine may be busy. Some
operators are far slower: the backward pass of a convolution in fp16 (3x3, 64 channels, 56x56) had
0.8 billion operations a second on two cores, in fp32 12 billion, of the 50 that are assumed."""
TOO_SLOW: Final = "it was not finished in the time that its operations should take"
NO_TIME: Final = "the time of the estimate was over (--max-seconds)"
"""Why a second run was given up."""


def second_run(
    request: EstimateRequest, start: ProgramStart, seconds: float | None, left: float
) -> Estimate:
    """An estimate of a second run of the program, within the bounds of `Budget`, for the
    reason in the request. Its output goes to stderr. ``seconds``: how long it should take, if that
    is known and the run may be given up. ``left``: those that the estimate may still take.

    Raises `TooLarge` beyond those bounds and if it takes `_LATE` times as long, ProgramFailed if
    there is no estimate.
    """
    limit = math.inf if seconds is None else max(_SHORT, _LATE * seconds)
    try:
        done = subprocess.run(
            processes.command(WORKER, json.dumps(to_plain(request))),
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=start.cwd,
            env=start.environment,
            check=False,
            timeout=None if math.isinf(min(limit, left)) else min(limit, left),
        )
    except subprocess.TimeoutExpired:
        raise TooLarge(TOO_SLOW if limit < left else NO_TIME) from None
    document = processes.last_document(done.stdout) or _without(done.returncode)
    if "too_large" in document:
        raise TooLarge(document["too_large"])
    if "error" in document:
        raise failure(document, after=f" (in a second run, with all values: {request.why})")
    return ESTIMATE.read(document)


def failure(document: Document, before: str = "", after: str = "") -> ProgramFailed | DataError:
    """The error in the document of an estimate that was not made: DataError if the program uses no
    memory of the GPU. ``before`` and ``after`` surround its text.
    """
    kind = DataError if document.get("without_gpu") else ProgramFailed
    kind = DoesNotFit if document.get("too_much") else kind
    return kind(f"{before}{document['error']}{after}", hint=document.get("hint", ""))


def _without(code: int, log: str = "") -> Document:
    """The document of a process that ended without one."""
    error = processes.last_line(log) or f"the estimate ended {processes.end_text(code)}"
    return {"error": error}


class EstimateServer(processes.Server):
    """Makes requested estimates one after the other, in a process that starts as the program of
    ``start`` did, which may have changed this process, by default as this process.
    """

    def __init__(self, start: ProgramStart | None = None) -> None:
        start = start or ProgramStart()
        # OpenMP's threads wait in a busy loop by default. In forked processes on a machine whose
        # cores are taken, small tensors took four times as long.
        environment = {"OMP_WAIT_POLICY": "passive", **start.environment}
        super().__init__(WORKER, cwd=start.cwd, environment=environment)

    def __call__(self, request: EstimateRequest) -> Document:
        """The JSON document of one estimate, or ``{"error": text}``."""
        found = self.within(request, _LIMIT)
        return found or {"error": f"the estimate took longer than {_LIMIT} s"}

    def within(self, request: EstimateRequest, seconds: float) -> Document | None:
        """The same; None after ``seconds``, when the estimate is ended."""
        reply = self.reply(to_plain(request), seconds)
        if reply.late:
            return None
        return reply.document or _without(reply.code, reply.log)


def varied(request: EstimateRequest, **fields: Any) -> EstimateRequest:
    """A request for a trial of a run, without what only the first estimate has: its recording, its
    price and its suggestions.
    """
    plain = replace(request, output="", recorded=(), prices=PriceList(), suggest=False)
    return replace(plain, **fields)
