"""Not run: checked by ``mypy --strict``, to prove that the public names are typed."""

from __future__ import annotations

from pathlib import Path

import gpuprobe


def training_step(scale: float) -> float:
    return scale * 2


def use(path: Path) -> int:
    with gpuprobe.record(path, level="trace") as rec:
        step = rec.wrap(training_step)
        doubled: float = step(3.0)
        with rec.step(), rec.phase("mine"):
            doubled += 1
    recording: gpuprobe.Recording = gpuprobe.load(path)
    document: dict[str, object] = gpuprobe.report(recording)
    names: list[str] = [device.identity.uuid or "" for device in gpuprobe.devices()]
    return len(document) + len(recording.steps) + len(names) + int(doubled)
