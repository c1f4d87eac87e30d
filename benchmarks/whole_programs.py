"""Nothing that gpuprobe does changes a process: random programs, bare and under ``gpuprobe run``.

    python benchmarks/whole_programs.py [--programs 5000] [--first SEED] [--each] [--alone]
        [--engine cpu|cuda] [--watchers NAME ...] [--minutes N] [--planted WAY] [PART@PLACE ...]

Each program is `tests/faults/program.py`, a training loop, with parts drawn at random: descriptors,
streams, signals, limits, folders, processes, threads, memory history, depth, replaced functions,
endings. So is what starts it: its streams (files, pipes, closed, full), the descriptors that it
inherits, its limits and umask. Watchers take turns; ``--each``: each watches each program.
``--alone``: each part by itself instead, at each of its places, with each watcher. ``--planted``: a
watcher of `tests/faults/planted.py`, which must be reported. Compared are

* the exit code, or the signal. Documented are 5 for an error and 130 for an interrupt;
* stdout, and stderr without gpuprobe's lines (`_DOCUMENTED`) and torch's frames in tracebacks;
* the name, kind, mode and bytes of each file in its folder, those of processes that it leaves
  behind too. Among them are its notes: numbers of descriptors, memory histories, tensors' values,
  the depth that it reaches, and all else that it can observe;
* what is left in the folder of temporary files.

``cuda`` is torch's CUDA code on the native engine, which both runs have; ``cpu`` a build without.
Programs are forked from a process that has imported torch (`tests/support/warm_python.py`), and end
without the interpreter's teardown; each 10th has it (so have parts that need it), and each 400th is
started by an interpreter, both times (so are parts that recurse: their depth is another).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import resource
import shutil
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests" / "support")]
sys.path.append(str(ROOT / "tests" / "faults"))

import native_start  # noqa: E402

if __name__ == "__main__" and "cpu" not in sys.argv:
    native_start.restart("h100-80gb")

import program as _program  # noqa: E402, F401 - registers the parts
import warm_python  # noqa: E402
from parts import PARTS, Part  # noqa: E402

from gpuprobe.native.process import loaded  # noqa: E402

PROGRAM = ROOT / "tests" / "faults" / "program.py"
TEXT = b"of the parent\n"
SECONDS = 300.0
TRIES = 6

RECORDING = "recording.gpuprobe"
_RUN = ("-m", "gpuprobe", "run", "--output", f"../{RECORDING}")

WATCHERS: dict[str, tuple[str, ...]] = {
    "bare": (),
    "counters": (*_RUN, "--level", "counters"),
    "trace": (*_RUN, "--trace-steps", "all"),
    "hazards": (*_RUN, "--hazards"),
    "hazards and trace": (*_RUN, "--hazards", "--trace-steps", "1"),
}
"""What comes before the program in the arguments of an interpreter."""
BULK = {
    "cpu": ["counters", "trace"],
    "cuda": ["counters", "trace", "hazards"],
}

_STDIN = ("null", "null", "pipe", "closed")
_OUTPUTS = ("file", "file", "file", "pipe", "pipe", "closed", "full", "broken", "null", "other")
_LIMITS: tuple[tuple[tuple[int, int], ...], ...] = (
    *((),) * 6,
    ((resource.RLIMIT_NOFILE, 16),),
    ((resource.RLIMIT_NOFILE, 64),),
    ((resource.RLIMIT_FSIZE, 4096),),
    ((resource.RLIMIT_CORE, 0),),
)


_TAKE_NUMBERS = (
    "replaces_every_number_up_to_1023",
    "closes_all_numbers",
    "closes_one_by_one_and_opens",
    "closes_those_it_does_not_know",
    "closes_what_the_system_lists",
    "opens_many",
    "opens_all_kinds",
    "runs_an_interpreter",
    "passes_descriptors_on",
)
"""Parts whose files get the numbers of others, or that note their numbers."""
_LIMIT_FILES = ("limits_its_files", "is_ended_by_a_large_file", "lets_large_files_end_it")
"""Parts that limit how large a file may be, stderr among them."""
_FLAGS = ((), (), ("-O",), ("-X", "dev"), ("-W", "error"), ("-B",), ("-u",), ("-I",), ("-P",))
"""Options of interpreters."""


class Launch(NamedTuple):
    """How a program is started. ``stdin``, ``stdout``, ``stderr``: what each is; ``"other"``: what
    the other output is. ``inherited``: the numbers of pipes with `TEXT`.
    """

    stdin: str = "null"
    stdout: str = "file"
    stderr: str = "file"
    inherited: tuple[int, ...] = ()
    limits: tuple[tuple[int, int], ...] = ()
    umask: int = 0o22


class Plan(NamedTuple):
    """A program. ``teardown``: it ends as interpreters do. ``flags``: options of the interpreter
    that starts it; None: it is forked.
    """

    seed: int
    words: tuple[str, ...]
    launch: Launch = Launch()
    teardown: bool = False
    flags: tuple[str, ...] | None = None

    def text(self) -> str:
        usual = Launch()._asdict()
        given = [f"{key}={one}" for key, one in self.launch._asdict().items() if one != usual[key]]
        flags = [] if self.flags is None else ["started", *self.flags]
        return " ".join((str(self.seed), *self.words, *given, *flags))


def drawn(seed: int) -> Plan:
    """The program of a seed."""
    choose = random.Random(seed)
    going = [part for part in PARTS.values() if not part.ends]
    ends = [part for part in PARTS.values() if part.ends]
    parts = _sample(choose, going, choose.choice((1, 1, 2, 2, 3, 4)))
    if choose.random() < 0.4:
        parts += _sample(choose, ends, 1)
        if parts[-1].name == "becomes_an_interpreter":
            # It counts the pipes that it inherits: a history has some to an addr2line for each
            # library on a stack, and gpuprobe's are on it.
            parts = [part for part in parts if "history" not in part.name]
    words = tuple(f"{part.name}@{choose.choice(part.places)}" for part in parts)
    launch = Launch()
    if choose.random() < 0.5:
        stdout, stderr = choose.choice(_OUTPUTS), choose.choice(_OUTPUTS)
        if stdout == "other" == stderr:
            stderr = "file"
        launch = Launch(
            choose.choice(_STDIN),
            stdout,
            stderr,
            tuple(sorted(choose.sample(range(3, 12), choose.choice((0, 0, 1, 3))))),
            choose.choice(_LIMITS),
            choose.choice((0o22, 0o22, 0, 0o77, 0o777)),
        )
    if any(part.name in _LIMIT_FILES for part in parts) and launch.stderr == "file":
        launch = launch._replace(stderr="pipe")  # gpuprobe's own lines take room in a limited file
    teardown = seed % 10 == 0 or any(part.teardown for part in parts)
    started = seed % 400 == 0 or any(part.started for part in parts)
    started = started or (any(part.teardown for part in parts) and seed % 20 == 0)
    return Plan(seed, words, launch, teardown, choose.choice(_FLAGS) if started else None)


def _sample(choose: random.Random, parts: Sequence[Part], count: int) -> list[Part]:
    """Different parts; those that take longer less often than others. At most one has a memory
    history: with a smaller limit than before, torch's order of entries is that of its buffer.
    """
    weights = [0.15 if part.started else 0.3 if part.teardown else 1.0 for part in parts]
    chosen = dict.fromkeys(choose.choices(parts, weights, k=count))
    histories = [part for part in chosen if "history" in part.name]
    # torch's pipe to addr2line is then the program's file: it contains addresses of C's stack.
    most = 0 if any(part.name in _TAKE_NUMBERS for part in chosen) else 1
    return [part for part in chosen if part not in histories[most:]]


def alone() -> list[Plan]:
    """Each part by itself, at each of its places."""
    return [
        Plan(
            number,
            (f"{part.name}@{place}",),
            teardown=part.teardown,
            flags=() if part.started else None,
        )
        for number, part in enumerate(PARTS.values())
        for place in part.places
    ]


class Outcome(NamedTuple):
    """What can be observed of a process. ``files``: their kinds, modes and bytes."""

    status: int
    stdout: bytes
    stderr: bytes
    files: Mapping[str, tuple[str, str, bytes]]
    temporary: tuple[str, ...]

    def raised(self) -> bool:
        """Whether an error of the program's ended it. Without a descriptor it cannot note that, and
        may have no stderr.
        """
        notes = self.files.get("notes")
        noted = notes is not None and b"raises" in notes[2].splitlines()
        return noted or not self.stderr or b"Traceback (most recent call last):" in self.stderr


_TITLES = rb"The host waits for the GPU at|Blind spots|Redundant waits|Freed too early"
_DOCUMENTED = re.compile(
    rb"gpuprobe: [^\n]*(?:\n(?:  hint: [^\n]*\n)?|$)"
    rb"|(?:No stream hazards among|The program failed; |Nothing to check: )[^\n]*\n"
    rb"(?:\n|  [^\n]*\n|(?:" + _TITLES + rb")[^\n]*\n)*"
)
"""gpuprobe's own lines: messages with its name, with their hints, and the report about hazards
without a race."""
_CHANCE = re.compile(
    rb"(?m)^Exception ignored in: <(?:_io|socket)\.[^\n]*\n"
    rb"(?:[^\n]*\n){0,12}?ResourceWarning: [^\n]*\n"
    rb"|0x[0-9a-f]{6,}|\[[IWE]\d{4} [\d:.]+ |^[IWE]\d{4} [\d:.]+ (?:\d+ )?|^object refcount : \d+"
    rb"|^ - leaked (?:instance|type|function) [^\n]*\n"
)
"""In what is printed: addresses, times, reference counts of errors that cannot be printed, where
the collector closes files, and which of the objects that Triton leaks at the end nanobind names
(by address; it counts all)."""
_TIMES = re.compile(
    rb"(?m)\[[IWE]\d{4} [\d:.]+ |^[IWE]\d{4} [\d:.]+ (?:\d+ )?"
    rb"|^object (?:address  |refcount |type     ): \w+"
)
"""In any file, which has number 2 where stderr was closed: when torch wrote a line, and the
addresses and reference counts of an error that cannot be printed."""
_OF_TORCH = re.compile(
    rb'(?m)^((?:  \| )*)  File "[^"\n]*/(?:site-packages/torch|gpuprobe/native)/[^\n]*\n'
    rb"(?:\1    [^\n]*\n)*"
)
"""Frames of torch: it calls modules that have hooks, also those of all modules, in another way. And
of the simulated GPU, which bare runs have, too."""
_FINALIZERS = re.compile(
    rb"(?m)^Exception ignored in: <finalize object at [^\n]*\nTraceback [^\n]*\n"
    rb"(?:  File \"[^\"\n]*/(?:weakref|torch/library)\.py\"[^\n]*\n(?:    [^\n]*\n)*)*"
    rb"TypeError: 'NoneType' object is not callable\n"
)
"""Of torch's own libraries, in the teardown of a program that has cleared what runs at the exit."""
_STACKS = re.compile(
    rb"(Fatal Python error: [^\n]*\n)(?:\n|(?:Current t|T)hread 0x[^\n]*\n|  File [^\n]*\n"
    rb"|  <no Python frame>\n|  \.\.\.\n|Extension modules: [^\n]*\n?)*"
    rb"|(?<=Call stack:\n)(?:  File [^\n]*\n(?:    [^\n]*\n)*)+"
)
"""After an error that a fault handler reports: all threads, with the frames below the program; and
those of logging's own errors.
"""


