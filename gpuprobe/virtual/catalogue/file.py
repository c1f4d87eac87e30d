"""Reading the GPU catalogue: ``gpus.json``, and files of the same form that users write."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from gpuprobe.errors import ConfigError
from gpuprobe.model.text import visible
from gpuprobe.virtual.catalogue.gpu_model import GpuModel

__all__ = [
    "ARCHITECTURES_SOURCE",
    "NUMBERS",
    "PRESENT",
    "architectures",
    "built_in",
    "by_key",
    "key_of",
    "load_user_catalogue",
    "with_context",
]

PRESENT: Final = "present"
"""The name of the GPU that this machine really has: no entry may take it."""
SCHEMA_VERSION: Final = 1
"""1: first. A file of another version is refused."""
ARCHITECTURES_SOURCE: Final = (
    "CUDA C++ Programming Guide, Technical Specifications per Compute Capability"
)
"""Where the figures come from that depend on the compute capability alone."""

_HERE = Path(__file__).parent


def by_key(models: Iterable[GpuModel]) -> dict[str, GpuModel]:
    """Names win over aliases, aliases over titles, the earlier model over the later one."""
    known: dict[str, GpuModel] = {}
    models = tuple(models)
    for names in (
        lambda m: (m.name,),
        lambda m: m.aliases,
        lambda m: (m.title,),
    ):
        for model in models:
            for name in names(model):
                known.setdefault(key_of(name), model)
    return known


def key_of(name: str) -> str:
    """``NVIDIA GeForce RTX 4090`` and ``rtx4090`` are the same name."""
    words = re.split(r"[\s_-]+", name.strip().lower())
    return "".join(word for word in words if word not in ("nvidia", "geforce", "tesla"))


def load_user_catalogue(path: str | Path) -> tuple[GpuModel, ...]:
    """The GPUs of one catalogue file. See the module's docstring for its form.

    Raises ConfigError, naming the file and the entry, for whatever is wrong with it.
    """
    where = visible(str(path))
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = visible(getattr(error, "strerror", None) or str(error))
        raise ConfigError(f"the GPU catalogue {where} cannot be read: {reason}") from error
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the GPU catalogue {where} is not JSON: {error}") from error
    return _models(document, where, f"the catalogue file {where}", built_in())


@lru_cache(maxsize=1)
def built_in() -> tuple[GpuModel, ...]:
    document = json.loads((_HERE / "gpus.json").read_text(encoding="utf-8"))
    return _models(document, "gpus.json", document["source"], ())


@lru_cache(maxsize=1)
def architectures() -> dict[tuple[int, int], dict[str, int]]:
    document = json.loads((_HERE / "gpus.json").read_text(encoding="utf-8"))
    return {_capability(key): facts for key, facts in document["architectures"].items()}


NUMBERS: Final = (
    "total_memory",
    "multi_processor_count",
    "max_threads_per_multi_processor",
    "shared_memory_per_multiprocessor",
    "shared_memory_per_block_optin",
    "shared_memory_per_block",
    "regs_per_multiprocessor",
    "max_threads_per_block",
    "warp_size",
    "L2_cache_size",
    "clock_rate",
    "memory_clock_rate",
    "memory_bus_width",
)
_NEEDED: Final = ("title", "capability", "multi_processor_count", "total_memory")
_OTHER: Final = (
    "name",
    "title",
    "capability",
    "context",
    "aliases",
    "like",
    "sources",
    "total_memory_seen",
)


def _models(
    document: Any, where: str, source: str, known: Sequence[GpuModel]
) -> tuple[GpuModel, ...]:
    if not isinstance(document, dict) or document.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(f'{where}: expected an object with "schema_version": {SCHEMA_VERSION}')
    entries = document.get("gpus")
    if not isinstance(entries, list):
        raise ConfigError(f'{where}: "gpus" must be a list')
    models: list[GpuModel] = []
    for number, entry in enumerate(entries, 1):
        try:
            models.append(_model(entry, source, (*known, *models)))
        except (ConfigError, KeyError, TypeError, ValueError) as error:
            detail = visible(str(error.args[0]) if error.args else type(error).__name__)
            hint = error.hint if isinstance(error, ConfigError) else ""
            raise ConfigError(f"{where}, GPU {number}: {detail}", hint=hint) from error
    # Built-in entries are each other's records.
    return tuple(with_context(model, known or models) for model in models)


def _model(entry: Any, source: str, known: Sequence[GpuModel]) -> GpuModel:
    """One entry of a catalogue file. Raises ConfigError saying what is wrong with it."""
    if not isinstance(entry, dict):
        raise ConfigError("is not an object")
    name = entry.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", name):
        raise ConfigError('"name" must be made of a-z, 0-9, "-", "." and "+"')
    if key_of(name) == PRESENT:
        raise ConfigError(f'"name" cannot be {PRESENT!r}')
    for key in sorted(entry):
        if key not in NUMBERS and key not in _OTHER:
            raise ConfigError(f"unknown field {key!r}")
    values = {key: _positive(key, entry[key]) for key in NUMBERS if key in entry}
    given: dict[str, Any] = {**values, "name": name, "aliases": _texts(entry.get("aliases", []))}
    if "title" in entry:
        given["title"] = _text("title", entry["title"])
    if "capability" in entry:
        given["capability"] = _capability(entry["capability"])
    if "context" in entry:
        given["context"] = _interval(entry["context"])
    given["sources"] = {
        **dict.fromkeys([*values, *(k for k in ("capability", "context") if k in entry)], source),
        **_sources(entry.get("sources", {})),
    }
    given["total_memory_seen"] = {
        int(count): text for count, text in _sources(entry.get("total_memory_seen", {})).items()
    }
    if "like" in entry:
        return _derived(given, by_key(known).get(key_of(_text("like", entry["like"]))), entry)
    for key in _NEEDED:
        if key not in entry:
            raise ConfigError(f"has no {key!r}", hint='or take it from another GPU with "like"')
    facts = architectures().get(given["capability"], {})
    missing = [k for k in NUMBERS[2:9] if k not in facts and k not in given]
    if missing:
        raise ConfigError(
            f"nothing is known of capability {entry['capability']}: give {', '.join(missing)} too"
        )
    given["sources"] = {**dict.fromkeys(facts, ARCHITECTURES_SOURCE), **given["sources"]}
    return GpuModel(**{**facts, **given})


def _derived(given: dict[str, Any], base: GpuModel | None, entry: dict[str, Any]) -> GpuModel:
    if base is None:
        raise ConfigError(f'"like" names an unknown GPU: {entry["like"]!r}')
    if given.get("capability", base.capability) != base.capability:
        raise ConfigError('"capability" differs from that of the GPU named by "like"')
    given["sources"] = {
        **{key: f"as {base.name}: {text}" for key, text in base.sources.items()},
        **given["sources"],
    }
    return replace(base, **given)


def with_context(model: GpuModel, recorded: Iterable[GpuModel]) -> GpuModel:
    """A context for a GPU of which there is no record: as much per resident thread as the
    recorded ones have. The context holds the local memory of every thread that can run at once,
    so it grows with the GPU.
    """
    if model.context[1]:
        return model
    per_thread = [
        (m.context[0] / m.resident_threads, m.context[1] / m.resident_threads)
        for m in recorded
        if m.context[1]
    ]
    low = min(pair[0] for pair in per_thread)
    high = max(pair[1] for pair in per_thread)
    count = model.resident_threads
    said = f"no record: {low:,.0f} to {high:,.0f} bytes for each resident thread, as others have"
    return replace(
        model,
        context=(int(low * count), int(high * count)),
        sources={**model.sources, "context": said},
    )


def _positive(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 62:
        raise ConfigError(f"{key!r} must be a whole number above 0")
    return value


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{key!r} must be text")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ConfigError("'aliases' must be a list of names")
    return tuple(_text("aliases", item) for item in value)


def _sources(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ConfigError("'sources' and 'total_memory_seen' must be objects")
    return {key: _text(key, text) for key, text in value.items()}


def _capability(value: Any) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,2})\.(\d)", value) if isinstance(value, str) else None
    if match is None:
        raise ConfigError('"capability" must be like "9.0"')
    return int(match[1]), int(match[2])


def _interval(value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise ConfigError('"context" must be [low, high] in bytes')
    low, high = (_positive("context", item) for item in value)
    if low > high:
        raise ConfigError('"context" must be [low, high] in bytes')
    return low, high
