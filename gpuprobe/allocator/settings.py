"""``PYTORCH_CUDA_ALLOC_CONF``: parsed, checked and printed the way torch does it.

Source of every check: ``c10/core/AllocatorConfig.cpp`` (``parseArgs`` and the functions it
calls) and ``c10/cuda/CUDAAllocatorConfig.h`` (the keys that only CUDA knows).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace

from gpuprobe.allocator.rules import MIB
from gpuprobe.errors import ConfigError
from gpuprobe.model.trace import AllocatorSettings

_SIMULATED = (
    "expandable_segments",
    "max_split_size_mb",
    "max_non_split_rounding_mb",
    "garbage_collection_threshold",
    "roundup_power2_divisions",
    "large_segment_size_mb",
    "per_process_memory_fraction",
)
# Known to torch, without effect on where device memory goes.
_IGNORED = (
    "backend",
    "release_lock_on_cudamalloc",
    "pinned_use_cuda_host_register",
    "pinned_num_register_threads",
    "pinned_use_background_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_max_cached_size_mb",
    "pinned_free_catch_all",
    "graph_capture_record_stream_reuse",
    "throw_on_cudamalloc_oom",
    "expandable_segments_handle_type",
)
KEYS = _SIMULATED + _IGNORED
_MIN_LARGE_SEGMENT_MB = 10  # large_segment_size_mb must exceed kMinLargeAlloc

_FRACTION = "per_process_memory_fraction"


def in_environment() -> str:
    """The text of ``PYTORCH_ALLOC_CONF`` in the environment, or of its older name."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def parse_conf(text: str, base: AllocatorSettings | None = None) -> AllocatorSettings:
    """The settings that ``text`` describes, changed from ``base`` (default: torch's defaults).

    Raises ConfigError for an unknown key or a value torch would refuse.
    """
    settings = base if base is not None else AllocatorSettings()
    pairs = list(_pairs(text))
    # Torch reads this one first: it is the default and the minimum of two others.
    for key, value in pairs:
        if key == "large_segment_size_mb":
            size = _whole(key, value)
            if size <= _MIN_LARGE_SEGMENT_MB:
                raise _refused(key, value, f"must be more than {_MIN_LARGE_SEGMENT_MB}")
            rounding = settings.max_non_split_rounding
            if base is None or rounding == settings.large_segment_size:
                rounding = size * MIB
            settings = replace(
                settings, large_segment_size=size * MIB, max_non_split_rounding=rounding
            )
    for key, value in pairs:
        settings = _with(settings, key, value)
    return replace(settings, conf=text.strip())


def merged_conf(text: str, changes: str) -> str:
    """The settings of ``text`` with those of ``changes`` replaced and added, each key once.

    Raises ConfigError for text that is not pairs of a key and a value.
    """
    pairs = dict(_pairs(text))
    pairs.update(_pairs(changes))
    return ",".join(f"{key}:{value}" for key, value in pairs.items())


def _with(settings: AllocatorSettings, key: str, value: str) -> AllocatorSettings:
    """``settings`` with one key changed."""
    if key == "large_segment_size_mb" or key in _IGNORED:
        return settings
    if key == "expandable_segments":
        return replace(settings, expandable_segments=_boolean(key, value))
    if key in ("max_split_size_mb", "max_non_split_rounding_mb"):
        megabytes = _whole(key, value)
        least = settings.large_segment_size // MIB
        if megabytes < least:
            raise _refused(key, value, f"must be at least {least} (the large segment size)")
        if key == "max_split_size_mb":
            return replace(settings, max_split_size=megabytes * MIB)
        return replace(settings, max_non_split_rounding=megabytes * MIB)
    if key == "garbage_collection_threshold":
        return replace(settings, garbage_collection_threshold=_fraction(key, value))
    if key == _FRACTION:
        fraction = _number(key, value)
        if not 0.0 <= fraction <= 1.0:
            raise _refused(key, value, "must be between 0 and 1")
        return replace(settings, extra={**settings.extra, _FRACTION: fraction})
    if key == "roundup_power2_divisions":
        return replace(settings, roundup_power2_divisions=_divisions(key, value))
    raise ConfigError(
        f"unknown allocator setting '{key}'", hint="known settings: " + ", ".join(KEYS)
    )


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """(key, value) of each comma-separated pair; commas inside brackets do not separate."""
    for part in re.split(r",(?![^\[]*\])", text):
        if not part.strip():
            continue
        key, colon, value = part.partition(":")
        if not colon or not value.strip():
            raise ConfigError(
                f"'{part.strip()}' is not KEY:VALUE",
                hint="for example expandable_segments:True,max_split_size_mb:128",
            )
        yield key.strip(), value.strip()