def _kept(found: re.Match[bytes]) -> bytes:
    return found.group(1) or b""


_END_OF_FORKED = re.compile(
    rb"(?m)^Traceback [^\n]*\n  File \"[^\"\n]*/warm_python\.py\"[^\n]*\n(?:    [^\n]*\n)*"
)
"""The frame that an interpreter's end does not have, and a forked process's has: of an error of a
function in C that ``atexit`` calls."""
_BY_CHANCE = re.compile(r"(?<=^pymp-)\w+$")
"""In names of `multiprocessing`'s temporary folders, the part that chance makes."""
_DEPTHS = frozenset(
    f"{name}@forward"
    for name in (
        "counts_how_deep_it_may_recurse",
        "may_recurse_deeper",
        "raises_from_the_depth",
        "recurses_by_calls_of_its_own",
    )
)
"""What observes how deep a forward pass may recurse, which is documented for level ``trace``."""
_BEFORE_TORCH = frozenset(
    f"{name}@start"
    for name in (
        "forgets_what_was_registered_for_the_exit",
        "clears_the_path_of_modules",
        "closes_the_files_of_others",
        "deletes_the_streams",
        "has_a_trace_function",
        "replaces_paths",
    )
)
"""What observes whether torch is imported already: ``--hazards`` does that, as documented."""
_DEEP_AND_STRICT = ("recurses_through_modules", "makes_warnings_errors")
"""Both observe it: torch warns of hooks that fail where the stack ends."""
_DOCUMENTED_CODES = ((1, 5), (-2, 130), (-2, 120))
"""Of programs that raise: bare, and under gpuprobe. 120: an interrupt that cannot be printed."""


