"""Records are written by a thread that nobody waits for: in order, and all of them."""

from __future__ import annotations

import _thread
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from functools import partial

import pytest
import torch
from models import Mlp, seeded, train
from sinks import KeepingSink

from gpuprobe.model.run.session import Step
from gpuprobe.sampler import step_writer
from gpuprobe.sampler.recorder import Recorder
from gpuprobe.sampler.step_writer import Background


def test_work_is_done_in_order_and_the_thread_ends() -> None:
    done: list[int] = []
    errors: list[Exception] = []
    work = Background(errors.append)
    for i in range(100):
        work.submit(lambda i=i: done.append(i))
    assert work.drain(30)
    assert done == list(range(100))
    assert work._thread is None
    work.submit(lambda: done.append(100))  # and it starts again
    assert work.drain(30)
    assert done[-1] == 100
    assert not errors


def test_short_steps_are_written_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_writer, "PAUSE", 1e5)
    done: list[int] = []
    first = threading.Event()
    worker = Background(pytest.fail)
    worker.submit(first.set)
    assert first.wait(60)
    while not worker._pausing:
        time.sleep(0.001)
    for item in range(3):
        worker.submit(partial(done.append, item))
    assert not done
    assert worker.drain(60)
    assert done == [0, 1, 2]


def test_an_error_is_handed_over_and_the_rest_is_done() -> None:
    done: list[str] = []
    errors: list[Exception] = []
    work = Background(errors.append)
    work.submit(lambda: 1 // 0)
    work.submit(lambda: done.append("next"))
    assert work.drain(30)
    assert [type(error) for error in errors] == [ZeroDivisionError]
    assert done == ["next"]


def test_a_drain_that_takes_too_long_loses_nothing() -> None:
    gate = threading.Event()
    done: list[str] = []
    work = Background(lambda error: None)
    work.submit(gate.wait)
    for _ in range(3):
        assert not work.drain(0.0)
    work.submit(lambda: done.append("later"))
    gate.set()
    assert work.drain(30)
    assert done == ["later"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_the_thread_ends_before_a_fork() -> None:
    done: list[int] = []
    work = Background(lambda error: None)
    for i in range(50):
        work.submit(lambda i=i: done.append(i))
    pid = os.fork()
    if not pid:
        os._exit(0 if done == list(range(50)) and work._thread is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert done == list(range(50))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_child_has_nothing_of_its_parents_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_writer, "FORK_TIMEOUT", 0.0)  # forked beside a disk that hangs
    gate = threading.Event()
    done: list[int] = []
    work = Background(lambda error: None)
    work.submit(gate.wait)
    work.submit(lambda: done.append(0))
    pid = os.fork()
    if not pid:
        work.submit(lambda: done.append(1))
        os._exit(0 if work.drain(30) and done == [1] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    gate.set()
    assert work.drain(30)
    assert done == [0]


def test_without_threads_the_work_is_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", refused)
    done: list[int] = []
    work = Background(lambda error: None)
    work.submit(lambda: done.append(0))
    assert done == [0]
    assert work.drain(0.0)


def test_many_threads_hand_over_while_others_drain() -> None:
    done: list[int] = []
    work = Background(lambda error: None)

    def hand_over(first: int) -> None:
        for i in range(200):
            work.submit(lambda i=i: done.append(first + i))
            if i % 20 == 0:
                work.drain(30)

    threads = [threading.Thread(target=hand_over, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert work.drain(30)
    assert sorted(done) == sorted(1000 * n + i for n in range(4) for i in range(200))
    for n in range(4):  # those of one thread in its order
        assert [i for i in done if i // 1000 == n] == [1000 * n + i for i in range(200)]
    assert work._thread is None


def test_what_waits_when_the_interpreter_ends_is_done() -> None:
    program = """
import time
from gpuprobe.sampler.step_writer import Background
work = Background(print)
for i in range(20):
    work.submit(lambda i=i: (time.sleep(0.01), print(i, flush=True)))
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == [str(i) for i in range(20)]


class Slow(KeepingSink):
    """A disk that takes nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def step(self, step: Step) -> None:
        self.gate.wait()
        super().step(step)


def test_a_disk_that_hangs_holds_up_nobody() -> None:
    sink = Slow()
    model = seeded(Mlp)
    with Recorder(sink) as watching:
        losses = train(model, torch.optim.SGD(model.parameters(), 0.1), 5)
        assert len(losses) == 5
        assert not sink.steps
        sink.gate.set()
        watching.finish()
    assert [step.index for step in sink.steps] == list(range(5))
    assert not sink.ends[0].gpuprobe_faults


def test_steps_that_find_no_room_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_writer, "LIMIT", 2)
    monkeypatch.setattr(step_writer, "WRITE_TIMEOUT", 0.0)
    sink = Slow()
    model = seeded(Mlp)
    with Recorder(sink):
        train(model, torch.optim.SGD(model.parameters(), 0.1), 8)
    (end,) = sink.ends
    assert any("not written" in fault for fault in end.gpuprobe_faults)
    assert any("8 steps are missing" in fault for fault in end.gpuprobe_faults)
    sink.gate.set()


def test_a_thread_with_nothing_to_do_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_writer, "PAUSE", 0.0)
    done: list[int] = []
    work = Background(pytest.fail)
    for item in range(2):
        work.submit(partial(done.append, item))
        with work._changed:
            assert work._changed.wait_for(lambda: work._thread is None, 60)
    assert done == [0, 1]


def test_the_thread_is_not_one_of_the_programs() -> None:
    """Not in its list of threads, and never the one that gets its signals: it blocks them all."""
    gate, masks = threading.Event(), []
    work = Background(pytest.fail)
    before = threading.enumerate()
    try:
        work.submit(lambda: masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        work.submit(gate.wait)
        assert threading.enumerate() == before
    finally:
        gate.set()
    assert work.drain(60)
    assert masks[0] > {signal.SIGUSR2, signal.SIGINT, signal.SIGXFSZ}
    assert signal.SIGSEGV not in masks[0]


def test_a_signal_handler_may_end_the_recording_in_the_middle_of_our_code() -> None:
    work = Background(pytest.fail)
    done: list[int] = []
    work.submit(partial(done.append, 1))
    with work._changed:  # as in `submit`
        work.submit(partial(done.append, 2))
    assert work.drain(60)
    assert done == [1, 2]


def test_nothing_of_it_is_left_to_finalizers() -> None:
    before = set(weakref.finalize._registry)  # type: ignore[attr-defined]
    background = Background(lambda error: None)
    assert set(weakref.finalize._registry) <= before  # type: ignore[attr-defined]
    ended = weakref.ref(background)
    del background
    assert ended() is None
