"""Changes after which a step takes as long as before."""

from benchmarks.step_time_cases.case import Case

_PLAIN = "a refactoring, as in any project"

HARMLESS: dict[str, Case] = {
    "renamed_attribute": Case(
        "gpt",
        (
            ("        self.qkv = nn.Linear", "        self.c_attn = nn.Linear"),
            ("self.qkv(x).split", "self.c_attn(x).split"),
        ),
        _PLAIN,
        "a name",
    ),
    "gelu_as_module": Case(
        "gpt",
        (
            (
                "        self.fc = nn.Linear(WIDTH, 4 * WIDTH, bias=False)\n",
                "        self.fc = nn.Linear(WIDTH, 4 * WIDTH, bias=False)\n"
                "        self.act = nn.GELU()\n",
            ),
            ("        x = F.gelu(x)\n", "        x = self.act(x)\n"),
        ),
        "karpathy/nanoGPT#274 (nn.GELU)",
        "the same kernel",
    ),
    "reshape_for_view": Case(
        "gpt",
        (
            (
                "        y = y.transpose(1, 2).contiguous().view(B, T, C)\n",
                "        y = y.transpose(1, 2).reshape(B, T, C)\n",
            ),
        ),
        "pytorch/torchtitan (reshape), Lightning-AI/litgpt",
        "a copy only if contiguous() made one, too",
    ),
    "loop_over_projections": Case(
        "gpt",
        (
            (
                "        q = q.view(B, T, HEADS, C // HEADS).transpose(1, 2)\n"
                "        k = k.view(B, T, HEADS, C // HEADS).transpose(1, 2)\n"
                "        v = v.view(B, T, HEADS, C // HEADS).transpose(1, 2)\n",
                "        q, k, v = (\n"
                "            part.view(B, T, HEADS, C // HEADS).transpose(1, 2) for part in (q, k, v)\n"
                "        )\n",
            ),
        ),
        _PLAIN,
        "the same views",
    ),
    "loss_as_method": Case(
        "gpt",
        (
            (
                "        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))\n",
                "        return self.loss(logits, targets)\n"
                "\n"
                "    def loss(self, logits, targets):\n"
                '        """The mean over all tokens."""\n'
                "        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))\n",
            ),
        ),
        _PLAIN,
        "moved",
    ),
    "types_and_asserts": Case(
        "gpt",
        (
            (
                "    def forward(self, tokens, targets):\n",
                "    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:\n"
                "        assert tokens.shape == targets.shape, (tokens.shape, targets.shape)\n"
                "        assert tokens.shape[1] <= LENGTH\n",
            ),
        ),
        _PLAIN,
        "shapes are on the host",
    ),
    "printed_once": Case(
        "gpt",
        (
            (
                "    parameters = [p for p in model.parameters() if p.requires_grad]\n",
                "    parameters = [p for p in model.parameters() if p.requires_grad]\n"
                '    print(f"{sum(p.numel() for p in parameters):,} parameters")\n'
                "    print(model)\n",
            ),
        ),
        "karpathy/nanoGPT model.py (prints the number of parameters)",
        "before the steps",
    ),
    "loss_once_at_the_end": Case(
        "gpt",
        (
            (
                "        optimizer.zero_grad(set_to_none=True)\n",
                "        optimizer.zero_grad(set_to_none=True)\n    print(loss.detach().float())\n",
            ),
        ),
        "Nerogar/OneTrainer#1608 (a read that is not in the step)",
        "once, after all steps",
    ),
    "comments_and_order": Case(
        "gpt",
        (
            (
                "class MLP(nn.Module):\n    def __init__(self):\n",
                "# Four times as wide inside, as in GPT-2.\n"
                'class MLP(nn.Module):\n    """Two layers."""\n\n    def __init__(self):\n',
            ),
            (
                "        self.ln_1 = nn.LayerNorm(WIDTH)\n        self.attn = Attention()\n",
                "        self.attn = Attention()\n        self.ln_1 = nn.LayerNorm(WIDTH)\n",
            ),
        ),
        _PLAIN,
        "text, and the order of two attributes",
    ),
    "blocks_sequential": Case(
        "cnn",
        (
            (
                "        self.blocks = nn.Sequential(*layers)\n",
                "        self.blocks = nn.ModuleList(layers)\n",
            ),
            (
                "        x = self.blocks(x)\n",
                "        for block in self.blocks:\n            x = block(x)\n",
            ),
        ),
        _PLAIN,
        "the same calls",
    ),
    "relu_as_method": Case(
        "cnn",
        (("        return F.relu(x + y)\n", "        return (x + y).relu()\n"),),
        _PLAIN,
        "the same kernel",
    ),
    "unused_option": Case(
        "cnn",
        (
            (
                "def batches():\n",
                "def drop_path(x, rate=0.0, training=False):\n"
                "    if rate == 0.0 or not training:\n"
                "        return x\n"
                "    keep = torch.rand(len(x), 1, 1, 1, device=x.device) >= rate\n"
                "    return x * keep / (1 - rate)\n"
                "\n"
                "\n"
                "def batches():\n",
            ),
            ("        return F.relu(x + y)\n", "        return F.relu(x + drop_path(y))\n"),
        ),
        "huggingface/pytorch-image-models layers/drop.py (drop_path)",
        "never taken",
    ),
    "settings_as_dataclass": Case(
        "cnn",
        (
            (
                "import torch\nimport torch.nn as nn\n",
                "from dataclasses import dataclass\n\nimport torch\nimport torch.nn as nn\n",
            ),
            (
                "class Block(nn.Module):\n",
                "@dataclass(frozen=True)\n"
                "class Settings:\n"
                "    rate: float = 0.1\n"
                "    momentum: float = 0.9\n"
                "    smoothing: float = 0.1\n"
                "\n"
                "\n"
                "class Block(nn.Module):\n",
            ),
            ("def main():\n", "def main(settings=Settings()):\n"),
            ("lr=0.1, momentum=0.9)", "lr=settings.rate, momentum=settings.momentum)"),
            ("label_smoothing=0.1)", "label_smoothing=settings.smoothing)"),
        ),
        _PLAIN,
        "equal values",
    ),
    "normalize_as_function": Case(
        "cnn",
        (
            (
                "def batches():\n",
                "def prepared(x, mean, std):\n"
                "    x = (x.float() - mean) / std\n"
                "    return x.contiguous(memory_format=torch.channels_last)\n"
                "\n"
                "\n"
                "def batches():\n",
            ),
            (
                "        x = (x.float() - mean) / std\n"
                "        x = x.contiguous(memory_format=torch.channels_last)\n"
                "        with",
                "        x = prepared(x, mean, std)\n        with",
            ),
        ),
        _PLAIN,
        "moved",
    ),
    "schedule_of_the_rate": Case(
        "cnn",
        (
            (
                "    mean = torch.tensor(",
                "    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)\n"
                "    mean = torch.tensor(",
            ),
            (
                "        optimizer.step()\n",
                "        optimizer.step()\n        schedule.step()\n",
            ),
        ),
        "pytorch/vision references/classification (StepLR)",
        "a number on the host",
    ),
    "index_select": Case(
        "agent",
        (
            (
                "        value = online(state).gather(1, action[:, None])[:, 0]\n",
                "        values = online(state)\n"
                "        value = values.gather(1, action.unsqueeze(1)).squeeze(1)\n",
            ),
        ),
        _PLAIN,
        "as many views",
    ),
    "guarded_logging": Case(
        "agent",
        (
            ("    for _ in range(6):\n", "    verbose = False\n    for step in range(6):\n"),
            (
                "        optimizer.step()\n",
                "        optimizer.step()\n"
                "        if verbose and step % 100 == 0:\n"
                "            print(step, loss.item())\n",
            ),
        ),
        "openvdb/fvdb-reality-capture#144 (logging less often)",
        "never in these steps",
    ),
    "network_as_class": Case(
        "agent",
        (
            (
                "def network():\n"
                "    layers, size = [], STATE\n"
                "    for _ in range(DEPTH):\n"
                "        layers += [nn.Linear(size, WIDTH), nn.ReLU()]\n"
                "        size = WIDTH\n"
                "    return nn.Sequential(*layers, nn.Linear(size, ACTIONS))\n",
                "class Network(nn.Module):\n"
                "    def __init__(self):\n"
                "        super().__init__()\n"
                "        layers, size = [], STATE\n"
                "        for _ in range(DEPTH):\n"
                "            layers += [nn.Linear(size, WIDTH), nn.ReLU()]\n"
                "            size = WIDTH\n"
                "        self.body = nn.Sequential(*layers)\n"
                "        self.head = nn.Linear(size, ACTIONS)\n"
                "\n"
                "    def forward(self, x):\n"
                "        return self.head(self.body(x))\n",
            ),
            ("    online = network().cuda()\n", "    online = Network().cuda()\n"),
        ),
        _PLAIN,
        "the same layers",
    ),
    "target_without_decorator": Case(
        "agent",
        (
            (
                "        with torch.no_grad():\n"
                "            best = target(following).max(dim=1).values\n"
                "            goal = reward + 0.99 * best\n",
                "        goal = bellman(target, following, reward)\n",
            ),
            (
                "def main():\n",
                "@torch.no_grad()\n"
                "def bellman(target, following, reward, discount=0.99):\n"
                "    best = target(following).max(dim=1).values\n"
                "    return reward + discount * best\n"
                "\n"
                "\n"
                "def main():\n",
            ),
        ),
        "DLR-RM/stable-baselines3 dqn.py (no_grad around the target)",
        "moved",
    ),
    "compiled_with_default": Case(
        "compiled",
        (("torch.compile(model)", "torch.compile(model, dynamic=False)"),),
        _PLAIN,
        "all sizes are constant",
    ),
    "rank_as_variable": Case(
        "ddp",
        (
            (
                '    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n',
                '    rank = int(os.environ["LOCAL_RANK"])\n'
                "    torch.cuda.set_device(rank)\n"
                "    if rank == 0:\n"
                '        print("training")\n',
            ),
        ),
        _PLAIN,
        "before the steps",
    ),
}
