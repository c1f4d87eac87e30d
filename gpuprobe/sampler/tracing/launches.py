"""The kernels that each traced step launches, with their line, module and phase.

`gpuprobe.torch_support.engine_reports` counts, and `gpuprobe.sampler.tracing.places` numbers the
places. The counter queries the place before each operator, so only the frames between the operator
and the program's line are walked, once for all kernels of the operator.
"""

from __future__ import annotations

from collections.abc import Callable

from gpuprobe.model.run.launches import LaunchPlace, StepLaunches, step_launches
from gpuprobe.sampler.tracing.calls import ModuleCalls
from gpuprobe.sampler.tracing.places import OperatorPlaces
from gpuprobe.torch_support.engine_reports import LaunchCounter


class LaunchTrace:
    """The launches of steps, while this is on."""

    def __init__(
        self,
        counter: LaunchCounter,
        places: OperatorPlaces,
        modules: ModuleCalls,
        path: Callable[[], str],
    ) -> None:
        """``path`` returns the phase that the program is in."""
        self._counter = counter
        self._places = places
        self._modules = modules
        self._path = path
        self.on = False
        self._decoded = 0
        self._mixed = False
        self._phases: dict[str, int] = {}

    def begin(self) -> None:
        """A step that is traced begins."""
        if self.on:
            return
        self._places.begin()
        self.on = self._places.counted = self._counter.start(self._places.here)
        self.path_changed(self._path())

    def stop(self) -> None:
        """Stop counting, and forget the counts."""
        if self.on:
            self.on = self._places.counted = False
            self._counter.stop()
            self._places.forget()

    def path_changed(self, path: str) -> None:
        """The program is in another phase."""
        if self.on:
            self._counter.phase(self._phases.setdefault(path, len(self._phases)))

    @property
    def outside_modules(self) -> bool:
        """Whether no module is running."""
        return not self._modules.running

    def call_begins(self, decodes: bool, mixed: bool) -> None:
        """An outermost call of a module begins. ``decodes``: one token of each sequence, in
        ``generate``; ``mixed``: that calls several models, so that no call is one token.
        """
        self._mixed |= mixed
        self._decoded += decodes and self.on
        self._places.decoding = decodes

    def take(self) -> StepLaunches | None:
        """The launches since the last call; None while this is off."""
        if not self.on:
            return None
        phases = list(self._phases)
        known: dict[tuple[int, int], LaunchPlace] = {}
        found = []
        for kernel, number, phase, count in self._counter.take():
            where = known.get((number, phase))
            if where is None:
                place, module, decodes = self._places.places[number]
                where = LaunchPlace(phases[phase], str(place), module, decodes and not self._mixed)
                known[number, phase] = where
            found.append((kernel, where, count))
        self._places.forget()
        decoded = 0 if self._mixed else self._decoded
        self._decoded, self._mixed = 0, False
        return step_launches(found, decoded)
