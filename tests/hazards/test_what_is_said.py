"""What a finding tells: names of the program, one finding for one cause, latent ones, SARIF."""

from __future__ import annotations

import html
import io
import json
import re
from typing import Any

import pytest
from hazard_case import Case
from judging import judge
from sarif_schema import SARIF

from gpuprobe.hazards.findings.code import applied
from gpuprobe.model.findings import Insertion
from gpuprobe.reporters.ci import sarif
from gpuprobe.reporters.html import draw as html_page
from gpuprobe.reporters.json import hazards as hazards_json
from gpuprobe.reporters.sections.hazards import hazard_sections
from gpuprobe.reporters.text import draw

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


def run(name: str, text: str) -> Any:
    return judge(Case(name, "", (), text), text)


def text_of(found: Any) -> str:
    stream = io.StringIO()
    draw.write(hazard_sections(found), stream)
    return " ".join(stream.getvalue().split())


def html_of(found: Any) -> str:
    drawing = html_page.Drawing()
    return "".join(str(drawing.section(one)) for one in hazard_sections(found))


_NAMED = """
copies = cuda.Stream()
weights = torch.ones(64, device="cuda")
with cuda.stream(copies):
    kept = weights * 2
"""


def test_a_finding_has_the_names_of_the_program() -> None:
    (race,) = run("named", _NAMED).races
    assert "weights, read by mul of [64] on stream" in race.message
    assert "(copies)" in race.message
    assert race.fix.code == "copies.wait_stream(torch.cuda.current_stream())  # before line 4"
    assert "+copies.wait_stream(torch.cuda.current_stream())\n" in race.fix.diff


_NAMELESS = """
def streams():
    return [cuda.Stream() for _ in range(2)]
def work(pool, x):
    with cuda.stream(pool["copies"][1]):
        return x * 2
x = torch.ones(64, device="cuda")
y = work({"copies": streams()}, x)
z = y + 1
del y
"""


def test_a_stream_without_a_name_has_the_line_that_made_it() -> None:
    found = run("nameless", _NAMELESS)
    into, out = found.races
    made = "(created at <corpus nameless>.py:3)"
    assert re.search(rf"read by mul of \[64\] on stream \d+ {re.escape(made)},", into.message)
    assert re.search(rf"at line 6 on stream \d+ {re.escape(made)}, unsynchronised", out.message)
    assert made in dict(out.evidence)["first"]
    # Also of what was found only when the program was over.
    freed = (
        _NAMELESS.replace("z = y + 1\n", "")
        .replace("z = y", "")
        .replace("    with", "    pool['copies'][1].wait_stream(cuda.current_stream())\n    with")
    )
    freed = freed.replace("del y\n", "del x, y\n")
    (latent,) = run("nameless", freed).latent
    assert made in latent.message
    for text in (text_of(found), html_of(found), json.dumps(hazards_json.document(found))):
        assert made in html.unescape(text)


_FREED = """
side = cuda.Stream()
weights = torch.ones(64, device="cuda")
side.wait_stream(cuda.current_stream())
with cuda.stream(side):
    kept = weights * 2
del weights
other = torch.zeros(64, device="cuda")
"""


def test_a_use_after_free_has_its_history() -> None:
    (race,) = run("freed", _FREED).races
    assert "weights, allocated at line 3, was freed at line 7 while stream" in race.message
    assert "mul of [64] at line 6" in race.message
    assert "zeros" in race.message or "fill_" in race.message
    assert "weights.record_stream(torch.cuda.current_stream())" in race.fix.code


# -- latent

_NOT_REUSED = _FREED.replace('other = torch.zeros(64, device="cuda")\n', "")


def test_what_was_freed_too_early_and_not_reused_is_a_warning() -> None:
    found = run("not reused", _NOT_REUSED)
    assert found.races == []
    (latent,) = found.latent
    assert (latent.rule, latent.kind, latent.level.value) == ("GP213", "use-after-free", "warning")
    assert latent.related[0].line == 6
    assert latent.location.line == 7
    assert "Freed too early" in text_of(found)
    lines = _NOT_REUSED.splitlines(keepends=True)
    mended = "".join(applied(lines, latent.fix.insertions))
    assert run("not reused, mended", mended).latent == []


