"""Programs whose values on the native engine are compared to the CPU's, run by `test_values`.

``python values_programs.py [NAME ...]`` prints a JSON object: for each program the largest
difference of what it returns, relative to the largest value, or its error.
"""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Callable
from typing import Any

from gpuprobe.catalogue.gpus import parse_spec
from gpuprobe.native.process import load

GPUS = 2
RUNTIME = load(parse_spec("h100-80gb") * GPUS)

import torch  # noqa: E402 - the engine comes first
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from gpuprobe.native.values.session import Values  # noqa: E402

PROGRAMS: dict[str, Callable[[str], Any]] = {}


def program(function: Callable[[str], Any]) -> Callable[[str], Any]:
    PROGRAMS[function.__name__] = function
    return function


def train(model: Any, data: Any, optimizer: Any, loss: Any, steps: int = 4) -> Any:
    """Losses, and the parameters and buffers at the end."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model, data)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, [p.detach() for p in model.parameters()], list(model.buffers())


def classify(model: Any, data: Any) -> Any:
    return F.cross_entropy(model(data[0]), data[1])


def small_mlp(device: str) -> tuple[Any, Any]:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))
    x, y = torch.randn(12, 16), torch.randint(0, 8, (12,))
    return model.to(device), (x.to(device), y.to(device))


@program
def mlp_adamw_foreach(device: str) -> Any:
    model, data = small_mlp(device)
    return train(model, data, torch.optim.AdamW(model.parameters(), 1e-2, foreach=True), classify)


@program
def mlp_adamw_fused(device: str) -> Any:
    model, data = small_mlp(device)
    return train(model, data, torch.optim.AdamW(model.parameters(), 1e-2, fused=True), classify)


@program
def mlp_sgd_momentum(device: str) -> Any:
    model, data = small_mlp(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    return train(model, data, optimizer, classify)


@program
def mlp_sgd_fused(device: str) -> Any:
    model, data = small_mlp(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=True)
    return train(model, data, optimizer, classify)


@program
def mlp_adafactor(device: str) -> Any:
    model, data = small_mlp(device)
    return train(model, data, torch.optim.Adafactor(model.parameters(), 0.05), classify)


@program
def mlp_rmsprop_adagrad(device: str) -> Any:
    model, data = small_mlp(device)
    first = train(model, data, torch.optim.RMSprop(model.parameters(), 1e-3), classify, 2)
    return first, train(model, data, torch.optim.Adagrad(model.parameters(), 1e-2), classify, 2)


@program
def adam_capturable_amsgrad(device: str) -> Any:
    model, data = small_mlp(device)
    options = {"capturable": True} if device != "cpu" else {}
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, amsgrad=True, **options)
    return train(model, data, optimizer, classify)


@program
def clip_grad_norm(device: str) -> Any:
    model, data = small_mlp(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    norms = []
    for _ in range(4):
        optimizer.zero_grad()
        classify(model, data).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
    return norms, list(model.parameters())


@program
def gradient_accumulation(device: str) -> Any:
    model, data = small_mlp(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        for part in range(3):
            chunk = slice(4 * part, 4 * part + 4)
            loss = classify(model, (data[0][chunk], data[1][chunk])) / 3
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses, list(model.parameters())


@program
def cnn(device: str) -> Any:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, stride=2, groups=2), nn.GroupNorm(4, 16), nn.SiLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    ).to(device)  # fmt: skip
    data = torch.randn(6, 3, 16, 16).to(device), torch.randint(0, 5, (6,)).to(device)
    return train(model, data, torch.optim.AdamW(model.parameters(), 1e-2), classify)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in "ab")
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in "ab")

    def forward(self, x: Any) -> Any:
        y = self.norms[0](self.first(x)).relu_()
        return (self.norms[1](self.second(y)) + x).relu_()


@program
def resnet_channels_last(device: str) -> Any:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), Block(8), nn.AvgPool2d(2),
        Block(8), nn.Flatten(), nn.LazyLinear(4),
    )  # fmt: skip
    x = torch.randn(4, 3, 12, 12)
    model(x)
    model = model.to(device, memory_format=torch.channels_last)
    data = x.to(device, memory_format=torch.channels_last), torch.randint(0, 4, (4,)).to(device)
    done = train(model, data, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), classify)
    model.eval()
    with torch.no_grad():
        return done, model(data[0])


@program
def transposed_and_1d_convolutions(device: str) -> Any:
    model = nn.Sequential(
        nn.Conv1d(4, 8, 3), nn.ReLU(), nn.ConvTranspose1d(8, 4, 3, stride=2), nn.PReLU(),
        nn.Flatten(), nn.Linear(4 * 37, 3),
    ).to(device)  # fmt: skip
    data = torch.randn(5, 4, 20).to(device), torch.randint(0, 3, (5,)).to(device)
    return train(model, data, torch.optim.AdamW(model.parameters(), 1e-2), classify)


class Attention(nn.Module):
    def __init__(self, causal: bool, mask: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.causal, self.mask = causal, mask

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, 4, width // 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        mask = None
        if self.mask:
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))


def attention(device: str, causal: bool, mask: bool, dtype: Any = torch.float32) -> Any:
    model = nn.Sequential(
        nn.Embedding(50, 32), Attention(causal, mask), nn.LayerNorm(32), nn.Linear(32, 50)
    )
    model = model.to(device, dtype)
    tokens = torch.randint(0, 50, (3, 9)).to(device)

    def loss(model: Any, data: Any) -> Any:
        return F.cross_entropy(model(data[:, :-1]).flatten(0, 1).float(), data[:, 1:].flatten())

    # The first steps of Adam are as long for a small gradient as for a large one.
    kind = torch.optim.AdamW if dtype is torch.float32 else torch.optim.SGD
    return train(model, tokens, kind(model.parameters(), 1e-2), loss)


@program
def sdpa_causal(device: str) -> Any:
    return attention(device, True, False)


@program
def sdpa_mask(device: str) -> Any:
    return attention(device, False, True)


@program
def sdpa_bfloat16(device: str) -> Any:
    return attention(device, True, False, torch.bfloat16)


@program
def transformer_encoder(device: str) -> Any:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        nn.Flatten(),
        nn.Linear(16 * 6, 4),
    ).to(device)
    data = torch.randn(3, 6, 16).to(device), torch.randint(0, 4, (3,)).to(device)
    done = train(model, data, torch.optim.AdamW(model.parameters(), 1e-2), classify)
    model.eval()
    with torch.inference_mode():
        return done, model(data[0]).clone()


def recurrent(device: str, kind: Any, **options: Any) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = kind(6, 8, batch_first=True, **options)
            self.out = nn.LazyLinear(3)

        def forward(self, x: Any) -> Any:
            return self.out(self.rnn(x)[0][:, -1])

    model = Net()
    x = torch.randn(4, 5, 6)
    model(x)
    data = x.to(device), torch.randint(0, 3, (4,)).to(device)
    model = model.to(device)
    with torch.backends.cudnn.flags(enabled=options.pop("cudnn", True)):
        return train(model, data, torch.optim.AdamW(model.parameters(), 1e-2), classify)


@program
def lstm_cudnn(device: str) -> Any:
    return recurrent(device, nn.LSTM, num_layers=2, bidirectional=True)


@program
def gru_cudnn(device: str) -> Any:
    return recurrent(device, nn.GRU)


@program
def lstm_and_gru_cells(device: str) -> Any:
    lstm, gru = nn.LSTMCell(6, 8).to(device), nn.GRUCell(8, 4).to(device)
    x = torch.randn(5, 3, 6).to(device)
    state, hidden = None, None
    for step in x:
        state = lstm(step, state)
        hidden = gru(state[0], hidden)
    hidden.square().sum().backward()
    return hidden, [p.grad for p in (*lstm.parameters(), *gru.parameters())]


@program
def lstm_without_cudnn(device: str) -> Any:
    with torch.backends.cudnn.flags(enabled=False):
        return recurrent(device, nn.LSTM, num_layers=2)


@program
def embedding_bag(device: str) -> Any:
    results = []
    for mode in ("sum", "mean", "max"):
        bag = nn.EmbeddingBag(20, 6, mode=mode).to(device)
        index = torch.randint(0, 20, (15,)).to(device)
        out = bag(index, torch.tensor([0, 4, 4, 9]).to(device))
        out.square().sum().backward()
        results += [out, bag.weight.grad]
    return results


@program
def autocast_and_scaler(device: str) -> Any:
    model, data = small_mlp(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cuda" if device != "cpu" else "cpu", init_scale=1024.0)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast(device.partition(":")[0], torch.bfloat16):
            loss = classify(model, data)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, scaler.get_scale(), list(model.parameters())


@program
def checkpointing(device: str) -> Any:
    from torch.utils.checkpoint import checkpoint

    model, data = small_mlp(device)

    def loss(model: Any, data: Any) -> Any:
        hidden = checkpoint(model[:3], data[0], use_reentrant=False)
        hidden = checkpoint(model[3], hidden, use_reentrant=True)
        return F.cross_entropy(hidden, data[1])

    return train(model, data, torch.optim.AdamW(model.parameters(), 1e-2), loss)


@program
def functional_gradients(device: str) -> Any:
    from torch.func import grad, hessian, jacrev, vmap

    w, x = torch.randn(4, 3).to(device), torch.randn(7, 4).to(device)

    def value(w: Any, row: Any) -> Any:
        return (row @ w).tanh().square().sum()

    return vmap(grad(value), (None, 0))(w, x), jacrev(value)(w, x[0]), hessian(value, 1)(w, x[0])


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x**3, x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Any, other: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad + other


@program
def custom_function_and_double_backward(device: str) -> Any:
    x = torch.randn(5, dtype=torch.float64).to(device).requires_grad_()
    first, second = Cube.apply(x)
    (grad,) = torch.autograd.grad(first.sum() + second, x, create_graph=True)
    (twice,) = torch.autograd.grad(grad.sum(), x)
    return first, grad, twice


@program
def custom_operator(device: str) -> Any:
    x = torch.randn(6).to(device).requires_grad_()
    result = torch.ops.values_programs.scaled(x, 3.0)
    result.sum().backward()
    return result, x.grad


@torch.library.custom_op("values_programs::scaled", mutates_args=())
def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor + torch.ones_like(x)


def keep_factor(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.factor = inputs[1]


scaled.register_autograd(lambda ctx, grad: (grad * ctx.factor, None), setup_context=keep_factor)


@program
def data_parallel(device: str) -> Any:
    model, data = small_mlp(device)
    if device != "cpu":
        model = nn.DataParallel(model, [0, 1])
    return train(model, data, torch.optim.AdamW(model.parameters(), 1e-2), classify)


@program
def model_parallel(device: str) -> Any:
    other = "cuda:1" if device != "cpu" else "cpu"
    model, data = small_mlp(device)
    model[3].to(other)

    def loss(model: Any, data: Any) -> Any:
        return F.cross_entropy(model[3](model[:3](data[0]).to(other)), data[1].to(other))

    return train(model, data, torch.optim.AdamW(model.parameters(), 1e-2), loss)


@program
def side_streams_and_pinned_copies(device: str) -> Any:
    source = torch.randn(8, 8)
    if device == "cpu":
        return source @ source, source.t() + 1
    source = source.pin_memory()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        there = source.to(device, non_blocking=True)
        product = there @ there
    torch.cuda.current_stream().wait_stream(stream)
    product.record_stream(torch.cuda.current_stream())
    host = torch.empty(8, 8).pin_memory()
    host.copy_(there.t() + 1, non_blocking=True)
    torch.cuda.synchronize()
    return product, host


@program
def cuda_graph(device: str) -> Any:
    model, data = small_mlp(device)
    inputs = [torch.randn(12, 16) for _ in range(3)]
    static = data[0].clone()
    results = []
    if device == "cpu":
        for item in inputs:
            loss = F.cross_entropy(model(item), data[1])
            grads = torch.autograd.grad(loss, list(model.parameters()))
            results += [loss, *grads]
        return results
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.autograd.grad(F.cross_entropy(model(static), data[1]), list(model.parameters()))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = F.cross_entropy(model(static), data[1])
        grads = torch.autograd.grad(loss, list(model.parameters()))
    for item in inputs:
        static.copy_(item)
        graph.replay()
        results += [loss.clone(), *(grad.clone() for grad in grads)]
    return results


@program
def indexing(device: str) -> Any:
    x = torch.randn(6, 5).to(device)
    i = torch.tensor([3, 0, 3]).to(device)
    y = x.clone()
    y[i, 1] = 7.0
    y.index_add_(0, i, torch.ones(3, 5).to(device))
    y[:, 2:4].mul_(2)
    z = x.clone().index_put_((i,), torch.ones(3, 5).to(device), accumulate=True)
    z[z > 1] = 0.5
    w = torch.zeros(6, 5).to(device).scatter_add_(0, i[:, None].expand(3, 5), x[:3])
    return x[i], x[x > 0], y, z, w, x.gather(1, i[None].expand(6, 3)), x[x.sum(1) > 0, 1:]


@program
def counting(device: str) -> Any:
    x = torch.randint(0, 9, (40,)).to(device)
    return (
        x.unique(return_inverse=True, return_counts=True), (x > 4).nonzero(), x.bincount(),
        torch.unique_consecutive(x, return_counts=True), torch.repeat_interleave(x[:5]),
        torch.unique(x.view(20, 2), dim=0), torch.histc(x.float(), 5), torch.argwhere(x == 3),
        (x > 4).unique(), x.equal(x.clone()), x.equal(x + 1), torch.masked_select(x, x > 2),
        torch.nonzero(torch.zeros(3, device=device)),
    )  # fmt: skip


@program
def sorting(device: str) -> Any:
    x = torch.randn(5, 30).to(device)
    return (
        x.sort(1), x.topk(4), x.argsort(0), x.median(1), x.kthvalue(3), x.mode(1), x.cummax(1),
        torch.searchsorted(x.sort(1)[0], x), x.msort(), x.quantile(0.3),
        torch.randint(0, 3, (9,)).to(device).mode(),
    )  # fmt: skip


@program
def complex_fourier(device: str) -> Any:
    x = torch.randn(4, 16).to(device).requires_grad_()
    y = torch.fft.rfft(x)
    z = torch.fft.ifft2(y * y.conj() + 1j * y)
    z.abs().sum().backward()
    return (
        y,
        z.real,
        z.conj().imag,
        torch.view_as_real(z),
        x.grad,
        torch.stft(x.detach(), 8, return_complex=True, window=torch.ones(8, device=device)),
    )


@program
def linear_algebra(device: str) -> Any:
    a = torch.randn(4, 4, dtype=torch.float64).to(device)
    s = (a @ a.mT + 4 * torch.eye(4, dtype=torch.float64, device=device)).requires_grad_()
    value = (
        torch.linalg.inv(s).sum() + torch.linalg.det(s) + torch.linalg.cholesky(s).sum()
        + torch.linalg.eigvalsh(s).sum() + torch.linalg.solve(s, a).sum()
        + torch.linalg.svdvals(s).sum()
    )  # fmt: skip
    value.backward()
    return (
        value,
        s.grad,
        torch.linalg.qr(a)[1].abs(),
        torch.matrix_exp(a),
        torch.linalg.matrix_norm(a),
    )


@program
def sparse(device: str) -> Any:
    index = torch.tensor([[0, 1, 1, 3], [2, 0, 0, 1]]).to(device)
    s = torch.sparse_coo_tensor(index, torch.randn(4).to(device), (4, 3), check_invariants=False)
    dense = torch.randn(3, 5).to(device).requires_grad_()
    product = torch.sparse.mm(s.coalesce(), dense)
    product.sum().backward()
    again = torch.sparse.mm(s, dense)  # with an index twice
    (again + torch.mm(s.t(), again.detach()).sum()).sum().backward()
    table = nn.Embedding(10, 4, sparse=True).to(device)
    table(torch.tensor([1, 5, 1]).to(device)).sum().backward()
    optimizer = torch.optim.SparseAdam(list(table.parameters()), 0.1)
    optimizer.step()
    return (
        s.to_dense(),
        product,
        again,
        dense.grad,
        table.weight,
        dense.detach().relu().to_sparse().to_dense(),
    )


@program
def narrow_types(device: str) -> Any:
    x = torch.randn(64).to(device)
    as_int8 = (x * 20).to(torch.int8)
    results = [as_int8, as_int8.float() + 1, x.half() * 2, x.bfloat16().sum()]
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        results.append(x.to(dtype).float())
    a = (torch.randint(-5, 5, (32, 32))).to(torch.int8).to(device)
    return (
        results,
        torch._int_mm(a, a),
        x.view(torch.int32),
        x.clone().resize_(4, 4),
        x.as_strided((3, 3), (2, 1)),
    )


@program
def fp8_product(device: str) -> Any:
    a, b = (torch.randn(32, 32).to(torch.float8_e4m3fn) for _ in "ab")
    one = torch.tensor(0.5)
    return torch._scaled_mm(
        a.to(device),
        b.t().contiguous().t().to(device),
        scale_a=one.to(device),
        scale_b=one.to(device),
        out_dtype=torch.bfloat16,
    )


@program
def products_of_another_dtype(device: str) -> Any:
    """Which the CPU does not have: there, of converted factors."""
    a, b = (torch.randn(2, 8, 8).to(torch.bfloat16) for _ in "ab")
    total = torch.randn(2, 8, 8)
    if device == "cpu":
        a, b = a.float(), b.float()
        first = torch.addmm(total[0], a[0], b[0], beta=2)
        return a @ b, a[0] @ b[0], first, torch.baddbmm(total, a, b)
    a, b, total = a.to(device), b.to(device), total.to(device)
    wide = torch.float32
    product = torch.empty(8, 8, device=device)
    torch.mm(a[0], b[0], out_dtype=wide, out=product)
    both = torch.bmm(a, b, out_dtype=wide)
    torch.addmm(total[0], a[0], b[0], out_dtype=wide, beta=2, out=(first := product.clone()))
    torch.baddbmm(total, a, b, out_dtype=wide, out=total)
    return both, product, first, total


@program
def views_and_out_arguments(device: str) -> Any:
    x = torch.randn(4, 6).to(device)
    out = torch.empty(0, device=device)
    torch.add(x, 1, out=out)
    torch.matmul(x, x.t(), out=(product := torch.empty(4, 4, device=device)))
    x.t()[1:3].zero_()
    x[1].copy_(x[2])
    values, places = torch.empty(0, device=device), torch.empty(0, dtype=torch.long, device=device)
    torch.sort(x, out=(values, places))
    flat = torch.empty(0, 3, device=device)
    nothing = (flat + 1).sum()
    parts = torch._foreach_mul(list(x.unbind()), 2.0)
    torch._foreach_add_(parts, list(x.unbind()))
    return (
        x,
        out,
        product,
        values,
        places,
        nothing,
        parts,
        torch.cat([x, x.flip(0)], 1),
        torch.arange(9, device=device).split([2, 3, 4]),
    )


@program
def huggingface_gpt2(device: str) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=60, n_positions=32, n_embd=32, n_layer=2, n_head=2,
                        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)  # fmt: skip
    model = GPT2LMHeadModel(config).to(device)
    tokens = torch.randint(0, 60, (2, 12)).to(device)
    return train(
        model, tokens, torch.optim.AdamW(model.parameters(), 1e-2), lambda m, t: m(t, labels=t).loss
    )


@program
def huggingface_llama_and_generation(device: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    model = LlamaForCausalLM(config).to(device)
    tokens = torch.randint(0, 60, (2, 12)).to(device)
    done = train(
        model, tokens, torch.optim.AdamW(model.parameters(), 1e-2), lambda m, t: m(t, labels=t).loss
    )
    model.eval()
    return done, model.generate(tokens, max_new_tokens=5, do_sample=False, pad_token_id=0)


@program
def compiled_region(device: str) -> Any:
    model, data = small_mlp(device)
    # On the CPU the compiler would be g++'s, which takes as long as all of these programs.
    code = model if device == "cpu" else torch.compile(model)
    done = train(code, data, torch.optim.AdamW(model.parameters(), 1e-2), classify, 2)
    return done[0], list(model.parameters())


@program
def subclass_with_dispatch(device: str) -> Any:
    from torch.testing._internal.two_tensor import TwoTensor

    x = torch.randn(4, 4).to(device)
    both = TwoTensor(x, x + 1)
    result = (both @ both).relu()
    return result.a, result.b


def tensors(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value.detach().cpu()]
    if isinstance(value, (bool, int, float)):
        return [torch.tensor(float(value), dtype=torch.float64)]
    return [item for part in value for item in tensors(part)]


def difference(a: Any, b: Any) -> float:
    """The largest difference, relative to the largest value; infinite for other shapes or types."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if not a.numel():
        return 0.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.resolve_conj().to(wide), b.resolve_conj().to(wide)
    if not bool((a.isnan() == b.isnan()).all()):
        return math.inf
    a, b = a.nan_to_num(), b.nan_to_num()
    return float((a - b).abs().max() / (a.abs().max() + 1e-30))


