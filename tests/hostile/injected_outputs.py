"""Each output of gpuprobe with names from elsewhere in it, checked; by what it is called.

An output is a function of the names, of which each place in it that has a name takes the next, and
of an empty folder. It raises AssertionError for what is not harmless, and returns how many of the
names' marks were found in it.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import hostile_commands as commands
import injections
from harmless import (
    harmless_commands,
    harmless_html,
    harmless_json,
    harmless_markdown,
    harmless_printed_json,
    harmless_prometheus,
    harmless_sarif,
    harmless_screen,
    harmless_text,
    harmless_xml,
)
from injections import MARK
from quick_pilot import QuickPilot

from gpuprobe.model.findings import Finding, Fix, Level
from gpuprobe.model.place import Place

Output = Callable[[list[str], Path], int]
Check = Callable[[str], None]

FLEET = Path(__file__).resolve().parents[2] / "gpuprobe" / "testing" / "fleets" / "8xh100.json"


def _shown(text: str, check: Check) -> int:
    check(text)
    return text.count(MARK)


def _recording(texts: list[str], folder: Path, *, faults: bool = True) -> str:
    """A recording whose own name is one of them, too."""
    target = folder / f"{injections.file_name(texts[0])}.gpuprobe"
    target.mkdir()
    injections.recording(target, texts, faults=faults)
    return str(target)


def _of_recording(argv: Sequence[str], check: Check, file: str = "") -> Output:
    """A command whose ``X`` is the recording (``C``: a complete one), and ``B`` a baseline of
    another GPU; of its output, or a file."""

    def output(texts: list[str], folder: Path) -> int:
        recording = _recording(list(texts), folder, faults="C" not in argv)
        injections.baseline(folder / "b.json", list(texts))
        given = {"B": str(folder / "b.json"), "GOOD": str(commands.GOOD)}
        given |= {"X": recording, "C": recording}
        ended = commands.run([given.get(word, word) for word in argv])
        expected = {0}
        if argv[0] == "check":  # 2: another GPU, or another program
            expected = {1, 2} if commands.ACCEPTED in argv else {2} if "C" in argv else {4}
        assert ended.code in expected, ended.talk
        harmless_text(ended.talk)
        if not file:
            return _shown(ended.out, check)
        harmless_text(ended.out) if check is not harmless_markdown else None
        return _shown((folder / file).read_text("utf-8"), check)

    return output


def _perfetto(texts: list[str], folder: Path) -> int:
    import gzip

    ended = commands.run(["report", _recording(list(texts), folder), "--perfetto", "p.json.gz"])
    assert ended.code == 0, ended.talk
    return _shown(gzip.decompress((folder / "p.json.gz").read_bytes()).decode(), harmless_json)


def _snapshot(texts: list[str], folder: Path) -> int:
    """For torch's viewer: a pickle of plain values, in which names are strings and no more."""
    import pickletools

    ended = commands.run(["report", _recording(list(texts), folder), "--snapshot", "s.pickle"])
    assert ended.code == 0, ended.talk
    harmless_text(ended.talk)
    found = 0
    for opcode, value, _ in pickletools.genops((folder / "s.pickle").read_bytes()):
        assert opcode.name not in ("GLOBAL", "STACK_GLOBAL", "REDUCE", "INST", "OBJ", "NEWOBJ")
        found += str(value).count(MARK) if isinstance(value, str) else 0
    return found


def _notebook(texts: list[str], folder: Path) -> int:
    """What a notebook shows of a recording and of its report; and a page of both, for a browser."""
    import gpuprobe

    recording = gpuprobe.load(_recording(list(texts), folder))
    drawn = [shown._repr_html_() or "" for shown in (recording, gpuprobe.report(recording))]
    page = f"<!DOCTYPE html><html><body>{''.join(drawn)}</body></html>"
    (folder / "n.html").write_text(page, "utf-8")
    return _shown(page, harmless_html)


# -- of the machine


def fleet(texts: list[str], path: Path) -> None:
    """A machine whose GPUs, processes, users, jobs and environment are called so."""
    plain = json.loads(FLEET.read_text("utf-8"))
    some = cycle(texts)
    for device in plain["devices"]:
        device["name"] = next(some)
    for process in plain["proc"].values():
        process["name"] = next(some)
        process["cmdline"] = ["python3", next(some), f"--config={next(some)}"]
        process["cgroup"] = f"0::/{next(some)}/job_1/{next(some)}"
        process["environ"] = {"RANK": next(some), "SLURM_JOB_ID": next(some)}
    plain["users"] = {key: next(some) for key in plain["users"]}
    plain["kernel_log"] = [
        f"NVRM: Xid (PCI:0000:0f:00): 48, pid=5, name={next(some)}, DBE ECC error",
        f"NVRM: Xid (PCI:0000:{next(some)}): 48, pid={next(some)}",
    ]
    plain["environ"] = {"CUDA_VISIBLE_DEVICES": next(some).replace("\0", "")}
    path.write_text(json.dumps(plain))


