"""Programs that close, replace and limit what gpuprobe uses as well: their files, output and exit
code are those of a run without gpuprobe.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

import pytest
import warm_python

from gpuprobe.recording.reader import read_recording


class Ended(NamedTuple):
    """How a program ended: what it printed, without gpuprobe's lines, and its files."""

    code: int
    stdout: str
    stderr: str
    files: dict[str, bytes]


def run(folder: Path, text: str, *options: str, fresh: bool = False) -> Ended:
    """Run a program, with ``options`` of gpuprobe or (without any) bare."""
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(text)
    python = sys.executable if fresh else warm_python.shared().python
    words = ("-m", "gpuprobe", *options) if options else ()
    done = subprocess.run(
        [python, *words, "program.py"],
        cwd=folder,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = [line for line in done.stderr.splitlines() if not line.startswith("gpuprobe: ")]
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    del files["program.py"]
    stderr = re.sub("0x[0-9a-f]+", "0x", "\n".join(lines).replace(str(folder), ""))
    return Ended(done.returncode, done.stdout.replace(str(folder), ""), stderr, files)


LEVELS: Final = {
    "counters": ("run",),
    "trace": ("run", "--level", "trace"),
    "hazards": ("run", "--level", "trace", "--hazards"),
}

TRAINS: Final = """
import os, sys, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def train(steps):
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
train(2)
"""

CLOSES: Final = """
import time
os.closerange(3, {end})
own = [os.open(f"own-{{i}}", os.O_RDWR | os.O_CREAT | os.O_TRUNC) for i in range(40)]
print(own)
train(3)
time.sleep(0.4)  # the steps are written
for descriptor in own:
    os.write(descriptor, b"own")
train(1)
import atexit
atexit.register(lambda: print([os.fstat(descriptor).st_size for descriptor in own]))
"""


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("end", [256, 1 << 20])
def test_the_files_of_a_program_that_closes_unknown_descriptors(
    tmp_path: Path, level: str, end: int
) -> None:
    text = TRAINS + CLOSES.format(end=end)
    bare = run(tmp_path / "bare", text)
    recorded = run(tmp_path / "run", text, *LEVELS[level])
    if level == "hazards":  # its report is on stderr
        recorded = recorded._replace(stderr="")
    assert recorded == bare
    assert bare.code == 0
    assert set(bare.files.values()) == {b"own"}
    (rank,) = read_recording(tmp_path / "run" / "program.gpuprobe").ranks
    assert len(rank.steps) >= 6
    assert rank.end is not None
    notes = [spot.what for spot in rank.blind_spots if "closed" in spot.what]
    assert len(notes) == (end > 256)


REMOVES_TORCH: Final = """
import atexit
atexit.register(lambda: print([name in sys.modules for name in ("json", "threading", "torch")]))
for name in ("json", "threading", "torch"):
    sys.modules.pop(name, None)
"""


@pytest.mark.parametrize("more", ["", "try: import torch\nexcept Exception: print('refused')"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_program_that_removes_modules(tmp_path: Path, level: str, more: str) -> None:
    """Recording ends without importing torch a second time, which torch refuses."""
    text = TRAINS + REMOVES_TORCH + more
    bare = run(tmp_path / "bare", text)
    recorded = run(tmp_path / "run", text, *LEVELS[level])
    if level == "hazards":  # its report is on stderr
        recorded = recorded._replace(stderr="")
    assert recorded == bare
    (rank,) = read_recording(tmp_path / "run" / "program.gpuprobe").ranks
    assert rank.end is not None
    assert rank.end.gpuprobe_faults == ()


def test_the_result_of_a_command_whose_program_closes_descriptors(tmp_path: Path) -> None:
    """The program does not get the result, and the command does not lose it."""
    text = TRAINS + CLOSES.format(end=256)
    done = run(tmp_path, text, "baseline", "update", "--baseline", "memory.json")
    assert done.code == 0, done.stderr
    assert {done.files[f"own-{i}"] for i in range(40)} == {b"own"}
    assert "[3, 4, 5," in done.stderr
    assert b"peak" in done.files["memory.json"]


DEPTH: Final = """
import sys
depth = 0
def call():
    global depth
    depth += 1
    call()
def recurse():
    global depth
    depth = 0
    try:
        call()
    except RecursionError as error:
        print(depth, error)
"""

STREAMS_AND_CODES: Final = {
    "stdout is closed": "import sys; print(1); sys.stdout.close()",
    "stdout is None": "import sys; print(1); sys.stdout = None",
    "stderr is closed": "import sys; print(1); sys.stderr.close()",
    "stderr is None": "import sys; print(1); sys.stderr = None",
    "both are None": "import sys; sys.stdout = sys.stderr = None; sys.exit('text')",
    "both are closed": "import sys; sys.stdout.close(); sys.stderr.close(); sys.exit('text')",
    "the streams are deleted": "import sys; del sys.stdout, sys.stderr",
    "stdout has no flush": "import sys\nclass Own:\n    write = print\nsys.stdout = Own()",
    "stderr fails": (
        "import sys\nclass Own:\n    def write(self, text): raise RuntimeError\nsys.stderr = Own()"
    ),
    "stderr is a file": "import sys; sys.stderr = open('log', 'w'); print(1, file=sys.stderr)",
    "1 is closed": "import os; print(1, flush=True); os.close(1)",
    "1 is closed, with output": "import os; print(1, flush=True); os.close(1); print(2)",
    "2 is closed": "import os; os.close(2)",
    "0 to 2 are files": (
        "import os\nos.closerange(0, 256)\n"
        "for i in range(5): os.write(os.open(f'own{i}', os.O_WRONLY | os.O_CREAT), b'own')"
    ),
    "2 is another file": (
        "import os, sys; os.dup2(os.open('log', os.O_WRONLY | os.O_CREAT), 2); print(1)\n"
        "print('text', file=sys.stderr)"
    ),
    "exit": "raise SystemExit",
    "exit with a text": "raise SystemExit('text')",
    "exit with 256": "raise SystemExit(256)",
    "exit with -1": "raise SystemExit(-1)",
    "exit with 2 ** 70": "raise SystemExit(2 ** 70)",
    "exit with 2.5": "raise SystemExit(2.5)",
    "exit with what has no text": (
        "class Own:\n    def __str__(self): raise ValueError\nraise SystemExit(Own())"
    ),
    "os._exit": "import os; print(1, flush=True); os._exit(9)",
    "abort": "import os; os.abort()",
    "SIGTERM": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "modules are removed": "import sys; sys.modules.clear(); print(1)",
    "functions of os are replaced": (
        "import os\ndef no(*_, **__): raise RuntimeError('no')\n"
        "for name in ('stat', 'open', 'write', 'fstat', 'close', 'getpid', 'getcwd'):\n"
        "    setattr(os, name, no)"
    ),
    "signal is replaced": (
        "import signal\ndef no(*_): raise RuntimeError('no')\nsignal.signal = signal.getsignal = no"
    ),
    "a child raises": "import os\nif os.fork() == 0:\n    1 / 0\nprint(os.wait()[1] >> 8)",
    "a child exits": "import os\nif not os.fork(): raise SystemExit(3)\nprint(os.wait()[1] >> 8)",
    "a child whose end fails": (
        "import atexit, os, sys\natexit.register(sys.exit, 21)\n"
        "if os.fork(): print(os.wait()[1] >> 8, flush=True); os._exit(0)"
    ),
    "a child's stdout cannot be flushed": (
        "import os, sys\nclass Own:\n"
        "    def flush(self): raise RuntimeError('no')\n"
        "    def __repr__(self): return 'own'\n"
        "sys.stdout = Own()\n"
        "if os.fork(): os.write(1, str(os.wait()[1] >> 8).encode()); os._exit(0)"
    ),
    "a child without stderr cannot flush its stdout": (
        "import os, sys\nclass Own:\n"
        "    def flush(self): raise RuntimeError('no')\n"
        "sys.stdout, sys.stderr = Own(), None\n"
        "if os.fork(): os.write(1, str(os.wait()[1] >> 8).encode()); os._exit(0)"
    ),
    "modules with exit functions": (
        "import sys; print('multiprocessing.util' in sys.modules, 'torch' in sys.modules)"
    ),
    "a thread waits, and its module is removed": (
        "import json, sys, threading\nstopping = threading.Event()\n"
        "def work(): stopping.wait(60); open('stopped', 'w')\n"
        "threading.Thread(target=work).start(); threading._register_atexit(stopping.set)\n"
        "for name in ('json', 'threading'): del sys.modules[name]\n"
        "import atexit; atexit.register(lambda: print('json' in sys.modules))"
    ),
    "exit in the hook": "import sys; sys.excepthook = lambda *_: sys.exit(3); 1 / 0",
    "recursion": DEPTH + "recurse(); print(sys.getrecursionlimit())",
    "recursion, another limit": DEPTH
    + "sys.setrecursionlimit(200); recurse(); print(sys.getrecursionlimit())",
    "recursion, the lowest limit": DEPTH
    + (
        "for limit in range(1, 9):\n"
        "    try:\n"
        "        sys.setrecursionlimit(limit)\n"
        "        sys.setrecursionlimit(1000)\n"
        "        print(limit)\n"
        "    except RecursionError as error:\n"
        "        print(error)"
    ),
    "recursion, in a thread": DEPTH
    + (
        "import threading; thread = threading.Thread(target=recurse); thread.start(); thread.join()"
    ),
    "recursion, in a forward pass, but for the first": DEPTH
    + (
        "import torch\n"
        "step = 0\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        if step: recurse()\n"
        "        return super().forward(x)\n"
        "net = torch.nn.Sequential(torch.nn.Sequential(Net(2, 2)))\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "for step in range(3):\n"
        "    net(torch.ones(1, 2)).sum().backward()\n"
        "    optimizer.step()"
    ),
    "recursion, in C": (
        "def nested(depth):\n"
        "    made = []\n"
        "    for _ in range(depth): made = [made]\n"
        "    return made\n"
        "low, high = 1, 100_000\n"
        "while low < high:\n"
        "    middle = (low + high) // 2\n"
        "    try: repr(nested(middle)); low = middle + 1\n"
        "    except RecursionError: high = middle\n"
        "print(low)"
    ),
}


@pytest.mark.parametrize("name", STREAMS_AND_CODES)
def test_the_exit_code_and_the_output(tmp_path: Path, name: str) -> None:
    text = STREAMS_AND_CODES[name]
    bare = run(tmp_path / "bare", text, fresh=True)
    recorded = run(tmp_path / "run", text, "run", fresh=True)
    if bare.code == 1 and "Traceback" in bare.stderr and name != "a child raises":
        bare = bare._replace(code=5)  # documented
    assert recorded == bare


UNCAUGHT: Final = {
    "an error": "raise ValueError('text')",
    "an error with a cause": "try: 1 / 0\nexcept Exception as error: raise KeyError from error",
    "a group": "raise ExceptionGroup('g', [ValueError('a')])",
    "without a text": "class E(Exception):\n    def __str__(self): raise ValueError\nraise E",
    "in recursion": "def call(): call()\ncall()",
    "a hook": "import sys; sys.excepthook = lambda *given: print(given[0]); 1 / 0",
    "a hook that fails": "import sys; sys.excepthook = None; 1 / 0",
    "no hook": "import sys; del sys.excepthook; 1 / 0",
    "stderr is None": "import sys; sys.stderr = None; 1 / 0",
    "interrupted": "raise KeyboardInterrupt",
    "two streams to one file": (  # in which order they are flushed
        "import sys; sys.stdout, sys.stderr = (open(1, 'w', closefd=False) for _ in 'oe')\n"
        "print('out', end='; '); print('error', end='; ', file=sys.stderr); 1 / 0"
    ),
}


@pytest.mark.parametrize("name", UNCAUGHT)
def test_errors_that_end_a_program_are_shown_as_python_shows_them(
    tmp_path: Path, name: str
) -> None:
    if name == "a group" and sys.version_info < (3, 11):
        pytest.skip("Python 3.10 has no exception groups")
    bare = run(tmp_path / "bare", UNCAUGHT[name], fresh=True)
    code = 130 if bare.code == -2 else 5
    assert run(tmp_path / "run", UNCAUGHT[name], "run", fresh=True) == bare._replace(code=code)


def test_an_interrupted_program_did_not_fail(tmp_path: Path) -> None:
    text = TRAINS + "train(2)\nraise KeyboardInterrupt\n"
    run(tmp_path, text, "run", "--output", "one.gpuprobe")
    report = subprocess.run(
        [sys.executable, "-m", "gpuprobe", "report", "one.gpuprobe"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert report.stdout.count("interrupted (Ctrl-C)") == 2  # the verdict, and above the details
    assert "failed" not in report.stdout


def test_an_interrupted_hook_is_not_in_the_traceback(tmp_path: Path) -> None:
    """SIGINT arrives while gpuprobe's code runs: its frame is the innermost."""
    text = (
        TRAINS
        + """
import signal
from gpuprobe.sampler.recorder import Recorder
close = Recorder._close_step
def interrupted(self, *given, **named):
    Recorder._close_step = close
    signal.raise_signal(signal.SIGINT)
    return close(self, *given, **named)
interrupted.__code__ = interrupted.__code__.replace(co_filename=close.__code__.co_filename)
Recorder._close_step = interrupted
train(1)
"""
    )
    done = run(tmp_path, text, "run")
    assert done.code == 130
    assert done.stderr.endswith("KeyboardInterrupt")
    assert "gpuprobe" not in done.stderr.replace("/program.py", "")


LIMITS: Final = """
import resource, signal, time
received = []
{handler}
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
train(5)
time.sleep(0.4)
print("end", received)
"""


@pytest.mark.parametrize("level", ["counters", "trace"])
@pytest.mark.parametrize(
    "handler",
    [
        "signal.signal(signal.SIGXFSZ, signal.SIG_DFL)",
        "signal.signal(signal.SIGXFSZ, lambda *given: received.append(1))",
    ],
    ids=["default", "handled"],
)
def test_a_limit_of_file_sizes(tmp_path: Path, level: str, handler: str) -> None:
    text = TRAINS + LIMITS.format(handler=handler)
    bare = run(tmp_path / "bare", text)
    assert bare.stdout == "end []\n"
    assert run(tmp_path / "run", text, *LEVELS[level]) == bare


def test_stderr_without_a_reader(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import signal; signal.signal(signal.SIGPIPE, signal.SIG_DFL)"
    )
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "gpuprobe", "run", "program.py"],
        cwd=tmp_path,
        stderr=writing,
        check=False,
    )
    os.close(writing)
    assert done.returncode == 0


@pytest.mark.parametrize("context", ["virtual_gpu('t4')", "detect_hazards()"])
def test_a_context_that_is_open_when_python_ends(tmp_path: Path, context: str) -> None:
    text = f"import gpuprobe, torch\nopen = gpuprobe.{context}\nopen.__enter__()\nprint(1)"
    bare = run(tmp_path, text)
    assert (bare.code, bare.stdout, bare.stderr) == (0, "1\n", "")


def test_a_step_near_the_limit_of_recursion_is_recorded(tmp_path: Path) -> None:
    text = (
        TRAINS
        + """
def call(depth):
    if depth:
        return call(depth - 1)
    steps = 0
    for _ in range(3):
        train(1)
        steps += 1
    return steps
import gpuprobe
def deepest():
    low, high = 100, 1000
    while low < high:  # the lowest depth at which training fails
        middle = (low + high) // 2
        try:
            call(middle)
            low = middle + 1
        except RecursionError:
            high = middle
    return low - 1
print(call(deepest()))
"""
    )
    done = run(tmp_path, text, "run")
    assert (done.code, done.stdout, done.stderr) == (0, "3\n", "")
    (rank,) = read_recording(tmp_path / "program.gpuprobe").ranks
    assert rank.end is not None
    assert rank.end.gpuprobe_faults == ()
