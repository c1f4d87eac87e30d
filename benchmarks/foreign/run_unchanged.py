"""Programs of other people's making, under gpuprobe and without it: same output, same exit code.

    python benchmarks/foreign_programs.py [NAME ...]

Writes some thirty small training programs (threads, child processes, signals, exit codes, other
directories, servers, odd names) into a scratch directory and runs each three times: by Python,
and by ``gpuprobe run`` at both levels. Standard output must be the same to the byte; the exit code
too, but for a program that raised (1 becomes 5) or was interrupted (130); and the recording must
be one that ``gpuprobe report`` reads. A trial of some minutes, not part of the test suite.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEVELS = ("counters", "trace")

HEAD = """import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


def train(steps=3, net=None):
    net = net or nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    opt = torch.optim.Adam(net.parameters())
    out = []
    for i in range(steps):
        opt.zero_grad()
        l = net(torch.ones(4, 8) * i).square().mean()
        l.backward()
        opt.step()
        out.append(l.item())
    return out
"""

PROGRAMS: dict[str, str] = {}
PROGRAMS["argparse_main"] = (
    HEAD
    + """
import argparse


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("files", nargs="*")
    a = p.parse_args()
    print(p.prog, a.lr, a.files, train())


if __name__ == "__main__":
    main()
"""
)
PROGRAMS["sys_argv_exit"] = (
    HEAD
    + """
import sys

print(sys.argv[1:], train(), sys.argv[0].endswith(".py"))
sys.exit(3)
"""
)
PROGRAMS["sys_exit_text"] = (
    HEAD
    + """
import sys

train()
sys.exit("broken: no data")
"""
)
PROGRAMS["exception"] = (
    HEAD
    + """
train()


def inner():
    raise ValueError("a bug \\u00e9")


inner()
"""
)
PROGRAMS["relative"] = (
    HEAD
    + """
from pathlib import Path

print(Path("data/x.txt").read_text(), Path(__file__).name, train())
"""
)
PROGRAMS["chdir"] = (
    HEAD
    + """
import os

os.chdir("data")
print(os.getcwd().endswith("data"), open("x.txt").read(), train())
open("out.txt", "w").write("done")
"""
)
PROGRAMS["threads"] = (
    HEAD
    + """
import threading

r = {}


def work():
    r["x"] = train(4)


t = threading.Thread(target=work)
t.start()
t.join()
print(r)
"""
)
PROGRAMS["two_training_threads"] = (
    HEAD
    + """
import threading

r = [None, None]


def work(i):
    g = torch.Generator().manual_seed(i)
    net = nn.Linear(8, 1)
    with torch.no_grad():
        net.weight.fill_(0.5 * i)
        net.bias.zero_()
    r[i] = train(5, net)


ts = [threading.Thread(target=work, args=(i,)) for i in range(2)]
[t.start() for t in ts]
[t.join() for t in ts]
print(r)
"""
)
PROGRAMS["mp_spawn"] = (
    HEAD
    + """
import torch.multiprocessing as mp


def child(i, q):
    q.put((i, train(2)))


if __name__ == "__main__":
    ctx = mp.get_context("spawn")
    q = ctx.Queue()
    ps = [ctx.Process(target=child, args=(i, q)) for i in range(2)]
    [p.start() for p in ps]
    print(sorted(q.get() for _ in ps))
    [p.join() for p in ps]
    print([p.exitcode for p in ps], train())
"""
)
PROGRAMS["mp_fork_shared"] = (
    HEAD
    + """
import torch.multiprocessing as mp


def child(net, i):
    opt = torch.optim.SGD(net.parameters(), 0.01)
    for _ in range(2):
        net(torch.ones(2, 8)).sum().backward()
        opt.step()
        opt.zero_grad()


if __name__ == "__main__":
    net = nn.Linear(8, 1)
    with torch.no_grad():
        net.weight.zero_()
        net.bias.zero_()
    net.share_memory()
    print(train(2))
    ctx = mp.get_context("fork")
    ps = [ctx.Process(target=child, args=(net, i)) for i in range(2)]
    [p.start() for p in ps]
    [p.join() for p in ps]
    print([p.exitcode for p in ps], round(net.weight.sum().item(), 2))
"""
)
PROGRAMS["pool_map"] = (
    HEAD
    + """
from concurrent.futures import ProcessPoolExecutor


def f(x):
    return torch.tensor(float(x)).sin().item()


