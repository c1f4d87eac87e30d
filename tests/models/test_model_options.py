"""``--model`` on the command line: what goes with it, and what belongs to a script."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

from gpuprobe.cli import main
from gpuprobe.cli.after_script import sort_options
from gpuprobe.cli.parser import command_parser

SMALL = ["--gpu", "t4"]


@pytest.mark.parametrize("command", ["estimate", "fit"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch-size", "4", "train.py"], "--batch-size needs --model"),
        (["--checkpointing", "train.py"], "--checkpointing needs --model"),
        (["--write-script", "x.py", "train.py"], "--write-script needs --model"),
        (["--model", "gpt2", "train.py"], "both --model and a script: train.py"),
        (["--model", "gpt2", "--lora-rank", "4"], "--lora-rank needs --method lora"),
        (["--model", "gpt2", "--new-tokens", "4"], "--new-tokens needs --inference"),
        (["--model", "gpt2", "--sharding", "ddp"], "--sharding ddp needs --ranks"),
        (["--model", "gpt2", "--inference", "--checkpointing"], "is for training"),
        (["--model", "gpt3"], "unknown model 'gpt3'"),
    ],
)
def test_options_that_do_not_go_together(
    command: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *words]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert "Traceback" not in output.err


def test_several_numbers_of_ranks_need_several_scripts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["fit", "--model", "gpt2", "--ranks", "2,4"]) == 2
    assert "one number of ranks" in capsys.readouterr().err


def test_without_transformers_the_extra_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpuprobe.planning.models import run

    monkeypatch.setattr(run, "find_spec", lambda name: None)
    assert main(["estimate", "--model", "gpt2", *SMALL]) == 3
    assert "pip install 'gpuprobe[models]'" in capsys.readouterr().err


def test_the_known_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["estimate", "--model", "list"])
    assert not caught.value.code
    output = capsys.readouterr().out
    assert "llama-3.1-8b" in output
    assert "8,030,261,248 parameters" in output


def test_a_script_keeps_its_own_options() -> None:
    """``--batch-size`` after a script was always the script's."""
    parser = command_parser("estimate")[1]
    words = ["train.py", "--batch-size", "8", "--gpu", "t4", "--model", "resnet"]
    found = sort_options(parser, words)
    assert found.arguments == ["--gpu", "t4", "train.py", "--batch-size", "8", "--model", "resnet"]


def test_an_existing_script_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpuprobe.planning.models import run

    monkeypatch.setattr(run, "find_spec", lambda name: object())
    path = tmp_path / "train.py"
    path.write_text("mine", encoding="utf-8")
    assert main(["estimate", "--model", "gpt2", "--write-script", str(path)]) == 2
    assert f"{path} exists already" in capsys.readouterr().err
    assert path.read_text(encoding="utf-8") == "mine"
    missing = tmp_path / "none" / "train.py"
    assert main(["estimate", "--model", "gpt2", "--write-script", str(missing)]) == 3
    assert "the script cannot be written" in capsys.readouterr().err


def test_transformers_logs_no_warnings_about_what_gpuprobe_wrote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gpuprobe.api.models import model_script
    from gpuprobe.planning.models import run

    monkeypatch.setattr(run, "find_spec", lambda name: object())
    name = "TRANSFORMERS_VERBOSITY"
    monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    with model_script("gpt2"):
        assert os.environ[name] == "error"
        with warnings.catch_warnings(record=True) as shown:
            warnings.warn("PEFT reads a deprecated attribute", FutureWarning, stacklevel=1)
            assert not shown
        assert os.environ["PYTHONWARNINGS"] == "ignore"
    assert not {name, "PYTHONWARNINGS"} & set(os.environ)
    monkeypatch.setenv(name, "info")  # the user's choice
    with model_script("gpt2"):
        assert os.environ[name] == "info"