def test_another_block_could_have_been_given_the_memory() -> None:
    smaller = _FREED.replace("torch.zeros(64", "torch.zeros(8").replace(
        "weights = torch.ones(64", "weights = torch.ones(4096"
    )
    joined = smaller + "cuda.current_stream().wait_stream(side)\n"
    found = run("smaller", joined)
    assert [one.location.line for one in [*found.races, *found.latent]] == [8]


@pytest.mark.parametrize(
    "protection",
    [
        "cuda.current_stream().wait_stream(side)\n",
        "cuda.synchronize()\n",
        "kept.record_stream(side)\n",
    ],
)
def test_what_is_protected_is_not_latent(protection: str) -> None:
    if "record_stream" in protection:
        text = _NOT_REUSED.replace("del weights", "weights.record_stream(side)\ndel weights")
    else:
        text = _NOT_REUSED + protection
    assert run("protected", text).latent == []


def test_a_loop_that_waits_before_reuse_is_not_latent_at_its_end() -> None:
    text = """
side = cuda.Stream()
for step in range(3):
    batch = torch.ones(64, device="cuda")
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        kept = batch * 2
    del batch
    if step < 2:
        cuda.current_stream().wait_stream(side)
"""
    found = run("loop", text)
    assert found.races == []
    assert found.latent == []


# -- one cause

_ONE_CAUSE = """
side = cuda.Stream()
parts = [torch.ones(64, device="cuda") for _ in range(4)]
with cuda.stream(side):
    a = parts[0] * 2
    b = parts[1] * 2
    c = parts[2] * 2
    d = parts[3] * 2
"""


def test_races_that_one_wait_cures_are_one_finding() -> None:
    found = run("one cause", _ONE_CAUSE)
    (race,) = found.races
    assert race.count == 4
    assert race.location.line == 5
    also = [value for name, value in race.evidence if name == "fixed by the same change"]
    assert len(also) == 3
    assert "it fixes 3 more races of this kind" in text_of(found)
    lines = _ONE_CAUSE.splitlines(keepends=True)
    assert run("one cause, mended", "".join(applied(lines, race.fix.insertions))).races == []


_TWO_CAUSES = """
side, other = cuda.Stream(), cuda.Stream()
x = torch.ones(64, device="cuda")
with cuda.stream(side):
    a = x * 2
with cuda.stream(other):
    b = x * 2
"""


def test_races_of_two_causes_are_two_findings() -> None:
    found = run("two causes", _TWO_CAUSES).races
    assert [race.location.line for race in found] == [5, 7]


def test_a_wait_for_the_input_is_not_said_to_go_the_other_way() -> None:
    correct_so_far = """
side = cuda.Stream()
x = torch.ones(64, device="cuda")
side.wait_stream(cuda.current_stream())
with cuda.stream(side):
    y = x * 2
z = y + 1
"""
    (race,) = run("input", correct_so_far).races
    assert "other way" not in race.message


def test_nothing_is_inserted_between_two_accesses_of_one_statement() -> None:
    text = 'x = torch.ones(64, device="cuda").sum().to("cpu", non_blocking=True).item()\n'
    (race,) = run("one statement", text).races
    (change,) = race.fix.insertions
    assert (change.line, change.replaces) == (1, 1)
    assert change.text.splitlines()[1:] == [
        "torch.cuda.current_stream().synchronize()",
        "x = copied.item()",
    ]


def test_two_synchronisations_of_one_line_are_one() -> None:
    text = 'a, b = torch.tensor([1], device="cuda"), torch.tensor([2], device="cuda")\n'
    found = run("two in a line", text)
    (row,) = [one for one in found.syncs if not one.allowed]
    assert (row.count, row.location.line) == (2, 1)
    (finding,) = found.findings
    assert finding.count == 2


