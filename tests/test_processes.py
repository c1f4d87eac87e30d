"""gpuprobe's own processes: requests and replies, limits of time, and ends."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gpuprobe import processes
from gpuprobe.processes import SECONDS, Server

PACKAGE = Path(processes.__file__).parent

SERVING = """\
import os, signal, subprocess, sys, time

from gpuprobe.processes import Channel, serve


def run(request):
    print("printed:", request["do"])
    if request["do"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif request["do"] == "exit":
        os._exit(3)
    elif request["do"] == "fail":
        raise ValueError("wrong")
    elif request["do"] == "kill the server":
        os.kill(os.getppid(), signal.SIGKILL)
    elif request["do"] == "wait":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(request["pids"], "w") as file:
            file.write(f"{os.getpid()} {child.pid}\\n")
        time.sleep(600)
    return {"did": request["do"], "process": os.getpid(), "stdin": sys.stdin.read()}


serve(Channel(), run)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "serving.py").write_text(SERVING)
    path = os.pathsep.join((str(tmp_path), str(PACKAGE.parent)))
    with Server("serving", environment={**os.environ, "PYTHONPATH": path}) as started:
        yield started


def assert_ended(pids: Path) -> None:
    """The processes whose ids a request has written to a file have ended, or end soon."""
    running = {int(pid) for pid in pids.read_text().split()}
    assert len(running) == 2
    deadline = time.monotonic() + 60
    while running := {pid for pid in running if alive(pid)}:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_each_request_has_a_fork_whose_output_is_no_part_of_the_reply(server: Server) -> None:
    first, second = server.reply({"do": "a"}), server.reply({"do": "b"})
    assert first.document is not None
    assert second.document is not None
    assert (first.document["did"], second.document["did"]) == ("a", "b")
    assert first.document["process"] != second.document["process"]
    assert first.document["stdin"] == ""
    assert (first.code, first.log) == (0, "printed: a\n")


def test_a_long_document_and_a_long_request(server: Server) -> None:
    text = "é\n" * (1 << 20)
    reply = server.reply({"do": text})
    assert reply.document is not None
    assert reply.document["did"] == text
    assert len(reply.log) < 1 << 17


def test_processes_that_end_without_a_document(server: Server) -> None:
    killed, ended, failed = (server.reply({"do": what}) for what in ("kill", "exit", "fail"))
    assert (killed.document, killed.code, killed.lost) == (None, -signal.SIGKILL, False)
    assert (ended.document, ended.code) == (None, 3)
    assert (failed.document, failed.code) == (None, 1)
    assert processes.last_line(failed.log) == "ValueError: wrong"
    assert server.reply({"do": "after"}).document is not None


def test_a_request_has_a_limit_of_time_and_the_server_continues(
    server: Server, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    late = server.reply({"do": "wait", "pids": str(pids), SECONDS: 5.0})
    assert (late.document, late.late, late.lost) == (None, True, False)
    assert_ended(pids)
    assert server.reply({"do": "after"}).document is not None


def test_a_server_that_is_late_is_ended_with_what_it_runs(server: Server, tmp_path: Path) -> None:
    assert server.reply({"do": "start"}).document is not None
    pids = tmp_path / "pids"
    assert server.reply({"do": "wait", "pids": str(pids)}, seconds=5.0).late
    assert_ended(pids)


def test_a_server_that_is_killed_starts_again(server: Server) -> None:
    lost = server.reply({"do": "kill the server"})
    assert (lost.document, lost.code, lost.lost) == (None, -signal.SIGKILL, True)
    assert server.reply({"do": "after"}).document is not None


def test_documents_are_found_in_output() -> None:
    assert processes.last_document('{"a": 1}\n{broken\nwarning: late\n') == {"a": 1}
    assert processes.last_document("nothing\n") is None
    assert processes.last_line("one\n  two \n\n") == "two"
    assert processes.end_text(-9) == "by SIGKILL"
    assert processes.end_text(3) == "with code 3"


def test_modules_that_are_started_exist_and_are_no_program_text() -> None:
    """What a process runs is a module that search, types and import contracts see."""
    started = set()
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"""["'](?:import|from) gpuprobe""", text), file
        started.update(re.findall(r'^(?:WORKER|TRIAL_SERVER).* = "([\w.]+)"', text, re.M))
    assert len(started) == 3
    for name in started:
        path = PACKAGE.parent / Path(*name.split(".")).with_suffix(".py")
        assert '\nif __name__ == "__main__":\n' in path.read_text(encoding="utf-8")
