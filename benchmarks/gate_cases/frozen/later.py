"""Changes that the first part of the frozen set has none of: where gradients are set to None, what
`use_reentrant` keeps, and growth by 0.3 to 1 % of the peak (of the program `recommend`)."""

from __future__ import annotations

from benchmarks.gate_cases.frozen import images as i
from benchmarks.gate_cases.frozen import language as g
from benchmarks.gate_cases.frozen.case import Case, Edit, Move

_RATE = Edit("config.json", '"lr_layers": 0.01', '"lr_layers": 0.02')
_PRINT = Edit("train.py", 'print(f"{step}: loss', 'print(f"step {step}: loss')
_SEED = Edit("config.json", '"seed": 5', '"seed": 7')
_DOC = Edit(
    "recommend/model.py",
    "    def interact(self, dense, found):\n",
    '    def interact(self, dense, found):\n        """Products of all pairs, each once."""\n',
)
_NAMES = Edit("recommend/model.py", "products", "dots", times=2)
_CLICKS = (
    Move("recommend/clicks.py", "recommend/data.py"),
    Edit(
        "train.py",
        "from recommend.clicks import Clicks\n",
        "from recommend.data import Clicks\n",
    ),
)

_FINETUNE_RATE = Edit("settings.yaml", "lr: 0.001\n", "lr: 0.0005\n")
_FINETUNE_PRINT = Edit("train.py", 'print(f"step {step}: loss', 'print(f"{step:03d}: loss')
_FINETUNE_DOC = Edit(
    "finetune/encoder.py",
    "class Layer(nn.Module):\n",
    'class Layer(nn.Module):\n    """Attention and two linear layers, normalised before."""\n\n',
)
_FINETUNE_FILE = (
    Edit("finetune/reviews.py", "seed = torch.Generator()", "generator = torch.Generator()"),
    Edit("finetune/reviews.py", "generator=seed", "generator=generator", times=2),
)

