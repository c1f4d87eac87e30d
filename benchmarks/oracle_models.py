"""More programs for `oracle.py`: kinds of models and of training,
and what programs do with CUDA's memory, graphs, streams and devices.
"""

from __future__ import annotations

from typing import Final

_STEP: Final = """\
def train(step, parameters, make=torch.optim.AdamW, steps=4, **settings):
    optimizer = make(parameters, **settings)
    for _ in range(steps):
        loss = step()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


"""

_MLP: Final = """\
model = nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024)).cuda()
"""

_ATTENTION: Final = """\
from torch.nn.attention import SDPBackend, sdpa_kernel

model = GPT().cuda().bfloat16()


def step():
    tokens, targets = batch()
    with sdpa_kernel(SDPBackend.KIND):
        return loss_of(model(tokens), targets)


train(step, model.parameters())
"""

_RECURRENT: Final = """\
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.KIND(256, 512, 2, batch_first=True, bidirectional=BOTH)
        self.head = nn.Linear(1024 if BOTH else 512, 64)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


model = Tagger().cuda()
train(lambda: model(torch.randn(16, 64, 256, device="cuda")).square().mean(), model.parameters())
"""

_OPTIMIZER: Final = (
    _MLP
    + """\
train(
    lambda: model(torch.randn(256, 1024, device="cuda")).square().mean(),
    model.parameters(),
    torch.optim.KIND,
)
"""
)

