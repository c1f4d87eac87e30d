"""The report document: valid, conserving, and right about the peak."""

from __future__ import annotations

import copy
import io
import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from html_pages import Page
from hypothesis import HealthCheck, given, settings
from hypothesis import Phase as HypothesisPhase
from hypothesis import strategies as st
from model_strategies import memory_traces, values_of
from report_builders import (
    MIB,
    NO_RESERVED,
    by_names,
    environment,
    rank_recording,
    recording,
    session,
    step,
    trace,
    window,
)

from examples import examples
from gpuprobe.analysis.placement import imbalance
from gpuprobe.errors import DataError
from gpuprobe.model.findings import Finding, Level
from gpuprobe.model.memory import Block, BlockState, Category, Segment
from gpuprobe.model.place import NoPlace, Place
from gpuprobe.model.report import (
    AT_PEAK,
    CategoryTable,
    Remainder,
    Report,
    ShareRow,
    ShareTable,
)
from gpuprobe.model.run.holders import Holder, HolderRoot
from gpuprobe.model.run.recording import LoadedTraces, RankRecording, Recording
from gpuprobe.model.run.session import (
    BlindSpot,
    Environment,
    HostWindow,
    KnownTensors,
    ProgramError,
    Session,
    SessionEnd,
    Step,
)
from gpuprobe.model.text import human_bytes
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.model.values import Bytes, Peak, Unavailable
from gpuprobe.recording.summary import summarize
from gpuprobe.reporters.html import report as html_report
from gpuprobe.reporters.json import report as report_json
from gpuprobe.reporters.json.schemas import schema
from gpuprobe.reporters.sections.report import facts, headline, report_sections
from gpuprobe.reporters.sections.report.memory import causes_section
from gpuprobe.reporters.terminal import Style
from gpuprobe.reporters.text import draw

GIB = 1024 * MIB


def closed(schema: Any) -> Any:
    """The schema with no room for keys that it does not name."""
    if isinstance(schema, dict):
        made = {key: closed(value) for key, value in schema.items()}
        if "properties" in made:
            made["additionalProperties"] = False
        return made
    return [closed(item) for item in schema] if isinstance(schema, list) else schema


VALIDATOR = jsonschema.Draft202012Validator(closed(schema("report-2")))


class Checked(dict[str, Any]):
    """A report's document, and the ``typed`` report that it was made from."""

    def __init__(self, document: dict[str, Any], typed: Report) -> None:
        super().__init__(document)
        self.typed = typed


def checked(made: Recording, **options: Any) -> Checked:
    """The report, after a trip through JSON text, found valid and conserving."""
    typed = summarize(made, **options)
    report = Checked(json.loads(json.dumps(report_json.to_document(typed))), typed)
    VALIDATOR.validate(report)
    growth = report["growth"] or {"lines": None}
    for table in (report["categories"], report["top_lines"], report["top_modules"]):
        conserve(table)
    if growth["lines"] is not None:
        conserve(growth["lines"])
    for row in report["steps"]["rows"]:
        outer = sum(p["duration_ns"] for p in row["phases"] if "/" not in p["path"])
        assert outer + row["outside_phases_ns"] == row["duration_ns"]
    return report


def words(report: Checked) -> str:
    """The text with its line breaks taken out."""
    return " ".join(" ".join(draw.lines(report_sections(report.typed), Style())).split())


def conserve(table: dict[str, Any]) -> None:
    if "unavailable" in table:
        return
    rows = sum(row["bytes"] for row in table["rows"])
    remainder = table["remainder"]["bytes"]
    if isinstance(remainder, dict):
        assert table["total"] == remainder  # the same reason
    else:
        assert rows + remainder == table["total"]


@st.composite
def plausible_traces(draw: st.DrawFn) -> MemoryTrace:
    made = draw(memory_traces(sizes=st.integers(0, 2**40)))
    made.segments = ()  # theirs are of any size, negative too
    return made


@st.composite
def recordings(draw: st.DrawFn) -> Recording:
    ranks = []
    for _ in range(draw(st.integers(1, 2))):
        steps = draw(st.lists(values_of(Step), max_size=3, unique_by=lambda s: s.index))
        traces = draw(st.lists(plausible_traces(), max_size=2))
        ranks.append(
            RankRecording(
                session=draw(values_of(Session)),
                environment=draw(values_of(Environment)),
                steps=tuple(steps),
                findings=tuple(draw(st.lists(values_of(Finding), max_size=1))),
                blind_spots=tuple(draw(st.lists(values_of(BlindSpot), max_size=1))),
                end=draw(st.none() | values_of(SessionEnd)),
                traces=LoadedTraces(lambda traces=traces: iter(traces)),
            )
        )
    return Recording(draw(st.text(max_size=9)), (1, 0), tuple(ranks))


