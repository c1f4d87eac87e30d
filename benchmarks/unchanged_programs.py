"""Nothing that gpuprobe does changes a program: random programs, bare and with each watcher.

    python benchmarks/unchanged_programs.py [--programs 10000] [--first SEED] [--corpus [--every N]]
        [--engine cpu native cuda] [--watchers NAME ...] [--minutes N] [--show N]

Each program (`program_sources.py`) runs twice: bare, and with a watcher. Compared are

* every allocation and free, in order, by size, from torch's own profiler, which runs in both;
* on the native engine also each kernel, copy and memory call with its stream, in order, and where
  every block is in the end. ``native`` computes values; ``cuda`` is torch's CUDA code alone, as on
  a GPU: kernels leave what is in memory, so that values depend on where each block was;
* values, bit for bit, and what else the program can observe of its tensors: whether a gradient was
  stolen, copied or added in place, reference and use counts, versions, names of graph nodes;
* when each object ends, among the allocations and all else that happens;
* the random number generators of Python and torch, on both devices;
* exceptions with the program's frames in their tracebacks; stdout, stderr and warnings.

Garbage in cycles is collected where the program does it, and after it: how soon Python does so
alone depends on how many objects there are, a watcher's too.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import functools
import gc
import io
import itertools
import linecache
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

import native_start  # noqa: E402

from gpuprobe.native.process import LogKind, loaded  # noqa: E402

GPU = "h100-80gb"


if __name__ == "__main__":
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    if "cpu" not in sys.argv:
        native_start.restart(GPU)

import hazard_programs  # noqa: E402
import program_sources  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.autograd import DeviceType  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import gpuprobe  # noqa: E402
from gpuprobe.errors import GpuprobeError  # noqa: E402

ENGINES = ("cpu", "native", "cuda")
_NATIVE = ("native", "cuda")
_NUMBERS = (8, 16)
"""Bytes of the tensors that torch makes of Python's numbers (real, complex), for one operator.
Under any dispatch mode of Python it makes them twice; they are left out on the CPU."""
TRIES = 20
BATCH = 250  # programs of one simulated GPU

_ADDRESS = re.compile(r"0x[0-9a-f]+")
Run = Callable[[], None]
Event = tuple[Any, ...]


class Block:
    """A context manager of the program's."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __enter__(self) -> Block:
        return self

    def __exit__(self, *error: object) -> None:
        return None


