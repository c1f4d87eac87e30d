"""`gpuprobe check` and `gpuprobe baseline` by their command line: what they write beside the
report, and baselines that are not what they should be."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
from recipe_project import copied, made

from gpuprobe.cli import main

pytestmark = pytest.mark.xdist_group("recipes")


@pytest.fixture
def project(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A working directory with recordings and baselines, on no service."""
    for name in ("GITHUB_ACTIONS", "GITLAB_CI", "GITHUB_WORKSPACE", "CI_PROJECT_DIR"):
        monkeypatch.delenv(name, raising=False)
    copied(made(tmp_path_factory), tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


CHECK = ["check", "--baseline", "memory.json"]


def test_a_regression_is_annotated_at_its_line(
    project: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*CHECK, "small.gpuprobe", "--annotations", "github", "--json"]) == 0
    clean = capfd.readouterr()
    assert "::" not in clean.err
    assert main([*CHECK, "large.gpuprobe", "--annotations", "github", "--json"]) == 1
    out, err = capfd.readouterr()
    # stdout is one document still: GitHub reads commands from stderr as well.
    document = json.loads(out)
    places = {m["name"]: m["place"] for m in document["metrics"] if m["regressed"]}
    lines = [line for line in err.splitlines() if line.startswith("::error ")]
    assert len(places) > 1
    assert any(place in document["cause"] for place in places.values())
    # A phase has an annotation of its own only where another line is to blame.
    names = [re.findall(r"title=gpuprobe GPM-(\w+) ", line)[0] for line in lines]
    assert names[:2] == ["peak_allocated", "peak_reserved"]  # of a segment of 20 MiB
    assert set(places) <= set(names)
    for name, place in places.items():
        text = lines[names.index(name)]
        number = re.fullmatch(r"train\.py:(\d+) in <module>", place)
        assert number is not None
        assert text.startswith(f"::error file=train.py,line={number[1]},title=")
        assert "%0Aif this is intended, run gpuprobe baseline update" in text

    monkeypatch.setenv("GITLAB_CI", "true")
    monkeypatch.setenv("CI_PROJECT_DIR", str(project.parent))
    assert main([*CHECK, "large.gpuprobe", "--annotations", "auto"]) == 1
    report = json.loads((project / "gl-code-quality-report.json").read_text(encoding="utf-8"))
    assert len(report) == len(lines) >= len(places)
    entries = {entry["check_name"]: entry for entry in report}
    for name, place in places.items():
        entry = entries[f"gpuprobe/GPM-{name}"]
        begin = int(place.partition(":")[2].partition(" ")[0])
        wanted = {"path": f"{project.name}/train.py", "lines": {"begin": begin}}
        assert entry["location"] == wanted
    assert main([*CHECK, "small.gpuprobe", "--annotations", "auto"]) == 0
    # An empty report says that all is well; an old one would say that it is not.
    assert (project / "gl-code-quality-report.json").read_text(encoding="utf-8") == "[]\n"


def changed(document: Callable[[dict], object]) -> Callable[[str], bytes]:  # type: ignore[type-arg]
    """A baseline with something in its document changed in place."""

    def apply(text: str) -> bytes:
        data = json.loads(text)
        document(data)
        return json.dumps(data).encode()

    return apply


def put(*path: str, value: object) -> Callable[[str], bytes]:
    def apply(data: dict) -> None:  # type: ignore[type-arg]
        for name in path[:-1]:
            data = data.setdefault(name, {})
        data[path[-1]] = value

    return changed(apply)


