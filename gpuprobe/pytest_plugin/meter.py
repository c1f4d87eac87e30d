"""The measurement of a marked test, and the limits that it exceeds."""

from __future__ import annotations

import gc
import hashlib
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprobe.model.text import amount, amount_delta, human_bytes, human_delta, plural
from gpuprobe.pytest_plugin.leaks import left_behind
from gpuprobe.pytest_plugin.limits import Limits
from gpuprobe.pytest_plugin.loading import RequestedGpu

if TYPE_CHECKING:
    import pytest
    from torch import Tensor

    from gpuprobe.analysis.baseline.model import Baseline
    from gpuprobe.api.blame import BlameOptions
    from gpuprobe.gate.plan import CheckPlan
    from gpuprobe.hazards.findings.results import Hazards

__all__ = ["Devices", "Meter"]

_MOST_LINES = 5  # of a failed test's largest allocations

_LONGEST = 120  # characters of a file name: file systems allow 255 bytes


class Devices:
    """The GPUs that tests are measured on: the machine's own, or simulated ones.

    Simulated GPUs are hidden between the tests, so that unmarked tests find none. Each test gets
    empty ones, unless memory is still allocated there, such as a model of a fixture with a wider
    scope.
    """

    def __init__(self, gpu: RequestedGpu) -> None:
        self._gpu = gpu
        self._stack = ExitStack()
        self.label = ""
        """The device in baselines: "" for the machine's own GPUs."""

        self._spent = 0.0  # seconds of the time for causes

    @contextmanager
    def time_left(self, config: pytest.Config) -> Iterator[BlameOptions]:
        """The rest of the time to find causes, which all tests share. The block's duration is
        deducted.
        """
        from gpuprobe.api.blame import BlameOptions

        began = time.monotonic()
        whole: float = config.getoption("--gpuprobe-blame")
        try:
            yield BlameOptions(budget=max(0.0, whole - self._spent))
        finally:
            self._spent += time.monotonic() - began

    def enter(self) -> None:
        """Give the process its GPUs. Raises MissingExtra without torch, and what
        `gpuprobe.virtual_gpu` raises.
        """
        from gpuprobe.analysis.baseline.model import SIMULATED
        from gpuprobe.api.simulated_gpu import has_gpu, virtual_gpu

        if not self._gpu.option and has_gpu():
            return
        self._stack.enter_context(virtual_gpu(self._gpu.name))
        self.label = SIMULATED + self._gpu.name

    def leave(self) -> None:
        """Hide simulated GPUs. Memory that is still allocated stays."""
        self._stack.close()


