"""One process in depth: what is too much for every row of a table."""

from __future__ import annotations

import os
import re

from gpuprobe.model.machine.process import ProcessDetails
from gpuprobe.model.values import ReadStatus, Unavailable
from gpuprobe.probes.host.describe import ProcTree
from gpuprobe.probes.host.live import parse_stat

_ENDED = Unavailable("the process has ended")


def process_details(pid: int, ticks: int, tree: ProcTree | None = None) -> ProcessDetails:
    """The process with this PID that started at ``ticks`` (clock ticks since boot); 0 for any.

    Nothing is masked here: `gpuprobe.api.monitor.process_details` is for screens.
    """
    tree = ProcTree() if tree is None else tree
    line = tree.read(str(pid), "stat")
    stat = line if isinstance(line, Unavailable) else parse_stat(line)
    if isinstance(stat, Unavailable) or (ticks and stat.start != ticks):
        return ProcessDetails(pid, _ENDED, _ENDED, _ENDED)
    command = tree.read(str(pid), "cmdline")
    environ = tree.read(str(pid), "environ")
    status = tree.read(str(pid), "status")
    threads = (
        None if isinstance(status, Unavailable) else re.search(r"^Threads:\s+(\d+)", status, 8)
    )
    return ProcessDetails(
        pid,
        command if isinstance(command, Unavailable) else tuple(command.rstrip("\0").split("\0")),
        _folder(tree, pid),
        environ
        if isinstance(environ, Unavailable)
        else tuple(
            (name, value)
            for name, equals, value in (one.partition("=") for one in environ.split("\0"))
            if equals
        ),
        int(threads.group(1)) if threads else 0,
    )


def _folder(tree: ProcTree, pid: int) -> str | Unavailable:
    try:
        return os.readlink(f"{tree.root}/{pid}/cwd")  # noqa: PTH115 (as `ProcTree`: no pathlib)
    except PermissionError:
        return Unavailable("no permission to read cwd", ReadStatus.DENIED)
    except OSError as error:
        return Unavailable(f"cwd: {error.strerror}")