class Observer:
    """What a program can observe in one run, as a list of events."""

    def __init__(self, name: str) -> None:
        self.events: list[Event] = []
        self._name = name
        self._ends: dict[int, Any] = {}
        self.open = True

    def note(self, *values: Any) -> None:
        self.events.append(("note", *map(self._told, values)))

    def ref(self, thing: Any) -> None:
        number = len(self._ends)
        self._ends[number] = weakref.ref(thing, lambda _: self._ended(number))

    def _ended(self, number: int) -> None:
        if self.open:
            self.events.append(("ended", number))

    def _told(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                plain = value.detach()
                made = str(plain.dtype), tuple(plain.shape), plain.stride(), plain.device.type
                return "tensor", *made, *_bytes(plain.cpu().contiguous())
        if isinstance(value, BaseException):
            return self._error(value)
        if isinstance(value, (tuple, list)):
            return tuple(map(self._told, value))
        return repr(value)

    def _error(self, error: BaseException) -> Any:
        frames = [
            (frame.f_code.co_name, line)
            for frame, line in traceback.walk_tb(error.__traceback__)
            if frame.f_code.co_filename == self._name
        ]
        return "error", type(error).__name__, str(error), frames, getattr(error, "__notes__", [])


def _bytes(host: torch.Tensor) -> tuple[bytes, int]:
    """The first few, and a hash of all."""
    size = host.numel() * host.element_size()
    data = ctypes.string_at(host.data_ptr(), size) if size else b""
    return data[:32], hash(data)


def rng(engine: str) -> Event:
    states = [torch.get_rng_state()]
    if engine != "cpu":
        states.append(torch.cuda.get_rng_state())
    return "generators", hash(random.getstate()), *map(_bytes, states)


class Source(NamedTuple):
    """A program that was written by hand: its ``main`` has nothing left to do."""

    name: str
    text: str


def corpus() -> list[Source]:
    """The programs of the hazard corpora that use one GPU: reduced bugs of public projects, their
    fixed versions, correct programs, and ordinary training programs.
    """
    sys.path.insert(0, str(HERE.parent / "tests" / "hazards"))
    import ordinary_workloads
    import upstream_corpus
    import variants_indices
    import variants_streams
    from hazard_corpus import CASES

    groups = (upstream_corpus, variants_indices, variants_streams)
    texts = {case.name: case.text for case in CASES if case.gpus == 1}
    for group in groups:
        for bug in group.BUGS:
            if bug.gpus == 1:
                texts[f"{bug.name}, the bug"] = bug.buggy
                texts[f"{bug.name}, fixed"] = bug.mended
        for name in ("CASES", "CORRECT"):
            cases = getattr(group, name, ())
            texts.update({case.name: case.text for case in cases if case.gpus == 1})
    for name in ordinary_workloads.WORKLOADS:
        texts[name] = f"import ordinary_workloads\nordinary_workloads.WORKLOADS[{name!r}]()\n"
    return [Source(name, text + "\ndef main(): return []\n") for name, text in texts.items()]


def observe(
    program: int | Source, engine: str, watcher: Callable[[Run, Path], None], folder: Path
) -> Any:
    """Run a program, or that of a seed, under a watcher, and return all that it can observe."""
    seed = program if isinstance(program, int) else 0
    if engine in _NATIVE:
        _rewind()()
    if isinstance(program, int):
        name = f"<program {seed}>"
        text = program_sources.source(seed, streams=engine != "cpu")
    else:
        name, text = f"<program {program.name}>", program.text
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    code = compile(text, name, "exec")
    observer = Observer(name)
    out, err = io.StringIO(), io.StringIO()
    names: dict[str, Any] = {
        "torch": torch,
        "nn": nn,
        "F": F,
        "checkpoint": checkpoint,
        "random": random,
        "warnings": warnings,
        "sys": sys,
        "threading": threading,
        "gc": gc,
        "copy": copy,
        "TorchFunctionMode": TorchFunctionMode,
        "TorchDispatchMode": TorchDispatchMode,
        "D": "cuda" if engine != "cpu" else "cpu",
        "Block": Block,
        "__name__": name,
        "note": observer.note,
        "ref": observer.ref,
        # To print a tensor, torch selects values by a mask, which memory that nothing has
        # computed makes of any size.
        "printable": torch.Tensor.cpu if engine == "cuda" else lambda tensor: tensor,
    }
    if not isinstance(program, int):
        names.update(cuda=torch.cuda, s=torch.cuda.Stream())

    def run() -> None:
        with ExitStack() as stack:
            memory = stack.enter_context(profiled(engine))
            if engine in _NATIVE:
                stack.enter_context(_logged(observer.events))
            _run(code, names, observer, engine)
            if engine in _NATIVE:
                _drain()
        observer.events.append(("memory", memory.sizes))

    if engine != "cpu":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    random.seed(seed)
    torch.manual_seed(seed)
    gc.disable()
    filters = warnings.filters[:]
    try:
        with ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(out))
            stack.enter_context(contextlib.redirect_stderr(err))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("always")
            watcher(run, folder)
    finally:
        gc.enable()
        warnings.filters[:] = filters
        observer.open = False
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    texts = [_ADDRESS.sub("0x", stream.getvalue()) for stream in (out, err)]
    return [*observer.events, ("stdout", texts[0]), ("stderr", texts[1])]


def _run(code: Any, names: dict[str, Any], observer: Observer, engine: str) -> None:
    result = None
    try:
        exec(code, names)
        result = names["main"]()
        observer.events.append(("returned", len(result)))
    except Exception as error:  # noqa: BLE001 - the program's: what it is, is compared
        observer.note(error)
        error.__traceback__ = None
    observer.events.append(rng(engine))
    del result
    names.clear()
    observer.events.append(("names ended",))
    gc.collect()
    observer.events.append(("collected",))


