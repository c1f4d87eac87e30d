"""What helps on the command line: ``help``, near misses, lists of names, completion."""

from __future__ import annotations

import pkgutil
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpuprobe.cli import commands as commands_package
from gpuprobe.cli import main
from gpuprobe.cli.commands import COMMANDS, GROUPS
from gpuprobe.cli.parser import command_parser, own_options_first
from gpuprobe.errors import UsageError


def test_help_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)
    with pytest.raises(SystemExit) as ended:
        main(["help", "report"])
    assert ended.value.code == 0
    assert "usage: gpuprobe report" in capsys.readouterr().out


def test_commands_are_listed_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    for group, commands in GROUPS.items():
        below = out.partition(f"\n{group}:\n")[2].partition("\n\n")[0]
        assert [line.split()[0] for line in below.splitlines()] == list(commands)
    modules = {module.name for module in pkgutil.iter_modules(commands_package.__path__)}
    assert modules == {name.replace("-", "_") for name in COMMANDS}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_three_commands_that_are_valid(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([name, "--help"])
    out = capsys.readouterr().out
    module, parser = command_parser(name)
    assert len(module.EXAMPLES) == 3
    shown = "".join(f"  {command}\n      {text}\n" for command, text in module.EXAMPLES.items())
    assert out.partition("\nexamples:\n")[2] == shown
    for command in module.EXAMPLES:
        words = shlex.split(command)
        at = words.index("gpuprobe")
        assert words[at + 1] == name
        given = words[at + 2 :]
        if getattr(module, "OPTIONS_AFTER_SCRIPT", False):
            given = own_options_first(parser, given)
        parsed = parser.parse_args(given)
        if name == "baseline":  # whose options are parsed when it runs
            assert parsed.words[0] == "update"


def test_descriptions_are_wrapped_by_paragraph(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit):
        main(["info", "--help"])
    out = capsys.readouterr().out
    assert "pycuda.\n\nBy default NVML" in out
    assert all(len(line) <= 60 for line in out.splitlines())


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
    assert main(arguments) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["estimate", "--bogus", "x.py"], ["export", "--port", "1"], ["run", "--steps", "3", "x.py"]],
)
def test_an_option_that_is_like_no_other_gets_no_guess(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert "unrecognized arguments" in shown
    assert "did you mean" not in shown


def test_an_option_like_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--zzzzzz"]) == 2
    assert "gpuprobe info --help" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["estimate", "--gpu"], ["fit", "--gpu"], ["run", "--gpu"], ["check", "--gpu"]],
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


def fish_script() -> str:
    return subprocess.run(
        [sys.executable, "-m", "gpuprobe", "completion", "fish"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_fish_has_every_command_and_option() -> None:
    lines = fish_script().splitlines()
    for name in COMMANDS:
        _, parser = command_parser(name)
        own = [line for line in lines if f"_shtab_gpuprobe_using {name}'" in line]
        words = {word for line in own for word in zip(line.split(), line.split()[1:], strict=False)}
        for option in parser._option_string_actions:
            flag = "-l" if option.startswith("--") else "-s"
            assert (flag, option.lstrip("-")) in words, f"{name} {option}"
        assert any(name in line.replace('"', " ").replace("'", " ").split() for line in lines)


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(tmp_path: Path) -> None:
    path = tmp_path / "gpuprobe.fish"
    path.write_text(fish_script(), encoding="utf-8")

    def completed_by_fish(line: str) -> set[str]:
        done = subprocess.run(
            ["fish", "--no-config", "-c", f"source {path}; complete -C '{line}'"],
            capture_output=True,
            text=True,
            check=True,
        )
        return {row.partition("\t")[0] for row in done.stdout.splitlines()}

    assert completed_by_fish("gpuprobe es") == {"estimate"}
    assert completed_by_fish("gpuprobe run --level ") == {"counters", "trace"}
    assert {"a100-40gb", "a100-80gb"} <= completed_by_fish("gpuprobe estimate --gpu a100")
    assert {"--work", "--json"} <= completed_by_fish("gpuprobe scale --")


def test_zsh_completes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


@pytest.mark.parametrize("name", ["check", "run"])
def test_an_option_has_one_spelling(name: str) -> None:
    """A script's ``--n`` is no abbreviation of ``--no-hazards``."""
    _, parser = command_parser(name)
    given = parser.parse_args(["train.py", "--n", "32", "--le", "1"])
    assert given.args == ["--n", "32", "--le", "1"]
    with pytest.raises(UsageError, match="unrecognized arguments"):
        parser.parse_args(["--no-haz" if name == "check" else "--lev=trace", "train.py"])