class Meter:
    """One test's measurement. Sizes in bytes; peaks are those of the device with the highest.

    Counts the memory of the test and of its function-scoped fixtures, without what was allocated
    before or by fixtures with a wider scope. If there is such memory, reserved memory is that which
    the test's requests would have reserved on an empty device.
    """

    def __init__(self, item: pytest.Item, limits: Limits, devices: Devices) -> None:
        self._item = item
        self._limits = limits
        self._devices = devices
        self._before: list[int] = []  # allocated on each device before the test's fixtures
        self._shared: list[int] = []  # allocated by fixtures with a wider scope
        self._others: dict[str, set[int]] = {}  # the addresses of both, by device
        self._scratch = ExitStack()  # the recording, until the test's report is made
        self._path: Path | None = None
        self._start: list[int] = []  # allocated on each device before the test's own code
        self._hazards: Hazards | None = None
        self._baseline: Baseline | None = None
        self._peaks: tuple[int, int] | None = None
        self._left = 0
        self._leaks: tuple[str, ...] = ()

    # -- for the test

    @property
    def allocated(self) -> int:
        """Bytes allocated now, on all devices."""
        return max(0, sum(_allocated()) - sum(self._bytes_of_others()))

    @property
    def peak_allocated(self) -> int:
        """The peak of allocated bytes since the test's start."""
        return self._own_peaks()[0]

    @property
    def peak_reserved(self) -> int:
        """The peak of reserved bytes since the test's start, including other tests' memory. Limits
        and summary use the test's own.
        """
        return self._own_peaks()[1]

    def _bytes_of_others(self) -> list[int]:
        """Bytes on each device that do not belong to this test."""
        return [a + b for a, b in zip(self._before, self._shared, strict=True)]

    def _own_peaks(self) -> tuple[int, int]:
        if self._peaks is not None:
            return self._peaks
        import torch

        devices = range(torch.cuda.device_count())
        allocated = [
            torch.cuda.max_memory_allocated(index) - size
            for index, size in zip(devices, self._bytes_of_others(), strict=True)
        ]
        reserved = [torch.cuda.max_memory_reserved(index) for index in devices]
        return max([0, *allocated]), max([0, *reserved])

    # -- around the test

    def enter(self) -> None:
        """Give the test a device with an empty cache."""
        self._devices.enter()
        import torch

        torch.cuda.init()  # otherwise torch refuses to reset its peaks
        self._before = _settled()
        torch.cuda.empty_cache()
        self._shared = [0] * len(self._before)
        self._others = _blocks() if any(self._before) else {}
        self._peaks = None

    def leave(self) -> None:
        self._scratch.close()
        self._path = None
        self._devices.leave()

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Exclude what the block allocates: it sets up a fixture that other tests share."""
        if not self._before:  # the test has no device
            yield
            return
        allocated, blocks = _allocated(), _blocks()
        try:
            yield
        finally:
            _clear_workspaces()  # each test allocates its own, whichever used the fixture first
            now = _blocks()
            for index, (one, two) in enumerate(zip(allocated, _allocated(), strict=True)):
                self._shared[index] += two - one
            for device, addresses in now.items():
                new = addresses - blocks.get(device, set())
                self._others.setdefault(device, set()).update(new)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the block, which runs the test."""
        import torch

        from gpuprobe.api.hazards import detect_hazards
        from gpuprobe.api.watch import record
        from gpuprobe.recording.files import scratch_recording

        limits = self._limits
        self._start = _settled()
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)
        path = self._path = self._scratch.enter_context(scratch_recording())
        self._scratch.callback(self._keep, path)
        try:
            with ExitStack() as stack:
                if limits.no_hazards or limits.max_syncs is not None:
                    self._hazards = stack.enter_context(detect_hazards())
                recorder = stack.enter_context(
                    record(path, level="trace", trace_steps="all", warn=lambda text: None)
                )
                stack.enter_context(recorder.step())
                try:
                    yield
                finally:
                    self._peaks = self._own_peaks()
        finally:
            self._count_own(path)
        _clear_workspaces()
        now = _settled(self._start)
        self._left = sum(max(0, b - a) for a, b in zip(self._start, now, strict=True))
        if self._left and not limits.leaks:
            kept, root = _fixture_memory(self._item), self._item.config.rootpath
            self._left = max(0, self._left - sum(kept.values()))
            if self._left and path.exists():
                self._leaks = tuple(left_behind(path, root, _blocks(), kept))

    def _count_own(self, path: Path) -> None:
        """Read what the test is compared by from its recording, and its own peaks if other memory
        was allocated.
        """
        others = any(self._others.values())
        if self._peaks is None or not self._peaks[0]:
            return
        if others or self._limits.regression is not None:
            self._baseline = self._recorded(path)
        if others and self._baseline is not None and not self._baseline.missing:
            metrics = self._baseline.metrics
            self._peaks = metrics["peak_allocated"], metrics.get("peak_reserved", self._peaks[1])

    def _keep(self, path: Path) -> None:
        """Copy the recording to the folder of ``--gpuprobe-keep``."""
        folder = self._item.config.getoption("--gpuprobe-keep")
        if folder and path.exists():
            copy = Path(folder, f"{self._file().stem}.gpuprobe")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(path, copy)

    def _recorded(self, path: Path) -> Baseline:
        from gpuprobe.api.check import recorded

        root = str(self._item.config.rootpath)
        return recorded(path, device=self._devices.label, root=root, others=self._others)

    def report_largest(self) -> None:
        """Add the largest allocations at the peak to the report of a failed test."""
        if self._path is None or not self.peak_allocated:
            return
        peak = self._recorded(self._path).accounts.get("peak")
        rows = [line for line in (peak.lines if peak is not None else ()) if line.bytes > 0]
        if rows:
            text = "\n".join(
                f"{human_bytes(row.bytes):>10}  {row.key}" for row in rows[:_MOST_LINES]
            )
            self._item.add_report_section("call", "gpuprobe: largest allocations at the peak", text)

    def store_figures(self) -> None:
        """Store the figures for the summary, also those of a failed test."""
        self._item.user_properties.append(
            (
                "gpuprobe",
                {
                    "peak_allocated": self.peak_allocated,
                    "peak_reserved": self.peak_reserved,
                    "left": self._left,
                    "group": self._limits.group,
                },
            )
        )

    # -- afterwards

    def problems(self) -> Iterator[str]:
        """A message for each exceeded limit. Raises what reading and writing a baseline raises."""
        limits = self._limits
        found: dict[str, tuple[int, int | None]] = {
            "max_peak": (self.peak_allocated, limits.max_peak),
            "max_reserved": (self.peak_reserved, limits.max_reserved),
        }
        for name, (value, limit) in found.items():
            if limit is not None and value > limit:
                what = "allocated" if name == "max_peak" else "reserved"
                yield (
                    f"peak {what} {human_bytes(value)} is {human_delta(value - limit)} above "
                    f"{name}={human_bytes(limit)}"
                )
        if not limits.leaks and self._left:
            text = f"{human_bytes(self._left)} are still allocated after the test (leaks=False)"
            yield "\n    ".join((text, *self._leaks))
        if self._hazards is not None:
            yield from self._hazard_problems(self._hazards)
        if limits.regression is not None:
            yield from self._regression()

    def _hazard_problems(self, hazards: Hazards) -> Iterator[str]:
        if self._limits.no_hazards:
            for finding in hazards.races:
                yield f"{finding.rule} {finding.kind} at {finding.location}: {finding.message}"
        most = self._limits.max_syncs
        rows = [row for row in hazards.syncs if not row.allowed]
        count = sum(row.count for row in rows)
        if most is not None and count > most:
            places = "; ".join(f"{row.reason} at {row.location}" for row in rows[:5])
            yield f"{plural(count, 'implicit synchronisation')}, at most {most} allowed: {places}"

    def _regression(self) -> Iterator[str]:
        from gpuprobe.api.check import compare, compare_test, with_modules, without_texts
        from gpuprobe.gate.files import read_baseline, write_baseline

        config = self._item.config
        path = self._file()
        if self._baseline is None:
            yield f"no GPU memory was allocated: {self._shown(path)} was not modified"
            return
        if self._baseline.missing:
            yield f"the recording of this test is incomplete: {'; '.join(self._baseline.missing)}"
            return
        if config.getoption("--gpuprobe-update-baseline"):
            path.parent.mkdir(parents=True, exist_ok=True)
            # With digests only: each test has a baseline, and many import the same files.
            root = str(config.rootpath)
            with _own_remedy():
                write_baseline(without_texts(with_modules(self._baseline, root)), path)
            return
        if not path.exists():
            yield (
                "no baseline yet: run pytest --gpuprobe-update-baseline (it writes "
                f"{self._shown(path)})"
            )
            return
        assert self._limits.regression is not None
        root = str(config.rootpath)
        allowed = self._limits.regression
        with _own_remedy():
            before = read_baseline(path)
        result = compare(before, self._baseline, allowed, path=path, root=root)
        if any(item.name in allowed for item in result.regressions):
            now = with_modules(self._baseline, root)
            with self._devices.time_left(config) as blame:
                result = compare_test(before, now, allowed, self._trial(), path=path, blame=blame)
        for text in result.mismatches:
            yield f"the baseline is from another environment: {text}"
        if "step_time" in allowed and all(row.name != "step_time" for row in result.metrics):
            yield f"step_time: {_without_time(before, self._baseline)}"
        found = [item for item in result.regressions if item.name in allowed]
        for metric in found:
            share = f" ({metric.delta / metric.before:+.0%})" if metric.unit == "ns" else ""
            text = (
                f"{metric.name} {amount(metric.after, metric.unit)} is "
                f"{amount_delta(metric.delta, metric.unit)}{share} above the baseline "
                f"({metric.accepted} accepted)"
            )
            for at, cause in enumerate(metric.causes):
                text += f"\n  {'next' if at else 'first cause'}: {cause.text}"
            yield text
        if found and result.trials:
            yield result.trials

    def _trial(self) -> CheckPlan:
        """The command that runs this test alone, in a copy of the project."""
        from gpuprobe.gate.plan import CheckPlan

        config = self._item.config
        arguments = ["--rootdir", str(config.rootpath), "-p", "no:cacheprovider"]
        arguments += ["-o", "addopts=", "--import-mode", config.getoption("importmode")]
        if config.inipath is not None:
            arguments += ["-c", str(config.inipath)]
        for name in ("--gpuprobe-gpu", "--gpuprobe-baselines"):
            value = config.getoption(name)
            arguments += [name, str(value)] if value else []
        root = str(config.rootpath)
        return CheckPlan(
            target="pytest",
            arguments=tuple(arguments),
            module=True,
            gpu=None,
            steps=None,
            hazards=False,
            tolerances={},
            settings=(),
            root=root,
            folder=root,
            command=("pytest", self._item.nodeid),
            test=self._item.nodeid,
        )

    def _file(self) -> Path:
        """The test's baseline: a file per test, so that workers of pytest-xdist never share one."""
        config = self._item.config
        nodeid = self._item.nodeid
        plain = nodeid.replace("/", "-").replace("::", "-")
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", plain).strip("-")[:_LONGEST]
        if name != plain:  # lossy: other tests may have the same name
            name += "-" + hashlib.sha256(nodeid.encode("utf-8", "replace")).hexdigest()[:8]
        return Path(config.rootpath, config.getoption("--gpuprobe-baselines"), f"{name}.json")

    def _shown(self, path: Path) -> str:
        root = self._item.config.rootpath
        return str(path.relative_to(root) if path.is_relative_to(root) else path)


