"""Annotations, read as GitHub's runner and GitLab read them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import jsonschema
import pytest
import warm_python
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuprobe.cli import main
from gpuprobe.cli.annotate import Annotations
from gpuprobe.errors import UsageError
from gpuprobe.model.findings import Finding, Fix, Level
from gpuprobe.model.place import Place
from gpuprobe.model.text import visible
from gpuprobe.reporters.ci import annotations
from gpuprobe.reporters.ci.annotations import Places

HERE = Places("/work dir/repo/sub", "/work dir/repo")
OUTSIDE = "/usr/lib/python3/site-packages/torch/nn/functional.py"

# GitLab, "Code Quality report format": these are required, and severity is one of five.
ENTRIES = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["description", "check_name", "fingerprint", "severity", "location"],
        "properties": {
            "description": {"type": "string", "minLength": 1},
            "check_name": {"type": "string", "pattern": "^gpuprobe/[A-Za-z0-9_-]+$"},
            "fingerprint": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
            "severity": {"enum": ["info", "minor", "major", "critical", "blocker"]},
            "location": {
                "type": "object",
                "required": ["path", "lines"],
                "properties": {
                    # relative to the repository, and without "./": else it is not shown
                    "path": {"type": "string", "minLength": 1, "pattern": r"^(?!\./|/|\.\./)"},
                    "lines": {
                        "type": "object",
                        "required": ["begin"],
                        "properties": {"begin": {"type": "integer", "minimum": 1}},
                    },
                },
            },
        },
    },
}


def as_the_runner_reads(line: str) -> tuple[str, dict[str, str], str]:
    """(command, properties, data), as ``ActionCommand.TryParseV2`` of actions/runner splits and
    unescapes them: at the first ``::`` after the command, then at ``,`` and the first ``=``."""
    assert line.startswith("::")
    assert len(line.splitlines()) == 1
    head, found, data = line[2:].partition("::")
    assert found
    command, _, rest = head.partition(" ")
    properties = {}
    for part in rest.split(","):
        name, equals, value = part.partition("=")
        assert equals
        for token, shown in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ",")):
            value = value.replace(token, shown)
        properties[name.strip()] = value.replace("%25", "%")
    return command, properties, data.replace("%0D", "\r").replace("%0A", "\n").replace("%25", "%")


def race(file: str = "train.py", line: int = 7, message: str = "a race", **more: object) -> Finding:
    return Finding(
        "GP201",
        "read-after-write",
        Level.ERROR,
        message,
        location=Place(file, line, "step"),
        **more,  # type: ignore[arg-type]
    )


def test_a_command_has_the_published_form() -> None:
    finding = race(message="y is read before x, 100% wrong", fix=Fix("wait for it: see docs"))
    assert list(annotations.commands([finding], HERE)) == [
        "::error file=sub/train.py,line=7,title=gpuprobe GP201 read-after-write"
        "::y is read before x, 100%25 wrong%0Await for it: see docs"
    ]


def test_hostile_text_stays_text() -> None:
    finding = race(
        "a,b:c%2C\n::add-mask::d.py",
        message="\x1b[31m\r\n::set-env name=PATH::/evil\n##[error]%0A::stop-commands::x",
    )
    (line,) = annotations.commands([finding], HERE)
    assert line.isprintable()
    command, properties, data = as_the_runner_reads(line)
    assert command == "error"
    assert set(properties) == {"file", "line", "title"}
    assert properties["file"] == r"sub/a,b:c%2C\x0a::add-mask::d.py"
    assert data.splitlines() == [
        r"\x1b[31m\x0d\x0a::set-env name=PATH::/evil\x0a\x23#[error]%0A::stop-commands::x"
    ]


@pytest.mark.parametrize(
    ("file", "path"),
    [
        ("train.py", "sub/train.py"),
        ("./pkg/../train.py", "sub/train.py"),
        ("../other/a.py", "other/a.py"),
        ("/work dir/repo/x.py", "x.py"),
        ("/work dir/repo2/x.py", None),
        ("../../secret.py", None),
        (OUTSIDE, None),
        (".../nn/functional.py", None),
        ("<string>", None),
        ("a\0b.py", None),
        ("", None),
        ("..a.py", "sub/..a.py"),
    ],
)
def test_paths_are_those_of_the_checkout(file: str, path: str | None) -> None:
    assert HERE.path(file) == path


def test_a_checkout_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    project = str(tmp_path / "real")
    places = Places.of({"GITHUB_WORKSPACE": str(tmp_path / "link")}, project)
    assert places.path("train.py") == "train.py"


def test_a_place_outside_is_told_in_words() -> None:
    (line,) = annotations.commands([race(OUTSIDE)], HERE)
    command, properties, data = as_the_runner_reads(line)
    assert (command, set(properties)) == ("error", {"title"})
    assert f"{OUTSIDE}:7 in step" in data
    (entry,) = annotations.code_quality([race(OUTSIDE)], HERE, "memory.json")
    assert entry["location"] == {"path": "sub/memory.json", "lines": {"begin": 1}}
    assert f"{OUTSIDE}:7 in step" in entry["description"]


def test_the_worst_come_first_for_only_ten_are_shown() -> None:
    levels = [Level.NOTE, Level.WARNING, Level.ERROR, Level.NOTE, Level.ERROR]
    found = [Finding("GP1", "k", level, str(at)) for at, level in enumerate(levels)]
    lines = [as_the_runner_reads(line) for line in annotations.commands(found, HERE)]
    assert [line[0] for line in lines] == ["error", "error", "warning", "notice", "notice"]
    assert [line[2] for line in lines] == ["2", "4", "1", "0", "3"]


def test_fingerprints_differ_and_stay() -> None:
    found = [race(line=7), race(line=9), race(line=11, subject="another tensor")]
    assert found[0].fingerprint == found[1].fingerprint
    keys = [entry["fingerprint"] for entry in annotations.code_quality(found, HERE, "m.json")]
    assert len(set(keys)) == 3
    moved = [race(line=70), race(line=90), race(line=110, subject="another tensor")]
    assert keys == [e["fingerprint"] for e in annotations.code_quality(moved, HERE, "m.json")]


# Drawn from what the formats give a meaning, and what terminals do: all of Unicode takes long.
any_text = st.text("ab/.:,;%=-#[]<> \n\r\t\0\x1b\x85\u2028é\udc80\U0001f600", max_size=12)
any_findings = st.builds(
    Finding,
    rule=st.sampled_from(["GP201", "GPM-peak_allocated"]),
    kind=st.sampled_from(["read-after-write", "memory-regression"]),
    level=st.sampled_from(list(Level)),
    message=any_text.filter(bool) | st.sampled_from(["::error::x", "%25%0A", "a\r\nb"]),
    location=st.none() | st.builds(Place, any_text, st.integers(-1, 10**6), any_text),
    fix=st.none() | st.builds(Fix, any_text),
    subject=st.sampled_from(["", "a"]),
)


@settings(deadline=None)
@given(st.lists(any_findings, max_size=3))
def test_any_finding_reads_back(findings: list[Finding]) -> None:
    ordered = sorted(findings, key=lambda item: list(Level).index(item.level))
    stream = io.StringIO()
    annotations.write_github(findings, stream, HERE)
    lines = stream.getvalue().split("\n")
    assert lines.pop() == ""
    for line, finding in zip(lines, ordered, strict=True):
        command, properties, data = as_the_runner_reads(line)
        assert command == {"note": "notice"}.get(finding.level.value, finding.level.value)
        assert properties["title"] == f"gpuprobe {finding.rule} {finding.kind}"
        assert data.startswith(visible(finding.message))
        path = None if finding.location is None else HERE.path(finding.location.file)
        assert properties.get("file") == (None if path is None else visible(path))
        assert ("line" in properties) == (path is not None)

    stream = io.StringIO()
    annotations.write_gitlab(findings, stream, HERE, "memory.json")
    document = json.loads(stream.getvalue().encode("ascii"))
    jsonschema.validate(document, ENTRIES)
    assert len(document) == len(findings)
    assert len({entry["fingerprint"] for entry in document}) == len(findings)


@pytest.mark.parametrize(
    ("environment", "service"),
    [
        ({"GITHUB_ACTIONS": "true", "CI": "true"}, "github"),
        ({"GITLAB_CI": "true", "CI": "true"}, "gitlab"),
        ({"CI": "true"}, None),
        ({"GITHUB_ACTIONS": ""}, None),
    ],
)
def test_auto_asks_the_environment(environment: dict[str, str], service: str | None) -> None:
    assert annotations.service_of(environment) == service


def test_where_there_is_no_service_auto_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("GITHUB_ACTIONS", "GITLAB_CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    Annotations.of("auto").write([race()], "memory.json")
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "bitbucket", "github=x", "gitlab=", "auto=x", "GitHub"])
def test_another_service_is_a_usage_error(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--hazards-annotations", text, "train.py"]) == 2
    assert f"found {text!r}" in capfd.readouterr().err


def test_a_file_that_cannot_be_written_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("no/folder.json", "."):
        assert main(["run", "--hazards-annotations", f"gitlab={file}", "train.py"]) == 2
        assert f"cannot write {file}" in capfd.readouterr().err
    (tmp_path / "gone").mkdir()
    wanted = Annotations.of("gitlab=gone/report.json")
    (tmp_path / "gone").rmdir()
    with pytest.raises(UsageError, match="cannot write"):
        wanted.write([], "memory.json")


def test_hazards_of_a_run_are_annotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CI_PROJECT_DIR", "GITLAB_CI"):
        monkeypatch.delenv(name, raising=False)
    project = tmp_path / "repo" / "sub"
    project.mkdir(parents=True)
    (project / "race.py").write_text(
        "import os, torch\n"
        "x = torch.ones(100, device='cuda')\n"
        "with torch.cuda.stream(torch.cuda.Stream()):\n"
        "    x.sum()\n"
        "os.chdir('/')\n"
    )
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path / "repo"))

    def annotated(to: str) -> list[str]:
        options = ["--gpu", "t4", "-q", "-o", tmp_path / "r.gpuprobe", "--force"]
        done = warm_python.gpuprobe(
            "run", *options, "--hazards-annotations", to, "race.py", cwd=project
        )
        assert done.returncode == 1, done.stderr
        return [line for line in done.stderr.splitlines() if line.startswith("::")]

    found = [as_the_runner_reads(line) for line in annotated("auto")]
    command, properties, data = found[0]
    assert (command, properties["file"], properties["line"]) == ("error", "sub/race.py", "4")
    assert data

    assert annotated("gitlab=out.json") == []
    document = json.loads((project / "out.json").read_text(encoding="utf-8"))
    jsonschema.validate(document, ENTRIES)
    assert len(document) == len(found)