def _of_machine(argv: Sequence[str], check: Check) -> Output:
    def output(texts: list[str], folder: Path) -> int:
        path = folder / "fleet.json"
        fleet(texts, path)
        given = ["--processes", "8"] if argv[0] == "export" else []
        ended = commands.run([*argv, *given, "--demo", str(path)])
        assert ended.code in (0, 1, 3), ended.talk
        harmless_text(ended.talk)
        return _shown(ended.out, check)

    return output


def _log(texts: list[str], folder: Path) -> int:
    injections.log(folder / "log.jsonl", list(texts))
    ended = commands.run(["top", "--replay", str(folder / "log.jsonl"), "--once"])
    assert ended.code == 0, ended.talk
    harmless_text(ended.talk)
    return _shown(ended.out, harmless_text)


# -- findings


def findings(texts: list[str]) -> list[Finding]:
    """One of each name: in its message, fix, place, related place, evidence and subject."""
    some = cycle(texts)
    return [
        Finding(
            rule="GP201",
            kind="read-after-write",
            level=Level.ERROR,
            message=f"{text}: read by {next(some)}",
            location=Place(f"{next(some)}.py", at + 1, next(some)),
            related=(Place(next(some), 5, next(some)),),
            evidence=((next(some), next(some)),),
            fingerprint=f"{at:016x}",
            fix=Fix(next(some)),
            subject=next(some),
        )
        for at, text in enumerate(texts)
    ]


def _sarif(texts: list[str], folder: Path) -> int:
    from gpuprobe.reporters.ci import sarif

    stream = io.StringIO()
    sarif.write(findings(texts), stream, str(folder), texts[0], elsewhere=texts[1])
    harmless_json(stream.getvalue())
    return _shown(stream.getvalue(), harmless_sarif)


def _junit(texts: list[str], folder: Path) -> int:
    from gpuprobe.reporters.ci import junit

    stream = io.StringIO()
    some = findings(texts)
    junit.write(some, stream, suite=texts[0], passed=texts, failed=texts[1])
    return _shown(stream.getvalue(), harmless_xml)


def _annotations(service: str, check: Check) -> Output:
    def output(texts: list[str], folder: Path) -> int:
        from gpuprobe.reporters.ci import annotations

        stream = io.StringIO()
        places = annotations.Places.of({}, str(folder))
        if service == "github":
            annotations.write_github(findings(texts), stream, places)
        else:
            annotations.write_gitlab(findings(texts), stream, places, texts[0])
        return _shown(stream.getvalue(), check)

    return output


def _hazards(check: Check, draw: str) -> Output:
    def output(texts: list[str], folder: Path) -> int:
        from gpuprobe.hazards.findings.results import Hazards
        from gpuprobe.reporters import markdown
        from gpuprobe.reporters.sections.hazards import hazard_sections
        from gpuprobe.reporters.text import draw as text

        found = Hazards(findings=findings(texts))
        stream = io.StringIO()
        writer = text.write if draw == "text" else markdown.write
        writer(hazard_sections(found), stream)
        return _shown(stream.getvalue(), check)

    return output


# -- screens


def _screen(make: Callable[[list[str], Path], Any], keys: Sequence[str]) -> Output:
    """Every name on a screen, after each key."""

    def output(texts: list[str], folder: Path) -> int:
        from screen_svg import screen_text

        async def session() -> int:
            app = make(list(texts), folder)
            found = 0
            async with app.run_test(size=(180, 60)):
                pilot = QuickPilot(app)
                for key in ("", *keys):
                    if key:
                        await pilot.press(key)
                    for _ in range(4):
                        await pilot.pause(0.03)
                    harmless_screen(app)
                    found += "\n".join(screen_text(app)).count(MARK)
            if app.crash is not None:
                raise app.crash
            return found

        return asyncio.run(session())

    return output


def _view(texts: list[str], folder: Path) -> Any:
    from gpuprobe.recording.load import Followed
    from gpuprobe.tui.viewer.app import ViewApp

    return ViewApp(Followed(_recording(texts, folder)), interval=0.05)


