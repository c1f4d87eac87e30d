"""Fifty strings that some output would execute, if it let them through; and files full of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hostile_mutations import RECORDED, packed_chunk, unpacked_chunk
from hostile_seed import LINES, SOURCE, dumped

MARK = "Zq9"
"""Is in each of them, to find it again."""

# By whom they would be executed. `data-owned` appears in a page's DOM only where a script ran.
_RUN = "document.documentElement.setAttribute('data-owned','Zq9')"
INJECTIONS: tuple[str, ...] = (
    # terminals: clear, title, clipboard, hyperlink, one-byte controls, overprinting, alternate
    "Zq9\x1b[2J\x1b[H", "Zq9\x1b]0;owned\x07", "Zq9\x1b]52;c;b3duZWQ=\x07", "Zq9\x9b31m",
    "Zq9\x1b]8;;https://evil.example\x1b\\x\x1b]8;;\x1b\\", "Zq9\rgpuprobe: all is well",
    "Zq9\b\b\b\b", "Zq9\x1b[?1049h", "Zq9\x7f\x00\x85", "Zq9\ngpuprobe: error: Zq9",
    "Zq9\u202egnp.exe", "Zq9\u2028Zq9\u2029", "Zq9\udcff\udc9b", "Zq9\x1bPq#0\x1b\\", "Zq9\x0b\x0c",
    # Rich and Textual
    "[bold red]Zq9[/]", "[@click=app.quit]Zq9[/]", "[link=https://evil.example]Zq9[/link]", "Zq9[/",
    # HTML and the data within its scripts
    f"<script>{_RUN}</script>Zq9", f"<img src=x onerror={_RUN}>Zq9",
    f"</script><script>{_RUN}//Zq9",
    f'"><svg onload={_RUN}>Zq9', f"' onmouseover={_RUN} Zq9='", "<!--Zq9", "]]>Zq9<![CDATA[",
    f"</style><iframe srcdoc='<script>parent.{_RUN}</script>'>Zq9", "&lt;b&gt;Zq9&#60;b&#62;",
    f"javascript:{_RUN}//Zq9", f"</title><script>{_RUN}</script>Zq9", "${Zq9}`+Zq9+`", "{{Zq9}}",
    # Markdown
    "[Zq9](https://evil.example)", "![Zq9](https://evil.example/x.png)", "https://evil.example/Zq9",
    "@Zq9 #12 !34", "| Zq9 | Zq9 |", "# Zq9", "- Zq9", "```\nZq9", "`Zq9`", "<b>Zq9</b>", "1. Zq9",
    # workflow commands of GitHub and Azure
    "::error file=x.py,line=1::Zq9", "##[add-mask]Zq9", "::stop-commands::Zq9", "%0A::warning::Zq9",
    "##vso[task.setvariable variable=Zq9]x",
    # Prometheus, JUnit, paths
    'Zq9"} 1\ngpuprobe_owned{x="', "Zq9\\", "&Zq9;<!ENTITY Zq9 SYSTEM 'file:///etc/passwd'>",
    "../../../../etc/Zq9", "file:///etc/Zq9",
)  # fmt: skip

_KEPT = {
    "type", "schema", "level", "status", "ended_by", "what", "rule", "fingerprint", "state",
    "at_least", "at_most", "segment_type", "device", "devices", "gpuprobe",
}  # fmt: skip


def poisoned(plain: Any, texts: list[str], key: str = "") -> Any:
    """Plain data in which each text that a user chose is one of ``texts`` instead, in turn."""
    if isinstance(plain, dict):
        return {k: poisoned(v, texts, k) for k, v in plain.items()}
    if isinstance(plain, list):
        return [poisoned(item, texts, key) for item in plain]
    if not isinstance(plain, str) or key in _KEPT:
        return plain
    texts.append(texts.pop(0))
    return texts[-1]


_MORE: dict[str, Any] = {
    "collectives": [{"op": "all_reduce", "count": 1, "bytes": 64, "host_ns": 5}],
    "placement": [
        {"what": "module", "name": "fc", "device": "cpu", "bytes": 64, "kind": "Linear"},
        {"what": "input", "name": "x", "device": "cpu", "bytes": 64, "kind": "pageable"},
    ],
}


def recording(folder: Path, texts: list[str], *, faults: bool = True) -> None:
    """A recording in which all names are among ``texts``: of the host, the program and its
    arguments, phases, operations, modules, files, functions, findings, errors and ``faults`` of
    gpuprobe, with which it is incomplete."""
    lines: list[Any] = [LINES[0]]
    for line in LINES[1:]:
        if line["type"] == "step":
            line = {**line, **_MORE}
        if line["type"] == "blind_spot":
            line = {**line, "what": "?"}
        if line["type"] == "end":
            error = {"type": "E", "message": "m", "out_of_memory": False}
            line = {**line, "error": error, "gpuprobe_faults": ["f", "g"] if faults else []}
        made = poisoned(line, texts)
        if line["type"] == "step":
            made["traces"] = line.get("traces", [])
        if line["type"] == "finding":
            made["kind"] = line["kind"]
        lines.append(made)
    for at, text in enumerate(texts):  # one of each in the tables that have many rows
        more = {**_finding(), "message": text, "fingerprint": f"{at:016x}"}
        lines.insert(-1, {**more, "location": {"file": text, "line": at, "function": text}})
    (folder / "rank-00000.jsonl").write_bytes(dumped(lines))
    for name, data in SOURCE.items():
        if name.endswith(".cols"):
            (folder / name).write_bytes(_chunk(data, texts))


def _finding() -> dict[str, Any]:
    return dict(next(line for line in LINES if line.get("type") == "finding"))


def _chunk(data: bytes, texts: list[str]) -> bytes:
    header, columns, tables = unpacked_chunk(data)
    tables["strings"] = ["", *(poisoned(tables["strings"][1:], texts))]
    some = iter(poisoned([""] * 2 * len(tables["frames"]), texts))
    for frame in tables["frames"][1:]:
        if "site-packages" not in frame[0]:
            frame[0], frame[2] = f"/p/{next(some)}.py", next(some)
    tables["annotations"] = [["START", poisoned("", texts), 5]]
    return packed_chunk(header, columns, tables)


def baseline(path: Path, texts: list[str]) -> None:
    """A baseline in which the GPU, phases, lines and modules are among ``texts``."""
    plain = json.loads((RECORDED / "baseline.json").read_text())
    plain["environment"]["device"] = texts[0]

    def renamed(rows: dict[str, Any]) -> dict[str, Any]:
        return {f"{poisoned('', texts)} {at}": row for at, row in enumerate(rows.values())}

    plain["phases"] = renamed(plain["phases"])
    peak = plain["at_peak"]
    for part in ("lines", "modules", "categories"):
        peak[part] = renamed(peak[part])
        for row in peak[part].values():
            row["text"] = texts[0]
    for account in plain.get("accounts", {}).values():
        if "lines" in account:
            account["lines"] = renamed(account["lines"])
    path.write_text(json.dumps(plain))


def log(path: Path, texts: list[str]) -> None:
    """A log of readings in which GPUs, processes, users and reasons are among ``texts``."""
    made = []
    for line in (RECORDED / "readings.jsonl").read_bytes().splitlines()[:2]:
        plain = json.loads(line)
        made.append(_readings(plain, texts) if "moment" in plain else plain)
    path.write_bytes(dumped(made))


def _readings(plain: Any, texts: list[str], key: str = "") -> Any:
    if isinstance(plain, dict):
        return {k: _readings(v, texts, k) for k, v in plain.items()}
    if isinstance(plain, list):
        return [_readings(item, texts, key) for item in plain]
    named = ("name", "user", "command", "hostname", "platform", "python", "unavailable", "reason")
    if isinstance(plain, str) and (key in named or key == "value"):
        texts.append(texts.pop(0))
        return texts[-1]
    return plain


def file_name(text: str) -> str:
    """The text as a name that a file can have."""
    raw = os.fsencode(text.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape"))
    return os.fsdecode(raw.replace(b"/", b"_").replace(b"\0", b"_")[:120])
