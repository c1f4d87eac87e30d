"""pytest: limits and regressions of GPU memory, per test.

::

    @pytest.mark.gpu_memory(max_peak="2 GiB", regression="1%", no_hazards=True, leaks=False)
    def test_training_step():
        ...

Loaded by an entry point; until a test is marked, nothing but this module is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

    from gpuprobe.pytest_plugin.meter import Meter

_METER: pytest.StashKey[Meter] = pytest.StashKey()

_MARKER = (
    "gpu_memory(max_peak=None, max_reserved=None, regression=None, max_syncs=None, "
    "no_hazards=False, leaks=True): limits on the GPU memory of this test, measured on a virtual "
    "GPU where there is no CUDA (gpuprobe)"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpuprobe", "GPU memory (gpuprobe)")
    group.addoption(
        "--gpuprobe-update-baseline",
        action="store_true",
        help="write the memory baselines of marked tests anew",
    )
    group.addoption(
        "--gpuprobe-virtual",
        metavar="GPU",
        default="",
        help="measure on this GPU in software (default: h100-80gb where there is no CUDA)",
    )
    group.addoption(
        "--gpuprobe-baselines",
        metavar="DIR",
        default="gpuprobe-baselines",
        help="where baselines are kept, one file per test (default: gpuprobe-baselines)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)


def _wanted(item: pytest.Item) -> bool:
    return item.get_closest_marker("gpu_memory") is not None or "gpu_memory" in getattr(
        item, "fixturenames", ()
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    if _wanted(item):
        from gpuprobe.pytest_plugin.meter import Meter

        meter = item.stash[_METER] = Meter(item)
        meter.enter()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    meter = item.stash.get(_METER, None)
    if meter is None:
        return (yield)
    with meter.measuring():
        result = yield
    meter.judge()
    return result


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    try:
        return (yield)
    finally:
        meter = item.stash.get(_METER, None)
        if meter is not None:
            meter.leave()
            del item.stash[_METER]


@pytest.fixture
def gpu_memory(request: pytest.FixtureRequest) -> Meter:
    """The measurement of this test: ``peak_allocated``, ``peak_reserved``, ``allocated``."""
    return request.node.stash[_METER]  # type: ignore[no-any-return]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    rows = []
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "gpuprobe" and getattr(report, "when", "") == "call":
                    rows.append((report.nodeid, value))
    if rows:
        terminalreporter.section("GPU memory")
        for nodeid, value in sorted(rows):
            terminalreporter.write_line(f"{value}  {nodeid}")
