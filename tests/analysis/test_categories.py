"""Categories from stacks and lifetimes: each rule, and the real snapshots."""

from __future__ import annotations

from pathlib import Path

import pytest
from analysis_programs import MIB, Script
from shared_files import shared_snapshots

from gpuprobe.analysis.peak.peaks import by_category, high_water, live_at
from gpuprobe.analysis.trace.categories import categories
from gpuprobe.analysis.trace.ledger import ledger_of
from gpuprobe.model.memory import Category
from gpuprobe.model.trace import Annotation
from gpuprobe.recording.snapshot.load import read_snapshot

TORCH = "/v/lib/python3.11/site-packages/torch"
TRAIN = ("/home/u/train.py", 30, "main")
MODEL = ("/home/u/model.py", 8, "forward")
CALL = (f"{TORCH}/nn/modules/module.py", 1750, "_call_impl")
APPLY = (f"{TORCH}/nn/modules/module.py", 900, "_apply")
OPTIMIZER = (f"{TORCH}/optim/optimizer.py", 493, "wrapper")
ENGINE = ("", 0, "torch::autograd::Engine::thread_main(std::shared_ptr<GraphTask> const&)")
ACCUMULATE = ("", 0, "torch::autograd::AccumulateGrad::apply(std::vector<at::Tensor>&&)")
WORKSPACE = ("", 0, "at::cuda::getNewWorkspace()")
COPY = ("", 0, "at::_ops::_to_copy::call(at::Tensor const&)")
LOADER = (f"{TORCH}/utils/data/dataloader.py", 700, "__next__")


class Training(Script):
    """A training program written by hand: each method allocates like one part of it."""

    def build(self, size: int) -> int:
        return self.alloc(size, stack=self.stack(APPLY, TRAIN))

    def forward(self, size: int) -> int:
        return self.alloc(size, stack=self.stack(MODEL, CALL, TRAIN))

    def plain(self, size: int) -> int:
        return self.alloc(size, stack=self.stack(TRAIN))

    def backward(self, size: int, *more: tuple[str, int, str]) -> int:
        return self.alloc(size, stack=self.stack(*more, ENGINE))

    def optimizer(self, size: int) -> int:
        return self.alloc(size, stack=self.stack(("/home/u/adam.py", 3, "step"), OPTIMIZER, TRAIN))

    def found(self) -> dict[int, str]:
        """Category by requested size: sizes are used once each."""
        ledger = ledger_of(self.trace)
        rows = range(len(ledger))
        return {
            ledger.requested[row]: Category.from_code(code).value
            for row, code in zip(rows, categories(ledger, rows), strict=True)
        }


def test_the_blocks_of_a_training_step_are_classified() -> None:
    t = Training()
    t.build(1)
    t.free(t.build(2))  # moved on, such as the CPU copy of .to("cuda")
    batch = t.alloc(3, stack=t.stack(COPY, TRAIN))
    loaded = t.alloc(4, stack=t.stack(LOADER, TRAIN))
    t.free(t.forward(5))
    saved = [t.forward(6), t.plain(7)]
    logits, loss = t.forward(8), t.plain(9)
    t.alloc(10, stack=t.stack(WORKSPACE, MODEL, CALL, TRAIN))
    t.free(t.backward(11))
    grad, other_grad = t.backward(12), t.backward(13, ACCUMULATE)
    for address in saved:
        t.free(address)
    t.backward(14, WORKSPACE)
    t.free(t.backward(15))
    t.optimizer(16)
    t.free(t.optimizer(17))
    for address in (grad, other_grad):
        t.free(address)
    t.forward(18)
    for address in (batch, loaded, logits, loss):
        t.free(address)
    assert t.found() == {
        1: "parameter",
        2: "temporary",
        3: "input",
        4: "input",
        5: "temporary",
        6: "activation",
        7: "activation",
        8: "activation",
        9: "unknown",  # outlived the backward pass, outside any module: no evidence
        10: "workspace",
        11: "autograd_detail",
        12: "gradient",
        13: "gradient",
        14: "workspace",
        15: "autograd_detail",
        16: "optimizer_state",
        17: "temporary",
        18: "activation",
    }


