"""What one marked test does to GPU memory, and whether that is allowed."""

from __future__ import annotations

import gc
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuprobe.errors import ConfigError
from gpuprobe.model.text import human_bytes, human_delta

__all__ = ["Meter", "size_of"]

_DEFAULT_GPU = "h100-80gb"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_LIMITS = ("max_peak", "max_reserved", "regression", "max_syncs", "no_hazards", "leaks")


def size_of(value: int | str) -> int:
    """``"2 GiB"``, ``"512MB"`` or a number of bytes. Raises ConfigError for anything else."""
    if isinstance(value, int):
        return value
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?\s*", value, re.IGNORECASE)
    if match is None:
        raise ConfigError(f"expected a size such as '2 GiB', found {value!r}")
    return int(float(match[1]) * _UNITS[match[2].upper()])


class Meter:
    """One test's measurement. Sizes in bytes."""

    def __init__(self, item: pytest.Item) -> None:
        marker = item.get_closest_marker("gpu_memory")
        self._item = item
        self._limits: dict[str, Any] = {} if marker is None else dict(marker.kwargs)
        unknown = set(self._limits) - set(_LIMITS)
        if unknown or (marker is not None and marker.args):
            raise pytest.UsageError(
                f"gpu_memory: unknown limit {', '.join(sorted(unknown)) or 'without a name'}; "
                f"there are: {', '.join(_LIMITS)}"
            )
        self._stack = ExitStack()
        self._virtual = ""
        self._start = 0
        self._hazards: Any = None
        self._baseline: Any = None
        self.peak_allocated = 0
        self.peak_reserved = 0
        self.left = 0

    # -- around the test

    def enter(self) -> None:
        """Give the test a device: the machine's own, or a virtual one."""
        import torch

        from gpuprobe.api.virtual import virtual_gpu

        wanted = self._item.config.getoption("--gpuprobe-virtual")
        if wanted or not torch.cuda.is_available():
            self._virtual = wanted or _DEFAULT_GPU
            session = self._stack.enter_context(virtual_gpu(self._virtual))
            session.keep_stacks()

    def leave(self) -> None:
        self._stack.close()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """The test's own run."""
        import torch

        from gpuprobe.analysis.baseline import baseline_of
        from gpuprobe.api.hazards import detect_hazards
        from gpuprobe.api.recordings import load
        from gpuprobe.api.watch import record

        gc.collect()
        self._start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with tempfile.TemporaryDirectory(prefix="gpuprobe-") as folder:
            path = Path(folder, "test.gpuprobe")
            with ExitStack() as stack:
                if self._limits.get("no_hazards") or self._limits.get("max_syncs") is not None:
                    self._hazards = stack.enter_context(detect_hazards())
                recorder = stack.enter_context(
                    record(path, level="trace", trace_steps="all", warn=lambda text: None)
                )
                stack.enter_context(recorder.step())
                yield
            self.peak_allocated = torch.cuda.max_memory_allocated()
            self.peak_reserved = torch.cuda.max_memory_reserved()
            if self._limits.get("regression") is not None and self.peak_allocated:
                device = f"virtual {self._virtual}" if self._virtual else ""
                root = str(self._item.config.rootpath)
                self._baseline = baseline_of(load(path), device=device, root=root)
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        self.left = max(0, torch.cuda.memory_allocated() - self._start)

    @property
    def allocated(self) -> int:
        """Bytes allocated now, on the current device."""
        import torch

        return int(torch.cuda.memory_allocated())

    # -- afterwards

    def judge(self) -> None:
        """Fail the test where a limit is passed; note the figures for the summary."""
        self._item.user_properties.append(
            (
                "gpuprobe",
                f"peak {human_bytes(self.peak_allocated):>10}, reserved "
                f"{human_bytes(self.peak_reserved):>10}, left {human_bytes(self.left):>10}",
            )
        )
        problems = list(self._problems())
        if problems:
            pytest.fail("GPU memory: " + "\n".join(problems), pytrace=False)

    def _problems(self) -> Iterator[str]:
        limits = self._limits
        for name, value, what in (
            ("max_peak", self.peak_allocated, "allocated"),
            ("max_reserved", self.peak_reserved, "reserved"),
        ):
            if limits.get(name) is not None and value > size_of(limits[name]):
                limit = size_of(limits[name])
                yield (
                    f"peak {what} {human_bytes(value)} is {human_delta(value - limit)} above "
                    f"{name}={human_bytes(limit)}"
                )
        if not limits.get("leaks", True) and self.left:
            yield f"{human_bytes(self.left)} are still allocated after the test (leaks=False)"
        if self._hazards is not None:
            if limits.get("no_hazards"):
                for finding in self._hazards.races:
                    yield f"{finding.rule} {finding.kind} at {finding.location}: {finding.message}"
            most = limits.get("max_syncs")
            rows = [row for row in self._hazards.syncs if not row.allowed]
            count = sum(row.count for row in rows)
            if most is not None and count > most:
                places = "; ".join(f"{row.reason} at {row.location}" for row in rows[:5])
                yield f"{count} implicit synchronisations, at most {most} allowed: {places}"
        if self._baseline is not None:
            yield from self._regression()

    def _regression(self) -> Iterator[str]:
        from gpuprobe.analysis.baseline import METRICS
        from gpuprobe.api.check import compare, read_baseline, tolerances, write_baseline

        path = self._file()
        if self._item.config.getoption("--gpuprobe-update-baseline"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            write_baseline(self._baseline, path)
            return
        if not path.exists():
            yield f"no baseline yet: run pytest --gpuprobe-update-baseline (it writes {path.name})"
            return
        amount = str(self._limits["regression"])
        accepted = tolerances(
            [f"{name}={amount}" for name in ("peak_allocated", "peak_reserved") if name in METRICS]
        )
        result = compare(read_baseline(path), self._baseline, accepted)
        for text in result.mismatches:
            yield f"the baseline is of another environment: {text}"
        for metric in result.regressions:
            if metric.name in accepted:
                yield (
                    f"{metric.name} {human_bytes(metric.after)} is {human_delta(metric.delta)} "
                    f"above the baseline ({amount} accepted). {result.cause}"
                )

    def _file(self) -> Path:
        """One file per test, so that workers of pytest-xdist never share one."""
        folder = Path(self._item.config.getoption("--gpuprobe-baselines"))
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", self._item.nodeid).strip("-")
        return self._item.config.rootpath / folder / f"{name}.json"
