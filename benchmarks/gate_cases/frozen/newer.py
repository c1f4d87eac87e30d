"""Changes made after the gate compared a program phase by phase: growth after the last step and in
evaluations, which costs nothing unless it makes a new peak; and more of the earlier kinds."""

from __future__ import annotations

from benchmarks.gate_cases.frozen import images as i
from benchmarks.gate_cases.frozen import language as g
from benchmarks.gate_cases.frozen import later
from benchmarks.gate_cases.frozen import others as o
from benchmarks.gate_cases.frozen.case import Case, Edit

_FINETUNE_ORDER = Edit(
    "settings.yaml", "seed: 11\nsteps: 4\nlr: 0.001\n", "steps: 4\nseed: 12\nlr: 0.0008\n"
)
_GNN_SOFTMAX = Edit(
    "gnn/conv.py",
    "    total = out.new_zeros(num_nodes, out.size(1)).index_add(0, index, out)\n    return out / (total[index] + 1e-16)\n",
    "    sums = out.new_zeros(num_nodes, out.size(1)).index_add(0, index, out)\n    return out / (sums[index] + 1e-16)\n",
)
_VAE_TITLE = Edit(
    "vae/visual.py", 'print("gallery", tuple(grid.shape))', 'print(f"gallery of {len(grid)}")'
)

NEWER: dict[str, Case] = {
    "dcgan: the graph of the real images is retained": Case(
        "dcgan",
        "flag",
        (
            Edit(
                "train.py",
                "            errD_real.backward()\n",
                "            errD_real.backward(retain_graph=True)\n",
                "a",
            ),
            i._GAN_RATE,
            i._GAN_HELP,
            i._GAN_PRINT,
        ),
    ),
    "dcgan: a wider discriminator": Case(
        "dcgan",
        "shell",
        (
            Edit("flags.txt", "--ndf=32\n", "--ndf=40\n", "a"),
            i._GAN_SEED,
            i._GAN_INIT,
            i._GAN_INIT_MORE,
        ),
    ),
    "gnn: copies of the parts are cached": Case(
        "gnn",
        "decorator",
        (
            Edit(
                "gnn/graph.py",
                "    def to(self, device):\n",
                "    @lru_cache(maxsize=None)\n    def to(self, device):\n",
                "a",
            ),
            Edit("gnn/graph.py", "@dataclass\n", "@dataclass(eq=False)\n", "a", named=False),
            Edit(
                "gnn/graph.py",
                "from dataclasses import dataclass\n",
                "from dataclasses import dataclass\nfrom functools import lru_cache\n",
                "a",
                named=False,
            ),
            o._GNN_RATE,
            o._GNN_DOC,
            _GNN_SOFTMAX,
        ),
    ),
    "wordlm: longer parts in the evaluation": Case(
        "wordlm",
        "evaluation",
        (
            Edit(
                "train.py",
                'val_loss = evaluate(model, val_data, eval_bsz, data.getint("bptt"), 2)',
                'val_loss = evaluate(model, val_data, eval_bsz, 6 * data.getint("bptt"), 1)',
                "a",
            ),
            g._WORDS_CLIP,
            g._WORDS_ERROR,
            g._WORDS_PRINT,
        ),
    ),
    "loop: larger batches of the validation": Case(
        "loop",
        "json",
        (
            Edit("run.json", '"val_batch_size": 16', '"val_batch_size": 80', "a"),
            g._LOOP_SEED,
            g._LOOP_PRINT,
            g._LOOP_DOC,
        ),
    ),
    "vae: a wall of images is drawn at the end": Case(
        "vae",
        "after the last step",
        (
            Edit("train.py", "torch.randn(64, cfg", "torch.randn(8192, cfg", "a"),
            i._VAE_RATE,
            i._VAE_KLD,
            _VAE_TITLE,
        ),
    ),
    "vae: the loss in double precision": Case(
        "vae",
        "dtype",
        (
            Edit(
                "vae/loss.py",
                '    bce = F.binary_cross_entropy_with_logits(recon_x, x, reduction="sum")\n',
                '    bce = F.binary_cross_entropy_with_logits(recon_x.double(), x.double(), reduction="sum")\n',
                "a",
            ),
            i._VAE_STD,
            i._VAE_PRINT,
            i._VAE_RATE,
        ),
    ),
    "finetune: fewer layers are frozen": Case(
        "finetune",
        "yaml",
        (
            Edit("settings.yaml", "frozen: 6\n", "frozen: 4\n", "a"),
            later._FINETUNE_PRINT,
            later._FINETUNE_DOC,
            *later._FINETUNE_FILE,
        ),
    ),
    "finetune: the states of all layers are remembered": Case(
        "finetune",
        "lifetime",
        (
            Edit(
                "finetune/encoder.py",
                "        for layer in self.layers:\n            if self",
                "        for layer in self.layers:\n            self.hidden_states.append(h.detach())\n            if self",
                "a",
            ),
            Edit(
                "finetune/encoder.py",
                "        h = self.prepare(self.embedding(words))\n",
                "        h = self.prepare(self.embedding(words))\n        self.hidden_states = []\n",
                "a",
                named=False,
            ),
            later._FINETUNE_RATE,
            later._FINETUNE_PRINT,
        ),
    ),
    "ppo: minibatches are kept for the divergence": Case(
        "ppo",
        "lifetime",
        (
            Edit(
                "ppo/ppo.py",
                "                values, log_prob, entropy",
                "                seen.append(data)\n                values, log_prob, entropy",
                "a",
            ),
            Edit(
                "ppo/ppo.py",
                "        pg_losses, clip_fractions = [], []\n",
                "        pg_losses, clip_fractions = [], []\n        seen = []\n",
                "a",
                named=False,
            ),
            o._PPO_RATE,
            o._PPO_EXTRACT,
        ),
    ),
}

