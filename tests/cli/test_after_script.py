"""Options of gpuprobe behind the script, and options of the script's."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from gpuprobe.cli.after_script import sort_options
from gpuprobe.cli.commands import estimate
from gpuprobe.cli.parser import own_options_first


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    estimate.add_arguments(made)
    return made


@pytest.mark.parametrize(
    ("given", "gpu", "steps", "script", "rest"),
    [
        ("train.py --gpu t4 --steps 2", "t4", 2, "train.py", []),
        ("--gpu t4 train.py --steps=2 --lr 0.1", "t4", 2, "train.py", ["--lr", "0.1"]),
        ("train.py data --gpu=t4 more", "t4", 3, "train.py", ["data", "more"]),
        ("train.py --gpu t4 -- --steps 9", "t4", 3, "train.py", ["--steps", "9"]),
        ("train.py -- --gpu t4 -- x", "h100-80gb", 3, "train.py", ["--gpu", "t4", "--", "x"]),
        ("train.py -m fast", "h100-80gb", 3, "train.py", ["-m", "fast"]),
        ("train.py --json-file x", "h100-80gb", 3, "train.py", ["--json-file", "x"]),
    ],
)
def test_ours_wherever_they_stand(
    parser: argparse.ArgumentParser,
    given: str,
    gpu: str,
    steps: int,
    script: str,
    rest: list[str],
) -> None:
    args = parser.parse_args(sort_options(parser, given.split()).arguments)
    assert (args.gpu, args.steps, args.script, args.args) == (gpu, steps, script, rest)


def test_a_short_option_with_a_value(parser: argparse.ArgumentParser, tmp_path: Path) -> None:
    """Left to the script, it would have no effect, and nobody would notice."""
    args = parser.parse_args(sort_options(parser, ["train.py", "-o", "a.gpuprobe", "-v"]).arguments)
    assert (args.output, args.args) == ("a.gpuprobe", ["-v"])
    script = tmp_path / "train.py"
    script.write_text("parser.add_argument('-o')")
    found = sort_options(parser, [str(script), "-o", "model.pt"])
    args = parser.parse_args(found.arguments)
    assert (args.output, args.args) == (None, ["-o", "model.pt"])
    assert found.scripts == ("-o",)


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        ("print(1)", True),
        ("parser.add_argument('-v')", False),
        ("unittest.main()", False),
        ("import fire", False),
        ("", False),
    ],
)
def test_verbose_is_the_scripts_if_that_may_have_it(
    parser: argparse.ArgumentParser, tmp_path: Path, text: str, ours: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    args = parser.parse_args(sort_options(parser, [str(script), "-v"]).arguments)
    assert (args.verbose, args.args) == (ours, [] if ours else ["-v"])


def test_a_module(parser: argparse.ArgumentParser) -> None:
    found = sort_options(parser, ["--json", "-m", "package.train", "--gpu", "t4", "--lr", "1"])
    args = parser.parse_args(found.arguments)
    assert args.json
    assert args.gpu == "t4"
    assert args.module == ["package.train", "--lr", "1"]
    assert found.ambiguous == ("--gpu",)


@pytest.mark.parametrize(
    ("given", "ambiguous"),
    [
        ("train.py --gpu t4", ()),
        ("--steps 2 -m train --lr 1", ()),
        ("-m train --lr 1 --steps 2", ("--steps",)),
        ("-m train --gpu t4 -- --steps 2", ()),
    ],
)
def test_what_may_have_been_meant_for_the_script(
    parser: argparse.ArgumentParser, given: str, ambiguous: tuple[str, ...]
) -> None:
    assert sort_options(parser, given.split()).ambiguous == ambiguous


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ("parser.add_argument('--steps', type=int)", True),
        ("from options import parse", True),
        ("import tyro\ndef main(steps: int): ...", True),
        ("parser.add_argument('--steps-per-epoch')", False),
        ("for step in range(steps): ...", False),
    ],
)
def test_an_option_that_the_script_has_is_the_scripts(
    parser: argparse.ArgumentParser,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    own: bool,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    (tmp_path / "options.py").write_text("parser.add_argument('--steps')")
    given = [str(script), "--lr", "1", "--steps", "5", "--gpu", "t4"]
    args = parser.parse_args(own_options_first(parser, given))
    assert args.gpu == "t4"
    assert args.steps == (3 if own else 5)
    assert args.args == (["--lr", "1", "--steps", "5"] if own else ["--lr", "1"])
    noted = "--steps after the script: the script's own option"
    assert (noted in capsys.readouterr().err) == own