# Not shrunk: these are large, and a failure is read more easily than it is shrunk.
@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[HypothesisPhase.explicit, HypothesisPhase.reuse, HypothesisPhase.generate],
)
@given(made=recordings(), top=st.integers(1, 4), unicode=st.booleans())
def test_any_recording_gives_a_valid_report_and_clean_text(
    made: Recording, top: int, unicode: bool
) -> None:
    report = checked(made, top=top)
    for line in draw.lines(report_sections(report.typed), Style(unicode=unicode)):
        assert line.isprintable()
        assert len(line) <= 80 or line.startswith("     ")  # a command is not broken
        assert unicode or line.isascii()


@settings(max_examples=examples(40), deadline=None)
@given(
    sizes=st.lists(
        st.tuples(
            st.sampled_from(["a.py:1", "b.py:2", "c.py:3", "d.py:4"]),
            st.integers(1, 10**12),
            st.sampled_from(Category),
        ),
        min_size=1,
        max_size=12,
    ),
    before=st.integers(0, 10**9),
    top=st.integers(1, 3),
)
def test_tables_sum_to_the_peak(
    sizes: list[tuple[str, int, Category]], before: int, top: int
) -> None:
    peak = sum(size for _, size, _ in sizes) + before
    made = recording([step(0, {"backward": peak})], [trace(sizes, before=before)])
    report = checked(made, top=top)
    assert report["peak"]["allocated"] == {"at_least": peak, "at_most": peak, "exact": True}
    assert report["peak"]["traced"] == peak
    assert report["peak"]["before_trace"] == before
    for name in ("categories", "top_lines", "top_modules"):
        assert report[name]["total"] == peak
    assert len(report["top_lines"]["rows"]) <= top
    assert report["categories"]["remainder"]["bytes"] == 0


def test_the_document_says_what_it_is() -> None:
    report = checked(recording([step(0, {"forward": 5})]))
    assert (
        (report["schema"], report["version"])
        == (report_json.DOCUMENT.name, list(report_json.DOCUMENT.version))
        == (
            "gpuprobe.report",
            [2, 15],
        )
    )
    assert report["recording"]["name"] == "a.gpuprobe"


def test_the_schema_refuses_what_is_no_report() -> None:
    report = checked(recording([step(0, {"forward": 5})]))
    for path in (("peak", "allocated", "at_least"), ("steps", "rows"), ("schema",)):
        broken: Any = copy.deepcopy(dict(report))
        inner = broken
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = "wrong"
        with pytest.raises(jsonschema.ValidationError):
            VALIDATOR.validate(broken)


def test_the_peak_has_a_step_and_the_innermost_phase() -> None:
    steps = [
        step(0, {"forward": 10, "backward": 20}),
        step(1, {"forward": 30, "forward/attention": 30, "forward/mlp": 25, "backward": 29}),
        step(2, {"forward": 28, "backward": 30}),
    ]
    report = checked(recording(steps))
    peak = report["peak"]
    assert (peak["rank"], peak["device"], peak["step"]) == (0, "cpu", 1)
    assert peak["phase"] == "forward/attention"
    assert peak["certain"]
    assert report["steps"]["highlights"] == {
        "rank": 0,
        "device": "cpu",
        "first": 0,
        "worst": 1,
        "last": 2,
        "slowest": 0,
    }


def test_a_peak_between_bounds_says_so() -> None:
    loose = step(1, {"forward": 50})
    loose = Step(1, 0, 1, windows=(window("cpu", Peak(50, 90)),), phases=loose.phases)
    report = checked(recording([step(0, {"forward": 60}), loose]))
    assert report["peak"]["allocated"] == {"at_least": 60, "at_most": 90, "exact": False}
    assert report["peak"]["step"] == 0
    assert not report["peak"]["certain"]
    assert "another step or phase may have been higher" in words(report)


def test_a_counter_that_did_not_rise_again_leaves_no_doubt() -> None:
    # As on CUDA: the first step raised the lifetime counter to 100, the second did not.
    later = Step(1, 0, 1, windows=(window("cuda:0", Peak(60, 100)),))
    report = checked(recording([step(0, {"forward": 100}, device="cuda:0"), later]))
    assert report["peak"]["allocated"]["exact"]
    assert report["peak"]["step"] == 0
    assert report["peak"]["certain"]


