"""Peaks that others measured on GPUs, and ours of the same programs, without a GPU.

liger-kernel publishes a table of the memory of its kernels and of what they replace, with the
program of each row: ``benchmark/`` of its source distributions. Each program runs unchanged on the
simulated GPU of the row's kind, with ``compute="shapes"`` and the sizes of the row. Its code is
that of the first distribution, release or nightly, whose table has the row; it may be found in the
next ones, too, and before it in those of the row's version. Timing is replaced by a few calls,
since what it leaves allocated belongs to the peaks measured after it. The table does not name the
torch: the one that is installed runs (``torch`` of a result). What torch 2.13 cannot compile
(GRPO's loss for a second batch size: an IndexError of Dynamo's) is run by a Python that has torch
2.6.

    pip download --no-deps --no-binary :all: --no-build-isolation -d sources liger-kernel==0.8.5
    python benchmarks/published_peaks.py sources [--kernels softmax,kl_div] [--again]

Nightly distributions are those of ``liger-kernel-nightly``. The ones before 0.5.4 have no programs:
then those of the next that has, or what is put into the unpacked folder from the repository's
commit that first had the row (``git log --reverse -S'2024-11-13 22:08:30' -- benchmark/data``, then
``git archive COMMIT benchmark test | tar x -C sources/unpacked/liger_kernel_nightly-...``). Rows of
Megatron need its package: ``pip install --no-deps megatron-core``; those of its unfused loss the
repository's ``tensor_parallel/cross_entropy.py`` of commit 00611e6 in place of the package's. Rows
of sparsemax were measured four weeks before their first distribution, with ``ops/sparsemax.py`` as
pull request 687 of linkedin/Liger-Kernel had it before its review: in place of the one in the
unpacked folder of 0.5.10. NVIDIA's compilers do not have to be installed: `absent_compilers`.

Programs that compile code with torch 2.5 or older run with a Python that has torch 2.5, the oldest
that works here: what that leaves in reference cycles (``compile_leftovers.py``) belongs to their
peaks until Python's next full collection, whose time depends on the whole process.

Results are kept in ``benchmarks/published_peaks.json``; what is there is not run again.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from liger_programs import (
    TABLE,
    Row,
    config_of,
    import_common,
    options_of,
    programs_of,
    run_program,
    unpacked,
)

RESULTS = Path(__file__).parent / "published_peaks.json"
GPUS = {
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA H100 80GB HBM3": "h100-80gb",
    "NVIDIA H100 PCIe": "h100-pcie-80gb",
    "NVIDIA B200": "b200-180gb",
    "NVIDIA B300 SXM6 PC": "b300-288gb",
    "NVIDIA GeForce RTX 3090": "rtx3090",
    "NVIDIA GeForce RTX 4090": "rtx4090",
}
OLDEST = ("2.6", "2025-01-29")
"""The oldest torch that runs here, and its date."""
ENOUGH = 0.8
"""Of rows that are equal, where no further program is tried."""


BETWEEN_RELEASES = "measured with code between two releases, which none of them contains"
WAITING = (
    "arguments of compiled calls wait for Python's full collection, up to torch 2.5 "
    "(compile_leftovers.py)"
)
REASONS = {
    ("fused_linear_jsd", "triton"): f"{BETWEEN_RELEASES}: one gradient of the weights less",
    ("fused_linear_jsd", "torch"): "2 KiB of 10 to 56 GiB",
    ("fused_linear_orpo_loss", ""): f"1 MiB, 240 at T=4096, at every size, of more than 2,084: "
    f"{WAITING}; four rows are of an earlier program",
    ("fused_linear_cpo_loss", ""): f"1 MiB at some sizes, of 2,084: {WAITING}",
    ("fused_linear_simpo_loss", ""): f"2,084 MiB at every size: {WAITING}",
    ("kto_loss", ""): f"0.5 MiB or less, of 1,265 MiB: {WAITING}",
    ("multi_token_attention", ""): "cuDNN's workspaces: inside the range that estimates give",
    ("sparse_multi_token_attention", "triton"): f"{BETWEEN_RELEASES}: at every size one tensor of "
    "32-bit numbers and a mask of the scores' shape more, and 16 bytes for each of their rows",
    ("sparse_multi_token_attention", "torch"): "at the smallest size only: cuDNN's workspaces",
    ("embedding", ""): "12,240 MiB, and 13,770 of the second configuration: modules and gradients "
    "of other rows wait for Python's full collection, up to torch 2.4 (compile_leftovers.py); it "
    "comes before the last four rows",
    (
        "fused_moe",
        "torch",
    ): "18 KiB at the largest size, where CUDA's fast sine may decide which of "
    "two experts a token goes to",
    ("fused_linear_selected_log_probs", ""): "1 MiB of 3,050 at the largest size of one provider: "
    "the slack of blocks that are not split",
}
"""Why rows differ or cannot be run, by kernel and whose code it is ("": both)."""

OLDER_THAN_THEIR_DATE = ("kto_loss",)
"""Kernels with what only a torch before 2.6 leaves allocated, though 2.6 was out by a month."""
UNPUBLISHED = (("fused_linear_jsd", "triton"), ("sparse_multi_token_attention", "triton"))
"""Whose code, by kernel and kind, is not published: `BETWEEN_RELEASES`."""

Key = tuple[str, ...]


# -- the table


def rows_of(table: Iterable[dict[str, str]]) -> list[Row]:
    """The rows of memory, of which the programs can be had."""
    found = []
    for row in table:
        if row["metric_name"] != "memory" or not row["y_value_50"]:
            continue
        found.append(
            {
                "kernel": row["kernel_name"],
                "provider": row["kernel_provider"],
                "mode": row["kernel_operation_mode"],
                "x_name": row["x_name"],
                "x": row["x_value"],
                "config": config_of(row["extra_benchmark_config_str"]),
                "gpu": row["gpu_name"],
                "version": row["liger_version"],
                "measured": row["timestamp"],
                "theirs": float(row["y_value_50"]),
            }
        )
    return found


def key_of(row: Row) -> Key:
    x = str(row["x"])
    with_number = re.fullmatch(r"[\d.]+", x) is not None
    return (row["provider"], row["mode"], f"{float(x):g}" if with_number else x, row["config"])


def same(ours: float, theirs: float) -> bool:
    """Equal to the table's rounding, which is that of a 32-bit number."""
    return _rounded(ours) == _rounded(theirs)


