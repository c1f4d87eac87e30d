"""The hunks of a change, and the search for those that cost memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprobe.analysis.blame.hunks import (
    Hunk,
    dependents,
    described,
    halves,
    hunks_of,
    tree_without,
)
from gpuprobe.analysis.blame.search import Found, OverBudget, Taken, likely_first, search

LINES = st.lists(st.sampled_from([*"abcdefgh", "", "  x = 1", "def f():"]), max_size=14)


@given(
    st.dictionaries(st.sampled_from(["a.py", "b.py", "c.yaml"]), LINES, max_size=3),
    st.dictionaries(st.sampled_from(["a.py", "b.py", "c.yaml"]), LINES, max_size=3),
)
def test_taking_everything_back_makes_the_old_files(
    before: Mapping[str, Sequence[str]], after: Mapping[str, Sequence[str]]
) -> None:
    """In files of one name. What moved stays where it is now: of those, the lines come back."""
    old, new = ({name: _text(lines) for name, lines in side.items()} for side in (before, after))
    hunks = hunks_of(old, new)
    assert {name: text for name, text in tree_without((), old, new).items() if name in new} == new
    tree = tree_without(hunks, old, new)
    for name in old.keys() & new.keys():
        back = tree[name]
        assert back is not None
        if set(old) == set(new) == {name} and not _moved(old[name], new[name]):
            assert back == old[name]


def _text(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _moved(old: str, new: str) -> bool:
    """Whether lines of the one could be called moved in the other."""
    lines = [text.strip() for text in (*old.splitlines(), *new.splitlines()) if text.strip()]
    return len(lines) >= 6


OLD = {
    "train.py": (
        "import torch\n\n\ndef evaluate(model, x):\n    with torch.no_grad():\n"
        "        return model(x)\n\n\ndef main():\n    evaluate(None, 1)\n"
    ),
    "conf.yaml": "batch: 8\nwidth: 64\n",
}


def test_adjacent_lines_that_changed_alone_are_hunks_of_their_own() -> None:
    new = {**OLD, "conf.yaml": "batch: 16\nwidth: 65\n"}
    assert [hunk.line for hunk in hunks_of(OLD, new)] == [1, 2]
    one, two = hunks_of(OLD, new)
    assert tree_without([one], OLD, new)["conf.yaml"] == "batch: 8\nwidth: 65\n"
    assert tree_without([two], OLD, new)["conf.yaml"] == "batch: 16\nwidth: 64\n"


def test_comments_are_not_worth_a_run() -> None:
    new = {
        **OLD,
        "train.py": OLD["train.py"].replace("import torch\n", "# so\nimport torch  # t\n"),
    }
    assert all(hunk.neutral for hunk in hunks_of(OLD, new))
    assert hunks_of(OLD, new)


def test_an_edit_inside_a_moved_function_is_found_there() -> None:
    body = "".join(OLD["train.py"].splitlines(keepends=True)[3:6])
    moved = body.replace("    with torch.no_grad():\n        return", "    return")
    new = {
        "train.py": OLD["train.py"]
        .replace(body, "")
        .replace("import torch\n", "from tools import evaluate\n"),
        "tools.py": f"import torch\n\n\ndef evaluate(model, x):\n    scale = 1\n"
        f"    bias = 2\n    total = scale + bias\n{moved.partition(chr(10))[2]}",
        "conf.yaml": OLD["conf.yaml"],
    }
    old = dict(OLD)
    old["train.py"] = OLD["train.py"].replace(
        "    with torch", "    scale = 1\n    bias = 2\n    total = scale + bias\n    with torch"
    )
    edits = [hunk for hunk in hunks_of(old, new) if hunk.file == "tools.py" and not hunk.neutral]
    assert any("with torch.no_grad():" in text for hunk in edits for text in hunk.old)
    assert not [hunk for hunk in edits if "def evaluate" in "".join(hunk.new)]


TOTAL = """\
import torch


@torch.no_grad()
def total(model, data):
    model.eval()
    found = 0.0
    for batch in data:
        out = model(batch)
        found += out.sum().item()
    return found / len(data)


def main():
    print(total(None, []))
"""
COPY = """\
def total_of_all(model, data):
    model.eval()
    found = 0.0
    for batch in data:
        out = model(batch)
        KEPT.append(out)
        found += out.sum().item()
    return found / len(data)