def run(name: str) -> dict[str, Any]:
    try:
        torch.manual_seed(0)
        on_cpu = tensors(PROGRAMS[name]("cpu"))
        state = torch.get_rng_state()
        torch.manual_seed(0)
        with Values():
            # The device's numbers must not advance the CPU's.
            torch.rand(3, device="cuda")
            on_device = tensors(PROGRAMS[name]("cuda"))
        undisturbed = bool((torch.get_rng_state() == state).all())
        torch.cuda.synchronize()
        if len(on_cpu) != len(on_device):
            return {"error": f"{len(on_cpu)} and {len(on_device)} results"}
        parts = [difference(a, b) for a, b in zip(on_cpu, on_device, strict=True)]
        moving = sum(float(item.to(torch.complex128).abs().sum()) for item in on_cpu)
        return {
            "difference": max(parts),
            "results": len(parts),
            "moving": moving,
            "rng": undisturbed,
        }
    except Exception as error:  # noqa: BLE001 - reported, for whatever reason a program fails
        if "-v" in sys.argv:
            traceback.print_exc()
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


if __name__ == "__main__":
    torch.set_num_threads(1)
    wanted = [name for name in sys.argv[1:] if not name.startswith("-")]
    for name in wanted or PROGRAMS:
        print(json.dumps({"program": name, **run(name)}), flush=True)
