"""``--json``: one document on stdout, whether a command works or fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gpuprobe.cli import exit_codes, main
from gpuprobe.cli.commands import COMMANDS
from gpuprobe.cli.parser import command_parser
from gpuprobe.reporters.json.schemas import schema

RECORDED = Path(__file__).parent.parent / "recorded" / "v2"

# Without it: export writes Prometheus' and OpenTelemetry's formats, mcp a protocol, completion
# a script for a shell.
WITHOUT_JSON = {"export", "mcp", "completion"}

BAD = {
    "baseline": (["update", "missing.gpuprobe"], ["update", "--zzz"], ["write"], []),
    "check": (["missing.gpuprobe"], ["--tolerance", "x", "train.py"]),
    "completion": (["cmd"],),
    "cuda-torch": (["status", "x"], ["upgrade"]),
    "diff": (["missing", "missing"], ["one"], ["empty.gpuprobe", "empty.gpuprobe"]),
    "doctor": (["--demo", "none"], ["--distributed", "--timeout", "0"]),
    "estimate": (["missing.py"], [], ["--gpu", "none", "empty.py"], ["--steps", "0", "x.py"]),
    "explain": (["missing.py"], [], ["--max-seconds", "x", "x.py"]),
    "export": ([], ["--prometheus", "--once", "--interval", "0"]),
    "fit": (["missing.py", "--arg", "n"], [], ["--max", "x"]),
    "hang": (["missing"], ["empty.gpuprobe"], []),
    "info": (["--demo", "none"], ["--source", "none"]),
    "mcp": (["--timeout", "0"],),
    "replay": (["missing"], ["empty.gpuprobe"], ["--capacity", "8", "x"]),
    "report": (["missing"], ["empty.gpuprobe"], [], ["x", "--hazards", "y"]),
    "run": (["missing.py"], [], ["--level", "none", "x.py"], ["--endless", "empty.py"]),
    "scale": (["missing"], ["empty.gpuprobe"]),
    "top": (["--interval", "0"], ["--demo", "none"], ["--replay", "missing", "--once"]),
    "view": (["missing"], ["empty.gpuprobe"]),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "empty.gpuprobe").mkdir()
    (tmp_path / "empty.py").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def document(text: str) -> dict[str, Any]:
    """The only document of stdout, which is valid."""
    found: dict[str, Any] = json.loads(text)
    name = found["schema"].partition(".")[2]
    jsonschema.validate(found, schema(f"{name}-{found['version'][0]}"))
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_an_error_is_a_document(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    for words in (*BAD[name], ["--no-such-option"]):
        code = main([name, *words])
        assert code in (exit_codes.USAGE, exit_codes.ENVIRONMENT, exit_codes.BAD_DATA), words
        out, plain = capfd.readouterr()
        assert out == "", words
        at = 1 if name == "baseline" else 0  # after ``update``
        ended = main([name, *words[:at], "--json", *words[at:]])
        out, talk = capfd.readouterr()
        error = document(out)["error"]
        assert f"gpuprobe: error: {error['message']}" in talk
        assert not error["hint"] or f"  hint: {error['hint']}" in talk
        if "unrecognized" not in talk:  # which lists them all
            assert (ended, talk) == (code, plain), words


def test_every_command_has_the_option_or_a_reason() -> None:
    without = set()
    for name in COMMANDS:
        module, parser = command_parser(name)
        if name == "baseline":
            parser = module.update_parser()
        if "--json" not in parser._option_string_actions:
            without.add(name)
    assert without == WITHOUT_JSON


def test_wherever_the_option_stands(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "x", "--json"]) == exit_codes.USAGE
    assert document(capfd.readouterr().out)["error"]["message"].endswith(": x")
    assert main(["reprot", "x", "--json"]) == exit_codes.USAGE
    error = document(capfd.readouterr().out)["error"]
    assert error == {
        "kind": "UsageError",
        "message": "no such command: reprot",
        "hint": "did you mean 'report'?",
    }


@pytest.mark.parametrize(
    ("raised", "kind", "code"),
    [
        (RuntimeError("a bug"), "InternalError", exit_codes.INTERNAL),
        (MemoryError(), "EnvironmentUnavailable", exit_codes.ENVIRONMENT),
        (KeyboardInterrupt(), "Interrupted", exit_codes.INTERRUPTED),
    ],
)
def test_other_endings(
    raised: BaseException,
    kind: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fail(args: object) -> int:
        raise raised

    from gpuprobe.cli.commands import hang

    monkeypatch.setattr(hang, "run", fail)
    assert main(["hang", ".", "--json"]) == code
    out, talk = capfd.readouterr()
    assert document(out)["error"]["kind"] == kind
    assert talk.startswith("gpuprobe: error: ")


def test_what_follows_the_script_is_the_scripts(capfd: pytest.CaptureFixture[str]) -> None:
    for command in (["run"], ["run", "--level", "trace"], ["estimate", "--"], ["explain", "--"]):
        assert main([*command, "missing.py", "--json"]) == exit_codes.USAGE
        assert capfd.readouterr().out == "", command


def test_programs_that_were_run(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = folder / "prints.py"
    program.write_text("import os\nprint('printed')\nos.write(1, b'written')\nraise OSError('x')\n")
    assert main(["run", "--json", "--quiet", str(program)]) == exit_codes.PROGRAM_FAILED
    out, talk = capfd.readouterr()
    found = document(out)
    assert found["failed"] == "OSError: x"
    assert found["recordings"] == [str(folder / "prints.gpuprobe")]
    assert found["hazards"] is None
    assert "printed" in talk
    assert "written" in talk
    assert main(["run", "--json", "--quiet", "--", "sh", "-c", "echo printed; exit 3"]) == 3
    out, talk = capfd.readouterr()
    assert document(out)["exit_code"] == 3
    assert document(out)["recordings"] == []
    assert "printed" in talk


def test_other_results(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recording = str(RECORDED / "cpu.gpuprobe")
    for words, name in (
        (["baseline", "update", recording, "--baseline", "b.json"], "written"),
        (["view"], "runs"),
        (["view", recording], "report"),
        (["top", "--demo", "8xh100"], "info"),
        (["cuda-torch", "status"], "cuda-torch"),
    ):
        main([*words, "--json"])
        found = document(capfd.readouterr().out)
        assert found["schema"] == f"gpuprobe.{name}"
        if name == "written":
            assert found["files"] == [str(folder / words[-1])]
            assert Path(words[-1]).is_file()
