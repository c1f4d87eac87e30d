"""Every row of the taxonomy, and every rule: what shows that it is found, and left alone."""

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

# Row: cases that must be found, and look-alikes that must not. `test_verdict` runs them all.
TAXONOMY: dict[str, tuple[str, str]] = {
    "read-after-write": ("article like_factory", "article_repaired item_then_other_write"),
    "missing join": ("missing_join nested_streams", "joined nested_streams_waiting"),
    "write-after-read": ("write_while_read ema_on_side_next_step", "write_after_join two_readers"),
    "write-after-write": ("two_writers two_side_writers", "two_writers_ordered chunks_on_streams"),
    "missed wait": (
        "event_never_recorded event_recorded_too_early event_recorded_again_too_late "
        "wait_in_the_wrong_direction event_wait_on_wrong_stream",
        "event_recorded_after event_recorded_again_later event_reused_in_loop",
    ),
    "self-wait": ("self_wait", "outer_stream_captured"),
    "stream leak": (
        "stream_left_set generator_leaks_its_stream thread_uses_default_stream",
        "stream_set_and_waiting generator_scoped thread_given_the_stream set_stream_restored",
    ),
    "backward": (
        "backward_on_side_stream autograd_grad_side",
        "backward_on_side_stream_joined forward_on_side_backward_here",
    ),
    "communication hook": (
        "grad_hook_comm_unwaited step_before_comm_done comm_wait_missing_in_bucket",
        "grad_hook_comm_waits comm_wait_all_in_bucket",
    ),
    "hidden mutation": (
        "batch_norm_statistics running_statistics_are_written_in_training",
        "batch_norm_statistics_joined running_statistics_are_read_in_evaluation",
    ),
    "alias": (
        "offset_view set_aliases dlpack_alias detach_alias overlapping_columns",
        "disjoint_halves disjoint_columns halves_of_transposed",
    ),
    "use-after-free, main-owned": (
        "dropped_while_read zero_grad_frees_what_comm_reads",
        "dropped_after_record_stream dropped_after_wait dropped_not_reused",
    ),
    "use-after-free, side-owned": ("side_owned_dropped", "side_owned_recorded"),
    "three streams": ("three_streams record_stream_for_another_stream", "record_stream_on_view"),
    "storage.resize_": (
        "storage_resized_away resize_grows",
        "storage_resized_after_wait resize_zero_fsdp",
    ),
    "host race, to the host": (
        "copy_back_not_awaited copy_back_event_too_early pinned_copy_back_then_gpu_wait_only",
        "copy_back_awaited copy_back_event blocking_copy_back pageable_copy_back_nonblocking",
    ),
    "host race, to the device": (
        "refilled_too_early two_slots_without_events double_buffer_wrong_event",
        "refilled_after_event two_slots_with_events double_buffer_events pageable_source_refilled",
    ),
    "numpy alias": (
        "numpy_alias_written numpy_alias_read from_numpy_alias_of_pinned",
        "numpy_alias_awaited numpy_view_slice_other_half",
    ),
    "CUDA graph": (
        "graph_input_written graph_input_dropped_after_capture "
        "graph_pinned_input_refilled_at_once forked_in_capture_not_joined_in_time",
        "graph_ordered graph_pinned_input_awaited forked_in_capture_and_joined",
    ),
    "work handles, nccl": (
        "allreduce_async_unwaited allgather_input_overwritten",
        "allreduce_async_waited allreduce_sync comm_freed_while_in_flight",
    ),
    "work handles, gloo": (
        "gloo_cuda_unwaited gloo_host_unwaited",
        "gloo_cuda_waited gloo_host_waited",
    ),
    "peer-to-peer": (
        "two_devices_side_reads two_devices_copy_from_side_stream",
        "two_devices_copy two_devices_event",
    ),
}


@pytest.mark.parametrize("row", TAXONOMY)
def test_each_row_has_hazardous_and_safe_programs(row: str) -> None:
    hazardous, safe = ([BY_NAME[name] for name in names.split()] for names in TAXONOMY[row])
    assert hazardous
    assert all(case.kinds for case in hazardous)
    assert safe
    assert not any(case.kinds for case in safe)


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
