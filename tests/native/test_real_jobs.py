"""Jobs of real processes on the native engine: the numbers of the CPU, and errors by name.

`benchmarks/native_jobs.py` runs all programs of ``job_programs``; here a part of them runs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import native_jobs
import pytest
import warm_python

pytestmark = pytest.mark.slow

TRUTH: dict[str, list[str]] = json.loads(native_jobs.TRUTH.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "name",
    ["all_reduce_operations", "all_to_all", "asynchronous", "gathers", "objects", "point_to_point"],
)
def test_collectives_carry_values(name: str) -> None:
    outcome = native_jobs.simulated(name, more=warm_python.ranks())
    assert outcome.code == 0, outcome.errors[-3000:]
    assert native_jobs.differences(outcome.lines, TRUTH[name]) == []


@pytest.mark.parametrize("name", ["ddp_uneven", "pipeline", "processes", "queue_of_tensors"])
def test_programs_take_the_path_of_the_cpu(name: str) -> None:
    outcome = native_jobs.simulated(name, more=warm_python.ranks())
    assert outcome.code == 0, outcome.errors[-3000:]
    assert native_jobs.differences(outcome.lines, TRUTH[name]) == []


def test_a_tensor_that_is_sent_keeps_its_values() -> None:
    """Without a request for all values: what is computed is known to both processes."""
    outcome = native_jobs.simulated("queue_of_tensors", "auto", more=warm_python.ranks())
    assert outcome.code == 0, outcome.errors[-3000:]
    assert native_jobs.differences(outcome.lines, TRUTH["queue_of_tensors"]) == []


def test_what_is_not_computed_is_unknown_in_all_processes_that_share_it(tmp_path: Path) -> None:
    (tmp_path / "send.py").write_text(
        """\
import torch, torch.multiprocessing as mp

def write(items, done):
    first, second = items.get(), items.get()
    print("received", first.tolist(), second.item(), flush=True)
    second.fill_(5.0)
    first.copy_(torch.randn(1 << 20, device="cuda").mean())  # not computed
    done.set()
    done.wait()

if __name__ == "__main__":
    spawn = mp.get_context("spawn")
    items, done = spawn.Queue(), spawn.Event()
    process = spawn.Process(target=write, args=(items, done))
    process.start()
    first, second = torch.full((2,), 3.0, device="cuda"), torch.randn(1 << 20, device="cuda").mean()
    items.put(first)
    items.put(second)
    done.wait()
    print("then", first.tolist(), second.item(), flush=True)
    process.join()
    first.zero_()
    print("last", first.tolist())
