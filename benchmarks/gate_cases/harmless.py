"""Thirty changes that need no more memory."""

from __future__ import annotations

from benchmarks.gate_cases.edits import Case, Edit

_EVALUATE = """\
def train(model, batches, optimizer, device):
    total = torch.zeros((), device=device)
    for tokens in batches:
        tokens = tokens.to(device)
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
    return total.item() / len(batches)


"""

HARMLESS: dict[str, Case] = {
    # -- the language model
    "lm: comments": Case(
        "lm",
        (
            Edit("train.py", "def make_optimizer", "# AdamW keeps two\n# moments.\ndef make_optimizer"),
            Edit("model.py", "        mask = self.causal", "        # One for all blocks.\n        mask = self.causal"),
            Edit("model.py", "        logits = self.head(x)", "        # Tied.\n\n        logits = self.head(x)"),
        ),
    ),
    "lm: type hints": Case(
        "lm",
        (
            Edit("train.py", "def loss_of(model, tokens):", "def loss_of(model: Model, tokens: torch.Tensor) -> torch.Tensor:"),
            Edit("train.py", "def make_optimizer(model):", "def make_optimizer(model: Model) -> torch.optim.Optimizer:"),
            Edit("model.py", "def forward(self, x, mask):", "def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:", 2),
            Edit("model.py", "def forward(self, tokens):", "def forward(self, tokens: torch.Tensor) -> torch.Tensor:"),
        ),
    ),
    "lm: variables renamed": Case(
        "lm",
        (
            Edit("train.py", "loss = loss_of(model, tokens)\n        loss.backward()", "objective = loss_of(model, tokens)\n        objective.backward()"),
            Edit("train.py", "total += loss.detach()", "total += objective.detach()"),
        ),
    ),
    "lm: a class renamed": Case(
        "lm",
        (
            Edit("model.py", "class Feed(", "class MLP("),
            Edit("model.py", "self.feed = Feed(config)", "self.mlp = MLP(config)"),
            Edit("model.py", "self.feed(self.second(x))", "self.mlp(self.second(x))"),
        ),
    ),
    "lm: formatting": Case(
        "lm",
        (
            Edit("model.py", "        query, key, value = mixed.permute(2, 0, 3, 1, 4)\n", "        (\n            query,\n            key,\n            value,\n        ) = mixed.permute(2, 0, 3, 1, 4)\n"),
            Edit("train.py", "    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())", "    return F.cross_entropy(\n        logits.flatten(0, 1),\n        tokens[:, 1:].flatten(),\n    )"),
        ),
    ),
    "lm: a helper extracted": Case(
        "lm",
        (
            Edit("train.py", "        loss.backward()\n        optimizer.step()\n        optimizer.zero_grad()\n", "        update(loss, optimizer)\n"),
            Edit("train.py", "def train(", "def update(loss, optimizer):\n    loss.backward()\n    optimizer.step()\n    optimizer.zero_grad()\n\n\ndef train("),
        ),
    ),
    "lm: a function moved to another file": Case(
        "lm",
        (
            Edit("train.py", "def make_optimizer(model):\n    return torch.optim.AdamW(model.parameters(), lr=3e-4)\n\n\n", ""),
            Edit("model.py", "class Model(nn.Module)", "def make_optimizer(model):\n    return torch.optim.AdamW(model.parameters(), lr=3e-4)\n\n\nclass Model(nn.Module)"),
            Edit("train.py", "from model import Model", "from model import Model, make_optimizer"),
        ),
    ),
    "lm: a file split": Case(
        "lm",
        (
            Edit("train.py", _EVALUATE, ""),
            Edit("data.py", '"""Random texts."""\n', '"""Random texts, and learning from them."""\n\nimport torch.nn.functional as F\n'),
            Edit("data.py", "def draw(", "def loss_of(model, tokens):\n    logits = model(tokens[:, :-1])\n    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())\n\n\n" + _EVALUATE + "def draw("),
            Edit("train.py", "def loss_of(model, tokens):\n    logits = model(tokens[:, :-1])\n    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())\n\n\n", ""),
            Edit("train.py", "from data import draw", "from data import draw, train"),
        ),
    ),
    "lm: lines reordered": Case(
        "lm",
        (
            Edit("model.py", "        self.up = nn.Linear(config.width, 4 * config.width, bias=False)\n        self.down = nn.Linear(4 * config.width, config.width, bias=False)\n", "        self.down = nn.Linear(4 * config.width, config.width, bias=False)\n        self.up = nn.Linear(config.width, 4 * config.width, bias=False)\n"),
            Edit("train.py", "    texts = draw(config.vocabulary, STEPS, seed=1)\n    held_back = draw(config.vocabulary, 2, seed=2)\n", "    held_back = draw(config.vocabulary, 2, seed=2)\n    texts = draw(config.vocabulary, STEPS, seed=1)\n"),
        ),
    ),
    "lm: another learning rate and message": Case(
        "lm",
        (
            Edit("train.py", "lr=3e-4", "lr=1e-4"),
            Edit("train.py", 'print(f"loss {loss:.2f}, perplexity', 'print(f"mean loss {loss:.3f}, perplexity'),
        ),
    ),
    # -- the pictures
    "vision: docstrings": Case(
        "vision",
        (
            Edit("train.py", "    def batch(self, pixels, labels):\n", '    def batch(self, pixels, labels):\n        """One update.\n\n        Returns the loss.\n        """\n'),
            Edit("network.py", "class Stage(nn.Module):\n", 'class Stage(nn.Module):\n    """Two convolutions and what goes around them."""\n\n'),
        ),
    ),
    "vision: type hints": Case(
        "vision",
        (
            Edit("network.py", "def features(self, x):", "def features(self, x: torch.Tensor) -> torch.Tensor:"),
            Edit("train.py", "def epoch(self, loader):", "def epoch(self, loader: DataLoader) -> None:"),
            Edit("train.py", "def make_optimizer(network):", "def make_optimizer(network: nn.Module) -> torch.optim.Optimizer:"),
        ),
    ),
    "vision: methods renamed": Case(
        "vision",
        (
            Edit("train.py", "def batch(self, pixels, labels)", "def update(self, pixels, labels)"),
            Edit("train.py", "self.batch(pixels, labels)", "self.update(pixels, labels)"),
            Edit("train.py", "def epoch(self, loader)", "def one_epoch(self, loader)"),
            Edit("train.py", "trainer.epoch(loader)", "trainer.one_epoch(loader)"),
        ),
    ),
    "vision: an attribute renamed": Case(
        "vision",
        (
            Edit("network.py", "self.stages", "self.body", 2),
            Edit("network.py", "self.hidden", "self.wide", 2),
        ),
    ),
    "vision: the loop in another form": Case(
        "vision",
        (
            Edit("train.py", "        for some, right in zip(pixels.chunk(MICRO), labels.chunk(MICRO)):\n            loss = self.measure(self.network(some), right) / MICRO\n", "        parts = zip(pixels.chunk(MICRO), labels.chunk(MICRO))\n        for part in parts:\n            some, right = part\n            scores = self.network(some)\n            loss = self.measure(scores, right) / MICRO\n"),
        ),
    ),
    "vision: methods reordered": Case(
        "vision",
        (
            Edit("train.py", "    def epoch(self, loader):\n        for pixels, labels in loader:\n            pixels = pixels.to(self.device)\n            labels = labels.to(self.device)\n            self.log[\"loss\"] = self.batch(pixels, labels)\n        self.log[\"epoch\"] += 1\n\n", ""),
            Edit("train.py", "        return right / len(loader.dataset)\n", "        return right / len(loader.dataset)\n\n    def epoch(self, loader):\n        for pixels, labels in loader:\n            pixels = pixels.to(self.device)\n            labels = labels.to(self.device)\n            self.log[\"loss\"] = self.batch(pixels, labels)\n        self.log[\"epoch\"] += 1\n"),
        ),
    ),
    "vision: settings moved": Case(
        "vision",
        (
            Edit("settings.py", "SIDE = 24\n", ""),
            Edit("images.py", "from torch.utils.data import Dataset\n", "from torch.utils.data import Dataset\n\nSIDE = 24\n"),
            Edit("train.py", "from images import Pictures", "from images import SIDE, Pictures"),
            Edit("train.py", "MICRO, RATE, SIDE", "MICRO, RATE"),
        ),
    ),
    "vision: a file renamed": Case(
        "vision",
        (
            Edit("settings.py", '"""What is trained, and how."""', '"""Settings."""'),
            Edit("train.py", "from network import Network", "import network as nets"),
            Edit("train.py", "Network().to(device)", "nets.Network().to(device)"),
        ),
    ),
    "vision: a keyword argument spelled out": Case(
        "vision",
        (
            Edit("network.py", "nn.Conv2d(channels, channels, 3, padding=1)", "nn.Conv2d(channels, channels, kernel_size=3, padding=1)", 2),
            Edit("network.py", "nn.Conv2d(3, channels, 3, padding=1)", "nn.Conv2d(in_channels=3, out_channels=channels, kernel_size=3, padding=1)"),
            Edit("train.py", "torch.optim.SGD(network.parameters(), lr=RATE)", "torch.optim.SGD(params=network.parameters(), lr=RATE, momentum=0.0)"),
        ),
    ),
    "vision: a new class that is not used": Case(
        "vision",
        (
            Edit("network.py", "class Network(", "class Squeeze(nn.Module):\n    ratio = 4\n\n    def forward(self, x):\n        return x.mean((2, 3))\n\n\nclass Network("),
            Edit("settings.py", "EPOCHS = 2", "EPOCHS = 2\nWORKERS = 0"),
        ),
    ),
    # -- the two networks
    "gan: comments": Case(
        "gan",
        (
            Edit("train.py", "    for_judge.zero_grad()", "    # The judge first:\n    # its gradients only.\n    for_judge.zero_grad()"),
            Edit("nets.py", "        return self.last(x)", "        # No sigmoid: the loss has it.\n        return self.last(x)"),
        ),
    ),
    "gan: variables renamed": Case(
        "gan",
        (
            Edit("train.py", "loss = judge_loss(judge, real, fake.detach())", "first = judge_loss(judge, real, fake.detach())"),
            Edit("train.py", "    loss.backward()", "    first.backward()"),
            Edit("train.py", "return loss.item(), second.item()", "return first.item(), second.item()"),
        ),
    ),
    "gan: functions renamed": Case(
        "gan",
        (
            Edit("train.py", "judge_loss(", "loss_of_judge(", 2),
            Edit("train.py", "maker_loss(", "loss_of_maker(", 2),
            Edit("train.py", "round_of(", "one_round(", 2),
        ),
    ),
    "gan: a helper extracted": Case(
        "gan",
        (
            Edit("train.py", "    fake = maker(torch.randn(len(real), NOISE, device=real.device))\n", "    fake = sample(maker, real)\n", 2),
            Edit("train.py", "def round_of(", "def sample(maker, like):\n    return maker(torch.randn(len(like), NOISE, device=like.device))\n\n\ndef round_of("),
        ),
    ),
    "gan: a helper inlined": Case(
        "gan",
        (
            Edit("train.py", "    second = maker_loss(judge, fake)\n", "    answer = judge(fake)\n    second = F.binary_cross_entropy_with_logits(answer, torch.ones_like(answer))\n    del answer\n"),
        ),
    ),
    "gan: a class renamed": Case(
        "gan",
        (
            Edit("nets.py", "class Judge(", "class Critic("),
            Edit("train.py", "from nets import Judge, Maker", "from nets import Critic, Maker"),
            Edit("train.py", "Judge().to(device)", "Critic().to(device)"),
        ),
    ),
    "gan: layers in another form": Case(
        "gan",
        (
            Edit("nets.py", "        x = nn.functional.leaky_relu(self.first(pictures))\n        x = nn.functional.leaky_relu(self.second(x))\n", "        x = pictures\n        for layer in (self.first, self.second):\n            x = nn.functional.leaky_relu(layer(x))\n"),
        ),
    ),
    "gan: constants moved": Case(
        "gan",
        (
            Edit("train.py", "COUNT = 256\nNOISE = 64\n\n\n", "\n"),
            Edit("train.py", "from nets import Judge, Maker\n", "from nets import COUNT, NOISE, Judge, Maker\n"),
            Edit("nets.py", "from torch import nn\n", "from torch import nn\n\nNOISE = 64\nCOUNT = 256\n"),
        ),
    ),
    "gan: formatting": Case(
        "gan",
        (
            Edit("train.py", "    good = F.binary_cross_entropy_with_logits(on_real, torch.ones_like(on_real))\n", "    good = F.binary_cross_entropy_with_logits(\n        on_real, torch.ones_like(on_real)\n    )\n"),
            Edit("train.py", "    maker, judge = Maker(NOISE).to(device), Judge().to(device)\n", "    maker = Maker(NOISE).to(device)\n    judge = Judge().to(device)\n"),
        ),
    ),
    "gan: another seed and message": Case(
        "gan",
        (
            Edit("train.py", "torch.manual_seed(0)", "torch.manual_seed(17)"),
            Edit("train.py", "print(number, losses)", 'print(f"round {number}: {losses}")'),
        ),
    ),
}  # fmt: skip
