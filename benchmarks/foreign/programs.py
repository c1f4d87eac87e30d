"""Programs of other people's making: each a function of a device that trains a few steps.

A program returns its losses, as numbers or as tensors on the device. Programs of one family
share what they import, which takes longer than they do: a worker imports it once, and forks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LIST = HERE / "programs.txt"
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
)
"""Modules of `libraries` that register programs."""


@dataclass(frozen=True)
class Program:
    """``imports`` are imported before the GPU is there, as by a process that forks workers."""

    name: str
    family: str
    imports: tuple[str, ...]
    train: Callable[[str], Any]


REGISTERED: dict[str, Program] = {}


def program(name: str, *imports: str) -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
    """Register a function as a program. Its family is the part before the first ``/``."""

    def register(function: Callable[[str], Any]) -> Callable[[str], Any]:
        family = name.split("/")[0]
        REGISTERED[name] = Program(name, family, imports or (family,), function)
        return function

    return register


def names() -> list[str]:
    """All names of ``programs.txt``, in the order in which they were frozen."""
    lines = LIST.read_text(encoding="utf-8").splitlines()
    return [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]


def families() -> dict[str, list[str]]:
    """The names, by family."""
    found: dict[str, list[str]] = {}
    for name in names():
        found.setdefault(name.split("/")[0], []).append(name)
    return found


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
