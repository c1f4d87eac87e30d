"""Options and arguments of several commands, and the types of their values."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpuprobe.api.render import DRAWN, render
from gpuprobe.cli import output, stderr
from gpuprobe.errors import ConfigError, ProgramFailed, UsageError
from gpuprobe.model.io.descriptors import KeptDescriptor, LostDescriptor
from gpuprobe.model.io.files import read_text
from gpuprobe.model.outcomes import WrittenFiles
from gpuprobe.model.plans.request import (
    DEFAULT_GPU,
    DISTINCT,
    EstimateRequest,
    PriceList,
    ranks_of,
)


class Target(NamedTuple):
    """A script, or (``module``) a module, and its arguments."""

    target: str
    arguments: Sequence[str]
    module: bool


def positive(text: str) -> int:
    """A whole number from 1. Raises ArgumentTypeError."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, found {text!r}")
    return number


def seconds(text: str) -> float:
    """A number of seconds from 0. Raises ArgumentTypeError."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds from 0, found {text!r}")
    return number


def amount(text: str) -> float:
    """A number above 0. Raises ArgumentTypeError."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")
    return number


def prices(text: str) -> PriceList:
    """The prices in ``2.5`` (of all GPUs), ``t4=0.35,l4=0.8``, or a JSON file. Raises
    ArgumentTypeError.
    """
    if text.endswith(".json"):
        return _price_file(text)
    if "=" not in text:
        return PriceList({"": amount(text)})
    by_gpu: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if not name.strip():
            raise argparse.ArgumentTypeError(f"expected GPU=PRICE, found {part!r}")
        by_gpu[name.strip()] = amount(value)
    return PriceList(by_gpu)


def _price_file(path: str) -> PriceList:
    """A price list: ``{"date": "2026-11-30", "prices": {"h100-80gb": 2.5}}``."""
    from gpuprobe.catalogue.gpus import find  # 5 ms

    def wrong(reason: object) -> argparse.ArgumentTypeError:
        return argparse.ArgumentTypeError(f"the price list {path!r}: {reason}")

    try:
        document = json.loads(read_text(path))
        date, listed = document["date"], document["prices"]
        datetime.date.fromisoformat(date)
        models = {find(name): amount(str(price)) for name, price in listed.items()}
    except KeyError as error:
        raise wrong(f"it has no {error}") from None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise wrong(getattr(error, "strerror", None) or error) from None
    except (ConfigError, argparse.ArgumentTypeError) as error:
        raise wrong(error) from None
    by_gpu = {name: price for gpu, price in models.items() for name in (gpu.name, *gpu.aliases)}
    return PriceList({**by_gpu, **listed}, date)


def positives(text: str) -> list[int]:
    """Whole numbers from 1. Raises ArgumentTypeError."""
    return [positive(part.strip()) for part in text.split(",")]


_MOST_RANKS: Final = 65536  # of one range; more are refused as not in the job


def rank_list(text: str) -> list[int] | str:
    """Numbers of ranks, from 0, such as ``0,8-15``; or ``distinct``. Raises ArgumentTypeError."""
    if text == DISTINCT:
        return text
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not first.isdecimal() or not last.isdecimal() or int(last) < int(first):
            raise argparse.ArgumentTypeError(
                f"expected ranks from 0, such as 0,8-15, or distinct; found {text!r}"
            )
        found += range(int(first), min(int(last), int(first) + _MOST_RANKS) + 1)
    return found


