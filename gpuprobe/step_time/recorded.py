"""The predicted time of a recorded step: which step, and on which GPU."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Final

from gpuprobe.model.plans.step_time import StepTime
from gpuprobe.model.run.recording import RankRecording
from gpuprobe.model.values import Unavailable
from gpuprobe.step_time.predict import predict
from gpuprobe.step_time.prices import prices
from gpuprobe.step_time.speeds import all_speeds

_NODE: Final = 8  # GPUs of a node, if nothing else is known: of NVIDIA's DGX and HGX systems
NO_WORK: Final = Unavailable(
    "the work of steps is recorded on simulated GPUs, at level trace: gpuprobe run --gpu GPU "
    "--level trace"
)


def step_time_of(
    rank: RankRecording, gpu: str = "", *, per_node: int = 0, network: float = 0.0
) -> StepTime | Unavailable:
    """The time of the last whole step of a rank whose work was recorded.

    ``gpu``: its name in the catalogue, by default the one that was recorded. ``per_node``: ranks
    on each node, by default up to 8. ``network``: GB/s of each GPU's network adapter, 0 if there is
    none. Raises DataError for a damaged recording.
    """
    known = [step for step in rank.steps if not isinstance(step.work, Unavailable)]
    if not known:
        return NO_WORK
    whole = [step for step in known if step.ended_by != "end"]
    if not whole:
        return Unavailable("no step is complete")
    step = whole[-1]
    assert not isinstance(step.work, Unavailable)
    names = {gpu} if gpu else _recorded_gpus(rank)
    if len(names) != 1:
        return Unavailable("the GPU of the recording is unknown" if not names else _SEVERAL)
    name = names.pop()
    of_gpu = prices(name if gpu else _named().get(name, name), network)
    if isinstance(of_gpu, Unavailable):
        return of_gpu
    world = max(1, rank.session.world_size)
    return predict(step.work, step.index, of_gpu, per_node=per_node or min(world, _NODE))


@lru_cache(maxsize=1)
def prices_digest() -> str:
    """What predictions depend on apart from the program: this package's code and its tables, as 12
    digits. Times of different ones are not comparable.
    """
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(Path(__file__).parent.iterdir()):
        if path.suffix in (".py", ".json"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


_SEVERAL: Final = "the process uses GPUs of several kinds"


def _recorded_gpus(rank: RankRecording) -> set[str]:
    """The names of the GPUs of a recording, as torch reports them."""
    return set() if rank.end is None else set(rank.end.gpus)


@lru_cache(maxsize=1)
def _named() -> dict[str, str]:
    """The catalogue's name of each GPU, by the name that torch reports."""
    return {speeds.title: name for name, speeds in all_speeds().items()}
