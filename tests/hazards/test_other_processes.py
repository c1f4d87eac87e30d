"""Tensors sent to other processes: a write before an answer is a race; what is heard orders."""

from __future__ import annotations

import multiprocessing as mp
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing  # its reductions

import gpuprobe

pytestmark = pytest.mark.simulated


def watched(act: Any) -> Any:
    """Findings of ``act(tensor, one end, other end)`` of a pipe; both ends are held here, which
    is all that a sender sees of another process."""
    one, other = mp.Pipe()
    with gpuprobe.detect_hazards() as found:
        act(torch.arange(8.0, device="cuda"), one, other)
    one.close()
    other.close()
    return found


def test_written_before_an_answer() -> None:
    def act(x: Any, one: Any, other: Any) -> None:
        one.send({"batch": [x]})
        x.add_(1)

    found = watched(act)
    (race,) = found.races
    assert (race.rule, race.kind) == ("GP212", "write-after-read")
    assert race.related[0].file == __file__
    assert "another process" in race.message
    assert "clone()" in race.fix.code
    assert dict(race.evidence)["fix verified"].startswith("yes")
    assert any("1 tensors sent" in line for line in found.coverage)


def test_written_after_an_answer() -> None:
    def act(x: Any, one: Any, other: Any) -> None:
        one.send(x)
        other.send("done")
        assert one.recv() == "done"
        x.add_(1)

    assert watched(act).races == []


@pytest.mark.parametrize("arrives", [True, False])
def test_a_poll_that_times_out_is_no_answer(arrives: bool) -> None:
    def act(x: Any, one: Any, other: Any) -> None:
        one.send(x)
        if arrives:
            other.send("done")
        assert one.poll(0) is arrives
        x.add_(1)

    assert bool(watched(act).races) is not arrives


def test_a_clone_is_the_receivers_own() -> None:
    def act(x: Any, one: Any, other: Any) -> None:
        one.send(x.clone())
        x.add_(1)
        y = torch.zeros(8, device="cuda")  # not in the memory that was sent
        y.add_(1)

    assert watched(act).races == []


def test_read_while_the_receiver_reads() -> None:
    def act(x: Any, one: Any, other: Any) -> None:
        one.send(x)
        x.sum()

    assert watched(act).races == []


PROGRAM = """
import gpuprobe

def work(inbox, outbox):
    for _ in range(2):
        outbox.put(inbox.get().sum().item())

if __name__ == "__main__":
    kinds = []
    with gpuprobe.virtual_gpu("h100-80gb", "real"):
        import torch
        import torch.multiprocessing as mp

        context = mp.get_context("spawn")
        inbox, outbox = context.SimpleQueue(), context.SimpleQueue()
        worker = context.Process(target=work, args=(inbox, outbox), daemon=True)
        worker.start()
        for early in (True, False):
            with gpuprobe.detect_hazards() as found:
                x = torch.ones(8, device="cuda")
                inbox.put(x)
                if early:
                    x.add_(1)
                total = outbox.get()
                assert total in ((8.0, 16.0) if early else (8.0,)), total
                x.add_(1)
            kinds.append([finding.rule for finding in found.races])
        worker.join()
    print(kinds)
"""


def test_a_real_process(tmp_path: Path) -> None:
    (tmp_path / "send.py").write_text(PROGRAM)
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "send.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.stdout == "[['GP212'], []]\n", ended.stderr
