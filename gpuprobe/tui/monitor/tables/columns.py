"""Which columns of a table fit. Knows nothing of Textual."""

from __future__ import annotations

from collections.abc import Sequence

from gpuprobe.model.record import record


@record(frozen=True, slots=True)
class TableColumn:
    """``least`` and ``most``: how wide it may be. ``rank``: the lower, the sooner it gets a place,
    and it leaves ``spare`` columns free. ``sort``: what a click on its heading sorts by.
    """

    name: str
    heading: str
    least: int
    most: int
    rank: int
    numbers: bool = False
    sort: str = ""
    spare: int = 0


def lay_out(columns: Sequence[TableColumn], available: int) -> list[tuple[TableColumn, int]]:
    """The columns that fit, by rank, in their own order, and how wide each is. A
    gap of one column follows each.
    """
    widths: dict[str, int] = {}
    for column in sorted(columns, key=lambda column: column.rank):
        if column.least + 1 + column.spare <= available:
            widths[column.name] = column.least
            available -= column.least + 1
    most = {column.name: column.most for column in columns}
    growing = list(widths)
    while available > 0 and growing:
        growing = [name for name in growing if widths[name] < most[name]]
        for name in growing[:available]:
            widths[name] += 1
        available -= len(growing)
    return [(column, widths[column.name]) for column in columns if column.name in widths]
