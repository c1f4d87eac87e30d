"""The pictures of the documentation show what gpuprobe prints now."""

from __future__ import annotations

import re

import blocks
import pictures
import pytest

pytestmark = pytest.mark.xdist_group("docs")  # so that one process shares the recordings

AGAIN = "run: make docs-images"


def test_the_estimate_is_drawn_from_the_committed_output() -> None:
    text = pictures.ESTIMATE_TEXT.read_text(encoding="utf-8")
    command, lines = pictures.parts_of(text)
    assert command == pictures.QUESTION, AGAIN
    page = (pictures.blocks.DOCS / "how-to" / "estimate-a-model.md").read_text("utf-8")
    assert f"$ {command}\n...\n{lines[0]}\n{lines[1]}\n{lines[2]}\n{lines[3]}\n...\n" in page
    assert pictures.ESTIMATE.read_text(encoding="utf-8") == pictures.question_svg(text), AGAIN


def test_the_start_of_vllm_is_drawn_from_the_committed_output() -> None:
    text = pictures.SERVING_TEXT.read_text(encoding="utf-8")
    assert pictures.SERVING.read_text(encoding="utf-8") == pictures.question_svg(text), AGAIN
    command, lines = pictures.parts_of(text)
    page = (pictures.blocks.DOCS / "how-to" / "plan-a-vllm-deployment.md").read_text("utf-8")
    assert f"$ {command}\n" in page
    for row in ("requested", "weights", "activation peak", "non-torch", "KV cache"):
        (shown,) = [line for line in lines if line.startswith(f"  {row} ")]
        assert f"{shown}\n" in page  # the same figures


@pytest.mark.pinned_torch
def test_the_estimate_is_the_one_that_the_picture_shows(runner: blocks.Runner) -> None:
    made = pictures.question_text(pictures.answer(runner))
    assert pictures.ESTIMATE_TEXT.read_text(encoding="utf-8") == made, AGAIN


def test_the_picture_shows_the_explanation(runner: blocks.Runner) -> None:
    """Figures differ between machines; lines and words must be those of today's explanation."""
    lines = pictures.explain_lines(runner)
    picture = pictures.EXPLAIN.read_text(encoding="utf-8")
    assert pictures.current(lines, picture), AGAIN


@pytest.mark.pinned_torch
def test_the_picture_shows_the_screen(runner: blocks.Runner) -> None:
    screen = pictures.words(pictures.view(runner))
    assert {"forward", "optimizer", "activation"} <= screen
    assert pictures.words(pictures.VIEW.read_text(encoding="utf-8")) == screen, AGAIN


def test_the_picture_of_the_dashboard_is_current(runner: blocks.Runner) -> None:
    screen = pictures.words(pictures.top(runner))
    assert pictures.words(pictures.TOP.read_text(encoding="utf-8")) == screen, AGAIN


def test_the_picture_of_the_page_is_current(runner: blocks.Runner) -> None:
    html = pictures.page(runner)
    assert pictures.fingerprint_of(pictures.PAGE.read_bytes()) == pictures.fingerprint(html), AGAIN


@pytest.mark.parametrize(
    "change",
    [
        ("<style>", "<style>body { color: red }"),
        ("<script>", '<script>console.log("new");'),
        ("What to try first", "What to try next"),
    ],
)
def test_a_page_that_looks_different_has_another_fingerprint(change: tuple[str, str]) -> None:
    html = "<style>a{}</style><p>What to try first: 3 MiB</p><script>f()</script>"
    html += '<section id="live">'
    changed = html.replace(*change)
    assert changed != html
    assert pictures.fingerprint(changed) != pictures.fingerprint(html)
    assert pictures.fingerprint(html.replace("3 MiB", "44 MiB")) == pictures.fingerprint(html)


def test_a_fingerprint_stays_in_its_picture() -> None:
    png = pictures.PAGE.read_bytes()
    assert re.fullmatch("[0-9a-f]{64}", pictures.fingerprint_of(png))
    again = pictures.with_fingerprint(png, "0" * 64)
    assert pictures.fingerprint_of(again) == "0" * 64
    assert again.endswith(png[33:])
    assert pictures.fingerprint_of(png[:33] + png[-12:]) == ""  # header and end alone


def test_every_picture_is_shown_and_made() -> None:
    """No picture is left over, and each that a page shows exists (`test_links`)."""
    shown = {
        name
        for page in blocks.pages()
        for name in re.findall(r"images/([\w.-]+)", page.read_text(encoding="utf-8"))
    }
    made = {
        pictures.ESTIMATE,
        pictures.SERVING,
        pictures.EXPLAIN,
        pictures.VIEW,
        pictures.TOP,
        pictures.PAGE,
    }
    assert shown == {path.name for path in made}
    assert set(pictures.IMAGES.iterdir()) == made | {pictures.ESTIMATE_TEXT, pictures.SERVING_TEXT}
