"""Parsing the command line, calling the command, and turning errors into exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from gpuprobe.cli import exit_codes, output, stderr
from gpuprobe.cli.after_script import before_script, sort_options
from gpuprobe.cli.commands import COMMANDS, GROUPS
from gpuprobe.errors import (
    EnvironmentUnavailable,
    GpuprobeError,
    InternalError,
    Interrupted,
    UsageError,
)
from gpuprobe.model.text import cut


class _Lines(str):
    """A part of a help text whose lines stay as they are."""

    __slots__ = ()


class _Formatter(argparse.HelpFormatter):
    """Wraps each paragraph of a description, but not `_Lines`."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if isinstance(text, _Lines):
            return text
        fill = super()._fill_text
        return "\n\n".join(fill(part, width, indent) for part in text.split("\n\n"))


class Parser(argparse.ArgumentParser):
    """An argument parser with gpuprobe's errors: one line, a hint, exit code 2. An option has one
    spelling: an abbreviation might be an option of the script.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        hint = f"{self.prog} --help"
        if "unrecognized arguments" in message and any(a.dest == "script" for a in self._actions):
            hint = f"options of the script belong after it; {hint}"
        raise UsageError(message, hint=self._near(message) or hint)

    def _near(self, message: str) -> str:
        """A hint with the known option most similar to the first unknown one."""
        import difflib

        before, unknown, words = message.partition("unrecognized arguments: ")
        given = words.split()[0].partition("=")[0] if unknown and not before and words else ""
        names = {name.lstrip("-"): name for name in self._option_string_actions}
        near = difflib.get_close_matches(given.lstrip("-"), names, n=1, cutoff=_SIMILAR)
        return f"did you mean {names[near[0]]}?" if given.startswith("-") and near else ""


def _overview() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listing = ""
    for group, commands in GROUPS.items():
        lines = (f"  {name:<{width}}  {text}\n" for name, text in commands.items())
        listing += f"{group}:\n{''.join(lines)}\n"
    parser = Parser(
        prog="gpuprobe",
        usage="gpuprobe [--version] [--help] COMMAND ...",
        description="Where GPU memory goes, why, and what to do about it.",
        epilog=_Lines(f"{listing}Help on a command, with examples: gpuprobe help COMMAND"),
        formatter_class=_Formatter,
    )
    parser.add_argument("-V", "--version", action="store_true", help="print the version")
    return parser


def own_options_first(parser: argparse.ArgumentParser, given: Sequence[str]) -> list[str]:
    """The arguments with gpuprobe's options before the script; see ``after_script``."""
    found = sort_options(parser, given)
    if found.scripts:
        stderr.print_line(
            f"note: {', '.join(found.scripts)} after the script: the script's own option; "
            "gpuprobe's goes before the script"
        )
    if found.ambiguous:
        names = ", ".join(found.ambiguous)
        stderr.print_line(f"note: read as gpuprobe's: {names}; put -- before options of the script")
    return found.arguments


def command_parser(name: str) -> tuple[ModuleType, argparse.ArgumentParser]:
    """The module of a command, and the parser of its arguments."""
    module = import_module(f"gpuprobe.cli.commands.{name.replace('-', '_')}")
    examples = "\n".join(f"  {line}\n      {text}" for line, text in module.EXAMPLES.items())
    parser = Parser(
        prog=f"gpuprobe {name}",
        description=module.__doc__,
        epilog=_Lines(f"examples:\n{examples}"),
        formatter_class=_Formatter,
    )
    module.add_arguments(parser)
    return module, parser


class _Talk:
    """How errors are printed. ``json``: also on stdout, as the document ``gpuprobe.error``."""

    def __init__(self, arguments: Sequence[str]) -> None:
        words = list(arguments)
        self.json = "--json" in words[: words.index("--") if "--" in words else None]

    def failed(self, error: GpuprobeError) -> int:
        """Print an error; returns its exit code."""
        stderr.error(str(error), error.hint)
        if self.json and sys.stdout is not None:
            from gpuprobe.api.render import render

            try:
                render(error, "json", sys.stdout)
                sys.stdout.flush()
            except (OSError, ValueError):  # its reader has gone, or the program has closed it
                output.give_up()
        return exit_codes.of(error)


