"""Every rule is the finding of some program, and what its message explains."""

from __future__ import annotations

import linecache
import re
from typing import Any

import pytest
import torch
import torch.distributed  # its operators
import torch.nn.functional as F
from hazard_corpus import CASES
from torch import nn

import gpuprobe
from gpuprobe.hazards.rules import ALSO_WRITTEN, RULES, SELF_WAIT

pytestmark = [pytest.mark.simulated, pytest.mark.filterwarnings("ignore")]

BY_NAME = {case.name: case for case in CASES}

# A program that a rule is the answer to.
BY_RULE = {
    "GP201": "article",
    "GP202": "write_while_read",
    "GP203": "two_writers",
    "GP204": "dropped_while_read",
    "GP205": "copy_back_not_awaited",
    "GP206": "refilled_too_early",
    "GP207": "numpy_alias_written",
    "GP208": "graph_output_read",
    "GP209": "backward_on_side_stream",
    "GP211": "graph_input_dropped_after_capture",
    "GP213": "dropped_not_reused",
}


SENT = """
import multiprocessing, torch.multiprocessing
here, there = multiprocessing.Pipe()
x = torch.ones(64, device="cuda")
here.send(x)
x.add_(1)
"""
PROGRAMS = {rule: BY_NAME[name].text for rule, name in BY_RULE.items()}
PROGRAMS |= {"GP212": SENT, "GP220": "torch.ones(3, device='cuda').sum().item()\n"}


def run(text: str, gpus: str = "h100-80gb") -> Any:
    linecache.cache["case.py"] = (len(text), None, text.splitlines(keepends=True), "case.py")
    with gpuprobe.virtual_gpu(gpus):
        names = {"torch": torch, "cuda": torch.cuda, "nn": nn, "F": F, "s": torch.cuda.Stream()}
        with gpuprobe.detect_hazards() as found:
            exec(compile(text, "case.py", "exec"), names)
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_each_rule_is_some_programs_finding(rule: Any) -> None:
    if rule is SELF_WAIT:
        found = run(BY_NAME["self_wait"].text)
        assert [place.line for place in found.self_waits] == [3]
        assert run(BY_NAME["outer_stream_captured"].text).self_waits == []
        return
    found = run(PROGRAMS[rule.id])
    findings = [finding for finding in found.findings if finding.rule == rule.id]
    assert findings, [(finding.rule, finding.message) for finding in found.findings]
    for finding in findings:
        assert rule.kind == finding.kind or rule.id in ("GP208", "GP209")
        assert finding.message.startswith(rule.title)
        assert finding.fix is not None
        assert finding.fix.text
        assert finding.location is not None
        if rule.id != "GP220":
            assert finding.fix.code
            assert dict(finding.evidence)["fix verified"].startswith("yes")


def test_rules_have_ids_and_kinds_of_their_own() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES)
    kinds = {
        "read-after-write",
        "write-after-read",
        "write-after-write",
        "use-after-free",
        "host-race",
        "implicit-sync",
    }
    assert {rule.kind for rule in RULES} == kinds


@pytest.mark.parametrize("name", ALSO_WRITTEN)
def test_the_table_of_hidden_writes_names_real_arguments(name: str) -> None:
    """Arguments that exist, and whose writing the schema indeed keeps quiet about."""
    quiet = set()
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.rpartition("::")[2] == name and schema.overload_name != "out":
            for argument in schema.arguments:
                if argument.alias_info is None or not argument.alias_info.is_write:
                    quiet.add(argument.name)
    assert set(ALSO_WRITTEN[name]) <= quiet


def test_an_explanation_names_the_wait_that_did_not_help() -> None:
    def message(text: str) -> str:
        (race,) = run(text).races
        return str(race.message)

    early = message(BY_NAME["event_recorded_too_early"].text)
    assert "The wait at line 5 covers only work queued before the write at line 4." in early
    wrong = message(BY_NAME["wait_in_the_wrong_direction"].text)
    assert "is in the wrong direction" in wrong
    own = message(BY_NAME["self_wait"].text)
    assert "makes a stream wait for itself" in own
    never = message(BY_NAME["event_never_recorded"].text)
    assert "never recorded" in never
    none = message(BY_NAME["article"].text)
    assert re.search(r"Nothing makes stream \d+ wait for it\.", none)


def test_waits_that_change_nothing_are_listed() -> None:
    found = run(
        """
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = x * 2
cuda.current_stream().wait_stream(s)
e = s.record_event()
cuda.current_stream().wait_event(e)
z = y + 1
"""
    )
    assert found.races == []
    assert [(place.line, count) for place, count in found.redundant] == [(4, 1), (9, 1)]


def test_a_comment_allows_a_race_on_its_line() -> None:
    text = BY_NAME["article"].text
    assert run(text).races
    assert run(text.replace("torch.sum(A)", "torch.sum(A)  # gpuprobe: allow")).races == []