""",
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, "-m", "gpuprobe", "run", "--gpu", "t4", "--compute", "shapes", "send.py"],
        cwd=tmp_path, env=native_jobs.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "received [3.0, 3.0] nan", "then [nan, nan] 5.0", "last [0.0, 0.0]"
    ], done.stderr  # fmt: skip


def test_what_differs_is_found() -> None:
    lines = TRUTH["gathers"]
    changed = [re.sub(r"20", "21", line) for line in lines]
    assert native_jobs.differences(lines, lines) == []
    assert native_jobs.differences(changed, lines)
    assert native_jobs.differences(lines[1:], lines)


# One write for each line: torchrun's ranks are not buffered, and would mix their lines.
_PRINT = 'print = lambda *words, flush=True: sys.stdout.write(" ".join(map(str, words)) + "\\n")'
START = f"""\
import os, sys, time, torch, torch.distributed as dist; {_PRINT}
dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
values = torch.ones(8, device="cuda")
dist.all_reduce(values)
torch.cuda.synchronize()
"""


def run(text: str, folder: Path, *options: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    (folder / "job.py").write_text(START + text, encoding="utf-8")
    return subprocess.run(
        command(*options, ranks=ranks),
        cwd=folder,
        env={**native_jobs.environment(), **warm_python.ranks()},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def command(*options: str, ranks: int) -> list[str]:
    launcher = ["torchrun", "--standalone", "--nproc-per-node", str(ranks), "job.py"]
    python = warm_python.shared().python
    return [python, "-m", "gpuprobe", "run", "--gpu", "4xt4", *options, "--", *launcher]


CALL = r"\(sum of 8 float32\)"
WRONG = {
    # what the ranks do after START: what the first line about it reports
    "one_more": (
        "if rank == 0: dist.all_reduce(values)\ntorch.cuda.synchronize()",
        rf"rank 1 has (left the group|ended) without the all_reduce {CALL} that rank 0 called at "
        r".*job\.py:8; its last one was all_reduce .*job\.py:6",
    ),
    "one_more_and_no_wait": (
        "if rank == 0: dist.all_reduce(values)",
        rf"rank 1 has (left the group|ended) without the all_reduce {CALL} that rank 0 called",
    ),
    "size": (
        "dist.all_reduce(torch.ones(8 + rank, device='cuda'))\ntorch.cuda.synchronize()",
        r"different collectives: rank \d all_reduce \(sum of [89] float32\) at .*job\.py:8, and "
        r"rank \d all_reduce \(sum of [89] float32\) at .*job\.py:8",
    ),
    "dtype": (
        "dist.all_reduce(torch.ones(8, device='cuda', dtype=(torch.float, torch.half)[rank]))\n"
        "torch.cuda.synchronize()",
        r"different collectives: .*float32\).*float16\)|different .*float16\).*float32\)",
    ),
    "operation": (
        "dist.all_reduce(values, op=(dist.ReduceOp.SUM, dist.ReduceOp.MAX)[rank])\n"
        "torch.cuda.synchronize()",
        r"different collectives: .*maximum of 8",
    ),
    "order": (
        "calls = [lambda: dist.all_reduce(values), lambda: dist.broadcast(values, 0)]\n"
        "for call in calls if rank else reversed(calls): call()\n"
        "torch.cuda.synchronize()",
        r"different collectives: .*broadcast \(8 float32\)",
    ),
    "sizes_of_all_to_all": (
        "got = torch.empty(4, device='cuda')\n"
        "sizes = ([1, 3], [1, 3])[rank]\n"
        "dist.all_to_all_single(got, torch.ones(4, device='cuda'), sizes, sizes)\n"
        "torch.cuda.synchronize()",
        r"rank \d receives \d float32 at .*job\.py:10, and rank \d has sent \d float32",
    ),
    "each_waits_for_the_other": (
        "dist.recv(values, 1 - rank)\ntorch.cuda.synchronize()",
        r"all ranks of a group wait for each other: rank 0 waits for recv \(8 float32\) at "
        r".*job\.py:8, rank 1 waits for recv|rank \d waits for 8 float32 from rank \d",
    ),
    "graph_outlives_its_group": (
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph): dist.all_reduce(values)\n"
        "dist.destroy_process_group()",
        r"rank \d destroys a process group at .*job\.py:10 while a CUDA graph with collectives of "
        r"it exists, until whose end NCCL waits: delete the graph first",
    ),
    "nothing_sent": (
        "if rank == 0: dist.recv(values, 1)\ntorch.cuda.synchronize()",
        # before 2.15, torch makes a communicator of the two at the first message between them
        r"rank 1 has ended without joining the group of 2 ranks that rank 0 waits for at "
        r".*job\.py:8|rank 0 waits for 8 float32 from rank 1 at .*job\.py:8, which has "
        r"(left the group|ended) without sending them",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_collectives_are_named_and_end_the_job(name: str, tmp_path: Path) -> None:
    text, expected = WRONG[name]
    done = run(text, tmp_path, "--quiet")
    assert done.returncode == 5, done.stderr
    named = [line for line in done.stderr.splitlines() if line.startswith("gpuprobe: error: ")]
    assert re.search(expected, named[0]), named


def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    text = "if rank == 1: raise ValueError('unhappy')\ndist.all_reduce(values)\nprint(values)\n"
    done = run(text, tmp_path)
    assert done.returncode == 5
    last = [line for line in done.stderr.splitlines() if "torchrun exited with code 1" in line]
    failed = "gpuprobe: error: torchrun exited with code 1; rank 1 failed first"
    line = START.count("\n") + 1
    assert last == [f"{failed}: ValueError: unhappy (at {tmp_path / 'job.py'}:{line})"]
    assert "recording: job.gpuprobe" in done.stderr


@pytest.mark.parametrize(
    ("how", "told"),
    [("os.kill(os.getpid(), signal.SIGKILL)", "by SIGKILL"), ("os._exit(7)", "with code 7")],
)
def test_a_rank_that_is_killed_is_named(tmp_path: Path, how: str, told: str) -> None:
    (tmp_path / "rank.py").write_text(
        f"import os, signal, torch; torch.ones(8, device='cuda'); print(flush=True); {how}"
    )
    # as torchrun does, it looks later how a rank has ended
    (tmp_path / "launch.py").write_text("""\