if __name__ == "__main__":
    with ProcessPoolExecutor(2) as e:
        print([round(v, 4) for v in e.map(f, range(4))])
        print(train())
"""
)
PROGRAMS["signal_handler"] = (
    HEAD
    + """
import signal, os

got = []
signal.signal(signal.SIGUSR1, lambda s, f: got.append(s))
os.kill(os.getpid(), signal.SIGUSR1)
print(train(), [int(s) for s in got])
"""
)
PROGRAMS["sigterm_self"] = (
    HEAD
    + """
import signal, os, sys

print(train(), flush=True)
os.kill(os.getpid(), signal.SIGTERM)
"""
)
PROGRAMS["keyboard_interrupt"] = (
    HEAD
    + """
import signal, os, time

print(train(), flush=True)
os.kill(os.getpid(), signal.SIGINT)
time.sleep(5)
"""
)
PROGRAMS["atexit_order"] = (
    HEAD
    + """
import atexit

atexit.register(print, "bye")
print(train())
import threading


def late():
    threading.main_thread().join()
    print("late thread")


threading.Thread(target=late).start()
"""
)
PROGRAMS["os_exit"] = (
    HEAD
    + """
import os

print(train(), flush=True)
os._exit(7)
"""
)
PROGRAMS["unicode"] = (
    HEAD
    + """
print("naïve ☃ 漢字 \\x1b[31mred\\x1b[0m", train())
import sys

sys.stdout.buffer.write(b"\\xff\\xfe raw\\n")
"""
)
PROGRAMS["exec_cells"] = (
    HEAD
    + """
cells = [
    "a = train(2)",
    "print(a)",
    "import torch; b = torch.ones(2).sum().item()",
    "print(b, __name__)",
]
ns = {"__name__": "__main__", "train": train}
for i, c in enumerate(cells):
    exec(compile(c, f"<cell {i}>", "exec"), ns)
"""
)
PROGRAMS["asyncio_server"] = (
    HEAD
    + """
import asyncio, json


async def handle(r, w):
    n = int(await r.readline())
    loop = asyncio.get_running_loop()
    out = await loop.run_in_executor(None, train, n)
    w.write(json.dumps(out).encode() + b"\\n")
    await w.drain()
    w.close()


async def main():
    s = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = s.sockets[0].getsockname()[1]
    for n in (2, 3):
        r, w = await asyncio.open_connection("127.0.0.1", port)
        w.write(b"%d\\n" % n)
        print((await r.readline()).decode().strip())
        w.close()
    s.close()
    await s.wait_closed()


asyncio.run(main())
"""
)
PROGRAMS["pickle_main"] = (
    HEAD
    + """
import pickle, io


class Config:
    def __init__(self):
        self.lr = 3


b = io.BytesIO()
net = nn.Linear(2, 2)
torch.save({"c": Config(), "n": [1]}, b)
b.seek(0)
print(torch.load(b, weights_only=False)["c"].lr, pickle.loads(pickle.dumps(Config())).lr, train())
"""
)
PROGRAMS["deepcopy_ema_jit"] = (
    HEAD
    + """
import copy, warnings

warnings.simplefilter("ignore")
net = nn.Linear(8, 1)
ema = copy.deepcopy(net)
s = torch.jit.trace(net, torch.ones(1, 8))
print(train(3, net) and len(list(ema.parameters())), s(torch.ones(1, 8)).shape)
"""
)
PROGRAMS["no_torch"] = """import sys

print("hello", len(sys.argv))
raise SystemExit(0)
"""
PROGRAMS["inspects"] = (
    HEAD
    + """
import __main__, inspect, sys


def f():
    pass


print(
    __main__ is sys.modules["__main__"],
    inspect.getsource(f).strip(),
    f.__module__,
    __spec__,
    train()[0] is not None,
)
"""
)
PROGRAMS["import_torch_late"] = """import os

os.environ["OMP_NUM_THREADS"] = "1"


def go():
    import torch

    net = torch.nn.Linear(3, 1)
    o = torch.optim.SGD(net.parameters(), 0.1)
    with torch.no_grad():
        net.weight.fill_(1.0)
        net.bias.zero_()
    for _ in range(2):
        o.zero_grad()
        net(torch.ones(2, 3)).sum().backward()
        o.step()
    print(net.weight.tolist())


go()
"""
PROGRAMS["a_very_long_name_" + "x" * 180] = (
    HEAD
    + """
