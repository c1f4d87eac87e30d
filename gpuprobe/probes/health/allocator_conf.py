"""What is wrong with the settings in ``PYTORCH_CUDA_ALLOC_CONF`` / ``PYTORCH_ALLOC_CONF``.

The values are checked by `gpuprobe.allocator.settings`; here are the things that torch does
not say, or says where nobody looks. Source: ``c10/core/AllocatorConfig`` and
``c10/cuda/CUDAAllocatorConfig`` of torch 2.6 and 2.13.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping

from gpuprobe.allocator.settings import KEYS, parse_conf
from gpuprobe.errors import ConfigError
from gpuprobe.model.findings import Finding, Level
from gpuprobe.model.rules import Rule
from gpuprobe.model.values import Unavailable
from gpuprobe.probes.health.base import MachineFacts, rule
from gpuprobe.probes.health.driver import version_pair

OLD = "PYTORCH_CUDA_ALLOC_CONF"
NEW = "PYTORCH_ALLOC_CONF"  # since torch 2.9, for every accelerator

_RENAMED_IN = (2, 9)

# Keys of torch 2.13's headers that torch 2.6's parser does not have. Which version between
# brought each is not needed to warn the users of 2.6 and older.
_AFTER_2_6 = frozenset(
    {
        "large_segment_size_mb",
        "per_process_memory_fraction",
        "pinned_reserve_segment_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_max_cached_size_mb",
        "pinned_free_catch_all",
        "graph_capture_record_stream_reuse",
        "throw_on_cudamalloc_oom",
    }
)
# ROCm's spellings, which CUDA builds accept as well.
_ROCM = {
    "release_lock_on_hipmalloc": "release_lock_on_cudamalloc",
    "pinned_use_hip_host_register": "pinned_use_cuda_host_register",
}
_BOOLEAN = frozenset(
    {
        "expandable_segments",
        "release_lock_on_cudamalloc",
        "pinned_use_cuda_host_register",
        "pinned_use_background_threads",
        "pinned_free_catch_all",
        "graph_capture_record_stream_reuse",
        "throw_on_cudamalloc_oom",
    }
)
_BACKENDS = ("native", "cudaMallocAsync")
# Settings of the native allocator: cudaMallocAsync leaves caching to the driver.
_NATIVE_ONLY = frozenset(
    {
        "max_split_size_mb",
        "max_non_split_rounding_mb",
        "garbage_collection_threshold",
        "roundup_power2_divisions",
        "expandable_segments",
        "large_segment_size_mb",
    }
)


def _split(conf: str) -> list[tuple[str, str | None]]:
    """(key, value) pairs, None where there is no colon. Torch drops every blank."""
    parts = re.split(r",(?![^\[]*\])", conf.replace(" ", ""))
    pairs: list[tuple[str, str | None]] = []
    for part in parts:
        key, colon, value = part.partition(":")
        if part:
            pairs.append((key, value if colon else None))
    return pairs


def _problem(key: str, value: str | None, torch: tuple[int, int] | None) -> str:
    """What torch would refuse in one pair, or an empty text."""
    name = _ROCM.get(key, key)
    if name not in KEYS:
        near = difflib.get_close_matches(key, KEYS, n=1)
        return "unknown key" + (f"; did you mean {near[0]}?" if near else "")
    if name in _AFTER_2_6 and torch is not None and torch <= (2, 6):
        return f"torch {torch[0]}.{torch[1]} does not know this key"
    if not value:
        return "no value: torch expects KEY:VALUE"
    if name in _BOOLEAN:
        return "" if value in ("True", "False") else "torch expects exactly True or False"
    if name == "backend":
        return "" if value in _BACKENDS else f"torch wants {' or '.join(_BACKENDS)}"
    try:
        parse_conf(f"{name}:{value}")
    except ConfigError as error:
        return str(error).partition(" is not valid: ")[2] or str(error)
    return ""


def _set(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(name, environ[name]) for name in (OLD, NEW) if environ.get(name, "").strip()]


def _torch_version(facts: MachineFacts) -> tuple[int, int] | None:
    return None if isinstance(facts.torch, Unavailable) else version_pair(facts.torch.version)


@rule(
    "GP140",
    "allocator-conf-invalid",
    "The allocator settings are valid",
    Level.ERROR,
    "environment, torch",
)
def conf_invalid(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """A key or a value that torch refuses: the program ends with "Unrecognized key" or the
    like, at its first use of the GPU. Booleans are `True` and `False`, spelled so.
    """
    if isinstance(facts.environ, Unavailable):
        yield facts.environ
        return
    for variable, conf in _set(facts.environ):
        for key, value in _split(conf):
            problem = _problem(key, value, _torch_version(facts))
            if problem:
                shown = key if value is None else f"{key}:{value}"
                yield self.finding(
                    f"{variable}: '{shown}': {problem}",
                    (variable, conf),
                    fix="Correct or remove this setting.",
                    subject=f"{variable} {key}",
                )


@rule(
    "GP141",
    "allocator-conf-conflict",
    "The allocator settings are consistent",
    Level.WARNING,
    "environment",
)
def conf_conflict(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """Settings of which one silently wins: both variables with different values (torch 2.13
    takes `PYTORCH_CUDA_ALLOC_CONF`, though its documentation puts the other one first), a key
    given twice, and options of the native allocator next to `backend:cudaMallocAsync`, which
    ignores them. `max_split_size_mb` and `expandable_segments:True` do not add up either:
    expandable segments leave that option little to do.
    """
    if isinstance(facts.environ, Unavailable):
        yield facts.environ
        return
    given = _set(facts.environ)
    if len(given) == 2 and sorted(_split(given[0][1])) != sorted(_split(given[1][1])):
        yield self.finding(
            f"{OLD} and {NEW} are both set, with different values; torch reads only one of them",
            *given,
            fix=f"Keep one: {NEW} for torch 2.9 and newer, {OLD} for older ones.",
            code=f"unset {OLD}",
            subject="both",
        )
    for variable, conf in given:
        pairs = _split(conf)
        keys = [key for key, _ in pairs]
        for key in sorted({key for key in keys if keys.count(key) > 1}):
            yield self.finding(
                f"{variable} gives {key} more than once: the last one wins",
                (variable, conf),
                fix="Keep one of them.",
                subject=f"{variable} {key}",
            )
        ignored = [key for key in keys if key in _NATIVE_ONLY]
        if ("backend", "cudaMallocAsync") in pairs and ignored:
            yield self.finding(
                f"backend:cudaMallocAsync ignores {', '.join(ignored)}",
                (variable, conf),
                fix="Remove the ignored settings, or the backend.",
                subject=f"{variable} backend",
            )
        elif ("expandable_segments", "True") in pairs and "max_split_size_mb" in keys:
            yield self.finding(
                "max_split_size_mb has little effect with expandable_segments:True",
                (variable, conf),
                fix="Keep only expandable_segments:True, which solves the same problem "
                "(fragmentation).",
                subject=f"{variable} split",
            )


@rule(
    "GP142",
    "allocator-conf-name",
    "The allocator settings use a variable that this torch reads",
    (Level.WARNING, Level.NOTE),
    "environment, torch",
)
def conf_name(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """torch 2.9 brought `PYTORCH_ALLOC_CONF` and deprecated `PYTORCH_CUDA_ALLOC_CONF`, which
    still works: a note. The new name under an older torch does nothing: a warning.
    """
    if isinstance(facts.environ, Unavailable):
        yield facts.environ
        return
    given = dict(_set(facts.environ))
    if not given:
        return
    torch = _torch_version(facts)
    if torch is None:
        yield Unavailable("torch's version is unknown")
    elif NEW in given and OLD not in given and torch < _RENAMED_IN:
        yield self.finding(
            f"torch {torch[0]}.{torch[1]} does not read {NEW}",
            (NEW, given[NEW]),
            fix=f"Use {OLD} with torch older than 2.9.",
            code=f"export {OLD}={given[NEW]}",
            subject=NEW,
        )
    elif OLD in given and torch >= _RENAMED_IN:
        yield self.finding(
            f"{OLD} is the old name of {NEW}",
            (OLD, given[OLD]),
            fix=f"Rename it to {NEW}, unless torch older than 2.9 runs in this environment too.",
            code=f"export {NEW}={given[OLD]}; unset {OLD}",
            subject=OLD,
            level=Level.NOTE,
        )


CHECKS = (conf_invalid, conf_conflict, conf_name)