def test_the_peak_over_all_ranks_names_the_rank() -> None:
    ranks = [
        rank_recording(
            [step(0, {"forward": size}, device=f"cuda:{i}")],
            ended=SessionEnd(1),
            session=session("counters", f"cuda:{i}", rank=i, world_size=3),
        )
        for i, size in enumerate((5, 9, 7))
    ]
    report = checked(Recording("a", (1, 0), tuple(ranks)))
    assert report["peak"]["rank"] == 1
    assert report["peak"]["device"] == "cuda:1"
    assert [row["peak_allocated"]["at_least"] for row in report["devices"]] == [5, 9, 7]
    text = "\n".join(draw.lines(report_sections(report.typed), Style()))
    assert "9 B allocated on cuda:1, in rank 1, phase forward, step 0" in text
    assert "3 ranks" in text


def test_counters_on_the_cpu_report_resident_memory_and_known_tensors() -> None:
    missing = Unavailable("torch keeps no allocator statistics on the CPU")
    tensors = KnownTensors("cpu", {Category.PARAMETER: Bytes(30), Category.GRADIENT: Bytes(10)})
    made = Step(
        0,
        0,
        10,
        host=HostWindow(rss_peak=Peak(700, 900)),
        windows=(window("cpu", missing, missing),),
        tensors=(tensors,),
    )
    report = checked(recording([made], session=session("counters")))
    assert report["peak"]["measure"] == "host_rss"
    assert report["peak"]["host_rss"] == {"at_least": 700, "at_most": 900, "exact": False}
    assert report["peak"]["allocated"]["unavailable"] == missing.reason
    assert report["categories"]["at"] == "step_end"
    assert [row["bytes"] for row in report["categories"]["rows"]] == [30, 10]
    assert "unavailable" in report["categories"]["total"]
    assert "level 'trace'" in report["top_lines"]["unavailable"]
    assert [advice["id"] for advice in report["advice"]] == ["trace"]
    text = "\n".join(draw.lines(report_sections(report.typed), Style()))
    assert "700 B to 900 B of the process in the host's memory" in text
    assert "%" not in text.split("Categories")[1].split("Lines")[0]  # no share of the unknown


def test_known_tensors_and_the_rest_sum_to_the_total() -> None:
    tensors = KnownTensors("cuda:0", {Category.PARAMETER: Bytes(30)}, rest=Bytes(12))
    made = step(0, {"forward": 50}, end=42, device="cuda:0", tensors=(tensors,))
    report = checked(recording([made], session=session("counters", "cuda:0")))
    assert report["categories"]["total"] == 42
    assert report["categories"]["remainder"]["bytes"] == 12


@pytest.mark.parametrize(
    ("known", "rest", "said"),
    [
        (
            30,
            Bytes(12),
            "at the end of step 0, mostly parameter 30 B, not explained by named tensors",
        ),
        (30, Bytes(900), "at the end of step 0, mostly not explained by named tensors 900 B, "),
        (
            30,
            Unavailable("none"),
            "step 0, apart from unknown memory: parameter 30 B",
        ),
    ],
)
def test_a_headline_does_not_pass_over_what_nothing_explains(
    known: int, rest: Bytes | Unavailable, said: str
) -> None:
    """Named tensors at a step's end may be a small part of what the peak was."""
    tensors = KnownTensors("cuda:0", {Category.PARAMETER: Bytes(known)}, rest=rest)
    made = step(0, {"forward": 5000}, end=42, device="cuda:0", tensors=(tensors,))
    report = summarize(recording([made], session=session("counters", "cuda:0")))
    assert said in " ".join(draw.lines([headline(report)], Style()))
    stream = io.StringIO()
    html_report.write(report, stream)
    page = Page(stream.getvalue()).text.partition("Categories")[0]
    assert "Largest parts at the end of step 0" in page
    whole = "the rest is unknown: none"
    if isinstance(rest, int):
        whole = f"{rest} B {rest / (known + rest):.1%} (all else)"
    assert whole in page