"""


def test_what_was_edited_in_a_copy_is_found_in_it() -> None:
    old = {"train.py": TOTAL}
    new = {
        "train.py": TOTAL.replace("def main():\n", f"{COPY}def main():\n")
        + "    print(total_of_all(None, []))\n"
    }
    hunks = hunks_of(old, new)
    edits = [hunk for hunk in hunks if hunk.within is not None and not hunk.neutral]
    assert [(hunk.line, described(hunk)) for hunk in edits] == [
        (14, "a copy without `@torch.no_grad()`"),
        (19, "a copy with `KEPT.append(out)`"),
    ]
    assert tree_without(hunks, old, new) == old
    without = tree_without(edits, old, new)["train.py"]
    assert without is not None
    assert without.count("@torch.no_grad()") == 2
    assert "KEPT" not in without
    needed = dependents(hunks, old, new)
    assert [needed[hunks.index(hunk)] for hunk in edits] == [{hunks.index(hunk)} for hunk in edits]


@pytest.mark.parametrize(
    "added",
    [
        "def other(x):\n    y = x + 1\n    print(y)\n    z = y * 2\n    return z\n\n\n",
        "def short(model):\n    model.eval()\n    found = 0.0\n\n\n",
    ],
)
def test_what_is_new_is_no_copy(added: str) -> None:
    new = {"train.py": TOTAL.replace("def main():\n", f"{added}def main():\n")}
    assert [hunk.within for hunk in hunks_of({"train.py": TOTAL}, new)] == [None]


def test_halves_assign_and_read_one_name() -> None:
    old = (
        "def get(flat, order):\n    size = 4\n    for at in order:\n"
        "        yield flat[order[at]]\n\n\ndef put(flat):\n    return flat\n"
    )
    new = (
        "def get(flat, order):\n    size = 8\n    flat = flat[order]\n    for at in order:\n"
        "        yield flat[at]\n\n\ndef put(flat):\n    return flat + 1\n"
    )
    hunks = hunks_of({"a.py": old}, {"a.py": new})
    assert [hunk.line for hunk in hunks] == [2, 3, 5, 9]
    assert halves(hunks, {"a.py": new}) == ({0}, {1, 2}, {1, 2}, {3})
    assert halves((Hunk("a.yaml", 1, (), ("a: 1\n",)),), {}) == ({0},)


def test_a_renamed_file_exists_under_both_names() -> None:
    new = {"run.py": OLD["train.py"].replace("1)", "2)"), "conf.yaml": OLD["conf.yaml"]}
    (hunk,) = hunks_of(OLD, new)
    assert (hunk.file, described(hunk)) == (
        "run.py",
        "`evaluate(None, 2)` instead of `evaluate(None, 1)`",
    )
    tree = tree_without([hunk], OLD, new)
    assert tree["run.py"] == tree["train.py"] == OLD["train.py"]


def test_settings_that_only_one_side_has_do_not_exist_in_the_other() -> None:
    new = {"train.py": OLD["train.py"], "more.json": "{}\n"}
    gone, come = sorted(hunks_of(OLD, new), key=lambda hunk: hunk.file)
    assert tree_without([], OLD, new) == {**new, "conf.yaml": None}
    assert tree_without([gone], OLD, new) == {**new, "conf.yaml": OLD["conf.yaml"]}
    assert tree_without([come], OLD, new)["more.json"] is None


def test_a_line_that_is_gone_before_one_that_changed_comes_back_before_it() -> None:
    """Two hunks at one line: one has no new lines."""
    old = {"a.py": "n = 3\nx = torch.cat(rows)[:n]\nprint(x)\n"}
    new = {"a.py": "x = torch.cat(rows)\nprint(x)\n"}
    hunks = hunks_of(old, new)
    assert [(hunk.start, hunk.new) for hunk in hunks] == [(1, ()), (1, ("x = torch.cat(rows)\n",))]
    assert tree_without(hunks, old, new) == tree_without(hunks[::-1], old, new) == old


def test_docstrings_are_not_worth_a_run() -> None:
    def neutral(text: str, old: str = "def f():\n    return 1\n") -> list[bool]:
        return [hunk.neutral for hunk in hunks_of({"a.py": old}, {"a.py": text})]

    assert neutral('def f():\n    """One.\n\n    More.\n    """\n    return 1\n') == [True]
    assert neutral("def f():\n    '''One.'''\n\n    return 1\n") == [True]
    # A string that is part of a longer one.
    assert neutral('x = (\n    "a"\n    "b"\n)\n', 'x = (\n    "a"\n)\n') == [False]


def test_a_use_is_taken_back_with_its_definition() -> None:
    new = dict(OLD)
    new["train.py"] = (
        OLD["train.py"]
        .replace("def main", "def keep(x):\n    return x\n\n\ndef main")
        .replace("    evaluate(None, 1)", "    keep(evaluate(None, 1))")
    )
    hunks = hunks_of(OLD, new)
    definition, use = (
        next(at for at, hunk in enumerate(hunks) if text in "".join(hunk.new))
        for text in ("def keep", "keep(evaluate")
    )
    needed = dependents(hunks, OLD, new)
    assert needed[definition] == {definition, use}
    assert needed[use] == {use}


def test_what_changed_meaning_comes_before_what_has_bytes() -> None:
    new = {
        "train.py": OLD["train.py"]
        .replace("    with torch.no_grad():\n        return", "    return")
        .replace("import torch\n", "import torch\nfrom torch import nn\n")
        .replace("    evaluate(None", "    print('hello')\n    evaluate(None"),
        "conf.yaml": OLD["conf.yaml"].replace("64", "60"),
    }
    hunks = hunks_of(OLD, new)
    first = hunks[likely_first(hunks, [])[0]]
    assert "no_grad" in "".join(first.old)


# -- the search


def searched(
    count: int, cost: Callable[[frozenset[int]], int | None], most: int | None = None
) -> tuple[Found, int]:
    """What a search finds where the hunks that are left cost so much, and how many runs it took."""
    runs = 0

    def run(taken: Taken) -> int | None:
        nonlocal runs
        if most is not None and runs >= most:
            raise OverBudget
        runs += 1
        value = cost(frozenset(range(count)) - taken)
        return None if value is None else 1000 + value

    whole = cost(frozenset(range(count)))
    assert whole is not None
    alone = [frozenset((at,)) for at in range(count)]
    return search(range(count), alone, 1000, 1000 + whole, run), runs


COSTS = st.lists(st.integers(0, 4), min_size=1, max_size=60).flatmap(
    lambda small: st.tuples(
        st.just(len(small)),
        st.dictionaries(st.integers(0, len(small) - 1), st.integers(200, 900), max_size=4),
    )
)


@given(COSTS)
def test_costs_that_add_up_are_each_found(drawn: tuple[int, dict[int, int]]) -> None:
    count, costs = drawn
    found, runs = searched(count, lambda left: sum(costs.get(at, 0) for at in left))
    assert {cause.hunks: cause.saved for cause in found.causes} == {
        (at,): size for at, size in costs.items()
    }
    assert found.together == sum(costs.values())
    assert found.rest == 0
    assert found.complete
    assert runs <= 2 * count + 4


@given(COSTS, st.integers(0, 12))
def test_shares_conserve_under_any_budget(drawn: tuple[int, dict[int, int]], most: int) -> None:
    """Together and the rest are the growth; what is named was measured."""
    count, costs = drawn

    def cost(left: frozenset[int]) -> int:
        return max((costs.get(at, 0) for at in left), default=0) + sum(
            costs.get(at, 0) for at in left
        )

    whole = cost(frozenset(range(count)))
    found, runs = searched(count, cost, most)
    assert runs <= most
    assert found.together + found.rest == whole
    for cause in found.causes:
        if cause.alone:
            assert cause.saved == whole - cost(frozenset(range(count)) - set(cause.hunks))


@given(st.integers(2, 30), st.data())
def test_two_of_which_either_suffices_are_found_together(count: int, data: st.DataObject) -> None:
    pair = data.draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=2))
    found, _ = searched(count, lambda left: 500 if pair & left else 0)
    assert [set(cause.hunks) for cause in found.causes] == [pair]
    assert (found.together, found.rest) == (500, 0)


@given(st.integers(2, 30), st.data())
def test_what_does_not_run_alone_is_taken_back_with_what_it_needs(
    count: int, data: st.DataObject
) -> None:
    one, other = data.draw(st.permutations(range(count)))[:2]
    found, _ = searched(
        count, lambda left: None if other in left and one not in left else 700 * (one in left)
    )
    assert [set(cause.hunks) for cause in found.causes] == [{one, other}]
    assert found.rest == 0


def test_what_fails_alone_is_tried_with_its_partners() -> None:
    """Of a pair, one of which does not run without the other: three runs, and no search."""

    def cost(taken: Taken) -> int | None:
        return None if 4 in taken and 2 not in taken else 100 - 90 * (4 in taken)

    asked: list[tuple[int, Taken]] = []

    def partners(hunk: int, taken: Taken) -> Taken:
        asked.append((hunk, taken))
        return Taken((3,) if len(asked) == 1 else (2,))

    alone = [frozenset((at,)) for at in range(6)]
    tried = []

    def run(taken: Taken) -> int | None:
        tried.append(taken)
        return cost(taken)

    found = search([4, 0, 1, 2, 3, 5], alone, 0, 100, run, partners=partners)
    assert asked == [(4, {4}), (4, {3, 4})]
    assert tried[:3] == [{4}, {3, 4}, {2, 3, 4}]
    assert found.causes[0].hunks[0] == 4
    assert {2, 4} <= set(found.causes[0].hunks)
    assert found.together == 90


def test_a_partner_that_suffices_alone_is_the_cause() -> None:
    """The likely hunk fails without its partner, which is what costs."""
    alone = [frozenset((at,)) for at in range(3)]
    found = search(
        [0, 1, 2],
        alone,
        0,
        100,
        lambda taken: None if 0 in taken and 1 not in taken else 100 - 100 * (1 in taken),
        partners=lambda hunk, taken: Taken((1,)),
    )
    assert [cause.hunks for cause in found.causes] == [(1,)]


@pytest.mark.parametrize(("rest", "told"), [(-30, {(0, 1): 70}), (0, {(0,): 100})])
def test_half_an_edit_is_not_all_that_it_saves(rest: int, told: dict[tuple[int, ...], int]) -> None:
    """Without the half that costs, what was to make up for it is still there."""
    sizes = (100, rest, 0)
    alone = [frozenset((at,)) for at in range(3)]
    found = search(
        range(3),
        alone,
        0,
        100 + rest,
        lambda taken: sum(size for at, size in enumerate(sizes) if at not in taken),
        halves=lambda hunk: Taken((0, 1)) if hunk < 2 else Taken((2,)),
    )
    assert {cause.hunks: cause.saved for cause in found.causes} == told
    assert found.rest == 0


def in_a_copy(sizes: Sequence[int], budget: int = 99) -> tuple[Found, int]:
    """Of a copy (0) that costs what its edits (1 and on) cost, and the first of ``sizes``."""
    runs = 0

    def run(taken: Taken) -> int:
        nonlocal runs
        if runs >= budget:
            raise OverBudget
        runs += 1
        return 0 if 0 in taken else sum(n for at, n in enumerate(sizes) if at not in taken)

    alone = [frozenset((at,)) for at in range(len(sizes))]
    edits = range(1, len(sizes))
    found = search([0], alone, 0, sum(sizes), run, inside=lambda hunk: edits if hunk == 0 else ())
    return found, runs


def test_the_edit_of_a_copy_is_the_cause_where_the_copy_costs_nothing() -> None:
    found, runs = in_a_copy([0, 10, 990, 0])
    assert [(cause.hunks, cause.saved) for cause in found.causes] == [((2,), 990)]
    found, _ = in_a_copy([0, 400, 600])
    assert {cause.hunks: cause.saved for cause in found.causes} == {(2,): 600, (1,): 400}
    assert found.rest == 0
    found, runs = in_a_copy([500, 500])
    assert [(cause.hunks, cause.saved) for cause in found.causes] == [((0,), 1000)]
    assert runs == 2


@pytest.mark.parametrize("budget", [1, 2])
def test_over_the_budget_inside_a_copy_it_is_the_cause(budget: int) -> None:
    found, _ = in_a_copy([0, 10, 990, 0], budget)
    assert [(cause.hunks, cause.saved) for cause in found.causes] == [((0,), 1000)]
    assert not found.complete


def test_without_partners_that_help_the_search_goes_on() -> None:
    alone = [frozenset((at,)) for at in range(3)]
    found = search(
        range(3),
        alone,
        0,
        100,
        lambda taken: None if 0 in taken else 100 - 100 * (2 in taken),
        partners=lambda hunk, taken: Taken((1,)),
    )
    assert [cause.hunks for cause in found.causes] == [(2,)]


def test_a_growth_from_elsewhere_stays_unexplained() -> None:
    found, _ = searched(3, lambda left: 400)
    assert (found.causes, found.together, found.rest, found.floor) == ((), 0, 400, 1400)


def test_a_dependent_alone_is_the_cause_where_it_saves_as_much() -> None:
    """A definition is reverted with its use; the use, which is what costs, alone."""
    needed = [frozenset((0, 1)), frozenset((1,))]
    found = search([0, 1], needed, 0, 100, lambda taken: 0 if 1 in taken else 100)
    assert [cause.hunks for cause in found.causes] == [(1,)]


@pytest.mark.parametrize("count", [1, 7, 500])
def test_one_of_many_takes_few_runs(count: int) -> None:
    _, runs = searched(count, lambda left: 900 * (count - 1 in left))
    assert runs <= min(count, 60)


def test_what_is_taken_back_along_is_not_tried_where_it_makes_no_difference() -> None:
    """A comment that has a name of the definition: it is no hunk of the order."""
    needed = [frozenset((0, 1, 2)), frozenset((1,)), frozenset((2,))]
    tried = []

    def run(taken: Taken) -> int:
        tried.append(taken)
        return 0 if 0 in taken else 100

    found = search([0, 1], needed, 0, 100, run)
    assert [set(cause.hunks) for cause in found.causes] == [{0, 1, 2}]
    assert {2} not in tried
