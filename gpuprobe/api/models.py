"""Scripts for open models: what ``gpuprobe estimate --model`` and ``gpuprobe fit --model`` run."""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from gpuprobe.errors import EnvironmentUnavailable, UsageError

if TYPE_CHECKING:
    from gpuprobe.planning.suggestions import Provider

METHODS: Final = ("full", "lora", "qlora")
OPTIMIZERS: Final = ("adamw", "adamw-fused", "adamw-8bit", "adafactor", "sgd")
DTYPES: Final = ("bf16", "fp16", "fp32", "bf16-mixed")
ATTENTIONS: Final = ("sdpa", "eager", "flash_attention_2")
SHARDINGS: Final = ("fsdp", "ddp", "zero1", "zero2", "zero3")


class ModelScript(NamedTuple):
    """A model's script, at ``path``, and its ``alternatives``: the changes to try if it does not
    fit. ``choices``: what the script does, in words, with the defaults.
    """

    path: str
    alternatives: Provider
    choices: str


@contextlib.contextmanager
def model_script(
    name: str,
    options: Mapping[str, object] | None = None,
    *,
    output: str = "",
    command: str = "",
) -> Iterator[ModelScript]:
    """Write the script that trains the model ``name``, or generates tokens. See
    `gpuprobe.planning.models.run.ModelRun` for the ``options``.

    Options that are missing have their defaults. The script is in a temporary folder, which is
    removed on exit, or (``output``) in a file that must not exist yet. ``command`` is named in its
    docstring.

    Raises UsageError for an unknown model, for options that exclude each other and for an existing
    file; DataError for a file that is not a configuration; MissingExtra for a package that the
    script needs; EnvironmentUnavailable if the script cannot be written.
    """
    import tempfile  # 5 ms, and the choices above are needed without it

    from gpuprobe.planning.models.alternatives import ModelChanges
    from gpuprobe.planning.models.configs import find_model
    from gpuprobe.planning.models.run import ModelRun
    from gpuprobe.planning.models.script import script

    _check_pairs(options or {})
    run = ModelRun(find_model(name)).changed(**(options or {}))
    run.check()
    with contextlib.ExitStack() as stack:
        try:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpuprobe-")))
            plain = re.sub(r"[^a-z0-9]+", "_", run.model.name.lower()).strip("_")
            path = Path(output) if output else folder / f"train_{plain}.py"
            with path.open("x", encoding="utf-8") as file:
                file.write(script(run, command))
        except FileExistsError:
            raise UsageError(
                f"{output} exists already", hint="choose another name, or delete it"
            ) from None
        except OSError as error:
            raise EnvironmentUnavailable(
                f"the script cannot be written: {error.strerror or error}: {output or 'TMPDIR'}"
            ) from error
        stack.enter_context(_quiet_libraries())
        yield ModelScript(str(path), ModelChanges(run, folder), run.in_words)


@contextlib.contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Inside, transformers and PEFT print no warnings, also in processes that are started, unless
    the user has chosen a level: they are about a script that the user did not write. transformers
    reads its variable when it is imported.
    """
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
    quiet = {name: value for name, value in quiet.items() if name not in os.environ}
    os.environ.update(quiet)
    with warnings.catch_warnings():
        if "PYTHONWARNINGS" in quiet:
            warnings.simplefilter("ignore")
        try:
            yield
        finally:
            for name in quiet:
                os.environ.pop(name, None)


def _check_pairs(options: Mapping[str, object]) -> None:
    """Raises UsageError for an option that has no effect with the others."""
    if options.get("method") not in ("lora", "qlora"):
        for name in ("lora_rank", "lora_targets"):
            if name in options:
                raise UsageError(f"--{name.replace('_', '-')} needs --method lora or qlora")
    if "new_tokens" in options and not options.get("inference"):
        raise UsageError("--new-tokens needs --inference")
    if "sharding" in options and options.get("ranks", 1) == 1:
        raise UsageError(f"--sharding {options['sharding']} needs --ranks N, from 2")
    if options.get("inference"):
        for name in ("optimizer", "checkpointing"):
            if name in options:
                raise UsageError(f"--{name} is for training, not for --inference")


def known_models() -> list[tuple[str, int]]:
    """The models that gpuprobe knows: name and number of parameters."""
    from gpuprobe.planning.models.configs import known_models

    return [(model.name, model.parameters) for model in known_models().values()]