_TWO_KINDS = """
model = nn.Linear(8, 8).cuda()
opt = torch.optim.SGD(model.parameters(), 0.1)
side = cuda.Stream()
side.wait_stream(cuda.current_stream())
with cuda.stream(side):
    loss = model(torch.ones(4, 8, device="cuda")).sum()
    loss.backward()
opt.step()
"""


def test_findings_of_two_kinds_share_a_change() -> None:
    of_weights, of_gradients = run("two kinds", _TWO_KINDS).races
    assert (of_weights.rule, of_gradients.rule) == ("GP202", "GP209")
    assert of_weights.fix.insertions == of_gradients.fix.insertions
    expected = "the change for GP209 at <corpus two kinds>.py:9 also fixes this."
    assert of_weights.fix.text == expected
    mended = "".join(applied(_TWO_KINDS.splitlines(True), of_gradients.fix.insertions))
    assert run("two kinds", mended).races == []


_FIFTEEN = (
    """
def loader():
    copies = cuda.Stream()
    for _ in range(2):
        with cuda.stream(copies):
            parts = [torch.ones(8).pin_memory().cuda(non_blocking=True) for _ in range(15)]
        yield parts
for parts in loader():
    sums = (
"""
    + "".join(f"        parts[{i}].sum(),\n" for i in range(15))
    + "    )\n"
)


def test_what_a_wait_for_the_device_cures_is_one_finding() -> None:
    races = run("fifteen", _FIFTEEN).races
    assert sorted(race.rule for race in races)[0] == "GP201"
    (read,) = (race for race in races if race.rule == "GP201")
    assert read.count == 15
    assert "it fixes 14 more races" in text_of(run("fifteen", _FIFTEEN))


# -- SARIF


def test_sarif_has_the_change() -> None:
    found = run("named", _NAMED)
    document = sarif.document(found.findings)
    SARIF.validate(document)
    (result,) = [one for one in document["runs"][0]["results"] if one["ruleId"] == "GP201"]
    (fix,) = result["fixes"]
    (change,) = fix["artifactChanges"]
    (replacement,) = change["replacements"]
    region = {"startLine": 4, "startColumn": 1, "endLine": 4, "endColumn": 1}
    assert replacement["deletedRegion"] == region
    assert replacement["insertedContent"]["text"] == (
        "copies.wait_stream(torch.cuda.current_stream())\n"
    )


# -- what is used out of sight


_IN_FLIGHT = """
host = torch.ones(64, pin_memory=True)
array = host.numpy()
x = host.to("cuda", non_blocking=True)
"""


@pytest.mark.parametrize(
    ("use", "rule"),
    [
        ("array.flat[3] = 7\n", "GP207"),
        ("array.flat[3:5] = 7\n", "GP207"),
        ("array.flat = 7\n", "GP207"),
        ("array.__buffer__(1)\n", "GP207"),  # as ``readinto`` asks for it since Python 3.12
        ("next(iter(array.flat))\n", ""),  # reading while a copy reads is no race
        ("len(array.flat)\n", ""),
    ],
)
def test_elements_by_position_and_buffers_are_uses(use: str, rule: str) -> None:
    found = run(f"flat {use}", _IN_FLIGHT + use).races
    assert [race.rule for race in found] == ([rule] if rule else [])


def test_the_allocator_of_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    assert any("cudaMallocAsync" in line for line in run("async", _NAMED).coverage)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    assert not any("cudaMallocAsync" in line for line in run("async", _NAMED).coverage)


def test_what_is_inserted_at_one_place_keeps_its_order() -> None:
    lines = ["a\n", "b\n"]
    changes = [Insertion("f", 2, "one\n"), Insertion("f", 2, "two\n"), Insertion("f", 2, "one\n")]
    assert applied(lines, changes) == ["a\n", "one\n", "two\n", "b\n"]
