"""What one marked test does to GPU memory, and whether that is allowed."""

from __future__ import annotations

import gc
import hashlib
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuprobe.model.text import human_bytes, human_delta
from gpuprobe.pytest_plugin.limits import Limits

if TYPE_CHECKING:
    import pytest

    from gpuprobe.api.blame import BlameOptions
    from gpuprobe.api.check import Baseline, CheckPlan

__all__ = ["Devices", "Meter"]

_MOST_LINES = 5

_LONGEST = 120  # of a file's name, in characters: file systems take 255 bytes


class Devices:
    """What tests are measured on: the machine's own GPUs, those of the native engine, which all
    tests have, or virtual ones.

    A virtual machine is left after each test, so that tests that are not marked see none. It is
    kept for the next one only while something still lies on it, such as a model that a fixture
    of a wider scope made; else each test gets a fresh one.
    """

    def __init__(self, gpu: tuple[str, str], *, native: bool = False) -> None:
        self._asked, self._otherwise = gpu
        self._native = native
        self._stack = ExitStack()
        self._session: Any = None
        self._active = False
        self.label = f"native {gpu[1]}" if native else ""
        """What baselines name: "" for the machine's own GPUs."""

        self._spent = 0.0

    @contextmanager
    def time_left(self, config: pytest.Config) -> Iterator[BlameOptions]:
        """What is left of the time for causes, of all tests; the time inside is taken off."""
        from gpuprobe.api.blame import BlameOptions

        began = time.monotonic()
        whole: float = config.getoption("--gpuprobe-blame")
        try:
            yield BlameOptions(budget=max(0.0, whole - self._spent))
        finally:
            self._spent += time.monotonic() - began

    def enter(self) -> None:
        """Raises MissingExtra without torch, ConfigError for bad allocator settings."""
        from gpuprobe.api.virtual import virtual_gpu

        if self._session is None:
            with ExitStack() as stack:
                if self._native or (not self._asked and _has_cuda()):
                    return
                self._session = stack.enter_context(virtual_gpu(self._otherwise, engine="virtual"))
                self._stack = stack.pop_all()
            self._session.keep_stacks()
            self.label = f"virtual {self._otherwise}"
        else:
            self._session.start()
        self._active = True

    def leave(self) -> None:
        """Give torch back."""
        if not self._active:
            return
        self._active = False
        if any(_settled()):
            self._session.pause()
        else:
            self.close()

    def close(self) -> None:
        """Also forget what lies on a virtual machine."""
        self._active = False
        self._session = None
        self._stack.close()


