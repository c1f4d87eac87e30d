"""What the reference takes from the code: one function for each kind of section.

Everything is read with ``ast`` and ``inspect`` and written by hand here, not by argparse or
``inspect.signature``: what those print differs between versions of Python.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import io
import re
import sys
import textwrap
import tokenize
from collections.abc import Callable, Sequence
from enum import EnumMeta
from functools import partial
from pathlib import Path
from typing import Any

import rules_page

ROOT = Path(__file__).resolve().parent.parent

_LITERAL = re.compile(r"``([^`]+)``")

# -- the command line


def command_list() -> str:
    """The commands, by group."""
    from gpuprobe.cli.commands import GROUPS

    return table(
        ("to", "commands"),
        [
            (group, ", ".join(f"[`{name}`](#gpuprobe-{name})" for name in commands))
            for group, commands in GROUPS.items()
        ],
    )


def command_reference() -> str:
    """Every command with its arguments, as argparse knows them. Those of an earlier command are not
    described again.
    """
    described: dict[tuple[str, str], str] = {}
    return "\n\n".join(_command(name, described) for name in _commands())


def _commands() -> dict[str, str]:
    from gpuprobe.cli.commands import COMMANDS

    return COMMANDS


_MANY = 4
"""So many arguments of an earlier command are left to its table."""

_LONG = 10
"""So many words are not printed again: the table refers to the earlier command."""

_ELSEWHERE = re.compile(r"run a module|print (a|one) JSON document|print the \w+ as JSON")
"""What the usage, or the head of the page, has."""


def _command(name: str, described: dict[tuple[str, str], str]) -> str:
    module = importlib.import_module(f"gpuprobe.cli.commands.{name.replace('-', '_')}")
    parser = argparse.ArgumentParser(prog=f"gpuprobe {name}", description=module.__doc__)
    module.add_arguments(parser)
    actions = [
        action
        for action in parser._actions
        if action.help != argparse.SUPPRESS and "--help" not in action.option_strings
    ]
    if name == "baseline":
        parser = module.update_parser()
        actions = [a for a in parser._actions if a.help != argparse.SUPPRESS and a.dest != "help"]
    options = [a for a in actions if a.option_strings]
    positionals = [a for a in actions if not a.option_strings]
    usage = parser.usage or " ".join(
        [parser.prog, "[options]", *(_positional(action) for action in positionals)]
    )
    rows = [
        (f"`{_spelling(a)}`", text)
        for a in (*positionals, *options)
        if (text := _help(parser, a)) and not _ELSEWHERE.fullmatch(text)
    ]
    earlier: dict[str, list[tuple[str, str]]] = {}
    for row in rows:
        if row in described:
            earlier.setdefault(described[row], []).append(row)
        described.setdefault(row, name)
    again = {other: same for other, same in earlier.items() if len(same) >= _MANY}
    left_out = {row for same in again.values() for row in same}
    shown = [row for row in rows if row not in left_out]
    for at, row in enumerate(shown):
        if len(row[1].split()) >= _LONG and (other := described[row]) != name:
            shown[at] = (row[0], f"as in [`gpuprobe {other}`](#gpuprobe-{other})")
    parts = [
        f"## gpuprobe {name}",
        f"```text\n{usage % {'prog': parser.prog}}\n```",
        docstring(parser.description),
        *([listing(shown)] if shown else []),
        *(
            f"As in [`gpuprobe {other}`](#gpuprobe-{other}): {', '.join(row[0] for row in same)}."
            for other, same in again.items()
        ),
    ]
    return "\n\n".join(parts)


def _metavar(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.dest.upper()


def _positional(action: argparse.Action) -> str:
    shown = _metavar(action)
    return {
        "?": f"[{shown}]",
        "*": f"[{shown} ...]",
        "+": f"{shown} [{shown} ...]",
    }.get(str(action.nargs), shown)


def _spelling(action: argparse.Action) -> str:
    if not action.option_strings:
        return _metavar(action)
    value = f" {_positional(action)}" if action.nargs != 0 else ""
    return ", ".join(action.option_strings) + value


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    values = {**vars(action), "prog": parser.prog}
    text = (action.help or "") % values
    default = action.default
    worth_saying = isinstance(default, (str, int, float)) and not isinstance(default, bool)
    worth_saying = worth_saying and default not in ("", argparse.SUPPRESS)
    if action.option_strings and worth_saying and "default" not in text:
        text += f" (default: {default})"
    return text


# -- exit codes


def exit_code_table() -> str:
    """The codes of ``gpuprobe.cli.exit_codes``, and the errors that become each."""
    from gpuprobe import errors
    from gpuprobe.cli import exit_codes

    comments = _comments(inspect.getsource(exit_codes))
    raised: dict[int, list[str]] = {}
    for name in errors.__all__:
        kind = getattr(errors, name)
        if kind is not errors.GpuprobeError and issubclass(kind, Exception):  # others are caught
            code = exit_codes.of(kind("", "") if kind is errors.MissingExtra else kind(""))
            raised.setdefault(code, []).append(f"`{name}`")
    rows = []
    for name, value in vars(exit_codes).items():
        if name.isupper() and isinstance(value, int):
            meaning = name.lower().replace("_", " ")
            comment = comments.get(name, "")
            if comment:
                meaning = comment if comment.startswith(meaning) else f"{meaning}: {comment}"
            rows.append((str(value), meaning, ", ".join(raised.get(value, []))))
    return table(("code", "meaning", "errors of the Python API"), rows)


def error_table() -> str:
    """Every public error with the first line of its docstring."""
    from gpuprobe import errors

    rows = []
    for name in errors.__all__:
        kind = getattr(errors, name)
        if not issubclass(kind, Exception):
            continue  # gpuprobe's own signal through a program that it runs
        base = kind.__bases__[0].__name__
        rows.append((f"`{name}`", f"`{base}`", _first_paragraph(kind.__doc__)))
    return table(("error", "is a", "meaning"), rows)


def json_documents() -> str:
    """The documents of ``--json``, with the commands that print them and their schemas."""
    from gpuprobe.cli.commands import COMMANDS
    from gpuprobe.reporters.json.schemas import SCHEMAS

    others = {
        "cuda-torch": "`cuda-torch`",
        "error": "all, in place of a result",
        "hazards": "`run --hazards-json FILE`",
        "info": "`info`, `top`",
        "report": "`report`, `view RECORDING`",
        "runs": "`view`",
        "serving": "`estimate -- vllm …`",
        "gpus": "`estimate --gpus …`",
        "serving-fit": "`fit -- vllm …`",
        "written": "`baseline`",
    }
    rows = []
    for file, documents in SCHEMAS.items():
        name = file.rpartition("-")[0]
        assert name in others or name in COMMANDS, name
        rows.append((others.get(name, f"`{name}`"), f"`{documents[0].name}`", f"`{file}.json`"))
    return table(("printed by", "document", "schema"), rows)


# -- the Python API


def python_api() -> str:
    """Every public name of ``gpuprobe``, then the classes that they hand out."""
    import gpuprobe

    names = [name for name in gpuprobe.__all__ if name != "__version__"]
    public = [getattr(gpuprobe, name) for name in names]
    functions = [item for item in public if not inspect.isclass(item)]
    classes = [item for item in public if inspect.isclass(item)]
    parts = [f"## gpuprobe.{item.__name__}\n\n{_function(item)}" for item in functions]
    parts += [
        f"## {item.__name__}\n\n{_class(item)}"
        for item in classes + _handed_out(functions, classes)
    ]
    return "\n\n".join(parts)


def _handed_out(functions: list[Any], known: list[type]) -> list[type]:
    """Classes that public functions return, which are not public names themselves."""
    found: list[type] = []
    for function in functions:
        node = _node(function)
        assert isinstance(node, ast.FunctionDef), function
        names = {n.id for n in ast.walk(node.returns or node) if isinstance(n, ast.Name)}
        module = ast.parse(inspect.getsource(sys.modules[function.__module__]))
        for statement in ast.walk(module):  # also those under TYPE_CHECKING
            if isinstance(statement, ast.ImportFrom) and statement.module:
                for alias in statement.names:
                    if alias.name in names and statement.module.startswith("gpuprobe."):
                        item = getattr(importlib.import_module(statement.module), alias.name)
                        if inspect.isclass(item) and item not in found + known:
                            found.append(item)
    return found


def _function(item: Any, name: str = "") -> str:
    node = _node(item)
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)), item
    text = docstring(inspect.getdoc(item))
    paragraphs = [part for part in text.split("\n\n") if not part.startswith("Raises ")]
    signature = _signature(node, name or "gpuprobe." + node.name)
    return "\n\n".join([f"```text\n{signature}\n```", *paragraphs])


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> str:
    pieces = _parameters(node.args)
    if pieces and pieces[0] in ("self", "cls"):
        del pieces[0]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    line = f"{name}({', '.join(pieces)}){returns}"
    if len(line) <= 88:
        return line
    return f"{name}(\n" + "".join(f"    {piece},\n" for piece in pieces) + f"){returns}"


def _parameters(arguments: ast.arguments) -> list[str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    pieces = [
        _parameter(a, d) for a, d in zip(positional, [*defaults, *arguments.defaults], strict=True)
    ]
    if arguments.posonlyargs:
        pieces.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg is not None:
        pieces.append(f"*{_parameter(arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        pieces.append("*")
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    pieces += [_parameter(argument, default) for argument, default in named]
    if arguments.kwarg is not None:
        pieces.append(f"**{_parameter(arguments.kwarg, None)}")
    return pieces


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    text = argument.arg
    if argument.annotation is not None:
        text += f": {ast.unparse(argument.annotation)}"
    if default is None:
        return text
    return f"{text} = {ast.unparse(default)}" if ": " in text else f"{text}={ast.unparse(default)}"


def _class(item: type) -> str:
    parts = [docstring(item.__doc__)]
    if dataclasses.is_dataclass(item) and item.__name__ != "Device":  # `info --json` has its fields
        parts.append(fields(item, typed=False))
    properties: list[tuple[str, str]] = []
    methods: list[str] = []
    for name, member in vars(item).items():
        if name.startswith("_") or _internal(item, name):
            continue
        if isinstance(member, property) and inspect.getdoc(member):
            properties.append((f"`{name}`", _first_paragraph(inspect.getdoc(member))))
        elif inspect.isfunction(member) and inspect.getdoc(member):
            function = inspect.unwrap(member)
            methods.append(f"### {item.__name__}.{name}\n\n" + _function(function, name))
    if properties:
        parts.append(f"Properties:\n\n{listing(properties)}")
    return "\n\n".join(part for part in (*parts, *methods) if part)


# Of these classes users need only some methods: the others are public to gpuprobe's own packages.
_FOR_USERS = {
    "Recorder": {"step", "phase", "wrap", "finish", "uses_cost"},
    "NativeSession": set[str](),
}


def _internal(item: type, name: str) -> bool:
    return name not in _FOR_USERS.get(item.__name__, {name})


# -- the recording format


def fields(cls: type, *, typed: bool = True) -> str:
    """The fields of a dataclass: a table of those with a comment, and the names of the others. A
    type with a question mark may be `Unavailable`. Without types, those that the docstring
    describes are not named again.
    """
    described = set() if typed else set(_LITERAL.findall(cls.__doc__ or ""))
    node = _node(cls)
    assert isinstance(node, ast.ClassDef)
    comments = _comments(textwrap.dedent(inspect.getsource(cls)))
    names = vars(sys.modules[cls.__module__])
    rows, others = [], []
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            kind, text = _annotation(statement.annotation)
            meaning = text or comments.get(name, "")
            enum = names.get(kind)
            if isinstance(enum, EnumMeta):
                members: list[Any] = list(enum)
                values = ", ".join(f"`{member.value}`" for member in members)
                meaning = f"{meaning}; {values}" if meaning else values
            default = "" if statement.value is None else _default(statement.value)
            shown = f"{name}: {kind.replace(' | Unavailable', '?')}{default}" if typed else name
            if meaning:
                rows.append((f"`{shown}`", meaning))
            elif name not in described:
                others.append(f"`{shown}`")
    parts = [listing(rows)] if rows else []
    if others:
        head = "Further fields" if rows or described else "Fields"
        parts.append(f"{head}: {', '.join(others)}.")
    return "\n\n".join(parts)


def _annotation(node: ast.expr) -> tuple[str, str]:
    """The type of a field, without its limits, and its description: a text in ``Annotated``."""
    if not (isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Annotated"):
        return ast.unparse(node), ""
    assert isinstance(node.slice, ast.Tuple)
    kind, *notes = node.slice.elts
    texts = [str(note.value) for note in notes if isinstance(note, ast.Constant)]
    return ast.unparse(kind), " ".join(texts)


_EMPTY = ("None", "False", "0", "''", "()", "{}", "[]", "((), ())")


def _default(value: ast.expr) -> str:
    """`` = default``, or nothing for one that is empty or unavailable."""
    text = ast.unparse(value)
    if (made := re.fullmatch(r"field\(default(?:_factory)?=(.*)\)", text)) is not None:
        text = {"dict": "{}", "list": "[]", "tuple": "()"}.get(made[1], made[1])
    # A constant, class or function that makes a value: none of a text that a reader could type.
    if text in _EMPTY or text.startswith("_") or re.match(r"(lambda\b|tuple\b|[A-Z]\w*$)", text):
        return ""
    return f" = {text}"


def record(path: str) -> str:
    """One record of the format: the docstring of its dataclass, and its fields."""
    module, _, name = path.rpartition(".")
    cls = getattr(importlib.import_module(f"gpuprobe.model.{module}"), name)
    return f"**{name}.** {docstring(cls.__doc__)}\n\n{fields(cls)}"


def trace_columns() -> str:
    """The columns of a trace chunk."""
    from gpuprobe.model import trace

    source = inspect.getsource(trace)
    (columns,) = (
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "COLUMNS"
    )
    assert isinstance(columns, ast.Dict)
    lines = {key.lineno: (ast.literal_eval(key), key.lineno) for key in columns.keys if key}
    comments = _attached(source, lines)
    rows = [
        (f"`{name}: {code}`", comments.get(name, ""))
        for name, code in trace.COLUMNS.items()
        if name not in trace.USE_COLUMNS
    ]
    return (
        f"{listing(rows)}\n\nFurther columns, of what operators did with a block: `USE_COLUMNS` in "
        "`gpuprobe/model/trace.py`."
    )


def codes(path: str) -> str:
    """The numbers an enum has in trace columns."""
    module, _, name = path.rpartition(".")
    enum: Any = getattr(importlib.import_module(f"gpuprobe.model.{module}"), name)
    return ", ".join(f"{m.code} `{m.value}`" for m in sorted(enum, key=lambda m: m.code)) + "."


def module_doc(name: str) -> str:
    """A module's docstring."""
    return docstring(importlib.import_module(f"gpuprobe.{name}").__doc__)