print(train())
"""
)
PROGRAMS["stdin"] = (
    HEAD
    + """
import sys

print(sys.stdin.read().upper(), train(1))
"""
)
PROGRAMS["custom_excepthook"] = (
    HEAD
    + """
import sys


def hook(t, v, tb):
    print("hook saw", t.__name__, v)


sys.excepthook = hook
train()
raise RuntimeError("boom")
"""
)
PROGRAMS["recursion"] = (
    HEAD
    + """
def f(n):
    return torch.ones(1) + f(n - 1) if n else torch.zeros(1)


print(f(300).item(), train())
"""
)
PROGRAMS["subprocess_self"] = (
    HEAD
    + """
import subprocess, sys

if len(sys.argv) > 1:
    print("child", train(1))
    sys.exit(0)
print(train(), flush=True)
print(subprocess.run([sys.executable, __file__, "child"], capture_output=True, text=True).stdout)
"""
)
PROGRAMS["warnings_profiler"] = (
    HEAD
    + """
from torch.profiler import profile, ProfilerActivity

with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
    r = train(2)
print(r, any("mm" in e.key for e in p.key_averages()))
"""
)
PROGRAMS["gc_weakrefs"] = (
    HEAD
    + """
import gc, weakref

net = nn.Linear(8, 1)
w = weakref.ref(net)
x = torch.ones(3, 8)
wx = weakref.ref(x)
net(x).sum().backward()
opt = torch.optim.SGD(net.parameters(), 0.1)
opt.step()
wo = weakref.ref(opt)
del net, x, opt
gc.collect()
print(w() is None, wx() is None, wo() is None)
"""
)

PACKAGE = (
    HEAD
    + """
from .sub import name
import sys
print(__package__, __name__, name, sys.argv[1:], train())
"""
)

ARGUMENTS = {"argparse_main": ["--lr", "0.1", "a b", "é"], "sys_argv_exit": ["x", "--json"]}


def write_programs(folder: Path) -> dict[str, list[str]]:
    """All programs, as the words that follow ``python`` to run each."""
    commands = {}
    for name, text in PROGRAMS.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
        commands[name] = [f"{name}.py", *ARGUMENTS.get(name, ())]
    (folder / "data").mkdir()
    (folder / "data" / "x.txt").write_text("text")
    package = folder / "pkg"
    (package / "sub").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(PACKAGE)
    (package / "sub" / "__init__.py").write_text("name = __name__\n")
    commands["package"] = ["-m", "pkg", "-v"]
    return commands


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[bytes]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return subprocess.run(
        command,
        cwd=folder,
        input=b"some input\n",
        capture_output=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )


def expected_code(plain: subprocess.CompletedProcess[bytes]) -> int:
    """As gpuprobe documents it: 5 for a program that raised, 130 for one interrupted."""
    if plain.returncode == -2:
        return 130
    raised = plain.returncode == 1 and (b"Traceback" in plain.stderr or b"hook saw" in plain.stdout)
    return 5 if raised else plain.returncode


def compare(name: str, words: list[str], folder: Path) -> list[str]:
    """What differs; nothing where all is well."""
    plain = run([sys.executable, *words], folder)
    found = []
    for level in LEVELS:
        recording = f"{name[:60]}-{level}.gpuprobe"
        gpuprobe = [sys.executable, "-m", "gpuprobe"]
        watched = run([*gpuprobe, "run", "--level", level, "-o", recording, *words], folder)
        if watched.stdout != plain.stdout:
            found.append(f"{level}: stdout {plain.stdout!r} became {watched.stdout!r}")
        if watched.returncode != expected_code(plain):
            found.append(f"{level}: exit code {plain.returncode} became {watched.returncode}")
        report = run([*gpuprobe, "report", "--json", recording], folder)
        if report.returncode != 0:
            found.append(f"{level}: no report: {report.stderr.decode()}")
            continue
        spots = json.loads(report.stdout)["blind_spots"]
        found += [
            f"{level}: {spot['what']}"
            for spot in spots
            if "an internal error of gpuprobe" in spot["what"]
        ]
    return found


def main(requested: list[str]) -> int:
    bad = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name, words in write_programs(Path(scratch)).items():
            if requested and name not in requested:
                continue
            differences = compare(name, words, Path(scratch))
            bad += bool(differences)
            print(f"{name[:40]:40} {'the same' if not differences else 'DIFFERS'}", flush=True)
            for text in differences:
                print(f"    {text}")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
