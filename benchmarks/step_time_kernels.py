"""How far prices are from measured kernels: matrix products that no price was fitted to, attention.

    pip download aiconfigurator-core==0.12.0 --no-deps && unzip -d tables aiconfigurator_core*.whl
    python benchmarks/step_time_kernels.py tables            # hold-out figures
    python benchmarks/step_time_kernels.py tables --write    # and fit step_time/matmul.json

The tables (Apache-2.0, github.com/ai-dynamo/aiconfigurator) have the times of linear layers from
three sources for each GPU: the benchmarks of SGLang, TensorRT-LLM and vLLM. What is fitted is their
median. A quarter of the pairs (n, k) is left out of every fit, the shipped tables' too: the figures
are those of its shapes with at least 512 rows and 256 columns. ``--write`` also draws some of them
for ``tests/step_time/held_matmuls.json``.

Attention: all forward calls with a causal mask of the tables that have the kernels torch calls; the
plateaus of `gpuprobe.step_time.attention` were set by the same tables.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from base64 import b85encode
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path

import numpy as np

from gpuprobe.model.run.work import Work, WorkKind
from gpuprobe.step_time import matmul
from gpuprobe.step_time.price import Price
from gpuprobe.step_time.prices import Prices, prices
from gpuprobe.step_time.speeds import all_speeds, element_bytes

SYSTEMS = {
    "a100-80gb": "a100_sxm",
    "h100-80gb": "h100_sxm",
    "h200-141gb": "h200_sxm",
    "b200-180gb": "b200_sxm",
    "b300-288gb": "b300_sxm",
    "l40s": "l40s",
    "rtx-pro-6000": "rtx_pro_6000_server",
}
NAMES = {"bfloat16": "bfloat16", "fp8": "float8"}
WAVES = (0.0, 0.3, 0.6)
SMOOTH = 0.3
"""Weight of the differences between neighbours of the grid, against one measured kernel's."""
SHAPE = (len(matmul.ROWS), len(matmul.COLUMNS), len(matmul.COLUMNS))
RANGE = (0.1, 0.9)
HELD = 0.25
MIN_ROWS, MIN_COLUMNS = 512, 256
"""Shapes of training, of which the figures are."""
MATMUL = Path(matmul.__file__).with_name("matmul.json")
ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "tests" / "step_time" / "held_matmuls.json"
SAMPLED = 60
LONG = 60e-6
"""Seconds of products whose sums are compared with them, `FEW` of the same rows in each."""
FEW, SUMS = 4, 40
ATTENTION = (
    ("a100-80gb", "a100_sxm/attention/sglang/0.5.10", "flash"),
    ("l40s", "l40s/attention/vllm/0.24.0", "flash"),
    ("rtx-pro-6000", "rtx_pro_6000_server/attention/vllm/0.24.0", "flash"),
    ("b200-180gb", "b200_sxm/attention/sglang/0.5.14", "cudnn"),
)
SHORTEST = 512
"""Keys of attention in training."""


@dataclass(frozen=True)
class Row:
    """One shape: seconds from each source that measured it."""

    m: int
    n: int
    k: int
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def measured(root: Path, system: str, dtype: str) -> tuple[list[Row], str]:
    """The newest table of each source, and what they are."""
    import pyarrow.parquet as pq  # 0.2 s; only here

    times: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    sources = []
    base = root / "aiconfigurator_core" / "systems" / "data" / system / "gemm"
    for framework in sorted(path for path in base.iterdir() if path.is_dir()):
        path = max(framework.glob("*/gemm_perf.parquet"), key=_version)
        table = pq.read_table(path, columns=["gemm_dtype", "m", "n", "k", "latency"])
        one: dict[tuple[int, int, int], list[float]] = defaultdict(list)
        columns = (table[name].to_pylist() for name in ("gemm_dtype", "m", "n", "k", "latency"))
        for name, m, n, k, latency in zip(*columns, strict=True):
            if name == dtype:
                one[m, n, k].append(latency / 1e3)
        if one:
            sources.append(f"{framework.name} {path.parent.name}")
        for shape, latencies in one.items():
            times[shape].append(statistics.median(latencies))
    rows = [Row(*shape, tuple(seconds)) for shape, seconds in sorted(times.items())]
    return rows, ", ".join(sources)


def _version(path: Path) -> list[str]:
    return [part.zfill(8) for part in path.parent.name.split(".")]