def _drain() -> None:
    """Return when autograd's threads have released the nodes of earlier backward passes: each
    thread runs one task after the other. This one allocates nothing.
    """
    empty = torch.empty(0, device="cuda", requires_grad=True)
    empty.view(-1).backward(torch.empty(0, device="cuda"))


class _Profile:
    sizes: list[int]


@contextmanager
def profiled(engine: str) -> Iterator[_Profile]:
    """The sizes of what torch allocates on the device; of what it frees, as negative ones."""
    found = _Profile()
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as profiler:
        yield found
    device = DeviceType.CPU if engine == "cpu" else DeviceType.CUDA
    events = profiler.kineto_results.events()
    sizes = [
        event.nbytes()
        for event in sorted(events, key=lambda event: event.start_ns())
        if event.name() == "[memory]" and event.device_type() == device
    ]
    numbers = _NUMBERS if engine == "cpu" else ()
    found.sizes = [size for size in sizes if abs(size) not in numbers]


@contextmanager
def _logged(events: list[Event]) -> Iterator[None]:
    """The calls of the native engine's runtime, and where the allocator's blocks are in the end. In
    order are those of each thread: how threads take turns is chance. So is which of gloo's threads
    takes a collective: their calls, which launch nothing, are in order by stream.
    """
    runtime = loaded()
    assert runtime is not None
    runtime.start_log()
    try:
        yield
    finally:
        runtime.stop_log()
        assert not runtime.dropped()
        numbers: dict[int, int] = {0: 0}

        def stream(handle: int) -> int:
            return numbers.setdefault(handle, len(numbers))

        calls = list(runtime.take_log())
        launching = {call.thread for call in calls if call.kind.name == "LAUNCH"}

        def queue(call: Any) -> tuple[str, int]:
            thread = call.thread in launching
            return ("thread", call.thread) if thread else ("stream", call.stream)

        queues = list(dict.fromkeys(map(queue, calls)))
        for call in sorted(calls, key=lambda call: queues.index(queue(call))):
            if call.kind not in _WATCHERS_OWN:
                where = stream(call.stream)
                what = call.name, call.bytes, call.grid, call.block, call.shared
                events.append(("call", call.kind.name, where, *what))
        for segment in torch.cuda.memory._snapshot()["segments"]:
            blocks = [(block["size"], block["state"]) for block in segment["blocks"]]
            events.append(("segment", segment["total_size"], blocks))


@functools.cache
def _rewind() -> Callable[[], None]:
    return hazard_programs.rewinding()


_WATCHERS_OWN = (LogKind.EVENT_RECORD, LogKind.EVENT_QUERY)
"""What a watcher may add: both without an effect on the order of anything else."""


# -- watchers


def counters(run: Run, folder: Path) -> None:
    with gpuprobe.record(folder / "run.gpuprobe", level="counters", force=True):
        run()


def trace(run: Run, folder: Path) -> None:
    with gpuprobe.record(folder / "run.gpuprobe", trace_steps="all", force=True):
        run()


def hazards(run: Run, folder: Path) -> None:
    with gpuprobe.detect_hazards():
        run()


def check(run: Run, folder: Path) -> None:
    """What ``gpuprobe check`` has around a program: a trace, the precisions and, on a GPU,
    hazards.
    """
    from gpuprobe.sampler.hooks.precision import PrecisionWatch

    watch = PrecisionWatch()
    watch.start()
    try:
        with gpuprobe.detect_hazards() if torch.cuda.is_available() else nullcontext():
            trace(run, folder)
    finally:
        watch.stop()


def notebook(run: Run, folder: Path) -> None:
    """A cell with ``%%gpuprobe``, in a shell of IPython's."""
    from IPython.core.interactiveshell import InteractiveShell

    from gpuprobe.integrations import notebook

    shell = InteractiveShell.instance()
    shell.user_ns["run"] = run
    try:
        output = folder / "cell.gpuprobe"
        notebook.run_cell(shell, f"record --level trace --force --output {output}", "run()")
    finally:
        del shell.user_ns["run"]