def dispatch(arguments: Sequence[str], *, supervise: bool = False) -> int:
    """Run the command that ``arguments`` name, and return the exit code. ``supervise``: a command
    whose exit code is its result runs the user's program in a child process.
    """
    talk = _Talk(arguments)
    with stderr.kept():
        return _ended(lambda: _dispatched(arguments, supervise, talk), talk)


def _dispatched(arguments: Sequence[str], supervise: bool, talk: _Talk) -> int:
    if not arguments or arguments[0].startswith("-"):
        overview = _overview()
        overview.parse_args(list(arguments))
        overview.print_help(sys.stderr)
        return exit_codes.USAGE
    name = arguments[0]
    if name == "help":
        if arguments[1:]:
            return _dispatched([arguments[1], "--help"], False, talk)
        _overview().print_help()
        return exit_codes.OK
    if name not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else "gpuprobe --help lists the commands"
        raise UsageError(f"no such command: {name}", hint=hint)

    module, parser = command_parser(name)
    given = list(arguments[1:])
    if getattr(module, "OPTIONS_AFTER_SCRIPT", False):
        given = own_options_first(parser, given)
    if parser.get_default("has_script"):
        talk.json = "--json" in before_script(parser, given)
    args = parser.parse_args(given)
    args.stdout_is_ours = name != "run" or args.json  # otherwise it is the program's
    if args.stdout_is_ours:
        output.open_where_closed()
    with _imports_shown(name):
        if supervise and getattr(module, "SUPERVISED", False) and hasattr(os, "fork"):
            from gpuprobe.cli.supervise import supervised

            return supervised(lambda: _ended(lambda: _result(module, args), talk))
        return _result(module, args)


def _result(module: ModuleType, args: argparse.Namespace) -> int:
    code: int = module.run(args)
    if args.stdout_is_ours:
        sys.stdout.flush()
    return code


def _imports_shown(name: str) -> AbstractContextManager[None]:
    """Inside, an import of torch has a status line on a terminal: it takes 1 to 3 s, in which a
    command seems to hang. Not for ``run``, in which the terminal is the program's.
    """
    if name == "run" or sys.stderr is None:
        return nullcontext()
    from gpuprobe.cli.status_line import importing

    return importing("torch")


_SIMILAR = 0.7  # of difflib: with its default, bogus is like gpus
_ISSUES = "https://github.com/gpuprobe/gpuprobe/issues"


def _unexpected(error: Exception) -> GpuprobeError:
    """The error for a bug of gpuprobe; with GPUPROBE_DEBUG=1 its traceback is printed too."""
    import traceback

    if os.environ.get("GPUPROBE_DEBUG", "") not in ("", "0"):
        stderr.write("".join(traceback.format_exception(error)))
    if isinstance(error, MemoryError):
        return EnvironmentUnavailable("not enough memory on this machine")
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    what = cut(" ".join(f"{type(error).__name__}: {error}".split()), 300)
    return InternalError(
        f"internal error: {what}{place}",
        hint=f"please report this at {_ISSUES} with this line, the command and what "
        "GPUPROBE_DEBUG=1 prints",
    )


def _ended(command: Callable[[], int], talk: _Talk) -> int:
    """Run a command; exceptions become exit codes."""
    try:
        return command()
    except GpuprobeError as error:
        return talk.failed(error)
    except KeyboardInterrupt:
        return talk.failed(Interrupted("interrupted"))
    except BrokenPipeError:
        output.give_up()  # the reader closed the pipe (``| head``)
        return exit_codes.OK
    except Exception as error:  # noqa: BLE001 - the last stop: a bug of ours
        if isinstance(error, OSError) and output.cannot_write(error):
            stderr.error(f"cannot write the output: {error.strerror}")
            output.give_up()
            return exit_codes.USAGE
        return talk.failed(_unexpected(error))
