"""What the memory of a program is for, who holds what is not needed, and what changes without it.

The program runs on a simulated GPU, each time in a separate process: once to be recorded, a second
time to the operator of the peak, where what holds the memory is searched for, and once with each
change that is tried.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import filterfalse, islice
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpuprobe.analysis.growth import MANY_STEPS, Growth, growth_of
from gpuprobe.analysis.peak.needs import Biographies, needs_at
from gpuprobe.analysis.peak.peaks import (
    HighWater,
    PeakSite,
    device_peaks,
    high_water_at,
    live_at,
    nearest_trace,
    overall_peak,
)
from gpuprobe.api.recordings import load
from gpuprobe.api.remedies import (
    RemedyOptions,
    RemedyRequest,
    RemedyResult,
    RemedyTrials,
    TriedRemedy,
    UntriedRemedy,
)
from gpuprobe.catalogue.gpus import parse_spec
from gpuprobe.causes.advice import AdviceFacts, for_needed
from gpuprobe.causes.answer import EditKind
from gpuprobe.causes.cache import Cache, CachedMemory
from gpuprobe.causes.edits import (
    EditCandidate,
    backward_of_a_part,
    candidates,
    files_of,
    stored_name,
    stored_names,
    without_option,
)
from gpuprobe.causes.find import (
    NO_GRAD,
    Diagnosed,
    cached_causes,
    causes_at,
    searched_at,
)
from gpuprobe.causes.groups import LEAST, LEAST_BYTES, LEAST_EFFECT, blocks_at, copied
from gpuprobe.causes.lines import capture_line, is_limited, loop_line, stored_as, storing_lines
from gpuprobe.causes.recorded import (
    cause_of,
    certain_causes,
    growth_cause,
    kept_causes,
    over_steps,
    recorded_holders,
    replayed,
    saved_bytes,
    unneeded,
)
from gpuprobe.causes.replays import Smaller, by_graph
from gpuprobe.causes.rules import graphs, pinned
from gpuprobe.causes.rules.fragments import FRAGMENTS
from gpuprobe.causes.rules.gradients import LATE_GRADIENTS
from gpuprobe.causes.rules.holders import (
    KEPT_TENSORS,
    LIVE_VARIABLE,
    is_argument,
    kept_to_be_read,
    late_variable,
    without_copies,
)
from gpuprobe.causes.rules.joins import GROWN
from gpuprobe.causes.variables import Variables
from gpuprobe.errors import DataError, ProgramFailed
from gpuprobe.model.actions import OOM
from gpuprobe.model.causes import (
    EDIT_TRIED,
    Bound,
    Certainty,
    Effect,
    Explanation,
    MemoryCause,
    RunEnd,
)
from gpuprobe.model.io.codec import from_plain
from gpuprobe.model.io.files import read_regular
from gpuprobe.model.place import NoPlace, Place
from gpuprobe.model.run.holders import Holder, HolderRoot
from gpuprobe.model.run.recording import Recording
from gpuprobe.model.run.session import JOB_OF_ONE, ProgramError, SessionEnd
from gpuprobe.model.text import human_bytes
from gpuprobe.model.trace import Frame, MemoryTrace
from gpuprobe.model.values import LineNumber, Unavailable
from gpuprobe.processes import end_with_parent
from gpuprobe.recording.summary import pinned_memory
from gpuprobe.remedies.edits import CloneStored, Detach, Edit, NoGrad, ToCpu
from gpuprobe.remedies.output import OutputComparison
from gpuprobe.remedies.setting import AllocatorSetting
from gpuprobe.remedies.text import ProgramText, Refused, parsed
from gpuprobe.user_frames import is_user_frame

BUDGET: Final = 120.0
"""Seconds for all runs of an explanation, by default."""

_MOST_CAUSES: Final = 5
_WHOLE_REMEDIES: Final = frozenset(
    {
        EditKind.DELETE,
        EditKind.FOREACH,
        EditKind.SET_TO_NONE,
        EditKind.CHUNK_SIZE,
        EditKind.ALL_USED,
        EditKind.BUCKET_VIEW,
        EditKind.EVALUATE_TO_CPU,
    }
)
"""Edits that are all of a remedy: if one saves little, so does the remedy, by whoever makes it."""
_LEAST_SETTING: Final = 0.3
"""The share of reserved memory that a setting has to save: an evaluation with another batch size
than training has fragments of a quarter."""
_MOST_SOURCE: Final = 1 << 20  # bytes of a file that is edited
_FAILED: Final = Unavailable("what the program would allocate next was not tried")
_NEVER_SEARCHED: Final = (
    "padding: only batches of integers that are copied from the CPU are checked"
)
"""What no explanation detects."""
_OTHER_RANKS: Final = (
    "other ranks: its launcher's variables are missing, and it ran as a job of one process, whose "
    "memory is not divided among several (gpuprobe explain -- torchrun … has all)"
)
_RAISED: Final = 5
"""The exit code of `gpuprobe run` after an exception of the program."""
_LAST_SECONDS: Final = 10.0
"""For the end of a program that is stopped."""
_HOLDERS: Final = (
    "what holds the memory at the peak is only known as far as it was found at the ends of steps"
)
_FOUND: Final = 0.95
"""The share of the memory at the peak that a second run has, if it does the same."""
_AS_MUCH: Final = 1.1
"""How many times the replayed peak the tried one may be: otherwise the edit may have the wrong
place."""
_NO_EDIT: Final = Unavailable("no edit is made for this")
_TENSOR: Final = "Tensor"
"""The type of a variable that only an assignment stores anything in."""
_PARAMETER: Final = "Parameter"
_LEAST_STEPS: Final = 12
"""Training steps that are run of a longer program: most growth shows in these."""
_EPOCH: Final = 0.1
"""The share of the time that its training steps take, in processor time."""
_OF_THE_FIRST_RUN: Final = 0.5
"""The share of the time after which the first run is stopped: a second one to the same moment, for
what holds the memory, has to fit into the rest."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A program, and the simulated GPU that it runs on."""

    target: str
    arguments: Sequence[str]
    module: bool = False
    gpu: str = "h100-80gb"
    compute: str = "auto"
    command: bool = False
    """Whether it is a command that starts the program, such as ``torchrun``: it runs once."""

    @property
    def words(self) -> list[str]:
        """The program as arguments of a command."""
        return [*(["-m"] if self.module else []), self.target, *self.arguments]