def plugin(run: Run, folder: Path) -> None:
    """A test that gpuprobe's plugin for pytest measures, with limits of all kinds."""
    file = folder / "test_program.py"
    file.write_text(_TEST)
    sys.modules["unchanged_program"] = module = ModuleType("unchanged_program")
    module.run = run  # type: ignore[attr-defined]
    unused = ("terminal", "warnings", "cacheprovider", "asyncio")
    options = [*(f"-pno:{name}" for name in unused), "-s", "-c"]
    try:
        code = pytest.main([*options, os.devnull, f"--rootdir={folder}", str(file)])
    finally:
        del sys.modules["unchanged_program"]
        sys.modules.pop("test_program", None)
    assert code == 0, code


_TEST = """
import pytest, unchanged_program

@pytest.mark.gpu_memory(max_peak="70 GiB", max_syncs=1_000_000)
def test_program():
    unchanged_program.run()
"""


def dashboard(run: Run, folder: Path) -> None:
    """A trace that another process reads over and over while it is written."""
    code = "import sys, unchanged_programs; unchanged_programs.read_on(sys.argv[1])"
    path = str(folder / "run.gpuprobe")
    shutil.rmtree(path, ignore_errors=True)
    search = os.pathsep.join((str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")))
    reader = subprocess.Popen(
        [sys.executable, "-c", code, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": search},
    )
    assert reader.stdin is not None
    assert reader.stdout is not None
    with reader:
        assert reader.stdout.readline() == b"ready\n"
        try:
            trace(run, folder)
        finally:
            reader.stdin.close()
    assert reader.returncode == 0


def read_on(path: str) -> None:
    """The other process of `dashboard`: reads until its stdin ends, and at least once."""
    from gpuprobe.recording.load import Followed

    print("ready", flush=True)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    followed = None
    while True:
        last = ended.is_set()
        with nullcontext() if last else contextlib.suppress(GpuprobeError):  # not begun yet
            followed = followed or Followed(path)
            followed.poll()
        if last:
            return


def bare(run: Run, folder: Path) -> None:
    """None: the program for a second time."""
    run()


WATCHERS: dict[str, Callable[[Run, Path], None]] = {
    "bare": bare,
    "counters": counters,
    "trace": trace,
    "hazards": hazards,
    "check": check,
    "notebook": notebook,
    "plugin": plugin,
    "dashboard": dashboard,
}
_ALL = ["bare", "counters", "trace", "hazards", "check"]
BULK = {
    "native": _ALL,
    "cuda": _ALL,
    "cpu": ["bare", "counters", "trace", "check"],
}
"""The watchers of each engine unless ``--watchers`` names others: the others are these, started
by something else, and take longer. Where torch has no device ``detect_hazards()`` and the plugin
simulate one: then it is another machine that the program runs on."""


def _settled(events: list[Event]) -> list[Event]:
    """Frees that nothing comes between in the order of their sizes. Nodes of the graph that Python
    code has looked at, and objects of one cycle, end in another order among themselves.
    """
    found: list[Event] = []
    freed: list[Event] = []
    for event in events:
        if event[0] == "memory" and isinstance(event[1], list):
            event = "memory", settled_sizes(event[1])
        elif event[0] == "ended":
            freed.append(event)
            continue
        found += [*sorted(freed), event]
        freed.clear()
    return found + sorted(freed)


def settled_sizes(sizes: list[int]) -> list[int]:
    found: list[int] = []
    for freed, run in itertools.groupby(sizes, lambda size: size < 0):
        together = list(run)
        found += sorted(together) if freed else together
    return found


def difference(bare: list[Event], watched: list[Event]) -> str:
    """The first event that differs, in words; "" for none."""
    bare, watched = _settled(bare), _settled(watched)
    for at, (one, other) in enumerate(zip(bare, watched, strict=False)):
        if one != other and one[0] == other[0] == "memory" and isinstance(one[1], list):
            pairs = enumerate(zip(one[1], other[1], strict=False))
            place = next((i for i, (a, b) in pairs if a != b), -1)
            part = slice(max(0, place - 6), place + 6)
            return f"memory: at {place}: bare {one[1][part]}, watched {other[1][part]}"
        if one != other:
            return f"{one[0]}: event {at}: bare {str(one)[:300]}, watched {str(other)[:300]}"
    if len(bare) != len(watched):
        longer = max(bare, watched, key=len)
        return f"{longer[min(len(bare), len(watched))][0]}: {len(bare)} events, {len(watched)}"
    return ""


def judge(
    seeds: Sequence[int | Source], engine: str, names: list[str]
) -> dict[str, dict[int | Source, str]]:
    """The first difference of each program that has one, by watcher. Programs with threads, and the
    threads that autograd has for GPUs, do not always do the same: then one run under the watcher
    must be equal to one of the bare runs. A program of which no two bare runs are the same, since
    each leaves memory behind for the next, is not compared, and its name printed.
    """
    found: dict[str, dict[int | Source, str]] = {name: {} for name in names}
    folder = Path(tempfile.mkdtemp(prefix="unchanged"))
    gpu = nullcontext()
    if engine == "native":
        gpu = gpuprobe.virtual_gpu(GPU, "real")
    try:
        with gpu:
            for number, seed in enumerate(seeds):
                if number in (0, 1, 5, 20, 60):  # what there is now: collecting is quick then
                    gc.collect()
                    gc.freeze()
                alone = [observe(seed, engine, bare, folder)]
                for name in names:
                    watched = [observe(seed, engine, WATCHERS[name], folder)]
                    text = difference(alone[0], watched[0])
                    while text and len(watched) < TRIES:
                        alone.append(observe(seed, engine, bare, folder))
                        watched.append(observe(seed, engine, WATCHERS[name], folder))
                        if any(not difference(a, b) for a in alone for b in watched[-1:]):
                            text = ""
                    if text and not _repeats(alone):
                        shown = seed if isinstance(seed, int) else seed.name
                        print(f"{engine} program {shown} does not repeat itself, bare", flush=True)
                        break
                    if text:
                        found[name][seed] = text
    finally:
        gc.unfreeze()
        shutil.rmtree(folder, ignore_errors=True)
    return found


def _repeats(runs: list[Any]) -> bool:
    """Whether two of these runs are the same."""
    return any(not difference(one, other) for one, other in itertools.combinations(runs, 2))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first program")
    parser.add_argument("--corpus", action="store_true", help="the hazard corpora, instead")
    parser.add_argument("--every", type=int, default=1, help="of these, each so many")
    usual = ENGINES[1:] if loaded() else ENGINES[:1]
    parser.add_argument("--engine", nargs="+", choices=usual, default=usual)
    parser.add_argument("--watchers", nargs="+", choices=WATCHERS)
    parser.add_argument("--minutes", type=float, help="end after so many")
    parser.add_argument("--show", type=int, default=5, help="differences to print, of each")
    given = parser.parse_args()
    torch.set_num_threads(1)  # of tensors this small, more only wait for each other
    last = given.first + given.programs
    written = corpus()[:: given.every] if given.corpus else []
    if written:
        given.first, last = 0, len(written)
        given.engine = [name for name in given.engine if name != "cpu"]
    ran: Counter[str] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    began = time.monotonic()
    batch = 1 if written else BATCH  # what one of them leaves on a GPU is not what the next finds
    for first in range(given.first, last, batch):
        if given.minutes is not None and time.monotonic() - began > 60 * given.minutes:
            break
        seeds: Sequence[int | Source] = range(first, min(first + batch, last))
        if written:
            seeds = written[first : first + batch]
        for engine in given.engine:
            for name, rows in judge(seeds, engine, given.watchers or BULK[engine]).items():
                for seed, text in rows.items():
                    if counts[engine, name] < given.show:
                        shown = seed if isinstance(seed, int) else seed.name
                        print(f"{engine} {name} program {shown}: {text}", flush=True)
                    counts[engine, name] += 1
            ran[engine] += len(seeds)
            if not ran[engine] % BATCH or first + batch >= last:
                print(f"{engine}: {ran[engine]} programs", file=sys.stderr, flush=True)
    print(f"\nPython {sys.version.split()[0]}, torch {torch.__version__}")
    print("engine   watcher     programs  differ")
    for engine in given.engine:
        for name in given.watchers or BULK[engine]:
            print(f"{engine:7}  {name:10} {ran[engine]:9} {counts[engine, name]:7}")
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main())
