"""pytest: limits and regressions of GPU memory, per test.

::

    @pytest.mark.gpu_memory(max_peak="2 GiB", regression="1%", no_hazards=True, leaks=False)
    def test_training_step():
        ...

Loaded by an entry point. Without marked tests only this module is imported and none of its hooks
is called per test: those of `gpuprobe.pytest_plugin.hooks` are registered after the collection. On
a machine without a GPU the tests are measured on a simulated one, which has to be loaded before
torch, and thus before any conftest: if a file of the tests contains the name of the mark
(`gpuprobe.pytest_plugin.loading`).
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from gpuprobe.pytest_plugin.meter import Meter

_NAME = "gpu_memory"
_MARKER = (
    f"{_NAME}(max_peak=None, max_reserved=None, regression=None, step_time=None, "
    "max_syncs=None, no_hazards=False, leaks=True, group=''): limits on the GPU memory of "
    "this test, measured on a simulated GPU if there is no CUDA (gpuprobe)"
)


def _seconds(text: str) -> float:
    """A finite number from 0. Raises UsageError for anything else."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise pytest.UsageError(
            f"--gpuprobe-blame: expected a number of seconds from 0, found {text!r}"
        )
    return number


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpuprobe", "GPU memory (gpuprobe)")
    group.addoption(
        "--gpuprobe-update-baseline",
        action="store_true",
        help="update the memory baselines of marked tests",
    )
    group.addoption(
        "--gpuprobe-gpu",
        metavar="GPU",
        default="",
        help="measure on this simulated GPU (default without CUDA: gpu in [tool.gpuprobe], else "
        "h100-80gb)",
    )
    group.addoption(
        "--gpuprobe-baselines",
        metavar="DIR",
        default="gpuprobe-baselines",
        help="folder of the baselines, one file per test (default: gpuprobe-baselines)",
    )
    group.addoption(
        "--gpuprobe-blame",
        metavar="SECONDS",
        type=_seconds,
        default=60.0,
        help="if a test needs more memory than its baseline, run it with parts of the change taken "
        "back, to find the cause: this long for all tests together (default: 60; 0: rank the "
        "changes by rules)",
    )
    group.addoption(
        "--gpuprobe-most",
        metavar="N",
        type=int,
        default=None,
        help="show only the N tests with the highest peaks (0: none)",
    )
    group.addoption(
        "--gpuprobe-keep",
        metavar="DIR",
        default="",
        help="keep the recording of each measured test in this folder, for gpuprobe report",
    )
    group.addoption(
        "--gpuprobe-save",
        metavar="FILE",
        default="",
        help="write the memory of each test to this file (JSON)",
    )
    group.addoption(
        "--gpuprobe-compare",
        metavar="FILE",
        default="",
        help="show each test's change since this file",
    )


@pytest.hookimpl(tryfirst=True)  # before conftest files, and plugins that import torch
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    if importlib.util.find_spec("torch") is not None:
        from gpuprobe.pytest_plugin import loading

        loading.load(early_config, _NAME)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)


def _measured(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests that are marked or use the fixture. Most suites have none: the marks of a parent
    are read once, not once for each of its tests.
    """
    marked: dict[object, bool] = {}  # by the parent, whose type depends on the version of pytest
    found = []
    for item in items:
        parent = item.parent
        if parent not in marked:
            marked[parent] = parent is not None and parent.get_closest_marker(_NAME) is not None
        if (
            marked[parent]
            or _NAME in getattr(item, "fixturenames", ())
            or _NAME in [mark.name for mark in item.own_markers]
        ):
            found.append(item)
    return found


def pytest_collection_finish(session: pytest.Session) -> None:
    measured = _measured(session.items)
    if measured:
        from gpuprobe.pytest_plugin import hooks

        hooks.prepare(session.config, measured)


@pytest.fixture
def gpu_memory(request: pytest.FixtureRequest) -> Meter:
    """The measurement of this test so far, in bytes: ``peak_allocated``, ``peak_reserved`` and
    ``allocated``. Memory of other tests and of fixtures with a wider scope counts as reserved, not
    as allocated.
    """
    from gpuprobe.pytest_plugin.hooks import METER

    meter: Meter | None = request.node.stash.get(METER, None)
    if meter is None:
        raise pytest.UsageError("gpu_memory must be an argument of the test, or of its fixtures")
    return meter


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found = [
        (report.nodeid, dict(value))
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name == "gpuprobe"
    ]
    if found:
        from gpuprobe.pytest_plugin.summary import write

        write(terminalreporter, found)
