"""Causes of a failed check that were tried: runs with parts of the change reverted."""

from __future__ import annotations

import html
import importlib.abc
import importlib.util
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from warm_python import gpuprobe, shared

pytestmark = pytest.mark.slow

TRAIN = """\
import json
from pathlib import Path

import torch

from parts.model import evaluate, make

SETTINGS = json.loads(Path(__file__).resolve().with_name("settings.json").read_text())
RATE = 0.1


def main():
    model = make(SETTINGS["width"])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    x = torch.zeros(1024, SETTINGS["width"], device="cuda")
    for _ in range(3):
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    evaluate(model, x)
    Path("log.txt").write_text("done")


main()
"""
MODEL = """\
import torch
from torch import nn


def make(width):
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).cuda()


@torch.no_grad()
def evaluate(model, x):
    kept = x
    for _ in range(4):
        kept = model(kept).relu()
    return kept.sum()
"""
SETTINGS = '{\n  "comment": "how large",\n  "width": 512\n}\n'


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as it is, with its baselines."""
    folder = tmp_path_factory.mktemp("project")
    written(folder)
    update = ("baseline", "update", "--gpu", "a100-40gb")
    done = gpuprobe(*update, "--baseline", "memory.json", "train.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def written(folder: Path) -> None:
    (folder / "parts").mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "parts" / "__init__.py").write_text("")
    (folder / "parts" / "model.py").write_text(MODEL)
    (folder / "settings.json").write_text(SETTINGS)


_NUMBERS = itertools.count()


@pytest.fixture
def project(measured: Path, tmp_path: Path) -> Path:
    """A copy of it, elsewhere and in no repository."""
    folder = tmp_path / f"project-{os.getpid()}-{next(_NUMBERS)}"
    folder.mkdir()
    written(folder)
    (folder / "memory.json").write_bytes((measured / "memory.json").read_bytes())
    return folder


def edit(folder: Path, file: str, *edits: tuple[str, str]) -> None:
    text = (folder / file).read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    (folder / file).write_text(text)


def contents(folder: Path) -> dict[Path, bytes]:
    """All files of a project but Python's caches, which any run may write."""
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def checked(folder: Path, *options: str) -> dict[str, Any]:
    """The document of a check that fails, after which nothing has changed in the project."""
    before = contents(folder)
    done = gpuprobe("check", "--baseline", "memory.json", "--json", *options, cwd=folder)
    assert done.returncode == 1, done.stderr
    after = contents(folder)
    after.pop(folder / "log.txt")
    before.pop(folder / "log.txt", None)
    assert after == before
    assert not left_behind(folder)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def left_behind(project: Path) -> list[str]:
    """The folders of trials that are there, of this project."""
    found = Path(tempfile.gettempdir()).glob(f"gpuprobe-trials-{project.name}-*")
    return [path.name for path in found]


def first(document: dict[str, Any]) -> dict[str, Any]:
    """The first cause of the first metric that is above."""
    metric = next(row for row in (*document["metrics"], *document["phases"]) if row["regressed"])
    cause: dict[str, Any] = metric["causes"][0]
    assert document["cause"] == cause["text"]
    return {**cause, "delta": metric["delta"], "unexplained": metric["unexplained"]}


HARMLESS = ("RATE = 0.1", "# how fast\nRATE = 0.2")


def test_a_removed_decorator_is_the_cause_in_every_format(project: Path) -> None:
    """Also as GitHub's action runs it, with all files that a check can write."""
    edit(project, "parts/model.py", ("@torch.no_grad()\n", ""))
    edit(project, "train.py", HARMLESS)
    cause = "reverting parts/model.py:9 in evaluate (removed @torch.no_grad())"
    files = [project.parent / f"report.{form}" for form in ("sarif", "xml")]
    options = [
        part
        for flag, file in zip(("--sarif", "--junit"), files, strict=True)
        for part in (flag, str(file))
    ]
    done = gpuprobe(
        *("check", "--baseline", "memory.json", "--markdown", "--annotations", "github"),
        *options,
        cwd=project,
    )
    assert done.returncode == 1, done.stderr
    sarif = json.loads(files[0].read_text())["runs"][0]["results"][0]
    where = sarif["locations"][0]["physicalLocation"]
    assert where["artifactLocation"]["uri"] == "parts/model.py"
    assert where["region"]["startLine"] == 9
    told = [done.stdout, done.stderr, *(file.read_text() for file in files)]
    for name, text in zip(("markdown", "github", "sarif", "junit"), told, strict=True):
        plain = re.sub(r"[\s`'\\\\]", "", html.unescape(text))
        assert re.sub(r"[\s`]", "", cause) in plain, name
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("::error"))
    assert "file=parts/model.py,line=9" in line
    # What the action says in the job's log.
    first_line = next(line for line in done.stdout.splitlines() if "first cause" in line.lower())
    assert "parts/model.py:9" in first_line


