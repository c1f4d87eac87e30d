"""Peaks that others measured on GPUs: a sample of the rows of ``benchmarks/published_peaks.py``.

Figures are MiB from liger-kernel 0.8.5 (``all_benchmark_data.csv`` in its source distribution),
of what torch and transformers need; the programs are written anew from the description.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import compile_leftovers
import liger_programs
import published_peaks
import pytest
import torch
from torch import nn

import gpuprobe
from gpuprobe.torch_support.version import installed

pytestmark = pytest.mark.filterwarnings("ignore")


def cross_entropy(vocabulary: int) -> Callable[[], None]:
    given = torch.randn(8 * 2048, vocabulary, device="cuda", requires_grad=True)
    target = torch.randint(vocabulary, (8 * 2048,), device="cuda")
    return lambda: nn.functional.cross_entropy(given, target).backward()


def softmax(width: int) -> Callable[[], None]:
    """The benchmark has a tensor of one dimension, and two modules that keep nothing."""
    x = torch.randn(width, device="cuda", requires_grad=True)

    def full() -> None:
        y = x.softmax(-1)
        y.backward(torch.ones_like(y), retain_graph=True)

    return full


def group_norm(channels: int) -> Callable[[], None]:
    norms = [nn.GroupNorm(channels // 4, channels, 1e-6).cuda() for _ in range(2)]
    x = torch.randn(128, channels, 512, device="cuda")
    dy = torch.randn_like(x)
    x.requires_grad_()

    def full() -> None:
        assert len(norms) == 2
        norms[0](x).backward(dy, retain_graph=True)

    return full


def rms_norm(width: int) -> Callable[[], None]:
    """Megatron's, in bfloat16."""
    norm = nn.RMSNorm(width, eps=1e-6).to("cuda", torch.bfloat16)
    x = torch.randn(4096, 1, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    def full() -> None:
        y = norm(x)
        y.sum().backward()

    return full


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("gpu", "program", "size", "published"),
    [
        ("h100-80gb", rms_norm, 1024, 40.0224609375),
        ("h100-80gb", rms_norm, 16384, 640.1103515625),
        ("a100-80gb", cross_entropy, 4096, 1280.1259765625),
        ("a100-80gb", cross_entropy, 131072, 40960.125),
        ("rtx3090", softmax, 1024, 0.0234375),
        ("rtx3090", softmax, 4096, 0.09375),
        ("b200-180gb", group_norm, 32, 40.06640625),
        ("b200-180gb", group_norm, 2048, 2564.0625),
    ],
)
def test_peaks_are_equal_to_those_of_a_gpu(
    gpu: str, program: Callable[[int], Callable[[], None]], size: int, published: float
) -> None:
    if program is rms_norm and installed() < (2, 9):
        pytest.skip("measured with a fused RMS norm, which torch has since 2.9")
    with gpuprobe.virtual_gpu(gpu, compute="shapes"):
        run = program(size)
        peaks = []
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            run()
            peaks.append(torch.cuda.max_memory_allocated() / 2**20)
        assert published_peaks.same(sorted(peaks)[1], published), peaks


# -- the benchmark's own reckoning

TABLE = """kernel_name,kernel_provider,kernel_operation_mode,metric_name,x_name,x_value,y_value_50,\
extra_benchmark_config_str,gpu_name,liger_version,timestamp
softmax,liger,full,speed,N,128,0.5,"{""M"": 2048}",NVIDIA B200,0.5.8,2025-04-30 16:11:00
softmax,liger,full,memory,N,128,0.00244140625,"{""M"": 2048}",NVIDIA B200,0.5.8,2025-04-30 16:11:00
softmax,torch,full,memory,N,128,0.0029296875,"{""M"": 2048}",NVIDIA B200,0.5.8,2025-04-30 16:11:00
"""


def rows() -> list[dict[str, Any]]:
    import csv
    import io

    return published_peaks.rows_of(csv.DictReader(io.StringIO(TABLE)))


