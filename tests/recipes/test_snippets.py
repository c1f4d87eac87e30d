"""What the how-to says to put into CI, read as each service does, and run as far as it can be.

The page's commands are followed as written by tests/docs, in a copy of the sample project.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import blocks
import pytest
import repository
import yaml
from recipe_project import copied, made

from gpuprobe.cli import main

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.xdist_group("recipes")  # so that one process shares the recordings

PAGE = ROOT / "docs" / "how-to" / "gate-memory-in-ci.md"


def snippet(name: str) -> Any:
    """The YAML that the page has for a file."""
    (block,) = (b for b in blocks.blocks(PAGE) if b.directives.get("file") == name)
    return yaml.safe_load("\n".join(block.lines))


def test_the_workflow_uses_the_action_as_it_is() -> None:
    # YAML 1.1 reads the key "on" as a truth value; GitHub does not.
    workflow = snippet(".github/workflows/memory.yml")
    assert set(workflow) == {"name", True, "permissions", "jobs"}
    (job,) = workflow["jobs"].values()
    assert job["runs-on"]
    uses = [step["uses"].partition("@")[0] for step in job["steps"] if "uses" in step]
    # torch is there before the action runs the script; the action brings gpuprobe.
    assert uses == ["actions/checkout", "actions/setup-python", repository.name()]
    assert job["steps"][-1]["uses"].startswith(f"{repository.name()}@")
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    assert set(job["steps"][-1].get("with", {})) <= set(action["inputs"])
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in set(action["inputs"]) - {"install"})


def test_the_hook_is_one_of_ours() -> None:
    (repo,) = snippet(".pre-commit-config.yaml")["repos"]
    ours = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert {hook["id"] for hook in repo["hooks"]} == {hook["id"] for hook in ours}


@pytest.mark.parametrize(("recording", "code"), [("small", 0), ("large", 1)])
def test_the_job_on_gitlab_leaves_the_reports_it_names(
    recording: str, code: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    job = snippet(".gitlab-ci.yml")["memory"]
    copied(made(tmp_path_factory), tmp_path)
    (tmp_path / "pyproject.toml").write_text(
        f'[tool.gpuprobe]\nrun = "{recording}.gpuprobe"\nbaseline = "memory.json"\n'
    )
    script = [line for line in job["script"] if not line.startswith("pip install ")]
    assert len(script) == 1
    done = subprocess.run(
        ["bash", "-e", "-c", "\n".join(script)],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "GITLAB_CI": "true",
            "CI_PROJECT_DIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stderr
    reports = job["artifacts"]["reports"]
    assert job["artifacts"]["when"] == "always"  # a job that fails is what they are for
    quality = json.loads((tmp_path / reports["codequality"]).read_text(encoding="utf-8"))
    assert bool(quality) == bool(code)
    assert all((tmp_path / entry["location"]["path"]).is_file() for entry in quality)
    suite = ET.parse(tmp_path / reports["junit"]).getroot()[0]
    assert (suite.get("failures") != "0") == bool(code)


def test_vs_codes_matcher_has_the_line_of_the_cause(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (task,) = snippet(".vscode/tasks.json")["tasks"]
    program, *arguments = task["command"].split()
    assert program == "gpuprobe"
    copied(made(tmp_path_factory), tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "--baseline", "memory.json", "large.gpuprobe"]) == 1
    pattern = task["problemMatcher"]["pattern"]
    lines = capsys.readouterr().out.splitlines()
    (match,) = filter(None, (re.fullmatch(pattern["regexp"], line) for line in lines))
    assert match[pattern["file"]] == "train.py"
    assert int(match[pattern["line"]]) > 0
    assert match[pattern["message"]].startswith("first cause: ")
