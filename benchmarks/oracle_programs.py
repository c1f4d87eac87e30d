"""Training and inference programs for `oracle.py`."""

from __future__ import annotations

from typing import Final

from oracle_models import MODELS

_START: Final = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, d = x.shape
        parts = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocab=2000, width=256, layers=3, again=None):
        super().__init__()
        self.again = again
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            if self.again is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.again)
        return self.head(self.norm(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(32), nn.BatchNorm2d(64)
        self.head = nn.Linear(64, 100)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.relu(self.norm2(self.conv2(x)))
        return self.head(x.mean((2, 3)))


def batch(vocab=2000, size=8, length=128, device="cuda"):
    tokens = torch.randint(0, vocab, (size, length), device=device)
    return tokens, torch.randint(0, vocab, (size, length), device=device)


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

"""

_MLP: Final = """\
model = nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024)).cuda()
"""

_TEXTS: Final = {
    "gpt": """\
model = GPT().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    tokens, targets = batch()
    loss = loss_of(model(tokens), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "gpt_autocast_scaler": """\
model = GPT().cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
scaler = torch.amp.GradScaler("cuda")
for _ in range(4):
    tokens, targets = batch()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_of(model(tokens), targets)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "gpt_bfloat16_clipping": """\
model = GPT().cuda().bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
for _ in range(4):
    tokens, targets = batch()
    optimizer.zero_grad()
    loss_of(model(tokens), targets).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
""",
    "gpt_checkpoint": """\
model = GPT(again=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for _ in range(4):
    tokens, targets = batch()
    loss = loss_of(model(tokens), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "gpt_checkpoint_reentrant": """\
model = GPT(again=True).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for _ in range(4):
    tokens, targets = batch()
    loss = loss_of(model(tokens), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "gpt_accumulation": """\
model = GPT().cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    for _ in range(4):
        tokens, targets = batch(size=4)
        (loss_of(model(tokens), targets) / 4).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "gpt_inference": """\
model = GPT().cuda().eval()
tokens, _ = batch()
with torch.inference_mode():
    for _ in range(4):
        tokens = model(tokens).argmax(-1)
""",
    "cnn": """\
model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for _ in range(4):
    images = torch.randn(16, 3, 64, 64, device="cuda")
    loss = F.cross_entropy(model(images), torch.randint(0, 100, (16,), device="cuda"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "cnn_channels_last": """\
model = Net().cuda().to(memory_format=torch.channels_last)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    images = torch.randn(16, 3, 64, 64).cuda().to(memory_format=torch.channels_last)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(images), torch.randint(0, 100, (16,)).cuda())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "gru_cell": """\
cell, head = nn.GRUCell(512, 1024).cuda(), nn.Linear(1024, 512).cuda()
optimizer = torch.optim.RMSprop([*cell.parameters(), *head.parameters()])
for _ in range(4):
    state, loss = torch.zeros(64, 1024, device="cuda"), 0.0
    for _ in range(6):
        x = torch.randn(64, 512, device="cuda")
        state = cell(x, state)
        loss = loss + F.mse_loss(head(state), x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "lstm": """\
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(256, 512, 2, batch_first=True)
        self.head = nn.Linear(512, 64)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


model = Tagger().cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(4):
    loss = model(torch.randn(16, 64, 256, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "encoder": """\
layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.1, batch_first=True)
model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    loss = model(torch.randn(16, 128, 256, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "two_losses": _MLP
    + """\
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    out = model(torch.randn(256, 1024, device="cuda"))
    out.square().mean().backward(retain_graph=True)
    out.abs().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "gradient_penalty": """\
model = nn.Sequential(nn.Linear(1024, 2048), nn.Tanh(), nn.Linear(2048, 1)).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(4):
    x = torch.randn(256, 1024, device="cuda", requires_grad=True)
    score = model(x)
    (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    loss = score.mean() + (slope.norm(dim=1) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "custom_function": """\
class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (s + x * s * (1 - s))


first, second = nn.Linear(1024, 2048).cuda(), nn.Linear(2048, 1024).cuda()
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
for _ in range(4):
    loss = second(Swish.apply(first(torch.randn(512, 1024, device="cuda")))).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "hooks_and_kept_outputs": _MLP
    + """\
kept = []
model[0].register_forward_hook(lambda module, args, output: kept.append(output.detach()))
model[2].weight.register_hook(lambda grad: grad * 0.5)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    loss = model(torch.randn(256, 1024, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "model_parallel": """\
first, second = nn.Linear(1024, 4096).to("cuda:0"), nn.Linear(4096, 1024).to("cuda:1")
optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()])
for _ in range(4):
    hidden = F.relu(first(torch.randn(256, 1024, device="cuda:0")))
    loss = second(hidden.to("cuda:1")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "data_parallel": _MLP
    + """\
parallel = nn.DataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for _ in range(4):
    loss = parallel(torch.randn(256, 1024, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "lbfgs_closure": _MLP
    + """\
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, history_size=2)
x = torch.randn(256, 1024, device="cuda")


def closure():
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss


for _ in range(3):
    optimizer.step(closure)
""",
    "side_stream": _MLP
    + """\
optimizer = torch.optim.AdamW(model.parameters())
side = torch.cuda.Stream()
for _ in range(4):
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss = model(torch.randn(256, 1024, device="cuda")).square().mean()
        loss.backward()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.step()
    optimizer.zero_grad()
""",
    "moving_average": _MLP
    + """\
average = torch.optim.swa_utils.AveragedModel(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    loss = model(torch.randn(256, 1024, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update_parameters(model)
""",
    "batched_products": """\
weights = nn.Parameter(torch.randn(16, 256, 256, device="cuda"))
optimizer = torch.optim.Adam([weights])
for _ in range(4):
    x = torch.randn(16, 128, 256, device="cuda")
    loss = torch.einsum("bij,bjk->bik", x, weights).softmax(-1).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
}

PROGRAMS: Final = {name: _START + text for name, text in {**_TEXTS, **MODELS}.items()}
