"""The largest value that fits, as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from gpuprobe.model.plans.fit import Fit, Trial
from gpuprobe.model.text import human_bytes
from gpuprobe.reporters.terminal import Style

__all__ = ["render", "write"]


def write(fit: Fit, stream: TextIO, cwd: str = "") -> None:
    stream.write("\n".join(render(fit, Style.of(stream, cwd=cwd))) + "\n")


def render(fit: Fit, style: Style) -> Iterator[str]:
    """The lines of the answer."""
    name = style.text(fit.argument)
    if fit.largest is None:
        yield style.heading(f"{fit.gpu}: not even {name} {fit.least} fits")
    else:
        yield style.heading(f"{fit.gpu}: {name} {fit.largest} is the largest that fits")
    if fit.proof is not None:
        yield f"  {_line(fit, fit.proof)}"
    elif fit.trials:
        yield f"  {_line(fit, fit.trials[0])}"
    if fit.beyond is not None:
        yield f"  {_line(fit, fit.beyond)}"
    elif fit.largest == fit.most:
        yield f"  larger ones were not tried: the search ended at {fit.most}"
    count = len(fit.trials)
    yield f"  {count} estimates; {name} was given {fit.applied}"
    if fit.unusual:
        listed = ", ".join(map(str, fit.unusual))
        yield from style.wrapped(
            f"more does not always need more here: the need falls at {listed}; a larger value "
            "may fit too",
            first="  ",
            rest="  ",
        )
    if fit.suggestions:
        yield ""
        at = fit.largest if fit.largest is not None else fit.least
        yield style.heading(f"What would help, estimated at {name} {at}")
        for row in fit.suggestions:
            change = human_bytes(row.after)
            if row.saved <= 0:
                yield f"  {row.name:<26} {change:>10}  saves nothing"
                continue
            further = row.largest is not None and row.largest > (fit.largest or 0)
            more = f", then {name} {row.largest} fits" if further else ""
            yield f"  {row.name:<26} {change:>10}  {human_bytes(row.saved)} less{more}"
            yield from style.wrapped(row.how, first="      ", rest="      ")
    if fit.not_tried:
        yield ""
        yield style.heading("Not tried")
        for line in fit.not_tried:
            yield from style.wrapped(line, first="  - ", rest="    ")


def _line(fit: Fit, trial: Trial) -> str:
    if trial.failed:
        return f"{fit.argument} {trial.value}: {trial.failed}"
    return (
        f"{fit.argument} {trial.value}: {trial.verdict}, needs up to {human_bytes(trial.needed)} "
        f"of {human_bytes(fit.capacity)}"
    )
