"""A pretended job that is ended from outside leaves neither folders nor processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpuprobe.errors import ProgramFailed
from gpuprobe.model.plans.request import EstimateRequest
from gpuprobe.planning.estimates import estimate_program
from gpuprobe.planning.peers import Peers, remove_stale_jobs
from gpuprobe.planning.program import ProgramStart

OWNER = """
import time
from gpuprobe.model.plans.request import EstimateRequest
from gpuprobe.planning.peers import Peers
from gpuprobe.planning.program import ProgramStart
job = Peers(-1, EstimateRequest(), ProgramStart())
print(job.meeting, flush=True)
while True:  # a signal that came between Python's last look and a call is handled after the call
    time.sleep(0.1)
"""


def owner(folder: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert process.stdout is not None
    with process.stdout as stream:
        return process, Path(stream.readline().strip())


def test_sigterm_removes_the_folder(tmp_path: Path) -> None:
    process, place = owner(tmp_path)
    assert place.parent == tmp_path
    assert place.is_dir()
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM
    assert not place.exists()


def test_what_sigkill_left_is_removed_by_the_next_job_and_what_runs_is_not(tmp_path: Path) -> None:
    killed, place = owner(tmp_path)
    running, other = owner(tmp_path)
    sleep = "import time; time.sleep(600)"
    rank = subprocess.Popen([sys.executable, "-c", sleep, f'{{"meeting": "{place}"}}'])
    stranger = subprocess.Popen([sys.executable, "-c", sleep])  # has the number of a rank now
    try:
        (place / "started-0").write_text(str(rank.pid))
        (place / "started-1").write_text(str(stranger.pid))
        killed.kill()
        killed.wait()
        remove_stale_jobs(tmp_path)
        assert not place.exists()
        assert rank.wait(60) == -signal.SIGTERM
        assert other.is_dir()
        assert stranger.poll() is None
    finally:
        for process in (rank, stranger, running):
            process.kill()
            process.wait()


def test_a_handler_of_the_programs_is_left_alone(tmp_path: Path) -> None:
    def handler(number: int, frame: object) -> None:
        pass

    before = signal.signal(signal.SIGTERM, handler)
    try:
        job = Peers(-1, EstimateRequest(), ProgramStart())
        assert signal.getsignal(signal.SIGTERM) is handler
        job.close()
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
    job = Peers(-1, EstimateRequest(), ProgramStart())
    assert signal.getsignal(signal.SIGTERM) is not before
    job.close()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.simulated
@pytest.mark.filterwarnings("ignore")
def test_an_estimate_that_fails_puts_main_back(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\ntorch.ones(3, device='cuda')\nraise ValueError('wrong')\n")
    main, argv, path = sys.modules["__main__"], list(sys.argv), list(sys.path)
    with pytest.raises(ProgramFailed, match="wrong"):
        estimate_program(EstimateRequest(str(script), gpu="a100-40gb", compute="shapes"))
    assert sys.modules["__main__"] is main
    assert (sys.argv, sys.path) == (argv, path)
