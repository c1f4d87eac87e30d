"""The predicted step times of ``step_time_predictions.json`` beside the published ones.

    python benchmarks/step_time_compare.py [--predictions FILE] [--only TEXT] [--rows]

For each source and class: rows, median error, share within 15%, share inside the printed range, and
the share of ranges that are at most 30% wide, (high - low) / expected. An error is the predicted
over the published time, less one. ``--gpus``: also for each GPU. ``--rows``: print each row.
``docs/generate.py`` puts the tables into ``docs/verification/step-time.md``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
TRUTH = HERE / "step_time_truth.json"
PREDICTIONS = HERE / "step_time_predictions.json"
GOAL_CLASS = "training, dense, half precision, one node"
BFLOAT16 = ("amp_bf16", "bf16", "bfloat16")
NARROW = 0.3

Pair = tuple[Mapping[str, Any], Mapping[str, Any], float]
"""A row, its prediction, and its published time in milliseconds."""


def milliseconds(row: Mapping[str, Any]) -> float:
    """The published time of a step, of all its micro-batches."""
    measured = row["measured"]
    if "milliseconds" in measured:
        return float(measured["milliseconds"])
    if "tokens_per_second" in measured:
        return 1e3 * row["global_batch"] * row["sequence"] / measured["tokens_per_second"]
    if "tokens_per_second_per_gpu" in measured:
        tokens = row["global_batch"] * row["sequence"] / row["gpus"]
        return float(1e3 * tokens / measured["tokens_per_second_per_gpu"])
    for name in ("sequences_per_second", "samples_per_second", "images_per_second"):
        if name in measured:
            return float(1e3 * row["global_batch"] / measured[name])
    raise ValueError(f"{row['id']}: {sorted(measured)}")


def pairs(predictions: Path) -> tuple[list[Pair], list[tuple[Mapping[str, Any], str]]]:
    """Rows with a prediction, and the others with the reason."""
    found = json.loads(predictions.read_text())["rows"]
    both: list[Pair] = []
    without = []
    for row in json.loads(TRUTH.read_text())["rows"]:
        prediction = found.get(row["id"], {"refused": "not run"})
        if "refused" in prediction:
            without.append((row, prediction["refused"]))
        else:
            both.append((row, prediction, milliseconds(row)))
    return both, without


def error(pair: Pair) -> float:
    return float(pair[1]["expected_ms"] / pair[2] - 1)


def width(pair: Pair) -> float:
    _, prediction, _ = pair
    return float((prediction["high_ms"] - prediction["low_ms"]) / prediction["expected_ms"])


def figures(some: Sequence[Pair]) -> dict[str, Any]:
    count = len(some)
    return {
        "rows": count,
        "median": median(abs(error(pair)) for pair in some),
        "bias": median(error(pair) for pair in some),
        "within": sum(abs(error(pair)) <= 0.15 for pair in some) / count,
        "inside": sum(p["low_ms"] <= truth <= p["high_ms"] for _, p, truth in some) / count,
        "narrow": sum(width(pair) <= NARROW for pair in some) / count,
    }


HEAD = "| rows | median error | median, signed | within 15% | in the range | range up to 30% wide |"


def cells(some: Sequence[Pair]) -> str:
    of = figures(some)
    return (
        f"{of['rows']} | {of['median']:.1%} | {of['bias']:+.1%} | {of['within']:.0%} "
        f"| {of['inside']:.0%} | {of['narrow']:.0%}"
    )


def table(both: Iterable[Pair], names: Sequence[str]) -> list[str]:
    groups: dict[tuple[str, ...], list[Pair]] = {}
    for pair in both:
        groups.setdefault(tuple(pair[0][name] for name in names), []).append(pair)
    lines = ["| " + " | ".join(names) + " " + HEAD, "|" + " --- |" * (len(names) + 6)]
    for key in sorted(groups):
        lines.append("| " + " | ".join(key) + " | " + cells(groups[key]) + " |")
    return lines


def held_rows(both: Sequence[Pair]) -> list[Pair]:
    return [pair for pair in both if pair[0]["use"] == "held" and pair[0]["class"] == GOAL_CLASS]


def precision(row: Mapping[str, Any]) -> str:
    return "bfloat16" if row["precision"] in BFLOAT16 else "float16"


def many(row: Mapping[str, Any]) -> str:
    return "1" if row["gpus"] == 1 else "several"


def text_of(
    both: Sequence[Pair], without: Sequence[tuple[Mapping[str, Any], str]], by: str = "source"
) -> str:
    """Tables of held rows by precision and source, and of the others by class; with ``by`` "gpu",
    by source and GPU.
    """
    held = held_rows(both)
    lines = ["Held rows of training, dense, one node:", ""]
    names = dict.fromkeys(("source", by))
    if held:
        counted = [
            ({**row, "GPUs": many(row), "precision": precision(row)}, one, truth)
            for row, one, truth in held
        ]
        lines += [*table(counted, ("precision",)), "| both | " + cells(held) + " |", ""]
        lines += table(counted, ("precision", *names, "GPUs"))
    rest = [pair for pair in both if pair not in held]
    others = ("class", "use") if by == "source" else ("class", *names, "use")
    lines += ["", "The others:", "", *table(rest, others)]
    if without:
        reasons: dict[str, list[str]] = {}
        for row, reason in without:
            reasons.setdefault(reason.rpartition(": ")[2], []).append(row["source"])
        lines += ["", "Without a prediction:", ""]
        for reason, sources in sorted(reasons.items()):
            lines.append(f"- {len(sources)} {reason}: {', '.join(sorted(set(sources)))}")
    return "\n".join(lines)


def page() -> str:
    """The tables of ``docs/verification/step-time.md``."""
    return text_of(*pairs(PREDICTIONS))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--predictions", type=Path, default=PREDICTIONS)
    parser.add_argument("--only", default="", help="rows whose facts contain all these words")
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--gpus", action="store_true")
    options = parser.parse_args()
    both, without = pairs(options.predictions)
    words = options.only.split("/") if options.only else []
    both = [pair for pair in both if all(word in json.dumps(pair[0]) for word in words)]
    if options.rows:
        for row, prediction, truth in both:
            print(
                row["id"], row["gpu"], row["gpus"], row["program"], row["sequence"],
                row["micro_batch"], f"{truth:.1f} ms", f"{prediction['expected_ms']:.1f}",
                f"{prediction['expected_ms'] / truth - 1:+.1%}",
            )  # fmt: skip
    print(text_of(both, without, "gpu" if options.gpus else "source"))


if __name__ == "__main__":
    main()
