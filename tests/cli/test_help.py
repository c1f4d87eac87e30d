"""What helps on the command line: ``help``, near misses, lists of names, completion."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpuprobe.cli import main
from gpuprobe.cli.commands import COMMANDS


def test_help_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)
    with pytest.raises(SystemExit) as ended:
        main(["help", "report"])
    assert ended.value.code == 0
    assert "usage: gpuprobe report" in capsys.readouterr().out


def test_help_on_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "reprot"]) == 2
    assert "did you mean 'report'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["run", "--levl", "trace", "x.py"], "--level"),
        (["report", "--htlm=x.html", "x"], "--html"),
        (["estimate", "--rnks", "2", "x.py"], "--ranks"),
    ],
)
def test_the_option_that_was_meant(
    arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


def test_an_option_like_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["info", "--zzzzzz"])
    assert "gpuprobe info --help" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["estimate", "--gpu"], ["fit", "--gpu"], ["run", "--gpu"], ["check", "--virtual"]],
)
def test_gpus_are_listed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "list"])
    assert not ended.value.code
    rows = capsys.readouterr().out.splitlines()
    assert any(row.split()[:2] == ["h100-80gb", "79.2"] for row in rows), rows


def completed(words: list[str]) -> set[str]:
    """What bash would offer for the last of ``words``."""
    script = subprocess.run(
        [sys.executable, "-m", "gpuprobe", "completion", "bash"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    given = " ".join(f"'{word}'" for word in words)
    script += f"\nCOMP_WORDS=({given}); COMP_CWORD={len(words) - 1}; _shtab_gpuprobe\n"
    script += 'printf "%s\\n" "${COMPREPLY[@]}"\n'
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_bash_completes() -> None:
    assert completed(["gpuprobe", "es"]) == {"estimate"}
    assert completed(["gpuprobe", "run", "--level", ""]) == {"counters", "trace"}
    assert {"a100-40gb", "a100-80gb"} <= completed(["gpuprobe", "estimate", "--gpu", "a100"])


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)
