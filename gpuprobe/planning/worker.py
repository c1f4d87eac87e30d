"""The processes of `gpuprobe.planning.trials`: with a request as argument, one that makes its
estimate and prints the document; without, one that serves the requests on its stdin.

The serving process has made no backward pass: autograd's threads do not survive a fork, and the
first backward pass starts them. Nor has it initialised CUDA, which does not survive one either.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

from gpuprobe.errors import (
    DataError,
    DoesNotFit,
    GpuprobeError,
    ProgramFailed,
    TooLarge,
    ValueNeeded,
)
from gpuprobe.model.io.codec import from_plain
from gpuprobe.model.plans.request import DEFAULT_GPU, EstimateRequest
from gpuprobe.planning.estimates import estimate_program, load_simulated
from gpuprobe.planning.program import described, program_of
from gpuprobe.processes import Channel, Document, Replies, end_with_parent, serve
from gpuprobe.reporters.json.plans import ESTIMATE
from gpuprobe.sampler.program import own_traceback


def main(arguments: list[str]) -> None:
    if not arguments:
        channel = Channel()
        load_simulated(DEFAULT_GPU)
        import torch  # noqa: F401 - for the forks

        serve(channel, estimated)
        return
    end_with_parent()
    replies = Replies()
    document = estimated(json.loads(arguments[0]))
    # The program may have left a line without an end, in the same file.
    replies.write(b"\n" + json.dumps(document).encode())


def estimated(plain: Any) -> Document:
    """The document of a requested estimate. What the program prints goes to stderr."""
    request = from_plain(EstimateRequest, plain)
    with contextlib.redirect_stdout(sys.stderr):
        return _document(request)


def _document(request: EstimateRequest) -> Document:
    try:
        program = program_of(request)
        if request.change not in ("", "expandable"):  # a setting of the allocator is in `conf`
            from gpuprobe.planning.changes import apply

            apply(request.change)
        return ESTIMATE.plain(estimate_program(request, program))
    except TooLarge as error:
        return {"too_large": str(error)}
    except GpuprobeError as error:
        cause = error.__cause__
        if cause is not None and isinstance(error, ProgramFailed):
            sys.stderr.write(own_traceback(cause))
        needs_value = isinstance(error, ValueNeeded)
        return {
            "error": f"{error}" if cause is None or needs_value else described(cause),
            "hint": error.hint,
            "needs_value": needs_value,
            "too_much": isinstance(error, DoesNotFit),
            "without_gpu": isinstance(error, DataError),
        }


if __name__ == "__main__":
    main(sys.argv[1:])