def _top(texts: list[str], folder: Path) -> Any:
    from gpuprobe.tui.monitor.app import TopApp

    path = folder / "fleet.json"
    fleet(texts, path)
    return TopApp(str(path), 0.05, readonly=True)


# -- tests


def _tests(texts: list[str], folder: Path) -> int:
    """The summary of the pytest plugin, and the file that it keeps."""
    from gpuprobe.pytest_plugin import summary

    figures = {"peak_allocated": 5, "peak_reserved": 7, "left": 0}
    rows = [(f"test_a.py::test[{text}]", {"group": text, **figures}) for text in texts]
    found = 0
    for line in summary.lines(rows):
        assert "\n" not in line
        found += _shown(line, harmless_text)
    return found + _shown(summary.dumps(rows), harmless_json)


CHECK = ["check", "C", "--baseline", "B"]
OUTPUTS: dict[str, Output] = {
    "report -v": _of_recording(["report", "X", "-v", "--top", "1000"], harmless_text),
    "report --json": _of_recording(["report", "X", "--json"], harmless_printed_json),
    "report --html": _of_recording(["report", "X", "--html", "r.html"], harmless_html, "r.html"),
    "report --perfetto": _perfetto,
    "report --snapshot": _snapshot,
    "in a notebook": _notebook,
    "scale": _of_recording(["scale", "GOOD", "X"], harmless_text),
    "scale --json": _of_recording(["scale", "GOOD", "X", "--json"], harmless_printed_json),
    "view --once": _of_recording(["view", "X", "--once"], harmless_text),
    "view, on the screen": _screen(_view, ("5", "4", "3", "2", "1", "t", "enter", "question_mark")),
    "replay": _of_recording(["replay", "X"], harmless_text),
    "diff": _of_recording(["diff", "GOOD", "X"], harmless_text),
    "diff --json": _of_recording(["diff", "GOOD", "X", "--json"], harmless_printed_json),
    "diff --html": _of_recording(
        ["diff", "GOOD", "X", "--html", "d.html"], harmless_html, "d.html"
    ),
    "check": _of_recording([*CHECK, commands.ACCEPTED], harmless_text),
    "check, of another GPU": _of_recording(CHECK, harmless_text),
    "check, of an incomplete recording": _of_recording(["check", "X", *CHECK[2:]], harmless_text),
    "check --json": _of_recording([*CHECK, "--json"], harmless_printed_json),
    "check --markdown": _of_recording([*CHECK, "--markdown"], harmless_markdown),
    "check --sarif": _of_recording([*CHECK, "--sarif", "s"], harmless_sarif, "s"),
    "check --junit": _of_recording([*CHECK, "--junit", "j"], harmless_xml, "j"),
    "baseline update": _of_recording(
        ["baseline", "update", "C", "--baseline", "n.json"], harmless_json, "n.json"
    ),
    "export --prometheus, of runs": _of_recording(
        ["export", "--prometheus", "--once", "--runs", "X", "--no-discovery"], harmless_prometheus
    ),
    "export --prometheus, of a machine": _of_machine(
        ["export", "--prometheus", "--once", "--no-discovery"], harmless_prometheus
    ),
    "info": _of_machine(["info"], harmless_text),
    "info -v": _of_machine(["info", "-v"], harmless_text),
    "info --json": _of_machine(["info", "--json"], harmless_printed_json),
    "doctor": _of_machine(["doctor"], harmless_text),
    "doctor --json": _of_machine(["doctor", "--json"], harmless_printed_json),
    "top --replay --once": _log,
    "top, on the screen": _screen(_top, ("down", "t", "enter", "escape", "i", "escape")),
    "hazards, text": _hazards(harmless_text, "text"),
    "hazards, SARIF": _sarif,
    "hazards, JUnit": _junit,
    "hazards, annotations for GitHub": _annotations("github", harmless_commands),
    "hazards, annotations for GitLab": _annotations("gitlab", harmless_json),
    "pytest plugin": _tests,
}
PAGES = {
    "report --html": "r.html",
    "diff --html": "d.html",
    "in a notebook": "n.html",
}
"""The pages among them, and where each is."""

NAMELESS = ("replay",)
"""What shows numbers only."""

SLOW = ("view, on the screen", "top, on the screen")
"""More than a second: left to ``benchmarks/injected_names.py``."""

os.environ.setdefault("TERM", "xterm-256color")
