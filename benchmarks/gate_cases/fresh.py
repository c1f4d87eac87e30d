"""Eleven changes that need more memory and seven that do not, of a program that no rule was made on.

They were committed before they were run.
"""

from __future__ import annotations

from benchmarks.gate_cases.edits import Case, Edit

FRESH: dict[str, Case] = {
    "skips kept on the module": Case(
        "diffusion",
        (
            Edit(
                "unet.py",
                "        x = checkpoint(self.middle,",
                "        self.features = list(skips)\n        x = checkpoint(self.middle,",
            ),
        ),
        ("        self.features = list(skips)",),
        ("diffusion: type hints",),
    ),
    "attention at a larger size": Case(
        "diffusion",
        (Edit("train.py", "attention_sizes: tuple = (8,)", "attention_sizes: tuple = (8, 16)"),),
        ("    attention_sizes: tuple = (8, 16)",),
    ),
    "attention with a float mask": Case(
        "diffusion",
        (
            Edit(
                "unet.py",
                "        out = F.scaled_dot_product_attention(q, k, v)\n",
                "        scores = (q @ k.transpose(-1, -2)) * (c // self.heads) ** -0.5\n"
                "        out = scores.float().softmax(dim=-1).to(v.dtype) @ v\n",
            ),
            Edit(
                "train.py",
                "attention_sizes: tuple = (8,)",
                "attention_sizes: tuple = (8,)  # the smallest",
            ),
        ),
        (
            "        scores = (q @ k.transpose(-1, -2)) * (c // self.heads) ** -0.5",
            "        out = scores.float().softmax(dim=-1).to(v.dtype) @ v",
        ),
    ),
    "the block's checkpoint removed": Case(
        "diffusion",
        (
            Edit(
                "unet.py",
                "            x = checkpoint(block, torch.cat([x, skips.pop()], dim=1), time, use_reentrant=False)\n",
                "            x = block(torch.cat([x, skips.pop()], dim=1), time)\n",
            ),
        ),
        ("            x = block(torch.cat([x, skips.pop()], dim=1), time)",),
        ("diffusion: a message",),
    ),
    "a wider network": Case(
        "diffusion",
        (Edit("train.py", "    width: int = 32", "    width: int = 48"),),
        ("    width: int = 48",),
        ("diffusion: type hints",),
    ),
    "fused updates of all tensors": Case(
        "diffusion",
        (Edit("train.py", "lr=2e-4, foreach=False)", "lr=2e-4)"),),
        ("    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)",),
        ("diffusion: a message",),
    ),
    "a second average": Case(
        "diffusion",
        (
            Edit(
                "ema.py",
                "        self.decay = decay\n",
                "        self.decay = decay\n        self.first = copy.deepcopy(self.model)\n",
            ),
        ),
        ("        self.first = copy.deepcopy(self.model)",),
    ),
    "samples drawn with gradients": Case(
        "diffusion",
        (
            Edit("train.py", "@torch.no_grad()\ndef draw", "def draw"),
            Edit("train.py", "draw(ema.model,", "draw(model,"),
            Edit("train.py", "return x.clamp(-1, 1).cpu()", "return x.detach().clamp(-1, 1).cpu()"),
        ),
        (
            "def draw(model, schedule, cfg, device):",
            "    pictures = draw(model, schedule, cfg, device)",
        ),
    ),
    "predictions kept for a plot": Case(
        "diffusion",
        (
            Edit(
                "train.py",
                "    return F.mse_loss(predicted.float(), noise)",
                "    shown.append((noise, predicted))\n    return F.mse_loss(predicted.float(), noise)",
            ),
            Edit("train.py", "def denoising_loss", "shown = []\n\n\ndef denoising_loss"),
        ),
        ("    shown.append((noise, predicted))", "shown = []"),
        ("diffusion: a message",),
    ),
    "no autocast": Case(
        "diffusion",
        (
            Edit(
                "train.py",
                '    with torch.autocast("cuda", dtype=torch.bfloat16):\n'
                "        predicted = model(schedule.add_noise(images, noise, t), t)\n",
                "    predicted = model(schedule.add_noise(images, noise, t), t)\n",
            ),
        ),
        ("    predicted = model(schedule.add_noise(images, noise, t), t)",),
        ("diffusion: type hints",),
    ),
    "all images on the device": Case(
        "diffusion",
        (
            Edit(
                "train.py",
                "    for number, images in enumerate(batches(cfg, 6)):\n        images = images.to(device, non_blocking=True)\n",
                "    everything = [images.to(device) for images in batches(cfg, 60)]\n    for number, images in enumerate(everything[:6]):\n",
            ),
        ),
        ("    everything = [images.to(device) for images in batches(cfg, 60)]",),
    ),
}

