"""Launches counted on the native engine: closed-form counts, and the runtime's own log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import native_commands
import pytest

import gpuprobe
from gpuprobe.analysis.launches import launches_of
from gpuprobe.model.run.launches import LaunchKind, LaunchReport

pytestmark = pytest.mark.slow

START = """\
import gpuprobe, sys
with gpuprobe.virtual_gpu("h100-80gb", compute=sys.argv[1]):
    import torch
"""
ADDS = """
    small = torch.zeros(1000, device="cuda")
    large = torch.zeros(1 << 20, device="cuda")
    with gpuprobe.record("r.gpuprobe", level="trace") as recorder:
        for adds, products in ((5, 0), (7, 3)):
            with recorder.step():
                with recorder.phase("adds"):
                    for _ in range(adds):
                        small += 1  # adds
                with recorder.phase("products"):
                    for _ in range(products):
                        large *= 2  # products
"""
ADD = "CUDAFunctorOnSelf_add<float>"
MATRICES = """
    a = torch.ones(64, 64, device="cuda")
    with gpuprobe.record("r.gpuprobe", level="trace") as recorder, recorder.step():
        for _ in range(6):
            a @ a  # products
"""
BACKWARD = """
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Identity()
            self.w = torch.nn.Parameter(torch.ones(100, device="cuda"))
        def forward(self, x):
            return self.inner(self.w * x).sin()  # sin
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, foreach=False)
    x = torch.ones(100, device="cuda")
    with gpuprobe.record("r.gpuprobe", model=net, optimizer=optimizer, level="trace"):
        for _ in range(3):
            net(x).sum().backward()  # backward
            optimizer.step()  # step
            optimizer.zero_grad()
"""
GRAPH = """
    x = torch.ones(1000, device="cuda")
    y = torch.empty_like(x)
    graph = torch.cuda.CUDAGraph()
    with gpuprobe.record("r.gpuprobe", level="trace") as recorder:
        with recorder.step():
            with torch.cuda.graph(graph):
                for _ in range(4):
                    x += 1
                y.copy_(x)  # by the driver, which is no kernel
        with recorder.step():
            for _ in range(3):
                graph.replay()  # replays
"""
GENERATE = """
    import transformers
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=100, bos_token_id=None, eos_token_id=None)
    model = transformers.LlamaForCausalLM(config).cuda().bfloat16().eval()
    prompt = torch.ones(2, 16, dtype=torch.long, device="cuda")
    class Shift(transformers.LogitsProcessor):
        def __call__(self, ids, scores):
            return scores + 1  # shift
    options = dict(do_sample=False, logits_processor=[Shift()], pad_token_id=0)
    with gpuprobe.record("r.gpuprobe", level="trace"):
        for tokens in (5, 9):
            made = model.generate(prompt, max_new_tokens=tokens, **options)  # generates
            made + 1  # after
"""
KERNEL = """\
import triton, triton.language as tl
@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)
"""
TRITON = """
    import kernel
    x = torch.ones(1000, device="cuda")
    with gpuprobe.record("r.gpuprobe", level="trace") as recorder, recorder.step():
        for _ in range(2):
            kernel.double[(4,)](x, 1000, BLOCK=256)  # triton
"""
COMPILED = """
    import torch._inductor.config
    torch._inductor.config.force_disable_caches = True
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()).cuda()
    def loss_of(x):
        y = net(x)
        return (y.sin() + 1).sum()  # compiled
    run = torch.compile(loss_of)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x = torch.ones(64, 64, device="cuda")
    with gpuprobe.record("r.gpuprobe", model=net, optimizer=optimizer, level="trace"):
        for _ in range(3):
            run(x).backward()
            optimizer.step()
"""
COLLECTIVES = """
    import os, torch.distributed as dist
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    x = torch.ones(10, device="cuda")
    dist.all_reduce(x)
    with gpuprobe.record("r.gpuprobe", level="trace") as recorder, recorder.step():
        for _ in range(3):
            dist.all_reduce(x)  # reduces
    dist.destroy_process_group()
"""
TRAINING = """
    from collections import Counter
    import json
    from gpuprobe.native.names import readable
    from gpuprobe.native.process import LogKind, loaded
    runtime = loaded()
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(2, 16, 64, device="cuda")
    with gpuprobe.record("r.gpuprobe", model=model, optimizer=optimizer, level="trace"):
        for _ in range(3):
            runtime.start_log()
            model(x).square().mean().backward()
            optimizer.step()
            runtime.stop_log()
            log = [call for call in runtime.take_log()
                   if call.kind in (LogKind.LAUNCH, LogKind.LIBRARY)]
            optimizer.zero_grad()
    print(json.dumps(sorted(
        (readable(call.name), list(call.grid) if call.kind is LogKind.LAUNCH else [],
         list(call.block) if call.kind is LogKind.LAUNCH else []) for call in log)))