def test_a_peak_in_a_step_without_a_trace_has_the_tables_of_the_highest_that_has_one() -> None:
    tensors = KnownTensors("cpu", {Category.PARAMETER: Bytes(30)}, rest=Bytes(12))
    peaks = (60, 100, 101, 102)
    steps = [step(i, {"forward": peak}, tensors=(tensors,)) for i, peak in enumerate(peaks)]
    traces = [
        trace([("/home/u/project/a.py:7", peaks[i], Category.ACTIVATION)], step=i) for i in (0, 1)
    ]
    report = checked(recording(steps, traces))
    assert (report["peak"]["step"], report["peak"]["allocated"]["at_least"]) == (3, 102)
    assert report["peak"]["nearest_trace"] == {"step": 1, "below_peak": 2}
    assert (report["categories"]["at"], report["categories"]["step"]) == ("nearest_trace", 1)
    totals = [report[name]["total"] for name in ("categories", "top_lines", "top_modules")]
    assert totals == [100, 100, 100]
    text = words(report)
    assert "step 3 has no trace: gpuprobe run --trace-steps 3 (or all) makes one" in text
    assert "of step 1, the highest traced step: 2 B below the peak" in text
    assert "Lines at the high water mark of step 1" in text
    assert "at the peak" not in text.split("Categories")[1].split("Steps")[0]
    ids = {advice["id"]: advice["evidence"] for advice in report["advice"]}
    assert "100 B of the high water mark of step 1 (100%)" in ids["checkpoint"]
    # Where the peak's step has a trace, nothing of this is said.
    whole = checked(recording(steps[:2], traces))
    assert whole["peak"]["nearest_trace"] is None
    assert "Lines at the peak" in words(whole)


def test_a_failure_that_no_trace_holds_says_how_to_trace_it() -> None:
    failed = SessionEnd(5, error=ProgramError("OutOfMemoryError", "no room", out_of_memory=True))
    steps = [step(i, {"forward": 100 - i}) for i in range(5)]
    made = trace([("/home/u/project/a.py:7", 100, Category.ACTIVATION)], step=0)
    text = words(checked(recording(steps, [made], ended=failed)))
    assert text.startswith("verdict out of memory in step 4. Peak 100 B on cpu, in forward, step 0")
    assert "Why it ran out of memory unknown: the failure was not traced" in text
    assert "$ gpuprobe estimate --gpu GPU --steps=5 train.py -- --lr 1" in text
    assert "--trace-steps 4 (or all)" in text
    counted = recording(steps, ended=failed, session=session("counters"))
    assert "gpuprobe run --level trace" in words(checked(counted)).split("Why it ran")[1]
    fine = words(checked(recording(steps, [made])))
    assert "Why it ran" not in fine
    assert "gpuprobe estimate" not in fine


@pytest.mark.parametrize(
    ("size", "here", "said"),
    [
        (2, (1,), "a rank of the job's 2 (rank 0): nothing of it is in this recording"),
        (64, (0, 2), "62 ranks of the job's 64 (rank 1, 3, 4, 5, 6, 7, 8, 9, …): nothing of them"),
        (10**18, (0,), "ranks of the job's 1000000000000000000"),
        (2, (0, 1), ""),
        (1, (0,), ""),
    ],
)
def test_ranks_that_recorded_nothing_are_missed(
    size: int, here: tuple[int, ...], said: str
) -> None:
    one = recording([step(0, {"forward": 5})])
    (made,) = one.ranks
    ranks = tuple(
        replace(made, session=replace(made.session, rank=rank, world_size=size)) for rank in here
    )
    report = checked(replace(one, ranks=ranks))
    text = words(report)
    if said:
        assert said in text
        assert f"{len(here)} of {size} ranks" in text
        assert f"{len(here)} of {size} ranks" in " ".join(facts(report.typed))
    else:
        assert "nothing of" not in text
        assert " of " not in text.split("Peak")[0]


def test_a_step_without_the_device_has_no_peak_on_it() -> None:
    first = replace(step(0, {"setup": 5}, device="cuda:0"), windows=())
    report = checked(recording([first, step(1, {"forward": 7 * MIB}, device="cuda:0")]))
    table = words(report).split("Steps")[1]
    assert "0 10 ns - -" in table
    assert "1 10 ns 7.0 MiB" in table


def test_what_others_hold_is_told_of_every_rank() -> None:
    """Each rank has a GPU of its own, and it may be the last one that is shared."""
    ranks = []
    for rank in range(8):
        device = f"cuda:{rank}"
        made = step(0, {"forward": 5}, device=device)
        counts = replace(made.windows[0].end, reserved=Bytes(MIB))
        used = replace(made.windows[0], end=counts, device_used=Bytes((2 + rank) * MIB))
        one = recording([replace(made, windows=(used,))]).ranks[0]
        ranks.append(replace(one, session=replace(one.session, rank=rank, world_size=8)))
    report = checked(replace(recording([]), ranks=tuple(ranks)))
    rows = report["non_tensor_memory"]["devices"]
    assert [(row["rank"], row["device"]) for row in rows] == [(i, f"cuda:{i}") for i in range(8)]
    assert [row["not_torch"] for row in rows] == [(1 + i) * MIB for i in range(8)]
    text = words(report).split("Non-tensor memory")[1]
    assert text.split()[:2] == ["rank", "7,"]
    assert "cuda:7, step 0: 9.0 MiB in use, of which 8.0 MiB outside torch" in text
    assert "… 3 more" in text
    alone = words(checked(replace(recording([]), ranks=tuple(ranks[:1]))))
    assert "Non-tensor memory cuda:0" in alone


