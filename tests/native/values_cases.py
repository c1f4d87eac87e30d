"""Small programs about the rules of values on the native engine, run by `test_values`."""

from __future__ import annotations

import logging
import os
import resource
import sys
import threading
from typing import Any

from gpuprobe.catalogue.gpus import parse_spec
from gpuprobe.native.process import load

load(parse_spec("h100-80gb"))

import numpy as np  # noqa: E402
import torch  # noqa: E402 - the engine comes first

from gpuprobe.errors import CostMeasured, NotModelled, TooLarge, UnknownValue  # noqa: E402
from gpuprobe.native.values.session import Values  # noqa: E402


def large() -> Any:
    return torch.randn(1000, 1000, device="cuda")


def real_refuses_by_name() -> None:
    with Values():
        try:
            torch.ops.aten._fill_mem_eff_dropout_mask_(
                torch.ones(1, 2, 4, 4, device="cuda"), 0.5, 1, 1
            )
        except NotModelled as error:
            print("NotModelled", error)


def half_products() -> None:
    from torch.nn.functional import conv2d

    dnn = torch.ops.mkldnn
    with Values():
        a, b = torch.randn(2, 256, 1024, device="cuda", dtype=torch.float16)
        wide = (a.float() @ b.T.float()).half()
        x = torch.randn(4, 128, 16, 16, device="cuda", dtype=torch.float16)
        weight = torch.randn(64, 128, 3, 3, device="cuda", dtype=torch.float16)
        convolved = conv2d(x.float(), weight.float()).half()
        network = torch.nn.LSTM(64, 128, device="cuda", dtype=torch.float16)
        sequence = torch.randn(32, 8, 64, device="cuda", dtype=torch.float16)
        (low, _), (high, _) = network(sequence), network.float()(sequence.float())
        equal = [torch.equal(a @ b.T, wide), torch.equal(conv2d(x, weight), convolved)]
        equal.append(torch.equal(low, high.half()))
        print(dnn._is_mkldnn_fp16_supported() or all(equal))


def triton_kernels() -> None:
    global more  # the interpreter knows no closures
    import triton
    import triton.language as tl

    @triton.jit
    def more(x):  # type: ignore[no-untyped-def]
        return x + 1

    @triton.autotune([triton.Config({"count": count}) for count in (4, 8)], key=["size"])
    @triton.jit
    def increment(pointer, size, count: tl.constexpr):  # type: ignore[no-untyped-def]
        places = tl.program_id(0) * count + tl.arange(0, count)
        inside = places < size
        tl.store(pointer + places, more(tl.load(pointer + places, mask=inside)), mask=inside)

    with Values():
        x = torch.arange(10.0, device="cuda")
        increment[lambda taken: (triton.cdiv(5, taken["count"]),)](x[5:], 5)
        print(x.tolist())


def triton_refused() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def identity(pointer, count: tl.constexpr):  # type: ignore[no-untyped-def]
        places = pointer + tl.arange(0, count)
        value = tl.load(places)
        tl.store(
            places, tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], tl.int32, True, 1)
        )

    with Values():
        try:
            identity[(1,)](torch.ones(8, device="cuda", dtype=torch.int32), 8)
        except NotModelled as error:
            print("NotModelled", "identity" if "identity" in str(error) else error)


def unknown_scalar() -> None:
    with Values("shapes") as values:
        total, losses = 0.0, []
        for _ in range(2):  # all of it becomes text, and no report is needed
            loss = large().sum()
            total += float(loss)
            losses.append(loss.item())
            print("text", f"{float(loss):.1f} {loss:.1f}", "%.1f" % loss, round(float(loss), 1))  # noqa: UP031
            print("text", "%.1f %d" % (loss.item(), 1), str(float(loss)))  # noqa: UP031
        print("text", f"{total / 2:.1f} {np.mean(losses):.1f}", np.array(losses), max(losses))
        log = logging.getLogger("cases")
        log.addHandler(logging.StreamHandler(sys.stdout))
        log.warning("text %.1f of %d", sum(losses) / 2, 2)
        assert len(values.notes) == 1, values.notes
        try:
            losses.append(float(loss))
        except UnknownValue as unknown:
            print(type(unknown.error).__name__, unknown.error, unknown.error.hint)


def swallowed() -> None:
    values = Values("shapes")
    with values:
        try:
            try:
                bool(large().sum() > 0)
            except Exception:  # noqa: BLE001 - a program's own: it must not continue
                print("swallowed")
        except UnknownValue as unknown:
            print(values.reads.refused is unknown.error)


