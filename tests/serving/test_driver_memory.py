"""Memory of the driver's own in the native engine's runtime, as a serving estimate counts it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gpuprobe.errors import EnvironmentUnavailable
from gpuprobe.native.libraries import core

_PROGRAM = """
import ctypes, sys
core = ctypes.CDLL(sys.argv[1])
core.gpn_used.restype = ctypes.c_ulonglong
core.gpn_driver_memory.argtypes = (ctypes.c_int, ctypes.c_longlong)
core.gpn_graphs_made.restype = core.gpn_graph_nodes_made.restype = ctypes.c_ulonglong
assert core.gpn_cudaSetDevice(0) == 0
def used():
    return core.gpn_used(0) >> 20
found = [used()]
for more in (1 << 20, 1 << 20, 3 << 20, -(4 << 20)):
    core.gpn_driver_memory(0, more)
    found.append(used())
core.gpn_driver_memory(5, 1 << 20)   # no such device
graph, runs = ctypes.c_void_p(), ctypes.c_void_p()
core.gpn_cudaGraphCreate(ctypes.byref(graph), 0)
core.gpn_cudaGraphInstantiate(ctypes.byref(runs), graph, ctypes.c_ulonglong(0))
found.append(used())
found += [core.gpn_graphs_made(), core.gpn_graph_nodes_made()]
core.gpn_cudaGraphExecDestroy(runs)
found.append(used())
print(found)
"""


def test_it_adds_up_in_bytes_and_takes_whole_granules() -> None:
    try:
        library = core()
    except EnvironmentUnavailable as error:
        pytest.skip(str(error))
    settings = (
        f"cuda=13000;graph_bytes={4 << 20};device=G;total_memory={1 << 34};context_bytes={1 << 28}"
    )
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(library)],
        env={**os.environ, "GPUPROBE_NATIVE": settings},
        capture_output=True,
        text=True,
        check=True,
    )
    # MiB: 0, 1, 2, 5 and 1 of the driver, in granules of 2; then a graph of 4; graphs and nodes.
    assert done.stdout.split("\n")[0] == str([256, 258, 258, 262, 258, 262, 1, 0, 258])