def test_nothing_measured() -> None:
    report = checked(recording([]))
    assert report["peak"]["measure"] is None
    assert report["advice"] == []
    assert "nothing was measured" in "\n".join(draw.lines(report_sections(report.typed), Style()))
    assert list(draw.lines([headline(report.typed)], Style()))


def test_a_recording_without_ranks_is_a_data_error() -> None:
    with pytest.raises(DataError, match="nothing is recorded"):
        summarize(Recording("a", (1, 0), ()))


def test_a_snapshot_has_a_peak_and_an_end_but_no_steps() -> None:
    blocks = (
        Block(0, 600, 600, BlockState.ALLOCATED),
        Block(600, 100, 100, BlockState.PENDING_FREE),
        Block(700, 300, 0, BlockState.INACTIVE),
    )
    made = trace([("a.py:1", 600, Category.ACTIVATION)], step=None, device="cuda:0")
    made.segments = (Segment(0, 0, 1000, 0, "small", blocks=blocks),)
    other = trace([("a.py:1", 5, Category.ACTIVATION)], step=None, device="cuda:1")
    snapshot = recording([], [other, made], ended=None)
    snapshot.kind = "snapshot"
    report = checked(snapshot)
    assert report["recording"]["status"] == "complete"
    assert report["peak"]["device"] == "cuda:0"
    assert report["peak"]["step"] is None
    assert report["devices"][1]["end"] == {
        "allocated": 600,
        "pending": 100,
        "cached": 300,
        "reserved": 1000,
        "requested": {"unavailable": "not read", "status": "error"},
    }
    assert report["blind_spots"] == []
    assert f"{human_bytes(report['peak']['traced'])} allocated on cuda:0" in words(report)


class TestHowItEnded:
    def status(self, ended: SessionEnd | None, running: bool | None) -> dict[str, Any]:
        made = recording([step(0, {"forward": 5})], ended=ended)
        return checked(made, is_running=lambda rank: running)

    def test_complete(self) -> None:
        report = self.status(SessionEnd(7), True)
        assert report["recording"]["status"] == "complete"
        assert report["ranks"][0]["duration_ns"] == 7

    def test_failed(self) -> None:
        error = ProgramError("OutOfMemoryError", "CUDA out of \x1b[31mmemory", out_of_memory=True)
        report = self.status(SessionEnd(7, error, ("hooks: boom",)), None)
        assert report["recording"]["status"] == "failed"
        assert report["recording"]["error"]["out_of_memory"]
        assert report["blind_spots"][0]["what"] == "an internal error of gpuprobe: hooks: boom"
        text = "\n".join(draw.lines(report_sections(report.typed), Style()))
        assert "OutOfMemoryError: CUDA out of \\x1b[31mmemory" in text

    @pytest.mark.parametrize(
        ("running", "status", "word"),
        [
            (True, "running", "may still rise"),
            (False, "incomplete", "or its last records could not be written"),
            (None, "unfinished", "or it is still running"),
        ],
    )
    def test_no_end(self, running: bool | None, status: str, word: str) -> None:
        report = self.status(None, running)
        assert report["recording"]["status"] == status
        assert word in str(report["blind_spots"])
        assert "unavailable" in report["ranks"][0]["duration_ns"]

    def test_the_worst_rank_counts(self) -> None:
        ends = (SessionEnd(1), SessionEnd(2, ProgramError("E", "x")), None)
        ranks = tuple(rank_recording([step(0, {"forward": 5})], ended=end) for end in ends)
        report = checked(Recording("a", (1, 0), ranks), is_running=lambda rank: True)
        assert report["recording"]["status"] == "failed"
        assert [rank["status"] for rank in report["ranks"]] == ["complete", "failed", "running"]


def test_blind_spots_of_several_ranks_are_said_once() -> None:
    spot = BlindSpot("NCCL", "not counted")
    ranks = tuple(
        rank_recording(
            [step(0, {"forward": 5})],
            ended=SessionEnd(1),
            blind_spots=(spot,),
            session=session(rank=i, world_size=2),
        )
        for i in range(2)
    )
    report = checked(Recording("a", (1, 0), ranks))
    assert report["blind_spots"] == [
        {"what": "NCCL", "consequence": "not counted", "ranks": [0, 1]}
    ]


