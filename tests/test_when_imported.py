"""Waiting for a module to be imported, without being noticed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuprobe.patching import when_imported

NAME = "imported_by_the_program"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = tmp_path / f"{NAME}.py"
    path.write_text("value = 1\n")
    before = list(sys.meta_path)
    yield path
    assert sys.meta_path == before
    sys.modules.pop(NAME, None)


def test_several_may_wait_for_the_same_module(module: Path) -> None:
    calls: list[int] = []
    for number in range(3):
        when_imported(NAME, lambda number=number: calls.append(number))  # type: ignore[misc]
    made = importlib.import_module(NAME)
    assert calls == [0, 1, 2]
    assert type(made.__loader__).__name__ == "SourceFileLoader"


def test_a_program_may_first_ask_whether_there_is_one(module: Path) -> None:
    calls: list[int] = []
    when_imported(NAME, lambda: calls.append(sys.modules[NAME].value))
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    assert spec.loader is not None
    assert spec.loader.get_source(NAME) == "value = 1\n"  # type: ignore[attr-defined]
    assert not calls
    made = importlib.import_module(NAME)
    assert calls == [1]
    assert type(made.__loader__).__name__ == "SourceFileLoader"


def test_a_program_may_try_again(module: Path) -> None:
    calls: list[int] = []
    when_imported(NAME, lambda: calls.append(1))
    module.write_text("raise ImportError('a library is missing')\n")
    with pytest.raises(ImportError):
        importlib.import_module(NAME)
    module.write_text("value = 1\n")
    importlib.invalidate_caches()
    importlib.import_module(NAME)
    assert calls == [1]
