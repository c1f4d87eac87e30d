"""Kill `gpuprobe run` at random moments; what it recorded must be readable, up to the last instant.

    python benchmarks/kill_runs.py [--runs 1000] [--seed 0] [--gpu t4] [--jobs 2]

Every run trains a small model in a process that is forked from one that has imported torch: in turn
at level ``counters``, at level ``trace``, and as two ranks, of which one or both are killed by
SIGKILL, before the session begins or within a second of short steps. With ``--gpu`` torch's own
CUDA code runs without a GPU (the native engine). Three things must hold:

* a recording opens if the program has finished a step and `PAUSE` has passed since (a step is
  written within 0.25 s);
* every step that ended more than `MOST_LOST` before the kill is in it. The lost time is the age, at
  the kill, of the oldest step that the program finished and the recording does not contain (the
  program notes when each one ends);
* it is reported to be incomplete, so that no check of it passes.

Of each twentieth run, ``report``, ``view --once``, ``diff``, ``baseline`` and ``check`` read what
was left. Prints a row for each kind of run, with the largest lost time; exits with 1 if anything
was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import multiprocessing
import os
import random
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in (".", "tests/support", "tests/hostile")]

from loaded_modules import import_noted, note_modules  # noqa: E402

from gpuprobe.errors import DataError, UsageError  # noqa: E402

MOST_LOST = 0.5
"""Seconds."""

PAUSE = 0.25
"""Seconds between two writes (`gpuprobe.sampler.step_writer.PAUSE`)."""

PR_SET_PDEATHSIG = 1  # linux/prctl.h

LONGEST = 1.0
"""Seconds after the first step within which a run is killed."""

SCRIPT = """
import os, random, struct, sys, time, torch
device = "cuda" if torch.cuda.is_available() else "cpu"
layers = torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
model = torch.nn.Sequential(*layers).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ended = os.open(sys.argv[1] + os.environ.get("RANK", "0"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
while True:
    loss = model(torch.randn(8, 16, device=device)).sum()
    loss.backward()
    optimizer.step()
    os.write(ended, struct.pack("q", time.monotonic_ns()))
    optimizer.zero_grad()
    time.sleep(random.uniform(0.002, 0.03))
    if sys.argv[2:] and os.fstat(ended).st_size >= 8 * int(sys.argv[2]):
        break
"""
KINDS: dict[str, tuple[str, int]] = {
    "counters": ("counters", 1),
    "trace": ("trace", 1),
    "two ranks": ("trace", 2),
}


@dataclass
class Outcome:
    """Of one run: the kind, what was left in a few words, and the longest lost time, in seconds."""

    kind: str
    left: str
    lost: float
    problems: list[str] = field(default_factory=list)


def start(level: str, gpu: str, rank: int, world: int, folder: Path, *more: str) -> int:
    """Fork a rank that runs the program under `gpuprobe run`; its process."""
    child = os.fork()
    if child:
        return child
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(BaseException):
        from gpuprobe.cli import main as gpuprobe

        quiet = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(quiet, descriptor)
        if world > 1:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="localhost"
            )
        simulated = ["--gpu", gpu] if gpu else []
        gpuprobe(
            ["run", *simulated, "--level", level, "--output", str(folder / "run.gpuprobe"),
             str(folder / "train.py"), str(folder / "ended"), *more]
        )  # fmt: skip
    note_modules(folder / "modules")
    os._exit(0)


def ends(folder: Path, rank: int) -> list[float]:
    """When each step of a rank ended: seconds of the monotonic clock."""
    try:
        data = (folder / f"ended{rank}").read_bytes()
    except OSError:
        return []
    return [nanoseconds / 1e9 for (nanoseconds,) in struct.iter_unpack("q", data)]


def killed(level: str, gpu: str, world: int, folder: Path, rng: random.Random) -> float:
    """Run the ranks and kill some at a random moment, then the others. When that was."""
    (folder / "train.py").write_text(SCRIPT)
    children = [start(level, gpu, rank, world, folder) for rank in range(world)]
    doomed = rng.sample(range(world), rng.randint(1, world))
    early = rng.random() < 0.1
    try:
        while not early and not all(ends(folder, rank) for rank in range(world)):
            time.sleep(0.002)
            for child in children:
                if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    return 0.0  # it failed: what it left shows why
        time.sleep(rng.random() * (0.4 if early else LONGEST))
    finally:
        for rank in doomed:
            os.kill(children[rank], signal.SIGKILL)
        moment = time.monotonic()
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)
    return moment


def outcome(kind: str, folder: Path, world: int, moment: float) -> Outcome:
    """What is wrong with what was left, and how much of it there is."""
    from gpuprobe.analysis.completeness import missing_parts
    from gpuprobe.api.recordings import load

    path = folder / "run.gpuprobe"
    finished = {rank: ends(folder, rank) for rank in range(world)}
    problems: list[str] = [] if moment else ["a program ended before it was killed"]
    try:
        recorded = load(path)
        steps = {rank.session.rank: len(rank.steps) for rank in recorded.ranks}
        if not missing_parts(recorded):
            problems.append("nothing is reported missing")
        left = "steps" if any(steps.values()) else "no step"
    except UsageError:
        steps, left = {}, "nothing"
    except DataError as error:
        steps, left = {}, "no session"
        if "\n" in str(error):
            problems.append(f"not one line: {error}")
    except Exception as error:  # noqa: BLE001 - a problem that is reported
        return Outcome(kind, "unreadable", 0.0, [repr(error)])
    longest = 0.0
    for rank, times in finished.items():
        missing = [one for one in times[steps.get(rank, 0) :] if one <= moment]
        if missing:
            lost = moment - missing[0]
            longest = max(longest, lost)
            if lost > MOST_LOST:
                problems.append(f"rank {rank} lost {lost:.3f} s: {len(missing)} steps")
    return Outcome(kind, left, longest, problems)


def read_by_commands(folder: Path, baseline: str) -> list[str]:
    """What is wrong with how the commands end that read what was left."""
    import hostile_commands as commands

    path = str(folder / "run.gpuprobe")
    out = folder / "o"
    out.mkdir()
    found = []
    for argv in (
        ["report", path],
        ["report", path, "--json"],
        ["report", path, "--html", str(out / "r.html")],
        ["view", path, "--once"],
        ["diff", path, path],
        ["baseline", "update", path, "--baseline", str(out / "new.json")],
        ["check", path, "--baseline", baseline],
    ):
        ended = commands.run(argv)
        wrong = commands.problem(argv, ended)
        expected = (4,) if argv[0] in ("baseline", "check") else (0, 1)
        if wrong or ended.code not in expected:
            found.append(f"{argv[0]} exits with {ended.code}: {wrong or ended.talk}")
    return found


def one_run(number: int, *, seed: int, gpu: str, baseline: str) -> Outcome:
    """Kill one run and read what it left."""
    rng = random.Random(f"{seed} {number}")
    kind = list(KINDS)[number % len(KINDS)]
    level, world = KINDS[kind]
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        moment = killed(level, gpu, world, folder, rng)
        found = outcome(kind, folder, world, moment)
        if number % 20 == 0 and found.left == "steps":
            found.problems += read_by_commands(folder, baseline)
        return found


def make_baseline(gpu: str, folder: Path) -> str:
    """The baseline of a run that came to its end."""
    from gpuprobe.api.check import recorded
    from gpuprobe.gate.files import write_baseline

    (folder / "train.py").write_text(SCRIPT)
    os.waitpid(start("trace", gpu, 0, 1, folder, "8"), 0)
    write_baseline(recorded(folder / "run.gpuprobe"), folder / "baseline.json")
    return str(folder / "baseline.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu", default="", help="on the native engine (default: on the CPU)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    args = parser.parse_args()
    if args.gpu:
        from gpuprobe.api.simulated_gpu import load_gpu

        load_gpu(args.gpu)
    import torch

    torch.set_num_threads(1)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as text:
        baseline = make_baseline(args.gpu, Path(text))
        import_noted(Path(text, "modules"))
        run = partial(one_run, seed=args.seed, gpu=args.gpu, baseline=baseline)
        with multiprocessing.get_context("fork").Pool(args.jobs) as pool:
            for number, found in enumerate(pool.imap(run, range(args.runs))):
                outcomes.append(found)
                for problem in found.problems:
                    print(f"  run {number} ({found.kind}): {problem[-400:]}", flush=True)
                if (number + 1) % 50 == 0:
                    show(outcomes)
    raise SystemExit(1 if show(outcomes) else 0)


def show(outcomes: list[Outcome]) -> int:
    """Print the results so far; the number of problems."""
    for kind in KINDS:
        of_kind = [one for one in outcomes if one.kind == kind]
        states = dict(Counter(one.left for one in of_kind))
        longest = max((one.lost for one in of_kind), default=0.0)
        print(f"{kind:<10} {len(of_kind):>4} killed, lost at most {longest:.3f} s: {states}")
    wrong = sum(len(one.problems) for one in outcomes)
    print(f"{len(outcomes)} runs killed, {wrong} problems", flush=True)
    return wrong


if __name__ == "__main__":
    main()
