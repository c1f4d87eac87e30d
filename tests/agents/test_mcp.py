"""`gpuprobe mcp`, used by a client of the SDK over stdio, as an agent's program does."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
import warm_python
from snapshot_samples import modern
from waiting import read_fifo, wait_for_end

from gpuprobe.agents.bounds import encoded, shorten
from gpuprobe.agents.folders import Folders
from gpuprobe.agents.tools import TOOLS
from gpuprobe.cli import main
from gpuprobe.errors import DataError, UsageError

RECORDED = Path(__file__).parent.parent / "recorded" / "v2"
LOUD = """
import os, subprocess, sys
import torch
print("printed")
os.write(1, b"written\\n")
subprocess.run(["echo", "of a process"])
width = int(sys.argv[1])
model = torch.nn.Linear(width, width).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(2):
    model(torch.ones(4, width, device="cuda")).sum().backward()
    optimizer.step()
"""
FAILS = "import torch\ntorch.zeros(8, device='cuda')\nraise ValueError('a wrong number')\n"
# One process of its own group, whose id is in the file, or FIFO, with that of the script.
WAITS = """
import os, pathlib, signal, subprocess, sys
pause = [sys.executable, "-c", "import signal; signal.pause()"]
other = subprocess.Popen(pause, start_new_session=True)
pathlib.Path("ids").write_text(f"{os.getpid()} {other.pid}")
signal.pause()
"""


def server(folder: Path, *options: str, cold: bool = False, **environment: str) -> Any:
    """A client that starts the server in a folder. ``cold``: its calls are its children."""
    mcp = pytest.importorskip("mcp", reason="the SDK of the Model Context Protocol is missing")
    if not hasattr(mcp, "Client"):
        pytest.skip("the SDK of the Model Context Protocol is older than 2.0")
    parameters = mcp.StdioServerParameters(
        command=warm_python.shared().python,
        args=["-m", "gpuprobe", "mcp", *options],
        env={**os.environ, **({} if cold else warm_python.NESTED), **environment},
        cwd=folder,
    )
    return mcp.Client(parameters)


def texts(result: Any) -> list[str]:
    return [block.text for block in result.content]


def refusal(result: Any) -> str:
    assert result.is_error
    assert result.structured_content is None
    (text,) = texts(result)
    return str(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project with a recording and a snapshot, and a file outside of it."""
    project = tmp_path / "project"
    project.mkdir()
    shutil.copytree(RECORDED / "cpu.gpuprobe", project / "run.gpuprobe")
    shutil.copytree(RECORDED / "cpu.gpuprobe", tmp_path / "outside.gpuprobe")
    (project / "snapshot.pickle").write_bytes(pickle.dumps(modern()))
    return project


async def test_tools_have_schemas_and_hints(folder: Path) -> None:
    async with server(folder) as client:
        listed = await client.list_tools()
    # Agents have it in their context in every conversation.
    assert len(listed.model_dump_json(by_alias=True, exclude_none=True)) <= 20_000
    tools = {tool.name: tool for tool in listed.tools}
    assert list(tools) == list(TOOLS)
    runs = {name for name, tool in tools.items() if not tool.annotations.read_only_hint}
    assert runs == {"estimate", "fit", "explain", "hazards"}
    assert all(tools[name].annotations.destructive_hint for name in runs)
    for tool in tools.values():
        jsonschema.Draft202012Validator.check_schema(tool.input_schema)
        assert tool.input_schema["additionalProperties"] is False
        assert all("description" in row for row in tool.input_schema["properties"].values())
    steps = tools["estimate"].input_schema["properties"]["steps"]
    assert (steps["type"], steps["minimum"], steps["default"]) == ("integer", 1, 3)
    assert tools["fit"].input_schema["required"] == ["script", "arg"]


def test_signatures_have_the_names_of_the_options() -> None:
    from gpuprobe.agents.tools import parameters
    from gpuprobe.cli.parser import command_parser

    renamed = {"arguments": "args", "sources": "source"}
    commands = {"hazards": "run", "estimate_model": "estimate"}
    for name, tool in TOOLS.items():
        _, parser = command_parser(commands.get(name, name))
        known = {action.dest for action in parser._actions}
        assert {renamed.get(one, one) for one in parameters(tool)} <= known, name


