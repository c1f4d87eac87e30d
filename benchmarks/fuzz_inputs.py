"""Hostile files through every command: crafted ones, and as many mutations as wanted.

    python benchmarks/fuzz_inputs.py crafted [--kinds recording,snapshot] [--only WORDS]
    python benchmarks/fuzz_inputs.py mutations [--kinds …] [--inputs 100000] [--start 0]

``crafted``: each file of ``tests/hostile`` through all commands and formats, and through ``view``
in Textual's test driver, in a separate process: 10 seconds of processor time for each command,
4 GiB of addresses, 2 GB of resident memory (measured, and printed); a command that sleeps for
minutes hangs.

``mutations``: every input goes through its reader and one use, in turn: number N of a
recording through command N of 19 (18 commands and formats, and the screen), so that of 100,000
each gets more than 5,000; of a snapshot, of 18; of a baseline, of 5. Of known hazards, logs and
settings, 18 or 19 times of 20 through the reader and its cheapest use, else through a command that
takes long or the screen, so that this too has 5,000. All in one process: the same commands, without
starting an interpreter for each. Of snapshots each is first read with an audit hook that ends the
process if anything is imported, opened or started meanwhile. ``details`` are snapshots in which
only frames, tags, times, annotations and settings are odd: they must be read, with the same
accounts. The limits of time are the same; an input may take 1.5 GB of addresses beyond what
the process had.

Both: no traceback, no internal error, no control character, JSON that is JSON, an exit code that
the command has, and one line where that is 4. ``--start`` continues a run of mutations that ended.
The exit code is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in (".", "tests/support", "tests/hostile")]

import hostile_commands as commands  # noqa: E402
from fuzz_limits import PROCESSOR, RESIDENT, largest_mb  # noqa: E402
from fuzz_mutations import run_mutations  # noqa: E402
from hostile_mutations import KINDS  # noqa: E402

ADDRESSES = 4 << 30
LOOK = 60.0  # seconds without a result after which the process is checked
PATIENCE = 3  # so often asleep by then: it hangs

Job = tuple[str, Callable[[], str]]


def crafted(kind: str) -> dict[str, Callable[[Path], None]]:
    if kind == "recording":
        from hostile_recordings import CRAFTED

        return CRAFTED
    from hostile_snapshots import CRAFTED as SNAPSHOTS

    return SNAPSHOTS


def jobs_of(kind: str, target: Path, out: Path) -> list[Job]:
    def job(argv: list[str]) -> Callable[[], str]:
        return lambda: commands.problem(argv, commands.run(argv))

    given = commands.COMMANDS[kind](str(target), str(out))
    found = [(" ".join(word for word in argv if "/" not in word), job(argv)) for argv in given]
    return [*found, ("view, on the screen", lambda: commands.show(target))]


def answers(jobs: list[Job], first: int) -> Iterator[tuple[int, float, int, str]]:
    """Run the jobs from ``first`` in a forked process: (job, processor seconds, MB, problem)."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in range(first, len(jobs)):
            before = sum(os.times()[:4])
            try:
                problem = jobs[number][1]()
            except BaseException as error:  # noqa: BLE001 - the failures that this searches
                problem = "".join(traceback.format_exception(error))
            answer = [number, sum(os.times()[:4]) - before, largest_mb(), problem[-1500:]]
            os.write(writing, json.dumps(answer).encode() + b"\n")
        os._exit(0)
    os.close(writing)
    at, rest = first, b""
    with open(reading, "rb", buffering=0) as stream:  # noqa: PTH123 (a descriptor)
        waited, begun = 0, 0.0  # minutes, and processor seconds before this job
        while True:
            if not select.select([stream], [], [], LOOK)[0]:
                # On a busy machine a minute may be short: a process that hangs is asleep.
                runs, spent = _state(child)
                waited += not runs
                if waited < PATIENCE and spent - begun < 2 * PROCESSOR:
                    continue
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                yield at, spent - begun, 0, "it hangs, or takes too long"
                return
            data = stream.read(1 << 16)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                number, seconds, most, problem = json.loads(line)
                at = number + 1
                waited, begun = 0, _state(child)[1]
                yield number, seconds, most, problem
    status = os.waitpid(child, 0)[1]
    if status:
        yield at, 0.0, 0, f"the process ended with {os.waitstatus_to_exitcode(status)}"


def _state(process: int) -> tuple[bool, float]:
    """Whether a process would run if it could, and its processor seconds so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return fields[0] == "R", sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def run_crafted(kind: str, only: str) -> int:
    """Prints what is wrong, and a row of figures; returns how often something was."""
    rows = []
    for name, make in crafted(kind).items():
        if only not in name:
            continue
        rows.append(row := one_crafted(kind, name, make))
        for problem in row.wrong:
            print(f"  {problem[-700:]}", flush=True)
    runs = sum(row.runs for row in rows)
    wrong = sum(len(row.wrong) for row in rows)
    seconds, slowest = max((row.slowest for row in rows), default=(0.0, ""))
    megabytes, largest = max((row.largest for row in rows), default=(0, ""))
    print(
        f"{kind:<14} {len(rows):>4} crafted, {runs:>6} runs, {wrong} wrong, "
        f"at most {seconds:.1f} s ({slowest}), {megabytes} MB ({largest})",
        flush=True,
    )
    return wrong


def _apart(make: Callable[[], object]) -> None:
    """Call ``make`` in a separate process: memory that it needs to create a bomb does not count."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            make()
            status = 0
        except Exception:  # noqa: BLE001 - the parent raises
            traceback.print_exc()
        finally:
            os._exit(status)
    if os.waitpid(child, 0)[1]:
        raise RuntimeError("the file could not be made")


@dataclass
class Crafted:
    """One crafted file through all commands."""

    runs: int = 0
    wrong: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")
    largest: tuple[int, str] = (0, "")
    """MB, and which command."""


def one_crafted(kind: str, name: str, make: Callable[[Path], None]) -> Crafted:
    row = Crafted()
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "x.gpuprobe" if kind == "recording" else "x.pickle")
        if kind == "recording":
            target.mkdir()
        _apart(lambda: make(target))
        out = Path(folder, "o")
        out.mkdir()
        jobs = jobs_of(kind, target, out)
        at = 0
        while at < len(jobs):
            first = at
            for number, seconds, most, problem in answers(jobs, at):
                at = number + 1
                row.runs += 1
                label = f"{name} | {jobs[number][0] if number < len(jobs) else ''}"
                row.slowest = max(row.slowest, (seconds, label))
                row.largest = max(row.largest, (most, label))
                if not problem and seconds > PROCESSOR:
                    problem = f"{seconds:.1f} s of processor time"
                if not problem and most > RESIDENT:
                    problem = f"{most} MB"
                if problem:
                    row.wrong.append(f"{label}: {problem.strip()[-1500:]}")
            if at == first:
                break
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=("crafted", "mutations"))
    parser.add_argument("--kinds", default="")
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    args = parser.parse_args()
    default = KINDS if args.what == "mutations" else ("recording", "snapshot")
    wrong = 0
    for kind in args.kinds.split(",") if args.kinds else default:
        if args.what == "crafted":
            wrong += run_crafted(kind, args.only)
            continue
        child = os.fork()  # limits and audit hooks are for good
        if child == 0:
            done = run_mutations(kind, args.seed, args.start, args.inputs)
            print(
                f"{kind:<14} {done.inputs:>7} mutations from {done.start}, "
                f"{len(done.wrong)} wrong, at most {done.slowest:.1f} s, {done.largest} MB",
                flush=True,
            )
            os._exit(min(1, len(done.wrong)))
        wrong += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