class Runs:
    """Runs programs in folders below ``base``, which are emptied before each."""

    def __init__(self, base: Path, engine: str) -> None:
        self._base = base
        self._engine = engine
        (base / "home").mkdir()
        names = ("PATH", "LANG", "LD_PRELOAD", "TRITON_LIBCUDA_PATH", "GPUPROBE_", "PYTHONPATH")
        kept = {name: text for name, text in os.environ.items() if name.startswith(names)}
        self._environment = {
            **kept,
            "HOME": os.environ.get("HOME", "/"),
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH")))),
            "OMP_NUM_THREADS": "1",
            "KINETO_LOG_LEVEL": "5",
            "TMPDIR": str(base / "tmp"),
            "FAULTS_RECORDING": str(base / RECORDING),
        }
        self._warm = {}
        # Both have the simulated GPU's: a program may refuse to import others.
        bare = ["program", *(warm_python.modules_of("native") if engine == "cuda" else [])]
        for name, modules in (
            ("bare", bare),
            ("gpuprobe", [*bare, *_OF_A_RUN, *warm_python.modules_of(*_ROOMS)]),
        ):
            (base / name).mkdir()
            environment = {
                **self._environment,
                "PYTHONPATH": os.pathsep.join(
                    (self._environment["PYTHONPATH"], str(PROGRAM.parent))
                ),
            }
            self._warm[name] = warm_python.WarmPython(
                base / name, modules, environment, one_at_a_time=True
            )

    def close(self) -> None:
        for warm in self._warm.values():
            warm.close()

    def run(self, plan: Plan, watcher: str) -> Outcome:
        """Run a program to its end, with all that it leaves behind."""
        work, temporary = self._base / "work", self._base / "tmp"
        for path in (work, temporary):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        for path in self._base.glob("recording*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        argv = [*WATCHERS[watcher], str(PROGRAM), str(plan.seed), *plan.words]
        launch = plan.launch
        with contextlib.ExitStack() as stack:
            streams, outputs = _opened(launch, self._base, stack)
            request = warm_python.Request(
                argv,
                str(work),
                self._environment,
                session=True,
                numbers=[*streams],
                limits=[*launch.limits],
                umask=launch.umask,
                end="interpreter" if plan.teardown else "at once",
                seconds=SECONDS,
            )
            if plan.flags is not None:
                # Under a limit of files' sizes, Python leaves bytecode that is cut: other programs
                # would fail by it.
                request = request._replace(program=sys.executable, argv=["-B", *plan.flags, *argv])
            server = self._warm["bare" if watcher == "bare" else "gpuprobe"]
            status = server.start(request, streams)
            texts = [_content(output) for output in outputs]
        left = sorted(path.name for path in temporary.iterdir()) if temporary.is_dir() else ["gone"]
        return Outcome(
            status,
            _others(texts[0]) if "other" in (launch.stdout, launch.stderr) else texts[0],
            _others(texts[1]),
            dict(_files(work)),
            tuple(_BY_CHANCE.sub("", name) for name in left if not name.startswith("gpuprobe-")),
        )


_ROOMS = ("sampler", "recording", "hazard_watch", "hazards", "analysis", "model", "reporters")
_OF_A_RUN = (
    "gpuprobe.cli.commands.run",
    "gpuprobe.api.watch",
    "gpuprobe.api.recordings",
    "gpuprobe.api.render",
    "gpuprobe.api.hazards",
    "gpuprobe.cli.parser",
)


def _opened(
    launch: Launch, base: Path, stack: contextlib.ExitStack
) -> tuple[dict[int, int], list[Path | int | None]]:
    """The descriptors of a process, and where its outputs are read afterwards."""
    streams: dict[int, int] = {}

    def opened(number: int, descriptor: int) -> None:
        stack.callback(os.close, descriptor)
        streams[number] = descriptor

    def filled() -> int:
        reading, writing = os.pipe()
        os.write(writing, TEXT)
        os.close(writing)
        return reading

    if launch.stdin != "closed":
        opened(0, filled() if launch.stdin == "pipe" else os.open(os.devnull, os.O_RDONLY))
    outputs: list[Path | int | None] = [None, None]
    for number, kind in ((1, launch.stdout), (2, launch.stderr)):
        if kind == "file":
            path = base / f"output-{number}"
            opened(number, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND))
            outputs[number - 1] = path
        elif kind in ("pipe", "broken"):
            reading, writing = os.pipe()
            opened(number, writing)
            if kind == "broken":
                os.close(reading)
            else:
                stack.callback(os.close, reading)
                os.set_blocking(reading, False)
                outputs[number - 1] = reading
        elif kind in ("full", "null"):
            opened(number, os.open(f"/dev/{kind}", os.O_WRONLY))
    for number, other, kind in ((1, 2, launch.stdout), (2, 1, launch.stderr)):
        if kind == "other" and other in streams:
            streams[number] = streams[other]
            outputs[number - 1] = outputs[other - 1]
    for number in launch.inherited:
        opened(number, filled())
    return streams, outputs