# -- helpers


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table. Columns that are empty in every row are left out."""
    used = [i for i in range(len(head)) if any(row[i] for row in rows)]
    lines = [[head[i] for i in used], ["---"] * len(used)]
    lines += [[row[i].replace("|", "\\|") for i in used] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def listing(rows: Sequence[tuple[str, str]]) -> str:
    """A Markdown list of names and what they mean."""
    return "\n".join(f"* {name}: {meaning}" for name, meaning in rows)


def docstring(text: str | None) -> str:
    """A docstring as Markdown: reST's literals become code, its literal blocks fenced ones."""
    clean = inspect.cleandoc(text or "").strip()
    out: list[str] = []
    literal = False
    for paragraph in clean.split("\n\n"):
        if literal and paragraph.startswith("    "):
            code = textwrap.dedent(paragraph)
            if out and out[-1].startswith("```text"):  # a blank line within the literal block
                out[-1] = f"{out[-1].removesuffix('```')}\n{code}\n```"
            else:
                out.append(f"```text\n{code}\n```")
            continue
        literal = paragraph.endswith("::")
        prose = paragraph.removesuffix("::") + (":" if len(paragraph) > 2 and literal else "")
        if prose:
            out.append(_LITERAL.sub(r"`\1`", prose))
    return "\n\n".join(out)


