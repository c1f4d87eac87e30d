"""Fuzz the snapshot importer for as long as wanted.

    python benchmarks/fuzz_snapshot.py [--inputs 100000] [--seed 0] [--jobs 2]

Half of the inputs are pickles of snapshots (all protocols) with bytes flipped, cut out,
inserted, doubled, spliced with another pickle or with hostile opcodes, or cut off; the other
half are snapshots in which parts of the structure were replaced, pickled again. Each must give
a trace or one SnapshotError. A worker does what gpuprobe's reading process does, under the
same memory limit; an alarm ends an input that takes longer than 10 s. An audit hook ends the
worker if anything is imported, opened or started while an input is read. An input that ends a
worker is read again through ``gpuprobe.load``, which must turn that into a SnapshotError too.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import os
import pickle
import random
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from snapshot_samples import modern, torch_2_0, without_frames  # noqa: E402

from gpuprobe.errors import SnapshotError  # noqa: E402
from gpuprobe.recording.snapshot.load import read_snapshot  # noqa: E402
from gpuprobe.recording.snapshot.worker import MEMORY_FLOOR, decode_stream  # noqa: E402

SHAPES = [modern(), torch_2_0(), without_frames(), modern()["segments"]]
SEEDS = [pickle.dumps(shape, protocol) for shape in SHAPES for protocol in range(6)]
OPCODES = [
    b"cos\nsystem\n", b"\x8c\x02os\x8c\x06system\x93", b"R", b"\x85R", b"(ios\nsystem\n", b"b",
    b"o", b"\x81", b"\x92", b"\x82\x01", b"\x83\x01\x00", b"Q", b"Pid\n", b"\x97", b"\x98", b"0",
    b"1", b"2", b"(", b"t", b"l", b"d", b"e", b"u", b"s", b"a", b"]", b"}", b")", b"\x8f", b"\x90",
    b"\x91", b"\x85", b"\x86", b"\x87", b"\x94", b".", b"N", b"\x88", b"h\x00",
    b"j\xff\xff\x00\x00",
    b"q\x05", b"r\xff\xff\xff\x00", b"r\xff\xff\xff\xff", b"p99999999\n", b"I1\n", b"L1L\n",
    b"F1e400\n", b"Gnan_nan_", b"\x8b\xff\xff\xff\x7f", b"\x8a\x09" + b"\xff" * 9,
    b"\x8d" + struct.pack("<Q", 1 << 40), b"\x8e" + struct.pack("<Q", 1 << 33),
    b"\x96" + struct.pack("<Q", 1 << 33), b"\x95" + struct.pack("<Q", 1 << 50), b"\x80\x05",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, -1, 0, 1, 1 << 31, 1 << 63, 1 << 64, -(1 << 63), 10**30, 0.5, float("nan"),
    float("inf"), "", "alloc", "oom", "inactive", "active_allocated", "user_defined", "\ud800",
    b"x",
    [], {}, (), (0, 0), (1, 2, 3), [[]], {"a": 1}, [None], set(), frozenset(), bytearray(b"x"),
]  # fmt: skip


def mutate(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        if not out:
            break
        at = rng.randrange(len(out))
        kind = rng.randrange(7)
        if kind == 0:
            out[at] = rng.randrange(256)
        elif kind == 1:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del out[at : at + rng.randint(1, 60)]
        elif kind == 3:
            out[at:at] = rng.choice(OPCODES) * rng.choice((1, 1, 1, 2, 50))
        elif kind == 4:
            other = rng.choice(SEEDS)
            start = rng.randrange(len(other))
            out[at:at] = other[start : start + rng.randint(1, 200)]
        elif kind == 5:
            out[at:at] = out[at : at + rng.randint(1, 100)] * rng.randint(1, 5)
        else:
            del out[at:]
    return bytes(out)


def rearrange(rng: random.Random) -> bytes:
    snapshot = copy.deepcopy(rng.choice(SHAPES))
    for _ in range(rng.randint(1, 5)):
        at: Any = snapshot
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(at[key], (dict, list)) and rng.random() < 0.85:
                at = at[key]
                continue
            kind = rng.randrange(4)
            if kind == 0:
                del at[key]
            elif kind == 1 and isinstance(at, list):
                at[key:key] = [at[key]] * rng.randint(1, 30)
            else:
                at[key] = rng.choice(VALUES)
            break
    return pickle.dumps(snapshot, rng.randrange(6))


def make(seed: int, index: int) -> bytes:
    """Input number ``index``: the same one each time."""
    rng = random.Random(f"{seed}.{index}")
    return mutate(rng, rng.choice(SEEDS)) if index % 2 else rearrange(rng)


READING = False
ALLOWED = {"array.__new__", "builtins.id"}


def audit(event: str, args: tuple[Any, ...]) -> None:
    # CPython reports a bytearray that it could not fill in this way, and goes on.
    if event == "sys.excepthook" and args[1] is SystemError:
        return
    # pickle.find_class is raised by the unpickler itself, before our find_class refuses.
    if READING and event != "pickle.find_class" and event not in ALLOWED:
        os.write(2, f"audit: {event} {args!r}\n".encode())
        os._exit(99)


def work(seed: int, start: int, stop: int, step: int) -> None:
    """Read inputs; say before each which one it is, so that a dead worker can be explained."""
    global READING
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_FLOOR,) * 2)
    # What an error message needs is loaded before nothing may be loaded any more.
    for data in (b"\x80\x04\x8c\x02\xff\xff.", b"F1e4x\n."):
        with contextlib.suppress(SnapshotError):
            decode_stream(io.BufferedReader(io.BytesIO(data)), len(data))
    sys.addaudithook(audit)
    counts: Counter[str] = Counter()
    out = sys.stdout
    for index in range(start, stop, step):
        data = make(seed, index)
        out.write(f"{index}\n")
        out.flush()
        signal.alarm(10)
        READING = True
        try:
            decode_stream(io.BufferedReader(io.BytesIO(data)), len(data))
            counts["read"] += 1
        except SnapshotError as error:
            READING = False
            if "\n" in str(error) or not str(error):
                raise
            counts["refused"] += 1
        READING = False
        signal.alarm(0)
    out.write(f"done {counts['read']} {counts['refused']}\n")


def drive(inputs: int, seed: int, jobs: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    failures = []
    running = []
    for job in range(jobs):
        running.append((job, start_worker(seed, job, inputs, jobs)))
    while running:
        job, worker = running.pop(0)
        assert worker.stdout is not None
        last = ""
        for line in worker.stdout:
            last = line
        code = worker.wait()
        talk = worker.stderr.read() if worker.stderr else ""
        if last.startswith("done"):
            _, read, refused = last.split()
            counts["read"] += int(read)
            counts["refused"] += int(refused)
            continue
        index = int(last)
        counts["read or refused before a worker ended"] += (index - job) // jobs
        counts["ended a worker"] += 1
        data = make(seed, index)
        with tempfile.NamedTemporaryFile(suffix=".pickle") as file:
            file.write(data)
            file.flush()
            try:
                read_snapshot(file.name)
                verdict = "but read_snapshot reads it"
            except SnapshotError as error:
                verdict = f"read_snapshot: {error}"
        if code == 99 or code > 0:
            failures.append(index)
        print(f"input {index} ended its worker with {code}: {talk.strip()[-200:]}; {verdict}")
        worker = start_worker(seed, index + jobs, inputs, jobs)
        running.append((index + jobs, worker))
    if failures:
        raise SystemExit(f"FAILED: inputs {failures[:20]} with seed {seed}")
    return counts


def start_worker(seed: int, start: int, stop: int, step: int) -> subprocess.Popen[str]:
    numbers = [str(n) for n in (seed, start, stop, step)]
    return subprocess.Popen(
        [sys.executable, __file__, "--work", *numbers],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--work", nargs=4, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(*args.work)
        return
    began = time.perf_counter()
    counts = drive(args.inputs, args.seed, args.jobs)
    seconds = time.perf_counter() - began
    print(f"{args.inputs} inputs in {seconds:.0f} s: {dict(counts)}")


if __name__ == "__main__":
    main()
