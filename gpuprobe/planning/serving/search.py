"""The search for the GPUs and options with which a vLLM deployment starts, by starting vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from gpuprobe.model.plans.serving import ServingEstimate, ServingFit, ServingTrial
from gpuprobe.planning.commands import ServingCommand

Start = Callable[[Sequence[str], str], ServingEstimate]
"""Starts vLLM with the words of a command, on a machine such as ``2xh100-80gb``."""

AUTO = ("--max-model-len", "auto")
"""The option with which vLLM takes the model's context length or, if its KV cache holds no sequence
of that length, the longest that it holds."""


def search(
    start: Start,
    words: Sequence[str],
    command: ServingCommand,
    machines: Sequence[tuple[int, str]],
    *,
    input_len: int = 0,
    output_len: int = 0,
    changes: bool = True,
) -> ServingFit:
    """Start vLLM on one of the ``machines`` (a number of GPUs and a name) after the other, until
    it comes up. On each, begin with one GPU, and double the tensor parallel ranks if that is too
    small, unless the command sets them. Where it comes up, with ``changes``, try options that may
    give more room. Sequences have ``input_len + output_len`` tokens, or as many as the model's
    context if both are 0.
    """
    trials: list[ServingTrial] = []
    length = () if given(words, "--max-model-len") else AUTO
    found: ServingTrial | None = None
    for count, name in machines:
        for ranks in _ranks(command, count):
            tensor = () if command.tensor * command.pipeline > 1 or ranks == 1 else _tensor(ranks)
            machine = name if ranks == 1 else f"{ranks}x{name}"
            trial = _trial(start, words, (*length, *tensor), machine, input_len + output_len)
            trials.append(trial)
            if trial.started:
                found = trial
                break
        if found is not None:
            break
    longest = None
    if found is not None:
        longest = found if length else None
        options = found.options
        more: list[tuple[str, ...]] = [] if length else [AUTO]
        if changes:
            more += _changes(words, found)
        for change in more:
            trial = _trial(start, words, (*options, *change), found.machine, input_len + output_len)
            trials.append(trial)
            if change is AUTO and trial.started:
                longest = trial
    return ServingFit(
        command=" ".join(words),
        tokens_each=input_len + output_len,
        found=found,
        longest=None if longest is None else longest.max_model_len,
        trials=tuple(trials),
    )


def given(words: Sequence[str], *options: str) -> bool:
    """Whether a command has one of the options, with hyphens or underscores."""
    names = {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("-")}
    return bool(names & set(options))


def _ranks(command: ServingCommand, count: int) -> list[int]:
    """The numbers of GPUs to try on a machine with ``count`` of them."""
    if command.gpus > 1:
        return [command.gpus] if command.gpus <= count else []
    found = [1]
    while found[-1] * 2 <= count:
        found.append(found[-1] * 2)
    return found


def _tensor(ranks: int) -> tuple[str, str]:
    return ("--tensor-parallel-size", str(ranks))


def _changes(words: Sequence[str], found: ServingTrial) -> Iterator[tuple[str, ...]]:
    """Options that may give more room, as far as the command does not have them."""
    if not given(words, "--kv-cache-dtype"):
        yield ("--kv-cache-dtype", "fp8")
    if not found.quantization and not given(words, "--quantization", "-q"):
        yield ("--quantization", "fp8")
    if not given(words, "--enforce-eager"):
        yield ("--enforce-eager",)
    batched = found.max_num_batched_tokens or 0
    if batched > _FEW_TOKENS and not given(words, "--max-num-batched-tokens"):
        yield ("--max-num-batched-tokens", str(_FEW_TOKENS))


_FEW_TOKENS = 2048


def _trial(
    start: Start, words: Sequence[str], options: Sequence[str], machine: str, each: int
) -> ServingTrial:
    estimate = start([*words, *options], machine)
    lasting = estimate.later or estimate
    return ServingTrial(
        machine=machine,
        gpu=estimate.gpu,
        options=tuple(options),
        started=estimate.started,
        error=estimate.error,
        quantization=estimate.quantization,
        weights=estimate.weights,
        activation=lasting.activation,
        kv_cache=lasting.kv_cache,
        tokens=lasting.tokens,
        max_model_len=estimate.max_model_len if estimate.started else None,
        max_num_batched_tokens=estimate.max_num_batched_tokens,
        sequences=sequences(estimate, each),
    )


def sequences(estimate: ServingEstimate, each: int) -> int | None:
    """How many sequences of ``each`` tokens the KV cache holds, in whole blocks, but no more than
    ``max_num_seqs``; those of ``max_model_len`` tokens for 0. None: vLLM failed, or the length is
    longer than it allows.
    """
    tokens = (estimate.later or estimate).tokens
    if not estimate.started or tokens is None or not estimate.max_model_len:
        return None
    length = each or estimate.max_model_len
    if length > estimate.max_model_len:
        return None
    block = estimate.block_size or 1
    fit = tokens // (-(-length // block) * block)
    return fit if estimate.max_num_seqs is None else min(fit, estimate.max_num_seqs)