def test_what_changed_because_torch_changed_is_told_apart(project: Path) -> None:
    """The baseline is of another torch, in which the same program took 3 MiB less."""
    baseline = project / "memory.json"
    document = json.loads(baseline.read_text())
    assert document["environment"]["torch"] != "2.6"
    document["environment"]["torch"] = "2.6"
    for row in (document["metrics"]["peak_allocated"], *document["phases"].values()):
        row["bytes"] -= 3 << 20
        del row["text"]
    baseline.write_text(json.dumps(document))
    done = gpuprobe("check", "--baseline", "memory.json", cwd=project)
    assert done.returncode == 2
    assert "torch: '2.6' in the baseline" in done.stdout

    # Nothing else has changed.
    document = checked(project, "--accept-environment")
    assert document["cause"].startswith("torch '2.6' in the baseline, ")
    assert (
        "3.00 of 3.00 MiB remain with every change of the program reverted" in (document["cause"])
    )
    # And with a change, each has its share.
    edit(project, "train.py", ("torch.zeros(1024,", "torch.zeros(2048,"), HARMLESS)
    document = checked(project, "--accept-environment")
    metric = next(row for row in document["metrics"] if row["name"] == "peak_allocated")
    shares = {cause["place"]: cause["saved"] for cause in metric["causes"] if cause["saved"]}
    assert shares[""] == 3 << 20
    (place,) = (place for place in shares if place)
    assert place.startswith("train.py:16")
    assert sum(shares.values()) == metric["delta"]
    assert metric["unexplained"] == 0


def test_a_setting_that_the_program_reads_is_the_cause(project: Path) -> None:
    edit(project, "settings.json", ("512", "600"))
    edit(project, "train.py", HARMLESS)
    cause = first(checked(project))
    assert cause["place"] == "settings.json:3"
    assert cause["saved"] == cause["delta"]


def test_two_causes_have_their_shares(project: Path) -> None:
    edit(project, "train.py", ("torch.zeros(1024,", "torch.zeros(1536,"), HARMLESS)
    edit(
        project,
        "train.py",
        (
            "    for _ in range(3):",
            "    spare = torch.zeros(512, 1024, device='cuda')\n    for _ in range(3):",
        ),
    )
    document = checked(project)
    metric = next(row for row in document["metrics"] if row["name"] == "peak_allocated")
    tried = [cause for cause in metric["causes"] if cause["saved"] is not None]
    assert {cause["place"].partition(":")[0] for cause in tried} == {"train.py"}
    assert len(tried) == 2
    assert tried[0]["saved"] >= tried[1]["saved"] > 0
    assert metric["unexplained"] == 0
    assert "all of these together save" in metric["causes"][2]["text"]


def test_a_likelier_change_that_cannot_be_taken_back_is_told(project: Path) -> None:
    """The decorator was moved to the call, where the program insists on that."""
    edit(project, "settings.json", ("512", "600"))
    edit(project, "parts/model.py", ("@torch.no_grad()\n", ""))
    edit(
        project,
        "train.py",
        (
            "    evaluate(model, x)\n",
            "    with torch.no_grad():\n        assert not hasattr(evaluate, '__wrapped__')\n"
            "        evaluate(model, x)\n",
        ),
    )
    document = checked(project)
    metric = next(row for row in document["metrics"] if row["name"] == "peak_allocated")
    cause, other = metric["causes"]
    assert cause["place"] == "settings.json:3"
    assert cause["saved"] == metric["delta"]
    assert other["place"].startswith("parts/model.py:9")
    assert other["saved"] is None
    assert other["text"].startswith("not measured: parts/model.py:9 in evaluate (removed")
    assert "the program fails without it: AssertionError" in other["text"]