def fit(rows: Sequence[Row], bases: Sequence[float]) -> np.ndarray:
    """The logarithms of measured time over roofline on the grid that leave the least absolute
    residuals: least squares, weighted again four times.
    """
    size = SHAPE[0] * SHAPE[1] * SHAPE[2]
    corners = [matmul.corners(row.m, row.n, row.k) for row in rows]
    index = np.array([[i for i, _ in each] for each in corners]).T
    share = np.array([[w for _, w in each] for each in corners]).T
    goal = np.array([log(row.median / base) for row, base in zip(rows, bases, strict=True)])
    weight = np.ones_like(goal)
    values = np.zeros(size)
    for _ in range(4):
        matrix, right = np.zeros((size, size)), np.zeros(size)
        for i in range(8):
            np.add.at(right, index[i], share[i] * goal * weight)
            for j in range(8):
                np.add.at(matrix, (index[i], index[j]), share[i] * share[j] * weight)
        points = np.arange(size).reshape(SHAPE)
        for axis in range(3):
            below = np.take(points, range(SHAPE[axis] - 1), axis).ravel()
            above = np.take(points, range(1, SHAPE[axis]), axis).ravel()
            for a, b, sign in (
                (below, below, 1), (above, above, 1), (below, above, -1), (above, below, -1),
            ):  # fmt: skip
                np.add.at(matrix, (a, b), sign * SMOOTH)
        values = np.linalg.solve(matrix, right)
        weight = 0.05 / np.maximum(np.abs((values[index] * share).sum(0) - goal), 0.02)
    return values


def encoded(values: np.ndarray) -> bytes:
    codes = np.rint((values - matmul.CODE_LEAST) / matmul.CODE_STEP)
    return bytes(np.clip(codes, 0, 255).astype(np.uint8))


def rooflines(gpu: str, dtype: str, wave: float, rows: Iterable[Row]) -> list[float]:
    speeds = all_speeds()[gpu]
    roof = matmul.Roof(speeds.peak[dtype], speeds.bandwidth, speeds.processors, wave)
    size = element_bytes(dtype)
    return [matmul.roofline(roof, r.m, r.n, r.k, size, max(size, 2)) for r in rows]


def predicted(codes: bytes, row: Row, base: float) -> float:
    table = matmul.MatmulTable(codes, 0.0, (), "")
    return base * matmul.excess(table, row.m, row.n, row.k)


@dataclass(frozen=True)
class Fit:
    """A table, and its errors on pairs (n, k) that were left out: of the median of the sources."""

    codes: bytes
    held: list[Row]
    median: float
    p90: float
    ranges: tuple[tuple[float, float], ...]
    single: float
    sums: float


def fitted(gpu: str, dtype: str, wave: float, rows: Sequence[Row]) -> Fit:
    pairs = sorted({(row.n, row.k) for row in rows})
    left_out = set(random.Random(0).sample(pairs, int(len(pairs) * HELD)))
    train = [row for row in rows if (row.n, row.k) not in left_out]
    codes = encoded(fit(train, rooflines(gpu, dtype, wave, train)))
    held = [
        row
        for row in rows
        if (row.n, row.k) in left_out and row.m >= MIN_ROWS and min(row.n, row.k) >= MIN_COLUMNS
    ]
    errors: list[float] = []
    by_rows: dict[int, list[tuple[float, float]]] = defaultdict(list)
    classes: list[list[float]] = [[] for _ in range(len(matmul.SIZE_CLASSES) + 1)]
    for row, base in zip(held, rooflines(gpu, dtype, wave, held), strict=True):
        seconds = predicted(codes, row, base)
        errors.append(abs(log(row.median / seconds)))
        kind = sum(seconds >= limit for limit in matmul.SIZE_CLASSES)
        classes[kind] += [each / seconds for each in row.seconds]
        if seconds >= LONG:
            by_rows[row.m].append((row.median, seconds))
    return Fit(
        codes,
        held,
        exp(statistics.median(errors)) - 1,
        exp(_quantile(errors, 0.9)) - 1,
        tuple(
            (min(1.0, _quantile(each, RANGE[0])), max(1.0, _quantile(each, RANGE[1])))
            for each in classes
        ),
        *_off_together([each for each in by_rows.values() if len(each) >= 2 * FEW]),
    )