_TEXTS: Final = {
    "attention_by_hand": """\
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(256, 768), nn.Linear(256, 256)
        self.register_buffer("mask", torch.ones(128, 128).tril().bool())

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 4, 64).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) / 8).masked_fill(~self.mask, float("-inf"))
        weights = F.dropout(scores.softmax(-1), 0.1)
        return x + self.proj((weights @ v).transpose(1, 2).reshape(b, t, d))


model = nn.Sequential(*(Attention() for _ in range(4))).cuda()
train(lambda: model(torch.randn(16, 128, 256, device="cuda")).square().mean(), model.parameters())
""",
    "attention_math": _ATTENTION.replace("KIND", "MATH"),
    "attention_flash": _ATTENTION.replace("KIND", "FLASH_ATTENTION"),
    "attention_efficient": _ATTENTION.replace("KIND", "EFFICIENT_ATTENTION"),
    "gpt_autocast_checkpoint_clipping": """\
model = GPT(again=False).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(3):
    for _ in range(2):
        tokens, targets = batch()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_of(model(tokens), targets) / 2
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
""",
    "adapters": """\
class Adapted(nn.Module):
    def __init__(self, base, rank=8):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


model = GPT().requires_grad_(False)
for block in model.blocks:
    block.qkv, block.up = Adapted(block.qkv), Adapted(block.up)
model = model.cuda().bfloat16()


def step():
    tokens, targets = batch()
    return loss_of(model(tokens), targets)


train(step, [p for p in model.parameters() if p.requires_grad])
""",
    "vision_transformer": """\
class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 256, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, 256))
        self.places = nn.Parameter(torch.zeros(1, 50, 256))
        self.blocks = nn.Sequential(*(Block(256, 4) for _ in range(3)))
        self.head = nn.Linear(256, 100)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.blocks(x)[:, 0])


model = Vision().cuda()


def step():
    images = torch.randn(16, 3, 112, 112, device="cuda")
    return F.cross_entropy(model(images), torch.randint(0, 100, (16,), device="cuda"))


train(step, model.parameters())
""",
    "residual_bottlenecks": """\
class Bottleneck(nn.Module):
    def __init__(self, channels):
        super().__init__()
        inner = channels // 4
        self.first = nn.Sequential(nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner))
        self.middle = nn.Sequential(
            nn.Conv2d(inner, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner)
        )
        self.last = nn.Sequential(
            nn.Conv2d(inner, channels, 1, bias=False), nn.BatchNorm2d(channels)
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.first(x))
        return self.relu(self.last(self.relu(self.middle(y))) + x)


model = nn.Sequential(
    nn.Conv2d(3, 128, 7, 2, 3), Bottleneck(128), Bottleneck(128), nn.AdaptiveAvgPool2d(1),
    nn.Flatten(), nn.Linear(128, 10)
).cuda()


def step():
    images = torch.randn(16, 3, 64, 64, device="cuda")
    return F.cross_entropy(model(images), torch.randint(0, 10, (16,), device="cuda"))


train(step, model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
""",
    "unet": """\
class Down(nn.Sequential):
    def __init__(self, before, after):
        conv = nn.Conv2d(before, after, 3, padding=1)
        super().__init__(conv, nn.GroupNorm(8, after), nn.SiLU())


class Net2(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = Down(4, 32), Down(32, 64)
        self.up = nn.ConvTranspose2d(64, 32, 2, 2)
        self.last = nn.Conv2d(64, 4, 3, padding=1)

    def forward(self, x):
        kept = self.down1(x)
        y = self.up(self.down2(F.avg_pool2d(kept, 2)))
        return self.last(torch.cat([kept, y], 1))


model = Net2().cuda()


def step():
    x = torch.randn(8, 4, 64, 64, device="cuda")
    noise = torch.randn_like(x)
    return F.mse_loss(model(x + noise), noise)


train(step, model.parameters())
""",
    "depthwise_convolutions": """\
class Separable(nn.Sequential):
    def __init__(self, before, after):
        super().__init__(
            nn.Conv2d(before, before, 3, padding=1, groups=before, bias=False),
            nn.BatchNorm2d(before),
            nn.Hardswish(),
            nn.Conv2d(before, after, 1, bias=False),
            nn.BatchNorm2d(after),
        )


model = nn.Sequential(Separable(16, 64), Separable(64, 64), nn.AdaptiveAvgPool2d(1)).cuda()
train(
    lambda: model(torch.randn(16, 16, 64, 64, device="cuda")).square().mean(),
    model.parameters(),
    torch.optim.RMSprop,
)
""",
    "convolutions_of_one_and_three_dimensions": """\
sound = nn.Sequential(nn.Conv1d(1, 64, 9, 4), nn.GELU(), nn.Conv1d(64, 64, 9, 4)).cuda()
video = nn.Sequential(nn.Conv3d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2)).cuda()


def step():
    a = sound(torch.randn(16, 1, 16000, device="cuda")).square().mean()
    return a + video(torch.randn(2, 3, 8, 64, 64, device="cuda")).mean()


train(step, [*sound.parameters(), *video.parameters()])
""",
    "adversaries": """\
maker = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 3072), nn.Tanh()).cuda()
critic = nn.Sequential(nn.Linear(3072, 1024), nn.LeakyReLU(0.2), nn.Linear(1024, 1)).cuda()
makes = torch.optim.Adam(maker.parameters(), 2e-4, betas=(0.5, 0.999))
judges = torch.optim.Adam(critic.parameters(), 2e-4, betas=(0.5, 0.999))
for _ in range(3):
    fake = maker(torch.randn(128, 128, device="cuda"))
    real = torch.rand(128, 3072, device="cuda")
    judges.zero_grad()
    (F.softplus(critic(fake.detach())) + F.softplus(-critic(real))).mean().backward()
    judges.step()
    makes.zero_grad()
    F.softplus(-critic(fake)).mean().backward()
    makes.step()
""",
    "variational_autoencoder": """\
encoder = nn.Sequential(nn.Linear(3072, 1024), nn.ReLU(), nn.Linear(1024, 128)).cuda()
decoder = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 3072)).cuda()


def step():
    x = torch.rand(256, 3072, device="cuda")
    mean, spread = encoder(x).chunk(2, -1)
    code = mean + torch.randn_like(mean) * (spread / 2).exp()
    kept = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(-1).mean()
    return F.binary_cross_entropy_with_logits(decoder(code), x) + 1e-3 * kept


train(step, [*encoder.parameters(), *decoder.parameters()])
""",
    "rnn": _RECURRENT.replace("KIND", "RNN").replace("BOTH", "False"),
    "gru_of_both_directions": _RECURRENT.replace("KIND", "GRU").replace("BOTH", "True"),
    "recommender": """\
tables = nn.ModuleList(nn.EmbeddingBag(20000, 64, mode="sum") for _ in range(4)).cuda()
top = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 1)).cuda()


def step():
    found = [table(torch.randint(0, 20000, (512, 10), device="cuda")) for table in tables]
    return F.softplus(top(torch.cat(found, -1))).mean()


train(step, [*tables.parameters(), *top.parameters()], torch.optim.Adagrad)
""",
    "sparse_embedding": """\
table = nn.Embedding(50000, 64, sparse=True).cuda()
train(
    lambda: table(torch.randint(0, 50000, (1024,), device="cuda")).square().mean(),
    table.parameters(),
    torch.optim.SparseAdam,
)
""",
    "contrastive_pairs": """\
tower = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 256)).cuda()


def step():
    x = torch.randn(512, 512, device="cuda")
    first, second = (F.normalize(tower(x + 0.1 * torch.randn_like(x)), dim=-1) for _ in range(2))
    scores = first @ second.T / 0.07
    labels = torch.arange(len(x), device="cuda")
    return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2


train(step, tower.parameters())
""",
    "encoder_and_decoder": """\
model = nn.Transformer(256, 4, 2, 2, 512, batch_first=True).cuda()


def step():
    source = torch.randn(8, 64, 256, device="cuda")
    return model(source, torch.randn(8, 48, 256, device="cuda")).square().mean()


train(step, model.parameters())
""",
    "gradients_of_samples": """\
from torch.func import functional_call, grad, vmap

model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)


def loss_of_one(parameters, x, y):
    return F.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])


for _ in range(3):
    x, y = torch.randn(32, 256, device="cuda"), torch.randint(0, 10, (32,), device="cuda")
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    grads = vmap(grad(loss_of_one), in_dims=(None, 0, 0))(parameters, x, y)
    for name, p in model.named_parameters():
        p.grad = grads[name].mean(0)
    optimizer.step()
    optimizer.zero_grad()
""",
    "forward_mode": """\
from torch.func import functional_call, jvp

model = nn.Sequential(nn.Linear(1024, 2048), nn.Tanh(), nn.Linear(2048, 1024)).cuda()
parameters = {name: p.detach() for name, p in model.named_parameters()}
for _ in range(3):
    x = torch.randn(256, 1024, device="cuda")
    tangents = {name: torch.randn_like(p) for name, p in parameters.items()}


    def loss_of_these(given):
        return functional_call(model, given, (x,)).square().mean()

    loss, slope = jvp(loss_of_these, (parameters,), (tangents,))
    parameters = {name: p - 1e-3 * slope * tangents[name] for name, p in parameters.items()}
""",
    **{
        f"optimizer_{name.lower()}": _OPTIMIZER.replace("KIND", f"{name}{settings}")
        for name, settings in {
            "Adadelta": "",
            "Adamax": "",
            "NAdam": "",
            "RAdam": ", foreach=False",
            "Rprop": "",
            "ASGD": "",
            "Adafactor": "",
            "SGD": ", lr=0.1, momentum=0.9, fused=True",
        }.items()
    },
    "optimizer_in_the_backward_pass": _MLP
    + """\
optimizers = {p: torch.optim.Adam([p], foreach=False) for p in model.parameters()}


def update(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for p in model.parameters():
    p.register_post_accumulate_grad_hook(update)
for _ in range(4):
    model(torch.randn(256, 1024, device="cuda")).square().mean().backward()
""",
    "parametrizations": """\
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

model = nn.Sequential(
    weight_norm(nn.Linear(1024, 2048)), nn.ReLU(), spectral_norm(nn.Linear(2048, 512))
).cuda()
train(lambda: model(torch.randn(256, 1024, device="cuda")).square().mean(), model.parameters())
""",
    "teacher_and_student": """\
teacher = nn.Sequential(nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 512)).cuda().eval()
student = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).cuda()


def step():
    x = torch.randn(512, 512, device="cuda")
    with torch.no_grad():
        aim = teacher(x).softmax(-1)
    return F.kl_div(student(x).log_softmax(-1), aim, reduction="batchmean")


train(step, student.parameters())
""",
    "evaluation_between_steps": _MLP
    + """\
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(2):
    model.train()
    for _ in range(2):
        model(torch.randn(256, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        outputs = [model(torch.randn(512, 1024, device="cuda")) for _ in range(3)]
    del outputs
""",
    "caches_of_generation": """\
class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(512, 1536), nn.Linear(512, 512)

    def forward(self, x, cache=None):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 8, d // 8).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(b, t, d)), (k, v)


model = Cached().cuda().half().eval()
with torch.inference_mode():
    x, cache = torch.randn(8, 256, 512, device="cuda", dtype=torch.half), None
    for _ in range(6):
        x, cache = model(x, cache)
        x = x[:, -1:]
""",
    "activations_on_the_host": _MLP
    + """\
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        loss = model(torch.randn(512, 1024, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "pinned_batches": _MLP
    + """\
optimizer = torch.optim.SGD(model.parameters(), 0.1)
copies = torch.cuda.Stream()
for _ in range(4):
    host = torch.randn(1024, 1024).pin_memory()
    with torch.cuda.stream(copies):
        x = host.to("cuda", non_blocking=True)
    torch.cuda.current_stream().wait_stream(copies)
    x.record_stream(torch.cuda.current_stream())
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "captured_step": _MLP
    + """\
optimizer = torch.optim.Adam(model.parameters(), capturable=True)
x = torch.randn(256, 1024, device="cuda")
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
optimizer.zero_grad(set_to_none=True)
with torch.cuda.graph(graph):
    model(x).square().mean().backward()
    optimizer.step()
for _ in range(3):
    x.copy_(torch.randn(256, 1024, device="cuda"))
    graph.replay()
""",
    "graphed_callables": _MLP
    + """\
x = torch.randn(256, 1024, device="cuda", requires_grad=True)
graphed = torch.cuda.make_graphed_callables(model, (x,))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    graphed(torch.randn(256, 1024, device="cuda", requires_grad=True)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "pool_of_memory": _MLP
    + """\
pool = torch.cuda.MemPool()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    with torch.cuda.use_mem_pool(pool):
        x = torch.randn(1024, 1024, device="cuda")
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "expandable_segments": """\
torch.cuda.memory._set_allocator_settings("expandable_segments:True")
model = GPT().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for length in (64, 128, 192, 256):
    tokens, targets = batch(length=length)
    loss_of(model(tokens), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "rounded_sizes": """\
torch.cuda.memory._set_allocator_settings("roundup_power2_divisions:4,max_split_size_mb:32")
model = GPT().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for length in (64, 96, 160, 224):
    tokens, targets = batch(length=length)
    loss_of(model(tokens), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "cache_emptied": _MLP
    + """\
optimizer = torch.optim.AdamW(model.parameters())
for size in (512, 1024, 256, 2048):
    model(torch.randn(size, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.empty_cache()
""",
    "out_of_memory_and_on": _MLP
    + """\
optimizer = torch.optim.AdamW(model.parameters())
for size in (512, 2**26, 1024, 512):
    try:
        model(torch.empty(size, 1024, device="cuda")).square().mean().backward()
    except torch.OutOfMemoryError:
        continue
    optimizer.step()
    optimizer.zero_grad()
""",
    "outputs_that_pile_up": _MLP
    + """\
optimizer = torch.optim.AdamW(model.parameters())
losses = []
for _ in range(6):
    out = model(torch.randn(512, 1024, device="cuda"))
    losses.append(out.square().mean(0))
    out.square().mean().backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
""",
    "pipeline_of_two_devices": """\
first, second = nn.Linear(1024, 4096).to("cuda:0"), nn.Linear(4096, 1024).to("cuda:1")
optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()])
for _ in range(3):
    hidden = [first(torch.randn(128, 1024, device="cuda:0")).relu() for _ in range(4)]
    losses = [second(part.to("cuda:1", non_blocking=True)).square().mean() for part in hidden]
    torch.stack(losses).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "columns_on_two_devices": """\
left, right = nn.Linear(1024, 2048).to("cuda:0"), nn.Linear(1024, 2048).to("cuda:1")
head = nn.Linear(4096, 128).to("cuda:0")
optimizer = torch.optim.SGD([*left.parameters(), *right.parameters(), *head.parameters()], 0.1)
for _ in range(3):
    x = torch.randn(256, 1024, device="cuda:0")
    found = torch.cat([left(x), right(x.to("cuda:1")).to("cuda:0")], -1)
    head(found.relu()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "spectra": """\
filters = nn.Parameter(torch.randn(64, 513, dtype=torch.cfloat, device="cuda"))


def step():
    x = torch.randn(16, 64, 1024, device="cuda")
    return torch.fft.irfft(torch.fft.rfft(x) * filters).square().mean()


train(step, [filters])
""",
    "policy_gradient": """\
policy = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8)).cuda()
seen, done = torch.zeros(128, 64, 64, device="cuda"), torch.zeros(128, 64, 8, device="cuda")
optimizer = torch.optim.Adam(policy.parameters())
for _ in range(3):
    state = torch.randn(64, 64, device="cuda")
    with torch.no_grad():
        for t in range(128):
            seen[t] = state
            done[t] = policy(state).softmax(-1)
            state = state * 0.9 + 0.1 * torch.randn_like(state)
    ratio = (policy(seen).log_softmax(-1) * done).sum(-1).exp()
    torch.minimum(ratio, ratio.clamp(0.8, 1.2)).mean().neg().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
}

MODELS: Final = {name: _STEP + text for name, text in _TEXTS.items()}