def test_a_definition_and_its_use(project: Path) -> None:
    """Without the function the program does not run: it is reverted with its call, and the call
    is what costs."""
    edit(
        project,
        "parts/model.py",
        (
            "import nn\n",
            "import nn\n\nKEPT = []\n\n\ndef keep(x):\n    KEPT.append(x.repeat(4, 1))\n"
            "    return x\n",
        ),
        ("kept = model(kept).relu()", "kept = keep(model(kept).relu())"),
    )
    cause = first(checked(project))
    assert cause["place"].startswith("parts/model.py:")
    assert cause["saved"] == cause["delta"]


def test_the_edit_in_a_copied_function_is_the_cause(project: Path) -> None:
    """The copy lacks the decorator: with it, the copy costs nothing."""
    copied = MODEL[MODEL.index("def evaluate(") :].replace("evaluate", "evaluate_twice")
    edit(
        project,
        "parts/model.py",
        ("    return kept.sum()\n", f"    return kept.sum()\n\n\n{copied}"),
    )
    edit(
        project,
        "train.py",
        ("import evaluate,", "import evaluate, evaluate_twice,"),
        ("    evaluate(model, x)\n", "    evaluate(model, x)\n    evaluate_twice(model, x)\n"),
        HARMLESS,
    )
    cause = first(checked(project))
    line = MODEL.count("\n") + 3
    assert cause["place"] == f"parts/model.py:{line} in evaluate_twice"
    assert "a copy without `@torch.no_grad()`" in cause["text"]
    assert cause["saved"] == cause["delta"]


def test_renamed_and_moved_code_is_not_the_cause(project: Path) -> None:
    """The model's file has another name, and a function is in another file now, where it lost its
    decorator."""
    model = (project / "parts" / "model.py").read_text()
    head, _, function = model.partition("@torch.no_grad()\n")
    (project / "parts" / "model.py").unlink()
    (project / "parts" / "network.py").write_text(head)
    (project / "parts" / "score.py").write_text(f"import torch\n\n\n{function}")
    edit(
        project,
        "train.py",
        (
            "from parts.model import evaluate, make\n",
            "from parts.network import make\nfrom parts.score import evaluate\n",
        ),
    )
    cause = first(checked(project))
    assert cause["place"].startswith("parts/score.py:")
    assert cause["saved"] == cause["delta"]


def test_what_hangs_without_a_part_ends_with_the_budget(project: Path) -> None:
    edit(project, "parts/model.py", ("@torch.no_grad()\n", ""))
    edit(
        project,
        "train.py",
        ("RATE = 0.1", "RATE = 0.1\nFAST = 'no_grad'"),
        (
            "def main():\n",
            "def main():\n    import inspect, threading, parts.model\n"
            "    if '@torch.no_grad()' in inspect.getsource(parts.model):\n"
            "        threading.Event().wait()\n",
        ),
    )
    document = checked(project, "--blame-budget", "10")
    assert "over the budget" in document["trials"][0]
    assert "not tried: over the budget" in document["cause"]
    assert first(document)["saved"] is None


def test_switched_off_the_order_is_by_rules(project: Path) -> None:
    edit(project, "parts/model.py", ("@torch.no_grad()\n", ""))
    edit(project, "train.py", HARMLESS)
    document = checked(project, "--blame-budget", "0")
    assert document["trials"] == ["changes were not tried: switched off"]
    assert first(document)["place"].startswith("parts/model.py:9")
    assert first(document)["saved"] is None