def _first_paragraph(text: str | None) -> str:
    return " ".join(docstring(text).split("\n\n")[0].split())


def _node(item: Any) -> ast.stmt:
    return ast.parse(textwrap.dedent(inspect.getsource(item))).body[0]


def _comments(source: str) -> dict[str, str]:
    """The comment at each assignment or annotation of a name: see `_attached`."""
    names: dict[int, tuple[str, int]] = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.AnnAssign, ast.Assign)):
            continue
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        if isinstance(target, ast.Name):
            names[node.end_lineno or node.lineno] = (target.id, node.lineno)
    return _attached(source, names)


def _attached(source: str, names: dict[int, tuple[str, int]]) -> dict[str, str]:
    """name -> the comment behind it, else the lines of comment above it.

    ``names``: the line where a thing ends -> its name, and the line where it begins.
    """
    behind: dict[int, str] = {}
    alone: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            own_line = not token.line[: token.start[1]].strip()
            (alone if own_line else behind)[token.start[0]] = token.string.lstrip("# ")
    found = {}
    for end, (name, start) in names.items():
        above: list[str] = []
        while start - 1 - len(above) in alone:
            above.insert(0, alone[start - 1 - len(above)])
        text = behind.get(end) or " ".join(above)
        if text:
            found[name] = _LITERAL.sub(r"`\1`", text)
    return found


