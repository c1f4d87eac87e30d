"""Memory that is larger than it must be: each kind in one step of one recorded program, and next to
it what looks alike and is needed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gpuprobe
from gpuprobe.analysis.peak.needs import Biographies
from gpuprobe.analysis.trace.ledger import ledger_of
from gpuprobe.causes.find import causes_at
from gpuprobe.causes.live_memory import LiveMemory
from gpuprobe.causes.rules import autocast
from gpuprobe.model.causes import Bound
from gpuprobe.model.memory import Category
from gpuprobe.model.needs import Need
from gpuprobe.model.place import Place
from gpuprobe.model.run.holders import HolderRoot
from gpuprobe.torch_support.holding.objects import OUTSIDE


def numbers(*shape: int, **options: object) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", **options)  # type: ignore[call-overload]


def repeated() -> None:
    mask = numbers(512, 512)
    many = mask[None].repeat(32, 1, 1).sigmoid()
    many.sum()


def expanded() -> None:  # a view: no copies
    mask = numbers(512, 512)
    scores = numbers(32, 512, 512) + mask[None].expand(32, -1, -1)
    scores.sum()


def parts_in_another_order() -> None:  # of one block: no value is there twice
    x = numbers(2, 1024, 4096)
    first, second = x.unbind()
    whole = torch.cat([first, second], -1)
    mixed = torch.stack([whole[:, ::2], whole[:, 1::2]], -1)
    mixed.sum()


def all_pairs() -> None:
    x, y = numbers(512, 64), numbers(512, 64)
    distances = (x[:, None] - y[None]).square().sum(-1)
    distances.amin(1)


def biased() -> None:  # a result as large as its largest input
    x, bias = numbers(4096, 1024), numbers(1024)
    (x + bias).sum(1)


def joined() -> None:
    parts = [numbers(1 << 18) for _ in range(16)]
    whole = torch.cat(parts)
    whole.sum()


def skipped() -> None:  # both are read by a backward pass
    def work(net: nn.Module, step: int) -> torch.Tensor:
        first, second, third, _ = net  # type: ignore[misc]
        inner = first(numbers(8192, 512)).relu()
        deep = second(inner).relu()
        whole = torch.cat([inner, deep], 1)
        return (whole @ torch.cat([third.weight, third.weight])).square().mean()

    _trained(1, work)


def grown() -> None:
    kept = numbers(1, 1 << 18)
    for _ in range(16):
        kept = torch.cat([kept, numbers(1, 1 << 18)])
        kept[0, :8].sum()


def views_that_keep() -> None:
    features = [numbers(64, 4096)[:, 0] for _ in range(16)]
    torch.stack(features)


def clones_of_views() -> None:  # nothing is kept, but a part of each is enough
    features = [numbers(64, 4096)[:, 0].clone() for _ in range(16)]
    torch.stack(features)


def views_of_what_was_read() -> None:  # in whole, by the operator after it
    maps = []
    for _ in range(16):
        scores = numbers(64, 4096).softmax(-1)
        scores.sum()
        maps.append(scores[:, 0])
    torch.stack(maps)


def read_part_by_part() -> None:
    scores = numbers(64, 1 << 16).softmax(-1)
    scores.sum()
    for part in scores.split(16):
        part.sigmoid().square().sum()


def last_position() -> None:
    hidden, head = numbers(4, 256, 64), numbers(64, 4096)
    logits = hidden @ head
    logits[:, -1].argmax(-1)


def widened() -> None:
    logits = numbers(1024, 4096, dtype=torch.float16)
    wide = logits.float()
    wide.topk(5)


def widened_for_a_loss() -> None:
    logits = numbers(1024, 4096, dtype=torch.float16)
    wide = logits.float()
    F.log_softmax(wide, -1).sum()


def narrowed() -> None:
    weights = [numbers(1 << 20) for _ in range(8)]
    halves = []
    while weights:
        halves.append(weights.pop().half())
    sum(half.sum() for half in halves)


def one_hot() -> None:
    labels = torch.randint(0, 32, (1 << 17,), device="cuda")
    target = F.one_hot(labels, 32).float()
    (target * numbers(1 << 17, 32).log_softmax(-1)).sum()


def one_hot_sums() -> None:  # of the vectors of each code, as in a codebook
    codes = torch.randint(0, 64, (1 << 16,), device="cuda")
    chosen = F.one_hot(codes, 64).float()
    chosen.t() @ numbers(1 << 16, 4)


def compared() -> None:  # with one class after the other
    labels = torch.randint(0, 32, (1 << 17,), device="cuda")
    target = torch.stack([torch.where(labels == c, 1, 0) for c in range(32)], 1)
    (target * numbers(1 << 17, 32).log_softmax(-1)).sum()


def compared_at_once() -> None:
    labels = torch.randint(0, 32, (1 << 17,), device="cuda")
    target = (labels[:, None] == torch.arange(32, device="cuda")).float()
    (target * numbers(1 << 17, 32).log_softmax(-1)).sum()


def compared_with_others() -> None:  # of the same size: no classes
    first, second = torch.randint(0, 32, (2, 1 << 20), device="cuda")
    (torch.stack([first == second, first != second]).float() * numbers(2, 1 << 20)).sum()


def padded() -> None:
    ids = torch.zeros(64, 512, dtype=torch.long)
    ids[:, :100] = torch.randint(1, 999, (64, 100))
    batch = ids.cuda()
    states = F.embedding(batch, numbers(1000, 128)).relu()
    states.sum()


def masked() -> None:  # rows of full length, and those that are padded at their beginning
    mask = torch.ones(64, 512, dtype=torch.long)
    full = mask.cuda()
    mask[:32, :100] = 0
    at_the_beginning = mask.cuda()
    ids = torch.randint(1, 999, (64, 512)).cuda()
    states = F.embedding(ids, numbers(1000, 128)) * (full * at_the_beginning)[..., None]
    states.relu().sum()


def margins() -> None:
    classes = torch.zeros(64, 32, 32, dtype=torch.long)
    classes[..., 6:22] = torch.randint(0, 3, (64, 32, 16))
    states = F.embedding(classes.cuda(), numbers(3, 128)).relu()
    states.sum()


def _trained(steps: int, work: Callable[[nn.Module, int], torch.Tensor]) -> None:
    net = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
    for step in range(steps):
        optimizer.zero_grad()
        work(net, step).backward()
        optimizer.step()


def two_losses() -> None:
    def work(net: nn.Module, step: int) -> torch.Tensor:
        return net(numbers(8192, 512)).square().mean() + net(numbers(8192, 512)).abs().mean()

    _trained(1, work)


def one_loss_of_two_outputs() -> None:  # the graphs are one: each output needs the other
    def work(net: nn.Module, step: int) -> torch.Tensor:
        return (net(numbers(8192, 512)) * net(numbers(8192, 512))).mean()

    _trained(1, work)


def _adapted(kind: torch.dtype, norm: bool = False) -> None:
    half = torch.bfloat16
    weights = [nn.Parameter(numbers(512, 512, dtype=kind)) for _ in range(2)]
    optimizer = torch.optim.SGD(weights, lr=0.1, foreach=False)
    x = numbers(16384, 512, dtype=half)
    for _ in range(4):
        wide = x.to(kind)
        if norm:
            wide = F.layer_norm(wide, (512,))
        x = (wide @ weights[0] @ weights[1]).to(half)
    x.float().mean().backward()
    optimizer.step()


def wide_adapters() -> None:
    _adapted(torch.float32)


def adapters_of_one_type() -> None:
    _adapted(torch.bfloat16)


def wide_norms() -> None:  # for their precision
    _adapted(torch.float32, norm=True)


class _Recomputed(nn.Module):
    def __init__(self, parts: int) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(4)]
        self.layers = nn.ModuleList(layers)
        self.size = 4 // parts

    def part(self, at: int, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[at : at + self.size]:
            x = layer(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at in range(0, 4, self.size):
            x = checkpoint(self.part, at, x, use_reentrant=False)
        return x


def _recomputed(parts: int) -> None:
    net = _Recomputed(parts).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
    net(numbers(16384, 512)).mean().backward()
    optimizer.step()


def whole_checkpoint() -> None:
    _recomputed(1)


def checkpoints_of_blocks() -> None:
    _recomputed(2)


def frozen_teacher() -> None:
    teacher = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(512, 512), nn.GELU())]).cuda()

    def work(net: nn.Module, step: int) -> torch.Tensor:
        x = numbers(8192, 512)
        return F.mse_loss(net(x), teacher(x))

    _trained(1, work)


def quiet_teacher() -> None:
    teacher = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(512, 512), nn.GELU())]).cuda()

    def work(net: nn.Module, step: int) -> torch.Tensor:
        x = numbers(8192, 512)
        with torch.no_grad():
            answer = teacher(x)
        return F.mse_loss(net(x), answer)

    _trained(1, work)


def _activated(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def work(net: nn.Module, step: int) -> torch.Tensor:
        x = numbers(16384, 512)
        for layer in net:  # type: ignore[attr-defined]
            x = function(layer(x))
        return x.mean()

    _trained(1, work)


def swish() -> None:
    _activated(lambda x: x * torch.sigmoid(x))


def gelu_by_tanh() -> None:
    _activated(lambda x: 0.5 * x * (1.0 + torch.tanh(0.7979 * (x + 0.044715 * torch.pow(x, 3.0)))))


def gate_of_two() -> None:  # each operator saves what no input is
    _activated(lambda x: torch.tanh(x + numbers(16384, 512)) * torch.sigmoid(x))


def quick(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def scaled_swish() -> None:  # in three parts, none of which has enough alone
    def work(net: nn.Module, step: int) -> torch.Tensor:
        one, two, three = (numbers(8192, 512) for _ in range(3))
        for layer in net:  # type: ignore[attr-defined]
            one = quick(layer(one))
            two = quick(layer(two))
            three = quick(layer(three))
        return (one + two + three).mean()

    _trained(1, work)


def swish_of_torch() -> None:
    _activated(F.silu)


def mish() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        gate = F.softplus(x).tanh()
        return x * gate

    _activated(function)


def gelu() -> None:
    _activated(lambda x: 0.5 * x * (1 + torch.erf(x * 0.7071)))


def gated() -> None:  # two tensors, and both are needed
    def work(net: nn.Module, step: int) -> torch.Tensor:
        x = numbers(16384, 512)
        first, second, third, fourth = net  # type: ignore[misc]
        x = torch.sigmoid(first(x)) * second(x)
        return (torch.sigmoid(third(x)) * fourth(x)).mean()

    _trained(1, work)


def probabilities_of_one() -> None:
    logits = numbers(512, 8192)
    chosen = torch.randint(0, 8192, (512, 1), device="cuda")
    torch.log_softmax(logits, -1).gather(-1, chosen).sum()


def probabilities_with_a_loss() -> None:
    logits = numbers(512, 8192, requires_grad=True)
    chosen = torch.randint(0, 8192, (512, 1), device="cuda")
    torch.log_softmax(logits, -1).gather(-1, chosen).sum().backward()


def probabilities_in_a_loss_of_torch() -> None:
    logits = numbers(512, 8192, requires_grad=True)
    F.cross_entropy(logits, torch.randint(0, 8192, (512,), device="cuda")).backward()


def joined_within_a_join() -> None:  # no loop: one line joins what it joins
    part = numbers(1024, 1024)
    whole = torch.cat([torch.cat([part, part]), torch.cat([part, part])], 1)
    whole[:, 0].sum()


def pairs_added_in_place() -> None:
    x, y = numbers(2048, 4), numbers(2048, 4)
    cost = torch.cdist(x, y, p=1)
    low, high = torch.max(x[:, None, :2], y[:, :2]), torch.min(x[:, None, 2:], y[:, 2:])
    overlap = (high - low).clamp(min=0).prod(-1)
    union = x[:, None, 0] + y[:, 0] - overlap
    cost -= overlap / union.clamp(min=1e-6)
    cost.argmin(0)


def nearest() -> None:
    queries, gallery = numbers(2048, 64), numbers(8192, 64)
    scores = queries @ gallery.T
    scores.topk(5)


def all_scores() -> None:  # all of them are the result
    queries, gallery = numbers(2048, 64), numbers(8192, 64)
    scores = queries @ gallery.T
    (scores + 1).sigmoid_()


def contrasted() -> None:  # the backward pass needs them
    queries, keys = numbers(2048, 64, requires_grad=True), numbers(8192, 64)
    F.log_softmax(queries @ keys.T, -1).sum().backward()


def resized() -> None:
    logits = F.interpolate(numbers(1, 19, 64, 64), size=(1024, 1024), mode="bilinear")
    logits.argmax(1)


def resized_for_a_layer() -> None:  # as in each decoder
    layer = nn.Conv2d(64, 3, 3, padding=1).cuda()
    with torch.no_grad():
        layer(F.interpolate(numbers(1, 64, 128, 128), scale_factor=4))


def masks_of_resized() -> None:  # a sum of booleans is one of a copy in 8 bytes
    masks = F.interpolate(numbers(1, 64, 16, 16), size=(512, 512), mode="bilinear") > 0
    masks.sum((2, 3))


def looked_up_for_pairs() -> None:
    table = nn.Embedding(121, 32).cuda()
    pairs = torch.randint(0, 121, (64, 64, 64), device="cuda")
    queries = numbers(64, 2, 64, 32, requires_grad=True)
    torch.einsum("bhqd,bqkd->bhqk", queries, table(pairs)).sum().backward()


def _looked_up(tied: bool) -> None:
    table = nn.Embedding(1 << 16, 128).cuda()
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1, foreach=False)
    states = table(torch.randint(0, 1 << 16, (64,), device="cuda"))
    scores = states @ (table.weight.T if tied else numbers(128, 8))
    scores.square().mean().backward()
    optimizer.step()


def _attended(attend: Callable[..., torch.Tensor]) -> None:
    def work(net: nn.Module, step: int) -> torch.Tensor:
        first, second, third, _ = net  # type: ignore[misc]
        x = numbers(2, 1024, 512)
        heads = [
            layer(x).unflatten(-1, (8, 64)).transpose(1, 2) for layer in (first, second, third)
        ]
        return attend(*heads).mean()

    _trained(1, work)


def _scored(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q @ k.transpose(-1, -2) / 8).softmax(-1)


def attention_weights() -> None:
    _attended(lambda q, k, v: F.dropout(_scored(q, k), 0.1) @ v)


def attention_weights_with_a_mask() -> None:
    mask = torch.ones(1024, 1024, dtype=torch.bool, device="cuda").triu(1)
    _attended(lambda q, k, v: (q @ k.mT / 8).masked_fill(mask, -1e9).softmax(-1) @ v)


def attention_weights_in_autocast() -> None:
    with torch.autocast("cuda", torch.float16):
        _attended(lambda q, k, v: F.dropout(_scored(q, k), 0.1) @ v)


def attention_weights_with_scores() -> None:  # which a library keeps, to return them
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.mT / 8
        kept.append((scores.detach().clone(), scores))
        return scores.softmax(-1) @ v

    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    _attended(attend)


def attention_weights_of_transformers() -> None:
    names = {"scored": _scored}
    code = "def attend(q, k, v):\n    return scored(q, k) @ v\n"
    exec(compile(code, "/site-packages/transformers/models/gpt/modeling.py", "exec"), names)
    _attended(names["attend"])


def fused_attention() -> None:
    _attended(F.scaled_dot_product_attention)


def attention_weights_in_a_loss() -> None:  # a teacher's are imitated, for example
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        weights = _scored(q, k)
        return (weights @ v).mean() + (weights - 0.5).square().mean()

    _attended(attend)


def attention_weights_of_added_scores() -> None:  # each layer adds those of the one before
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.zeros((), device="cuda")
        for _ in range(3):  # nothing reads those of the last one, but its code is that of all
            scores = q @ k.mT / 8 + scores
            q = scores.softmax(-1) @ v
        return q

    _attended(attend)


def attention_weights_of_relative_positions() -> None:
    _attended(lambda q, k, v: ((q @ k.mT + (q * 2) @ k.mT) / 8).softmax(-1) @ v)


def attention_weights_by_a_sigmoid() -> None:  # pairs of which a product remains
    _attended(lambda q, k, v: ((q @ k.mT).flatten(0, 1) / 8).sigmoid() @ v.flatten(0, 1))


class Packed(nn.Module):
    """Weights of one byte a number, or of four that no optimizer trains."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(1024, 1024, device="cuda", dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.float() / 64)