class Meter:
    """One test's measurement. Sizes in bytes; peaks are those of the device that has most.

    Counted is what the test and its own fixtures take: what lay on the device before them, and
    what fixtures of a wider scope make, is not. Where there is such memory, what is reserved is
    what the test's own requests would have reserved on a device without it.
    """

    def __init__(self, item: pytest.Item, limits: Limits, devices: Devices) -> None:
        self._item = item
        self._limits = limits
        self._devices = devices
        self._before: list[int] = []  # allocated on each device before the test's fixtures
        self._shared: list[int] = []  # made by fixtures of a wider scope
        self._others: dict[str, set[int]] = {}  # the addresses of both, by device
        self._scratch = ExitStack()  # the recording, until the test's report is made
        self._path: Path | None = None
        self._start: list[int] = []  # ... and before its own code
        self._hazards: Any = None
        self._baseline: Any = None
        self._peaks: tuple[int, int] | None = None
        self._left = 0

    # -- what a test may ask for

    @property
    def allocated(self) -> int:
        """Bytes allocated now, on all devices."""
        return max(0, sum(_allocated()) - sum(self._bytes_of_others()))

    @property
    def peak_allocated(self) -> int:
        """The most that was allocated since the test began, up to now."""
        return self._own_peaks()[0]

    @property
    def peak_reserved(self) -> int:
        """The most that was reserved since the test began, up to now, by whomever. What the
        limits and the summary have is the test's own."""
        return self._own_peaks()[1]

    def _bytes_of_others(self) -> list[int]:
        """What is not this test's own, of each device."""
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
        """Give the test a device, with nothing cached on it."""
        self._devices.enter()
        import torch

        torch.cuda.init()  # before it, torch refuses to reset its peaks
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
        """A fixture is set up that other tests have, too."""
        if not self._before:  # the test has no device
            yield
            return
        allocated, blocks = _allocated(), _blocks()
        try:
            yield
        finally:
            _clear_workspaces()  # each test makes them anew, whichever needed the fixture first
            now = _blocks()
            for index, (one, two) in enumerate(zip(allocated, _allocated(), strict=True)):
                self._shared[index] += two - one
            for device, addresses in now.items():
                made = addresses - blocks.get(device, set())
                self._others.setdefault(device, set()).update(made)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """The test's own run."""
        import torch

        from gpuprobe.api.hazards import detect_hazards
        from gpuprobe.api.recordings import scratch_recording
        from gpuprobe.api.watch import record

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
            self._left = max(0, self._left - _of_fixtures(self._item))

    def _count_own(self, path: Path) -> None:
        """What the test is compared by, and its figures where others had something, too."""
        others = any(self._others.values())
        if self._peaks is None or not self._peaks[0]:
            return
        if others or self._limits.regression is not None:
            self._baseline = self._recorded(path)
        if others:
            metrics = self._baseline.metrics
            self._peaks = metrics["peak_allocated"], metrics.get("peak_reserved", self._peaks[1])

    def _keep(self, path: Path) -> None:
        """Put the recording where it was asked for."""
        folder = self._item.config.getoption("--gpuprobe-keep")
        if folder and path.exists():
            kept = Path(folder, f"{self._file().stem}.gpuprobe")
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(path, kept)

    def _recorded(self, path: Path) -> Baseline:
        from gpuprobe.api.check import recorded

        root = str(self._item.config.rootpath)
        return recorded(path, device=self._devices.label, root=root, others=self._others)

    def notify_allocators(self) -> None:
        """Of a test that fails: the lines that had most at its peak, in the report."""
        if self._path is None or not self.peak_allocated:
            return
        peak = self._recorded(self._path).accounts.get("peak")
        rows = [line for line in (peak.lines if peak is not None else ()) if line.bytes > 0]
        if rows:
            text = "\n".join(
                f"{human_bytes(row.bytes):>10}  {row.key}" for row in rows[:_MOST_LINES]
            )
            self._item.add_report_section("call", "gpuprobe: largest allocations at the peak", text)

    def note(self) -> None:
        """The figures for the summary, of a test that failed too."""
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
        """Each limit that is passed, in words. Raises what reading and writing a baseline do."""
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
            yield f"{human_bytes(self._left)} are still allocated after the test (leaks=False)"
        if self._hazards is not None:
            yield from self._of_hazards()
        if limits.regression is not None:
            yield from self._regression()

    def _of_hazards(self) -> Iterator[str]:
        if self._limits.no_hazards:
            for finding in self._hazards.races:
                yield f"{finding.rule} {finding.kind} at {finding.location}: {finding.message}"
        most = self._limits.max_syncs
        rows = [row for row in self._hazards.syncs if not row.allowed]
        count = sum(row.count for row in rows)
        if most is not None and count > most:
            places = "; ".join(f"{row.reason} at {row.location}" for row in rows[:5])
            yield f"{count} implicit synchronisations, at most {most} allowed: {places}"

    def _regression(self) -> Iterator[str]:
        from gpuprobe.api.check import (
            compare,
            compare_test,
            read_baseline,
            with_modules,
            without_texts,
            write_baseline,
        )

        config = self._item.config
        path = self._file()
        if self._baseline is None:
            yield f"no GPU memory was allocated: {self._shown(path)} was not modified"
            return
        if config.getoption("--gpuprobe-update-baseline"):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Digests alone: each test has a baseline, and many import the same files.
            root = str(config.rootpath)
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
        before, allowed = read_baseline(path), self._limits.regression
        result = compare(before, self._baseline, allowed, path=path, root=root)
        if result.regressions:
            now = with_modules(self._baseline, root)
            with self._devices.time_left(config) as blame:
                result = compare_test(before, now, allowed, self._trial(), path=path, blame=blame)
        for text in result.mismatches:
            yield f"the baseline is from another environment: {text}"
        found = [item for item in result.regressions if item.name in self._limits.regression]
        for metric in found:
            text = (
                f"{metric.name} {human_bytes(metric.after)} is {human_delta(metric.delta)} "
                f"above the baseline ({self._limits.regression_text} accepted)"
            )
            for at, cause in enumerate(metric.causes):
                text += f"\n  {'next' if at else 'first cause'}: {cause.text}"
            yield text
        if found and result.trials:
            yield result.trials

    def _trial(self) -> CheckPlan:
        """How this test is run alone, in a copy of the project."""
        from gpuprobe.api.check import CheckPlan

        config = self._item.config
        arguments = ["--rootdir", str(config.rootpath), "-p", "no:cacheprovider"]
        arguments += ["-o", "addopts=", "--import-mode", config.getoption("importmode")]
        if config.inipath is not None:
            arguments += ["-c", str(config.inipath)]
        for name in ("--gpuprobe-virtual", "--gpuprobe-engine", "--gpuprobe-baselines"):
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
            engine="native" if self._devices.label.startswith("native ") else "auto",
            test=self._item.nodeid,
        )

    def _file(self) -> Path:
        """One file per test, so that workers of pytest-xdist never share one."""
        config = self._item.config
        nodeid = self._item.nodeid
        plain = nodeid.replace("/", "-").replace("::", "-")
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", plain).strip("-")[:_LONGEST]
        if name != plain:  # something is lost: two tests may differ in just that
            name += "-" + hashlib.sha256(nodeid.encode("utf-8", "replace")).hexdigest()[:8]
        return Path(config.rootpath, config.getoption("--gpuprobe-baselines"), f"{name}.json")

    def _shown(self, path: Path) -> str:
        root = self._item.config.rootpath
        return str(path.relative_to(root) if path.is_relative_to(root) else path)


