"""The training steps of a program that is run for a while, and the evaluation after them: of an
estimate, an explanation, a trial of a check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpuprobe.clocks import monotonic, process_time
from gpuprobe.kept_files import KeptFiles
from gpuprobe.model.plans.estimate import MAY_NEED_MORE
from gpuprobe.model.run.session import EpochEnd
from gpuprobe.patching import when_imported
from gpuprobe.sampler.failures import program_error
from gpuprobe.sampler.hooks.optimizer_steps import Enough, limit, limit_without_optimizer

if TYPE_CHECKING:
    from gpuprobe.planning.first_evaluation import FirstEvaluation
    from gpuprobe.sampler.program import Runnable
    from gpuprobe.sampler.recorder import Recorder

_WITHOUT_LOADER: Final = 2
"""How many times the time a program gets whose batches come from no DataLoader: its epoch cannot be
ended, so that an evaluation is run only if the program has one within its steps."""

STEPS_FOR_LINES: Final = 4
"""Steps from which a report names the line of memory that outlives them (`analysis.leaks`)."""

_GROWTH_THRESHOLD: Final = 0.01
"""The growth in a step that is reported, as a part of the memory after it."""


def grows(growth: int, allocated: int) -> bool:
    """Whether a step that ended with ``growth`` bytes more, ``allocated`` in all, is one after
    which memory may grow further.
    """
    return growth > _GROWTH_THRESHOLD * allocated


def _allocated_memory() -> int:
    """What this process has allocated on all its GPUs, in bytes."""
    import torch

    if not torch.cuda.is_initialized():
        return 0
    return sum(torch.cuda.memory_allocated(one) for one in range(torch.cuda.device_count()))


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class EpochLimit:
    """The epoch ends once every optimizer has made ``steps``, or one of them one more, and the
    training has taken ``seconds`` of processor time since the first step, or twice that in all, as
    one that waits for the workers of its DataLoader does. Steps of a program without an optimizer
    are its backward passes. ``for_growth``: steps that it has more if its memory grew in the last.
    """

    steps: int
    seconds: float = 0.0
    for_growth: int = 0


class FirstEpoch:
    """Ends the epoch of the program in this process at ``limit``, and the program after what
    follows (`gpuprobe.planning.first_evaluation`).
    """

    def __init__(self, limit: EpochLimit) -> None:
        self.on_end: Callable[[], None] = _nothing
        """Called when the epoch was ended: the program continues with an evaluation."""
        self.on_stop: Callable[[], None] = _nothing
        """Called before the program is stopped in what follows, while its functions still have what
        they have."""
        self.on_stop_in_training: Callable[[], None] = _nothing
        """Called before the program is stopped after its steps, if its epoch cannot be ended."""
        self._limit = limit
        self._goal = limit.steps
        self._allocated: dict[int, int] = {}  # after each step
        self._evaluation: FirstEvaluation | None = None
        self._count: Callable[[], int] = int
        self._steps = 0  # when the epoch ended
        self._began: tuple[float, float] | None = None  # processor time and clock after a step
        self._stopped = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Inside, the steps of the program are counted, and its epoch ends. Imports torch."""
        from gpuprobe.planning.first_evaluation import FirstEvaluation

        self._evaluation = evaluation = FirstEvaluation()
        evaluation.on_stop = self.on_stop

        def steps() -> int:
            return self._goal

        def end() -> BaseException | None:
            return self._after_steps(evaluation)

        with (
            evaluation.watch(),
            limit(steps, end) as optimized,
            limit_without_optimizer(steps, end) as passed,
            limit(lambda: 1, self._after_step),
            limit_without_optimizer(lambda: 1, self._after_step),
        ):
            self._count = lambda: optimized() or passed()
            yield

    @property
    def steps(self) -> int:
        """How many the program has made: the most of one optimizer, or backward passes."""
        return self._count()

    @property
    def ended(self) -> bool:
        """Whether the epoch was ended, and the program continued."""
        return self._evaluation is not None and self._evaluation.began

    def phase(self, step: int, path: str) -> None:
        """The program is in this phase of a step; see `FirstEvaluation.phase`."""
        if self._evaluation is not None:
            self._evaluation.phase(path)

    def ended_by(self, error: BaseException) -> bool:
        """Whether an exception that ended the program only ended what followed the epoch."""
        return self._evaluation is not None and self._evaluation.ended_by(error)

    def assumption(self, option: str = "") -> str:
        """What was run after the epoch, if it was ended; see `FirstEvaluation.assumption`."""
        assert self._evaluation is not None
        return self._evaluation.assumption(self._steps, option)

    def end(self) -> EpochEnd | None:
        """How the epoch was ended; None if the program ended before."""
        evaluation = self._evaluation
        if evaluation is not None and evaluation.began:
            return EpochEnd(self._steps, self.assumption(), evaluation.complete)
        if not self._stopped:
            return None
        return EpochEnd(
            self._steps,
            f"the program was stopped after step {self._steps}: later code, such as an "
            f"evaluation, {MAY_NEED_MORE}",
            evaluated=False,
        )

    def _after_step(self) -> None:
        """A step was made, the first or a later one."""
        if self._began is None:
            self._began = process_time(), monotonic()
        if self._limit.for_growth:
            self._allocated[self.steps] = _allocated_memory()

    def _grew(self) -> bool:
        """Whether memory grew in the last step, so that it may grow in each."""
        now = _allocated_memory()
        return grows(now - self._allocated.get(self.steps - 1, now), now)

    def _after_steps(self, evaluation: FirstEvaluation) -> BaseException | None:
        """The program has made its steps. Returns what ends it, None to continue."""
        if evaluation.began:
            evaluation.step()
            return None
        if self._goal == self._limit.steps and self._grew():
            self._goal += self._limit.for_growth
            if self.steps < self._goal:
                return None
        began = self._began or (process_time(), monotonic())
        taken = max(process_time() - began[0], (monotonic() - began[1]) / 2)
        if taken < self._limit.seconds:
            return None
        self._steps = self.steps
        if evaluation.begin():
            self.on_end()
            return None
        if taken < _WITHOUT_LOADER * self._limit.seconds:
            return None
        self._stopped = True
        self.on_stop_in_training()
        return Enough()


class FirstEpochOnly:
    """A program that is run up to the end of its first ``epoch`` and of what follows. Nothing is
    changed before it imports torch.
    """

    def __init__(self, program: Runnable, epoch: FirstEpoch) -> None:
        self._program = program
        self._epoch = epoch
        self._kept_files = KeptFiles()
        self.argv = program.argv

    def end(self, recorder: Recorder) -> None:
        """Give the end of the recording what is known of the program's."""
        recorder.epoch = self._epoch.end()
        recorder.kept_files = self._kept_files.notes

    def run(self) -> None:
        """Run the program, which keeps its older files (`gpuprobe.kept_files`). Raises what it
        raises, but for errors after the end of its epoch that are not about memory: they may be
        due to that.
        """
        with ExitStack() as stack:
            stack.enter_context(self._kept_files.keep())
            watch = self._epoch.watch
            stack.callback(when_imported("torch", lambda: stack.enter_context(watch())))
            try:
                self._program.run()
            except Enough:
                pass
            except BaseException as error:
                if program_error(error).out_of_memory or not self._epoch.ended_by(error):
                    raise