import os, subprocess, sys, time
place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
rank = subprocess.Popen([sys.executable, "rank.py"], env={**os.environ, **place})
os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
time.sleep(0.5)
sys.exit(rank.wait() != 0)
""")
    done = subprocess.run(
        [warm_python.shared().python, "-m", "gpuprobe", "run", "--gpu", "2xt4", "--quiet",
         "--", sys.executable, "launch.py"],
        cwd=tmp_path, env=native_jobs.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 5, done.stderr
    assert done.stderr.splitlines()[-1] == (
        f"gpuprobe: error: {sys.executable} exited with code 1; rank 1 ended first, {told}"
    )


def test_a_command_is_recorded_as_its_ranks(tmp_path: Path) -> None:
    text = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512).cuda())
optimizer = torch.optim.Adam(model.parameters())
for step in range(3):
    model(torch.randn(8, 512, device="cuda")).sum().backward()
    optimizer.step()
"""
    done = run(text, tmp_path, "-o", "asked.gpuprobe")
    assert done.returncode == 0, done.stderr
    assert re.search(r"peak: .* allocated on cuda:\d, in rank \d", done.stderr), done.stderr
    assert [path.name for path in tmp_path.glob("*.gpuprobe")] == ["asked.gpuprobe"]
    report = subprocess.run(
        [sys.executable, "-m", "gpuprobe", "report", "--json", "asked.gpuprobe"],
        cwd=tmp_path, env=native_jobs.environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(report.stdout)
    assert {row["rank"] for row in found["ranks"]} == {0, 1}
    assert found["session"]["argv"] == ["job.py"]


def test_interrupting_a_job_ends_all_of_it(tmp_path: Path) -> None:
    text = """
open(f"{os.getpid()}.pid", "w").close()
while True:
    dist.all_reduce(values)
    torch.cuda.synchronize()
    time.sleep(0.01)
"""
    (tmp_path / "job.py").write_text(START + text, encoding="utf-8")
    with subprocess.Popen(
        command(ranks=4), cwd=tmp_path, env={**native_jobs.environment(), **warm_python.ranks()},
        start_new_session=True, stderr=subprocess.PIPE, text=True,
    ) as job:  # fmt: skip
        while len(list(tmp_path.glob("*.pid"))) < 4 and job.poll() is None:
            time.sleep(0.1)
        os.killpg(job.pid, signal.SIGINT)
        _, errors = job.communicate(timeout=200)
    assert job.returncode == 130, errors
    assert "gpuprobe: error: torchrun was interrupted" in errors
    for path in tmp_path.glob("*.pid"):
        assert not Path("/proc", path.stem).exists()


def test_a_command_that_fails_to_start_a_job_has_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpuprobe", "run", "--gpu", "t4", "--", "torchrun", "--nosuch"],
        cwd=tmp_path, env=native_jobs.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    own = [line for line in done.stderr.splitlines() if line.startswith("gpuprobe:")]
    assert done.returncode == 2
    assert own == [
        "gpuprobe: error: torchrun exited with code 2",
        "gpuprobe: nothing was recorded: no process used a GPU through torch",
    ]


def test_a_job_that_fails_prints_what_it_prints_alone_and_one_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(2))
x = torch.ones(10, device="cuda" if torch.cuda.is_available() else "cpu")
torch.ops.aten.add(x, torch.ones(3, device=x.device))
""",
        encoding="utf-8",
    )

    def printed(*words: str) -> list[str]:
        done = subprocess.run(
            [*words, "torchrun", "train.py"],
            cwd=tmp_path, env={**native_jobs.environment(), **warm_python.ranks()},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == (5 if words else 1)
        varying = re.compile(r"^[WE]\d{4} \S+ \d+|\d{4}-\d\d-\d\d_\S+|pid: \d+")
        return [varying.sub("", line) for line in done.stderr.splitlines()]

    python = warm_python.shared().python
    recorded = printed(python, "-m", "gpuprobe", "run", "--quiet", "--gpu", "t4", "--")
    assert "torch/_ops.py" in "".join(recorded)
    *lines, own = recorded
    assert lines == printed()
    assert own.startswith(
        "gpuprobe: error: torchrun exited with code 1; the program failed first: "
        "RuntimeError: The size of tensor a"
    )


def test_graphs_replay_collectives_among_computed_operators(tmp_path: Path) -> None:
    text = """