def _content(output: Path | int | None) -> bytes:
    """What a process has written. A pipe has room for it."""
    if isinstance(output, Path):
        return output.read_bytes()
    text = b""
    with contextlib.suppress(BlockingIOError):
        while output is not None and (part := os.read(output, 2**16)):
            text += part
    return text


def _others(text: bytes) -> bytes:
    """What was printed on stderr, without gpuprobe's lines, chance, and torch's own frames."""
    text = _END_OF_FORKED.sub(b"", _FINALIZERS.sub(b"", _STACKS.sub(_kept, text)))
    return _OF_TORCH.sub(b"", _CHANCE.sub(b"", _DOCUMENTED.sub(b"", text)))


def _files(folder: Path) -> Iterator[tuple[str, tuple[str, str, bytes]]]:
    """All files below a folder. Those that begin with ``stderr`` were the program's stderr."""
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        regular = stat.S_ISREG(mode)
        content = _TIMES.sub(b"", _STACKS.sub(_kept, path.read_bytes())) if regular else b""
        if path.name.startswith("stderr"):
            content = _others(content)
        if path.name.startswith("stacks"):  # it has number 2 where stderr was closed
            content = _CHANCE.sub(b"", content)
        yield str(path.relative_to(folder)), (stat.filemode(mode)[0], oct(mode & 0o7777), content)