def test_a_damaged_trace_makes_its_tables_unavailable_and_is_said() -> None:
    def broken(name: str) -> MemoryTrace:
        raise DataError(f"{name}: the trace chunk is damaged (checksum)")

    made = recording([step(0, {"forward": 5}, traces=("chunk-7",))])
    # The builder gives a step without traces none: name one again.
    made.ranks[0].steps = (step(0, {"forward": 5}, traces=("chunk-7",)),)
    made.ranks[0].traces = by_names(broken, made.ranks[0].steps)
    report = checked(made)
    assert "chunk-7" in report["top_lines"]["unavailable"]
    assert "chunk-7" in report["blind_spots"][0]["what"]
    assert report["peak"]["allocated"]["at_least"] == 5


def test_sizes_that_cannot_be_real_are_a_data_error() -> None:
    made = trace([("a.py:1", 2**63, Category.ACTIVATION), ("a.py:1", 2**63, Category.ACTIVATION)])
    report = checked(recording([step(0, {"forward": 5})], [made]))
    assert "exceed the memory of any device" in report["top_lines"]["unavailable"]
    with pytest.raises(DataError, match="exceed the memory of any device"):
        summarize(recording([], [made]))


class TestGrowth:
    def leak(self, per_step: int, *, steps: int = 10, traced: bool = True) -> Recording:
        base = 1000
        made = [
            step(i, {"forward": base + i * per_step + 100}, end=base + i * per_step)
            for i in range(steps)
        ]
        traces = [
            trace(
                [
                    ("train.py:3", base, Category.PARAMETER),
                    ("train.py:9", 500 + i * per_step, Category.ACTIVATION),
                ],
                step=i,
            )
            for i in (0, 1, 2, steps - 1)
        ]
        return recording(made, traces if traced else ())

    def test_steady_growth_and_its_line(self) -> None:
        report = checked(self.leak(50))
        growth = report["growth"]
        assert (growth["first_step"], growth["last_step"]) == (2, 9)
        assert growth["bytes"] == 7 * 50
        assert growth["bytes_per_step"] == 50
        assert growth["lines"]["rows"][0]["key"] == "train.py:9 in forward"
        assert growth["lines"]["total"] == 350
        assert report["causes"][0]["rule"] == "growth"
        assert "train.py:9" in report["causes"][0]["remedy"]
        assert "memory grows by 50 B a step" in report["head"]["cause"]

    @pytest.mark.parametrize("type", ["torch.OutOfMemoryError", "ValueError"])
    def test_the_error_that_ended_the_program_is_not_what_keeps_it(self, type: str) -> None:
        """Only its traceback keeps the frames whose variables held the memory all along."""
        growing = self.leak(50)
        (rank,) = growing.ranks
        held = Holder("kept", "list", "main", 20, 0, Bytes(400), HolderRoot.EXCEPTION, file="a.py")
        held = replace(held, error="OutOfMemoryError", line=4)
        ended = SessionEnd(1, ProgramError(type, "CUDA out of memory", True), holders=(held,))
        report = checked(replace(growing, ranks=(replace(rank, end=ended),)))
        by = ", kept by OutOfMemoryError" if type == "ValueError" else ""
        assert f"kept (a list in main{by}, a.py:4) held 20 tensors" in report["head"]["cause"]

    def test_growth_without_traces_has_no_line(self) -> None:
        report = checked(self.leak(50, traced=False))
        assert report["growth"]["lines"] is None
        assert "train.py" not in report["causes"][0]["remedy"]

    @pytest.mark.parametrize("per_step", [0, -20])
    def test_no_growth(self, per_step: int) -> None:
        assert checked(self.leak(per_step))["growth"] is None

    @pytest.mark.parametrize(("falls", "grows"), [(1, True), (3, False)])
    def test_most_steps_must_have_grown(self, falls: int, grows: bool) -> None:
        """Of ten changes: an evaluation in between may free something, three times is no trend."""
        ends, end = [], 1000
        for i in range(13):
            end += -20 if i in (5, 8, 10)[:falls] else 100
            ends.append(end)
        steps = [step(i, {"forward": end + 500}, end=end) for i, end in enumerate(ends)]
        assert (checked(recording(steps))["growth"] is not None) == grows

    def test_too_few_steps(self) -> None:
        assert checked(self.leak(50, steps=5))["growth"] is None

    def test_growth_in_the_warm_up_alone_is_none(self) -> None:
        steps = [step(i, {"forward": 2000}, end=min(i, 2) * 500) for i in range(10)]
        assert checked(recording(steps))["growth"] is None

    def test_too_small_to_matter(self) -> None:
        steps = [step(i, {"forward": 10**6}, end=1000 + i) for i in range(10)]
        assert checked(recording(steps))["growth"] is None

    def test_evaluation_at_the_end_is_not_growth(self) -> None:
        steps = [step(i, {"forward": 2000}, end=1000) for i in range(9)]
        steps.append(step(9, {"forward": 9000}, end=9000, ended_by="end"))
        assert checked(recording(steps))["growth"] is None


