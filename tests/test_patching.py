"""Replacing attributes of others, whoever else does so, in any order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from gpuprobe.patching import Patches, patch


class Owner:
    def name(self) -> str:
        return "original"


class Heir(Owner):
    pass


ORIGINAL = vars(Owner)["name"]


def passing(tag: str, old: Callable[..., str]) -> Callable[..., str]:
    def name(self: Any) -> str:
        return f"{tag}({old(self)})"

    return name


@pytest.fixture(autouse=True)
def untouched() -> Any:
    yield
    Owner.name = ORIGINAL  # type: ignore[method-assign]


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_restored_in_any_order(order: tuple[int, ...]) -> None:
    restores = [patch(Owner, "name", passing(tag, Owner.name)) for tag in "abc"]
    assert Owner().name() == "c(b(a(original)))"
    for at in order:
        restores[at]()
        restores[at]()  # twice does no harm
    assert vars(Owner)["name"] is ORIGINAL


def test_the_newest_stays_until_it_goes_itself() -> None:
    first = patch(Owner, "name", one := passing("a", ORIGINAL))
    second = patch(Owner, "name", two := passing("b", one))
    first()
    assert vars(Owner)["name"] is two
    second()
    assert vars(Owner)["name"] is ORIGINAL


def test_what_is_inherited_is_deleted_again() -> None:
    restore = patch(Heir, "name", passing("a", ORIGINAL))
    restore()
    assert "name" not in vars(Heir)
    assert Heir().name() == "original"


def test_a_later_patch_of_the_programs_stays() -> None:
    restore = patch(Owner, "name", passing("ours", ORIGINAL))
    theirs = Owner.name = passing("theirs", Owner.name)  # type: ignore[method-assign]
    restore()
    assert vars(Owner)["name"] is theirs


def test_a_patch_of_the_programs_between_two_of_ours_stays() -> None:
    below = patch(Owner, "name", passing("a", ORIGINAL))
    theirs = Owner.name = passing("theirs", Owner.name)  # type: ignore[method-assign]
    above = patch(Owner, "name", passing("b", Owner.name))
    below()
    above()
    assert vars(Owner)["name"] is theirs


def test_an_exception_while_installing_leaves_what_was_done_to_undo() -> None:
    patches = Patches()
    patches.set(Owner, "name", passing("a", ORIGINAL))
    with pytest.raises(TypeError):
        patches.set(int, "name", 1)  # a type that cannot be changed
    patches.undo()
    assert vars(Owner)["name"] is ORIGINAL
    assert patch(Owner, "name", ORIGINAL)() is None


def test_one_undo_that_fails_keeps_no_other_from_being_done() -> None:
    patches = Patches()
    patches.set(Owner, "name", passing("a", ORIGINAL))
    patches.add(lambda: [][0])
    patches.set(Owner, "name", passing("b", Owner.name))
    with pytest.raises(IndexError):
        patches.undo()
    assert vars(Owner)["name"] is ORIGINAL


def test_modules_that_imported_a_function_by_name_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import ModuleType

    whole, part, other = ModuleType("lib"), ModuleType("lib.part"), ModuleType("library")
    for module in (whole, part, other):
        module.work = ORIGINAL  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    patches = Patches()
    patches.set_all(whole, {"work": print}, "lib.")
    assert [module.work for module in (whole, part, other)] == [print, print, ORIGINAL]  # type: ignore[attr-defined]
    patches.undo()
    assert {module.work for module in (whole, part, other)} == {ORIGINAL}  # type: ignore[attr-defined]


def test_torchscript_knows_what_replaces_its_functions() -> None:
    import torch
    from torch.jit._builtins import _find_builtin

    def relu(*args: Any) -> Any:
        return original(*args)

    original = torch.relu
    patches = Patches()
    patches.set(torch, "relu", relu)
    assert _find_builtin(relu) == _find_builtin(original)
    patches.undo()
    assert _find_builtin(relu) is None
