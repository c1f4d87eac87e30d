"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Of this process and of those that tests start, before any of them imports torch: its threads wait
# by spinning, so that on a machine with as many workers as cores a program takes two to four times
# the processor time with two threads each. Not `torch.set_num_threads`: of a forked child that
# inherits its number, torch ends the process where two of its backward threads start at once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Likewise, torch's compiler starts a process for each core, each of which imports torch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# As in an activated environment: CI starts pytest by its path, tests start torchrun by its name.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

# Properties are judged by what they find, never by how long a busy machine takes to find it. The
# same examples in each run: a change fails by its own doing. `make properties` draws new ones, and
# three times as many (`support/examples.py`).
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "default-seed", settings.get_profile("explore"), derandomize=True, max_examples=33
)
settings.load_profile("default-seed")


_BY_LIBRARIES = ("PYTEST_", "TORCHINDUCTOR_", "TRITON_")
"""Beginnings of the names of settings that others make in this process's environment."""


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_BY_LIBRARIES)}


NATIVE = "GPUPROBE_TEST_NATIVE"
"""The GPUs that `tests/native/test_marked_gpu.py` gives the tests: the native engine is loaded
before torch, and computes values."""

SIMULATED = "GPUPROBE_TEST_SIMULATED"
"""Set for the tests marked ``simulated`` by `tests/native/test_marked_gpu.py`: the engine is loaded
before torch, without a GPU.
"""

if os.environ.get(SIMULATED):
    from gpuprobe.native.process import preload

    preload()

if os.environ.get(NATIVE):
    from gpuprobe.native.session import EngineOptions, session

    NATIVE_SESSION = session(EngineOptions(os.environ[NATIVE]))
    NATIVE_SESSION.__enter__()

    def pytest_unconfigure() -> None:
        NATIVE_SESSION.__exit__(None, None, None)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """What a test leaves does not decide what the next one of its process finds: a process group
    is ended, and settings in the environment are put back, and are an error.
    """
    if os.environ.get(SIMULATED):
        yield  # its process ends, and has the settings of a GPU
        return
    before = _settings()
    _forget_captured_events()
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    after = _settings()
    for name in after.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    assert after == before


def _forget_captured_events() -> None:
    """Pinned memory that was freed while its stream was captured (by the garbage collector, in the
    middle of an earlier test) waits for an event that no call may ask: torch raises once for each,
    where the next test begins a capture.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.version.cuda or not torch.cuda.is_initialized():
        return
    for _ in range(100):
        try:
            torch._C._host_emptyCache()
        except RuntimeError as error:
            if "last recorded in a capturing stream" not in str(error):
                raise
        else:
            return


def pytest_collection_finish(session: pytest.Session) -> None:
    if os.environ.get(SIMULATED) and len(session.items) > 1:
        # What the first optimizer imports takes 2.5 s of processor time: once, not in each fork.
        import torch

        torch.optim.SGD([torch.zeros(())], lr=0.1)
    _freeze()


@pytest.fixture(autouse=True, scope="module")
def collections_are_quick() -> None:
    _freeze()


def _freeze() -> None:
    """Exclude what there is (torch, dynamo, a million objects of collected tests) from the garbage
    collections of the tests that follow: one of all of them takes a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_leftovers() -> None:
    """What earlier tests of this process left is no part of what this one records: their models,
    whose parameters a recorder would rightly count, and frames that dynamo compiled.
    """
    if os.environ.get(SIMULATED):
        return  # a process for each test
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
        dynamo.utils.counters.clear()
    _freeze()


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test marked ``simulated`` in a fork, which chooses its own GPU: a process keeps one."""
    if not os.environ.get(SIMULATED) or not item.get_closest_marker("simulated"):
        return None
    from _pytest.runner import runtestprotocol

    hook = item.config.hook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with os.fdopen(write, "w") as stream:
            for report in runtestprotocol(item, log=False, nextitem=None):
                data = hook.pytest_report_to_serializable(config=item.config, report=report)
                stream.write(json.dumps(data) + "\n")
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        lines = stream.readlines()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"{item.nodeid}: the process ended with {status}"
    for line in lines:
        report = hook.pytest_report_from_serializable(config=item.config, data=json.loads(line))
        if isinstance(report.longrepr, list):  # JSON has no tuples
            report.longrepr = tuple(report.longrepr)
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get(SIMULATED):
        elsewhere = pytest.mark.skip(reason="see tests/native/test_marked_gpu.py")
        for item in items:
            if item.get_closest_marker("simulated"):
                item.add_marker(elsewhere)
    else:
        return  # a test chooses a GPU before torch may look for one
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    try:
        import torch

        reason = "" if torch.cuda.is_available() else "no GPU: see tests/native/test_marked_gpu.py"
    except ImportError:
        reason = "torch is not installed"
    if reason:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))