def test_an_imbalance_is_of_the_peaks_and_not_of_a_step_with_lower_bounds() -> None:
    """Counters rise in the second step alone: a later one has only lower bounds."""

    def of_both(index: int, first: Peak, second: Peak) -> Step:
        made = step(index, {"forward": 1}, device="cuda:0")
        windows = [
            replace(made.windows[0], device=name, peak_allocated=peak)
            for name, peak in (("cuda:0", first), ("cuda:1", second))
        ]
        return replace(made, windows=tuple(windows))

    steps = [
        of_both(0, Peak.exactly(100), Peak.exactly(50)),
        of_both(1, Peak.exactly(1800), Peak.exactly(500)),
        of_both(2, Peak(800, 1800), Peak(200, 500)),
    ]
    assert imbalance(steps) == ("cuda:0", 1800, 500)


class TestAdvice:
    def ids(self, made: Recording) -> list[str]:
        return [advice["id"] for advice in checked(made)["advice"]]

    def of(
        self, blocks: list[tuple[str, int, Category]], phase: str = "backward", **changes: Any
    ) -> Recording:
        peak = sum(size for _, size, _ in blocks)
        made = step(0, {"forward": 1, "backward": 1, phase: peak})
        return recording([made], [trace(blocks, phase=phase)], **changes)

    def test_balanced_memory_needs_none(self) -> None:
        blocks = [("a.py:1", 10, c) for c in (Category.PARAMETER, Category.GRADIENT)]
        blocks += [("a.py:1", 10, c) for c in (Category.ACTIVATION, Category.INPUT)]
        assert self.ids(self.of(blocks)) == []

    def test_activations(self) -> None:
        made = self.of([("a.py:1", 60, Category.ACTIVATION), ("b.py:1", 40, Category.PARAMETER)])
        assert self.ids(made) == ["checkpoint", "smaller-batch"]
        assert "a.py:1" in checked(made)["advice"][0]["evidence"]

    def test_checkpointing_that_is_on_is_not_suggested(self) -> None:
        file = "/x/site-packages/torch/utils/checkpoint.py:488"
        blocks = [("a.py:1", 60, Category.ACTIVATION), (file, 1, Category.ACTIVATION)]
        assert self.ids(self.of(blocks)) == ["smaller-batch"]

    def test_gradients_alive_in_the_forward_pass(self) -> None:
        blocks = [("a.py:1", 60, Category.PARAMETER), ("a.py:2", 60, Category.GRADIENT)]
        (cause,) = checked(self.of(blocks, "forward/attention"))["causes"]
        assert (cause["rule"], cause["bytes"]) == ("late-zero-grad", 60)
        assert "unavailable" in checked(self.of(blocks, "backward"))["causes"]

    def test_expandable_segments_are_not_for_the_pools_of_graphs(self) -> None:
        def found(pools: list[tuple[int, int]]) -> list[str]:
            peak, reserved = 100 * MIB, 1000 * MIB
            made = step(0, {"forward": peak}, device="cuda:0", reserved=reserved)
            traced = trace([("a.py:1", peak, Category.PARAMETER)], device="cuda:0")
            traced.segments = tuple(
                Segment(0, 1 << (30 + at), 480 * MIB, 0, "large", pool_id=pool)
                for at, pool in enumerate(pools)
            )
            return self.ids(recording([made], [traced]))

        assert found([(0, 1), (0, 2)]) == ["graph-pools"]
        assert found([(0, 1)]) == []
        assert found([(0, 0)]) == ["expandable-segments"]

    def test_optimizer_state(self) -> None:
        adam = [("a.py:1", 30, Category.PARAMETER), ("o.py:1", 60, Category.OPTIMIZER_STATE)]
        momentum = [("a.py:1", 30, Category.PARAMETER), ("o.py:1", 30, Category.OPTIMIZER_STATE)]
        assert self.ids(self.of(adam)) == ["optimizer-state"]
        assert self.ids(self.of(momentum)) == []
        sharded = self.of(adam, session=session(world_size=4))
        assert "Shard" in checked(sharded)["advice"][0]["text"]

    def test_temporaries_name_their_line(self) -> None:
        made = self.of([("a.py:1", 90, Category.TEMPORARY), ("b.py:1", 5, Category.PARAMETER)])
        assert self.ids(made) == ["temporaries"]
        assert "a.py:1" in checked(made)["advice"][0]["text"]
        nowhere = trace([("t.cpp:0", 90, Category.TEMPORARY)])
        assert self.ids(recording([step(0, {"forward": 90})], [nowhere])) == []

    def fragmented(self, conf: str = "", *, reserved: int = 4 * GIB, device: str = "cuda:0") -> Any:
        made = step(0, {"backward": 2 * GIB}, device=device, reserved=reserved)
        tensors = (KnownTensors(device, {Category.PARAMETER: Bytes(2 * GIB)}, Bytes(0)),)
        made = Step(0, 0, 1, windows=made.windows, phases=made.phases, tensors=tensors)
        return recording(
            [made],
            session=session("counters", device),
            environment=environment(allocator_conf=conf),
        )

    def test_fragmentation(self) -> None:
        (advice,) = checked(self.fragmented("max_split_size_mb:64"))["advice"]
        assert advice["code"] == (
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,max_split_size_mb:64"
        )
        assert advice["bytes"] == 2 * GIB
        (advice,) = checked(self.fragmented("expandable_segments:False"))["advice"]
        assert advice["code"] == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"

    def test_expandable_segments_that_are_on_are_not_suggested(self) -> None:
        assert self.ids(self.fragmented("max_split_size_mb:64,expandable_segments: true")) == []

    def test_little_cached_memory_is_no_problem(self) -> None:
        assert self.ids(self.fragmented(reserved=2 * GIB + 64 * MIB)) == []

    def test_a_trace_is_suggested_only_where_much_is_unexplained(self) -> None:
        tensors = KnownTensors("cuda:0", {Category.PARAMETER: Bytes(90)}, Bytes(0))
        explained = step(0, {"forward": 100}, device="cuda:0", tensors=(tensors,))
        made = recording([explained], session=session("counters", "cuda:0"))
        assert self.ids(made) == []
        bare = step(0, {"forward": 1000}, device="cuda:0", tensors=(tensors,))
        made = recording([bare], session=session("counters", "cuda:0"))
        assert self.ids(made) == ["trace"]

    def test_nothing_is_advised_without_a_reserved_count(self) -> None:
        assert NO_RESERVED.reason
        assert self.ids(recording([step(0, {"forward": 4 * GIB}, device="cuda:0")])) == []


