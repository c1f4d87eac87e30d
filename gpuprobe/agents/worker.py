"""The process of one call of a tool.

The request is one line of JSON on stdin: ``tool``, ``arguments``, ``folders`` (`Folders`) and
``most`` (the size of a document in bytes). The process writes lines of JSON to stdout: ``progress``
(a text), and finally ``document`` with ``cut`` (`Cut`), or ``error`` and ``hint``, or both.
Everything else that is printed goes to stderr. If stdin ends, the server has ended, and this
process group ends too.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from gpuprobe.agents.bounds import encoded, shorten
from gpuprobe.agents.folders import Folders
from gpuprobe.agents.tools import TOOLS, Notify, WithFailure, parameters
from gpuprobe.errors import DataError, GpuprobeError, InternalError, ProgramFailed
from gpuprobe.processes import Channel


def main() -> None:
    """Run the call that stdin requests."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored in the server
    channel = Channel()
    request = channel.receive()
    if request is None:
        return
    channel.end_with_requests()
    os.chdir(request["folders"][0])

    def notify(text: str) -> None:
        channel.write(encoded({"progress": text}))

    with contextlib.redirect_stdout(sys.stderr):
        reply = call(request, notify)
    sys.stderr.flush()
    # The server interrupts a process that still runs when it has the reply.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel.write(encoded(reply))


def call(request: Mapping[str, Any], notify: Notify) -> dict[str, Any]:
    """The reply to a request."""
    tool = TOOLS[request["tool"]]
    try:
        folders = Folders(tuple(request["folders"]))
        arguments = dict(request["arguments"])
        for name, (_, parameter) in parameters(tool).items():
            # os.path: a Path raises OSError for a name that is too long for a file.
            exists = parameter.name_or_path and os.path.exists(arguments[name])  # noqa: PTH110
            if parameter.path or exists:
                arguments[name] = folders.resolve(arguments[name])
        return _document(tool.function(notify, **arguments), tool.name, request["most"])
    except WithFailure as failure:
        _show_cause(failure)
        result = _document(failure.result, tool.name, request["most"])
        return {"error": str(failure), "hint": failure.hint, **result}
    except GpuprobeError as error:
        _show_cause(error)
        return {"error": str(error), "hint": error.hint}
    except MemoryError:
        return {"error": "not enough memory on this machine", "hint": ""}
    except Exception as error:  # noqa: BLE001 - the last stop: a bug of gpuprobe
        traceback.print_exc()
        bug = InternalError(f"internal error: {type(error).__name__}: {error}")
        return {"error": str(bug), "hint": "please report it with the traceback on stderr"}


def _document(result: object, tool: str, most: int) -> dict[str, Any]:
    """The document that the command prints with ``--json``, shortened."""
    from gpuprobe.api.render import render

    text = io.StringIO()
    render(result, "json", text)
    document = json.loads(text.getvalue())
    try:
        cut = shorten(document, most)
    except DataError as error:
        hint = f"gpuprobe {tool} --json prints all, or gpuprobe mcp --max-output BYTES"
        raise DataError(str(error), hint=hint) from None
    return {"document": document, "cut": cut}


def _show_cause(error: GpuprobeError) -> None:
    """Print the traceback of the user's program, if it failed."""
    if isinstance(error, ProgramFailed) and error.__cause__ is not None:
        from gpuprobe.api.watch import own_traceback

        sys.stderr.write(own_traceback(error.__cause__))


if __name__ == "__main__":
    main()
