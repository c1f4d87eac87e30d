"""Outputs that take nothing more, are not there, or are no files."""

from __future__ import annotations

import io
import json
import os
import shlex
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import warm_python

from gpuprobe import cli
from gpuprobe.api.watch import summary
from gpuprobe.errors import UsageError
from gpuprobe.exporter.export import write_textfile
from gpuprobe.model.colour import uses_colour
from gpuprobe.model.io.files import new_file
from gpuprobe.reporters.terminal import Style

FULL = Path("/dev/full")
GPUPROBE = [sys.executable, "-m", "gpuprobe"]
BUFFERED = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}


@pytest.mark.skipif(not FULL.is_char_device(), reason="no /dev/full here")
@pytest.mark.parametrize("command", ["info --demo", "doctor --demo throttled --json"])
def test_a_full_disk_is_one_line(command: str) -> None:
    with FULL.open("w") as full:
        done = subprocess.run(
            [*GPUPROBE, *command.split()], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.stderr == "gpuprobe: error: cannot write the output: No space left on device\n"
    assert done.returncode == 2


@pytest.mark.parametrize("command", ["info --demo", "--version", "doctor --demo ecc"])
def test_no_stdout_is_no_error(command: str) -> None:
    shell = f'exec "{sys.executable}" -m gpuprobe {command} >&-'
    done = subprocess.run(["sh", "-c", shell], stderr=subprocess.PIPE, text=True)
    assert done.stderr == ""
    assert done.returncode in (0, 1)


LOUD = """
import os, subprocess, sys
import torch
print("printed")
os.write(1, b"written\\n")
subprocess.run(["echo", "of a process"])
torch.ones(8, device="cuda")
"""


@pytest.mark.parametrize("command", ["estimate --gpu t4 --json", "check"])
def test_output_of_a_program_is_not_part_of_the_document(command: str, tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(LOUD)
    common = ["--baseline", "memory.json", "--gpu", "t4", "loud.py"]
    if command == "check":
        warm_python.gpuprobe("baseline", "update", *common, cwd=tmp_path)
        done = warm_python.gpuprobe("check", "--json", *common, cwd=tmp_path)
    else:
        done = warm_python.gpuprobe(*command.split(), "loud.py", cwd=tmp_path)
    assert json.loads(done.stdout)["schema"] == f"gpuprobe.{command.split()[0]}"
    for text in ("printed", "written", "of a process"):
        assert text in done.stderr.splitlines()


def test_output_of_a_program_without_a_stderr(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(LOUD)
    shell = f'exec "{sys.executable}" -m gpuprobe estimate --gpu t4 loud.py 2>&-'
    done = subprocess.run(["sh", "-c", shell], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    assert "t4: fits" in done.stdout


def test_a_program_whose_output_is_lost_is_still_recorded(tmp_path: Path) -> None:
    script = tmp_path / "prints.py"
    script.write_text("print('x')\n")
    run = f'exec "{sys.executable}" -m gpuprobe run -q -o out.gpuprobe {script}'
    closed = subprocess.run(["sh", "-c", f"{run} >&-"], cwd=tmp_path, capture_output=True)
    assert (closed.returncode, closed.stderr) == (0, b"")
    if FULL.is_char_device():
        again = run.replace("out.", "again.")
        full = subprocess.run(
            ["sh", "-c", f"{again} >{FULL}"], cwd=tmp_path, env=BUFFERED, capture_output=True
        )
        assert full.returncode == 120
        assert full.stderr.startswith(b"Exception ignored in: <_io.TextIOWrapper name='<stdout>'")


@pytest.mark.parametrize("force", [False, True])
def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path, force: bool) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    link = tmp_path / "link"
    link.symlink_to(pipe)
    for path in (pipe, link):
        read: list[bytes] = []
        reader = threading.Thread(target=lambda into=read: into.append(pipe.read_bytes()))
        reader.start()
        with new_file(path, force) as stream:
            stream.write(b"page")
        reader.join()
        assert read == [b"page"]
        assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert link.is_symlink()


def test_metrics_go_into_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.prom"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_textfile(pipe, [])
    reader.join()
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_what_a_link_leads_to_is_replaced(tmp_path: Path) -> None:
    real = tmp_path / "real.html"
    real.write_text("old")
    link = tmp_path / "link.html"
    link.symlink_to(real)
    with pytest.raises(UsageError, match="exists"), new_file(link, force=False) as stream:
        stream.write(b"new")
    with new_file(link, force=True) as stream:
        stream.write(b"new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.html", "real.html"]


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuses)
    with new_file(tmp_path / "page.html", force=False) as stream:
        stream.write(b"page")
    assert (tmp_path / "page.html").read_bytes() == b"page"
    late = new_file(tmp_path / "late.html", force=False)
    with pytest.raises(UsageError, match="exists"), late:
        (tmp_path / "late.html").write_text("somebody else's")
    assert (tmp_path / "late.html").read_text() == "somebody else's"


def test_the_last_line_of_a_run_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    (line,) = summary(Path("my runs/it's.gpuprobe"))
    command = line.partition("(")[2].removesuffix(")")
    assert shlex.split(command) == ["gpuprobe", "report", "my runs/it's.gpuprobe"]


def test_a_sentence_leaves_out_the_working_directory() -> None:
    style = Style(cwd="/home/u/project")
    assert style.relative("at /home/u/project/a.py:3, there") == "at a.py:3, there"
    assert Style(cwd="/").relative("at /a.py:3") == "at /a.py:3"


def test_a_long_name(tmp_path: Path) -> None:
    name = "n" * 250
    with new_file(tmp_path / name, force=False) as stream:
        stream.write(b"x")
    assert (tmp_path / name).read_bytes() == b"x"


@pytest.mark.parametrize(
    ("environ", "terminal", "colour"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "0"}, False, False),
        ({"CLICOLOR_FORCE": "1"}, False, True),
        ({"CLICOLOR": "0"}, True, False),
        ({"TERM": "dumb"}, True, False),
    ],
)
def test_who_gets_colour(environ: dict[str, str], terminal: bool, colour: bool) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    assert uses_colour(Stream(), environ) is colour


@pytest.mark.parametrize(
    ("terminal", "environ"), [(True, {}), (False, {}), (True, {"NO_COLOR": "1"})]
)
def test_the_severity_of_an_error_is_coloured_on_a_terminal(
    terminal: bool, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    stream = Stream()
    monkeypatch.setattr("sys.stderr", stream)
    assert cli.main(["report", "/no/such\x1b[31mfile"]) == 2
    first = stream.getvalue().splitlines()[0]
    coloured = terminal and not environ
    assert first.startswith(
        "gpuprobe: \x1b[1;31merror\x1b[0m: " if coloured else "gpuprobe: error: "
    )
    assert "\x1b[31mfile" not in first