_MODELS: list[nn.Module] = []  # their weights are there when the step ends


def _unpacked(dtype: torch.dtype) -> None:
    net = nn.Sequential(nn.Linear(1024, 1024), *[Packed(dtype) for _ in range(8)]).cuda()
    _MODELS.append(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
    net(numbers(16, 1024)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def unpacked_weights() -> None:
    _unpacked(torch.int8)


def scaled_weights() -> None:  # as wide as they are stored
    _unpacked(torch.float32)


def _gathered(add: Callable[..., torch.Tensor]) -> None:
    def work(net: nn.Module, step: int) -> torch.Tensor:
        nodes = net(numbers(1024, 512))
        ends = torch.randint(0, 1024, (2, 16384), device="cuda")
        for _ in range(3):
            nodes = add(torch.zeros_like(nodes), ends[1], nodes[ends[0]] * 2)
        return nodes.mean()

    _trained(1, work)


def forgotten() -> None:
    _MODELS.clear()
    numbers(1 << 20).sum()


def messages_of_edges() -> None:
    _gathered(lambda out, index, source: out.index_add_(0, index, source))


def scattered_messages() -> None:  # saves the indices only
    def add(out: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return out.scatter_add_(0, index[:, None].expand_as(source), source)

    _gathered(add)


def _selected_from(data: torch.Tensor) -> None:
    for _ in range(3):
        rows = torch.randint(0, len(data), (512,), device="cuda")
        data[rows].square().mean()


DATA: list[torch.Tensor] = []


def moved() -> None:
    DATA[:] = [torch.zeros(1 << 14, 1024).cuda()]


def data_set() -> None:
    _selected_from(DATA[0])


def allocated() -> None:
    DATA[:] = [torch.zeros(1 << 14, 1024, device="cuda")]
    DATA[0][:99] = numbers(99, 1024)


def replay_buffer() -> None:  # the program collects into it
    _selected_from(DATA[0])


def released() -> None:
    DATA.clear()
    numbers(1 << 20).sum()


def messages_without_a_backward_pass() -> None:  # a variable keeps the last ones
    nodes, ends = numbers(1024, 512), torch.randint(0, 1024, (2, 16384), device="cuda")
    for _ in range(3):
        messages = nodes[ends[0]].sigmoid()
        nodes = torch.zeros_like(nodes).index_add_(0, ends[1], messages)
    nodes.sum()


class Transposes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).t().contiguous()
        return (y * y).t()


def _in_parallel(**options: bool) -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = DistributedDataParallel(Transposes().cuda(), gradient_as_bucket_view=True, **options)
        net(numbers(4096, 512)).square().mean().backward()
    finally:
        dist.destroy_process_group()


def copies_in_a_parallel_model() -> None:
    _in_parallel()


def outputs_of_a_parallel_model() -> None:
    _in_parallel(find_unused_parameters=True)


def selected_late() -> None:
    def work(net: nn.Module, step: int) -> torch.Tensor:
        grid, turn = numbers(8, 1 << 16, 3), numbers(8, 3, 3, requires_grad=True)
        rays = torch.cat([grid, torch.ones_like(grid)], -1)[..., :3].contiguous() @ turn
        chosen = rays[:, torch.randint(0, 1 << 16, (64,), device="cuda")]
        return net(F.pad(chosen, (0, 509))).mean()

    _trained(1, work)


def selected_and_used() -> None:  # the loss reads all points
    turn = numbers(8, 16, 1, requires_grad=True)
    points = numbers(8, 1 << 16, 16).sigmoid()
    chosen = (points @ turn)[:, torch.randint(0, 1 << 16, (64,), device="cuda")]
    (chosen.mean() + points.sum()).backward()


def looked_up() -> None:
    _looked_up(tied=False)


def looked_up_and_multiplied() -> None:  # the gradient has all rows
    _looked_up(tied=True)


KINDS: dict[Callable[[], None], str] = {
    unpacked_weights: "unpacked-weights",  # first: later, models are searched for less often
    scaled_weights: "",
    forgotten: "",
    repeated: "repeated-values",
    expanded: "",
    parts_in_another_order: "",
    all_pairs: "broadcast-intermediate",
    biased: "",
    joined: "joined-with-parts",
    grown: "grown-by-joining",
    views_that_keep: "view-keeps-base",
    clones_of_views: "computed-in-whole",
    views_of_what_was_read: "view-keeps-base",
    read_part_by_part: "",
    last_position: "computed-in-whole",
    widened: "widened",
    widened_for_a_loss: "",
    narrowed: "narrowed-later",
    one_hot: "one-hot",
    one_hot_sums: "one-hot",
    compared: "one-hot",
    compared_at_once: "one-hot",
    compared_with_others: "",
    wide_adapters: "widened",
    adapters_of_one_type: "",
    wide_norms: "",
    whole_checkpoint: "whole-checkpoint",
    checkpoints_of_blocks: "",
    padded: "padding",
    masked: "",
    margins: "",
    two_losses: "summed-losses",
    one_loss_of_two_outputs: "",
    frozen_teacher: "unread-gradients",
    quiet_teacher: "",
    swish: "saved-twice",
    scaled_swish: "saved-twice",
    swish_of_torch: "",
    mish: "saved-twice",
    gelu: "saved-twice",
    gelu_by_tanh: "saved-twice",
    gate_of_two: "",
    gated: "",
    probabilities_of_one: "log-probabilities-of-all",
    probabilities_with_a_loss: "saved-log-probabilities",
    probabilities_in_a_loss_of_torch: "",
    joined_within_a_join: "joined-with-parts",
    pairs_added_in_place: "broadcast-intermediate",
    nearest: "reduced-later",
    all_scores: "",
    contrasted: "",
    resized: "reduced-later",
    masks_of_resized: "reduced-later",
    resized_for_a_layer: "",
    looked_up_for_pairs: "broadcast-intermediate",
    looked_up: "dense-embedding-gradient",
    looked_up_and_multiplied: "",
    skipped: "",
    attention_weights: "attention-weights",
    attention_weights_with_scores: "attention-weights",
    attention_weights_with_a_mask: "attention-weights",
    attention_weights_in_autocast: "attention-weights",
    attention_weights_of_transformers: "attention-weights",
    fused_attention: "",
    attention_weights_in_a_loss: "",
    attention_weights_of_added_scores: "",
    attention_weights_of_relative_positions: "attention-weights",
    attention_weights_by_a_sigmoid: "",
    messages_of_edges: "saved-unread",
    scattered_messages: "",
    messages_without_a_backward_pass: "",
    moved: "",
    data_set: "resident-data",
    allocated: "",
    replay_buffer: "",
    released: "",
    copies_in_a_parallel_model: "",
    outputs_of_a_parallel_model: "ddp-unused-parameters",
    selected_late: "computed-in-whole",
    selected_and_used: "",
}


BOUNDS = {
    joined: Bound.OR_LESS,  # a running sum needs the parts no more than the whole
    attention_weights: Bound.EXACT,
    attention_weights_of_relative_positions: Bound.OR_MORE,  # their scores are the mask
}


@pytest.mark.simulated
def test_each_kind_is_found_and_what_looks_alike_is_not(tmp_path: Path) -> None:
    path = tmp_path / "run.gpuprobe"
    with (
        gpuprobe.virtual_gpu("t4", compute="shapes"),
        gpuprobe.record(path, level="trace", trace_steps="all") as recorder,
    ):
        for kind in KINDS:
            with recorder.step():
                kind()
    rank = gpuprobe.load(path).ranks[0]
    found = {}
    for kind, step in zip(KINDS, rank.steps, strict=False):
        ledgers = [ledger_of(trace) for trace in rank.traces.of(step)]
        ledger = max(ledgers, key=lambda one: max(one.allocated_after()))
        first = next(causes_at(Biographies(ledger), ledger.peak(), {}), None)
        found[kind.__name__] = "" if first is None else first.answer.rule
        if kind in BOUNDS:
            assert first is not None
            assert first.bound is BOUNDS[kind]
        if kind is gelu_by_tanh:  # half of the input, the tanh, and one more than that
            assert first is not None
            assert first.group.bytes > 4 * 2 * 16384 * 512 * 4
        if kind in (one_hot, one_hot_sums):
            assert first is not None
            assert ("index_add_" in first.answer.remedy) is (kind is one_hot_sums)
        if kind in (swish, scaled_swish):
            assert first is not None
            assert ("a * x" in first.answer.code) is (kind is scaled_swish)
        if kind is attention_weights_with_scores:
            assert first is not None
            assert "clone" in {block.made_by for block in first.group.blocks}
        if kind in (attention_weights, attention_weights_of_transformers):
            assert first is not None
            own = kind is attention_weights
            assert ("attn_implementation" in first.answer.code) is not own
            assert ("dropout_p=" in first.answer.code) is own
        if kind is attention_weights_with_a_mask:
            assert first is not None
            assert "attn_mask=~mask" in first.answer.code
        if kind is masks_of_resized:
            assert first is not None
            assert first.group.bytes >= 64 * 512 * 512 * 8
        if kind is two_losses:
            assert first is not None
            assert isinstance(first.kept_at, Place)
            assert first.kept_at.function == "work"
    assert found == {kind.__name__: rule for kind, rule in KINDS.items()}


@pytest.mark.simulated
def test_a_later_step_reads_as_much_as_this_one_does_of_those_before(tmp_path: Path) -> None:
    """Widened copies of which only the last position is read, after the step that makes them."""
    path = tmp_path / "run.gpuprobe"
    with (
        gpuprobe.virtual_gpu("t4", compute="shapes"),
        gpuprobe.record(path, level="trace", trace_steps="all") as recorder,
    ):
        logits = None
        for _ in range(3):
            with recorder.step():
                if logits is not None:
                    logits[:, -1].argmax(-1)
                logits = numbers(4, 256, 8192, dtype=torch.float16).float()
    rank = gpuprobe.load(path).ranks[0]
    ledger = ledger_of(next(iter(rank.traces.of(rank.steps[1]))))
    found = list(causes_at(Biographies(ledger), ledger.peak(), {}))
    assert [one.answer.rule for one in found] == ["computed-in-whole"]
    assert found[0].answer.sentence.startswith("only 128.0 KiB of 32.0 MiB")


@pytest.mark.simulated
@pytest.mark.parametrize(("classes", "layers"), [(8192, 2), (16, 12)])
def test_logits_that_dominate_are_no_activations_of_layers(
    tmp_path: Path, classes: int, layers: int
) -> None:
    """Checkpoints of the layers keep them, and chunks of the loss do not."""
    path = tmp_path / "run.gpuprobe"
    with (
        gpuprobe.virtual_gpu("t4", compute="shapes"),
        gpuprobe.record(path, level="trace", trace_steps="all") as recorder,
    ):
        parts = [part for _ in range(layers) for part in (nn.Linear(256, 256), nn.GELU())]
        net = nn.Sequential(*parts, nn.Linear(256, classes)).cuda()
        optimizer = torch.optim.SGD(net.parameters())
        for _ in range(2):
            with recorder.step():
                targets = torch.randint(0, classes, (4096,), device="cuda")
                F.cross_entropy(net(numbers(4096, 256)), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
    found = [advice["id"] for advice in gpuprobe.report(path)["advice"]]
    assert ("chunked-loss" in found) is (classes == 8192)
    assert ("checkpoint" in found) is (classes == 16)


@pytest.mark.simulated
def test_the_advice_for_a_loss_that_memory_runs_out_in(tmp_path: Path) -> None:
    """No backward pass has used anything yet."""
    path = tmp_path / "run.gpuprobe"
    with (
        gpuprobe.virtual_gpu("t4", compute="shapes"),
        gpuprobe.record(path, level="trace", trace_steps="all"),
    ):
        net = nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 131072)).cuda()
        targets = torch.zeros(16384, dtype=torch.int64, device="cuda")
        logits = net(numbers(16384, 1024))
        with pytest.raises(torch.cuda.OutOfMemoryError, match=r"allocate 8\.00 GiB"):
            F.cross_entropy(logits, targets)
    found = [advice["id"] for advice in gpuprobe.report(path)["advice"]]
    assert "chunked-loss" in found
    assert "checkpoint" not in found


@pytest.mark.simulated
@pytest.mark.parametrize("width", [8, 4096])
def test_workspaces_that_dominate_are_set_by_their_setting(tmp_path: Path, width: int) -> None:
    path = tmp_path / "run.gpuprobe"
    with (
        gpuprobe.virtual_gpu("t4", compute="shapes"),
        gpuprobe.record(path, level="trace", trace_steps="all") as recorder,
        recorder.step(),
    ):
        nn.Linear(width, width).cuda()(numbers(width, width)).sum().backward()
    report = gpuprobe.report(path)
    assert ("CUBLAS_WORKSPACE_CONFIG" in report["head"]["fix"]) is (width == 8)


@pytest.mark.simulated
def test_the_workspace_of_a_product_is_one(tmp_path: Path) -> None:
    """Also where it is freed at once, as since torch 2.15; not a tensor of its size that is."""
    path = tmp_path / "run.gpuprobe"
    with (
        gpuprobe.virtual_gpu("t4", compute="shapes"),
        gpuprobe.record(path, level="trace", trace_steps="all") as recorder,
        recorder.step(),
    ):
        kept = numbers(64, 64)
        torch.empty(8_519_680, dtype=torch.uint8, device="cuda")
        kept @ kept
    (rank,) = gpuprobe.load(path).ranks
    (trace,) = rank.traces.of(rank.steps[0])
    codes = zip(trace.events.action, trace.events.category, strict=True)
    workspaces = [code for _, code in codes if code == Category.WORKSPACE.code]
    assert len(workspaces) == 1


@pytest.mark.simulated
def test_a_workspace_at_the_address_of_an_earlier_tensor_is_not_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")  # as before torch 2.15
    path = tmp_path / "run.gpuprobe"
    with (
        gpuprobe.virtual_gpu("t4", compute="shapes"),
        gpuprobe.record(path, level="trace", trace_steps="all") as recorder,
    ):
        for step in range(3):
            with recorder.step():
                if not step:
                    numbers(2 << 20).add_(1)
                both = numbers(1024, 1024 * (step + 1))
                del both
                numbers(64, 64) @ numbers(64, 64)
    rank = gpuprobe.load(path).ranks[0]
    found = []
    for step in rank.steps:
        for trace in rank.traces.of(step):
            ledger = ledger_of(trace)
            needs = Biographies(ledger).needs(ledger.events - 1)
            code = Category.WORKSPACE.code
            rows = list(needs)
            codes = ledger.values("category", rows)
            found += [needs[row] for row, one in zip(rows, codes, strict=True) if one == code]
    assert found == [Need.IN_USE, Need.UNTRACED, Need.UNTRACED]  # made by the last operator


@pytest.mark.simulated
def test_an_average_of_the_weights_does_not_wait_in_the_first_step(tmp_path: Path) -> None:
    path = tmp_path / "run.gpuprobe"
    with (
        gpuprobe.virtual_gpu("t4", compute="shapes"),
        gpuprobe.record(path, level="trace", trace_steps="all"),
    ):
        net = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)]).cuda()
        average = copy.deepcopy(net)
        moved = copy.deepcopy(net).cpu().cuda()
        shadow = [one.clone() for one in net.state_dict().values()]
        optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
        for _ in range(3):
            net(numbers(64, 1024)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                copies = average.parameters(), moved.parameters(), shadow
                for new, *others in zip(net.parameters(), *copies, strict=True):
                    for other in others:
                        other.lerp_(new, 0.1)
    rank = gpuprobe.load(path).ranks[0]
    for step in rank.steps:
        for trace in rank.traces.of(step):
            lives = Biographies(ledger_of(trace))
            found = [one.answer.rule for one in causes_at(lives, lives.ledger.peak(), {})]
            assert "too-early" not in found, step.index


@pytest.mark.simulated
@pytest.mark.parametrize("saved", [True, False])
def test_pairs_that_a_graph_keeps_are_recomputed(tmp_path: Path, saved: bool) -> None:
    """It keeps those of all chunks, unless each is checkpointed."""
    path = tmp_path / "run.gpuprobe"
    with (
        gpuprobe.virtual_gpu("t4", compute="shapes"),
        gpuprobe.record(path, level="trace", trace_steps="all") as recorder,
        torch.set_grad_enabled(saved),
        recorder.step(),
    ):
        points = numbers(1024, 16, requires_grad=True)
        distances = (points[:, None] - points).square().sum(-1)
        if saved:
            distances.mean().backward()
    (cause,) = gpuprobe.report(path)["causes"]
    assert cause["rule"] == "broadcast-intermediate"
    assert ("torch.utils.checkpoint" in cause["remedy"]) is saved


@pytest.mark.simulated
def test_what_a_backward_pass_has_just_used_is_no_cause(tmp_path: Path) -> None:
    """The function that runs at the peak has several operators: it holds its arguments to its
    end. The workspace of cuBLAS is as large.
    """
    path = tmp_path / "run.gpuprobe"
    with (
        gpuprobe.virtual_gpu("t4", compute="shapes"),
        gpuprobe.record(path, level="trace", trace_steps="all") as recorder,
    ):
        net = Transposes().cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            with recorder.step():
                net(numbers(4096, 512)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    document = gpuprobe.report(path)
    needless = {row["need"]: row["bytes"] for row in document["needs"]["rows"]}
    assert needless["never_used_again"] > 16 << 20
    assert document["causes"] == []


@pytest.mark.simulated
def test_weights_that_autocast_converted_in_an_earlier_step_are_a_cause(tmp_path: Path) -> None:
    """One context is around all steps: the copies wait for the next one, and the weights, which
    nothing reads any more, are not what is not needed.
    """
    path = tmp_path / "run.gpuprobe"
    with (
        gpuprobe.virtual_gpu("t4", compute="shapes"),
        gpuprobe.record(path, level="trace", trace_steps="all") as recorder,
    ):
        net = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).cuda()
        with torch.autocast("cuda", torch.float16):
            for _ in range(3):
                with recorder.step(), torch.no_grad():
                    net(numbers(16, 1024)).sum()
                    numbers(1 << 23).sum()
    rank = gpuprobe.load(path).ranks[0]
    ledger = ledger_of(next(iter(rank.traces.of(rank.steps[1]))))
    lives = Biographies(ledger)
    rows = autocast.converted(LiveMemory(lives, ledger.peak()))
    assert len(rows) == 16  # weights and biases
    cached = replace(OUTSIDE, root=HolderRoot.AUTOCAST)
    causes = [*causes_at(lives, ledger.peak(), dict.fromkeys(rows, cached))]
    assert [one.answer.rule for one in causes] == ["autocast-cache"]
    unknown = causes_at(lives, ledger.peak(), {})
    assert "autocast-cache" not in [one.answer.rule for one in unknown]