def budget() -> None:
    from gpuprobe.native.process import loaded
    from gpuprobe.native.values.budget import Budget

    runtime = loaded()
    assert runtime is not None
    left = torch.ones(1024, 1024, device="cuda", requires_grad=True)
    try:
        with Values("real", budget=Budget(runtime, operations=5e9)):
            (left @ left).sum().backward()  # of 6e9, the last of them in the backward pass
    except TooLarge as error:
        print(error)
    try:
        with Values("real", budget=Budget(runtime, memory=1 << 30)):
            torch.ones(1 << 29, device="cuda")
    except TooLarge as error:
        print(error)


def measured() -> None:
    # Small workspaces: torch 2.13 keeps two of them, torch 2.15 frees each after the product.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    from gpuprobe.native.process import loaded
    from gpuprobe.native.values import budget

    runtime = loaded()
    assert runtime is not None
    allowed = budget.Requested(runtime, measure=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with Values("real", budget=allowed):
            model = torch.nn.Linear(16384, 16384, device="cuda")  # 1 GiB
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(2):
                loss = model(torch.ones(8, 16384, device="cuda")).sum()
                loss.backward()
                loss.item()
                optimizer.step()
    except CostMeasured as cost:
        print(cost)
    print("small" if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 2e5 else "large")
    allowed.measuring, allowed._measure = 0.0, False
    allowed._memory = 1 << 30
    try:
        with Values("real", budget=allowed):
            model(torch.ones(8, 16384, device="cuda"))
    except TooLarge as error:
        print(error)


def at_once() -> None:
    from gpuprobe.native.values import shapes

    shapes.AT_ONCE_MEMORY = 24 << 20
    with Values("auto", reported=True) as values:
        small = torch.ones(2048, 2048, device="cuda")  # 16 MiB
        assert small.sum().item() == 2048 * 2048
        assert values.everything
        more = small * 2  # 32 MiB
        assert not values.everything
        assert str(more.sum().item()) == str(small.sum().item()) == "nan"
        assert torch.arange(4, device="cuda").sum().item() == 6
    print(values.notes[0].partition(": ")[0].partition(" up to")[0])


def arrays() -> None:
    with Values("shapes", reported=True):
        unknown = large()[:1, :2].cpu()
        print(unknown.numpy().shape, unknown.double().__array__().dtype)
        again = torch.from_numpy(unknown.numpy()).sum().item()
        print(again, torch.ones(2).numpy())


def assumed() -> None:
    line = sys._getframe().f_lineno + 2
    with Values("shapes", assume=[f"values_cases.py:{line}=0.25"]):
        print(large().mean().item())


def nan() -> None:
    with Values("shapes", reported=True) as values:
        value = large().mean().item()
        text = str(value)
        print(text, "noted" if "as nan" in values.notes[0] else "", value > 0.0, *values.notes)


def conditions() -> None:
    with Values("shapes", reported=True) as values:
        x = large()
        found = "NaN" if x.isnan().any() else "none"
        if (x > 9).all():
            raise ValueError("out of range")
        assert (x.abs() < 9).all()
    texts = (note.partition(": ")[2].partition(" (")[0] or note for note in values.notes)
    print(found, *texts, sep="; ")


def healthy() -> None:
    """Tests of finiteness that no source shows."""
    with Values("shapes", reported=True) as values, torch.no_grad():
        x = large()
        truths = [
            bool(x.isnan().any()), bool(torch.isinf(x).any()), bool(torch.isfinite(x).all()),
            bool((x != x).any()), bool((x == x).all()), bool((x.abs() == float("inf")).any()),
            bool((x < float("inf")).all()), int((~torch.isfinite(x)).sum()),
        ]  # fmt: skip
        torch.nn.utils.clip_grad_norm_([p := x.clone().requires_grad_()], 1.0)
        p.grad = x
        torch.nn.utils.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)
    print(truths, list(values.notes))


def conditions_that_both_work() -> None:
    with Values("shapes", reported=True) as values:
        chosen = "positive" if large().sum() > 0 else "negative"
    print(chosen, *values.notes)
    with Values("shapes"):
        try:
            chosen = "positive" if large().sum() > 0 else "negative"
        except UnknownValue as unknown:
            print("without a report:", unknown)


def loops() -> None:
    with Values("shapes", reported=True) as values:
        count = 0
        while large().sum() > 0:
            count += 1
        while True:
            count += 1
            if large().sum() > 0:
                break
        for _ in range(30):
            if large().sum() > 0:
                break
            count += 1
    print(count, len(values.notes))


def made_of_unknown() -> None:
    """Tensors and scalars that are made of an unknown number."""
    with Values("shapes", reported=True):
        value = large().mean().item()
        one = torch.ones(3, device="cuda")
        made = [
            torch.tensor(value), torch.tensor([1.0, value]).cuda(), torch.full((2,), value),
            one * value, torch.ones(2) * value, torch.tensor(value, device="cuda") + 1,
        ]  # fmt: skip
        print([str(item.sum().item()) for item in made], one.sum().item())