# -- all of them


def hazard_rules() -> str:
    """Every rule of the hazard engine, from the code."""
    from gpuprobe.hazards.rules import RULES

    rows = ["| id | kind | what | what to do |", "| --- | --- | --- | --- |"]
    rows += [f"| {r.id} | {r.kind} | {r.title} | {r.remedy} |" for r in RULES]
    return "\n".join(rows)


def placement_rules() -> str:
    """Every rule of `gpuprobe.analysis.placement`, from the code."""
    from gpuprobe.analysis.placement import RULES

    return table(("id", "kind", "what is checked"), [(r.id, r.kind, r.title) for r in RULES])


def metrics() -> str:
    """Every metric that ``gpuprobe export`` has, from its tables."""
    from gpuprobe.reporters.metrics.exporter import SELF_METRICS
    from gpuprobe.reporters.metrics.gpu import GPU_METRICS
    from gpuprobe.reporters.metrics.metrics import Metric
    from gpuprobe.reporters.metrics.run import RUN_METRICS

    def row(metric: Metric, common: tuple[str, ...]) -> tuple[str, ...]:
        labels = "".join(f" `{label}`" for label in metric.labels if label not in common)
        return (f"`{metric.name}`{labels}", metric.help)

    parts = (
        ("GPUs", ("uuid", "index", "name"), GPU_METRICS),
        ("Runs", ("run", "rank"), RUN_METRICS),
        ("The export itself", (), SELF_METRICS),
    )
    for _, common, listed in parts:
        for metric in listed:
            assert set(common) <= set(metric.labels), metric
            assert metric.name.endswith("_total") == (metric.kind == "counter"), metric
    return "\n\n".join(
        f"## {title}\n\n" + listing([row(metric, common) for metric in listed])
        for title, common, listed in parts
    )


