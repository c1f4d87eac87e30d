"""What makes a release: its workflows, notes, version, recipes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml

from gpuprobe import __version__
from gpuprobe.cli.commands import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
sys.path.insert(0, str(ROOT / "packaging"))

import check_wheel  # noqa: E402 - a folder of scripts, which is not on the path
import install_torch  # noqa: E402
import release_notes  # noqa: E402
from hatch_readme import with_addresses  # noqa: E402


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_what_a_workflow_runs_exists(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text("utf-8"))
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for step in steps(workflow):
        script = step.get("run", "")
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        assert "${{" not in script  # what a pull request is called must not become code
        assert set(re.findall(r"\bmake ([\w-]+)", script)) <= targets
        for file in re.findall(r"(?:python3?|cp -r) ([\w./-]*/[\w./-]+)", script):
            assert (ROOT / file).exists(), file
        for command in re.findall(r"\bgpuprobe ([a-z]+)\b", script):
            assert command in COMMANDS
        if step.get("uses", "./") != "./":
            # A tag can be moved, and what it names then has this workflow's rights.
            assert re.search(r"@[0-9a-f]{40}$", step["uses"])
        elif "uses" in step:
            assert set(step.get("with", {})) <= set(
                yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))["inputs"]
            )
    for job in workflow["jobs"].values():
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= set(workflow["jobs"])
    assert workflow["permissions"] == {"contents": "read"}  # more for single jobs


def test_only_a_tag_is_published_after_its_wheels_were_tried() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text("utf-8"))
    jobs = workflow["jobs"]
    assert jobs["notes"]["if"] == "github.ref_type == 'tag'"  # what needs it is skipped with it
    assert {"notes", "sdist", "wheels"} == set(jobs["publish"]["needs"])
    tried = [step.get("run", "") for step in jobs["wheels"]["steps"]]
    assert "python packaging/check_wheel.py dist/*.whl" in tried
    writers = {name for name, job in jobs.items() if "write" in job.get("permissions", {}).values()}

    def needed(name: str) -> set[str]:
        needs = jobs[name].get("needs", [])
        direct = {needs} if isinstance(needs, str) else set(needs)
        return direct.union(*map(needed, direct))

    assert writers == {"publish", "release", "image", "images"}
    assert all("notes" in needed(name) for name in writers)


def test_issue_forms_have_what_github_needs() -> None:
    forms = [
        yaml.safe_load(path.read_text("utf-8"))
        for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")
        if path.name != "config.yml"
    ]
    assert len(forms) == 3
    for form in forms:
        assert {"name", "description", "body"} <= set(form)
        ids = [field["id"] for field in form["body"]]
        assert len(ids) == len(set(ids))
        assert any(field.get("validations", {}).get("required") for field in form["body"])


def changelog(root: Path, day: str) -> None:
    (root / "gpuprobe").mkdir()
    (root / "gpuprobe" / "_version.py").write_text('__version__ = "2.0.0"\n')
    (root / "CHANGELOG.md").write_text(
        f"# Changelog\n\n## [2.0.0] - {day}\n\n### Added\n\n* New.\n\n"
        "## [1.0.0] - 2025-01-01\n\nOld.\n"
    )


def test_notes_are_those_of_the_version_that_is_tagged(tmp_path: Path) -> None:
    changelog(tmp_path, "2026-02-03")
    assert release_notes.notes("v2.0.0", tmp_path) == "### Added\n\n* New.\n"
    with pytest.raises(ValueError, match=r"the tag is v1\.0\.0"):
        release_notes.notes("v1.0.0", tmp_path)


def test_what_has_no_day_is_not_released(tmp_path: Path) -> None:
    changelog(tmp_path, "unreleased")
    with pytest.raises(ValueError, match="no day of its release"):
        release_notes.notes("v2.0.0", tmp_path)


def test_the_version_is_in_one_place_and_its_copies_follow() -> None:
    assert release_notes.version() == __version__
    headings = re.findall(
        r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE
    )
    assert headings[0] in (__version__, "Unreleased")
    assert __version__ in headings
    recipe = yaml.safe_load((ROOT / "packaging/conda/recipe.yaml").read_text("utf-8"))
    assert recipe["context"]["version"] == __version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert "version" not in citation
    # What the action and the hook are used by, which a release moves.
    page = (ROOT / "docs/how-to/gate-memory-in-ci.md").read_text("utf-8")
    assert set(re.findall(r"@(v\S+)|rev: (v\S+)", page)) >= {
        (f"v{__version__.split('.')[0]}", ""),
        ("", f"v{__version__.split('.')[0]}"),
    }


def test_the_conda_recipe_requires_what_the_package_does() -> None:
    recipe = yaml.safe_load((ROOT / "packaging/conda/recipe.yaml").read_text("utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needed = {text.replace(" ", "") for text in recipe["requirements"]["run"]}
    assert needed == {*project["dependencies"], f"python{project['requires-python']}"}
    (entry,) = recipe["build"]["python"]["entry_points"]
    assert entry == f"gpuprobe = {project['scripts']['gpuprobe']}"


def test_torch_comes_without_the_packages_of_nvidia() -> None:
    assert install_torch.pinned().startswith("torch==")
    metadata = (
        "Name: torch\n"
        "Requires-Dist: filelock\n"
        'Requires-Dist: nvidia-cudnn-cu13==9.20.0.48; platform_system == "Linux"\n'
        "Requires-Dist: cuda-bindings<14\n"
        "\n"
        "Requires-Dist: nvidia-cudnn-cu13==9.20.0.48\n"
    )
    changed = install_torch.optional(metadata)
    assert changed == (
        "Name: torch\n"
        "Requires-Dist: filelock\n"
        "Requires-Dist: nvidia-cudnn-cu13==9.20.0.48 ; "
        '(platform_system == "Linux") and extra == "nvidia"\n'
        'Requires-Dist: cuda-bindings<14 ; extra == "nvidia"\n'
        "Provides-Extra: nvidia\n"
        "\n"
        "Requires-Dist: nvidia-cudnn-cu13==9.20.0.48\n"
    )
    assert install_torch.optional(changed) == changed
    assert install_torch.others(["filelock", "nvidia-nccl-cu13==2.29.7", "cuda-toolkit"]) == [
        "filelock"
    ]


def test_the_container_copies_what_its_image_is_built_from() -> None:
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    assert all((ROOT / name).exists() for name in kept)
    build = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]
    assert "*" in lines
    assert {
        Path(build["metadata"]["hooks"]["custom"]["path"]).parts[0],
        *build["build"]["targets"]["wheel"]["packages"],
        "pyproject.toml",
        "README.md",
        "LICENSE",
    } <= kept


def test_addresses_of_the_page_of_a_package_are_whole() -> None:
    page = with_addresses(
        "![a picture](docs/a.svg) [one\nlink](docs/b.md#c) [x](https://d) [y](#e)", "https://r"
    )
    assert page == (
        "![a picture](https://r/raw/main/docs/a.svg) [one\nlink](https://r/blob/main/docs/b.md#c) "
        "[x](https://d) [y](#e)"
    )


def test_a_wheel_that_fails_is_not_passed(tmp_path: Path) -> None:
    """Its checks notice a command that prints something else."""
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nprint('gpuprobe 9.9')\n")
    python.chmod(0o755)
    with pytest.raises(RuntimeError, match="gpuprobe info: exit code 0, expected 'GPU'"):
        check_wheel.run_commands(python, tmp_path)