"""
UNCHANGED = """
    import contextlib, gc, json, weakref
    from collections import Counter
    from gpuprobe.native.process import loaded
    runtime = loaded()
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(2, 8, 32, device="cuda")
    recorded = contextlib.nullcontext()
    if sys.argv[2] == "recorded":
        recorded = gpuprobe.record(
            "r.gpuprobe", model=model, optimizer=optimizer, level="trace", trace_steps="all"
        )
    gc.disable()
    with recorded:
        for _ in range(4):
            runtime.start_log()
            y = model(x)
            freed = weakref.ref(y)
            loss = y.square().mean()
            loss.backward()
            del y
            optimizer.step()
            runtime.stop_log()
            calls = Counter((call.kind.name, call.name, call.bytes) for call in runtime.take_log())
            # What the recorder does itself: events at the edges of phases.
            kept = sorted((*key, n) for key, n in calls.items() if not key[0].startswith("EVENT"))
            print(loss.item().hex(), freed() is None, sys.getrefcount(loss))
            print(json.dumps(kept))
            optimizer.zero_grad()
    print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    print(torch.cuda.get_rng_state().sum().item(), torch.rand(3, device="cuda").tolist())
"""


def python(program: str, folder: Path, *arguments: str) -> str:
    """What a program prints."""
    (folder / "program.py").write_text(START + program, encoding="utf-8")
    (folder / "kernel.py").write_text(KERNEL, encoding="utf-8")
    done = native_commands.python("program.py", *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(program: str, folder: Path, compute: str = "real") -> tuple[dict[str, Any], str]:
    """The launches of the report, and what the program prints."""
    printed = python(program, folder, compute)
    report = native_commands.gpuprobe("report", "--json", "r.gpuprobe", cwd=folder)
    found: dict[str, Any] = json.loads(report.stdout)
    faults = [spot for spot in found["blind_spots"] if "fault" in spot["what"]]
    assert faults == []
    return found["launches"], printed


def line(program: str, comment: str) -> int:
    return (START + program).split(f"# {comment}")[0].count("\n") + 1


@pytest.mark.parametrize("compute", ["real", "shapes"])
def test_each_operator_in_place_is_one_launch(compute: str, tmp_path: Path) -> None:
    found, _ = run(ADDS, tmp_path, compute)
    assert found["steps"] == [{"step": 0, "count": 5}, {"step": 1, "count": 10}]
    adds, products = found["rows"]
    assert (adds["count"], adds["phase"], adds["line"]) == (7, "adds", line(ADDS, "adds"))
    assert ADD in adds["kernel"]
    assert adds["grid"] == [1, 1, 1]
    assert adds["tiny"]
    assert (products["count"], products["phase"]) == (3, "products")
    assert products["line"] == line(ADDS, "products")
    threads = products["grid"][0] * products["block"][0]
    assert (1 << 20) % threads == 0  # each thread has the same number of elements
    assert not products["tiny"]
    assert (found["kernels"], found["tiny"], found["mergeable"]) == (10, 7, 10)
    assert found["multiprocessors"] == 132


def test_a_product_of_matrices_is_one_call_of_the_library(tmp_path: Path) -> None:
    found, _ = run(MATRICES, tmp_path)
    (row,) = found["rows"]
    assert (row["kind"], row["count"], row["grid"]) == ("library", 6, [])
    assert row["kernel"].startswith("cublas")
    assert row["line"] == line(MATRICES, "products")
    assert (found["count"], found["library"], found["kernels"]) == (6, 6, 0)


def test_generate_shows_the_launches_of_each_token(tmp_path: Path) -> None:
    python(GENERATE, tmp_path, "real")
    (rank,) = gpuprobe.load(tmp_path / "r.gpuprobe").ranks
    for step, tokens in ((0, 5), (1, 9)):  # the first call began before its model was known
        found = launches_of(rank, step)
        assert isinstance(found, LaunchReport)
        assert found.decoded == tokens - 1
        decoding = [row for row in found.rows if row.decoding]
        library = [row for row in decoding if row.kind is LaunchKind.LIBRARY]
        products = [row for row in library if row.kernel.startswith("cublas")]
        # Seven linear layers of each decoder layer, and the head: each is one call of cuBLAS.
        assert sum(row.count for row in products) == (7 * 3 + 1) * found.decoded
        heads = [row for row in products if row.module == "LlamaForCausalLM.lm_head"]
        assert sum(row.count for row in heads) == found.decoded
        lines = {str(row.place).partition(" ")[0].rpartition(":")[2] for row in decoding}
        expected = {line(GENERATE, "generates"), line(GENERATE, "shift")}
        assert lines == {str(number) for number in expected}
        shifts = [row for row in found.rows if f":{line(GENERATE, 'shift')} " in str(row.place)]
        assert sum(row.count for row in shifts) == tokens  # one of them in the prefill
        assert sum(row.count for row in shifts if row.decoding) == tokens - 1
    shown = native_commands.gpuprobe("report", "-v", "r.gpuprobe", cwd=tmp_path).stdout
    assert "Launches per decoded token in step 1\n" in shown
    assert "mean of 8 tokens" in shown


def test_the_backward_pass_has_lines_and_modules(tmp_path: Path) -> None:
    found, _ = run(BACKWARD, tmp_path)
    rows = {
        (row["phase"], row["kernel"].partition("<4, ")[2].partition("(")[0]): row
        for row in found["rows"]
    }
    for phase, name in (("forward", "sin_kernel_cuda"), ("backward", "cos_kernel_cuda")):
        row = rows[phase, name]
        assert (row["count"], row["line"], row["module"]) == (1, line(BACKWARD, "sin"), "Net")
    optimizer = [row for row in found["rows"] if row["phase"] == "optimizer"]
    assert {row["line"] for row in optimizer} == {line(BACKWARD, "step")}
    assert {row["key"] for row in found["rows"]}.isdisjoint({"(unknown)", "(no user frame)"})


def test_a_graph_is_one_launch_of_all_its_kernels(tmp_path: Path) -> None:
    found, _ = run(GRAPH, tmp_path)
    assert found["steps"] == [{"step": 0, "count": 0}, {"step": 1, "count": 3}]
    (row,) = found["rows"]
    assert (row["kind"], row["count"], row["nodes"]) == ("graph", 3, 4)
    assert row["line"] == line(GRAPH, "replays")
    assert (found["graphs"], found["replayed"], found["kernels"]) == (3, 12, 0)


def test_a_kernel_of_triton_has_its_name(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    found, _ = run(TRITON, tmp_path, "shapes")
    (row,) = found["rows"]
    assert (row["kernel"], row["grid"], row["count"]) == ("double", [4, 1, 1], 2)
    assert row["line"] == line(TRITON, "triton")


def test_compiled_code_has_the_programs_lines(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    found, _ = run(COMPILED, tmp_path, "shapes")
    fused = [row for row in found["rows"] if row["kernel"].startswith("triton_")]
    assert {row["phase"] for row in fused} == {"forward", "backward"}
    assert line(COMPILED, "compiled") in {row["line"] for row in fused}
    assert "(unknown)" not in {row["key"] for row in found["rows"]}


def test_a_collective_is_one_call_of_nccl(tmp_path: Path) -> None:
    found, _ = run(COLLECTIVES, tmp_path)
    (row,) = (row for row in found["rows"] if row["kind"] == "collective")
    assert (row["kernel"], row["count"]) == ("ncclAllReduce", 3)
    assert row["line"] == line(COLLECTIVES, "reduces")
    assert found["collectives"] == 3


@pytest.mark.parametrize("compute", ["real", "shapes"])
def test_the_rows_are_the_runtimes_log(compute: str, tmp_path: Path) -> None:
    found, printed = run(TRAINING, tmp_path, compute)
    log = json.loads(printed)
    rows = sorted(
        [row["kernel"], row["grid"], row["block"]]
        for row in found["rows"]
        for _ in range(row["count"])
    )
    assert rows == log
    assert found["count"] == len(log) > 100
    assert {row["phase"] for row in found["rows"]} == {"forward", "backward", "optimizer"}


def test_counting_changes_no_program(tmp_path: Path) -> None:
    outputs = []
    for how in ("bare", "recorded"):
        (tmp_path / how).mkdir()
        outputs.append(python(UNCHANGED, tmp_path / how, "real", how))
    assert outputs[0] == outputs[1]
    assert "True 2\n" in outputs[0]  # nothing keeps a tensor