@pytest.mark.parametrize(("line", "shown"), [(30, "train.py:3"), (20, "optimizer state")])
def test_the_largest_parts_are_categories_where_lines_hold_less_than_half(
    line: int, shown: str
) -> None:
    """Most of a snapshot's memory may be older than its trace, so that it has no line."""
    made = step(0, {"forward": 60}, end=60, device="cuda:0")
    report = summarize(recording([made], session=session("counters", "cuda:0")))
    lines = ShareTable(
        60,
        (
            ShareRow(NoPlace.BEFORE_THE_TRACE, 60 - line, 1),
            ShareRow(Place("train.py", 3, "f"), line, 1),
        ),
        Remainder("more lines", 0, 0),
    )
    categories = CategoryTable(
        60, (ShareRow("optimizer_state", 60, 2),), Remainder("", 0, 0), AT_PEAK, 0
    )
    section = causes_section(replace(report, top_lines=lines, categories=categories))
    drawn = " ".join(draw.lines([section], Style()))
    assert shown in drawn


def test_of_very_many_findings_a_thousand_are_shown() -> None:
    found = tuple(Finding("GP101", "throttling", Level.NOTE, f"one {at}.") for at in range(1_002))
    report = summarize(recording([step(0, {"forward": 5})], findings=found))
    assert len(report_json.to_document(report)["findings"]) == 1_002
    data = html_report.data_of(report)
    assert len(data["report"]["findings"]) == 1_000
    sections = {section.name: section for section in report_sections(report, full=True)}
    assert len(sections["findings"].parts) == 1_001
    assert sections["findings"].parts[-1].text == "… 2 more: --json lists them"


def test_of_very_many_places_of_a_finding_a_hundred_are_shown() -> None:
    related = tuple(Place("train.py", line, "main") for line in range(1, 103))
    found = Finding("GP101", "throttling", Level.NOTE, "one", related=related)
    report = summarize(recording([step(0, {"forward": 5})], findings=(found,)))
    sections = {section.name: section for section in report_sections(report, full=True)}
    (shown,) = sections["findings"].parts
    texts = [part.text for part in shown.parts if hasattr(part, "text")]
    assert texts[-2:] == ["train.py:100 in main", "… 2 more places: --json lists them"]