def add_top(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument(
        "--top",
        type=positive,
        default=default,
        metavar="N",
        help=f"rows per table (default: {default})",
    )


def add_json(parser: argparse.ArgumentParser, text: str = "print one JSON document") -> None:
    parser.add_argument("--json", action="store_true", help=text)


def add_formats(
    parser: argparse.ArgumentParser, *more: str, json: str = "print one JSON document"
) -> None:
    """The options of a command that prints sections: ``--json``, and the formats of `DRAWN` that
    all such commands have, and those in ``more``. ``json`` is the first one's help.
    """
    add_json(parser, json)
    for name, form in DRAWN.items():
        if form.everywhere or name in more:
            parser.add_argument(f"--{name}", action="store_true", help=form.help)


def format_of(args: argparse.Namespace) -> str:
    """The output format that the options of `add_formats` select, ``"text"`` without one."""
    return next((name for name in ("json", *DRAWN) if getattr(args, name, False)), "text")


def render_written(args: argparse.Namespace, files: Sequence[Path]) -> None:
    """With ``--json``, print the files that a command has written as a document."""
    if args.json:
        render(WrittenFiles(tuple(str(file.absolute()) for file in files)), "json", sys.stdout)


def add_demo(parser: argparse.ArgumentParser, more: str = "") -> None:
    """``--demo [FLEET]``: a simulated fleet instead of this machine's GPUs."""
    parser.add_argument(
        "--demo",
        metavar="FLEET",
        nargs="?",
        const="8xh100",
        help=f"show a simulated fleet instead of this machine (default: 8xh100{more})",
    )


class Listed(argparse.Action):
    """A name of a table. ``list`` prints ``rows``, with what belongs to each name, and exits."""

    def __init__(self, *args: Any, rows: Callable[[], list[tuple[str, str]]], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._rows = rows

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if values == "list":
            rows = self._rows()
            width = max(len(name) for name, _ in rows)
            try:
                for name, text in rows:
                    sys.stdout.write(f"{name:<{width}}  {text}\n")
                sys.stdout.flush()
            except BrokenPipeError:
                output.give_up()  # the reader closed the pipe (``| head``)
            parser.exit()
        setattr(namespace, self.dest, values)


def _gpus() -> list[tuple[str, str]]:
    """The GPUs of the catalogue, with their memory and title."""
    from gpuprobe.catalogue.file import all_models
    from gpuprobe.model.text import human_bytes, visible

    return [
        (gpu.name, f"{human_bytes(gpu.total_memory):>9}  {visible(gpu.title)}")
        for gpu in all_models()
    ]


def add_gpu(
    parser: argparse.ArgumentParser,
    text: str,
    *,
    default: str | None = None,
    several: bool = False,
) -> None:
    """``--gpu``: GPUs of the catalogue, with ``several`` also ``--gpus``."""
    names = ["--gpu", *(["--gpus"] if several else [])]
    parser.add_argument(
        *names, dest="gpu", default=default, metavar="GPU", action=Listed, rows=_gpus, help=text
    )


def machine_for(words: Sequence[str], gpu: str) -> str:
    """The simulated machine of a command, with a note if it has more GPUs than ``gpu`` names."""
    from gpuprobe.planning.commands import machine_of

    machine = machine_of(words, gpu)
    if machine != gpu:
        stderr.note(f"simulating {machine}, a GPU for each rank")
    return machine


def estimate_request(
    args: argparse.Namespace, target: Target, *, ranks: int, **more: Any
) -> EstimateRequest:
    """The request for an estimate: of a program, with the options of `add_estimated_run`, and
    ``more`` of its fields.
    """
    return EstimateRequest(
        script=target.target,
        arguments=tuple(target.arguments),
        module=target.module,
        gpu=args.gpu,
        steps=args.steps,
        compute=args.compute,
        conf=args.conf,
        assume=tuple(args.assume),
        ranks=ranks,
        rank=ranks_of(args.rank),
        prices=args.price,
        **more,
    )


def add_estimated_run(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """The options of an estimated run: ``--gpu``, ``--steps``, ``--compute``, ``--assume``,
    ``--conf``, ``--ranks``, ``--rank``, ``--price``. ``several``: several GPUs and numbers of ranks
    are alternatives.
    """
    add_gpu(
        parser,
        "the GPU, such as h100-80gb or 2xa100-40gb"
        + (", several to choose from, such as t4,l4, or all" if several else "")
        + " (default: h100-80gb); list: print the supported ones",
        default=DEFAULT_GPU,
        several=several,
    )
    parser.add_argument(
        "--steps",
        type=positive,
        default=3,
        metavar="N",
        help="optimizer steps (default: 3, and one more if memory grew in the last)",
    )
    parser.add_argument(
        "--compute",
        choices=("auto", "shapes", "real"),
        default="auto",
        help="values to compute: real: all; shapes: those of small tensors; auto (default): all "
        "while they cost seconds, then as shapes, or all in a second run if the script needs one "
        "and that is affordable",
    )
    parser.add_argument(
        "--assume",
        action="append",
        default=[],
        metavar="FILE:LINE=VALUE",
        help="the value that this line reads: true, false or a number (repeatable)",
    )
    parser.add_argument(
        "--conf", metavar="CONF", help="allocator settings, as in PYTORCH_CUDA_ALLOC_CONF"
    )
    if several:
        parser.add_argument(
            "--ranks",
            type=positives,
            default=[1],
            metavar="N,...",
            help="simulate one of N processes; of several numbers, choose one (default: 1)",
        )
    else:
        parser.add_argument(
            "--ranks", type=positive, default=1, metavar="N", help="simulate one of N processes"
        )
    parser.add_argument(
        "--rank",
        type=rank_list,
        default=[0],
        metavar="R,...|distinct",
        help="with --ranks: which of them, from 0, such as 0,8-15 (default: 0); distinct: one of "
        "each group of ranks that behave alike",
    )
    parser.add_argument(
        "--price",
        type=prices,
        default=PriceList(),
        metavar="PRICE",
        help="of an hour of one GPU (of several: t4=0.35,l4=0.8; or a price list, prices.json): "
        "also print what it costs",
    )


def add_program(
    parser: argparse.ArgumentParser, name: str = "script", *, modules: bool = True
) -> None:
    """The program: ``SCRIPT ARGS`` or, with ``modules``, ``-m MODULE ARGS``. Added last: it takes
    all remaining arguments.
    """
    if modules:
        parser.add_argument(
            "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module"
        )
    parser.set_defaults(has_script=True)
    parser.add_argument(name, nargs="?", metavar=name.upper())
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS")


def program_of(args: argparse.Namespace, hint: str) -> Target:
    """The program that `add_program` parsed. Raises UsageError with ``hint`` without one."""
    module = getattr(args, "module", None)
    if module is not None:
        if not module:
            raise UsageError("-m needs the name of a module")
        return Target(module[0], module[1:], True)
    if args.script is None:
        raise UsageError("nothing to run", hint=hint)
    return Target(args.script, args.args, False)


_STDOUT, _STDERR = 1, 2


@contextlib.contextmanager
def _descriptor_to_stderr() -> Iterator[None]:
    """What is written to the descriptor of stdout, by C code or by another process, goes to that of
    stderr, if the command has both.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
        sys.stdout.flush()
    try:
        os.fstat(_STDERR)
        kept = KeptDescriptor(os.dup(_STDOUT))
    except OSError:
        yield
        return
    os.dup2(_STDERR, _STDOUT)
    try:
        yield
    finally:
        with contextlib.suppress(LostDescriptor):
            os.dup2(kept.number, _STDOUT)
    try:
        kept.status()
    except LostDescriptor:
        raise ProgramFailed(
            "the program closed all descriptors: the result cannot be printed",
            hint="close only those that the program has opened",
        ) from None
    kept.close()


@contextlib.contextmanager
def output_to_stderr() -> Iterator[None]:
    """Inside, the output of the user's program and of the processes that it starts goes to stderr,
    and so does its traceback if it fails: stdout is for the command's result.
    """
    try:
        with _descriptor_to_stderr(), contextlib.redirect_stdout(sys.stderr):
            yield
    except ProgramFailed as error:
        if error.__cause__ is not None:
            from gpuprobe.api.watch import own_traceback

            stderr.write(own_traceback(error.__cause__))
        raise