def test_only_rows_of_memory_are_compared() -> None:
    assert [(row["provider"], row["theirs"]) for row in rows()] == [
        ("liger", 0.00244140625),
        ("torch", 0.0029296875),
    ]


def test_rows_are_matched_by_all_that_tells_them_apart() -> None:
    row = {"kernel": "softmax", "provider": "torch", "mode": "full", "x": 128, "ours": 0.5}
    found = published_peaks.compare(
        rows(), [{**row, "config": '{"M": 2048}'}, {**row, "provider": "liger", "config": "{}"}]
    )
    assert [item.get("ours") for item in found] == [None, 0.5]
    assert found[0]["why"] == "the program has no such row"
    assert [item["why"] for item in published_peaks.compare(rows(), "no such GPU")] == [
        "no such GPU"
    ] * 2


def test_equal_is_to_the_rounding_of_the_table() -> None:
    assert published_peaks.same(40960.125, 40960.1250001)
    assert not published_peaks.same(40960.125, 40960.13)


def test_the_table_counts_what_is_exact_and_says_why_rows_are_missing() -> None:
    found = [{**row, "ours": row["theirs"]} for row in rows()]
    found[1]["ours"] *= 1.02
    found.append({**rows()[0], "why": "no program"})
    lines = "\n".join(published_peaks.table_of(found))
    assert "1/1" in lines
    assert "+2.00%" in lines
    assert "1: no program" in lines
    assert "torch: 0 of 1 rows equal" in lines


def test_rows_of_an_older_torch_and_of_code_that_is_not_published_are_told_apart() -> None:
    row = {**rows()[0], "measured": "2025-06-01 00:00:00"}
    found = [
        row,
        {**row, "ours": row["theirs"]},
        {**row, "measured": "2025-01-28 23:59:59"},
        {**row, "kernel": "kto_loss"},
        {**row, "kernel": "sparse_multi_token_attention"},
    ]
    found = [{"ours": row["theirs"] * 2, **row} for row in found]
    lines = published_peaks.table_of(found)
    kind = published_peaks.kind_of(row)
    assert kind == "triton"
    assert f"{kind}: 1 of 5 rows equal to the table's rounding (20.0%), 1 within 1%; 0 not run" in (
        lines
    )
    of_now = "of a torch from 2.6 on, and of code that is published"
    assert f"{kind}: 1 of the 2 rows (50.0%) that are {of_now}" in lines


def test_rows_that_are_known_as_a_range_are_counted_and_reasons_given() -> None:
    found = [
        {**row, "kernel": "multi_token_attention", "ours": row["theirs"] / 2} for row in rows()
    ]
    found[0]["most"] = found[0]["theirs"] * 1.1
    found[1]["most"] = found[1]["theirs"] * 0.9
    lines = "\n".join(published_peaks.table_of(found))
    assert "triton: 1 of the 1 rows that are known as a range are in it" in lines
    assert "torch: 0 of the 1 rows that are known as a range are in it" in lines
    assert "-50.00%  [cuDNN's workspaces" in lines
    compared = published_peaks.compare(rows(), [{**row, "x": 128, "most": 2.0} for row in rows()])
    assert [row.get("most") for row in compared] == [2.0, 2.0]


def distribution(tmp_path: Path, version: str, kernels: dict[str, str]) -> Path:
    """With programs of these kernels, and a table of when each was measured; without either where
    there are no kernels.
    """
    folder = tmp_path / version
    folder.mkdir()
    if kernels:
        scripts = folder / liger_programs.SCRIPTS
        scripts.mkdir(parents=True)
        table = folder / liger_programs.TABLE
        table.parent.mkdir()
        table.write_text("\n".join(f"{kernel},torch,{at}" for kernel, at in kernels.items()))
        for kernel in kernels:
            script = scripts / f"benchmark_{kernel}.py"
            script.write_text(f'common = {{"kernel_name": "{kernel}"}}')
    return folder


