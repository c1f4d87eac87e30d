"""The GitHub Action and the pre-commit hook, read as their services do, and run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from recipe_project import copied, made

pytestmark = pytest.mark.xdist_group("recipes")

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def action() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def test_the_action_has_what_github_needs(action: dict[str, Any]) -> None:
    assert {"name", "description", "inputs", "outputs", "runs", "branding"} == set(action)
    assert action["runs"]["using"] == "composite"
    for given in action["inputs"].values():
        # Inputs of an action are texts; a default that YAML reads as something else is not.
        assert set(given) == {"description", "default"}
        assert isinstance(given["default"], str)
    for step in action["runs"]["steps"]:
        assert step["shell"] == "bash"  # composite actions have no default
        # What a caller gives must not become part of the script.
        assert "${{" not in step["run"]
    used = set(re.findall(r"inputs\.([\w-]+)", (ROOT / "action.yml").read_text(encoding="utf-8")))
    assert used == set(action["inputs"])
    ids = {step["id"] for step in action["runs"]["steps"] if "id" in step}
    for output in action["outputs"].values():
        match = re.fullmatch(r"\$\{\{ steps\.(\w+)\.outputs\.([\w-]+) \}\}", output["value"])
        assert match is not None
        assert match[1] in ids
        script = action["runs"]["steps"][-1]["run"]
        assert f'echo "{match[2]}=' in script


class Job:
    """One use of the action's last step, as GitHub's runner would run it."""

    def __init__(self, action: dict[str, Any], workspace: Path, **inputs: str) -> None:
        given = {name: spec["default"] for name, spec in action["inputs"].items()}
        unknown = set(inputs) - {name.replace("-", "_") for name in given}
        assert not unknown
        given.update({name.replace("_", "-"): value for name, value in inputs.items()})

        def filled(text: str) -> str:
            return re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda match: given[match[1]], text)

        (step,) = (step for step in action["runs"]["steps"] if step.get("id") == "check")
        runner = workspace.parent / f"{workspace.name}-runner"
        runner.mkdir(exist_ok=True)
        script = runner / "step.sh"
        script.write_text(step["run"], encoding="utf-8")
        files = {name: runner / name for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
        for file in files.values():
            file.write_text("earlier\n", encoding="utf-8")
        done = subprocess.run(
            # What "shell: bash" means to the runner.
            ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", str(script)],
            cwd=workspace / filled(step["working-directory"]),
            env={
                **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
                "PATH": os.pathsep.join([str(BIN), os.environ["PATH"]]),
                "GITHUB_ACTIONS": "true",
                "GITHUB_WORKSPACE": str(workspace),
                "RUNNER_TEMP": str(runner),
                **{name: str(file) for name, file in files.items()},
                **{name: filled(value) for name, value in step["env"].items()},
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        self.code = done.returncode
        self.log = done.stdout + done.stderr
        self.summary = files["GITHUB_STEP_SUMMARY"].read_text(encoding="utf-8")
        lines = files["GITHUB_OUTPUT"].read_text(encoding="utf-8").splitlines()[1:]
        self.outputs = dict(line.split("=", 1) for line in lines)


@pytest.fixture
def workspace(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path / "checkout" / "sub"
    folder.mkdir(parents=True)
    copied(made(tmp_path_factory), folder)
    return folder.parent


def test_the_action_passes_what_is_within_the_baseline(
    action: dict[str, Any], workspace: Path
) -> None:
    (workspace / "sub" / "pyproject.toml").write_text(
        '[tool.gpuprobe]\nrun = "small.gpuprobe"\nbaseline = "memory.json"\n'
    )
    job = Job(action, workspace, working_directory="sub")
    assert job.code == 0, job.log
    assert "::error" not in job.log
    head, _, report = job.summary.partition("\n")
    assert head == "earlier"
    assert report.startswith("### ✅ gpuprobe: memory is within the baseline")
    assert report in job.log
    assert job.outputs["exit-code"] == "0"
    assert Path(job.outputs["report"]).read_text(encoding="utf-8") == report


def test_the_action_fails_with_a_summary_and_annotations(
    action: dict[str, Any], workspace: Path
) -> None:
    job = Job(
        action,
        workspace,
        working_directory="sub",
        run="large.gpuprobe",
        baseline="memory.json",
        options='--tolerance "steady_allocated=2%, 1GiB"\n  --junit found.xml',
    )
    assert job.code == 1
    assert job.outputs["exit-code"] == "1"
    assert "### ❌ gpuprobe" in job.summary
    found = re.findall(
        r"^::error file=sub/train\.py,line=\d+,title=gpuprobe GPM-(\w+)", job.log, re.M
    )
    assert "peak_allocated" in found
    assert "steady_allocated" not in found
    # What a reader of the checks sees first names the line.
    (notice,) = re.findall(r"^::notice title=gpuprobe check failed::(.*)$", job.log, re.M)
    assert re.search(r"First cause.* at train\.py:\d+ in <module>", notice)
    assert (workspace / "sub" / "found.xml").exists()


def test_a_comment_needs_a_pull_request(
    action: dict[str, Any], workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_REF", "refs/heads/main")
    inputs = {"run": "small.gpuprobe", "baseline": "memory.json", "working_directory": "sub"}
    job = Job(action, workspace, comment="true", **inputs)
    assert job.code == 2
    assert "is for no pull request" in job.log
    assert Job(action, workspace, **inputs).code == 0


def test_inputs_are_no_code(action: dict[str, Any], workspace: Path) -> None:
    hostile = "x.gpuprobe; touch one $(touch two) `touch three` && touch four | tee five > six *"
    before = sorted(path.name for path in (workspace / "sub").iterdir())
    job = Job(
        action,
        workspace,
        working_directory="sub",
        run=hostile,
        baseline='memory.json"; touch seven; "$(touch eight)',
        gpu="$(touch nine)",
    )
    assert job.code == 2
    assert "no baseline at" in job.log
    assert job.outputs["exit-code"] == "2"
    # What went wrong is in the log; the summary says where to look.
    assert "exit code 2; the log says why" in job.summary
    assert sorted(path.name for path in (workspace / "sub").iterdir()) == before


def test_the_action_installs_this_very_version(action: dict[str, Any]) -> None:
    install = action["runs"]["steps"][0]
    assert install["if"] == "${{ inputs.install == 'true' }}"
    assert install["run"].endswith('"$GITHUB_ACTION_PATH"')
    # ... which is the root of the repository, where a package can be built from.
    assert (ROOT / "pyproject.toml").is_file()


def test_the_hook_has_what_pre_commit_needs() -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert {"id", "name", "entry", "language"} <= set(hook)
    assert hook["language"] == "system"
    assert hook["pass_filenames"] is False
    assert set(hook["stages"]) <= {"pre-push", "manual"}


@pytest.mark.parametrize(("recording", "code"), [("small", 0), ("large", 1)])
def test_the_hook_stops_a_push(recording: str, code: int, workspace: Path) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    (workspace / "sub" / "pyproject.toml").write_text(
        f'[tool.gpuprobe]\nrun = "{recording}.gpuprobe"\nbaseline = "memory.json"\n'
    )
    done = subprocess.run(
        [*hook["entry"].split()],
        cwd=workspace / "sub",
        env={**os.environ, "PATH": os.pathsep.join([str(BIN), os.environ["PATH"]])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stderr