x = torch.full((4,), float(rank + 1), device="cuda")
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    y = x * 2; dist.all_reduce(y); z = y + 1
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = x * 2; dist.all_reduce(y); z = y + 1
for value in (5, 1):
    x.fill_(rank + float(value))
    graph.replay()
    print(f"rank {rank}: {z.tolist()}", flush=True)
import threading
waiting = threading.Thread(target=dist.destroy_process_group)  # for the graph's end, as in NCCL
waiting.start()
waiting.join(0.2)
print(f"rank {rank} waits: {waiting.is_alive()}", flush=True)
del graph
waiting.join()
"""
    done = run(text, tmp_path, "--quiet")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        own = [line for line in done.stdout.splitlines() if line.startswith(f"rank {rank}:")]
        assert own == [f"rank {rank}: {[23.0] * 4}", f"rank {rank}: {[7.0] * 4}"]
        assert f"rank {rank} waits: True" in done.stdout


@pytest.mark.parametrize(("compute", "elements"), [("shapes", 1 << 20), ("auto", 1 << 27)])
def test_unknown_values_stay_unknown_in_other_ranks(
    tmp_path: Path, compute: str, elements: int
) -> None:
    text = (
        f"large = torch.randn({elements}, device='cuda')"
        """
known = torch.full((4,), float(rank + 1), device="cuda")
dist.all_reduce(known)
mean = large.mean()  # not computed
if rank == 1:
    mean = torch.full((), 2.0, device="cuda")
dist.all_reduce(mean)
print(f"rank {rank}: {known.tolist()} {mean.item()}", flush=True)
dist.destroy_process_group()
"""
    )
    done = run(text, tmp_path, "--compute", compute)
    assert done.returncode == 0, done.stderr
    assert "numbers that were not computed are printed as nan" in done.stderr
    for rank in range(2):
        assert f"rank {rank}: [3.0, 3.0, 3.0, 3.0] " in done.stdout
        assert f"rank {rank}: [3.0, 3.0, 3.0, 3.0] 2.0" not in done.stdout


def test_every_start_method_computes_values(tmp_path: Path) -> None:
    """Also where a program replaces PYTHONPATH, and in a Python without ``sitecustomize``."""
    (tmp_path / "start.py").write_text(
        """\
import os, subprocess, sys
part = "import torch; print(torch.full((4,), 2.0, device='cuda').sum().item())"
for flags, more in (([], {}), ([], {"PYTHONPATH": "other"}), (["-I"], {})):
    command = [sys.executable, *flags, "-c", part]
    done = subprocess.run(command, env={**os.environ, **more}, capture_output=True, text=True)
    print(done.stdout.strip(), "values are not computed" in done.stderr)
""",
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, "-m", "gpuprobe", "run", "-q", "--gpu", "t4", "start.py"],
        cwd=tmp_path, env=native_jobs.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines()[:2] == ["8.0 False", "8.0 False"], done.stderr
    assert done.stdout.splitlines()[2].endswith("True")
