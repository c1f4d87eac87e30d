"""The programs of the corpus: each a function of a device that trains a few steps.

A program returns its losses, as numbers or as tensors on the device. Programs of one family
share what they import, which takes longer than they do: a worker imports it once, and forks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus.txt"
MODULES = (
    "adaptation",
    "audio",
    "detection",
    "hugging_face",
    "images",
    "numerics",
    "graphs",
    "reinforcement",
    "sequences",
    "trainers",
    "scripts",
)
"""Modules of `libraries` that register programs."""


@dataclass(frozen=True)
class Program:
    """``imports`` are imported before the GPU is there, as by a process that forks workers."""

    name: str
    family: str
    imports: tuple[str, ...]
    train: Callable[[str], Any]
    needs: str = ""
    """A file outside the corpus that the program is read from; "" where it is all here."""


REGISTERED: dict[str, Program] = {}


def program(
    name: str, *imports: str, needs: str = ""
) -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
    """Register a function as a program. Its family is the part before the first ``/``."""

    def register(function: Callable[[str], Any]) -> Callable[[str], Any]:
        family = name.split("/")[0]
        REGISTERED[name] = Program(name, family, imports or (family,), function, needs)
        return function

    return register


def names() -> list[str]:
    """All names of the corpus, in the order in which they were frozen."""
    lines = CORPUS.read_text(encoding="utf-8").splitlines()
    return [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]


def families(requested: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Families of the corpus with their programs; of these names, or of all."""
    found: dict[str, list[str]] = {}
    for name in names():
        if not requested or any(name == each or name.startswith(f"{each}/") for each in requested):
            found.setdefault(name.split("/")[0], []).append(name)
    yield from found.items()


def load(name: str) -> Program:
    """The program of a name. Raises KeyError where no module registers it."""
    family, _, rest = name.partition("/")
    if family == "transformers":
        task, _, architecture = rest.partition("/")
        from foreign import architectures

        return Program(
            name,
            family,
            architectures.imports(task, architecture),
            lambda device: architectures.train(task, architecture, device),
        )
    if family == "timm":
        from foreign import timm_models

        return Program(name, family, ("timm",), lambda device: timm_models.train(rest, device))
    for module in MODULES:
        importlib.import_module(f"foreign.libraries.{module}")
    return REGISTERED[name]
