"""Processes that a program starts with multiprocessing or os.fork: those that use a GPU are
recorded, whatever their end, and an estimate adds what they need. The program does what it does
without.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gpuprobe
from gpuprobe.api import watch
from gpuprobe.errors import DataError, UsageError
from gpuprobe.model.plans.request import EstimateRequest
from gpuprobe.planning import processes as started_processes
from gpuprobe.planning.estimates import estimate_program
from gpuprobe.planning.processes import ENDED, Stalled, TimeIsOver, interrupted
from gpuprobe.recording.summary import summarize
from gpuprobe.recording.writer import RecordingWriter
from gpuprobe.reporters.sections.report.head import head_of
from gpuprobe.torch_support import process_gpus

pytestmark = pytest.mark.filterwarnings("ignore")
FORK = multiprocessing.get_context("fork")


def script(folder: Path, function: Callable[..., object], *arguments: object) -> Any:
    """A program that calls a function of this file."""
    path = folder / "script.py"
    path.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport torch\n"
        f"from {Path(__file__).stem} import {function.__name__}\n"
        f"if __name__ == '__main__':\n    {function.__name__}(*{arguments!r})\n"
    )
    return watch.program(str(path), [], False)


def until(condition: Callable[[], bool]) -> None:
    """Wait for another process; not forever, where something is wrong."""
    for _ in range(10_000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")


def ones(count: int) -> float:
    return torch.ones(count, device="cuda").sum().item()


def fails() -> None:
    ones(1 << 18)
    raise ValueError("in the child")


def leaves() -> None:
    ones(1 << 18)
    os._exit(7)


def is_killed() -> None:
    ones(1 << 18)
    os.kill(os.getpid(), signal.SIGKILL)


def serves(orders: Any, answers: Any) -> None:
    while True:
        answers.put(ones(orders.get()))


def prepares() -> None:
    torch.ones(10).sum()
    assert torch.cuda.is_available()


def ends(target: Callable[..., object], *arguments: object) -> int | None:
    process = FORK.Process(target=target, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def starts_all_kinds(answer: str) -> None:
    found: dict[str, Any] = {
        "whole": ends(ones, 1 << 18),
        "raises": ends(fails),
        "leaves": ends(leaves),
        "killed": ends(is_killed),
        "prepares": ends(prepares),
    }
    orders, answers = FORK.Queue(), FORK.Queue()
    server = FORK.Process(target=serves, args=(orders, answers), daemon=True)
    server.start()
    orders.put(1 << 19)
    found["served"] = answers.get(timeout=60)
    server.terminate()
    server.join()
    found["server"] = server.exitcode
    with FORK.Pool(1) as pool:
        found["pool"] = pool.map(ones, [1 << 18, 1 << 20])
    child = os.fork()
    if not child:
        ones(1 << 18)
        sys.exit(3)
    found["fork"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    Path(answer).write_text(json.dumps(found))


EXPECTED = {
    "whole": 0,
    "raises": 1,
    "leaves": 7,
    "killed": -9,
    "prepares": 0,
    "served": 1 << 19,
    "server": -15,
    "pool": [1 << 18, 1 << 20],
    "fork": 3,
}
"""As without gpuprobe."""


@pytest.mark.simulated
def test_all_that_use_a_gpu_are_recorded_whatever_their_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    answer = tmp_path / "answer.json"
    program = script(tmp_path, starts_all_kinds, str(answer))
    path = tmp_path / "run.gpuprobe"
    result = watch.run(program, path, gpu="t4")
    assert (result.exit_code, result.error, result.children) == (0, None, 7)
    assert json.loads(answer.read_text()) == EXPECTED
    shown = capfd.readouterr().err
    assert shown.startswith("Process ForkProcess-")
    assert shown.count("Traceback") == 1
    assert "gpuprobe" not in shown  # no frame of a hook, and no warning

    recording = gpuprobe.load(path)
    report = summarize(recording)
    rows = [(row.status, row.peaks[0].allocated.at_most >> 20, row.rank) for row in report.children]
    assert rows == [
        ("complete", 1, 0),  # whole
        ("failed", 1, 0),
        ("incomplete", 1, 0),  # left with os._exit
        ("incomplete", 2, 0),  # the server: written before it sent its answer
        ("incomplete", 4, 0),  # of the pool, likewise
        ("complete", 1, 0),  # forked with os.fork
    ]
    errors = [row.error.type for row in report.children if row.error is not None]
    assert errors == ["ValueError"]
    (rank,) = recording.ranks  # the children are none
    (spot,) = [spot for spot in rank.blind_spots if "started" in spot.what]
    assert spot.what == (
        "1 process that uses the GPU and that the program started: ended before anything was "
        "recorded"
    )

    head = head_of(report)
    assert "6 processes that it started did, at most 4.0 MiB" in head.cause
    largest = max(report.children, key=lambda row: row.peaks[0].allocated.at_least)
    assert head.fix.endswith(f"gpuprobe report run.gpuprobe/{largest.name}")
    text = " ".join(" ".join(watch.summary(path)).split())
    assert "6 processes that the program started used the GPU, at most 4.0 MiB allocated" in text

    # Each is a recording.
    child = gpuprobe.load(path / report.children[0].name)
    assert child.ranks[0].session.pid == report.children[0].pid


def starts_short_ones(recording: str) -> None:
    for number in range(6):
        if number == 3:  # the others cannot be recorded
            shutil.rmtree(recording)
            Path(recording).write_text("")
        assert ends(ones, 8) == 0


@pytest.mark.simulated
def test_where_nothing_can_be_written_the_program_continues(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.gpuprobe"
    told: list[str] = []
    result = watch.run(
        script(tmp_path, starts_short_ones, str(path)), path, gpu="t4", warn=told.append
    )
    assert (result.exit_code, result.error, result.children) == (0, None, 6)
    (message,) = told
    assert message.startswith("gpuprobe cannot write its recording, the program continues")
    assert capfd.readouterr().err == ""


def outlives(ready: str) -> None:
    if os.fork() == 0:
        ones(1 << 18)
        until(Path(ready).exists)
        Path(ready).with_name("over").write_text(str(ones(1 << 20)))
        os._exit(0)


@pytest.mark.simulated
def test_a_child_that_outlives_the_program_completes_its_recording(tmp_path: Path) -> None:
    path = tmp_path / "run.gpuprobe"
    watch.run(script(tmp_path, outlives, str(tmp_path / "ready")), path, gpu="t4")
    (tmp_path / "ready").touch()
    until((tmp_path / "over").exists)
    until(lambda: any(found.peaks for found in gpuprobe.load(path).load_children()))
    (child,) = gpuprobe.load(path).load_children()
    assert child.peaks[0].allocated.at_most >> 20 == 4  # type: ignore[union-attr]


def is_rank(rank: int, meeting: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", f"file://{meeting}", rank=rank, world_size=2)
    weight = torch.ones(1 << 18, device="cuda", requires_grad=True)
    weight.sum().backward()
    torch.optim.SGD([weight]).step()
    dist.destroy_process_group()


def starts_a_job(meeting: str) -> None:
    processes = [FORK.Process(target=is_rank, args=(rank, meeting)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0


@pytest.mark.simulated
def test_processes_of_a_job_are_its_ranks(tmp_path: Path) -> None:
    path = tmp_path / "run.gpuprobe"
    (tmp_path / "run.spawned.gpuprobe").mkdir()  # of an earlier run
    program = script(tmp_path, starts_a_job, str(tmp_path / "meeting"))
    result = watch.run(program, path, gpu="2xt4")
    assert (result.error, result.children) == (None, 2)
    assert result.spawned == ()  # the job's is the one that was requested: nothing else was done
    ranks = gpuprobe.load(path).ranks
    assert [(one.session.rank, one.session.world_size, len(one.steps)) for one in ranks] == [
        (0, 2, 1),
        (1, 2, 1),
    ]
    assert not gpuprobe.load(path).load_children()


def test_a_new_recording_replaces_those_of_children_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "run.gpuprobe"
    RecordingWriter.create(path).close()
    RecordingWriter.create(path / "child-00000-12.gpuprobe").close()
    (path / "child-00000-12.gpuprobe" / "notes.txt").touch()
    with pytest.raises(UsageError, match="other files"):
        RecordingWriter.create(path, force=True)
    (path / "child-00000-12.gpuprobe" / "notes.txt").unlink()
    RecordingWriter.create(path, force=True).close()
    assert [entry.name for entry in path.iterdir()] == ["rank-00000.jsonl"]


# -- estimates


def trains(steps: int = 100, others: Any = None) -> None:
    if others is not None:
        others.wait()
    weight = torch.ones(1 << 22, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([weight], momentum=0.9)
    for _ in range(steps):
        weight.sum().backward()
        optimizer.step()


def trains_next_to(count: int, together: bool, how: str) -> None:
    context = multiprocessing.get_context(how)
    others = context.Barrier(count) if together else None
    processes: list[Any] = [
        context.Process(target=trains, args=(100, others)) for _ in range(count)
    ]
    for process in processes:
        process.start()
        if not together:
            process.join()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    trains()


RESERVED = (3 * 16 + 2) << 20
"""Bytes: weight, gradient and momentum, in segments of their size, and one of 2 MiB for the sum."""


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("count", "together", "how"), [(2, True, "fork"), (2, False, "fork"), (1, True, "spawn")]
)
def test_an_estimate_adds_what_they_need_at_one_time(
    count: int, together: bool, how: str, tmp_path: Path
) -> None:
    program = script(tmp_path, trains_next_to, count, together, how)
    found = estimate_program(EstimateRequest(gpu="t4", compute="shapes"), program)
    at_once = count if together else 1
    assert (found.peak_reserved, found.processes) == (RESERVED, at_once)
    assert abs(found.processes_low - at_once * (RESERVED * 0.98 + found.context_low)) < 2
    assert abs(found.processes_high - at_once * (RESERVED * 1.02 + found.context_high)) < 2
    assert found.total_high - found.reserved_high == found.context_high + found.processes_high
    assert any(text.startswith(f"{count} process") for text in found.assumed)


def starts_only() -> None:
    assert ends(trains, 1) == 0


@pytest.mark.simulated
def test_an_estimate_of_a_program_that_uses_no_gpu_itself_has_a_hint(tmp_path: Path) -> None:
    request = EstimateRequest(gpu="t4", compute="shapes")
    with pytest.raises(DataError, match="only processes that the program starts") as caught:
        estimate_program(request, script(tmp_path, starts_only))
    assert "--ranks" in caught.value.hint


def answers_after(steps: int, queue: Any) -> None:
    weight = torch.ones(8, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    for _ in range(steps):
        weight.sum().backward()
        optimizer.step()
    queue.put("done")


def waits_for_an_answer(steps: int) -> None:
    queue = FORK.Queue()
    process = FORK.Process(target=answers_after, args=(steps, queue))
    process.start()
    queue.get()
    process.join()
    ones(1 << 18)


@pytest.mark.simulated
def test_an_estimate_does_not_wait_for_what_will_never_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process is stopped after its steps, so what it would have sent does not arrive."""
    monkeypatch.setattr(started_processes, "_PATIENCE_S", 0.5)
    before = signal.getsignal(signal.SIGURG)
    with pytest.raises(DataError, match="waits for one that was stopped") as raised:
        estimate_program(EstimateRequest(gpu="t4"), script(tmp_path, waits_for_an_answer, 4))
    assert "more --steps" in raised.value.hint
    assert signal.getsignal(signal.SIGURG) == before
    program = script(tmp_path, waits_for_an_answer, 2)
    assert estimate_program(EstimateRequest(gpu="t4"), program).fits