@contextmanager
def _own_remedy() -> Iterator[None]:
    """Inside, an error of a baseline's file has the remedy of this plugin, not of the commands."""
    from gpuprobe.errors import DataError, UsageError

    try:
        yield
    except (DataError, UsageError) as error:
        hint = "delete it, or choose another folder (--gpuprobe-baselines); then run pytest "
        raise type(error)(str(error), hint=f"{hint}--gpuprobe-update-baseline") from None


def _allocated() -> list[int]:
    """Allocated bytes of each device."""
    import torch

    return [torch.cuda.memory_allocated(device) for device in range(torch.cuda.device_count())]


def _blocks() -> dict[str, set[int]]:
    """The addresses of the allocated blocks, by device."""
    import torch

    found: dict[str, set[int]] = {}
    # Not memory_snapshot(), which in torch 2.13 releases a reference to True that it does not own.
    for segment in torch.cuda.memory._snapshot()["segments"]:
        addresses = {
            block["address"] for block in segment["blocks"] if block["state"] != "inactive"
        }
        found.setdefault(f"cuda:{segment['device']}", set()).update(addresses)
    return found


def _clear_workspaces() -> None:
    """Free cuBLAS' workspaces, which the first matrix product allocates permanently."""
    import torch

    torch._C._cuda_clearCublasWorkspaces()