_OTHER_DEVICE: Final = re.compile(r"\b(devices?|cuda|cpu)\b|\.FloatTensor", re.IGNORECASE)
"""In errors of torch about tensors of two devices: ``found at least two devices, cuda:0 and cpu``,
``Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same``.
"""


class _Outcome(NamedTuple):
    """What came of trying edits: the ``effect``, and the ``edit`` that has it, None if it is the
    replayed one. ``refuted``: the changed program needs as much; ``device``: it fails, as memory is
    on another device.
    """

    effect: Effect
    edit: EditCandidate | None = None
    refuted: bool = False
    device: bool = False

    @property
    def helped(self) -> bool:
        """Whether the program needs less with the edit."""
        return self.edit is not None


class _Held(NamedTuple):
    """What holds memory at the peak, by row of the ledger, and what else does; None if that search
    was not finished."""

    first: Mapping[int, Holder]
    others: Mapping[int, Holder] | None


def explain(
    subject: Subject,
    *,
    budget: float = BUDGET,
    notify: Callable[[str], None] = lambda text: None,
) -> Explanation:
    """Run the program and explain its memory, in about ``budget`` seconds: what has no time left
    is named in the notes. ``notify`` gets a line before each run.

    Raises ProgramFailed if the program fails for another reason than the GPU's memory, or makes no
    step in its time; DataError if it does not use the GPU.
    """
    from gpuprobe.api.simulated_gpu import load_gpu, require_torch

    require_torch("the program is run on a simulated GPU")
    load_gpu(subject.gpu)
    with tempfile.TemporaryDirectory(prefix="gpuprobe-explain-") as name, ExitStack() as stack:
        return _Explaining(subject, Path(name), budget, notify, stack).run()