def _off_together(groups: Sequence[Sequence[tuple[float, float]]]) -> tuple[float, float]:
    """Within what 8 of 10 long products are, and 8 of 10 sums of a few with the same rows."""
    random_ = random.Random(0)
    single = [log(one / seconds) for group in groups for one, seconds in group]
    sums = []
    for group in groups:
        for _ in range(SUMS):
            some = random_.sample(group, FEW)
            sums.append(log(sum(one for one, _ in some) / sum(other for _, other in some)))
    return _half_width(single), _half_width(sums)


def _half_width(logarithms: Sequence[float]) -> float:
    return (_quantile(logarithms, 0.9) - _quantile(logarithms, 0.1)) / 2 if logarithms else 0.0


def attention(root: Path, gpu: str, folder: str, implementation: str) -> str:
    """One line on the forward calls of a table."""
    import pyarrow.parquet as pq  # 0.2 s; only here

    path = root / "aiconfigurator_core" / "systems" / "data" / folder
    one = prices(gpu)
    assert isinstance(one, Prices)
    errors: list[float] = []
    inside = 0
    for row in pq.read_table(path / "context_attention_perf.parquet").to_pylist():
        plain = row["attn_dtype"] == row["kv_cache_dtype"] == "bfloat16"
        whole = row["step"] == 0 and row.get("window_size", 0) == 0
        if not plain or not whole or row["isl"] < SHORTEST or row["kernel_source"] == "triton":
            continue
        batch, heads, keys, size = (row[x] for x in ("batch_size", "num_heads", "isl", "head_dim"))
        groups = row["num_key_value_heads"] or heads
        price = one.of(
            Work(
                "attention",
                WorkKind.ATTENTION,
                "bfloat16",
                (batch, heads, groups, keys, keys, size, size),
                f"{implementation} causal",
                read=2 * batch * keys * size * (heads + 2 * groups),
                written=2 * batch * keys * size * heads,
            ),
            1,
        )
        assert isinstance(price, Price)
        seconds = row["latency"] / 1e3
        errors.append(abs(log(seconds / price.expected)))
        inside += price.low <= seconds <= price.high
    return (
        f"{gpu:14} {implementation}: {len(errors):,} calls, median error "
        f"{exp(statistics.median(errors)) - 1:.1%}, 90% within "
        f"{exp(_quantile(errors, 0.9)) - 1:.1%}; {inside / len(errors):.0%} in the range"
    )


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", type=Path, help="the unpacked wheel of aiconfigurator-core")
    parser.add_argument("--write", action="store_true", help="write the fitted tables")
    options = parser.parse_args()
    entries = []
    sample: dict[str, list[list[float]]] = {}
    for gpu, system in SYSTEMS.items():
        for theirs, dtype in NAMES.items():
            rows, sources = measured(options.tables, system, theirs)
            if not rows:
                continue
            trials = {wave: fitted(gpu, dtype, wave, rows) for wave in WAVES}
            wave = min(trials, key=lambda each: trials[each].median)
            result = trials[wave]
            print(
                f"{gpu:14} {dtype:9} wave {wave}: {len(result.held):,} held shapes, median error "
                f"{result.median:.1%}, 90% within {result.p90:.1%}; ranges "
                + ", ".join(f"{low:.2f}-{high:.2f}" for low, high in result.ranges)
                + f"; 80% within {result.single:.1%}, sums of {FEW} within {result.sums:.1%}",
                flush=True,
            )
            entries.append(
                {
                    "gpu": gpu,
                    "dtype": dtype,
                    "wave": wave,
                    "held_median": round(result.median, 4),
                    "held_p90": round(result.p90, 4),
                    "ranges": [[round(x, 3) for x in each] for each in result.ranges],
                    "source": f"{len(rows):,} linear layers in {dtype}, measured on "
                    f"{all_speeds()[gpu].title} by {sources}: aiconfigurator-core 0.12.0 "
                    "(2026, Apache-2.0)",
                    "codes": b85encode(result.codes).decode(),
                }
            )
            sample[f"{gpu} {dtype}"] = [
                [row.m, row.n, row.k, row.median]
                for row in random.Random(1).sample(result.held, SAMPLED)
            ]
    for gpu, folder, implementation in ATTENTION:
        print(attention(options.tables, gpu, folder, implementation), flush=True)
    if options.write:
        MATMUL.write_text(json.dumps({"tables": entries}, indent=1) + "\n", encoding="utf-8")
        SAMPLE.write_text(json.dumps(sample) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