_GATE_METRICS = {
    "growth_per_step": "memory that steps leave allocated, after the second step",
    "peak_allocated": "highest allocated memory of the whole run",
    "steady_allocated": "what is allocated after the last step",
    "peak_reserved": "highest memory that the allocator held from the driver",
    "step_time": "predicted time of a step, of programs on a simulated GPU",
    "device_allocs_after_warm_up": "calls of `cudaMalloc` after the second step",
    "implicit_syncs_per_step": "implicit waits for the GPU, per step (`--hazards`)",
    "races": "races between streams in the run (`--hazards`)",
}


def gate_metrics() -> str:
    """What `gpuprobe check` compares, and what it accepts by default."""
    from gpuprobe.analysis.baseline.model import IGNORED, METRICS

    rows = [
        "| metric | what | accepted on hardware | ignored without a GPU |",
        "| --- | --- | --- | --- |",
    ]
    rows += [
        f"| `{name}` | {_GATE_METRICS[name]} "
        f"| {'–' if name == 'step_time' else tolerance.text(unit)} "
        f"| {IGNORED.get(name, tolerance).text(unit)} |"
        for name, (unit, tolerance) in METRICS.items()
    ]
    return "\n".join(rows)


def layers() -> str:
    """The floors as import-linter has them, highest first."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"^layers = \[\n(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    if listed is None:
        raise RuntimeError("pyproject.toml has no contract of layers")
    rows = [line.strip().strip('",').replace("gpuprobe.", "") for line in listed[1].splitlines()]
    return "```text\n" + "\n".join(re.sub(r"[()]", "", row) for row in rows) + "\n```"


def packages() -> str:
    """Each package, with the first sentence of its docstring."""
    rows = []
    for file in sorted((ROOT / "gpuprobe").glob("*/__init__.py")):
        text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        summary = " ".join(text.partition("\n\n")[0].replace("``", "`").split())
        sentence = re.split(r"(?<=\.)\s", summary)[0]
        rows.append((f"`{file.parent.name}/`", sentence))
    return listing(rows)


def results_of(benchmark: str, *arguments: str) -> str:
    """The page of a benchmark's results, without a run of it."""
    benchmarks = str(ROOT / "benchmarks")
    if benchmarks not in sys.path:
        sys.path.append(benchmarks)
    text: str = importlib.import_module(benchmark).page(*arguments)
    return text