def _refused(key: str, value: str, why: str) -> ConfigError:
    return ConfigError(f"{key}:{value} is not valid: {why}")


def _whole(key: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,12}", value):
        raise _refused(key, value, "expected an integer")
    return int(value)


def _number(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise _refused(key, value, "expected a number") from None


def _fraction(key: str, value: str) -> float:
    number = _number(key, value)
    if not 0.0 < number < 1.0:
        raise _refused(key, value, "must be between 0 and 1, both excluded")
    return number


def _boolean(key: str, value: str) -> bool:
    if value not in ("True", "False", "true", "false"):
        raise _refused(key, value, "expected True or False")
    return value in ("True", "true")


def _power_of_two(key: str, value: str, *, zero: bool = False) -> int:
    number = _whole(key, value)
    if number & (number - 1) or (number == 0 and not zero):
        raise _refused(key, value, "expected a power of two")
    return number


def _divisions(key: str, value: str) -> dict[int, int]:
    """Divisions by the lower bound of the size class in MiB, as torch fills its table.

    The first interval also covers all smaller ones, ``>`` all above the last one named; a
    single number covers everything.
    """
    table = [0] * 16
    if value.startswith("[") and value.endswith("]"):
        last = 0
        first = True
        for item in filter(None, (part.strip() for part in value[1:-1].split(","))):
            boundary, colon, count = (part.strip() for part in item.partition(":"))
            if not colon:
                raise _refused(key, value, f"'{item}' is not SIZE:DIVISIONS")
            divisions = _power_of_two(key, count, zero=True)
            if boundary == ">":
                table[last + 1 :] = [divisions] * (15 - last)
                continue
            last = min(_power_of_two(key, boundary).bit_length() - 1, 15)
            if first:
                table[:last] = [divisions] * last
                first = False
            table[last] = divisions
    else:
        table = [_power_of_two(key, value)] * 16
    return {1 << i: count for i, count in enumerate(table) if count}


def to_conf(settings: AllocatorSettings) -> str:
    """The shortest text that gives these settings, "" for torch's defaults."""
    return ",".join(f"{k}:{v}" for k, v in _as_pairs(settings).items())


def differences(old: AllocatorSettings, new: AllocatorSettings) -> str:
    """The pairs that turn ``old``'s conf into ``new``'s, "" if they are the same."""
    before, after = _as_pairs(old), _as_pairs(new)
    return ",".join(f"{k}:{v}" for k, v in after.items() if before.get(k) != v)


def _as_pairs(settings: AllocatorSettings) -> dict[str, str]:
    pairs = {}
    if settings.expandable_segments:
        pairs["expandable_segments"] = "True"
    if settings.large_segment_size != 20 * MIB:
        pairs["large_segment_size_mb"] = str(settings.large_segment_size // MIB)
    if settings.max_split_size >= 0:
        pairs["max_split_size_mb"] = str(settings.max_split_size // MIB)
    if settings.max_non_split_rounding != settings.large_segment_size:
        pairs["max_non_split_rounding_mb"] = str(settings.max_non_split_rounding // MIB)
    if settings.garbage_collection_threshold > 0:
        pairs["garbage_collection_threshold"] = f"{settings.garbage_collection_threshold:g}"
    table = {k: v for k, v in settings.roundup_power2_divisions.items() if v}
    if table:
        values = [table.get(1 << i, 0) for i in range(16)]
        if len(set(values)) == 1:
            pairs["roundup_power2_divisions"] = str(values[0])
        else:
            listed = ",".join(f"{1 << i}:{v}" for i, v in enumerate(values))
            pairs["roundup_power2_divisions"] = f"[{listed}]"
    fraction = memory_fraction(settings)
    if fraction < 1.0:
        pairs[_FRACTION] = f"{fraction:g}"
    return pairs


def with_memory_fraction(settings: AllocatorSettings, fraction: float) -> AllocatorSettings:
    """The settings of a process that may use this part of the device, by
    ``torch.cuda.set_per_process_memory_fraction``.
    """
    if fraction >= 1.0 and _FRACTION not in settings.extra:
        return settings
    return replace(settings, extra={**settings.extra, _FRACTION: fraction})


def memory_fraction(settings: AllocatorSettings) -> float:
    """``per_process_memory_fraction``: the part of the device this process may use."""
    value = settings.extra.get(_FRACTION, 1.0)
    return float(value) if isinstance(value, (int, float)) else 1.0
