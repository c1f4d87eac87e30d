"""Replays and what-ifs of torch's own allocator are right.

A sample of ``benchmarks/allocator_against_torch.py``, which runs 10,000 random programs.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import allocator_against_torch
from allocator_against_torch import Outcome, kind_of
from allocator_requests import MACHINES, program_of

MACHINE = 1
"""256 MiB, of which programs may use all. Those of one process have one machine."""


def sample(count: int) -> list[int]:
    """The first programs that fit into one process."""
    fitting = (
        seed
        for seed in itertools.count()
        if (program := program_of(seed)).machine == MACHINE
        and program.segment_size == 20
        and "large_segment_size_mb" not in program.change
    )
    return list(itertools.islice(fitting, count))


def test_a_sample_of_random_programs() -> None:
    seeds = sample(40)
    assert not MACHINES[MACHINE].limited
    command = [sys.executable, allocator_against_torch.__file__, "--child", str(MACHINE)]
    command += ["--what-ifs", str(max(seeds) + 1), "--seeds", *map(str, seeds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes = [Outcome(**json.loads(line)) for line in done.stdout.splitlines()]
    ran = [outcome for outcome in outcomes if not outcome.fault]
    assert len(ran) >= 30  # the process ends where torch itself fails
    replays = [(kind_of(o.difference, o.undecided), o.difference) for o in ran]
    what_ifs = [
        (kind_of(o.what_if_difference, o.what_if_undecided), o.what_if_difference)
        for o in ran
        if o.what_if
    ]
    assert [difference for kind, difference in (*replays, *what_ifs) if kind == "wrong"] == []
    assert sum(kind == "exact" for kind, _ in replays) >= 20
    assert sum(kind == "exact" for kind, _ in what_ifs) >= 10