async def test_tools_that_read(folder: Path) -> None:
    async with server(folder) as client:
        report = await client.call_tool("report", {"recording": "run.gpuprobe", "top": 2})
        assert json.loads(texts(report)[0]) == report.structured_content
        assert report.structured_content == printed("report", folder / "run.gpuprobe", "--top=2")

        both = {"before": "run.gpuprobe", "after": "run.gpuprobe"}
        diff = await client.call_tool("diff", both)
        run = folder / "run.gpuprobe"
        assert diff.structured_content == printed("diff", run, run)

        replay = await client.call_tool("replay", {"snapshot": "snapshot.pickle"})
        assert replay.structured_content == printed("replay", folder / "snapshot.pickle")

        info = await client.call_tool("info", {"demo": "8xh100"})
        assert info.structured_content["schema"] == "gpuprobe.info"
        assert len(info.structured_content["devices"]) == 8
        doctor = await client.call_tool("doctor", {"demo": "8xh100"})
        assert doctor.structured_content["schema"] == "gpuprobe.doctor"


def printed(*arguments: object) -> Any:
    """The document that a command prints."""
    name, *rest = map(str, arguments)
    return json.loads(warm_python.gpuprobe(name, "--json", *rest).stdout)


async def test_an_estimate_is_that_of_the_command(folder: Path) -> None:
    """The script prints to stdout in three ways; the client fails at a line that it cannot read."""
    (folder / "loud.py").write_text(LOUD)
    reported: list[tuple[float, str]] = []

    async def progress(seconds: float, total: float | None, text: str | None) -> None:
        reported.append((seconds, str(text)))

    async with server(folder) as client:
        found = await client.call_tool(
            "estimate",
            {"script": "loud.py", "arguments": ["64"], "gpu": "a100-40gb"},
            progress_callback=progress,
        )
    assert not found.is_error
    same = printed("estimate", "--gpu=a100-40gb", folder / "loud.py", "--", "64")
    assert found.structured_content == same
    assert found.structured_content["fits"] is True
    assert reported[0] == (0.0, "running estimate (0 s)")
    assert [seconds for seconds, _ in reported] == sorted(seconds for seconds, _ in reported)


async def test_fit(folder: Path) -> None:
    (folder / "loud.py").write_text(LOUD.replace("int(sys.argv[1])", "WIDTH") + "\n")
    (folder / "loud.py").write_text("WIDTH = 64\n" + (folder / "loud.py").read_text())
    given = {
        "script": "loud.py",
        "arg": "WIDTH",
        "gpu": "t4",
        "max": 64,
    }
    reported: list[str] = []

    async def progress(seconds: float, total: float | None, text: str | None) -> None:
        reported.append(str(text))

    async with server(folder) as client:
        found = await client.call_tool("fit", given, progress_callback=progress)
    assert found.structured_content["largest"] == 64
    assert any("64" in text for text in reported[1:])


LEAKS = """\
import torch
from torch import nn

net = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 64)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
losses = []
for step in range(6):
    x = torch.randn(4096, 64, device="cuda")
    kept = net(x).square().mean()
    loss = net(x).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(kept)
"""


async def test_explain(folder: Path) -> None:
    (folder / "leaks.py").write_text(LEAKS)
    given = {"script": "leaks.py", "gpu": "t4", "compute": "shapes"}
    reported: list[str] = []

    async def progress(seconds: float, total: float | None, text: str | None) -> None:
        reported.append(str(text))

    async with server(folder) as client:
        found = await client.call_tool("explain", given, progress_callback=progress)
        refused = await client.call_tool("explain", {**given, "max_seconds": 0})
    assert not found.is_error, texts(found)
    first = found.structured_content["causes"][0]
    assert (first["rule"], first["effect"]["certainty"]) == ("kept-graphs", "tried")
    assert "+    losses.append(kept.detach())" in first["effect"]["patch"]
    assert any("running it to the peak" in text for text in reported)
    assert "max_seconds" in refusal(refused)


