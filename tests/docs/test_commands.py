"""Every command and every program in the documentation runs, and prints what the page shows."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import blocks
import pictures
import pytest
import repository

from gpuprobe.cli.commands import COMMANDS

# Everything on the pages that is not run, with the page and the reason that it gives.
SKIPPED = {
    *(
        ("docs/how-to/gate-memory-in-ci.md", command, "run by tests/step_time/test_scaling.py")
        for command in (
            "gpuprobe baseline update --gpu 4xa100-40gb -- torchrun --nproc-per-node 4 train.py",
            "gpuprobe check",
        )
    ),
    *(
        ("docs/how-to/predict-the-time-of-a-step.md", command, "it needs a GPU")
        for command in (
            "python benchmarks/gpu/calibrate.py --out my-card.json",
            "export GPUPROBE_STEP_TIMES=my-card.json",
        )
    ),
    *(
        (page, command, "run by tests/docs/test_pictures.py")
        for page, command in (
            ("README.md", pictures.COMMAND),
            ("docs/how-to/estimate-a-model.md", pictures.QUESTION),
        )
    ),
    ("README.md", "make demo", "run by test_make_demo, or would run itself"),
    ("README.md", "make test", "run by test_make_demo, or would run itself"),
    (
        "README.md",
        "source .venv/bin/activate && gpuprobe view demo.gpuprobe",
        "run by test_make_demo, or would run itself",
    ),
    (
        "README.md",
        f'pip install "gpuprobe[torch] @ git+https://github.com/{repository.name()}"',
        "it would download the repository",
    ),
    (
        "docs/how-to/install.md",
        f'pip install "gpuprobe[torch] @ git+https://github.com/{repository.name()}"',
        "it would download the repository",
    ),
    (
        "docs/how-to/install.md",
        f'uvx --from "git+https://github.com/{repository.name()}" gpuprobe info',
        "it would download the repository",
    ),
    *(
        ("CONTRIBUTING.md", command, "it would run tests, or install what they need")
        for command in (
            "make venv && source .venv/bin/activate  # a download of 3 GB; no GPU is needed",
            "pytest -n 0 tests/doctor/test_rules.py -k suggestion",
            "GPUPROBE_TEST_SIMULATED=1 pytest -n 0 -m simulated -p no:gpuprobe "
            "tests/hazards/test_order_guards.py",
            "make fix lint types contracts",
        )
    ),
    *(
        ("CONTRIBUTING.md", command, "it would start a debugger")
        for command in (
            'export CC="gcc -g" XDG_CACHE_HOME=$(mktemp -d)',
            'gdb -ex "set breakpoint pending on" -ex "break gpn_cudaMalloc" -ex run --args '
            "\\\n    python -m gpuprobe run --gpu t4 examples/train_gpt.py --steps 1",
        )
    ),
    (
        "docs/how-to/install.md",
        f"docker build --tag gpuprobe https://github.com/{repository.name()}.git",
        "it would download torch",
    ),
    (
        "docs/how-to/install.md",
        'docker run --rm -it -v "$PWD:/src" gpuprobe estimate --gpu t4 train.py',
        "it would download torch",
    ),
    (
        "docs/how-to/estimate-a-model.md",
        "pip install 'gpuprobe[models]'",
        "it would download packages",
    ),
    (
        "docs/how-to/estimate-a-model.md",
        "gpuprobe estimate --model llama-3.1-8b --gpu rtx-4090",
        "run with a smaller model by tests/native/test_models_natively.py",
    ),
    (
        "docs/how-to/run-on-a-simulated-gpu.md",
        "gpuprobe cuda-torch install",
        "it would download 0.5 GB",
    ),
    (
        "docs/how-to/use-from-an-agent.md",
        'pip install "gpuprobe[mcp]"',
        "it would download packages",
    ),
    (
        "docs/how-to/measure-scaling.md",
        "gpuprobe scale one.gpuprobe four.gpuprobe",
        "run by tests/analysis/test_scale.py",
    ),
    (
        "docs/how-to/predict-the-time-of-a-step.md",
        "gpuprobe run --gpu a100-40gb --level trace -o one.gpuprobe train.py",
        "run by tests/step_time/test_scaling.py",
    ),
    (
        "docs/how-to/predict-the-time-of-a-step.md",
        "gpuprobe run --gpu 4xa100-40gb --level trace -o four.gpuprobe -- torchrun "
        "--nproc-per-node 4 train.py",
        "run by tests/step_time/test_scaling.py",
    ),
    (
        "docs/how-to/predict-the-time-of-a-step.md",
        "gpuprobe scale one.gpuprobe four.gpuprobe",
        "run by tests/step_time/test_scaling.py",
    ),
    (
        "docs/how-to/predict-the-time-of-a-step.md",
        "gpuprobe estimate --gpu 8xa100-40gb --ranks 64 --network 22.5 -o many.gpuprobe train.py",
        "run by tests/step_time/test_scaling.py",
    ),
    (
        "docs/how-to/predict-the-time-of-a-step.md",
        "gpuprobe scale one.gpuprobe many.gpuprobe --network 22.5",
        "run by tests/step_time/test_scaling.py",
    ),
    (
        "docs/how-to/plan-a-vllm-deployment.md",
        "gpuprobe estimate --gpu h100-80gb -- vllm serve ./llama-3.1-8b --max-model-len 8192 "
        "--gpu-memory-utilization 0.95",
        "it needs vLLM and a build of torch with CUDA",
    ),
    (
        "docs/how-to/plan-a-vllm-deployment.md",
        "gpuprobe estimate --gpu 2xh100-80gb -- vllm serve ./llama-3.1-8b -tp 2 "
        "--max-model-len 8192 --gpu-memory-utilization 0.95",
        "it needs vLLM and a build of torch with CUDA",
    ),
    (
        "docs/how-to/plan-a-vllm-deployment.md",
        "gpuprobe estimate --gpu rtx3090 -- vllm serve ./llama-3.1-8b --max-model-len 8192 "
        "--gpu-memory-utilization 0.9",
        "it needs vLLM and a build of torch with CUDA",
    ),
    (
        "docs/how-to/plan-a-vllm-deployment.md",
        "gpuprobe fit --gpu h100-80gb --input-len 2000 --output-len 500 --suggest "
        "-- vllm serve ./llama-3.1-8b",
        "it needs vLLM and a build of torch with CUDA",
    ),
    ("docs/tutorial/first-recording.md", "pip install '.[torch]'", "it installs packages"),
}

OF_THE_PINNED_TORCH = {
    # By how many bytes a GPU is full, which depends on cuBLAS's workspaces.
    "docs/how-to/fix-an-out-of-memory-error.md",
}

LANGUAGES = {"console", "ipython", "python", "text", "json", "toml", "yaml", ""}

pytestmark = pytest.mark.xdist_group("docs")  # so that one process shares the recordings


def relative(page: Path) -> str:
    return page.relative_to(blocks.ROOT).as_posix()


def with_commands() -> list[Path]:
    return [page for page in blocks.pages() if any(map(blocks.is_run, blocks.blocks(page)))]


def pages_to_run() -> Iterator[Any]:
    for page in with_commands():
        marks = [pytest.mark.pinned_torch] * (relative(page) in OF_THE_PINNED_TORCH)
        yield pytest.param(page, id=relative(page), marks=marks)


@pytest.mark.parametrize("page", [*pages_to_run()])
def test_page(page: Path, runner: blocks.Runner) -> None:
    problems = [o.problem for o in blocks.run_page(page, runner) if o.problem]
    assert not problems, "\n\n".join(problems)


def test_what_is_skipped_is_listed() -> None:
    skipped = set()
    for page in blocks.pages():
        for block in blocks.blocks(page):
            if "skip" in block.directives:
                assert block.language == "console", block.where
                for command in block.commands():
                    skipped.add((relative(page), command.text, block.directives["skip"]))
    assert skipped == SKIPPED


def test_what_blocks_need() -> None:
    """What is not available here is skipped with a reason."""
    pages: dict[str, set[str]] = {}
    for page in blocks.pages():
        for block in blocks.blocks(page):
            if "needs" in block.directives:
                pages.setdefault(block.directives["needs"], set()).add(relative(page))
    assert set(pages) == {"snapshot"}
    reasons = [
        f"{', '.join(sorted(found))}: {why}"
        for need, found in sorted(pages.items())
        if (why := blocks.lacks(need))
    ]
    if reasons:
        pytest.skip("; ".join(reasons))


def options_of(command: str) -> set[str]:
    """The options that a command of gpuprobe has, and those of its subcommands."""
    parser = argparse.ArgumentParser()
    module = importlib.import_module(f"gpuprobe.cli.commands.{command.replace('-', '_')}")
    module.add_arguments(parser)
    parsers, found = [parser, *([module.update_parser()] if command == "baseline" else [])], set()
    for one in parsers:
        for action in one._actions:
            found.update(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                parsers.extend(action.choices.values())
    return found


def test_commands_in_sentences_exist() -> None:
    """What a page has in backticks is not run; its command and options are those of gpuprobe."""
    found = set()
    for page in blocks.pages():
        prose = page.read_text(encoding="utf-8")
        for block in blocks.blocks(page):
            prose = prose.replace("\n".join(block.lines), "")
        for span in re.findall(r"(?<!`)`(gpuprobe [a-z][^`]*)`", prose):
            found.add((relative(page), " ".join(span.split())))
    assert len(found) > 60
    for page, span in sorted(found):
        _, command, *words = span.partition(" -- ")[0].split()
        assert command in COMMANDS, f"{page}: {span}"
        options = {word.partition("=")[0].rstrip(",.") for word in words if word.startswith("--")}
        assert options <= options_of(command) | {"--help"}, f"{page}: {span}"


def test_the_readme_is_short() -> None:
    assert len((blocks.ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 100


def test_no_block_hides_a_command() -> None:
    """A block in a language that is not run must not hold commands."""
    for page in blocks.pages():
        for block in blocks.blocks(page):
            assert block.language in LANGUAGES, f"{block.where}: {block.language!r}"
            if block.language not in ("console", "python"):
                assert not any(line.startswith("$ ") for line in block.lines), block.where


def test_make_demo(tmp_path: Path, runner: blocks.Runner) -> None:
    """The recipe of ``make demo``, with this test's own environment in place of a fresh one."""
    cwd = runner.scratch("make-demo")
    for name in ("Makefile", "pyproject.toml"):
        (cwd / name).write_bytes((blocks.ROOT / name).read_bytes())
    venv = cwd / ".venv"
    (venv / "bin").mkdir(parents=True)
    for name in ("python", "gpuprobe"):
        (venv / "bin" / name).symlink_to(Path(sys.executable).parent / name)
    stamp = venv / ".stamp-demo"
    done = subprocess.run(
        ["make", f"--assume-old={stamp.relative_to(cwd)}", "demo"],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "step 7 loss" in done.stdout
    report = done.stdout.partition("gpuprobe report demo.gpuprobe\n")[2]
    assert "peak" in report.lower()
    assert "forward" in report or "backward" in report or "optimizer" in report
    assert "activation" in report
    assert (cwd / "demo.gpuprobe").is_dir()
    # How the README continues, in an activated environment: its folder comes first in PATH.
    for command in ("view", "report"):
        again = subprocess.run(
            ["gpuprobe", command, "demo.gpuprobe"],
            cwd=cwd,
            capture_output=True,
            text=True,
            env={**os.environ, "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"},
            timeout=120,
            check=False,
        )
        assert again.returncode == 0, again.stderr
        assert "activation" in again.stdout
