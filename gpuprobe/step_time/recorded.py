"""The predicted time of a recorded step: which step, and on which GPU."""

from __future__ import annotations

from functools import lru_cache
from itertools import islice
from typing import Final

from gpuprobe.model.plans.step_time import StepTime
from gpuprobe.model.run.recording import RankRecording
from gpuprobe.model.run.work import StepWork
from gpuprobe.model.values import Unavailable
from gpuprobe.step_time.predict import TimelineSpan, predict, timeline
from gpuprobe.step_time.prices import Prices, prices
from gpuprobe.step_time.speeds import all_speeds

_NODE: Final = 8  # GPUs of a node, if nothing else is known: of NVIDIA's DGX and HGX systems
_FIRST_STEPS: Final = 64  # steps in which work is searched: those of a long run stay undecoded
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
    chosen = _step_and_prices(rank, gpu, network)
    if isinstance(chosen, Unavailable):
        return chosen
    index, work, of_gpu = chosen
    return predict(work, index, of_gpu, per_node=per_node or _per_node(rank))


def timeline_of(rank: RankRecording) -> tuple[str, list[TimelineSpan]] | Unavailable:
    """The GPU's name, and the course of the step whose time `step_time_of` predicts."""
    chosen = _step_and_prices(rank, "", 0.0)
    if isinstance(chosen, Unavailable):
        return chosen
    _, work, of_gpu = chosen
    spans = timeline(work, of_gpu, per_node=_per_node(rank))
    return spans if isinstance(spans, Unavailable) else (of_gpu.name, spans)


def _per_node(rank: RankRecording) -> int:
    return min(max(1, rank.session.world_size), _NODE)


def _step_and_prices(
    rank: RankRecording, gpu: str, network: float
) -> tuple[int, StepWork, Prices] | Unavailable:
    """The last whole step with work, of the first ones: its index and work, and the prices of its
    GPU.
    """
    if not rank.session.virtual:
        return NO_WORK
    known = [
        (step.index, step.ended_by, step.work)
        for step in islice(rank.steps, _FIRST_STEPS)
        if not isinstance(step.work, Unavailable)
    ]
    if not known:
        return NO_WORK
    whole = [(index, work) for index, ended_by, work in known if ended_by != "end"]
    if not whole:
        return Unavailable("no step is complete")
    names = {gpu} if gpu else _recorded_gpus(rank)
    if len(names) != 1:
        return Unavailable("the GPU of the recording is unknown" if not names else _SEVERAL)
    name = names.pop()
    of_gpu = prices(name if gpu else _named().get(name, name), network)
    return of_gpu if isinstance(of_gpu, Unavailable) else (*whole[-1], of_gpu)


_SEVERAL: Final = "the process uses GPUs of several kinds"


def _recorded_gpus(rank: RankRecording) -> set[str]:
    """The names of the GPUs of a recording, as torch reports them."""
    return set() if rank.end is None else set(rank.end.gpus)


@lru_cache(maxsize=1)
def _named() -> dict[str, str]:
    """The catalogue's name of each GPU, by the name that torch reports."""
    return {speeds.title: name for name, speeds in all_speeds().items()}
