"""GPUs by name: what torch reports of each, and what its CUDA context costs.

The figures and the source of each are data, in ``gpus.json`` next to this file. Users add their
own GPUs in a file of the same form, named by the environment variable ``GPUPROBE_GPUS``
(several: separated as in ``PATH``)::

    {"schema_version": 1, "gpus": [
        {"name": "h20", "title": "NVIDIA H20", "like": "h200-141gb",
         "total_memory": 102000000000, "multi_processor_count": 78}]}

``like`` takes what is not given from another GPU. Without it an entry needs ``title``,
``capability``, ``multi_processor_count`` and ``total_memory``; what depends on the capability
alone comes from NVIDIA's table of technical specifications.

The memory that CUDA reports is less than the size a GPU is sold by, and differs between
drivers by up to a few hundred MiB: ``total_memory`` is one value really printed, and
``total_memory_seen`` the others.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any, Final

from gpuprobe.catalogue.file import (
    ARCHITECTURES_SOURCE,
    ENVIRONMENT,
    NUMBERS,
    PRESENT,
    all_models,
    architectures,
    built_in,
    by_key,
    key_of,
    with_context,
)
from gpuprobe.catalogue.gpu_model import GpuModel
from gpuprobe.errors import ConfigError, DriverUnavailable, MissingExtra
from gpuprobe.model.text import visible

MAX_DEVICES: Final = 64
_SHORT_NAME: Final = 3
"""Characters of names such as t4, of which one may be wrong."""


def find(name: str) -> GpuModel:
    """The GPU of that name, alias or title; case, blanks and maker's names do not matter.

    ``present`` is this machine's GPU. Raises ConfigError for an unknown name, with the most similar
    known one, and what `present` and `load_user_catalogue` raise.
    """
    key = key_of(name)
    if key == PRESENT:
        return present()
    known = by_key(all_models())
    found = known.get(key)
    if found is not None:
        return found
    if maker := _maker_of(key):
        raise ConfigError(
            f"{visible(name)!r} is made by {maker}, not by NVIDIA: only GPUs that run CUDA are "
            "simulated",
            hint="--gpu list prints them",
        )
    begins = [name for name in known if len(key) >= 2 and name.startswith(key)]
    alike = 0.5 if len(key) <= _SHORT_NAME else 0.7
    similar = get_close_matches(key, known, n=5, cutoff=alike)  # the most similar first
    near = list(dict.fromkeys(known[name].name for name in (*begins, *similar)))
    hint = f"did you mean {', '.join(near)}?" if near else "--gpu list prints them all"
    counted = re.fullmatch(r"(.*\S)\s*[:x*×]\s*(\d+)", name.strip(), re.IGNORECASE)
    if counted is not None and (model := known.get(key_of(counted[1]))) is not None:
        hint = f"several are written {counted[2]}x{model.name}"
    hint += f"; a file of your own GPUs ({ENVIRONMENT}) can have others"
    raise ConfigError(f"unknown GPU {visible(name)!r}", hint=hint)


_MAKERS: Final = (
    ("AMD", r"amd|instinct|radeon|mi\d{2,3}[a-z]?$|rx\d{3,4}"),
    ("Intel", r"intel|gaudi|habana|arc[ab]?\d|pontevecchio"),
    ("Google", r"google|tpu"),
    ("Apple", r"apple|mps$|m\d(pro|max|ultra)$"),
    ("Amazon", r"aws|amazon|trainium|inferentia|trn\d|inf\d"),
    ("Huawei", r"huawei|ascend"),
)
"""How the names of accelerators begin that do not run CUDA."""


def _maker_of(key: str) -> str:
    """Who makes the accelerator of that name, if NVIDIA does not; "" if that is unknown."""
    return next((maker for maker, names in _MAKERS if re.match(names, key)), "")


_COUNTED: Final = re.compile(r"(?:(\d{1,4})\s*[x*×]\s*)?(\S.*)", re.IGNORECASE)


def counted(text: str) -> bool:
    """Whether the text names a number of GPUs: ``2xt4``, and ``1xt4``."""
    match = _COUNTED.fullmatch(text.strip())
    return match is not None and match[1] is not None


def parse_spec(text: str) -> tuple[GpuModel, ...]:
    """The GPUs that a text such as ``h100-80gb``, ``2xa100-40gb`` or ``t4,2xl4`` names, in order.

    Raises ConfigError for an unknown name, an empty list, or more than 64 GPUs.
    """
    models: list[GpuModel] = []
    for part in text.split(","):
        match = _COUNTED.fullmatch(part.strip())
        if match is None:
            raise ConfigError(
                f"no GPU named in {visible(text)!r}", hint="for example: h100-80gb, 2xa100-40gb"
            )
        count = int(match[1]) if match[1] else 1
        if not 1 <= count <= MAX_DEVICES - len(models):
            raise ConfigError(f"{visible(text)!r} is not 1 to {MAX_DEVICES} GPUs")
        models += [find(match[2])] * count
    return tuple(models)


def alternatives(text: str) -> list[str]:
    """The GPUs to choose from that ``t4,2xl4`` names, each as written, or ``all`` of the catalogue,
    the smallest first. Raises ConfigError for an unknown name.
    """
    if text.strip() == "all":
        models = sorted(all_models(), key=lambda model: (model.total_memory, model.name))
        return [model.name for model in models]
    names = [part.strip() for part in text.split(",")]
    for name in names:
        parse_spec(name)
    return names


def present() -> GpuModel:
    """The first GPU of this machine, as torch reports it. Creates no memory on it, but does
    initialise CUDA in this process.

    Raises MissingExtra without torch, DriverUnavailable where torch sees no GPU.
    """
    try:
        import torch  # 2 s; only for the present GPU
    except ImportError as error:
        raise MissingExtra("torch", "torch") from error
    if not torch.cuda.is_available():
        raise DriverUnavailable(
            "torch sees no CUDA device", hint="name a GPU of docs/reference/gpus.md"
        )
    return from_properties(torch.cuda.get_device_properties(0))


def from_properties(properties: Any) -> GpuModel:
    """The model that a torch ``_CudaDeviceProperties`` describes.

    Its context is that of the catalogue's GPU of the same title, if there is one.
    """
    known = by_key(built_in()).get(key_of(properties.name))
    source = "torch.cuda.get_device_properties on this machine"
    measured = {}
    for key in NUMBERS:
        value = getattr(properties, key, None)  # the clocks only since torch 2.8
        if isinstance(value, int) and value > 0:
            measured[key] = value
    capability = (int(properties.major), int(properties.minor))
    facts = architectures().get(capability, {})
    model = GpuModel(
        **{
            **facts,
            **measured,
            "name": PRESENT,
            "title": properties.name,
            "capability": capability,
            "context": known.context if known is not None else (0, 0),
            "sources": {
                **dict.fromkeys(facts, ARCHITECTURES_SOURCE),
                **dict.fromkeys([*measured, "capability"], source),
                **({"context": known.sources["context"]} if known is not None else {}),
            },
        }
    )
    return with_context(model, built_in())
