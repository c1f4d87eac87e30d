"""``gpuprobe info`` as a command: exit codes, streams, and what it does not import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

ENVIRON = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "GPUPROBE_"))}


def info(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpuprobe", "info", *args]
    return subprocess.run(
        command, env={**ENVIRON, **environ}, capture_output=True, text=True, encoding="utf-8"
    )


def test_nothing_heavy_is_imported() -> None:
    program = (
        "import sys\n"
        "from gpuprobe.cli import main\n"
        "code = main(['info', '--demo'])\n"
        "heavy = {'torch', 'textual', 'pycuda', 'psutil', 'numpy', 'json.tool', 'rich'}\n"
        "sys.stderr.write(','.join(sorted(heavy & set(sys.modules))))\n"
        "raise SystemExit(code)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], env=ENVIRON, capture_output=True)
    assert (run.returncode, run.stderr) == (0, b"")


def test_demo_prints_a_table_and_nothing_else() -> None:
    run = info("--demo")
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.count("H100 80GB HBM3") == 8


def test_json_of_a_demo_is_json() -> None:
    run = info("--demo", "hostile", "--json")
    assert run.returncode == 0
    document = json.loads(run.stdout)
    assert document["demo"] == "hostile"
    assert len(document["devices"]) == 2


def test_without_a_driver_it_is_valid_json_and_exit_3() -> None:
    run = info("--demo", "no-driver", "--json")
    assert run.returncode == 3
    document = json.loads(run.stdout)
    assert document["devices"] == []
    assert {error["source"] for error in document["errors"]} == {"nvml", "cuda"}
    assert "no GPU source" in run.stderr


def test_without_a_driver_the_text_says_why() -> None:
    run = info("--demo", "no-driver")
    assert run.returncode == 3
    assert "kernel driver is not loaded" in run.stdout
    assert "hint" in run.stderr


def test_this_machine_as_it_is() -> None:
    run = info("--json")
    document = json.loads(run.stdout)
    available = any(source["available"] for source in document["sources"])
    assert run.returncode == (0 if available else 3)
    assert available or document["errors"]


@pytest.mark.skipif(find_spec("pycuda") is not None, reason="pycuda is installed here")
def test_a_source_that_was_asked_for_and_is_missing_is_exit_3() -> None:
    run = info("--demo", "--source", "pycuda")
    assert run.returncode == 3
    assert run.stdout == ""
    assert "gpuprobe[pycuda]" in run.stderr


@pytest.mark.skipif(find_spec("pycuda") is not None, reason="pycuda is installed here")
def test_all_sources_take_what_there_is() -> None:
    run = info("--demo", "--source", "nvml,cuda", "--json")
    assert run.returncode == 0
    names = [source["name"] for source in json.loads(run.stdout)["sources"]]
    assert names == ["nvml", "cuda"]


@pytest.mark.parametrize("args", [("--source", "nope"), ("--demo", "nope"), ("--nope",)])
def test_what_means_nothing_is_exit_2(args: tuple[str, ...]) -> None:
    run = info(*args)
    assert run.returncode == 2
    assert run.stdout == ""
    assert "error" in run.stderr


def test_the_fleets_are_listed() -> None:
    run = info("--demo", "list")
    assert run.returncode == 0
    assert "lost-gpu" in run.stdout


def test_a_closed_pipe_is_no_error() -> None:
    command = [sys.executable, "-m", "gpuprobe", "info", "--demo", "--json"]
    with subprocess.Popen(
        command, env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.read(10)
        run.stdout.close()
        assert run.stderr.read() == b""
    assert run.returncode == 0


def test_verbose_gives_source_and_status() -> None:
    run = info("--demo", "denied", "-v")
    assert run.returncode == 0
    assert "denied" in run.stdout
    assert "Insufficient Permissions" in run.stdout
    assert "Topology" in run.stdout