def difference(bare: Outcome, recorded: Outcome) -> str:
    """The first difference, in words; "" for none."""
    codes = bare.status, recorded.status
    if codes[0] != codes[1] and not (codes in _DOCUMENTED_CODES and bare.raised()):
        return f"exit code: bare {codes[0]}, recorded {codes[1]}: {recorded.stderr[-300:]!r}"
    if bare.stdout != recorded.stdout:
        return f"stdout: {_first(bare.stdout, recorded.stdout)}"
    if bare.stderr != recorded.stderr:
        return f"stderr: {_first(bare.stderr, recorded.stderr)}"
    for name in sorted({*bare.files, *recorded.files}):
        one, other = bare.files.get(name), recorded.files.get(name)
        if one != other:
            if one is None or other is None or one[:2] != other[:2]:
                kinds = [None if each is None else each[:2] for each in (one, other)]
                return f"file {name}: bare {kinds[0]}, recorded {kinds[1]}"
            return f"file {name}: {_first(one[2], other[2])}"
    if bare.temporary != recorded.temporary:
        return f"temporary files: bare {bare.temporary}, recorded {recorded.temporary}"
    return ""


def _first(bare: bytes, recorded: bytes) -> str:
    """Where they differ first, with what is around it."""
    both = enumerate(zip(bare, recorded, strict=False))
    at = next((i for i, (one, other) in both if one != other), min(len(bare), len(recorded)))
    line = bare[:at].count(b"\n") + 1
    shown = [each[max(0, at - 80) :][:400] for each in (bare, recorded)]
    return f"line {line}: bare {shown[0]!r}, recorded {shown[1]!r}"