@pytest.mark.parametrize("work", [True, False])
def test_only_a_block_that_stays_is_a_workspace_by_its_size(work: bool) -> None:
    t = Training()
    if work:
        t.forward(1)
    freed = t.plain(8_519_680)
    t.free(freed)
    assert t.found()[8_519_680] != "workspace"
    t = Training()
    if work:
        t.forward(1)
    t.plain(8_519_680)
    t.plain(8_519_681)
    assert t.found()[8_519_680] == "workspace"
    assert t.found()[8_519_681] != "workspace"


def test_the_buckets_of_data_parallel_are_no_parameters() -> None:
    t = Training()
    t.alloc(1, stack=t.stack((f"{TORCH}/nn/parallel/distributed.py", 800, "__init__"), TRAIN))
    t.alloc(2, stack=t.stack((f"{TORCH}/nn/init.py", 40, "normal_"), TRAIN))
    t.optimizer(3)
    found = t.found()
    assert (found[1], found[2]) == ("unknown", "parameter")


def test_without_any_evidence_all_is_unknown() -> None:
    t = Training()
    t.before(1)
    t.free(t.alloc(2))
    t.alloc(3)
    assert set(t.found().values()) == {"unknown"}


def test_a_recorded_category_wins() -> None:
    t = Training()
    t.before(1, category=Category.BUFFER)
    t.alloc(2, stack=t.stack(OPTIMIZER), category=Category.OTHER)
    t.optimizer(3)
    assert t.found() == {1: "buffer", 2: "other", 3: "optimizer_state"}


def test_recorded_phases_replace_missing_stacks() -> None:
    t = Training()
    kept = t.alloc(1, phase="forward")
    t.free(t.alloc(2, phase="forward/attention"))
    t.alloc(3, phase="backward")
    t.free(kept)
    t.free(t.alloc(4, phase="backward"))
    t.alloc(5, phase="optimizer")
    t.alloc(6, phase="data")
    assert t.found() == {
        1: "activation",
        2: "temporary",
        3: "gradient",
        4: "autograd_detail",
        5: "optimizer_state",
        6: "input",
    }


def test_stacks_of_python_only_leave_the_autograd_thread_without_frames() -> None:
    t = Training()
    saved = t.forward(1)
    t.free(t.forward(2))
    t.free(t.alloc(3))
    t.alloc(4)
    t.free(saved)
    t.optimizer(5)
    t.forward(6)
    assert t.found() == {
        1: "activation",
        2: "temporary",
        3: "autograd_detail",
        4: "gradient",
        5: "optimizer_state",
        6: "activation",
    }


def test_annotated_optimizer_steps_count_without_optimizer_frames() -> None:
    t = Training()
    t.forward(1)
    begin = t.tick()
    t.plain(2)
    t.free(t.plain(3))
    t.trace.annotations = (
        Annotation("START", "Optimizer.step#X.step", begin),
        Annotation("END", "Optimizer.step#X.step", t.tick()),
    )
    t.forward(4)
    assert t.found() == {
        1: "activation",
        2: "optimizer_state",
        3: "temporary",
        4: "activation",
    }


def test_a_trace_that_ends_inside_backward_uses_earlier_steps() -> None:
    t = Training()
    for _ in range(2):
        t.forward(1)
        t.free(t.backward(2))
        t.free(t.backward(2))
        gradient = t.backward(3, ("", 0, "at::mm"))
        t.optimizer(4)
        t.free(gradient)
    t.forward(5)
    t.backward(2)
    t.backward(3, ("", 0, "at::mm"))
    t.backward(6, ACCUMULATE)
    t.backward(7)
    found = t.found()
    assert (found[2], found[3]) == ("autograd_detail", "gradient")
    assert found[6] == "gradient"
    assert found[7] == "unknown"


def test_the_baseline_is_classified_by_its_end() -> None:
    t = Training()
    parameters = [t.before(size) for size in (100, 200)]
    replaced = t.before(300)
    t.before(8_519_680)
    t.before(400)
    t.before(500)
    t.before(500)
    t.forward(1)
    for size in (100, 200, 500):  # gradients: one of 500, but two old blocks of 500
        t.backward(size)
    t.optimizer(2)
    t.free(replaced)
    t.optimizer(3)
    assert len(parameters) == 2
    mark = live_at(t.trace, -1)
    names = [Category.from_code(code).value for code in mark.category]
    assert dict(zip(mark.size, names, strict=True)) == {
        100: "parameter",
        200: "parameter",
        300: "optimizer_state",
        8_519_680: "workspace",
        400: "unknown",
        500: "unknown",
    }


