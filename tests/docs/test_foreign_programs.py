"""The programs of `benchmarks/native_programs.py`: their list, and how losses are compared."""

from __future__ import annotations

from foreign import programs
from native_programs import equal, summary


def test_every_name_is_one_program() -> None:
    names = programs.names()
    assert len(names) == len(set(names)) == 100
    # Those whose names are data need their library to be loaded.
    own = [name for name in names if not name.startswith(("transformers/", "timm/"))]
    for name in own:
        assert programs.load(name).name == name
    assert sorted(own) == sorted(programs.REGISTERED), "a program is registered, and not listed"


def test_losses_are_compared_with_those_on_the_cpu() -> None:
    assert equal([1.0005], [1.0])
    assert not equal([1.01], [1.0])
    assert not equal([1.0, 1.0], [1.0])
    assert equal([float("nan")], [float("nan")])
    assert not equal([float("nan")], [1.0])


def test_a_program_that_does_not_run_and_a_loss_that_differs_are_named() -> None:
    ran = {"status": "ran", "losses": [1.0], "drawn": False}
    found = {
        ("a/b", "cpu"): ran,
        ("a/b", "real"): {**ran, "losses": [2.0]},
        ("a/b", "shapes"): {"status": "failed", "error": "boom"},
        ("a/c", "cpu"): ran,
        ("a/c", "real"): {**ran, "losses": [2.0], "drawn": True},
        ("a/c", "shapes"): ran,
    }
    assert summary(["a/b", "a/c"], found) == [
        "a/b shapes: failed: boom",
        "a/b: losses [2.0], on the CPU [1.0]",
        "2 programs: ran with values 2, ran in shapes 1, equal losses 0, compared 1",
    ]
