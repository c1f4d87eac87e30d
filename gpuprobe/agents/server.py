"""The server: the tools of `gpuprobe.agents.tools` over the Model Context Protocol, with the
official SDK.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
from collections.abc import Mapping
from typing import Any, Final

import anyio
from mcp import types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema

from gpuprobe._version import __version__
from gpuprobe.agents.folders import Folders
from gpuprobe.agents.process import CallLimits, Reply, ToolCalls
from gpuprobe.agents.tools import TOOLS, Tool, parameters
from gpuprobe.model.text import cut, visible

_INSTRUCTIONS: Final = (
    "GPU memory of PyTorch programs: whether a training script fits on a GPU (estimate, fit) or a "
    "model does, by its name (estimate_model), why its memory is full and what helps (explain), "
    "where the memory of a recording went (report, diff, replay), races between streams (hazards), "
    "and the state of this machine's GPUs (info, doctor). No tool needs a GPU. estimate, fit, "
    "explain and hazards execute the script; the others only read. Sizes are bytes."
)
_MOST_COLUMNS: Final = 1000
_LISTS_NAMED: Final = 8


def serve(folders: Folders, limits: CallLimits) -> None:
    """Serve on stdin and stdout until stdin ends. SIGTERM and SIGINT end the calls and this
    process.
    """
    calls = ToolCalls(folders, limits)

    def end(number: int, frame: object) -> None:
        calls.end_all()
        os._exit(128 + number)  # the thread that reads stdin cannot be interrupted

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    anyio.run(_serve, _server(calls))


async def _serve(server: Any) -> None:
    async with stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())


def _server(calls: ToolCalls) -> Any:
    inputs = {tool.name: _arguments_of(tool) for tool in TOOLS.values()}
    described = [_described(tool, inputs[tool.name]) for tool in TOOLS.values()]

    async def list_tools(context: Any, params: Any) -> Any:
        return types.ListToolsResult(tools=described)

    async def call_tool(context: Any, params: Any) -> Any:
        if params.name not in TOOLS:
            return _failed(f"no such tool: {params.name}", f"one of: {', '.join(TOOLS)}")
        try:
            given = inputs[params.name].model_validate(params.arguments or {}, strict=True)
        except ValidationError as error:
            return _failed(_first_problem(params.name, error))

        async def progress(seconds: float, text: str) -> None:
            message = f"{cut(visible(text), _MOST_COLUMNS)} ({seconds:.0f} s)"
            await context.session.report_progress(seconds, message=message)

        return _result(await calls.run(params.name, given.model_dump(), progress))

    return Server(
        "gpuprobe",
        version=__version__,
        instructions=_INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def _arguments_of(tool: Tool) -> type[BaseModel]:
    """The model of a tool's arguments, from its signature."""
    fields: dict[str, Any] = {}
    signature = inspect.signature(tool.function).parameters
    for name, (kind, known) in parameters(tool).items():
        default = signature[name].default
        given = {} if default is inspect.Parameter.empty else {"default": default}
        fields[name] = (kind, Field(description=known.text, ge=known.least, **given))
    model: type[BaseModel] = create_model(
        tool.name, __config__=ConfigDict(extra="forbid"), **fields
    )
    return model


class _Untitled(GenerateJsonSchema):  # type: ignore[misc]
    """Without titles, which repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def model_schema(self, schema: Any) -> Any:
        made = super().model_schema(schema)
        made.pop("title", None)
        return made


def _described(tool: Tool, arguments: type[BaseModel]) -> Any:
    return types.Tool(
        name=tool.name,
        description=tool.text,
        input_schema=arguments.model_json_schema(schema_generator=_Untitled),
        # No schema of the output: together they have 130,000 characters, which an agent would read
        # before each conversation.
        annotations=types.ToolAnnotations(
            title=f"gpuprobe {tool.name}",
            read_only_hint=not tool.runs_script,
            destructive_hint=tool.runs_script,  # a script can do anything
            idempotent_hint=not tool.runs_script,
            open_world_hint=tool.runs_script,
        ),
    )


def _first_problem(tool: str, error: ValidationError) -> str:
    """The first invalid argument, in one line."""
    first: Mapping[str, Any] = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{tool}: {place}: {first['msg']}"


def _failed(message: str, hint: str = "") -> Any:
    return types.CallToolResult(content=[_text(_error_text(message, hint))], is_error=True)


def _error_text(message: str, hint: str) -> str:
    lines = [f"error: {message}", *([f"  hint: {hint}"] if hint else [])]
    return "\n".join(cut(visible(line), _MOST_COLUMNS) for line in lines)


def _text(text: str) -> Any:
    return types.TextContent(type="text", text=text)


def _result(reply: Reply) -> Any:
    """The document, as text too, for clients without structured results; then what was cut."""
    content = []
    if reply.error:
        content.append(_text(_error_text(reply.error, reply.hint)))
    if reply.document is not None:
        content.append(_text(json.dumps(reply.document, separators=(",", ":"))))
    if reply.cut:
        content.append(_text(_cut_text(reply)))
    return types.CallToolResult(
        content=content, structured_content=reply.document, is_error=bool(reply.error)
    )


def _cut_text(reply: Reply) -> str:
    named = [f"{place}: {shown} of {total}" for place, shown, total in reply.cut[:_LISTS_NAMED]]
    more = len(reply.cut) - len(named)
    return (
        "note: lists were cut to the size of a result (gpuprobe mcp --max-output): "
        + ", ".join(named)
        + (f", and {more} more" if more else "")
    )
