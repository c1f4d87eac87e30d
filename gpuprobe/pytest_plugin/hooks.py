"""The hooks around measured tests, registered if any test is measured."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import pytest

from gpuprobe.api.trials import OVER_LIMITS
from gpuprobe.errors import GpuprobeError
from gpuprobe.pytest_plugin.limits import limits_of
from gpuprobe.pytest_plugin.loading import requested_gpu
from gpuprobe.pytest_plugin.meter import Devices, Meter

__all__ = ["METER", "prepare"]

METER: pytest.StashKey[Meter] = pytest.StashKey()
"""The meter of a measured test."""


def prepare(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Attach a meter to each of the tests. Raises pytest.UsageError for an invalid mark, option or
    setting, before the first test runs.

    A worker of pytest-xdist cannot end that way: there, all of the tests fail with the error.
    """
    try:
        devices = Devices(requested_gpu(config))
        for item in items:
            item.stash[METER] = Meter(item, limits_of(item), devices)
    except GpuprobeError as error:
        if not hasattr(config, "workerinput"):
            raise pytest.UsageError(_message(error)) from None
        config.pluginmanager.register(_Refusal(items, _message(error)), "gpuprobe-tests")
        return
    config.pluginmanager.register(_Hooks(devices), "gpuprobe-tests")


def _message(error: GpuprobeError) -> str:
    return f"gpuprobe: {error}" + (f"\n  hint: {error.hint}" if error.hint else "")


class _Refusal:
    """Makes tests fail with a message."""

    def __init__(self, items: Sequence[pytest.Item], text: str) -> None:
        self._items = frozenset(items)
        self._text = text

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item in self._items:
            pytest.fail(self._text, pytrace=False)


class _Hooks:
    """Measures each test that has a meter."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._meter: Meter | None = None  # while its test is set up
        self._depth = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object]
    ) -> Generator[None, object, object]:
        """Exclude the memory of a fixture with a wider scope from the test that is the first to use
        it.
        """
        meter = self._meter
        if meter is None or fixturedef.scope == "function" or self._depth:
            return (yield)
        self._depth += 1
        try:
            with meter.sharing():
                return (yield)
        finally:
            self._depth -= 1

    # Inside the wrappers of other plugins, so that their teardown finds what their setup began.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        meter = item.stash.get(METER, None)
        reason = ""
        if meter is not None:
            try:
                meter.enter()
            except GpuprobeError as error:
                reason = _message(error)
        if reason:
            pytest.fail(reason, pytrace=False)
        self._meter = meter
        try:
            return (yield)
        finally:
            self._meter = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        meter = item.stash.get(METER, None)
        if meter is None:
            return (yield)
        try:
            with meter.measuring():
                result = yield
        except BaseException:
            meter.report_largest()
            raise
        finally:
            meter.store_figures()
        try:
            problems = list(meter.problems())
        except GpuprobeError as error:
            meter.report_largest()
            pytest.fail(_message(error), pytrace=False)
        if problems:
            meter.report_largest()
            pytest.fail(OVER_LIMITS + "\n".join(problems), pytrace=False)
        return result

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            meter = item.stash.get(METER, None)
            if meter is not None:
                meter.leave()