SNAPSHOTS = {path.stem: path for path in shared_snapshots()}
# Blocks and requested bytes that the program must have: 291 and 219 parameter tensors, as many
# gradients, and AdamW's two moments for each.
EXPECTED = {
    "lm_ctx128_train_step": (291, 13_627_238_400),
    "lm_medium_ctx256_train": (219, 1_692_733_440),
}


@pytest.mark.skipif(not SNAPSHOTS, reason="the shared snapshots are not on this machine")
@pytest.mark.parametrize("name", EXPECTED)
def test_adamw_holds_two_moments_and_a_gradient_per_parameter(name: str) -> None:
    (trace,) = _traces(SNAPSHOTS[name])
    ledger = ledger_of(trace)
    last = ledger.events - 1
    count, size = EXPECTED[name]
    requested: dict[str, list[int]] = {}
    for code, row in zip(live_at(ledger, last).category, ledger.alive(last), strict=True):
        requested.setdefault(Category.from_code(code).value, []).append(ledger.requested[row])
    for category, times in (("parameter", 1), ("gradient", 1), ("optimizer_state", 2)):
        assert len(requested[category]) == times * count
        assert sum(requested[category]) == times * size
    # What is left without evidence is little, and not hidden.
    assert 0 < sum(requested["unknown"]) < 2 * MIB


@pytest.mark.skipif(not SNAPSHOTS, reason="the shared snapshots are not on this machine")
@pytest.mark.parametrize("name", ["lm_ctx128_forward", "lm_ctx256_forward_bf16"])
def test_a_forward_pass_leaves_activations(name: str) -> None:
    (trace,) = _traces(SNAPSHOTS[name])
    mark = high_water(trace)
    shares = {share.key: share.bytes for share in by_category(mark)}
    made = mark.allocated - mark.baseline_bytes
    workspaces = shares["workspace"] + shares.get("temporary", 0)
    assert shares["activation"] >= made - workspaces
    # Nothing says what the memory from before was: it is not called parameters.
    assert "parameter" not in shares


@pytest.mark.skipif(not SNAPSHOTS, reason="the shared snapshots are not on this machine")
def test_inference_allocates_only_temporaries() -> None:
    (trace,) = _traces(SNAPSHOTS["lm_medium_ctx256_inference"])
    mark = high_water(trace)
    shares = {share.key: share.bytes for share in by_category(mark)}
    assert shares["temporary"] == mark.allocated - mark.baseline_bytes
    assert shares["workspace"] == 8_519_680


def _traces(path: Path) -> list:  # type: ignore[type-arg]
    return list(read_snapshot(path).ranks[0].traces)


def test_recomputed_blocks_that_are_freed_at_once_are_temporary() -> None:
    again = (f"{TORCH}/utils/checkpoint.py", 1120, "recompute_fn")
    t = Training()
    t.forward(1)
    t.backward(2)
    detail = t.alloc(3, stack=t.stack(MODEL, CALL, again, ENGINE))
    t.alloc(4, stack=t.stack(MODEL, CALL, again, ENGINE))
    t.free(detail)
    kept = t.alloc(5, stack=t.stack(MODEL, CALL, again, ENGINE))
    t.backward(6)
    t.free(kept)
    found = t.found()
    assert (found[3], found[4], found[5]) == ("temporary", "activation", "activation")


def test_blocks_of_the_ddp_reducer_are_buckets() -> None:
    """C++ code allocates: the innermost Python frame is a function of DistributedDataParallel."""
    reducer = (f"{TORCH}/nn/parallel/distributed.py", 1200, "_ddp_init_helper")
    t = Training()
    t.alloc(1, stack=t.stack(reducer, TRAIN))
    t.alloc(2, stack=t.stack(MODEL, CALL, reducer, TRAIN))
    found = t.found()
    assert (found[1], found[2]) == ("gradient_bucket", "activation")