BROKEN: dict[str, tuple[Callable[[str], bytes], str]] = {
    "empty": (lambda text: b"", "is damaged"),
    "cut off": (lambda text: text[: len(text) // 2].encode(), "is damaged"),
    "not UTF-8": (lambda text: b"\xff\xfe" + text.encode(), "cannot read"),
    "binary": (lambda text: bytes(range(256)), "cannot read"),
    "a conflict of git": (lambda text: b"<<<<<<< HEAD\n" + text.encode(), "merge conflicts"),
    "a list": (lambda text: b"[]", "is not a gpuprobe baseline"),
    "another program's": (lambda text: b'{"schema": "other", "version": 3}', "is not a gpuprobe"),
    "a check's report": (put("schema", value="gpuprobe.check"), "is not a gpuprobe baseline"),
    "a baseline of hazards": (put("schema", value="gpuprobe.hazards-baseline"), "is not a gpupr"),
    "a newer schema": (put("version", value=[9, 0]), "version 9.0 is newer than this gpuprobe"),
    "no version": (changed(lambda data: data.pop("version")), "is damaged"),
    "no metrics": (changed(lambda data: data.pop("metrics")), "is damaged"),
    "no steps": (changed(lambda data: data.pop("steps")), "is damaged"),
    "a metric in words": (put("metrics", "peak_allocated", "bytes", value="much"), "is damaged"),
    "a metric that is negative": (put("metrics", "peak_allocated", "bytes", value=-1), "is damag"),
    "a metric that is no number": (put("metrics", "peak_allocated", "bytes", value=None), "is dam"),
    "a metric without end": (put("metrics", "peak_allocated", "bytes", value=1e999), "is damaged"),
    "a metric of a number that no machine has": (
        put("metrics", "peak_allocated", "bytes", value=10**400),
        "is damaged",
    ),
    "a tolerance in words": (put("tolerance", "peak_allocated", "relative", value="2 %"), "is dam"),
    "a tolerance that is not a number": (
        put("tolerance", "peak_allocated", "relative", value=float("nan")),
        "is damaged",
    ),
    "a tolerance below nothing": (put("tolerance", "peak_allocated", "absolute", value=-1), "is d"),
    "lines that are a list": (put("at_peak", "lines", value=[1]), "is damaged"),
    "too deep": (lambda text: b'{\n "accounts": ' + b"[" * 200_000, "is damaged"),
    "a deep list": (lambda text: b"[" * 200_000, "is not a gpuprobe baseline"),
    "a source file": (lambda text: b"import torch\n", "is not a gpuprobe baseline"),
    "settings": (lambda text: b'[tool.gpuprobe]\nrun = "a.py"\n', "is not a gpuprobe baseline"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_baseline_is_refused_and_left_alone(
    name: str, project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken, told = BROKEN[name]
    file = project / "memory.json"
    content = broken((project / "small.json").read_text(encoding="utf-8"))
    file.write_bytes(content)
    for command in (
        ["check", "small.gpuprobe", "--baseline", "memory.json"],
        ["baseline", "update", "small.gpuprobe", "--baseline", "memory.json"],
    ):
        assert main(command) == 4
        out, err = capfd.readouterr()
        assert out == ""
        first, second = err.splitlines()
        assert first.startswith("gpuprobe: error: ")
        assert "memory.json" in first
        assert told in first
        assert len(first) < 300
        assert second.startswith("  hint: ")
        assert ("delete" in second) == ("damaged" in first)
        assert file.read_bytes() == content
        assert not list(project.glob(".*"))


def test_what_a_refusal_advises_works(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = project / "memory.json"
    file.write_text("{")
    update = ["baseline", "update", "small.gpuprobe", "--baseline", "memory.json"]
    assert main(update) == 4
    assert "hint: delete it" in capfd.readouterr().err
    file.unlink()
    assert main(update) == 0
    assert file.read_bytes() == (project / "small.json").read_bytes()


def test_a_newer_minor_version_is_read(project: Path) -> None:
    text = (project / "small.json").read_text(encoding="utf-8")
    data = json.loads(text)
    data["version"][1] += 1
    data["metrics"]["new_metric"] = {"count": 3}
    data["more"] = {"x": [1]}
    (project / "memory.json").write_text(json.dumps(data))
    assert main([*CHECK, "small.gpuprobe"]) == 0


def test_no_baseline(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "small.gpuprobe", "--baseline", "none/there.json"]) == 2
    assert "no baseline at none/there.json" in capfd.readouterr().err
    assert main(["check", "small.gpuprobe", "--baseline", "."]) == 4
    assert "cannot read" in capfd.readouterr().err
    assert main(["baseline", "update", "small.gpuprobe", "--baseline", "none/there.json"]) == 2
    assert "cannot write none/there.json" in capfd.readouterr().err
    assert not (project / "none").exists()


def test_a_baseline_of_a_model_that_grew_says_what_grew(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = project / "memory.json"
    content = file.read_bytes()
    assert main([*CHECK, "large.gpuprobe"]) == 1
    assert "first cause: +" in capfd.readouterr().out
    assert file.read_bytes() == content
    # A smaller one is the same model still.
    assert main(["check", "small.gpuprobe", "--baseline", "large.json"]) == 0


@pytest.mark.parametrize(
    ("baseline", "recording"),
    [("small", "one"), ("large", "one"), ("one", "large"), ("one", "two"), ("two", "one")],
)
def test_a_baseline_of_another_model_is_refused(
    baseline: str, recording: str, project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = project / "memory.json"
    content = (project / f"{baseline}.json").read_bytes()
    file.write_bytes(content)
    # Also where it needs less: that says nothing of the model that the baseline is of.
    assert main([*CHECK, f"{recording}.gpuprobe", "--json"]) == 2
    (text,) = json.loads(capfd.readouterr().out)["mismatches"]
    assert text.startswith("model: ")
    assert text.endswith(" now, with nothing in common")
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    ("key", "value"),
    [("device", "cpu"), ("torch", "1.0"), ("allocator", "expandable_segments:True")],
)
def test_a_baseline_of_another_environment_is_not_passed(
    key: str, value: str, project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = project / "memory.json"
    content = put("environment", key, value=value)(file.read_text(encoding="utf-8"))
    file.write_bytes(content)
    reports = ["--junit", "junit.xml", "--sarif", "found.sarif", "--annotations", "github"]
    assert main([*CHECK, "small.gpuprobe", *reports]) == 2
    out, err = capfd.readouterr()
    assert value in out
    assert file.read_bytes() == content
    # No report may look as if all were well.
    (line,) = [line for line in err.splitlines() if line.startswith("::error ")]
    assert "title=gpuprobe GPM-environment" in line
    suite = ET.parse(project / "junit.xml").getroot()[0]
    assert suite.get("failures") == "1"
    (result,) = json.loads((project / "found.sarif").read_text())["runs"][0]["results"]
    assert result["ruleId"] == "GPM-environment"
    assert value in result["message"]["text"]
