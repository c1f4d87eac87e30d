"""Scripts of other projects, unchanged, read from a folder outside this repository.

``GPUPROBE_FOREIGN_FILES`` names the folder, which holds ``nanogpt/`` (karpathy/nanoGPT's
``train.py``, ``model.py``, ``configurator.py`` and ``data/synthetic/{train,val}.bin`` of unsigned
16-bit tokens below 64) and ``cleanrl/`` (vwxyzjn/cleanrl's ``ppo.py``, ``dqn.py`` and
``cleanrl_utils``). Their losses are what they print or write to TensorBoard.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

from foreign.programs import program

FILES = Path(os.environ.get("GPUPROBE_FOREIGN_FILES", "/nonexistent"))


class _Both(io.StringIO):
    """What is printed, kept and passed on."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self._other = other

    def write(self, text: str) -> int:
        self._other.write(text)
        return super().write(text)


def _run(script: str, *arguments: str) -> str:
    """Run a script of the folder in a copy of its directory; what it printed."""
    source = FILES / script
    shutil.copytree(source.parent, "program")
    os.chdir("program")
    sys.path.insert(0, str(Path.cwd()))
    sys.argv = [source.name, *arguments]
    shown = _Both(sys.stdout)
    with contextlib.redirect_stdout(shown):
        runpy.run_path(str(Path(source.name).resolve()), run_name="__main__")
    return shown.getvalue()


def _logged(tag: str) -> list[float]:
    """A scalar that the script wrote for TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: list[float] = []
    for folder in sorted(Path("runs").iterdir()):
        events = EventAccumulator(str(folder))
        events.Reload()
        found += [event.value for event in events.Scalars(tag)]
    return found


@program("nanogpt/train", "torch", "numpy", needs=str(FILES / "nanogpt/train.py"))
def nanogpt(device: str) -> Any:
    shown = _run(
        "nanogpt/train.py",
        f"--device={device}",
        "--dataset=synthetic",
        "--compile=False",
        "--dtype=float32",
        "--n_layer=2",
        "--n_head=2",
        "--n_embd=32",
        "--block_size=32",
        "--batch_size=4",
        "--gradient_accumulation_steps=2",
        "--max_iters=3",
        "--eval_interval=2",
        "--eval_iters=2",
        "--warmup_iters=1",
        "--lr_decay_iters=3",
    )
    return [float(value) for value in re.findall(r"loss ([\d.]+|nan)", shown)]


@program("cleanrl/ppo", "gymnasium", "tyro", "torch", needs=str(FILES / "cleanrl/ppo.py"))
def ppo(device: str) -> Any:
    _run("cleanrl/ppo.py", "--total-timesteps", "128", "--num-steps", "16")
    return _logged("losses/value_loss")


@program("cleanrl/dqn", "stable_baselines3", "tyro", "torch", needs=str(FILES / "cleanrl/dqn.py"))
def dqn(device: str) -> Any:
    _run(
        "cleanrl/dqn.py",
        "--total-timesteps",
        "402",
        "--learning-starts",
        "150",
        "--target-network-frequency",
        "100",
    )
    return _logged("losses/td_loss")
