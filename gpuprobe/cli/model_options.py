"""``--model`` and its options: a script that gpuprobe writes, in place of one of the user."""

from __future__ import annotations

import argparse
import contextlib
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from gpuprobe.api.models import ATTENTIONS, DTYPES, METHODS, OPTIMIZERS, SHARDINGS
from gpuprobe.cli.options import Listed, positive
from gpuprobe.errors import UsageError

if TYPE_CHECKING:
    from gpuprobe.api.models import ModelScript

_OPTIONS: Final = (
    "method",
    "lora_rank",
    "lora_targets",
    "optimizer",
    "dtype",
    "batch_size",
    "sequence_length",
    "checkpointing",
    "attention",
    "sharding",
    "inference",
    "new_tokens",
)


def _models() -> list[tuple[str, str]]:
    """The models that gpuprobe knows, with their numbers of parameters."""
    from gpuprobe.api.models import known_models

    return [(name, f"{number:>15,} parameters") for name, number in known_models()]


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def add_model(parser: argparse.ArgumentParser) -> None:
    """``--model`` and what is done with the model. Without ``--model``, these options are None."""
    group = parser.add_argument_group(
        "a model in place of a script",
        "gpuprobe writes a script for the model, and runs it; nothing is downloaded",
    )
    add = group.add_argument
    add(
        "--model",
        metavar="NAME",
        action=Listed,
        rows=_models,
        help="a known model, such as llama-3.1-8b (list: print them), a config.json or its folder, "
        "or OWNER/NAME from the Hugging Face cache",
    )
    add("--write-script", metavar="FILE", help="keep the script, to run or to change")
    add(
        "--method",
        choices=METHODS,
        help="what is trained: all parameters (default), adapters, or adapters on 4-bit layers",
    )
    add("--lora-rank", type=positive, metavar="N", help="rank of the adapters (default: 16)")
    add(
        "--lora-targets",
        type=_names,
        metavar="NAME,...",
        help="layers with adapters, such as q_proj,v_proj (default: all linear layers)",
    )
    add(
        "--optimizer",
        choices=OPTIMIZERS,
        help="(default: adamw)",
    )
    add(
        "--dtype",
        choices=DTYPES,
        help="of the weights (default: bf16); bf16-mixed: fp32 weights and bf16 autocast",
    )
    add("--batch-size", type=positive, metavar="N", help="sequences on each GPU (default: 1)")
    add(
        "--sequence-length",
        type=positive,
        metavar="N",
        help="tokens of each sequence, or of the prompt (default: 2048, or what the model allows)",
    )
    add("--checkpointing", action="store_true", default=None, help="recompute activations")
    add(
        "--attention",
        choices=ATTENTIONS,
        help="attention implementation (default: what transformers selects, mostly sdpa)",
    )
    add(
        "--sharding",
        choices=SHARDINGS,
        help="with --ranks: how ranks share the model; FSDP2 (default, as zero3), DDP, or a stage "
        "of ZeRO with PyTorch's own classes",
    )
    add("--inference", action="store_true", default=None, help="generate tokens; no training")
    add(
        "--new-tokens",
        type=positive,
        metavar="N",
        help="with --inference: tokens to generate (default: 32)",
    )
    names = ("model", "write_script", *_OPTIONS)
    parser.set_defaults(scripts_own=frozenset(_written(name) for name in names))


def _written(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_model_options(args: argparse.Namespace) -> bool:
    """Whether ``--model`` is given. Raises UsageError for its options without it, and if there is a
    script as well.
    """
    given = {name: getattr(args, name) for name in _OPTIONS}
    used = [name for name in given if given[name] is not None]
    if args.model is None:
        if args.write_script is not None:
            used.append("write_script")
        if used:
            raise UsageError(
                f"{_written(used[0])} needs --model",
                hint=f"an option of your script goes after --: train.py -- {_written(used[0])} …",
            )
        return False
    script = args.script if getattr(args, "module", None) is None else "-m"
    if script is not None:
        raise UsageError(
            f"both --model and a script: {script}",
            hint="--model writes its own script; --write-script FILE keeps it",
        )
    return True


@contextlib.contextmanager
def model_script_of(args: argparse.Namespace) -> Iterator[ModelScript]:
    """The script of the parsed options; see `gpuprobe.api.models.model_script`."""
    from gpuprobe.api.models import model_script

    given = {name: getattr(args, name) for name in _OPTIONS}
    options = {name: value for name, value in given.items() if value is not None}
    ranks = args.ranks[0] if isinstance(args.ranks, list) else args.ranks
    words = ["gpuprobe", "estimate", "--model", args.model]
    for name, value in options.items():
        words.append(_written(name))
        if value is not True:
            words.append(",".join(value) if isinstance(value, tuple) else str(value))
    if ranks > 1:
        words += ["--ranks", str(ranks)]
    with model_script(
        args.model,
        {**options, "ranks": ranks},
        output=args.write_script or "",
        command=shlex.join(words),
    ) as found:
        yield found