def programs(tmp_path: Path, kernel: str, version: str, measured: str) -> list[tuple[str, str]]:
    folders = {liger_programs.version_of(item.name): item for item in tmp_path.iterdir()}
    row = {"kernel": kernel, "version": version, "measured": measured}
    return [
        (package.parent.name, script.relative_to(tmp_path).parts[0])
        for package, script in liger_programs.programs_of(folders, row)
    ]


def test_a_version_without_programs_takes_those_of_the_next(tmp_path: Path) -> None:
    distribution(tmp_path, "0.4.0", {})
    distribution(tmp_path, "0.5.0", {"jsd": "2025-02-01 10:00:00"})
    later = {"jsd": "2025-02-01 10:00:00", "tvd": "2025-03-01 10:00:00"}
    distribution(tmp_path, "0.6.0", later)
    assert programs(tmp_path, "jsd", "0.4.0", "2025-02-01 10:00:00") == [
        ("0.5.0", "0.5.0"),
        ("0.4.0", "0.5.0"),
        ("0.6.0", "0.6.0"),
    ]
    assert programs(tmp_path, "tvd", "0.5.0", "never")[0] == ("0.5.0", "0.6.0")
    assert programs(tmp_path, "dyt", "0.4.0", "never") == []


def test_the_first_distribution_with_a_row_has_its_program(tmp_path: Path) -> None:
    """Nightly ones come after the release whose version they have."""
    before, then = {"jsd": "2025-02-01 10:00:00"}, {"jsd": "2025-03-05 09:00:00"}
    distribution(tmp_path, "0.4.0.dev20241001080000", {})
    distribution(tmp_path, "0.4.0.dev20241101080000", {})
    distribution(tmp_path, "0.5.0", before)
    distribution(tmp_path, "0.5.0.dev20250304080000", before)
    distribution(tmp_path, "0.5.0.dev20250306080000", then)
    distribution(tmp_path, "0.6.0", then)
    assert programs(tmp_path, "jsd", "0.5.0", then["jsd"])[0] == (
        "0.5.0.dev20250306080000",
        "0.5.0.dev20250306080000",
    )
    # Without a table: the first after the row was measured.
    assert programs(tmp_path, "jsd", "0.4.0", "2024-10-05 07:00:00")[0] == (
        "0.4.0.dev20241101080000",
        "0.5.0",
    )


def test_a_run_that_is_cut_short_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"a": "E", "b": "T"}  # what varies: its program is told so
    given = [
        {**row, "kernel": "fused_moe", "x_name": name, "config": at}
        for row in rows()
        for at, name in names.items()
    ]
    ran: list[str] = []

    def run(package: Path, script: Path, gpu: str, wanted: Any) -> Any:
        ran.extend(row["config"] for row in wanted)
        if len(ran) > len(rows()):
            raise KeyboardInterrupt
        return wanted

    monkeypatch.setattr(published_peaks, "run_program", run)
    program = (tmp_path / "0.5.0" / "src", tmp_path / "0.5.0" / liger_programs.SCRIPTS / "b.py")
    with pytest.raises(KeyboardInterrupt):
        published_peaks.Runs(tmp_path / "runs.json").of("group", program, "b200-180gb", given)
    assert set(ran) == {"a", "b"}
    ran.clear()
    found = published_peaks.Runs(tmp_path / "runs.json").of("group", program, "b200-180gb", given)
    assert set(ran) == {"b"}
    assert sorted(row["config"] for row in found) == sorted(row["config"] for row in given)


def test_rows_that_differ_by_one_figure_are_counted() -> None:
    """Of a group of four sizes that differ by 1.5 MiB, two that are equal, and four that do not
    differ by the same.
    """
    first = rows()[1]

    def group(name: str, ours: list[float]) -> list[dict[str, Any]]:
        theirs = [8.0, 16.0, 32.0, 64.0]
        pairs = zip(theirs, ours, strict=False)
        return [{**first, "config": name, "theirs": peak, "ours": found} for peak, found in pairs]

    by_one_figure = group("a", [6.5, 14.5, 30.5, 62.5])
    others = [
        *group("b", [8.0, 16.0, 32.0, 64.0]),
        *group("c", [6.5, 14.5, 30.5, 62.0]),
        *group("d", [6.5, 14.5]),
    ]
    lines = published_peaks.table_of([*by_one_figure, *others])
    assert any(line.startswith("torch: 4 of the rows that differ") for line in lines), lines
    assert not any("that differ" in line for line in published_peaks.table_of(others))


