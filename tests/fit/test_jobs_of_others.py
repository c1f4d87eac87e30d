"""Directories in the folder for temporary files that look like those of simulated jobs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuprobe.model.plans.request import EstimateRequest
from gpuprobe.planning.peers import Peers, remove_stale_jobs
from gpuprobe.planning.program import ProgramStart


def stale_job(folder: Path, name: str = "gpuprobe-ranks-0") -> Path:
    """The directory of a job whose first process was killed."""
    peers = Peers(-1, EstimateRequest(), ProgramStart())
    made = Path(peers.meeting)
    peers._restore()
    machine = (made / "owner").read_text().rpartition(" ")[0]
    (made / "owner").write_text(f"{machine} {(1 << 22) + 1}")  # Linux has no such process
    return made.rename(folder / name)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_stale_job_is_removed(temporary: Path) -> None:
    job = stale_job(temporary)
    remove_stale_jobs(temporary)
    assert not job.exists()


def test_a_pipe_in_place_of_a_file_does_not_block(temporary: Path) -> None:
    """Opening it to read would wait for a writer."""
    job = stale_job(temporary)
    (job / "owner").unlink()
    os.mkfifo(job / "owner")
    other = stale_job(temporary, "gpuprobe-ranks-1")
    os.mkfifo(other / "started-0")
    remove_stale_jobs(temporary)
    assert job.exists()
    assert not other.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of another user")
def test_a_job_of_another_user_is_left_alone(temporary: Path) -> None:
    job = stale_job(temporary)
    os.chown(job, 4242, 4242)
    remove_stale_jobs(temporary)
    assert job.exists()


def test_a_folder_that_others_can_enter_and_a_link_are_left_alone(temporary: Path) -> None:
    job = stale_job(temporary)
    job.chmod(0o755)
    (temporary / "elsewhere").mkdir(mode=0o700)
    hidden = stale_job(temporary / "elsewhere")
    (temporary / "gpuprobe-ranks-1").symlink_to(hidden)
    remove_stale_jobs(temporary)
    assert job.exists()
    assert hidden.exists()