def _rounded(value: float) -> float:
    found: float = struct.unpack("f", struct.pack("f", value))[0]
    return found


# -- the comparison


def compare(theirs: list[Row], found: list[Row] | str) -> list[Row]:
    """The rows of one kernel, version and GPU with ``ours``, or ``why`` there is none."""
    if isinstance(found, str):
        return [{**row, "why": found} for row in theirs]
    ours = {(row["kernel"], *key_of(row)): row for row in found}
    compared = []
    for row in theirs:
        match = ours.get((row["kernel"], *key_of(row)))
        if match is None:
            why = {"why": "the program has no such row"}
        else:
            why = {name: match[name] for name in ("ours", "most", "torch", "why") if name in match}
        compared.append({**row, **why})
    return compared


def kind_of(row: Row) -> str:
    """Whose code is measured."""
    name = row["provider"]
    return "triton" if name.startswith("liger") else "torch"


def table_of(rows: list[Row]) -> list[str]:
    lines = [
        f"{'kernel':32} {'GPU':24} {'version':8} {'code':7} {'exact':>9} {'worst':>9}  "
        "not run [reason]"
    ]
    groups: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        key = (row["kernel"], row["gpu"].removeprefix("NVIDIA "), row["version"], kind_of(row))
        groups.setdefault(key, []).append(row)
    for (kernel, gpu, version, kind), members in groups.items():
        ran = [row for row in members if row.get("ours") is not None]
        exact = sum(same(row["ours"], row["theirs"]) for row in ran)
        off = [row["ours"] / row["theirs"] - 1 for row in ran]
        worst = f"{max(off, key=abs):+9.2%}" if off else " " * 9
        reasons = {row["why"] for row in members if row.get("ours") is None}
        text = f"{len(members) - len(ran)}: {'; '.join(sorted(reasons))[:90]}" if reasons else ""
        reason = REASONS.get((kernel, kind)) or REASONS.get((kernel, ""), "")
        if reason and exact < len(members):
            text = f"{text} [{reason}]".strip()
        lines.append(
            f"{kernel:32} {gpu:24} {version:8} {kind:7} {exact:4}/{len(ran):<4} {worst}  {text}"
        )
    shifted = _shifted(rows)
    for kind in ("triton", "torch"):
        of_kind = [row for row in rows if kind_of(row) == kind]
        ran = [row for row in of_kind if row.get("ours") is not None]
        exact = sum(same(row["ours"], row["theirs"]) for row in ran)
        near = sum(math.isclose(row["ours"], row["theirs"], rel_tol=0.01) for row in ran)
        ranges = [row for row in ran if "most" in row]
        within = sum(row["ours"] <= row["theirs"] <= row["most"] for row in ranges)
        if ran:
            lines.append(
                f"{kind}: {exact} of {len(ran)} rows equal to the table's rounding "
                f"({exact / len(ran):.1%}), {near} within 1%; {len(of_kind) - len(ran)} not run"
            )
        able = [row for row in ran if _can_be_run(row)]
        exact = sum(same(row["ours"], row["theirs"]) for row in able)
        if able and len(able) < len(ran):
            lines.append(
                f"{kind}: {exact} of the {len(able)} rows ({exact / len(able):.1%}) that are of a "
                f"torch from {OLDEST[0]} on, and of code that is published"
            )
        constant = sum(kind_of(row) == kind for row in shifted)
        if constant:
            lines.append(
                f"{kind}: {constant} of the rows that differ do so by one figure at all of 4 or "
                "more sizes"
            )
        if ranges:
            lines.append(
                f"{kind}: {within} of the {len(ranges)} rows that are known as a range are in it"
            )
    return lines


