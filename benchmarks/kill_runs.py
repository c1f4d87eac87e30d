"""Kill `gpuprobe run` at random moments; what it recorded must be readable, but for the last step.

    python benchmarks/kill_runs.py [--runs 200] [--seed 0]

Every run trains a small model in a forked process (torch is imported once), in turn at level
``counters``, at level ``trace``, on a virtual GPU, and as two ranks, of which one or both are
killed by SIGKILL: after a random number of steps and a random part of one. Then ``report``,
``view --once``, ``diff`` and ``check`` read it. The program notes each step that its optimizer has
finished; at most one of them may be missing from the recording. A run that was killed before its
session began contains nothing, and is reported so. Prints a row for each kind of run; exits with 1
if anything was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in (".", "tests/support", "tests/hostile")]

import hostile_commands as commands  # noqa: E402
import torch  # noqa: E402

from gpuprobe.api.recordings import load  # noqa: E402
from gpuprobe.cli import main as gpuprobe  # noqa: E402
from gpuprobe.errors import DataError  # noqa: E402

STEPS = 5
PAUSE = 0.28
"""Seconds that a step takes at least: steps that are shorter than 0.25 s are written together, and
those of the last quarter of a second are lost (`gpuprobe.sampler.step_writer.PAUSE`)."""

SCRIPT = f"""
import os, sys, time, torch
device = "cuda" if torch.cuda.is_available() else "cpu"
layers = torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
model = torch.nn.Sequential(*layers).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
said = os.open(sys.argv[1] + os.environ.get("RANK", "0"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for step in range({STEPS}):
    loss = model(torch.randn(8, 16, device=device)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    os.write(said, b".")
    time.sleep({PAUSE})
"""
KINDS: dict[str, tuple[list[str], int]] = {
    "level counters": (["--level", "counters"], 1),
    "level trace": (["--level", "trace"], 1),
    "virtual GPU": (["--level", "trace", "--virtual", "h100-80gb"], 1),
    "two ranks": (["--level", "trace"], 2),
}


def start(options: list[str], rank: int, world: int, folder: Path) -> int:
    """Fork a rank that runs the program under `gpuprobe run`; its process."""
    child = os.fork()
    if child:
        return child
    with contextlib.suppress(BaseException):
        quiet = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(quiet, descriptor)
        if world > 1:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="localhost"
            )
        gpuprobe(
            ["run", *options, "--output", str(folder / "run.gpuprobe"), str(folder / "train.py"),
             str(folder / "said")]
        )  # fmt: skip
    os._exit(0)


def said(folder: Path, rank: int) -> int:
    try:
        return (folder / f"said{rank}").stat().st_size
    except OSError:
        return 0


def killed(options: list[str], world: int, folder: Path, rng: random.Random) -> None:
    """Run the ranks and kill some at a random moment; the others come to their end."""
    (folder / "train.py").write_text(SCRIPT)
    children = [start(options, rank, world, folder) for rank in range(world)]
    doomed = rng.sample(range(world), rng.randint(1, world))
    after, watched = rng.randint(0, STEPS), doomed[0]
    over: set[int] = set()

    def collect(options: int) -> None:
        for child in set(children) - over:
            if os.waitpid(child, options)[0]:
                over.add(child)

    while said(folder, watched) < after and children[watched] not in over:
        time.sleep(0.001)
        collect(os.WNOHANG)
    # Of no step: before the session begins, too, which takes a tenth of a second.
    time.sleep(rng.random() * (0.4 if after == 0 else 1.5 * PAUSE))
    for rank in doomed:
        if children[rank] not in over:
            os.kill(children[rank], signal.SIGKILL)
    collect(0)


def problems(folder: Path, world: int) -> tuple[list[str], str]:
    """What is wrong with what was left, and how much of it there is in a word."""
    path = folder / "run.gpuprobe"
    if not path.exists():
        return ([] if not said(folder, 0) else ["no such recording"]), "nothing yet"
    try:
        recording = load(path)
    except DataError as error:
        early = not any(said(folder, rank) for rank in range(world))
        return ([] if early and "\n" not in str(error) else [str(error)]), "no session yet"
    found = []
    steps = {rank.session.rank: len(rank.steps) for rank in recording.ranks}
    for rank in range(world):
        if steps.get(rank, 0) < said(folder, rank) - 1:
            found.append(f"rank {rank}: {steps.get(rank, 0)} steps of {said(folder, rank)}")
    out = folder / "o"
    out.mkdir()
    baseline = str(out / "new.json")
    for argv in (
        ["report", str(path)],
        ["report", str(path), "--json"],
        ["report", str(path), "--html", str(out / "r.html")],
        ["view", str(path), "--once"],
        ["diff", str(path), str(path)],
        ["baseline", "update", str(path), "--baseline", baseline],
        ["check", str(path), "--baseline", baseline],
    ):
        ended = commands.run(argv)
        wrong = commands.problem(argv, ended)
        # On the CPU, level counters knows no peak, and without a step there is none: one line
        # reports that there is nothing to check.
        nothing = argv[0] in ("check", "baseline") and ended.code in (2, 4)
        if wrong or (ended.code not in (0, 1) and not nothing):
            found.append(f"{' '.join(argv[:1])}: {wrong or ended.talk}")
    return found, "with an end" if all(rank.end for rank in recording.ranks) else "without an end"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(args.seed)
    states: dict[str, Counter[str]] = {name: Counter() for name in KINDS}
    wrong = 0
    for number in range(args.runs):
        name = list(KINDS)[number % len(KINDS)]
        options, world = KINDS[name]
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            killed(options, world, folder, rng)
            found, state = problems(folder, world)
        states[name][state] += 1
        if (number + 1) % 10 == 0:
            print(f"  {number + 1} runs, {wrong} problems", flush=True)
        for problem in found:
            wrong += 1
            print(f"  run {number} ({name}): {problem[-400:]}", flush=True)
    for name, counts in states.items():
        print(f"{name:<16} {sum(counts.values()):>4} killed: {dict(counts)}")
    print(f"{args.runs} runs killed, {wrong} problems")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