FRESH_HARMLESS: dict[str, Case] = {
    # Written as one that needs more memory; it needs not a byte more, at any time of the program.
    "the average keeps gradients": Case(
        "diffusion",
        (
            Edit("ema.py", "    @torch.no_grad()\n    def update", "    def update"),
            Edit(
                "ema.py",
                "            mine.lerp_(theirs, 1 - self.decay)",
                "            mine.data = mine.lerp(theirs, 1 - self.decay)",
            ),
        ),
    ),
    "diffusion: type hints": Case(
        "diffusion",
        (
            Edit(
                "unet.py",
                "def embed_time(t, width):",
                "def embed_time(t: torch.Tensor, width: int) -> torch.Tensor:",
            ),
            Edit(
                "unet.py",
                "    def forward(self, x, time):",
                '    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:\n        """The same size as ``x``."""\n',
            ),
            Edit(
                "train.py",
                "def denoising_loss(model, schedule, images):",
                "def denoising_loss(\n    model: UNet, schedule: Schedule, images: torch.Tensor\n) -> torch.Tensor:",
            ),
        ),
    ),
    "diffusion: a message": Case(
        "diffusion",
        (
            Edit(
                "train.py",
                'print(f"{number}: {losses[-1]:.3f}")',
                'print(f"step {number}: loss {losses[-1]:.4f}", flush=True)',
            ),
            Edit(
                "train.py",
                "    losses = []\n",
                '    losses = []\n    print("training on", device)\n',
            ),
        ),
    ),
    "diffusion: a helper extracted": Case(
        "diffusion",
        (
            Edit(
                "unet.py",
                "        h = h + self.from_time(F.silu(time))[:, :, None, None]\n",
                "        h = h + self.shift(time)\n",
            ),
            Edit(
                "unet.py",
                "        return h + self.shortcut(x)\n",
                "        return h + self.shortcut(x)\n\n    def shift(self, time):\n        return self.from_time(F.silu(time))[:, :, None, None]\n",
            ),
        ),
    ),
    "diffusion: a class renamed": Case(
        "diffusion",
        (
            Edit("schedule.py", "class Schedule:", "class NoiseSchedule:"),
            Edit("train.py", "from schedule import Schedule", "from schedule import NoiseSchedule"),
            Edit(
                "train.py",
                "schedule = Schedule(cfg.times, device)",
                "schedule = NoiseSchedule(cfg.times, device)",
            ),
        ),
    ),
    "diffusion: modules renamed": Case(
        "diffusion",
        (
            Edit("unet.py", "self.middle", "self.bottleneck", 2),
            Edit("unet.py", "self.from_time", "self.time_projection", 2),
            Edit("unet.py", "self.shortcut", "self.skip", 2),
        ),
    ),
    "diffusion: another loop and settings": Case(
        "diffusion",
        (
            Edit(
                "train.py",
                "    for number, images in enumerate(batches(cfg, 6)):\n",
                "    number = -1\n    for images in batches(cfg, 6):\n        number += 1\n",
            ),
            Edit(
                "train.py", "lr=2e-4, foreach=False)", "lr=1e-4, weight_decay=0.05, foreach=False)"
            ),
            Edit("train.py", "    times: int = 100\n", "    times: int = 120\n"),
        ),
    ),
}