def _can_be_run(row: Row) -> bool:
    """Whether gpuprobe supports the torch that measured a row, and its code can be had."""
    return (
        row["measured"] >= OLDEST[1]
        and row["kernel"] not in OLDER_THAN_THEIR_DATE
        and (row["kernel"], kind_of(row)) not in UNPUBLISHED
    )


def _shifted(rows: list[Row]) -> list[Row]:
    """Rows that differ from the table by the same number of bytes at every size, of four or more:
    what was left allocated before, and not what the program does.
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        names = ("kernel", "gpu", "version", "provider", "mode", "config")
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    found = []
    for members in groups.values():
        if len(members) < 4 or any(row.get("ours") is None for row in members):
            continue
        differences = [row["theirs"] - row["ours"] for row in members]
        rounding = max(row["theirs"] for row in members) * 2**-22
        if max(differences) - min(differences) <= rounding < min(map(abs, differences)):
            found += members
    return found


def written(kept: dict[str, list[Row]]) -> str:
    """Results as JSON, a row in each line."""
    groups = []
    for name, rows in kept.items():
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        groups.append(f" {json.dumps(name)}: [\n  {lines}\n ]")
    return "{\n" + ",\n".join(groups) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sources", type=Path, nargs="?", help="folder of source distributions")
    parser.add_argument("--kernels", help="only these, separated by commas")
    parser.add_argument("--again", action="store_true", help="run what has results, too")
    parser.add_argument("--work", type=Path, help="folder to unpack into")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are kept")
    args = parser.parse_args()
    kept: dict[str, list[Row]] = {}
    if args.results.exists():
        kept = json.loads(args.results.read_text())
    if args.sources is not None:
        _run_all(args, kept)
    for line in table_of([row for rows in kept.values() for row in rows]):
        print(line)


def _exact(members: list[Row], found: list[Row] | str) -> int:
    """How many rows are equal. A row that was measured between two releases names the earlier one,
    and may be of the code of either.
    """
    rows = [row for row in compare(members, found) if row.get("ours") is not None]
    return sum(same(row["ours"], row["theirs"]) for row in rows)


def _is_slow(kernel: str, version: str, gpu: str) -> bool:
    """Programs that compile each of their rows with ``torch.compile`` come last."""
    return kernel == "embedding" or kernel.startswith(("distill_", "kto_", "fused_linear_grpo"))


def _run_all(args: argparse.Namespace, kept: dict[str, list[Row]]) -> None:
    into = args.work or args.sources / "unpacked"
    into.mkdir(parents=True, exist_ok=True)
    folders = unpacked(args.sources, into)
    if not folders:
        sys.exit(f"no source distributions of liger-kernel in {args.sources}: see --help")
    with (folders[max(folders)] / TABLE).open(encoding="utf-8", newline="") as file:
        rows = rows_of(csv.DictReader(file))
    import_common()
    jobs: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        jobs.setdefault((row["kernel"], row["version"], row["gpu"]), []).append(row)
    wanted = set(args.kernels.split(",")) if args.kernels else None
    runs = Runs(into / "runs.json")
    for (kernel, version, gpu), members in sorted(jobs.items(), key=lambda job: _is_slow(*job[0])):
        name = f"{kernel} {version} {gpu}"
        if (wanted is not None and kernel not in wanted) or (name in kept and not args.again):
            continue
        found: list[Row] | str = "its program is in no source distribution"
        if gpu not in GPUS:
            found = f"{gpu} is not in the catalogue"
        else:
            for program in programs_of(folders, members[0]):
                made = runs.of(name, program, GPUS[gpu], members)
                if _exact(members, made) > _exact(members, found) or isinstance(found, str):
                    found = made
                if _exact(members, found) >= ENOUGH * len(members):
                    break
        kept[name] = compare(members, found)
        print(f"{name}: done", file=sys.stderr, flush=True)
        runs.forget(name)
        args.results.write_text(written(kept))


def _parts(wanted: list[Row]) -> list[list[Row]]:
    """What is run in one process: the rows that a program makes with the same options."""
    parts: dict[tuple[str, ...], list[Row]] = {}
    for row in wanted:
        parts.setdefault(options_of(row), []).append(row)
    return list(parts.values())


class Runs:
    """Results of single programs, of groups that have more to be tried: a run that is interrupted
    continues where it was.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.kept: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    def of(
        self,
        group: str,
        program: tuple[Path, Path],
        gpu: str,
        wanted: list[Row],
    ) -> list[Row] | str:
        """The rows that a program makes of a group, or why it makes none."""
        found: list[Row] = []
        for at, part in enumerate(_parts(wanted)):
            key = f"{program[0].parent.name} {program[1].parts[-4]} {at}"
            of_group = self.kept.setdefault(group, {})
            if key not in of_group:
                of_group[key] = run_program(*program, gpu, part)
                self.file.write_text(json.dumps(self.kept))
            if isinstance(of_group[key], str):
                return str(of_group[key])
            found += of_group[key]
        return found

    def forget(self, group: str) -> None:
        self.kept.pop(group, None)
        self.file.write_text(json.dumps(self.kept))


if __name__ == "__main__":
    main()