def check(runs: Runs, plan: Plan, watcher: str, bare: list[Outcome]) -> str:
    """The first difference that a watcher makes; "" for none. A program that does not do the same
    in each run, as those with threads, must do under the watcher what it has done in one of several
    bare runs. ``bare``: the runs so far, to which others are added.
    """
    text = difference(bare[0], runs.run(plan, watcher))
    while text and len(bare) < TRIES:
        bare.append(runs.run(plan, "bare"))
        recorded = runs.run(plan, watcher)
        again = difference(bare[-1], recorded)
        if any(not difference(one, recorded) for one in bare):
            return ""
        if again == text:
            return text
        text = again
    return text


def _observes_depth(words: Sequence[str]) -> bool:
    names = [word.partition("@")[0] for word in words]
    return not _DEPTHS.isdisjoint(words) or all(name in names for name in _DEEP_AND_STRICT)


def changes(runs: Runs, plan: Plan, watchers: Sequence[str]) -> dict[str, str]:
    """The first difference of a program, for each watcher that makes one."""
    bare = [runs.run(plan, "bare")]
    texts = {name: check(runs, plan, name, bare) for name in watchers}
    return {name: text for name, text in texts.items() if text}


@contextlib.contextmanager
def running(engine: str) -> Iterator[Runs]:
    base = Path(tempfile.mkdtemp(prefix="whole-"))
    runs = Runs(base, engine)
    try:
        yield runs
    finally:
        runs.close()
        shutil.rmtree(base, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", metavar="PART@PLACE", help="the parts of one program")
    parser.add_argument("--programs", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first program")
    parser.add_argument("--alone", action="store_true", help="each part alone")
    usual = "cuda" if loaded() else "cpu"
    parser.add_argument("--engine", choices=("cpu", "cuda"), default=usual)
    parser.add_argument("--watchers", nargs="+", choices=WATCHERS)
    parser.add_argument("--each", action="store_true", help="each watcher, not one by turns")
    parser.add_argument("--planted", metavar="WAY", help="a watcher that changes something")
    parser.add_argument("--minutes", type=float, help="end after so many")
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.programs)
    plans: Sequence[Plan] = [drawn(seed) for seed in seeds]
    if given.alone:
        plans = alone()[given.first :][: given.programs]
    if given.words:
        started = any(PARTS[word.partition("@")[0]].started for word in given.words)
        plans = [
            Plan(given.first, tuple(given.words), teardown=True, flags=() if started else None)
        ]
    watchers = given.watchers or BULK[given.engine]
    if given.planted:
        watchers = ["planted"]
        WATCHERS["planted"] = (str(PROGRAM.parent / "planted.py"), given.planted)
    each = given.each or given.alone or given.words
    counts: Counter[str] = Counter()
    ran: Counter[str] = Counter()
    began, done = time.monotonic(), 0
    with running(given.engine) as runs:
        for plan in plans:
            if given.minutes is not None and time.monotonic() - began > 60 * given.minutes:
                break
            names = watchers if each else [watchers[plan.seed % len(watchers)]]
            if _observes_depth(plan.words):
                names = [name for name in names if "trace" not in name]
            if not _BEFORE_TORCH.isdisjoint(plan.words):
                names = [name for name in names if "hazards" not in name]
            ran.update(names)
            for name, text in changes(runs, plan, names).items():
                counts[name] += 1
                print(f"{given.engine} {name}: {plan.text()}: {text}", flush=True)
            done += 1
            if not done % 100:
                print(f"{done} programs, {counts.total()} differ", file=sys.stderr, flush=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"\nPython {sys.version.split()[0]}, processor {used.ru_utime + used.ru_stime:.0f} s")
    print("engine  watcher            programs  differ")
    for name in watchers:
        print(f"{given.engine:6}  {name:17} {ran[name]:9} {counts[name]:7}")
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main())