LATER: dict[str, Case] = {
    # -- gradients that are there longer
    "gpt: gradients are cleared before the backward pass": Case(
        "gpt",
        "lifetime",
        (
            Edit(
                "train.py",
                "        # flush the gradients as soon as we can, no need for this memory anymore\n        optimizer.zero_grad(set_to_none=True)\n",
                "",
                "a",
            ),
            Edit(
                "train.py",
                "        loss.backward()\n        if cfg",
                "        optimizer.zero_grad(set_to_none=True)\n        loss.backward()\n        if cfg",
                "a",
            ),
            g._GPT_RATE,
            g._GPT_TYPES,
        ),
    ),
    "moe: gradients are kept for the next step's statistics": Case(
        "moe",
        "lifetime",
        (
            Edit("train.py", "        optimizer.zero_grad(set_to_none=True)\n", "", "a"),
            Edit(
                "train.py",
                "        loss.backward()\n",
                "        model.zero_grad(set_to_none=True)\n        loss.backward()\n",
                "a",
            ),
            g._MOE_PRINT,
        ),
    ),
    "wordlm: gradients are cleared before the backward pass": Case(
        "wordlm",
        "lifetime",
        (
            Edit("train.py", "        model.zero_grad()\n", "", "a"),
            Edit(
                "train.py",
                "        loss.backward()\n",
                "        model.zero_grad(set_to_none=True)\n        loss.backward()\n",
                "a",
            ),
            Edit("settings.ini", "log_interval = 1", "log_interval = 2"),
        ),
    ),
    # -- use_reentrant
    "finetune: reentrant checkpoints by a setting": Case(
        "finetune",
        "yaml",
        (
            Edit("settings.yaml", "use_reentrant: false", "use_reentrant: true", "a"),
            _FINETUNE_RATE,
            _FINETUNE_PRINT,
        ),
        "huggingface/peft#1142",
    ),
    "finetune: reentrant checkpoints in the code": Case(
        "finetune",
        "flag",
        (
            Edit(
                "finetune/encoder.py",
                'use_reentrant=self.checkpoints["use_reentrant"])',
                "use_reentrant=True)",
                "a",
            ),
            Edit(
                "finetune/encoder.py",
                '        if self.checkpoints.get("use_reentrant"):\n            h.requires_grad_()',
                '        if self.checkpoints["enabled"]:\n            h.requires_grad_()',
                "a",
            ),
            _FINETUNE_PRINT,
            *_FINETUNE_FILE,
        ),
    ),
    "finetune: checkpoints of two layers each": Case(
        "finetune",
        "flag",
        (
            Edit(
                "finetune/encoder.py",
                '        for layer in self.layers:\n            if self.checkpoints["enabled"] and self.training:\n                h = checkpoint(layer, h, use_reentrant=self.checkpoints["use_reentrant"])\n',
                '        for layer in self.pairs:\n            if self.checkpoints["enabled"] and self.training:\n                h = checkpoint(layer, h, use_reentrant=self.checkpoints["use_reentrant"])\n',
                "a",
            ),
            Edit(
                "finetune/encoder.py",
                "    def forward(self, words):\n",
                "    @property\n    def pairs(self):\n        layers = list(self.layers)\n        return [nn.Sequential(*layers[at : at + 2]) for at in range(0, len(layers), 2)]\n\n    def forward(self, words):\n",
                "a",
                named=False,
            ),
            _FINETUNE_RATE,
        ),
    ),
    # -- 0.3 to 1 % of the peak
    "recommend: one more batch on the device": Case(
        "recommend",
        "lifetime",
        (
            Edit(
                "train.py",
                "    for batch in batches:\n        yield [part.to(device) for part in batch]\n",
                "    ahead = []\n    for batch in batches:\n        ahead.append([part.to(device) for part in batch])\n        if len(ahead) > 3:\n            yield ahead.pop(0)\n    yield from ahead\n",
                "a",
            ),
            _RATE,
            _PRINT,
        ),
    ),
    "recommend: a wider layer": Case(
        "recommend",
        "json",
        (Edit("config.json", '"top": [512, 256]', '"top": [640, 256]', "a"), _SEED, _DOC, _NAMES),
    ),
    "recommend: more categories of each kind": Case(
        "recommend",
        "json",
        (Edit("config.json", '"lookups": 8', '"lookups": 9', "a"), _RATE, *_CLICKS),
    ),
    "recommend: one table more": Case(
        "recommend",
        "json",
        (
            Edit(
                "config.json",
                '100000, 60000, 30000],\n    "lookups"',
                '100000, 60000, 30000, 3000],\n    "lookups"',
                "a",
            ),
            Edit(
                "config.json",
                '100000, 60000, 30000],\n    "width"',
                '100000, 60000, 30000, 3000],\n    "width"',
                "a",
            ),
            _PRINT,
            _NAMES,
        ),
    ),
    "recommend: features of all steps are kept": Case(
        "recommend",
        "lifetime",
        (
            Edit(
                "train.py",
                "        tables.zero_grad(set_to_none=True)\n",
                "        norms.append(features.detach().double())\n        tables.zero_grad(set_to_none=True)\n",
                "a",
            ),
            Edit(
                "train.py",
                "    for step, (dense",
                "    norms = []\n    for step, (dense",
                "a",
                named=False,
            ),
            _RATE,
            _DOC,
        ),
    ),
    "recommend: the averages of the layers": Case(
        "recommend",
        "optimizer",
        (
            Edit(
                "train.py",
                '        print(f"{step}: loss',
                '        for mean, layer in zip(means, model.layers()):\n            mean.lerp_(layer.detach(), 0.1)\n        print(f"{step}: loss',
                "a",
            ),
            Edit(
                "train.py",
                "    for step, (dense",
                "    means = [layer.detach().clone() for layer in model.layers()]\n    for step, (dense",
                "a",
            ),
            _SEED,
            *_CLICKS,
        ),
    ),
}

LATER_HARMLESS: dict[str, Case] = {
    "recommend: names, a renamed file and rates": Case(
        "recommend", "harmless", (_RATE, _SEED, _NAMES, _DOC, *_CLICKS)
    ),
    "recommend: gradients of the layers are cleared first": Case(
        "recommend",
        "harmless",
        (
            Edit(
                "train.py",
                "        tables.zero_grad(set_to_none=True)\n        layers.zero_grad(set_to_none=True)\n",
                "        layers.zero_grad()\n        tables.zero_grad()\n",
            ),
            _PRINT,
        ),
    ),
    "finetune: names and rates": Case(
        "finetune",
        "harmless",
        (_FINETUNE_RATE, _FINETUNE_PRINT, _FINETUNE_DOC, *_FINETUNE_FILE),
    ),
    "finetune: gradients are cleared first in the loop": Case(
        "finetune",
        "harmless",
        (
            Edit(
                "train.py",
                "        optimizer.zero_grad(set_to_none=True)\n",
                "        optimizer.zero_grad()\n",
            ),
            Edit(
                "train.py",
                "    for step, (words",
                "    optimizer.zero_grad()\n    for step, (words",
            ),
        ),
    ),
    "guided: the keyword's place": Case(
        "guided",
        "harmless",
        (
            Edit(
                "guided/nn.py",
                "        return torch_checkpoint(func, *inputs, use_reentrant=False)\n",
                '        options = {"use_reentrant": False}\n        return torch_checkpoint(func, *inputs, **options)\n',
            ),
            i._GUIDED_PRINT,
        ),
    ),
}