def test_what_still_works_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(started_processes, "_PATIENCE_S", 0.05)
    (tmp_path / f"1{ENDED}").touch()
    used = iter(range(1_000_000))
    enough = threading.Event()

    def busy() -> float:
        found = next(used)
        if found == 20:
            enough.set()
        return float(found)

    monkeypatch.setattr(started_processes, "_processor_time", busy)
    with interrupted(tmp_path):
        assert enough.wait(30)
    with pytest.raises(TimeIsOver), interrupted(tmp_path, 0.1):
        threading.Event().wait(30)
    monkeypatch.setattr(started_processes, "_processor_time", lambda: 0.0)
    with pytest.raises(Stalled), interrupted(tmp_path):
        threading.Event().wait(30)


def test_a_process_that_uses_no_gpu_imports_nothing(tmp_path: Path) -> None:
    """A spawned one, such as a DataLoader's."""
    (tmp_path / "plain.py").write_text(
        "import multiprocessing, sys\n"
        "def names(queue):\n"
        "    queue.put(sorted(n for n in sys.modules if n.startswith('gpuprobe')))\n"
        "if __name__ == '__main__':\n"
        "    import torch\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.Queue()\n"
        "    process = context.Process(target=names, args=(queue,))\n"
        "    process.start()\n"
        "    print(*queue.get(timeout=60))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "gpuprobe", "run", "-q", "plain.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names = done.stdout.split()
    assert {*names} == {"gpuprobe", "gpuprobe._version", "gpuprobe.patching"}  # waits for torch
    assert not list((tmp_path / "plain.gpuprobe").glob("child*"))


# -- CUDA itself, of which this machine may have none


def test_the_initialisation_of_cuda_is_the_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by the name under which modules of torch have imported it."""
    calls: list[str] = []

    def initialise() -> None:
        calls.append("initialised")
        monkeypatch.setattr(torch.cuda, "_initialized", True)

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "_initialized", False)
    for module in (torch.cuda, torch.cuda.memory):
        monkeypatch.setattr(module, "_lazy_init", initialise)
    undo = process_gpus.follow_cuda()
    memory: Any = torch.cuda.memory
    memory._lazy_init()
    assert calls == ["initialised"]  # of a process that is not followed
    monkeypatch.setattr(torch.cuda, "_initialized", False)
    process_gpus.when_first_used(lambda: calls.append("used"))
    memory._lazy_init()
    memory._lazy_init()
    assert calls == ["initialised", "initialised", "used", "initialised"]
    undo()
    assert torch.cuda._lazy_init is memory._lazy_init is initialise