def whole_numbers_counted() -> None:
    with Values():
        print(torch.histc(torch.tensor([1, 1, 3], device="cuda"), 4, 0, 3).tolist())


def kernels_without_operators() -> None:
    library = torch.library.Library("cases", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", torch.empty_like, "CUDA")  # what it launches computes nothing here
    library.impl("twice", lambda x: x * 2, "CPU")
    with Values():
        print(torch.ops.cases.twice(torch.ones(3, device="cuda")).tolist())


def count() -> None:
    with Values("shapes"):
        x = large()
        for needs in (lambda: (x > 0).nonzero(), lambda: x[x > 0], lambda: x.round().unique()):
            try:
                needs()
            except UnknownValue:
                continue
            raise AssertionError
    print("ValueNeeded")


def known() -> None:
    with Values("shapes"):
        x = torch.arange(6, device="cuda")
        y = torch.zeros(3, device="cuda")
        y += 1
        assert y.sum().item() == 3
        z = large()
        z[0] = 1.0
        y[0] = z[0, 0]  # what is unknown stays so
        assert str(y.sum().item()) == "nan"
        print(x[x > 3].tolist())


def host() -> None:
    with Values("shapes"):
        there = large().cpu()
        for read in (there.numpy, there.argmax().item, (there + 1).sum().__float__):
            try:
                read()
            except UnknownValue:
                continue
            raise AssertionError
        assert str(there.tolist()[0][0]) == "nan"
        there.zero_()
        assert there.sum().item() == 0
        print("ValueNeeded")


def scaler() -> None:
    with Values("shapes"):
        model = torch.nn.Linear(600, 600).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scale = torch.amp.GradScaler("cuda", growth_interval=2)
        for _ in range(2):
            scale.scale(model(torch.randn(8, 600, device="cuda")).sum()).backward()
            scale.step(optimizer)
            scale.update()
        print(scale.get_scale())


def random() -> None:
    state = torch.get_rng_state()
    with Values():
        draws = []
        for _ in range(2):
            torch.cuda.manual_seed(3)
            draws.append(
                [torch.randn(5, device="cuda"), torch.randperm(9, device="cuda"),
                 torch.nn.functional.dropout(torch.ones(50, device="cuda")),
                 torch.empty(4, device="cuda").uniform_(),
                 torch.rand_like(torch.ones(4, device="cuda"))]
            )  # fmt: skip
        assert not torch.equal(torch.rand(5, device="cuda"), torch.rand(5, device="cuda"))
        assert all(torch.equal(a, b) for a, b in zip(*draws, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    print("reproducible, undisturbed")


def thread() -> None:
    with Values():
        x = torch.arange(4.0, device="cuda")
        found = []
        other = threading.Thread(target=lambda: found.append(x.sum().item()))
        other.start()
        other.join()
        print(found[0])


def dropout() -> None:
    with Values():
        x = torch.ones(2, 2, 16, 8, device="cuda").requires_grad_()
        out = torch.nn.functional.scaled_dot_product_attention(
            x, x, v := x.detach().clone().requires_grad_(), dropout_p=0.5
        )
        out.sum().backward()
        # Sums of the rows of P∘M: what the output is for values of one, in each place.
        total = out.sum().item()
        assert abs(v.grad.sum().item() - total) < 1e-2 * abs(total), (v.grad.sum().item(), total)
        assert 0.3 < total / x.numel() < 2.0
        print("same mask")


def sparse_products() -> None:
    """A product coalesces a sparse tensor first: of 8192 elements, half have an index twice."""
    for compute in ("real", "auto", "shapes"):
        with Values(compute, reported=True) as values:
            row = torch.arange(4096, device="cuda").repeat(2)
            dense = torch.ones(4096, 1024, device="cuda")
            unknown = (row + dense.sum().isnan()).where(dense[0, 0] > 0, row)
            needed = []
            for index in (row, unknown):
                sparse = torch.sparse_coo_tensor(
                    torch.stack([index, index]), torch.ones(8192, device="cuda"), (4096, 4096),
                    check_invariants=False,
                )  # fmt: skip
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                product = torch.sparse.mm(sparse, dense)
                needed.append(torch.cuda.max_memory_allocated() - before)
                print(compute, f"{product[0, 0].item()}")
            print(needed[1] - needed[0] >= 4096 * 20)  # two numbers and a value for each index
            print([note.partition(": ")[2] for note in values.notes if "indices" in note])


def big() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Values("shapes"), torch.device("cuda"):
        layers = [torch.nn.Linear(8192, 8192, dtype=torch.bfloat16) for _ in range(60)]
    assert torch.cuda.memory_allocated() > 8_000_000_000
    assert len(layers) == 60
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB
    print("small" if used < 200 << 10 else used)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