def test_an_eager_program_runs_and_is_repeated_without_the_compiler(
    project: Path, tmp_path: Path
) -> None:
    """In a new process: what `gpuprobe` of these tests is forked from has imported the compiler."""
    edit(project, "parts/model.py", ("@torch.no_grad()\n", ""))
    runs = tmp_path / "runs.txt"
    edit(
        project,
        "train.py",
        (
            "    evaluate(model, x)\n",
            "    evaluate(model, x)\n    import os, sys\n"
            f"    with open({str(runs)!r}, 'a') as file:\n"
            "        print('torch._dynamo' in sys.modules, os.getcwd(), file=file)\n",
        ),
    )
    command = [sys.executable, "-m", "gpuprobe", "check", "--baseline", "memory.json"]
    command += ["--blame-budget", "0"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    measured, repeated = runs.read_text().splitlines()
    assert measured == f"False {project}"
    assert repeated.startswith("False ")
    assert "gpuprobe-trials-" in repeated


def test_without_sources_and_repository_nothing_is_tried(project: Path) -> None:
    document = json.loads((project / "memory.json").read_text())
    for row in document["files"].values():
        del row["text"]
    (project / "memory.json").write_text(json.dumps(document))
    edit(project, "parts/model.py", ("@torch.no_grad()\n", ""))
    (note, *_) = checked(project)["trials"]
    assert "not tried" in note
    assert "gpuprobe baseline update adds them" in note


def test_a_read_only_temporary_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuprobe.api.trials import Trials
    from gpuprobe.errors import EnvironmentUnavailable
    from gpuprobe.gate.plan import plan

    missing = project / "no-such-folder"
    monkeypatch.setattr(tempfile, "tempdir", str(missing))
    monkeypatch.chdir(project)
    with (
        pytest.raises(EnvironmentUnavailable, match="no temporary folder"),
        Trials(plan(["train.py"]), str(project), ""),
    ):
        raise AssertionError


@pytest.fixture
def hanging(project: Path) -> Iterator[subprocess.Popen[str]]:
    """A check whose trial says that it has begun, in a file, and does not end."""
    begun = project / "begun"
    os.mkfifo(begun)
    edit(project, "parts/model.py", ("@torch.no_grad()\n", ""))
    edit(
        project,
        "train.py",
        (
            "def main():\n",
            "def main():\n    import inspect, threading, parts.model\n"
            "    if '@torch.no_grad()' in inspect.getsource(parts.model):\n"
            f"        open({str(begun)!r}, 'w').close()\n"
            "        threading.Event().wait()\n",
        ),
    )
    command = [shared().python, "-m", "gpuprobe", "check", "--baseline", "memory.json"]
    with subprocess.Popen(
        [*command, "--blame-budget", "600"],
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_check_leaves_nothing(
    hanging: subprocess.Popen[str], project: Path, number: signal.Signals
) -> None:
    (project / "begun").read_text()  # waits for the trial
    assert left_behind(project)
    hanging.send_signal(number)
    assert hanging.wait(120) != 0
    deadline = time.monotonic() + 60  # what is killed has the process of the trials clean up
    while left_behind(project) and time.monotonic() < deadline:
        os.sched_yield()
    assert not left_behind(project)


def test_no_run_more_for_a_check_that_passes(project: Path) -> None:
    edit(project, "train.py", HARMLESS)
    done = gpuprobe("check", "--baseline", "memory.json", "--json", cwd=project)
    assert (done.returncode, json.loads(done.stdout)["trials"]) == (0, [])


def test_secrets_and_what_is_outside_are_not_kept(tmp_path: Path) -> None:
    from gpuprobe.gate.sources import below, kept_texts

    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "outside.json").write_text("{}")
    (root / "link.json").symlink_to(tmp_path / "outside.json")
    names = [".env", "prod.env", "api_key.txt", "server.pem", "credentials.json", "token.txt"]
    for name in (*names, "settings.json", "tokenizer.json"):
        (root / name).write_text("{}")
    (root / "binary.json").write_bytes(b"a\0b")
    (root / "large.json").write_text(" " * (65 << 10))
    kept = kept_texts(
        [*names, "settings.json", "tokenizer.json", "binary.json", "large.json", "link.json"],
        str(root),
    )
    assert set(kept) == {"settings.json", "tokenizer.json"}
    assert below(str(tmp_path / "outside.json"), str(root)) is None
    assert below(str(root / ".git" / "config"), str(root)) is None


def test_a_finder_that_asks_all_others_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of import hooks do."""
    from gpuprobe.api.trial_server import _InCopy

    class AsksAll(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
            others = (finder for finder in sys.meta_path if finder is not self)
            specs = (finder.find_spec(name, path, target) for finder in others)
            return next((spec for spec in specs if spec is not None), None)

    root, tree = tmp_path / "root", tmp_path / "tree"
    for folder in (root, tree):
        folder.mkdir()
        (folder / "of_the_project.py").write_text(f"FOLDER = {folder.name!r}\n")
    monkeypatch.syspath_prepend(str(root))  # as an editable install does
    in_copy = _InCopy(str(root), str(tree))
    monkeypatch.setattr(sys, "meta_path", [AsksAll(), in_copy, *sys.meta_path])
    spec = importlib.util.find_spec("of_the_project")
    assert spec is not None
    assert spec.origin == str(tree / "of_the_project.py")
    assert importlib.util.find_spec("no_such_module_at_all") is None