async def test_a_script_that_fails(folder: Path) -> None:
    (folder / "fails.py").write_text(FAILS)
    given = {"script": "fails.py", "gpu": "t4"}
    async with server(folder) as client:
        estimate = await client.call_tool("estimate", given)
        hazards = await client.call_tool("hazards", given)
    where = folder / "fails.py"
    assert refusal(estimate) == (
        f"error: the program failed at {where}:3: ValueError: a wrong number"
    )
    assert hazards.is_error
    assert texts(hazards)[0] == "error: the program failed: ValueError: a wrong number"
    document = hazards.structured_content
    assert json.loads(texts(hazards)[1]) == document
    assert document["failed"] == "ValueError: a wrong number"
    assert document["operations"] == 1


def test_choices_of_a_model_are_those_of_the_options() -> None:
    from typing import get_args

    from gpuprobe.agents.tools import parameters
    from gpuprobe.cli.parser import command_parser

    _, parser = command_parser("estimate")
    choices = {action.dest: tuple(action.choices) for action in parser._actions if action.choices}
    found = 0
    for name, (kind, _) in parameters(TOOLS["estimate_model"]).items():
        literal = [one for one in get_args(kind) if get_args(one)] or [kind]
        if name in choices:
            assert get_args(literal[0]) == choices[name], name
            found += 1
    assert found >= 5


async def test_models_are_names_or_files_of_the_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (folder / "config.json").write_text("[]")
    async with server(folder) as client:

        async def refused(model: str, **options: Any) -> str:
            return refusal(await client.call_tool("estimate_model", {"model": model, **options}))

        for path in ("../config.json", str(tmp_path / "config.json"), "..", "/etc/passwd"):
            assert (await refused(path)).startswith(f"error: {path} is outside the folders")
        assert (await refused("lama-3.1-8b")).startswith(
            "error: unknown model 'lama-3.1-8b'\n  hint: did you mean llama-3.1-8b or "
        )
        assert "not in the Hugging Face cache" in await refused("someone/something")
        assert str(folder / "config.json") in await refused("config.json")
        for name in ("a\0b", "x" * 5000, ""):
            assert (await refused(name)).startswith("error: unknown model")
        assert await refused("gpt2", lora_rank=4) == (
            "error: --lora-rank needs --method lora or qlora"
        )
        assert "method: Input should be 'full', 'lora' or 'qlora'" in await refused(
            "gpt2", method="dora"
        )


async def test_paths_are_those_of_the_folder(folder: Path, tmp_path: Path) -> None:
    (folder / "link.gpuprobe").symlink_to(tmp_path / "outside.gpuprobe")
    shutil.copytree(folder / "run.gpuprobe", folder / "inner.gpuprobe")
    (folder / "inner.gpuprobe" / "link").symlink_to(tmp_path)
    (folder / "good.gpuprobe").symlink_to(folder / "run.gpuprobe")
    outside = str(tmp_path / "outside.gpuprobe")
    async with server(folder) as client:

        async def report(path: str) -> Any:
            return await client.call_tool("report", {"recording": path})

        for path in ("../outside.gpuprobe", outside, "link.gpuprobe", "../missing"):
            assert refusal(await report(path)) == (
                f"error: {path} is outside the folders that the tools may use: {folder}\n"
                "  hint: gpuprobe mcp --allow FOLDER adds a folder"
            )
        inner = folder / "inner.gpuprobe" / "link"
        assert f"error: {inner} is outside" in refusal(await report("inner.gpuprobe"))
        script = await client.call_tool("estimate", {"script": "/etc/passwd"})
        assert "error: /etc/passwd is outside" in refusal(script)
        missing = refusal(await report("missing.gpuprobe"))
        assert missing.startswith("error: ")
        assert str(folder / "missing.gpuprobe") in missing
        assert not (await report("good.gpuprobe")).is_error
    async with server(folder, "--allow", str(tmp_path)) as client:
        assert not (await client.call_tool("report", {"recording": outside})).is_error


