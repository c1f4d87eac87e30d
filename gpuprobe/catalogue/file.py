"""Reading the GPU catalogue: ``gpus.json``, and files of the same form that users write."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final

from gpuprobe.catalogue.gpu_model import GpuModel
from gpuprobe.errors import ConfigError
from gpuprobe.model.io.codec import closed, from_plain
from gpuprobe.model.io.files import read_text
from gpuprobe.model.text import visible
from gpuprobe.model.values import Bounds, Parsed

PRESENT: Final = "present"
"""The name of the GPU that this machine really has: no entry may take it."""
ENVIRONMENT: Final = "GPUPROBE_GPUS"
"""The variable that names the users' own catalogue files."""
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

    Raises ConfigError, naming the file and the entry, if it is invalid.
    """
    where = visible(str(path))
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = visible(getattr(error, "strerror", None) or str(error))
        raise ConfigError(f"the GPU catalogue {where} cannot be read: {reason}") from error
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the GPU catalogue {where} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(f'{where}: expected an object with "schema_version": {SCHEMA_VERSION}')
    return _models(document, where, f"the catalogue file {where}", built_in())


@lru_cache(maxsize=1)
def _shipped() -> dict[str, Any]:
    document: dict[str, object] = json.loads((_HERE / "gpus.json").read_text(encoding="utf-8"))
    return document


@lru_cache(maxsize=1)
def built_in() -> tuple[GpuModel, ...]:
    return _models(_shipped(), "gpus.json", _shipped()["source"], ())


def all_models() -> tuple[GpuModel, ...]:
    """The users' own GPUs, then the built-in ones; a user's entry replaces one of its name."""
    own: dict[str, GpuModel] = {}
    for path in os.environ.get(ENVIRONMENT, "").split(os.pathsep):
        if path:
            own.update((model.name, model) for model in load_user_catalogue(path))
    return (*own.values(), *(model for model in built_in() if model.name not in own))


@lru_cache(maxsize=1)
def architectures() -> dict[tuple[int, int], dict[str, int]]:
    return {_capability(key): facts for key, facts in _shipped()["architectures"].items()}


def _text(value: str) -> str:
    if not value.strip():
        raise ValueError("expected a non-empty string")
    return value


def _name(value: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", value):
        raise ValueError('expected a name of a-z, 0-9, "-", "." and "+"')
    if key_of(value) == PRESENT:
        raise ValueError(f"it cannot be {PRESENT!r}")
    return value


def _capability(value: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,2})\.(\d)", value)
    if match is None:
        raise ValueError(f'expected a value like "9.0", found {value!r:.40}')
    return int(match[1]), int(match[2])


def _interval(value: list[int]) -> tuple[int, int]:
    if len(value) != 2 or value[0] > value[1]:
        raise ValueError("expected [low, high] in bytes")
    return value[0], value[1]


_Positive = Annotated[int, Bounds(1, (1 << 62) - 1)]
_Text = Annotated[str, Parsed(str, _text)]


@dataclass(frozen=True)
class _CatalogueFile:
    gpus: list[Any]


@closed
@dataclass(frozen=True)
class _Entry:
    """One GPU as a catalogue file has it; what is None is not given."""

    name: Annotated[str, Parsed(str, _name)]
    title: _Text | None = None
    like: _Text | None = None
    capability: Annotated[tuple[int, int], Parsed(str, _capability)] | None = None
    context: Annotated[tuple[int, int], Parsed(list[_Positive], _interval)] | None = None
    aliases: tuple[_Text, ...] = ()
    sources: dict[str, _Text] = field(default_factory=dict)
    total_memory_seen: dict[int, _Text] = field(default_factory=dict)
    total_memory: _Positive | None = None
    multi_processor_count: _Positive | None = None
    max_threads_per_multi_processor: _Positive | None = None
    shared_memory_per_multiprocessor: _Positive | None = None
    shared_memory_per_block_optin: _Positive | None = None
    shared_memory_per_block: _Positive | None = None
    regs_per_multiprocessor: _Positive | None = None
    max_threads_per_block: _Positive | None = None
    warp_size: _Positive | None = None
    L2_cache_size: _Positive | None = None
    clock_rate: _Positive | None = None
    memory_clock_rate: _Positive | None = None
    memory_bus_width: _Positive | None = None


NUMBERS: Final = tuple(f.name for f in fields(_Entry) if f.type == "_Positive | None")
"""The figures that are one number each."""
_NEEDED: Final = ("title", "capability", "multi_processor_count", "total_memory")


def _models(
    document: object, where: str, source: str, known: Sequence[GpuModel]
) -> tuple[GpuModel, ...]:
    models: list[GpuModel] = []
    file = from_plain(_CatalogueFile, document, where, ConfigError)
    for number, plain in enumerate(file.gpus, 1):
        at = f"{where}, GPU {number}"
        entry = from_plain(_Entry, plain, at, ConfigError)
        try:
            models.append(_model(entry, source, (*known, *models)))
        except ConfigError as error:
            raise ConfigError(f"{at}: {visible(str(error))}", hint=error.hint) from error
    # Built-in entries are each other's records.
    return tuple(with_context(model, known or models) for model in models)


def _model(entry: _Entry, source: str, known: Sequence[GpuModel]) -> GpuModel:
    """The GPU that an entry describes. Raises ConfigError if the entry is invalid."""
    given = {
        f.name: value
        for f in fields(entry)
        if f.name != "like" and (value := getattr(entry, f.name)) is not None
    }
    read = [name for name in given if name in (*NUMBERS, "capability", "context")]
    given["sources"] = {**dict.fromkeys(read, source), **entry.sources}
    if entry.like is not None:
        return _derived(given, by_key(known).get(key_of(entry.like)), entry.like)
    for key in _NEEDED:
        if key not in given:
            raise ConfigError(f"has no {key!r}", hint='or take it from another GPU with "like"')
    facts = architectures().get(given["capability"], {})
    missing = [k for k in NUMBERS[2:9] if k not in facts and k not in given]
    if missing:
        capability = "{}.{}".format(*given["capability"])
        raise ConfigError(f"unknown capability {capability}: give {', '.join(missing)} too")
    given["sources"] = {**dict.fromkeys(facts, ARCHITECTURES_SOURCE), **given["sources"]}
    return GpuModel(**{**facts, **given})


def _derived(given: dict[str, Any], base: GpuModel | None, like: str) -> GpuModel:
    if base is None:
        raise ConfigError(f'"like" names an unknown GPU: {like!r}')
    if given.get("capability", base.capability) != base.capability:
        raise ConfigError('"capability" differs from that of the GPU named by "like"')
    given["sources"] = {
        **{key: f"as {base.name}: {text}" for key, text in base.sources.items()},
        **given["sources"],
    }
    return replace(base, **given)


def with_context(model: GpuModel, recorded: Iterable[GpuModel]) -> GpuModel:
    """A GPU whose context was never recorded, with a context of as many bytes per resident thread
    as the recorded ones have. The context holds the local memory of every thread that can run at
    once, so it grows with the GPU.
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
    source = f"no record: {low:,.0f} to {high:,.0f} bytes for each resident thread, as others have"
    return replace(
        model,
        context=(int(low * count), int(high * count)),
        sources={**model.sources, "context": source},
    )