NEWER_HARMLESS: dict[str, Case] = {
    # -- memory below the peak grows
    "gpt: weights are copied after training": Case(
        "gpt",
        "harmless",
        (
            Edit(
                "train.py",
                "    prompt = torch.zeros(",
                "    final = {name: value.clone() for name, value in model.state_dict().items()}\n    print(f\"{len(final)} tensors\")\n\n    prompt = torch.zeros(",
            ),
            g._GPT_RATE,
            g._GPT_FORMAT,
        ),
    ),
    "vae: more images are drawn at the end": Case(
        "vae",
        "harmless",
        (
            Edit("train.py", "torch.randn(64, cfg", "torch.randn(1024, cfg"),
            i._VAE_RATE,
            _VAE_TITLE,
        ),
    ),
    "guided: more samples at the end": Case(
        "guided",
        "harmless",
        (
            Edit("flags.sh", "--num_samples 6 --sample_steps 3", "--num_samples 9 --sample_steps 4"),
            i._GUIDED_EPS,
            i._GUIDED_PRINT,
        ),
    ),
    "moe: gradients are cleared at the start of a step": Case(
        "moe",
        "harmless",
        (
            Edit("train.py", "        optimizer.zero_grad(set_to_none=True)\n", ""),
            Edit(
                "train.py",
                "        tokens, labels = tokens.to(device), labels.to(device)\n",
                "        optimizer.zero_grad(set_to_none=True)\n        tokens, labels = tokens.to(device), labels.to(device)\n",
            ),
            g._MOE_RATE,
            g._MOE_PRINT,
        ),
    ),
    "lora: a small validation after training": Case(
        "lora",
        "harmless",
        (
            Edit(
                "train.py",
                "    def save_checkpoint(self):\n",
                '    @torch.no_grad()\n    def validate(self):\n        cfg = self.cfg\n        held_out = InstructDataset(cfg.model.vocab_size, cfg.dataset.max_seq_len, 4, 99)\n        self._model.eval()\n        for batch in batches(held_out, 2):\n            labels = batch["labels"].to(self._device)\n            logits = self._model(batch["tokens"].to(self._device))\n            print(f"validation {self._loss_fn(logits, labels).item():.4f}")\n\n    def save_checkpoint(self):\n',
            ),
            Edit("train.py", "    recipe.train()\n", "    recipe.train()\n    recipe.validate()\n"),
            g._LORA_LOG,
            g._LORA_DIR,
        ),
    ),
    "ppo: the agent plays for an evaluation": Case(
        "ppo",
        "harmless",
        (
            Edit(
                "train.py",
                '    PPO(env, params).learn(params["total_updates"])\n',
                '    agent = PPO(env, params).learn(params["total_updates"])\n    games = RandomVecEnv(16, seed=1)\n    reward, obs = 0.0, games.reset()\n    for _ in range(4):\n        with torch.no_grad():\n            actions, _, _ = agent.policy(obs.to(agent.device))\n        obs, rewards, _ = games.step(actions.cpu())\n        reward += rewards.mean().item()\n    print(f"evaluation {reward:.3f}")\n',
            ),
            o._PPO_RATE,
            o._PPO_DOC,
        ),
    ),
    "imagenet: the last weights stay on the device after training": Case(
        "imagenet",
        "harmless",
        (
            Edit(
                "train.py",
                '    print(f"best {best_acc:.2f}, {len(best)} tensors")\n',
                '    last = copy.deepcopy(model).eval()\n    on_device = {name: value.to(device) for name, value in best.items()}\n    last.load_state_dict(on_device)\n    print(f"best {best_acc:.2f}, {len(best)} tensors")\n',
            ),
            i._NET_RATE,
            i._NET_METER,
        ),
    ),
    # -- no memory grows
    "gpt: other tokens, and blocks applied by a function": Case(
        "gpt",
        "harmless",
        (
            Edit("gpt/data.py", "length=20_000, seed=1337", "length=30_000, seed=4242"),
            Edit(
                "gpt/model.py",
                "        for block in self.h:\n            x = block(x)\n        x = self.ln_f(x)\n",
                "        x = self._blocks(x)\n",
            ),
            Edit(
                "gpt/model.py",
                "    def forward(self, idx, targets=None):\n",
                "    def _blocks(self, x):\n        for block in self.h:\n            x = block(x)\n        return self.ln_f(x)\n\n    def forward(self, idx, targets=None):\n",
            ),
            Edit("train.py", "torch.manual_seed(1337)", "torch.manual_seed(7)"),
        ),
    ),
    "lora: the norm in a file of its own": Case(
        "lora",
        "harmless",
        (
            Edit(
                "tune/modules.py",
                "class RMSNorm(nn.Module):\n    def __init__(self, dim, eps=1e-6):\n        super().__init__()\n        self.eps = eps\n        self.scale = nn.Parameter(torch.ones(dim))\n\n    def forward(self, x):\n        x_normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)\n        return x_normed * self.scale\n\n\n",
                "",
            ),
            Edit(
                "tune/norms.py",
                "",
                '"""Normalisation."""\n\nimport torch\nfrom torch import nn\n\n\nclass RMSNorm(nn.Module):\n    def __init__(self, dim, eps=1e-6):\n        super().__init__()\n        self.eps = eps\n        self.scale = nn.Parameter(torch.ones(dim))\n\n    def forward(self, x):\n        x_normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)\n        return x_normed * self.scale\n',
            ),
            Edit(
                "tune/modules.py",
                "from tune.lora import LoRALinear\n",
                "from tune.lora import LoRALinear\nfrom tune.norms import RMSNorm\n",
            ),
            g._LORA_SEED,
        ),
    ),
    "loop: a callback that measures time": Case(
        "loop",
        "harmless",
        (
            Edit(
                "loop/callbacks.py",
                'REGISTRY = {"Progress": Progress, "BestScore": BestScore}',
                'class Timer(Callback):\n    """Seconds since the start."""\n\n    def on_fit_start(self, trainer, module):\n        self.start = time.perf_counter()\n\n    def on_validation_end(self, trainer, module):\n        print(f"{time.perf_counter() - self.start:.1f} s")\n\n\nREGISTRY = {"Progress": Progress, "BestScore": BestScore, "Timer": Timer}',
            ),
            Edit(
                "loop/callbacks.py",
                '"""What happens around the steps."""\n',
                '"""What happens around the steps."""\n\nimport time\n',
            ),
            Edit("run.json", '["Progress", "BestScore"]', '["Timer", "Progress", "BestScore"]'),
            g._LOOP_RATE,
            g._LOOP_SEED,
        ),
    ),
    "imagenet: losses are added up after the step": Case(
        "imagenet",
        "harmless",
        (
            Edit(
                "train.py",
                "        losses.update(loss.item(), images.size(0))\n        top1.update(accuracy(output, target)[0], images.size(0))\n        optimizer.zero_grad()\n        loss.backward()\n        optimizer.step()\n",
                "        optimizer.zero_grad()\n        loss.backward()\n        optimizer.step()\n        losses.update(loss.item(), images.size(0))\n        top1.update(accuracy(output, target)[0], images.size(0))\n",
            ),
            *i._NET_MAKE,
            i._NET_ORDER,
        ),
    ),
    "guided: averages by lerp": Case(
        "guided",
        "harmless",
        (
            Edit(
                "guided/nn.py",
                "        targ.detach().mul_(rate).add_(src, alpha=1 - rate)\n",
                "        targ.detach().lerp_(src, 1 - rate)\n",
            ),
            Edit("train.py", "image_size, seed=0):", "image_size, seed=10):"),
            i._GUIDED_RATE,
            *i._GUIDED_FILE,
        ),
    ),
    "dcgan: samples in a file of their own": Case(
        "dcgan",
        "harmless",
        (
            Edit(
                "train.py",
                'def sample(netG, noise):\n    """Images of a fixed noise, for the eye."""\n    with torch.no_grad():\n        return netG(noise).cpu()\n\n\n',
                "",
            ),
            Edit(
                "samples.py",
                "",
                '"""Images of a fixed noise, for the eye."""\n\nimport torch\n\n\n@torch.no_grad()\ndef sample(netG, noise):\n    return netG(noise).cpu()\n',
            ),
            Edit(
                "train.py",
                "from networks import Discriminator, Generator, weights_init\n",
                "from networks import Discriminator, Generator, weights_init\nfrom samples import sample\n",
            ),
            i._GAN_RATE,
            i._GAN_SEED,
        ),
    ),
    "vit: a schedule of the learning rate": Case(
        "vit",
        "harmless",
        (
            Edit(
                "train.py",
                "        if model_ema is not None:\n            model_ema.update(model)\n",
                "        for group in optimizer.param_groups:\n            group[\"lr\"] = args[\"opt\"][\"lr\"] * 0.9 ** (batch_idx + 1)\n        if model_ema is not None:\n            model_ema.update(model)\n",
            ),
            *i._VIT_SCALER,
            i._VIT_DECAY,
            Edit("train.py", "torch.manual_seed(42)", "torch.manual_seed(0)"),
        ),
    ),
    "finetune: the mean over words in a method": Case(
        "finetune",
        "harmless",
        (
            Edit(
                "finetune/encoder.py",
                "        return self.head(self.norm(h).mean(1))\n",
                "        return self.head(self.pooled(h))\n\n    def pooled(self, h):\n        return self.norm(h).mean(1)\n",
            ),
            Edit(
                "finetune/reviews.py",
                "    for number in range(count):\n",
                "    for number in reversed(range(count)):\n",
            ),
            _FINETUNE_ORDER,
            later._FINETUNE_PRINT,
        ),
    ),
}  # fmt: skip