def _settled(expected: Sequence[int] | None = None) -> list[int]:
    """`_allocated` after a garbage collection, which is skipped (70 ms, with torch loaded) unless a
    device has more than ``expected`` bytes, by default 0.
    """
    found = _allocated()
    if any(size > limit for size, limit in zip(found, expected or [0] * len(found), strict=True)):
        gc.collect()
        found = _allocated()
    return found


def _fixture_memory(item: pytest.Item) -> dict[int, int]:
    """By address, the bytes of the gradients and of the optimizer state of the test's fixtures,
    rounded to 512 like by the allocator. They end with the fixtures and are not a leak.
    """
    import torch

    parameters: dict[int, Tensor] = {}
    tensors: dict[int, Tensor] = {}
    for value in _values(getattr(item, "funcargs", {})):
        if isinstance(value, torch.nn.Module):
            parameters.update((id(p), p) for p in value.parameters())
        elif isinstance(value, torch.optim.Optimizer):
            for group in value.param_groups:
                parameters.update((id(p), p) for p in group["params"])
            for state in value.state.values():
                tensors.update((id(t), t) for t in state.values() if torch.is_tensor(t))
        elif torch.is_tensor(value):
            parameters[id(value)] = value
    grads = [p.grad for p in parameters.values() if p.is_leaf and p.grad is not None]
    tensors.update((id(grad), grad) for grad in grads)
    storages = [one.untyped_storage() for one in tensors.values() if one.is_cuda]
    return {one.data_ptr(): -(-one.nbytes() // 512) * 512 for one in storages}


def _values(fixtures: Iterable[object], depth: int = 3) -> Iterator[object]:
    """The values of fixtures, also those in tuples, lists and dicts."""
    items = fixtures.values() if isinstance(fixtures, dict) else fixtures
    for item in items:
        if isinstance(item, (dict, list, tuple)) and depth:
            yield from _values(item, depth - 1)
        else:
            yield item


def _without_time(before: Baseline, now: Baseline) -> str:
    """Why the predicted times of a test and of its baseline were not compared."""
    if "step_time" not in now.metrics:
        return (
            "the time of this test is not predicted: gpuprobe report of its recording "
            "(--gpuprobe-keep DIR) has the reason"
        )
    why = "has none" if "step_time" not in before.metrics else "was predicted by other prices"
    return f"the baseline {why}: run pytest --gpuprobe-update-baseline"
