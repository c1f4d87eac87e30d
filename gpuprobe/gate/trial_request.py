"""What a check and the process of its trials exchange."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class TrialRequest:
    """What is run: as `gpuprobe.api.check.measure` takes it, in the copy ``tree`` of the project
    ``root``. ``folder``: the working directory, in the copy. ``seconds``: after which it is
    ended. ``result``: the file that gets the figures. ``test``: the node id of a test of pytest,
    whose options ``arguments`` are then."""

    tree: str
    root: str
    folder: str
    target: str
    arguments: list[str]
    module: bool
    virtual: str | None
    hazards: bool
    steps: int | None
    compute: str
    engine: str
    seconds: float
    result: str
    test: str = ""

    def line(self) -> str:
        """As the server reads it."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class TrialFigures:
    """What a run took: metrics and phases as a baseline has them; or why it was not measured."""

    metrics: dict[str, int]
    phases: dict[str, int]
    failed: str = ""