def test_results_are_read_as_they_were_written() -> None:
    kept = {"softmax 0.5.8 NVIDIA B200": rows(), 'a "name"': []}
    assert json.loads(published_peaks.written(kept)) == kept


def test_a_program_is_told_what_its_rows_were_measured_with() -> None:
    row = {
        "kernel": "fused_linear_selected_log_probs",
        "provider": "cutile",
        "gpu": "NVIDIA H100 80GB HBM3",
        "x": "4096",
        "config": json.dumps(
            {
                "hidden_size": 8,
                "label_stride": 2,
                "return_entropy": False,
                "selected_tokens": 4,
                "selection_mode": "native",
                "temperature": 1.0,
                "vocab_size": 16,
            }
        ),
    }
    each = " ".join(liger_programs.options_of(row))
    assert "--hidden 8 --vocab 16 --providers torch cutile cutedsl-sm90 --tokens" in each
    of_torch = {**row, "provider": "torch"}
    assert liger_programs.options_of(of_torch) == liger_programs.options_of(row)
    own = {**row, "config": row["config"].replace("native", "identity"), "gpu": "NVIDIA B300"}
    assert "--providers cutile fallback --tokens" in " ".join(liger_programs.options_of(own))


@pytest.mark.parametrize(
    ("mode", "order"),
    [
        ("native", "E fS bS fM bM E fS bS fM bM"),  # sizes first, each with its times and memory
        ("identity", "E fS fS bS bS E fM fM bM bM"),
    ],
)
def test_selected_log_probabilities_are_measured_in_the_published_order(
    mode: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = "fused_linear_selected_log_probs"
    config = json.dumps({"selection_mode": mode})
    wanted = [{"kernel": kernel, "x_name": "T", "x": x, "config": config} for x in ("1", "2")]
    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.append("E"))
    utils = SimpleNamespace(SingleBenchmarkRunInput=SimpleNamespace, CustomEncoder=None)
    measuring = liger_programs._Measuring(utils, [], wanted)
    for metric in ("speed", "memory"):

        def measured(given: SimpleNamespace, letter: str = metric[0].upper()) -> SimpleNamespace:
            found.append(given.kernel_provider + letter)
            return SimpleNamespace(y_50=float(given.x))

        measuring(
            bench_test_fn=measured,
            kernel_name=kernel,
            metric_name=metric,
            x_name="BT",
            x_values=[8],
            kernel_providers=["f", "b"],
            kernel_operation_modes=["full"],
        )
    assert " ".join(found) == order
    assert sorted(row["ours"] for row in measuring.rows) == [1, 1, 2, 2]


def test_a_compiler_that_is_not_installed_does_nothing() -> None:
    script = """
import absent_compilers
absent_compilers.install()
import cuda.tile as ct
import cutlass
from cutlass.cute.runtime import from_dlpack

@ct.kernel(occupancy=4)
def kernel(x: ct.Constant[int]): raise AssertionError

class Kernel(cutlass.Base): pass

ct.launch(None, (1,), kernel, (from_dlpack(1),))
error, context = cutlass.driver.cuCtxGetCurrent()
assert error == cutlass.driver.SUCCESS and int(context)
"""
    folder = str(Path(liger_programs.__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((folder, *sys.path))}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)


def test_tensors_that_wait_for_a_full_collection_are_found() -> None:
    def program() -> None:
        held: list[Any] = [torch.ones(3)]
        held.append(held)
        torch.ones(4)

    assert compile_leftovers.kept(program) == ["(3,)"]
