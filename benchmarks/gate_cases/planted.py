"""Thirty changes that need more memory, half of them among others that do not."""

from __future__ import annotations

from benchmarks.gate_cases.edits import Case, Edit

PLANTED: dict[str, Case] = {
    "logits to fp32": Case(
        "lm",
        (Edit("model.py", "logits = self.head(x)", "logits = self.head(x).float()"),),
        ("        logits = self.head(x).float()",),
        ("lm: type hints",),
    ),
    "a norm in fp32": Case(
        "lm",
        (
            Edit("model.py", "        scale = x.pow(2)", "        x = x.float()\n        scale = x.pow(2)"),
            Edit("model.py", "return x * scale * self.weight", "return (x * scale * self.weight).to(self.weight.dtype)"),
        ),
        ("        x = x.float()", "        return (x * scale * self.weight).to(self.weight.dtype)"),
        ("lm: comments",),
    ),
    "weight tying removed": Case(
        "lm",
        (Edit("model.py", "        self.head.weight = self.embed.weight\n", ""),),
        ("        self.head = nn.Linear(config.width, config.vocabulary, bias=False)", "    def causal(self, tokens):"),
        ("lm: variables renamed",),
    ),
    "an expanded mask": Case(
        "lm",
        (
            Edit("model.py", "        read = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)\n", "        mask = mask.expand(batch, self.heads, length, length).contiguous()\n        read = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)\n"),
        ),
        ("        mask = mask.expand(batch, self.heads, length, length).contiguous()",),
        ("lm: another learning rate and message",),
    ),
    "manual attention": Case(
        "lm",
        (
            Edit(
                "model.py",
                "        read = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)\n",
                "        scores = query @ key.transpose(-2, -1) * (width // self.heads) ** -0.5\n"
                "        weights = scores.masked_fill(~mask, float('-inf')).softmax(-1)\n"
                "        read = weights @ value\n",
            ),
        ),
        (
            "        scores = query @ key.transpose(-2, -1) * (width // self.heads) ** -0.5",
            "        weights = scores.masked_fill(~mask, float('-inf')).softmax(-1)",
            "        read = weights @ value",
        ),
        ("lm: a helper extracted",),
    ),
    "a larger batch": Case(
        "lm",
        (Edit("config.py", "BATCH = 8", "BATCH = 12"),),
        ("BATCH = 12",),
        ("lm: comments",),
    ),
    "longer texts": Case(
        "lm",
        (Edit("config.py", "LENGTH = 64", "LENGTH = 96"),),
        ("LENGTH = 96",),
    ),
    "a layer more": Case(
        "lm",
        (Edit("config.py", "    depth: int = 3", "    depth: int = 4"),),
        ("    depth: int = 4",),
        ("lm: lines reordered",),
    ),
    "fp32 in place of bf16": Case(
        "lm",
        (Edit("train.py", "Model(config).to(device, torch.bfloat16)", "Model(config).to(device)"),),
        ("    model = Model(config).to(device)",),
    ),
    "keys and values kept": Case(
        "lm",
        (
            Edit("model.py", "        read = F.scaled", "        self.cached = (key, value)\n        read = F.scaled"),
        ),
        ("        self.cached = (key, value)",),
    ),
    "no_grad removed": Case(
        "lm",
        (
            Edit(
                "evaluate.py",
                "    with torch.no_grad():\n        for tokens in batches:\n            tokens = tokens.to(device)\n"
                "            logits = model(tokens[:, :-1])\n            total +=",
                "    for tokens in batches:\n        tokens = tokens.to(device)\n"
                "        logits = model(tokens[:, :-1])\n        total +=",
            ),
        ),
        (
            "    for tokens in batches:",
            "        tokens = tokens.to(device)",
            "        logits = model(tokens[:, :-1])",
            "        total += F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())",
        ),
        ("lm: a class renamed",),
    ),
    "logits of an evaluation kept": Case(
        "lm",
        (
            Edit("evaluate.py", "    with torch.no_grad():", "    kept = []\n    with torch.no_grad():"),
            Edit("evaluate.py", "            logits = model(tokens[:, :-1])\n", "            logits = model(tokens[:, :-1])\n            kept.append(logits)\n"),
        ),
        ("            kept.append(logits)", "    kept = []"),
    ),
    "a table enlarged": Case(
        "lm",
        (Edit("config.py", "    positions: int = 256", "    positions: int = 2048"),),
        ("    positions: int = 2048",),
        ("lm: formatting",),
    ),
    "dropout": Case(
        "lm",
        (Edit("model.py", "        hidden = F.gelu(self.up(x))", "        hidden = F.dropout(F.gelu(self.up(x)), 0.1)"),),
        ("        hidden = F.dropout(F.gelu(self.up(x)), 0.1)",),
    ),
    "a buffer registered": Case(
        "lm",
        (
            Edit(
                "model.py",
                "        self.out = nn.Linear(config.width, config.width, bias=False)\n",
                "        self.out = nn.Linear(config.width, config.width, bias=False)\n"
                "        length = config.positions\n"
                '        self.register_buffer("bias", torch.ones(length, length).tril())\n',
            ),
        ),
        ('        self.register_buffer("bias", torch.ones(length, length).tril())', "        length = config.positions"),
        ("lm: type hints", "lm: another learning rate and message"),
    ),
    "a graph retained": Case(
        "lm",
        (Edit("train.py", "loss.backward()", "loss.backward(retain_graph=True)"),),
        ("        loss.backward(retain_graph=True)",),
        ("lm: lines reordered",),
    ),
    "a list of losses": Case(
        "lm",
        (
            Edit("train.py", "    total = torch.zeros((), device=device)\n", "    losses = []\n"),
            Edit("train.py", "        total += loss.detach()", "        losses.append(loss)"),
            Edit("train.py", "return total.item() / len(batches)", "return sum(losses).item() / len(losses)"),
        ),
        ("        losses.append(loss)", "    losses = []", "    return sum(losses).item() / len(losses)"),
    ),
    "cat in the loop": Case(
        "lm",
        (
            Edit("train.py", "    logits = model(tokens[:, :-1])\n    return F.cross", "    logits = model(tokens[:, :-1])\n    history.append(logits.argmax(-1))\n    history[:] = [torch.cat(history)]\n    return F.cross"),
            Edit("train.py", "def loss_of(", "history = []\n\n\ndef loss_of("),
        ),
        ("    history[:] = [torch.cat(history)]", "    history.append(logits.argmax(-1))", "history = []"),
        ("lm: comments",),
    ),
    "momentum": Case(
        "vision",
        (Edit("train.py", "lr=RATE)", "lr=RATE, momentum=0.9)"),),
        ("    return torch.optim.SGD(network.parameters(), lr=RATE, momentum=0.9)",),
        ("vision: docstrings", "vision: a new class that is not used"),
    ),
    "Adam in place of SGD": Case(
        "vision",
        (Edit("train.py", "torch.optim.SGD(", "torch.optim.Adam("),),
        ("    return torch.optim.Adam(network.parameters(), lr=RATE)",),
        ("vision: methods renamed",),
    ),
    "a second optimizer": Case(
        "vision",
        (
            Edit("train.py", "        self.measure = nn.Cross", "        self.second = torch.optim.Adam(self.network.hidden.parameters(), lr=RATE)\n        self.measure = nn.Cross"),
            Edit("train.py", "        self.optimizer.step()\n", "        self.optimizer.step()\n        self.second.step()\n"),
        ),
        ("        self.second = torch.optim.Adam(self.network.hidden.parameters(), lr=RATE)", "        self.second.step()"),
    ),
    "checkpoints removed": Case(
        "vision",
        (Edit("network.py", "x = checkpoint(stage, x, use_reentrant=False)", "x = stage(x)"),),
        ("            x = stage(x)",),
        ("vision: type hints",),
    ),
    "a copy of the weights": Case(
        "vision",
        (
            Edit("train.py", "import torch\nfrom torch import nn", "import copy\n\nimport torch\nfrom torch import nn"),
            Edit("train.py", "        self.optimizer = make_optimizer(self.network)\n", "        self.optimizer = make_optimizer(self.network)\n        self.average = copy.deepcopy(self.network)\n"),
        ),
        ("        self.average = copy.deepcopy(self.network)",),
        ("vision: docstrings",),
    ),
    "a hook that keeps activations": Case(
        "vision",
        (
            Edit("train.py", "        self.measure = nn.Cross", "        self.seen = {}\n        self.network.stem.register_forward_hook(self.keep)\n        self.measure = nn.Cross"),
            Edit("train.py", "    def batch(", "    def keep(self, module, given, result):\n        self.seen[len(self.seen)] = result\n\n    def batch("),
        ),
        (
            "        self.seen[len(self.seen)] = result",
            "        self.network.stem.register_forward_hook(self.keep)",
            "        self.seen = {}",
            "    def keep(self, module, given, result):",
        ),
        ("vision: settings moved",),
    ),
    "gradients set to zero": Case(
        "vision",
        (Edit("train.py", "zero_grad(set_to_none=True)", "zero_grad(set_to_none=False)"),),
        ("        self.optimizer.zero_grad(set_to_none=False)",),
        ("vision: an attribute renamed",),
    ),
    "losses summed before one backward": Case(
        "vision",
        (
            Edit("train.py", "        total = 0.0\n", "        total = torch.zeros((), device=self.device)\n"),
            Edit("train.py", "            loss.backward()\n            total += loss.item()\n", "            total = total + loss\n        total.backward()\n"),
            Edit("train.py", "        return total\n", "        return total.item()\n"),
        ),
        ("            total = total + loss", "        total.backward()", "        total = torch.zeros((), device=self.device)"),
    ),
    "batches cached on the device": Case(
        "vision",
        (
            Edit("train.py", "            pixels = pixels.to(self.device)\n            labels = labels.to(self.device)\n", "            pixels = pixels.to(self.device)\n            labels = labels.to(self.device)\n            self.batches.append((pixels, labels))\n"),
            Edit("train.py", '        self.log = {', '        self.batches = []\n        self.log = {'),
        ),
        ("            self.batches.append((pixels, labels))", "        self.batches = []"),
        ("vision: docstrings",),
    ),
    "a closure that refers to the pictures": Case(
        "vision",
        (
            Edit("train.py", "            total += loss.item()\n", "            total += loss.item()\n            self.reports.append(lambda some=some, loss=loss: (some.mean(), loss))\n"),
            Edit("train.py", '        self.log = {', '        self.reports = []\n        self.log = {'),
        ),
        ("            self.reports.append(lambda some=some, loss=loss: (some.mean(), loss))", "        self.reports = []"),
        ("vision: type hints",),
    ),
    "tensors in the log": Case(
        "vision",
        (
            Edit("train.py", '"epoch": 0}', '"epoch": 0, "history": []}'),
            Edit("train.py", "            total += loss.item()\n", '            total += loss.item()\n            self.log["history"].append(loss.detach())\n'),
        ),
        ('            self.log["history"].append(loss.detach())', '        self.log = {"loss": 0.0, "epoch": 0, "history": []}'),
    ),
    "a missing detach": Case(
        "gan",
        (Edit("train.py", "fake.detach()", "fake"),),
        ("    loss = judge_loss(judge, real, fake)",),
        ("gan: comments",),
    ),
}  # fmt: skip