async def test_arguments_that_a_tool_does_not_have(folder: Path) -> None:
    async with server(folder) as client:
        for given, message in (
            ({}, "report: recording: Field required"),
            ({"recording": "x", "rows": 1}, "report: rows: Extra inputs are not permitted"),
            ({"recording": "x", "top": 0}, "report: top: Input should be greater than or equal"),
            ({"recording": "x", "top": "3"}, "report: top: Input should be a valid integer"),
            ({"recording": ""}, "not a path: ''"),
            ({"recording": "a\0b"}, "not a path: 'a\\x00b'"),
        ):
            text = refusal(await client.call_tool("report", given))
            assert text.startswith(f"error: {message}")
        text = refusal(await client.call_tool("train", {}))
        assert text.startswith("error: no such tool: train\n  hint: one of: info, doctor,")
        text = refusal(await client.call_tool("replay", {"snapshot": "run.gpuprobe"}))
        recording = folder / "run.gpuprobe"
        assert text.startswith(
            f"error: {recording} contains no allocation trace of a CUDA device, which replay needs"
            f"\n  hint: gpuprobe report {recording} shows what it contains; a trace is recorded by "
        )


async def test_results_are_bounded(folder: Path) -> None:
    async with server(folder, "--max-output", "100000") as client:
        info = await client.call_tool("info", {"demo": "8xh100"})
        document, note = texts(info)
        assert len(document.encode()) <= 100_000
        assert note.startswith("note: lists were cut to the size of a result")
        assert "devices[0].cpu_affinity.value: " in note
    async with server(folder, "--max-output", "2000") as client:
        text = refusal(await client.call_tool("info", {"demo": "8xh100"}))
        assert text.endswith(
            "bytes, more than the limit of 2000\n"
            "  hint: gpuprobe info --json prints all, or gpuprobe mcp --max-output BYTES"
        )


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_a_cancelled_call_ends_its_processes(folder: Path, tmp_path: Path) -> None:
    anyio = pytest.importorskip("anyio", reason="a dependency of the SDK is missing")
    (folder / "waits.py").write_text(WAITS)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    os.mkfifo(folder / "ids")
    async with server(folder, cold=True, TMPDIR=str(temporary)) as client:
        async with anyio.create_task_group() as group:
            group.start_soon(client.call_tool, "estimate", {"script": "waits.py"})
            ids = await anyio.to_thread.run_sync(read_fifo, folder / "ids")
            group.cancel_scope.cancel()
        await anyio.to_thread.run_sync(wait_for_end, *map(int, ids.split()))
        assert not list(temporary.glob("gpuprobe-*"))
        # The server still works.
        assert not (await client.call_tool("doctor", {"demo": "8xh100"})).is_error


async def test_a_script_that_ends_its_process(folder: Path) -> None:
    (folder / "ends.py").write_text("import os\nos._exit(7)\n")
    async with server(folder) as client:
        text = refusal(await client.call_tool("hazards", {"script": "ends.py"}))
    assert text == "error: the process of the call ended with code 7, without a result"


async def test_a_call_has_a_limit_of_time(folder: Path) -> None:
    (folder / "waits.py").write_text(WAITS)
    async with server(folder, "--timeout", "0.1") as client:
        text = refusal(await client.call_tool("hazards", {"script": "waits.py"}))
    assert text == (
        "error: hazards took longer than 0.1 s and was ended\n"
        "  hint: gpuprobe mcp --timeout SECONDS sets the limit"
    )


