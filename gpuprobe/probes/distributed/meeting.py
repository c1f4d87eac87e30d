"""The check of a distributed job from inside: every rank calls `check_ranks`.

The ranks meet in a ``TCPStore`` before any collective, so that the missing ones can be named: a
process group that waits for them could only time out. The next steps and the verdict are shared
through that store too, so that every rank ends with the same verdict.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from gpuprobe.errors import MissingExtra, UsageError
from gpuprobe.model.findings import Finding, Level
from gpuprobe.model.io.codec import from_plain, to_plain
from gpuprobe.model.machine.diagnosis import (
    ClockSkew,
    LinkSpeed,
    NotChecked,
    RankDiagnosis,
    RankPlace,
)
from gpuprobe.probes.distributed import collectives, rules
from gpuprobe.probes.distributed.rules import JobEnvironment, Member

if TYPE_CHECKING:
    from torch.distributed import Store

_CLOCK_ROUNDS = 8
_GRACE = 10.0  # seconds that other ranks wait longer than rank 0, for its decision


def check_ranks(environ: Mapping[str, str], timeout: float) -> RankDiagnosis:
    """See `gpuprobe.api.doctor.diagnose_ranks`."""
    job = read = rules.read_job(environ)
    if not isinstance(job, JobEnvironment):
        assert isinstance(read, tuple)
        text = environ.get("RANK", "")
        return RankDiagnosis(int(text) if text.isdecimal() else 0, findings=read)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
            import torch.distributed  # 2 s
    except ImportError as error:
        raise MissingExtra("torch", "torch", why="doctor --distributed") from error
    if torch.distributed.is_initialized():
        raise UsageError(
            "torch.distributed is in use in this process already",
            hint="run the check before init_process_group, or on its own",
        )
    started = RankDiagnosis(job.rank, job.world_size)
    opened = _open_store(job, timeout)
    if isinstance(opened, Finding):
        return replace(started, findings=(opened,))
    store, notes = opened
    meeting = _RankMeeting(store, job, timeout)
    try:
        return meeting.lead(started, notes) if job.rank == 0 else meeting.follow(started)
    except torch.distributed.DistError as error:
        lost = rules.COLLECTIVE.finding(
            f"rank {job.rank} lost the meeting point {job.address}:{job.port}",
            ("torch error", str(error).strip().splitlines()[0]),
            fix="Check the log of rank 0: did it or the launcher exit?",
            subject="meeting point",
        )
        return replace(started, findings=(*notes, lost))


def _open_store(job: JobEnvironment, timeout: float) -> tuple[Store, tuple[Finding, ...]] | Finding:
    """The store at the meeting point, or why it cannot be opened."""
    import torch.distributed as dist

    where = f"{job.address}:{job.port}"
    try:
        found = socket.getaddrinfo(job.address, job.port, type=socket.SOCK_STREAM)
    except OSError as error:
        return rules.UNREACHABLE.finding(
            f"MASTER_ADDR={job.address} cannot be resolved",
            ("resolver error", error.strerror or error),
            fix="Use an address or a name that all machines of the job can resolve.",
            code=f"getent hosts {job.address}",
            subject="address",
        )
    notes: tuple[Finding, ...] = ()
    listening: dict[str, int] = {}
    is_master = job.rank == 0 and not job.agent_store
    if is_master:
        taken = _listen(job, [(entry[0], entry[4]) for entry in found])
        if isinstance(taken, Finding):
            return taken
        listener, notes = taken
        listening = {"master_listen_fd": listener}
    try:
        store = dist.TCPStore(
            job.address,
            job.port,
            is_master=is_master,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            **listening,
        )
    except (dist.DistError, RuntimeError, TimeoutError) as error:
        return rules.UNREACHABLE.finding(
            f"rank {job.rank} cannot reach the meeting point {where} within {timeout:g} s",
            ("torch error", str(error).strip().splitlines()[0]),
            fix="Is rank 0 running, and does the firewall allow the port?",
            code=f"nc -vz {job.address} {job.port}",
            subject="connection",
        )
    return dist.PrefixStore(f"gpuprobe-doctor/{job.run}", store), notes


def _listen(
    job: JobEnvironment, addresses: list[tuple[int, tuple[object, ...]]]
) -> tuple[int, tuple[Finding, ...]] | Finding:
    """A listening socket for the store, only on the address that the ranks use if possible: torch
    alone would listen on all addresses.
    """
    problem: OSError | None = None
    for family, where in (*addresses, (socket.AF_INET, ("", job.port))):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(1024)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                return rules.PORT_TAKEN.finding(
                    f"port {job.port} of rank 0's machine is taken",
                    ("MASTER_PORT", job.port),
                    fix="Stop the program that listens there (an earlier job?), or choose "
                    "another MASTER_PORT.",
                    code=f"ss -ltnp 'sport = :{job.port}'",
                    subject=str(job.port),
                )
            problem = error
            continue
        if where[0]:
            return listener.detach(), ()
        note = rules.UNREACHABLE.finding(
            f"MASTER_ADDR={job.address} is not an address of rank 0's machine",
            ("system error", problem.strerror if problem else ""),
            fix="Ignore this if a service forwards the address; otherwise use rank 0's own "
            "address.",
            code="ip -brief address",
            subject="forwarded",
            level=Level.NOTE,
        )
        return listener.detach(), (note,)
    return rules.PORT_TAKEN.finding(
        f"rank 0 cannot listen on port {job.port}",
        ("system error", problem.strerror if problem else "no address"),
        fix="Choose a port above 1023 that this user may use.",
        subject=str(job.port),
    )


class _RankMeeting:
    """One rank's side of the protocol. Keys in the store:

    ``joined`` counts members, ``member/N`` describes one, ``claim/R`` is set when rank R has
    joined; ``plan`` is rank 0's decision on the next steps, ``clock/…`` the exchange of clocks,
    ``result/R`` the results of rank R, ``verdict`` all findings, ``left/R`` is set when R has read
    the verdict.
    """

    def __init__(self, store: Store, job: JobEnvironment, timeout: float) -> None:
        self.store = store
        self.job = job
        self.timeout = timeout
        self.me = _describe(job)

    def join(self) -> None:
        number = self.store.add("joined", 1)
        self.store.set(f"member/{number}", json.dumps(to_plain(self.me)))
        self.store.set(f"claim/{self.job.rank}", "")

    def lead(self, started: RankDiagnosis, notes: tuple[Finding, ...]) -> RankDiagnosis:
        """Run rank 0's part: wait for all ranks, decide, measure, and collect."""
        job = self.job
        self.join()
        self._wait([f"claim/{rank}" for rank in range(job.world_size)], self.timeout)
        members = self._members()
        findings = [*notes, *rules.check_members(job, members, self.timeout)]
        places = sorted(members, key=lambda member: member.rank)
        report = replace(
            started,
            joined=tuple(RankPlace(m.rank, m.local_rank, m.host, m.pid, m.device) for m in places),
            missing=rules.missing_ranks(job.world_size, members),
        )
        go = all(finding.level is not Level.ERROR for finding in findings)
        backend = "nccl" if all(member.device != "cpu" for member in members) else "gloo"
        self.store.set("plan", json.dumps({"go": go, "backend": backend}))
        if go:
            report = self._measure(report, backend, findings)
        else:
            later = (rules.COLLECTIVE, rules.WRONG, rules.SKEW)
            reason = "skipped until the errors above are fixed"
            report = replace(report, not_checked=tuple(NotChecked(rule, reason) for rule in later))
        report = replace(report, findings=tuple(_sorted(findings)))
        self._announce(report, [member.rank for member in places])
        return report

    def _measure(
        self, report: RankDiagnosis, backend: str, findings: list[Finding]
    ) -> RankDiagnosis:
        job = self.job
        steps = ["every rank joined", "the ranks agree on the job"]
        skews = [self._clock_skew(rank) for rank in range(1, job.world_size)]
        found = list(rules.check_skews([skew for skew in skews if skew is not None]))
        findings += found
        if not found and job.world_size > 1:
            steps.append("clocks agree")
        result = collectives.run_collectives(self.store, job, backend, self.timeout)
        self.store.set("result/0", json.dumps(result))
        keys = [f"result/{rank}" for rank in range(job.world_size)]
        self._wait(keys, self.timeout)
        results = {
            rank: json.loads(self.store.get(key)) if self.store.check([key]) else None
            for rank, key in enumerate(keys)
        }
        findings += collectives.check_results(results, backend)
        done = [result for result in results.values() if result is not None]
        if len(done) == job.world_size:
            steps += [step for step in done[0]["steps"] if all(step in r["steps"] for r in done)]
        found_links: tuple[LinkSpeed, ...] = ()
        if len(done) == job.world_size:
            times = {rank: result["link"] for rank, result in results.items() if result is not None}
            found_links = collectives.link_speeds(times)
            findings += collectives.check_links(found_links)
        return replace(
            report,
            backend=backend,
            links=found_links,
            steps=tuple(steps),
            skews=tuple(skew for skew in skews if skew is not None),
            speeds=collectives.speeds(done, job.world_size) if len(done) == job.world_size else (),
        )

    def _announce(self, report: RankDiagnosis, ranks: list[int]) -> None:
        """Publish the verdict, and wait until every rank has read it: the store may be in this
        process.
        """
        self.store.set("verdict", json.dumps([to_plain(found) for found in report.findings]))
        self._wait([f"left/{rank}" for rank in ranks if rank], self.timeout)

    def follow(self, started: RankDiagnosis) -> RankDiagnosis:
        """Run another rank's part: follow the plan of rank 0, and take its verdict."""
        self.join()
        if not self._wait(["plan"], 2 * self.timeout + _GRACE):
            return replace(started, findings=(self._leader_missing("did not join"),), missing=(0,))
        plan = json.loads(self.store.get("plan"))
        if plan["go"]:
            self._report_clock()
            result = collectives.run_collectives(
                self.store, self.job, plan["backend"], self.timeout
            )
            self.store.set(f"result/{self.job.rank}", json.dumps(result))
        if not self._wait(["verdict"], 2 * self.timeout + _GRACE):
            return replace(started, findings=(self._leader_missing("went away"),))
        findings = tuple(
            from_plain(Finding, entry) for entry in json.loads(self.store.get("verdict"))
        )
        self.store.set(f"left/{self.job.rank}", "")
        return replace(started, findings=findings, speaks=False)

    def _leader_missing(self, what: str) -> Finding:
        return rules.MISSING.finding(
            f"rank 0 of {self.job.world_size} {what}: rank {self.job.rank} timed out waiting for "
            "it",
            ("meeting point", f"{self.job.address}:{self.job.port}"),
            fix="Check the log of rank 0.",
            subject="0",
        )

    def _wait(self, keys: list[str], seconds: float) -> bool:
        """Wait for keys. False if one is not set in time, or the store is gone."""
        import torch.distributed as dist

        if not keys:
            return True
        try:
            self.store.wait(keys, timedelta(seconds=seconds))
        except (dist.DistError, RuntimeError):
            return False
        return True

    def _members(self) -> list[Member]:
        members = []
        for number in range(1, self.store.add("joined", 0) + 1):
            key = f"member/{number}"
            if self._wait([key], 1.0):  # counted, and described next
                members.append(from_plain(Member, json.loads(self.store.get(key))))
        return members

    # Clocks are compared as NTP does: the other clock is read between two readings of rank 0's own.
    # Rank 0 requests each reading, so that the other ranks wait only for it. The fastest round has
    # the smallest error.

    def _clock_skew(self, rank: int) -> ClockSkew | None:
        best: ClockSkew | None = None
        for number in range(_CLOCK_ROUNDS):
            before = time.time_ns()
            self.store.set(f"clock/{rank}/{number}/ask", "")
            key = f"clock/{rank}/{number}/answer"
            if not self._wait([key], self.timeout):
                return None
            theirs, after = int(self.store.get(key)), time.time_ns()
            error = (after - before + 1) // 2
            if best is None or error < best.error_ns:
                best = ClockSkew(rank, theirs - (before + after) // 2, error)
        return best

    def _report_clock(self) -> None:
        rank = self.job.rank
        # Rank 0 queries one rank after the other.
        patience = self.timeout + _GRACE
        for number in range(_CLOCK_ROUNDS):
            if not self._wait([f"clock/{rank}/{number}/ask"], patience):
                return  # rank 0 is gone, which the wait for the verdict reports
            self.store.set(f"clock/{rank}/{number}/answer", str(time.time_ns()))


def _describe(job: JobEnvironment) -> Member:
    import torch

    device = "cpu"
    if torch.cuda.is_available():
        uuid = getattr(torch.cuda.get_device_properties(collectives.ordinal(job)), "uuid", None)
        device = f"GPU-{uuid}" if uuid is not None else f"cuda:{collectives.ordinal(job)}"
    return Member(
        job.rank,
        job.world_size,
        job.local_rank,
        socket.gethostname(),
        os.getpid(),
        device,
        str(torch.__version__),
    )


def _sorted(findings: list[Finding]) -> list[Finding]:
    order = list(Level)
    return sorted(findings, key=lambda finding: order.index(finding.level))