def _has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False  # said by what needs it
    return bool(torch.cuda.is_available())


def _allocated() -> list[int]:
    """Bytes, of each device."""
    import torch

    return [torch.cuda.memory_allocated(device) for device in range(torch.cuda.device_count())]


def _blocks() -> dict[str, set[int]]:
    """The addresses of the blocks that are allocated, by device."""
    import torch

    found: dict[str, set[int]] = {}
    # Not memory_snapshot(), which in torch 2.13 takes a reference to True that is not its own.
    for segment in torch.cuda.memory._snapshot()["segments"]:
        addresses = {
            block["address"] for block in segment["blocks"] if block["state"] != "inactive"
        }
        found.setdefault(f"cuda:{segment['device']}", set()).update(addresses)
    return found


def _clear_workspaces() -> None:
    """Those of cuBLAS, which are made at the first product of matrices and kept."""
    import torch

    torch._C._cuda_clearCublasWorkspaces()


def _settled(expected: Sequence[int] | None = None) -> list[int]:
    """`_allocated` without what only garbage holds. Nothing is collected (70 ms, with torch loaded)
    where no device has more than ``expected``, default nothing.
    """
    found = _allocated()
    if any(size > limit for size, limit in zip(found, expected or [0] * len(found), strict=True)):
        gc.collect()
        found = _allocated()
    return found


def _of_fixtures(item: pytest.Item) -> int:
    """The gradients and the optimizer state of what fixtures gave the test: they go with the
    fixtures, and are no leak. In bytes, as the allocator rounds them (512)."""
    import torch

    parameters: dict[int, Any] = {}
    tensors: dict[int, Any] = {}
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
    return sum(-(-t.untyped_storage().nbytes() // 512) * 512 for t in tensors.values() if t.is_cuda)


def _values(found: Any, depth: int = 3) -> Iterator[Any]:
    """What fixtures gave, also in tuples, lists and dicts."""
    items = found.values() if isinstance(found, dict) else found
    for item in items:
        if isinstance(item, (dict, list, tuple)) and depth:
            yield from _values(item, depth - 1)
        else:
            yield item
