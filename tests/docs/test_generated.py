"""What can be generated is, and it is current. Links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import blocks
import generate
import pytest

pytestmark = pytest.mark.xdist_group("docs")

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
SECTION = re.compile(r"<!-- generated: ([\w./:-]+) -->")


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for block in reversed(blocks.blocks(page)):
        del lines[block.start : block.end + 1]
    return "\n".join(lines)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        text = re.sub(r"[^\w\- ]", "", heading.strip().lower())
        found.add(text.replace(" ", "-"))
    return found


def test_generated_sections_are_current() -> None:
    out_of_date = [str(page.relative_to(blocks.ROOT)) for page, _ in generate.stale(blocks.pages())]
    assert not out_of_date, "run: python docs/generate.py"
    assert generate.main(["--check"]) == 0


def test_every_kind_of_section_is_used() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in blocks.pages())
    used = {name.partition(":")[0] for name in SECTION.findall(text)}
    assert used == set(generate.SECTIONS) | set(generate.WITH_ARGUMENT)


def test_every_public_name_is_in_the_reference() -> None:
    import gpuprobe

    page = (blocks.DOCS / "reference" / "python-api.md").read_text(encoding="utf-8")
    for name in gpuprobe.__all__:
        if name != "__version__":
            assert f"## gpuprobe.{name}\n" in page or f"## {name}\n" in page, name


@pytest.mark.parametrize("page", blocks.pages(), ids=lambda p: str(p.relative_to(blocks.ROOT)))
def test_links(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            assert target.startswith("https://"), target
            continue
        path, _, anchor = target.partition("#")
        where = (page.parent / path).resolve() if path else page
        assert where.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(where), f"{page.name} links to {target}"


def test_what_shows_a_claim_exists() -> None:
    """Scripts and tests that the pages of verification name."""
    named: set[str] = set()
    for page in (blocks.DOCS / "verification").glob("*.md"):
        named |= set(re.findall(r"(?:tests|benchmarks)/[\w/]+\.py", prose(page)))
    assert len(named) > 30
    assert not [one for one in named if not (blocks.ROOT / one).exists()]


def test_every_page_is_reachable_from_the_index() -> None:
    index = blocks.DOCS / "index.md"
    targets = LINK.findall(prose(index))
    assert len(targets) == len(set(targets)), "a page is listed twice"
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in targets}
    missing = [
        str(page.relative_to(blocks.DOCS))
        for page in blocks.DOCS.rglob("*.md")
        if page != index and page.resolve() not in linked
    ]
    assert not missing


def test_pictures_and_pages_hold_nothing_of_a_machine() -> None:
    images = sorted((blocks.DOCS / "images").glob("*.svg"))
    everything = [*blocks.pages(), *images]
    for path in everything:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"/(tmp|root|work|var)/\w|/home/(?!me/project|bob/venv)", text), path
        assert str(blocks.ROOT) not in text, path
    for path in images:
        text = path.read_text(encoding="utf-8")
        assert set(re.findall(r"https?://[^\"' ]+", text)) <= {"http://www.w3.org/2000/svg"}, path
