"""A program that is run for a while: some training steps, and the evaluation after them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpuprobe.clocks import monotonic, process_time
from gpuprobe.model.run.session import EpochEnd
from gpuprobe.patching import when_imported
from gpuprobe.sampler.failures import program_error
from gpuprobe.sampler.hooks.optimizer_steps import Enough, limit, limit_without_optimizer

if TYPE_CHECKING:
    from gpuprobe.planning.first_evaluation import FirstEvaluation
    from gpuprobe.sampler.program import Runnable

_WITHOUT_LOADER: Final = 2
"""How many times the time a program gets whose batches come from no DataLoader: its epoch cannot be
ended, so that an evaluation is run only if the program has one within its steps."""


@dataclass(frozen=True)
class EpochLimit:
    """The epoch ends once ``steps`` were made, and the training has taken ``seconds`` of processor
    time, or twice that in all, as one that waits for the workers of its DataLoader does. Steps are
    calls of optimizers' ``step``, or backward passes of a program without one.
    """

    steps: int
    seconds: float = 0.0


class FirstEpoch:
    """Runs a program up to the end of its first epoch, which ends at ``limit``, and what follows
    (`gpuprobe.planning.first_evaluation`). Nothing is changed before the program imports torch.
    """

    def __init__(self, program: Runnable, limit: EpochLimit) -> None:
        self.on_stop: Callable[[], None] = lambda: None
        """Called before the program is stopped, while its functions still have what they have."""
        self._program = program
        self._limit = limit
        self.argv = program.argv
        self._evaluation: FirstEvaluation | None = None
        self._began = (0.0, 0.0)  # processor time and clock when the first step had ended
        self._steps = 0
        self._stopped = False  # after them, as its epoch could not be ended

    def run(self) -> None:
        """Run the program. Raises what it raises, but for errors after the end of its epoch that
        are not about memory: they may be due to that.
        """
        with ExitStack() as stack:
            stack.callback(when_imported("torch", lambda: self._watch(stack)))
            try:
                self._program.run()
            except Enough:
                pass
            except BaseException as error:
                evaluation = self._evaluation
                if program_error(error).out_of_memory or evaluation is None:
                    raise
                if not evaluation.ended_by(error):
                    raise

    def phase(self, step: int, path: str) -> None:
        """The program is in this phase of a step; see `FirstEvaluation.phase`."""
        if self._evaluation is not None:
            self._evaluation.phase(path)

    def end(self) -> EpochEnd | None:
        """How the epoch was ended; None if the program ended before."""
        evaluation = self._evaluation
        if evaluation is not None and evaluation.began:
            return EpochEnd(self._steps, evaluation.assumption(self._steps), evaluation.complete)
        if not self._stopped:
            return None
        return EpochEnd(
            self._steps,
            f"the program was stopped after step {self._steps}: later code, such as an "
            "evaluation, was not run and may need more",
            evaluated=False,
        )

    def _watch(self, stack: ExitStack) -> None:
        from gpuprobe.planning.first_evaluation import FirstEvaluation

        self._evaluation = evaluation = FirstEvaluation()
        evaluation.on_stop = self.on_stop
        stack.enter_context(evaluation.watch())
        stack.enter_context(limit(1, self._after_step))
        stack.enter_context(limit_without_optimizer(1, self._after_step))

    def _after_step(self) -> BaseException | None:
        """A step was made. Returns what ends the program, None to continue."""
        evaluation = self._evaluation
        if evaluation is None:
            return None
        if evaluation.began:
            evaluation.step()
            return None
        self._steps += 1
        now = process_time(), monotonic()
        if self._steps == 1:
            self._began = now
        taken = max(now[0] - self._began[0], (now[1] - self._began[1]) / 2)
        if self._steps < self._limit.steps or taken < self._limit.seconds:
            return None
        if evaluation.begin() or taken < _WITHOUT_LOADER * self._limit.seconds:
            return None
        self._stopped = True
        self.on_stop()
        return Enough()
