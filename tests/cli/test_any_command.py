"""Commands after ``--``: what is a command, and what a launcher launches."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gpuprobe.errors import UsageError
from gpuprobe.planning.commands import Launched, is_command, launched_by, machine_of, name_of


def test_python_files_and_folders_are_no_commands(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("", encoding="utf-8")
    assert not is_command(str(script))
    assert not is_command("missing.py")  # the error is that of a missing script
    assert not is_command(str(tmp_path))


def test_names_in_the_path_and_executable_files_are_commands(tmp_path: Path) -> None:
    assert is_command("sh")
    assert is_command(sys.executable)
    shell = tmp_path / "launch.sh"
    shell.write_text("#!/bin/sh\n", encoding="utf-8")
    shell.chmod(0o755)
    assert is_command(str(shell))


def test_an_executable_file_of_python_is_a_script(tmp_path: Path) -> None:
    script = tmp_path / "train"
    script.write_text("#!/usr/bin/env python3\n", encoding="utf-8")
    script.chmod(0o755)
    assert not is_command(str(script))


def test_what_is_neither_a_file_nor_a_command_is_an_error() -> None:
    with pytest.raises(UsageError, match="no such file or command: nosuch"):
        is_command("nosuch")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("torchrun --nproc-per-node 2 train.py --lr 1", ("train.py", False)),
        ("python -m torch.distributed.run -m package.train", ("package.train", True)),
        ("make train", ("make", False)),
    ],
)
def test_a_recording_has_the_name_of_the_program(line: str, name: tuple[str, bool]) -> None:
    assert name_of(line.split()) == name


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("python -u train.py --lr 1", Launched("train.py", ("--lr", "1"), False, 1)),
        ("torchrun train.py", Launched("train.py", (), False, 1)),
        ("torchrun --nproc-per-node=4 train.py -x", Launched("train.py", ("-x",), False, 4)),
        ("torchrun --nproc_per_node 2 --nnodes 3 a/t.py", Launched("a/t.py", (), False, 6)),
        ("torchrun --nproc-per-node gpu train.py", Launched("train.py", (), False, 8)),
        (
            "python -m torch.distributed.run --nproc-per-node 2 -m package.train --steps 3",
            Launched("package.train", ("--steps", "3"), True, 2),
        ),
        ("accelerate launch --num_processes 2 train.py", Launched("train.py", (), False, 2)),
        ("deepspeed train.py --deepspeed", Launched("train.py", ("--deepspeed",), False, 8)),
    ],
)
def test_launchers_of_ranks_are_understood(line: str, expected: Launched) -> None:
    assert launched_by(line.split(), "8xh100-80gb") == expected


@pytest.mark.parametrize(
    ("line", "gpu", "machine"),
    [
        ("torchrun --nproc-per-node 2 --nnodes 3 t.py", "t4", "2xt4"),
        ("python -m torch.distributed.run --nproc_per_node=4 -m package.train", "t4", "4xt4"),
        ("torchrun t.py --nproc-per-node 2", "t4", "t4"),  # the script's own option
        ("torchrun --nproc-per-node gpu t.py", "t4", "t4"),
        ("torchrun --nproc-per-node 2 t.py", "1xt4", "1xt4"),  # ranks that share a GPU
        ("torchrun --nproc-per-node 2 t.py", "t4,l4", "t4,l4"),
        ("python t.py --num-gpus 2", "t4", "t4"),
    ],
)
def test_each_rank_of_a_launcher_has_a_gpu(line: str, gpu: str, machine: str) -> None:
    assert machine_of(line.split(), gpu) == machine


def test_other_commands_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="make is neither Python nor a launcher"):
        launched_by(["make", "train"], "t4")
