"""Changes that need no more memory: refactorings, names, messages, settings, and faster loading."""

from __future__ import annotations

from benchmarks.gate_cases.frozen import images as i
from benchmarks.gate_cases.frozen import language as g
from benchmarks.gate_cases.frozen import others as o
from benchmarks.gate_cases.frozen.case import Case, Edit

HARMLESS: dict[str, Case] = {
    "gpt: tanh, names, and a renamed file": Case("gpt", "harmless", (g._GPT_TANH, *g._GPT_OPTIM, g._GPT_TYPES, g._GPT_QKV)),
    "gpt: settings and messages": Case("gpt", "harmless", (g._GPT_RATE, g._GPT_FORMAT, g._GPT_COMMENT, Edit("config/shakespeare.toml", "beta1 = 0.9\nbeta2 = 0.95\ngrad_clip = 1.0\n", "grad_clip = 0.5\nbeta1 = 0.9\nbeta2 = 0.99\n"))),
    "gpt: the step in a function": Case(
        "gpt",
        "harmless",
        (
            Edit("train.py", "        loss.backward()\n        if cfg.train.grad_clip != 0.0:\n            torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.train.grad_clip, foreach=False)\n        optimizer.step()\n        # flush the gradients as soon as we can, no need for this memory anymore\n        optimizer.zero_grad(set_to_none=True)\n", "        update(model, optimizer, loss, cfg.train.grad_clip)\n"),
            Edit("train.py", "def main():\n", "def update(model, optimizer, loss, grad_clip):\n    loss.backward()\n    if grad_clip != 0.0:\n        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip, foreach=False)\n    optimizer.step()\n    # flush the gradients as soon as we can, no need for this memory anymore\n    optimizer.zero_grad(set_to_none=True)\n\n\ndef main():\n"),
            g._GPT_NODECAY,
        ),
    ),
    "lora: docs and other seeds": Case("lora", "harmless", (g._LORA_DOC, g._LORA_SEED, g._LORA_DIR, g._LORA_PAD, Edit("configs/lora_single_device.yaml", "seed: 0\nbatch_size: 6\n", "seed: 1234\nbatch_size: 6\n"))),
    "lora: norm and logging rewritten": Case("lora", "harmless", (g._LORA_NORM, g._LORA_LOG, Edit("tune/loss.py", "        loss = 0.0\n        for part, right in zip(logits, labels.chunk(self.num_output_chunks, dim=1)):\n            loss = loss + self.compute_cross_entropy(part.flatten(0, 1), right.flatten())\n        return loss / total\n", "        chunks = zip(logits, labels.chunk(self.num_output_chunks, dim=1))\n        loss = sum(\n            self.compute_cross_entropy(part.flatten(0, 1), right.flatten())\n            for part, right in chunks\n        )\n        return loss / total\n"))),
    "moe: names, order and docs": Case("moe", "harmless", (g._MOE_ATTEND, g._MOE_ATTEND_USE, g._MOE_DOC, g._MOE_ORDER)),
    "moe: other coefficients": Case("moe", "harmless", (g._MOE_RATE, g._MOE_AUX, g._MOE_PRINT, Edit("moe/optim.py", "        betas=(0.9, 0.95),\n", "        betas=(0.9, 0.98),\n"))),
    "wordlm: a renamed file and another rate": Case("wordlm", "harmless", (*g._WORDS_CORPUS, g._WORDS_RATE, g._WORDS_CELL, g._WORDS_PRINT)),
    "wordlm: settings reordered": Case("wordlm", "harmless", (g._WORDS_CLIP, g._WORDS_ERROR, Edit("settings.ini", "emsize = 128\nnhid = 128\nnlayers = 2\n", "nlayers = 2\nnhid = 128\nemsize = 128\n"))),
    "loop: hooks renamed": Case("loop", "harmless", (*g._LOOP_CALL, g._LOOP_DOC, g._LOOP_PRINT)),
    "loop: zeros while gradients are accumulated": Case("loop", "harmless", (Edit("loop/trainer.py", "optimizer.zero_grad(set_to_none=True)", "optimizer.zero_grad(set_to_none=False)"), g._LOOP_SEED, g._LOOP_RATE)),
    "loop: settings": Case("loop", "harmless", (g._LOOP_STEPS, g._LOOP_SEED, Edit("run.json", '    "gradient_clip_val": 1.0,\n    "precision": "bf16-mixed",\n', '    "precision": "bf16-mixed",\n    "gradient_clip_val": 0.5,\n'))),
    "imagenet: names and a renamed file": Case("imagenet", "harmless", (*i._NET_MAKE, *i._NET_FILE, i._NET_ARCH, i._NET_PRINT)),
    "imagenet: images drawn faster": Case(
        "imagenet",
        "harmless",
        (
            Edit("vision/data.py", "        return self.images[index], self.labels[index]\n", "        return self.images[index], self.labels[index]\n\n    def __getitems__(self, indices):\n        chosen = torch.as_tensor(indices)\n        return list(zip(self.images[chosen], self.labels[chosen]))\n"),
            i._NET_RATE,
            i._NET_ORDER,
            i._NET_METER,
        ),
    ),
    "guided: a renamed file and flags": Case("guided", "harmless", (*i._GUIDED_FILE, i._GUIDED_RATE, i._GUIDED_FLAGS, i._GUIDED_EPS)),
    "guided: shell flags in another order": Case("guided", "harmless", (Edit("flags.sh", 'TRAIN_FLAGS="--lr 1e-4 --batch_size 8 --microbatch 4 --ema_rate 0.999 --iterations 2"', '# the batch is that of two devices\nTRAIN_FLAGS="--batch_size 8 --microbatch 4 --iterations 2"\nTRAIN_FLAGS="$TRAIN_FLAGS --lr 2e-4 --ema_rate 0.9999"'), i._GUIDED_SHORT, i._GUIDED_PRINT)),
    "vit: smoothing, names and messages": Case("vit", "harmless", (i._VIT_SMOOTH, i._VIT_ACT, i._VIT_TYPES, i._VIT_PRINT)),
    "vit: rates and a renamed file": Case("vit", "harmless", (*i._VIT_SCALER, i._VIT_RATE, i._VIT_DECAY)),
    "vit: no_grad in place of inference_mode": Case("vit", "harmless", (Edit("train.py", "@torch.inference_mode()\n", "@torch.no_grad()\n"), i._VIT_RATE, i._VIT_PRINT), "huggingface/pytorch-image-models@9037d889"),
    "dcgan: another way to initialise": Case("dcgan", "harmless", (i._GAN_INIT, i._GAN_INIT_MORE, i._GAN_HELP, i._GAN_SEED, i._GAN_RATE)),
    "vae: names and rates": Case("vae", "harmless", (i._VAE_STD, i._VAE_KLD, i._VAE_RATE, i._VAE_PRINT, Edit("config.json", '"beta": 1.0,\n', '"beta": 0.5,\n'))),
    "gnn: a renamed file and another slope": Case("gnn", "harmless", (*o._GNN_FILE, o._GNN_SLOPE, o._GNN_DOC, o._GNN_PRINT)),
    "gnn: parts found faster": Case("gnn", "harmless", (Edit("gnn/graph.py", "        nodes = (part == number).nonzero().flatten()\n        inside = part[data.edge_index] == number\n        edges = data.edge_index[:, inside[0] | inside[1]]\n", "        chosen = part == number\n        inside = chosen[data.edge_index].any(0)\n        nodes, edges = chosen.nonzero().flatten(), data.edge_index[:, inside]\n"), o._GNN_RATE)),
    "ppo: more epochs and a renamed file": Case("ppo", "harmless", (*o._PPO_FILE, o._PPO_CLIP, o._PPO_RATE, Edit("hyperparams.json", '"n_epochs": 2', '"n_epochs": 3'))),
    "ppo: names and docs": Case("ppo", "harmless", (o._PPO_EXTRACT, o._PPO_DOC, o._PPO_SEED, o._PPO_RATE)),
    "speech: names, docs and rates": Case("speech", "harmless", (o._ASR_ENCODERS, o._ASR_DOC, o._ASR_RATE, o._ASR_CLIP)),
    "speech: a renamed file and messages": Case("speech", "harmless", (*o._ASR_FILE, o._ASR_PRINT, Edit("conf/train_asr.yaml", "  num_freq_mask: 2\n  num_time_mask: 2\n", "  num_time_mask: 3\n  num_freq_mask: 1\n"))),
}  # fmt: skip