class _Explaining:
    def __init__(
        self,
        subject: Subject,
        folder: Path,
        budget: float,
        notify: Callable[[str], None],
        stack: ExitStack,
    ) -> None:
        """``stack`` closes what is opened."""
        self._stack = stack
        self._trials: RemedyTrials | None = None
        self._variables = Variables()
        self._subject = subject
        self._folder = folder
        self._notify = notify
        self._began = time.monotonic()
        self._budget = budget
        self._until = self._began + budget
        self._notes: list[str] = []
        self._ended = RunEnd.COMPLETE
        self._environment: Mapping[str, str] = {}  # of all runs
        self._endless = False  # whether later runs are on a GPU that never runs out of memory
        self._once = subject.command  # nothing is tried, by further runs
        self._detail = ""
        self._steps = 0  # after which the epoch was ended in the first run, and is in later ones
        self._not_run: tuple[str, ...] = ()
        self._less_reserved: dict[str, int] = {}
        """By patch of a remedy that was tried, the reserved bytes that it saves."""

    def run(self) -> Explanation:
        recording = self._recorded()
        if self._subject.command:
            why = "a job of several processes runs once, and no edit or setting is tried"
            self._notes.append(f"{_HOLDERS}: {why}")
            return self._with_ranks(self._explained(recording, search=False), recording)
        if self._ended is RunEnd.OUT_OF_MEMORY:
            # Only where memory runs out, frames of the exception hold some.
            explanation = self._explained(recording, failed=True)
            if explanation.causes:
                return explanation
            self._notify("running it again, on a GPU that never runs out of memory")
            again = self._again()
            if again is None:
                notes = (self._notes[-1], *explanation.notes)  # why not
                at_steps = self._explained(recording, search=False)
                if at_steps.causes:
                    notes, explanation = at_steps.notes, at_steps
                return replace(explanation, notes=notes, searched=False)
            recording, self._endless = again, True
        return self._with_ranks(self._explained(recording), recording)

    def _with_ranks(self, highest: Explanation, recording: Recording) -> Explanation:
        """The explanation of the rank with the highest peak, or if it has no cause, of that whose
        cause is the largest; with a line for each other rank.
        """
        first = _peak_of(recording)[0].rank
        notes = [*self._notes]
        self._once = True
        ranks = {first.session.rank: highest}
        for rank in recording.ranks:
            alone = replace(recording, ranks=(rank,))
            used = any(site.device.startswith("cuda") for site in device_peaks(alone))
            if rank is not first and used:
                ranks[rank.session.rank] = self._explained(alone, search=False)
        self._notes = notes
        main = first.session.rank
        if not highest.causes:
            main = max(ranks, key=lambda rank: sum(one.bytes for one in ranks[rank].causes[:1]))
        lines = (
            _line_of(rank, other, ranks[main])
            for rank, other in sorted(ranks.items())
            if rank != main
        )
        return replace(ranks[main], ranks=tuple(lines))

    @property
    def _alone(self) -> tuple[str, ...]:
        """What a job of one process does not show."""
        return (_OTHER_RANKS,) if self._environment else ()

    @property
    def _triable(self) -> bool:
        """Whether the program ends in time, so that it can be run again with a change."""
        ended = self._endless or self._ended in (RunEnd.COMPLETE, RunEnd.EPOCH)
        return ended and not self._once

    def _explained(
        self, recording: Recording, *, failed: bool = False, search: bool = True
    ) -> Explanation:
        """``failed``: at the point where the memory ran out, what its exception holds. Without
        ``search``: at that point, what the ends of the steps before show.
        """
        site, mark = _peak_of(recording)
        at_failure = failed or (not search and self._ended is RunEnd.OUT_OF_MEMORY)
        if at_failure:
            mark = _failure_in(mark)
        lives = Biographies(mark.ledger)
        needs = needs_at(lives, mark.event)
        if isinstance(needs, Unavailable):
            raise DataError(f"nothing to explain: {needs.reason}")
        held = None
        if search:
            held = self._holders(lives, mark, failed=failed)
        elif not self._subject.command:
            self._notes.append(f"{_HOLDERS}: this is the run that ran out of memory")
        diagnosed = causes_at(
            lives,
            mark.event,
            recorded_holders(mark) if held is None else held.first,
            failed=failed,
            variable=self._variables.assigned,
            otherwise=unneeded if held is None else None,
            others=None if held is None else held.others,
        )
        if not failed:
            diagnosed = certain_causes(site, lives, diagnosed)
        chosen = list(islice(filterfalse(_is_argument, diagnosed), _MOST_CAUSES))
        if not failed:
            chosen = list(over_steps(site, mark, chosen))
        causes = self._causes(chosen, needs.total, failed=failed)
        if not failed:
            causes = (*causes, *_without_limit(kept_causes(site, causes), lives))
            causes = causes or tuple(
                _without_limit(growth_cause(site, self._growth(site), None), lives)
            )
        cached = list(self._cached(site, failed=failed))
        rules = {one.rule for one in causes}
        certain = (one for one in chosen if one.bound is not Bound.OR_MORE)
        smaller = _made_smaller(one for one in certain if one.answer.rule in rules)
        ranked = _ranked(causes, cached, self._less_reserved, smaller)
        reserved = site.reserved
        index = int(site.device.partition(":")[2] or 0)
        return Explanation(
            program=shlex.join(self._subject.words),
            gpu=self._subject.gpu,
            device=site.device,
            step=needs.step,
            phase=site.phase if needs.step == site.step_index else mark.phase,
            capacity=parse_spec(self._subject.gpu)[index].total_memory,
            allocated=mark.allocated,
            reserved=reserved if isinstance(reserved, Unavailable) else reserved.at_least,
            ended=self._ended,
            detail=self._detail,
            failed=at_failure,
            needs=needs,
            late_variable=""
            if held is None
            else late_variable(blocks_at(lives, mark.event, failed=failed), held.first),
            causes=(*ranked, *self._pinned_causes(site)),
            smaller=None if ranked or failed else for_needed(AdviceFacts(site, mark)),
            notes=(
                *self._alone,
                *self._not_run,
                *self._notes,
                _NEVER_SEARCHED,
                *_pinned(recording),
            ),
            searched=not self._notes,
            seconds=time.monotonic() - self._began,
        )

    def _pinned_causes(self, site: PeakSite) -> Iterator[MemoryCause]:
        """The causes of pinned memory of the host, which no peak of a GPU has."""

        def assigned(place: Place) -> str:
            return self._variables.assigned([Frame(place.file, place.line, place.function)])

        return pinned.diagnose(pinned_memory(site.rank), assigned)

    def _growth(self, site: PeakSite) -> Growth | None:
        """The growth from step to step. What holds it is unknown of a run that was stopped, which
        may have been too short for much growth.
        """
        if self._ended is not RunEnd.STOPPED:
            return growth_of(site)
        return growth_of(site, LEAST_EFFECT, MANY_STEPS)

    @property
    def _limit(self) -> str:
        """Where the epoch of the program is ended: in later runs where it was in the first one."""
        return str(self._steps) if self._steps else f"{_LEAST_STEPS},{_EPOCH * self._budget:g}"

    # -- the runs

    def _recorded(self) -> Recording:
        """The recording of the program until it ends, or is stopped. One that fails is run again
        with all values computed: it may have failed by one that was not.
        """
        seconds = self._budget
        if not self._subject.command:
            seconds *= _OF_THE_FIRST_RUN
        self._notify(f"running the program, for at most {seconds:g} s")
        try:
            recording = self._first_run("first.gpuprobe", seconds)
        except ProgramFailed as failed:
            return self._computed(failed)
        if recording is None:
            raise ProgramFailed(
                f"the program made no step in {seconds:g} s",
                hint=f"give it more: --max-seconds {4 * self._budget:g}",
            )
        return recording

    def _computed(self, failed: ProgramFailed) -> Recording:
        """The recording of a second run of a program that ``failed``, with all values computed.
        Raises ``failed`` if there is no time left, or no memory for so many values."""
        seconds = float(int(_OF_THE_FIRST_RUN * (self._until - time.monotonic())))
        if self._subject.compute != "auto" or seconds < 1:
            raise failed
        self._notify(
            f"it failed: running it again, for at most {seconds:g} s, with all values computed"
        )
        self._subject = replace(self._subject, compute="real")
        try:
            recording = self._first_run("computed.gpuprobe", seconds)
        except ProgramFailed:
            if (self._folder / "computed.gpuprobe").exists():
                raise
            raise failed from None  # too much to compute
        if recording is None:
            raise ProgramFailed(
                f"{failed}; it may have failed by a value that was not computed: {seconds:g} s "
                "were too little to compute all",
                hint=f"give it more: --compute real --max-seconds {4 * self._budget:g}",
            ) from None
        return recording

    def _first_run(self, name: str, seconds: float) -> Recording | None:
        """The recording of a run that is stopped after so long; None if it has made no step then.
        Raises ProgramFailed if the program fails for another reason than the GPU's memory.
        """
        path = self._folder / name
        done = self._run(path, until=time.monotonic() + seconds)
        try:
            recording = load(path) if path.exists() else None
        except DataError:  # nothing was written yet
            recording = None
        if done is None:
            if recording is None or not any(rank.steps for rank in recording.ranks):
                return None
            if not _on_gpus(recording):
                raise DataError(
                    f"the program allocated no memory on the GPU in {seconds:g} s",
                    hint=f"if it needs longer: --max-seconds {4 * self._budget:g}",
                )
            self._ended = RunEnd.STOPPED
            last = recording.ranks[0].steps[-1]
            step = last.index + (last.ended_by != "end")  # the last one may have no end
            self._detail = f"after {seconds:g} s, in step {step}"
            self._notes.append(
                "what comes later in the program, and edits: both take more time (--max-seconds)"
            )
            return recording
        end = None if recording is None else _end_of(recording)
        if self._ends(recording):
            self._ended = RunEnd.EPOCH
            self._detail = f"after {self._steps} training steps"
        error = None if end is None else end.error
        if recording is not None and error is not None and error.out_of_memory:
            self._ended, self._detail = RunEnd.OUT_OF_MEMORY, error.message
            return recording
        if error is not None and error.lacks_launcher and not self._environment:
            self._notify("its launcher's variables are missing: running it as a job of one process")
            self._environment = JOB_OF_ONE
            return self._first_run("job.gpuprobe", seconds)
        if recording is None and not done.returncode and self._subject.command:
            raise DataError(
                "nothing to explain: no process of the command used a GPU through torch"
            )
        if done.returncode or recording is None:
            raise _failed(done, error, self._subject)
        return recording

    def _ends(self, recording: Recording | None) -> bool:
        """Note where a program ended, and what was not run; whether its epoch was ended."""
        end = None if recording is None else recording.ranks[0].end
        if end is None:
            return False
        self._not_run = end.kept_files
        if end.epoch is None:
            return False
        self._steps = end.epoch.steps
        self._not_run = (end.epoch.text, *end.kept_files)
        return True

    def _again(self) -> Recording | None:
        """A recording of the program on GPUs that never run out of memory; None, with a note, if it
        does not end well.
        """
        path = self._folder / "endless.gpuprobe"
        done = self._run(path, endless=True)
        if done is not None and not done.returncode:
            recording = load(path)
            self._ends(recording)
            return recording
        why = "the time was over"
        if done is not None:
            why = (
                "it fails on a GPU without a limit, too, as with a limit that it sets "
                "(set_per_process_memory_fraction)"
            )
        self._notes.append(f"what the program would need: {why}")
        return None

    def _run(
        self,
        output: Path,
        *,
        endless: bool = False,
        until: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str] | None:
        """Record one run of the program; None if it did not end ``until`` then: what was recorded
        can be read.
        """
        subject = self._subject
        left = (until or self._until) - time.monotonic()
        command = [
            *(sys.executable, "-m", "gpuprobe", "run", "--quiet", "--level", "trace"),
            *("--trace-steps", "all", "--gpu", subject.gpu, "--compute", subject.compute),
            *([] if subject.command else ["--first-epoch", self._limit]),
            *(["--endless"] if endless else []),
            *("--output", str(output), *(["--"] if subject.command else []), *subject.words),
        ]
        # No pipe: a process that the program has started may have it open after the program's end.
        with (
            tempfile.TemporaryFile("w+", errors="replace", dir=self._folder) as errors,
            subprocess.Popen(
                command,
                env={**os.environ, **self._environment, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                preexec_fn=end_with_parent,
            ) as process,
        ):
            try:
                process.wait(timeout=max(1.0, left))
            except subprocess.TimeoutExpired:
                _stop(process)
                return None
            except BaseException:  # Ctrl-C
                process.kill()
                raise
            errors.seek(0)
            return subprocess.CompletedProcess(command, process.returncode, "", errors.read())

    def _holders(self, lives: Biographies, mark: HighWater, *, failed: bool) -> _Held | None:
        """What holds the memory that is not needed; None if unknown."""
        unneeded = [b for b in searched_at(lives, mark.event, failed=failed) if lives.made[b.row]]
        tensors = lives.tensors(mark.event)
        much = sum(block.bytes for block in unneeded) >= LEAST * tensors
        if mark.event < 0 or not (much or copied(unneeded) >= LEAST_EFFECT * tensors):
            return _Held({}, {})
        if time.monotonic() > self._until:
            self._notes.append(f"{_HOLDERS}: the time was over")
            return None
        self._notify("running it to the peak, to find what holds the memory")
        if self._triable:  # what a trial compares with: it takes as long
            self._opened_trials().begin(self._until - time.monotonic())
        ledger = lives.ledger
        document = {
            "operator": lives.operator_at(mark.event),
            "device": mark.device,
            "blocks": [(lives.made[block.row], ledger.requested[block.row]) for block in unneeded],
        }
        most = sum(ledger.requested[block.row] for block in unneeded)
        answer = self._inspected({**document, "collects": True})
        if isinstance(answer, str):
            self._notes.append(f"{_HOLDERS}: a second run {answer} the same operator")
            return None
        if answer["exist"] < _FOUND * most:
            # Cycles are gone if the collector ran at other moments.
            again = self._inspected({**document, "collects": False})
            answer = answer if isinstance(again, str) else again
        if 2 * answer["exist"] < most:
            self._notes.append(
                f"{_HOLDERS}: a second run made other tensors, as after other random numbers "
                "(torch.manual_seed) or values of torch.empty"
            )
            return None
        if answer["incomplete"]:
            self._notes.append(f"the search for holders is incomplete: {answer['incomplete']}")
        first, others = (
            {
                unneeded[int(number)].row: from_plain(Holder, plain)
                for number, plain in answer[name].items()
            }
            for name in ("holders", "others")
        )
        return _Held(first, None if answer["others_incomplete"] else others)

    def _inspected(self, document: dict[str, object]) -> dict[str, Any] | str:
        """The answer of a run that ends at the peak, to a request of
        `gpuprobe.sampler.tracing.inspection`; why there is none, if it did not come there.
        """
        from gpuprobe.sampler.tracing.inspection import REQUEST

        folder = Path(tempfile.mkdtemp(dir=self._folder))
        request, result = folder / "request.json", folder / "holders.json"
        request.write_text(json.dumps({**document, "result": str(result)}), encoding="utf-8")
        done = self._run(
            folder / "second.gpuprobe",
            endless=self._endless,
            environment={REQUEST: str(request)},
        )
        if result.exists():
            answer: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
            return answer
        return "had no time to reach" if done is None else "did not have"

    # -- causes and trials

    def _causes(
        self, diagnosed: Sequence[Diagnosed], peak: int, *, failed: bool
    ) -> tuple[MemoryCause, ...]:
        """The causes, with the remedies that could be tried. ``peak``: bytes."""
        if failed:
            return tuple(
                cause_of(one, Effect(Certainty.UNTRIED, peak, _FAILED)) for one in diagnosed
            )
        helped: list[MemoryCause] = []
        others: list[MemoryCause] = []
        refuted: list[MemoryCause] = []
        for found in diagnosed:
            one = self._refined(found)
            effect = replayed(one, peak)
            edits = self._edits(one)
            made: EditCandidate | None = None
            group = others
            if self._triable:
                tried = self._best(edits, effect)
                if tried.device:
                    one = one.answered(without_copies(one.answer))
                holder = one.group.holder
                # An attribute may have to be released in a method, which has no name of this one.
                whole = one.answer.edit in _WHOLE_REMEDIES and not (holder and holder.of_object)
                if tried.refuted and whole:
                    continue
                if not tried.helped or not _saves_little(tried.effect, effect):
                    effect, made = tried.effect, tried.edit
                elif whole:
                    continue  # other memory is as high a moment later
                else:
                    effect = replace(effect, note="an edit was tried, and saves less")
                group = helped if made is not None else refuted if tried.refuted else others
            if saved_bytes(effect, one.group.bytes) < LEAST_BYTES:
                continue
            if made is not None and isinstance(made.edit, NoGrad):
                one = _without_graph(one)
            kept_at = _stored_at(one, self._script)
            if made is not None or kept_at is None or one.kept_at is not None:
                kept_at = _kept_at(one, edits, made) or kept_at
            group.append(cause_of(_with_stored_name(one, kept_at), effect, kept_at))
        # Several may be about one graph, which the best of their remedies frees.
        helped.sort(key=_saved, reverse=True)
        if helped and all(one.rule == LATE_GRADIENTS for one in helped):
            # They come back with the next step: what is kept and saves more comes first.
            more = [one for one in others if _saved(one) > _saved(helped[0])]
        else:
            more = _before(helped, others)
        others = [one for one in others if one not in more]
        return (*more, *helped, *others, *refuted)

    def _cached(self, site: PeakSite, *, failed: bool) -> Iterator[MemoryCause]:
        """The causes of memory in the allocator's cache."""
        traces = _traces(site)
        if not traces or isinstance(site.reserved, Unavailable):
            return
        if isinstance(site.amount, Unavailable):
            return
        most = site.reserved.at_least
        for one in cached_causes(Cache(traces, most, site.amount.at_most)):
            once = self._once or self._ended is RunEnd.STOPPED
            if once and (one.setting or one.option):
                continue  # a note explains it: what has to be tried takes as long
            effect: Effect | None = Effect(Certainty.UNTRIED, most, _NO_EDIT, reserved=True)
            if one.setting:
                effect = self._tried_setting(one.setting, most, failed=failed)
            elif one.option:
                effect = self._tried_without(one, most)
            if effect is None:
                continue  # the remedy does not help, or was not tried, as a note explains
            yield MemoryCause(
                rule=one.answer.rule,
                bytes=one.bytes,
                blocks=one.segments,
                made_at=one.made_at,
                last_use=None,
                holder=None,
                kept_at=one.kept_at or _captured_at(one.common, in_order=one.in_order),
                sentence=one.answer.sentence,
                remedy=one.answer.remedy,
                code=one.answer.code,
                effect=effect,
            )

    def _tried_setting(self, conf: str, most: int, *, failed: bool) -> Effect | None:
        """The effect of allocator settings, if the program then needs less, or does not fail."""
        what = f"allocator settings ({conf})"
        environment = AllocatorSetting(conf).environment(os.environ)
        if isinstance(environment, Refused):
            return None  # they are set already
        if time.monotonic() > self._until:
            self._notes.append(f"{what} were not tried: the time was over")
            return None
        self._notify(f"trying {conf}")
        path = self._folder / "setting.gpuprobe"
        done = self._run(path, environment=environment)
        if done is None:
            self._notes.append(f"{what} were not tried to the end: the time was over")
            return None
        if done.returncode or not path.exists():
            return None
        after = _peak_of(load(path))[0].reserved
        if isinstance(after, Unavailable):
            return None
        if not failed and after.at_most > (1 - _LEAST_SETTING) * most:
            return None
        note = "with it the program ends without an error" if failed else ""
        return Effect(Certainty.TRIED, most, after.at_most, reserved=True, note=note)

    def _tried_without(self, one: CachedMemory, most: int) -> Effect | None:
        """The effect of the program's own settings without an option."""
        for candidate in self._option_edits(one):
            result = self._try(candidate)
            if isinstance(result, TriedRemedy) and result.helps:
                return Effect(
                    Certainty.TRIED,
                    result.before_reserved,
                    result.peak_reserved,
                    reserved=True,
                    patch=result.remedy.patch.decode("utf-8", "replace"),
                    note=result.output.value,
                )
        self._notes.append(f"the allocator settings without {one.option} were not tried")
        return None

    def _option_edits(self, one: CachedMemory) -> Iterator[EditCandidate]:
        made = one.made_at.file if isinstance(one.made_at, Place) else ""
        for path in dict.fromkeys(name for name in (self._script, made) if name):
            text = _text(path)
            if text is not None:
                for edit in without_option(text, one.option):
                    yield EditCandidate(path, edit)

    def _opened_trials(self) -> RemedyTrials:
        """The trials, opened once."""
        if self._trials is None:
            subject = self._subject
            self._trials = self._stack.enter_context(
                RemedyTrials(
                    [subject.target, *subject.arguments],
                    RemedyOptions(
                        subject.gpu,
                        subject.compute,
                        epoch=self._steps,
                        endless=self._endless,
                        environment=self._environment,
                    ),
                    module=subject.module,
                    progress=self._notify,
                )
            )
        return self._trials

    @property
    def _script(self) -> str:
        """The program's file; empty for a module."""
        return "" if self._subject.module else os.path.realpath(self._subject.target)

    def _refined(self, diagnosed: Diagnosed) -> Diagnosed:
        """The cause, with what the program's source has about it."""
        if diagnosed.other is not None:
            return diagnosed
        for path in files_of(diagnosed, self._script):
            text = _text(path)
            if text is None:
                continue
            answer = graphs.retained(diagnosed.group, text)
            if answer is None and diagnosed.answer.rule == KEPT_TENSORS:
                answer = kept_to_be_read(diagnosed.group, text)
            elif answer is None and diagnosed.answer.rule == graphs.KEPT_GRAPHS:
                holder = diagnosed.group.holder
                backward = backward_of_a_part(holder, text)
                if holder is not None and backward:
                    answer = graphs.kept_in_container(diagnosed.group, holder, backward)
            if answer is not None:
                return diagnosed._replace(answer=answer)
        if diagnosed.answer.rule == graphs.OF_THIS_CALL:
            name = self._variables.accumulated(diagnosed.group.main.frames)
            if name:
                sentence = (
                    f"{diagnosed.answer.sentence}; the graph of {name}, which is computed from its "
                    "earlier values, keeps them"
                )
                return diagnosed._replace(answer=replace(diagnosed.answer, sentence=sentence))
        return diagnosed

    def _edits(self, found: Diagnosed) -> list[EditCandidate]:
        """The edits that can be tried for a cause; those of two causes are tried together."""
        if found.other is not None:
            second = self._edits(found.other)[:1]
            first = self._edits(found._replace(other=None)) if second else []
            return [one._replace(also=second[0]) for one in first]
        for path in files_of(found, self._script):
            text = _text(path)
            edits = [] if text is None else candidates(found, path, text)
            if edits:
                return edits
        return []

    def _try(self, candidate: EditCandidate) -> RemedyResult | None:
        """The result of an edit; None if there is no time left."""
        left = self._until - time.monotonic()
        if left <= 0:
            return None
        edits: dict[str, list[Edit]] = {}
        for one in (candidate, candidate.also):
            if one is not None:
                edits.setdefault(one.path, []).append(one.edit)
        return self._opened_trials().try_remedy(RemedyRequest(edits), left)

    def _best(self, edits: Sequence[EditCandidate], replayed: Effect) -> _Outcome:
        """The effect of the best edit: of one that saves about as much as the replay, no other is
        tried, and edits of another kind only where none of the first one helps enough.
        """
        best = _Outcome(replayed)
        for candidate in edits:
            enough = best.helped and not _saves_little(best.effect, replayed)
            if enough and not isinstance(candidate.edit, type(edits[0].edit)):
                break
            tried = self._tried(candidate, replayed)
            if not best.helped or (tried.helped and _after(tried.effect) < _after(best.effect)):
                best = tried
            if best.helped and _after(best.effect) <= _AS_MUCH * _after(replayed):
                break
        return best

    def _tried(self, candidate: EditCandidate, replayed: Effect) -> _Outcome:
        """The effect of an edit, if the changed program needs less; otherwise the replayed one."""
        result = self._try(candidate)
        if result is None:
            note = "there was no time left to try it (--max-seconds)"
            return _Outcome(replace(replayed, note=note))
        if isinstance(result, TriedRemedy) and result.helps:
            effect = Effect(
                Certainty.TRIED,
                result.before_allocated,
                result.peak_allocated,
                patch=result.remedy.patch.decode("utf-8", "replace"),
                note=result.output.value,
            )
            self._less_reserved[effect.patch] = result.before_reserved - result.peak_reserved
            return _Outcome(effect, candidate)
        if isinstance(result, TriedRemedy) and result.output is OutputComparison.DIFFERENT:
            note = f"{EDIT_TRIED}, and the changed program prints something else"
            return _Outcome(replace(replayed, note=note))
        if isinstance(result, TriedRemedy):
            note = f"{EDIT_TRIED}, and did not help"
            effect = replace(replayed, bound=Bound.OR_MORE, note=note)
            return _Outcome(effect, refuted=True)
        if isinstance(result, UntriedRemedy):
            why = f"not tried: {result.reason}"
        elif result.reason.startswith("AttributeError"):
            why = f"not tried: the edit does not fit what the line stores ({result.reason})"
        else:
            why = f"{EDIT_TRIED}, and failed: {result.reason}"
        device = EDIT_TRIED in why and _OTHER_DEVICE.search(why) is not None
        return _Outcome(replace(replayed, note=why), device=device)


def _ranked(
    causes: Sequence[MemoryCause],
    cached: Sequence[MemoryCause],
    less_reserved: Mapping[str, int],
    smaller: Collection[Place | NoPlace],
) -> tuple[MemoryCause, ...]:
    """All causes, those of cached memory first if it is more than the others save.
    ``less_reserved``: by patch, the reserved bytes that a remedy saves; what it frees in time is no
    free block of the cache, either, unless its own memory is little of that. Where a tensor grows,
    that is why the cache has free blocks of many sizes; and of a line whose memory is ``smaller``
    with a remedy, the free blocks are, too.
    """
    most = max(
        (
            max(_saved(one), min(less_reserved.get(one.effect.patch, 0), 2 * _saved(one)))
            for one in causes
        ),
        default=0,
    )
    grown = any(one.rule == GROWN for one in causes)
    first = [
        one
        for one in cached
        if _saved(one) > most and not (one.rule == FRAGMENTS and (grown or one.made_at in smaller))
    ]
    return (*first, *causes, *(one for one in cached if one not in first))


def _made_smaller(diagnosed: Iterable[Diagnosed]) -> set[Place | NoPlace]:
    """The lines that allocate most of the memory that a remedy makes smaller."""
    lines: set[Place | NoPlace] = set()
    for one in diagnosed:
        sizes: Counter[Place | NoPlace] = Counter()
        for block in one.group.blocks if isinstance(one.replay, Smaller) else ():
            sizes[block.made_at] += block.bytes
        lines |= {line for line, size in sizes.items() if 2 * size > one.group.bytes}
    return lines


def _end_of(recording: Recording) -> SessionEnd | None:
    """How the program ended: the first rank that failed, if one did."""
    ends = [rank.end for rank in recording.ranks]
    return next((end for end in ends if end is not None and end.error is not None), ends[0])


def _line_of(rank: int, other: Explanation, main: Explanation) -> str:
    """The peak of another rank, and its first cause, if that is another one."""
    same = [(one.rule, one.made_at, one.kept_at) for one in other.causes[:1]] == [
        (one.rule, one.made_at, one.kept_at) for one in main.causes[:1]
    ]
    cause = "no cause"
    if other.causes:
        cause = "the same first cause" if same else other.causes[0].sentence
    peak = human_bytes(other.allocated)
    return f"rank {rank}: {peak} allocated at its peak on {other.device}; {cause}"


def _saves_little(tried: Effect, replayed: Effect) -> bool:
    """Whether what was measured is less than a cause has to save, and than half of the replayed."""
    saved = tried.before - _after(tried)
    return saved < LEAST_EFFECT * tried.before and 2 * saved < replayed.before - _after(replayed)


def _with_stored_name(one: Diagnosed, line: Place | None) -> Diagnosed:
    """The cause, with the name by which a line stores what keeps the memory, if the path that was
    found begins with another one: a method's ``self.outputs`` is its caller's ``trainer.outputs``.
    """
    holder = one.group.holder
    text = None if line is None else _text(line.file)
    if holder is None or text is None or line is None:
        return one
    stored = next(filter(None, (stored_as(text, line.line, n) for n in stored_names(holder))), "")
    if not stored or holder.name.startswith(stored):
        return one
    sentence = f"{one.answer.sentence}; it is stored as {stored} at {line}"
    return one._replace(answer=replace(one.answer, sentence=sentence))


def _without_graph(one: Diagnosed) -> Diagnosed:
    """The cause, with the remedy that was tried: no gradients, where a graph is kept."""
    if one.answer.code == NO_GRAD:
        return one
    remedy = "compute it without gradients, so that no graph is made"
    return one._replace(answer=replace(one.answer, remedy=remedy, code=NO_GRAD))


def _after(effect: Effect) -> int:
    """The bytes with a change; those without it if that is unknown."""
    return effect.before if isinstance(effect.after, Unavailable) else effect.after


def _saved(cause: MemoryCause) -> int:
    """The bytes that a remedy saves, or may save if its effect is unknown."""
    effect = cause.effect
    return cause.bytes if isinstance(effect.after, Unavailable) else effect.before - effect.after


def _before(causes: Sequence[MemoryCause], others: Sequence[MemoryCause]) -> list[MemoryCause]:
    """Those of ``others`` that come before ``causes``, whose remedies were tried: of memory that
    one line makes, what holds the most is the cause, though a release of less may free the whole;
    of as much, what saves more.
    """
    least = {
        one.made_at: (one.bytes, _saved(one)) for one in causes if isinstance(one.made_at, Place)
    }
    return [
        one
        for one in others
        if one.made_at in least and (one.bytes, _saved(one)) > least[one.made_at]
    ]


def _kept_at(
    found: Diagnosed, edits: Sequence[EditCandidate], made: EditCandidate | None
) -> Place | None:
    """The line that stores what holds the memory, or makes it larger than it must be: that of the
    edit that was ``made`` and helps, or of the only one that applies.
    """
    lines = {
        Place(one.path, LineNumber(one.edit.line))
        for one in ([made] if made is not None else edits)
        if isinstance(one.edit, (CloneStored, Detach, ToCpu))
    }
    return lines.pop() if len(lines) == 1 else found.kept_at


def _stored_at(diagnosed: Diagnosed, script: str) -> Place | None:
    """The line that stores what holds the memory, if only one line of its files does: under the
    innermost name that they store anything under, as libraries name the parts of their objects.
    None where memory is smaller with the remedy: a graph holds it then, and should.
    """
    holder = diagnosed.group.holder
    if holder is None:
        return None
    if isinstance(diagnosed.replay, Smaller) and by_graph(holder):
        return None
    if holder.root is HolderRoot.CACHE and holder.line:  # of the decorator
        return Place(holder.file, holder.line, holder.function)
    first = holder.path[0] if holder.path else None
    names = stored_names(holder)
    if any(step.kind == _PARAMETER for step in holder.path):
        names = names[:1]  # what a model has, libraries may have put into it
    for name in names:
        files, function = files_of(diagnosed, script), None
        if first is not None and (first.label, first.kind) == (name, _TENSOR):
            # Other variables may have the name.
            if holder.root is HolderRoot.LOCAL and holder.file:
                files, function = [holder.file], holder.function
            elif holder.root is HolderRoot.GLOBAL:
                files, function = [script] if script else files, ""
        texts = [(path, text) for path in files if (text := _text(path)) is not None]
        lines = [(path, storing_lines(text, name, function)) for path, text in texts]
        for path, found in lines:
            if len(found) == 1:
                return Place(path, LineNumber(min(found)))
        if any(found for _, found in lines):
            return None
    return None


def _captured_at(common: Sequence[Place], *, in_order: bool) -> Place | None:
    """The line that captures graphs, or else the innermost of the lines that all have in common.
    ``in_order``: the loop around the capture, if there is one.
    """
    for place in common:
        text = _text(place.file)
        line = 0 if text is None else capture_line(text, place.line)
        if text is not None and line:
            loop = loop_line(text, line) if in_order else 0
            return Place(place.file, LineNumber(loop or line))
    return next(iter(common), None)


def _text(path: str) -> ProgramText | None:
    """A file of the program; None if it cannot be read, or is no Python."""
    try:
        found = parsed(path, read_regular(Path(path), most=_MOST_SOURCE))
    except OSError:
        return None
    return None if isinstance(found, Refused) else found


def _without_limit(grown: Iterable[MemoryCause], lives: Biographies) -> Iterator[MemoryCause]:
    """The causes of growth, without containers that stop at some number of elements, by the files
    of the program on the stacks of a trace.
    """
    stacks = lives.ledger.trace.stacks
    frames = (frame for stack in set(lives.ledger.stack) for frame in stacks.frames_of(stack))
    files = {frame.filename for frame in frames if is_user_frame(frame)}
    texts = [text for text in map(_text, sorted(files)) if text is not None]
    for one in grown:
        name = stored_name(one.holder)
        if not name or not is_limited(texts, name):
            yield one


def _is_argument(one: Diagnosed) -> bool:
    """Whether the cause is a variable that the program has to keep during the call in progress."""
    holder = one.group.holder
    if holder is None or one.answer.rule != LIVE_VARIABLE or not holder.file:
        return False
    text = _text(holder.file)
    return text is not None and is_argument(one.group, text)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does, so that what holds memory is recorded; or at once, if that has no effect.
    What the program has started ends, too."""
    import psutil  # 15 ms, only for programs that are stopped

    started: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=_LAST_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for one in started:
        with contextlib.suppress(psutil.Error):  # it has ended
            one.kill()


def _pinned(recording: Recording) -> Iterator[str]:
    """The program's pinned memory, as far as is known."""
    end = recording.ranks[0].end
    if end is None:
        yield "pinned memory of the host"
    elif end.pinned:
        total = human_bytes(sum(line.bytes for line in end.pinned))
        yield f"pinned memory of the host: {total}, the most at {end.pinned[0].place}"


def _traces(site: PeakSite) -> list[MemoryTrace]:
    """The traces of a device with its segments, in order."""
    return [
        trace
        for step in site.rank.traced_steps()
        for trace in site.rank.traces.of(step)
        if trace.device == site.device and trace.segments
    ]


def _failed(
    done: subprocess.CompletedProcess[str], error: ProgramError | None, subject: Subject
) -> ProgramFailed:
    """``error``: how the program ended, by the recording."""
    if error is None:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "")
    else:
        last = error.text
    # `gpuprobe run` ends so after an exception, with which Python itself would end with 1.
    what = "failed" if done.returncode == _RAISED else f"ended with code {done.returncode}"
    run = shlex.join(["gpuprobe", "run", "--gpu", subject.gpu, *subject.words])
    return ProgramFailed(
        f"the program {what}" + (f": {last.strip()}" if last else ""),
        hint="gpuprobe explain runs it without input (stdin)"
        if "EOFError" in last
        else f"{run} shows what it prints; its options come after the script",
    )


def _failure_in(mark: HighWater) -> HighWater:
    """The blocks at the last allocation that failed in the trace of a peak, if one did."""
    failures = [
        event for event, action in enumerate(mark.ledger.trace.events.action) if action == OOM
    ]
    return live_at(mark.ledger, failures[-1]) if failures else mark


def _on_gpus(recording: Recording) -> list[PeakSite]:
    """The peaks of GPUs."""
    return [site for site in device_peaks(recording) if site.device.startswith("cuda")]


def _peak_of(recording: Recording) -> tuple[PeakSite, HighWater]:
    """The highest peak of a device, and its blocks."""
    site = overall_peak(recording, _on_gpus(recording))
    if site is None or not site.device:
        raise DataError(
            "the program allocated no memory on the GPU",
            hint="move model and data to the GPU if torch.cuda.is_available(), or with an option "
            "of the script",
        )
    mark = high_water_at(site)
    if not isinstance(mark, Unavailable):
        return site, mark
    nearest = nearest_trace(site)  # of a run that was stopped, the last step has no trace
    if nearest is None:
        raise DataError(f"the peak cannot be explained: {mark.reason}")
    return site, nearest[1]