def gpus() -> str:
    """The GPU catalogue; `gpuprobe/catalogue/gpus.json` has where each figure was read."""
    from gpuprobe.catalogue.file import built_in
    from gpuprobe.catalogue.gpu_model import cublas_workspace

    rows = []
    for model in built_in():
        low, high = (value / (1 << 20) for value in model.context)
        rows.append(
            (
                ", ".join(f"`{name}`" for name in (model.name, *model.aliases)),
                f"{model.total_memory:,}",
                f"{low:.0f} to {high:.0f}",
            )
        )
        large = cublas_workspace(model.capability) == 32 << 20
        assert large == (model.major >= 9), model.name  # the page has the rule
    return table(("name", "memory, bytes", "context, MiB"), rows)


SECTIONS: dict[str, Callable[[], str]] = {
    "blind-truth": partial(results_of, "blind_truth"),
    "serving-logs": partial(results_of, "serving_logs"),
    "step-time-truths": partial(results_of, "step_time_compare"),
    "layers": layers,
    "packages": packages,
    "gate-metrics": gate_metrics,
    "commands": command_list,
    "command-reference": command_reference,
    "exit-codes": exit_code_table,
    "errors": error_table,
    "json-documents": json_documents,
    "python-api": python_api,
    "trace-columns": trace_columns,
    "gpus": gpus,
    "hazard-rules": hazard_rules,
    "metrics": metrics,
    "placement-rules": placement_rules,
    "doctor-rules": rules_page.machine,
    "rank-rules": rules_page.ranks,
    "other-rules": rules_page.others,
    "xids": rules_page.xids,
}

WITH_ARGUMENT: dict[str, Callable[[str], str]] = {
    "record": record,
    "codes": codes,
    "module": module_doc,
}