@pytest.mark.parametrize("how", ["stdin", signal.SIGTERM, signal.SIGKILL])
def test_calls_end_with_the_server(folder: Path, how: Any) -> None:
    """However the server ends; all that it has written to stdout is the protocol."""
    pytest.importorskip("mcp_types", reason="version 2 of the SDK is missing")
    (folder / "waits.py").write_text("print('printed', flush=True)" + WAITS)
    os.mkfifo(folder / "ids")
    process = subprocess.Popen(
        [warm_python.shared().python, "-m", "gpuprobe", "mcp"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
    )
    assert process.stdin is not None
    about = {"protocolVersion": "2025-06-18", "capabilities": {}}
    about["clientInfo"] = {"name": "test", "version": "1"}
    arguments = {"script": "waits.py"}
    for message in (
        {"id": 1, "method": "initialize", "params": about},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": {"name": "hazards", "arguments": arguments}},
    ):
        process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        process.stdin.flush()
    pid, other = map(int, read_fifo(folder / "ids").split())
    if how != "stdin":
        process.send_signal(how)
    else:
        process.stdin.close()
        process.stdin = None
    try:
        wait_for_end(pid)
        if how is not signal.SIGKILL:  # then no process is left to find that of another group
            wait_for_end(other)
    finally:
        if not ended(other):
            os.kill(other, signal.SIGKILL)
    written, errors = process.communicate(timeout=60)
    assert b"printed" in errors
    messages = [json.loads(line) for line in written.splitlines()]
    assert messages[0]["result"]["serverInfo"]["name"] == "gpuprobe"
    assert all(message["jsonrpc"] == "2.0" for message in messages)
    assert process.returncode == {"stdin": 0, signal.SIGTERM: 143}.get(how, -9)


async def test_files_of_the_folder_are_not_imported(folder: Path) -> None:
    (folder / "json.py").write_text("raise SystemExit('imported')\n")
    (folder / "gpuprobe.py").write_text("raise SystemExit('imported')\n")
    mcp = pytest.importorskip("mcp", reason="the SDK of the Model Context Protocol is missing")
    start = "import sys; del sys.path[0]; from gpuprobe.cli import main; main(['mcp'])"
    path = [str(Path(__file__).parent.parent.parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    parameters = mcp.StdioServerParameters(
        command=sys.executable, args=["-c", start], env=env, cwd=folder
    )
    async with mcp.Client(parameters) as client:
        found = await client.call_tool("report", {"recording": "run.gpuprobe"})
        assert not found.is_error


def test_without_the_sdk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gpuprobe.cli.commands.mcp.find_spec", lambda name: None)
    assert main(["mcp"]) == 3
    assert capsys.readouterr().err == (
        "gpuprobe: error: mcp is not installed (the SDK of the Model Context Protocol)\n"
        "  hint: pip install 'gpuprobe[mcp]'\n"
    )


def test_configurations_in_the_documentation() -> None:
    from gpuprobe.cli.parser import command_parser

    page = Path(__file__).parent.parent.parent / "docs/how-to/use-from-an-agent.md"
    found = re.findall(r"```json\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert len(found) == 3
    for text in found:
        ((_, servers),) = json.loads(text).items()
        entry = servers["gpuprobe"]
        assert entry["command"].endswith("bin/gpuprobe")
        name, *options = entry["args"]
        _, parser = command_parser(name)
        parser.parse_args(options)


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder: missing"):
        Folders.of(str(tmp_path), ["missing"])
    with pytest.raises(UsageError, match="the working folder is /, which would give"):
        Folders.of("/", [])
    folders = Folders.of("/", [str(tmp_path)])
    assert folders.roots == (str(tmp_path),)
    assert folders.resolve("a/../b") == str(tmp_path / "b")
    with pytest.raises(UsageError, match="is outside the folders"):
        folders.resolve("/etc/passwd")
    # A name that only begins as the folder's does.
    with pytest.raises(UsageError, match="is outside the folders"):
        folders.resolve(f"{tmp_path}2/file")


def test_the_longest_lists_are_shortened() -> None:
    document = {"version": [2, 1], "rows": list(range(1000)), "ranks": [{"steps": [1] * 50}] * 2}
    document = json.loads(json.dumps(document))
    cut = shorten(document, 400)
    assert len(encoded(document)) <= 400
    assert document["rows"] == list(range(len(document["rows"])))
    assert [(one.place, one.total) for one in cut] == [("rows", 1000)]
    assert cut[0].shown == len(document["rows"])
    whole = {"rows": [1, 2, 3]}
    assert shorten(whole, len(encoded(whole))) == []
    with pytest.raises(DataError, match="the result has 16 bytes, more than the limit of 15"):
        shorten(whole, 15)
