"""The tools that run the documentation: do they notice what is wrong with a page?"""

from __future__ import annotations

from pathlib import Path

import blocks
import generate
import pytest

import gpuprobe


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(blocks, "ROOT", tmp_path)
    (tmp_path / "examples").mkdir()
    return tmp_path / "page.md"


def problems(page: Path, text: str) -> list[str]:
    page.write_text(text, encoding="utf-8")
    base = page.parent / "scratch"
    base.mkdir()
    return [o.problem for o in blocks.run_page(page, blocks.Runner(base)) if o.problem]


def test_a_right_page_has_no_problems(page: Path) -> None:
    text = """
```console
$ echo 'peak 12.5 MiB in 3 steps'
peak 1.0 GiB in 44 steps
$ printf 'a\\nb\\nc\\n'
a
...
c
$ echo one \\
>     two
one two
```

<!-- exit: 3 -->

```console
$ exit 3
```

<!-- output: differs -->

```console
$ echo this
that
```

```python
print(1)
```
"""
    assert problems(page, text) == []


@pytest.mark.parametrize(
    ("text", "problem_text"),
    [
        ("```console\n$ exit 3\n```", "exit code 3, not 0"),
        ("<!-- exit: 0 or 2 -->\n```console\n$ exit 3\n```", "exit code 3, not 0 or 2"),
        ("<!-- exit: 3 -->\n```console\n$ exit 3\n$ exit 3\n```", "exit code 3, not 0"),
        ("```console\n$ echo words\nother words\n```", "-other words\n+words"),
        ("```console\n$ printf 'a\\nb\\n'\na\n```", "+b"),
        ("```console\n$ printf 'a\\nb\\n'\n...\na\n```", "+b"),
        ("```python\nraise SystemExit(4)\n```", "exit code 4, not 0"),
    ],
)
def test_a_wrong_page_is_noticed(page: Path, text: str, problem_text: str) -> None:
    (problem,) = problems(page, text)
    assert problem_text in problem
    assert problem.startswith("page.md:")


@pytest.mark.parametrize(
    "text",
    ["```console\n$ ls\n", "<!-- skip: no block -->\n\ntext", "<!-- skip: at the end -->\n"],
)
def test_a_malformed_page_is_refused(page: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"page\.md"):
        problems(page, text)


def test_a_skipped_block_is_not_run(page: Path) -> None:
    assert problems(page, "<!-- skip: why -->\n```console\n$ exit 9\n```\n") == []


def test_nothing_of_the_machine_is_shown(tmp_path: Path) -> None:
    lib = "/opt/env/lib/python3.11/site-packages/torch/x.py"
    assert blocks.presentable(f"{tmp_path}/a.py and {lib}:3", tmp_path) == (
        "/home/me/project/a.py and site-packages/torch/x.py:3"
    )


def test_shapes_keep_words_and_drop_numbers() -> None:
    assert blocks.same_shape(["a  1.5 MiB ▁▂█ in 3 ms"], ["a 200 B ▇▇▇▇ in 1.25 s"])
    assert not blocks.same_shape(["parameters 1 B"], ["gradients 1 B"])
    assert not blocks.same_shape(["rank0 1"], ["rank1 1"])
    assert not blocks.same_shape(["gpuprobe 0.0.1"], [f"gpuprobe {gpuprobe.__version__}"])
    assert not blocks.same_shape(["a", "b"], ["b", "a"])


def test_rows_of_steps_are_not_compared() -> None:
    head = "    step      time   longest phase"
    one = [head, "       0    1.2 s    first     forward 40%", "end"]
    two = [head, "       0  850.1 ms   first     setup 80%", "       3    2.0 s   slowest", "end"]
    assert blocks.same_shape(one, two)
    assert not blocks.same_shape(one, [*two, "more"])


def test_outputs_are_rewritten_only_where_their_shape_changed(page: Path) -> None:
    page.write_text(
        "```console\n$ echo new words\nold words\n$ echo 5 MiB\n4 MiB\n$ echo x\n```\nend\n",
        encoding="utf-8",
    )
    base = page.parent / "scratch"
    base.mkdir()
    assert generate.refresh_outputs(page, blocks.Runner(base))
    assert page.read_text(encoding="utf-8") == (
        "```console\n$ echo new words\nnew words\n$ echo 5 MiB\n4 MiB\n$ echo x\n```\nend\n"
    )


def test_an_unknown_section_is_an_error() -> None:
    with pytest.raises(KeyError):
        generate.generated("<!-- generated: nonsense -->\n<!-- end -->")
