"""Changes of the language models: gpt, lora, moe, wordlm and loop."""

from __future__ import annotations

from benchmarks.gate_cases.frozen.case import Case, Edit, Move

_GPT_FORMAT = Edit(
    "train.py",
    'print(f"iter {iter_num}: loss {history[-1]:.4f}")',
    'print(f"iter {iter_num:5d}: loss {history[-1]:.4f}")',
)
_GPT_RATE = Edit(
    "config/shakespeare.toml",
    "learning_rate = 6e-4",
    "learning_rate = 1e-3  # with a small network we can afford to go higher",
)
_GPT_COMMENT = Edit(
    "gpt/model.py",
    '"""A GPT language model in one file."""',
    '"""Full definition of a GPT language model, all of it in this one file.\n\nThe names are those of the original implementation.\n"""',
)
_GPT_TANH = Edit("gpt/model.py", "self.gelu = nn.GELU()", 'self.gelu = nn.GELU(approximate="tanh")')
_GPT_OPTIM = (
    Move("gpt/optim.py", "gpt/optimizers.py"),
    Edit(
        "train.py",
        "from gpt.optim import configure_optimizers",
        "from gpt.optimizers import configure_optimizers",
    ),
)
_GPT_NODECAY = Edit("gpt/optim.py", "nodecay", "no_decay", times=2)
_GPT_TYPES = Edit(
    "gpt/data.py",
    "def get_batch(self, batch_size, block_size, device):",
    "def get_batch(self, batch_size: int, block_size: int, device: str) -> tuple:",
)
_GPT_QKV = Edit(
    "gpt/model.py",
    """\
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
""",
    """\
        q, k, v = (
            part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for part in (q, k, v)
        )
""",
)

_LORA_LOG = Edit(
    "train.py",
    'print(f"{epoch + 1}|{self.global_step}|Loss: {loss.detach().item():.4f}")',
    'print(f"{epoch + 1}|{self.global_step}|Loss: {loss.detach().item():.6f}")',
)
_LORA_DIR = Edit(
    "configs/lora_single_device.yaml",
    "output_dir: /tmp/lora-finetune",
    "output_dir: /tmp/torchtune/llama/lora_single_device",
)
_LORA_NORM = Edit(
    "tune/modules.py",
    "x_normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)\n        return x_normed * self.scale",
    "variance = x.pow(2).mean(-1, keepdim=True)\n        return x * torch.rsqrt(variance + self.eps) * self.scale",
)
_LORA_DOC = Edit(
    "tune/lora.py",
    "class LoRALinear(nn.Module):\n",
    'class LoRALinear(nn.Module):\n    """A linear layer with a low-rank update, as in https://arxiv.org/abs/2106.09685."""\n\n',
)
_LORA_PAD = Edit(
    "tune/data.py",
    "def pad_to(sequence, length, value):\n    return",
    "def pad_to(sequence, length, value):\n    # on the right\n    return",
)
_LORA_SEED = Edit(
    "configs/lora_single_device.yaml",
    "  lr: 3.0e-4\n  weight_decay: 0.01",
    "  weight_decay: 0.01\n  lr: 2.0e-4",
)

_MOE_PRINT = Edit(
    "train.py",
    'print(f"step {step}: loss {loss.item():.3f}, norm {norm.item():.2f}")',
    'print(f"{step:>4} | loss {loss.item():.3f} | norm {norm.item():.2f}")',
)
_MOE_RATE = Edit("config.toml", "lr = 1e-3", "lr = 8e-4")
_MOE_AUX = Edit(
    "config.toml", "router_z_coef = 0.001", "router_z_coef = 0.0005  # less, it is large at first"
)
_MOE_ATTEND = Edit("moe/model.py", "def attention(self, x):", "def self_attention(self, x):")
_MOE_ATTEND_USE = Edit(
    "moe/model.py",
    "x = x + self.attention(self.norm1(x))",
    "x = x + self.self_attention(self.norm1(x))",
)
_MOE_DOC = Edit(
    "moe/router.py",
    "def z_loss(logits):\n",
    'def z_loss(logits):\n    """Keeps the logits of the router small."""\n',
)
_MOE_ORDER = Edit(
    "moe/experts.py",
    "        gate = F.silu(torch.bmm(x, self.w1))\n        return torch.bmm(gate * torch.bmm(x, self.w3), self.w2)\n",
    "        hidden = F.silu(torch.bmm(x, self.w1)) * torch.bmm(x, self.w3)\n        return torch.bmm(hidden, self.w2)\n",
)

_WORDS_PRINT = Edit(
    "train.py",
    'print(f"batch {batch} | loss {total_loss / (batch + 1):.2f}")',
    'print(f"| {batch:5d} batches | loss {total_loss / (batch + 1):5.2f}")',
)
_WORDS_RATE = Edit("settings.ini", "lr = 20", "lr = 10")
_WORDS_CLIP = Edit("settings.ini", "clip = 0.25\nepochs = 1", "epochs = 1\nclip = 0.25")
_WORDS_CORPUS = (
    Move("lm/corpus.py", "lm/data.py"),
    Edit(
        "train.py",
        "from lm.corpus import Corpus, batchify, get_batch",
        "from lm.data import Corpus, batchify, get_batch",
    ),
)
_WORDS_CELL = Edit(
    "lm/model.py",
    "        r = torch.sigmoid(i_r + h_r)\n        z = torch.sigmoid(i_z + h_z)\n",
    "        z = torch.sigmoid(i_z + h_z)\n        r = torch.sigmoid(i_r + h_r)\n",
)
_WORDS_ERROR = Edit(
    "lm/model.py",
    "When using the tied flag, nhid must be equal to emsize",
    "tied weights need nhid == emsize",
)

_LOOP_PRINT = Edit(
    "loop/callbacks.py",
    "print(f\"step {trainer.global_step}: {outputs['loss'].item():.3f}\")",
    'loss = outputs["loss"].item()\n            print(f"step {trainer.global_step}: loss {loss:.4f}")',
)
_LOOP_DOC = Edit(
    "loop/module.py",
    "    def training_step(self, batch):\n",
    '    def training_step(self, batch):\n        """Returns a dictionary with the loss."""\n',
)
_LOOP_CALL = (
    Edit(
        "loop/trainer.py",
        "    def call(self, hook, *args):",
        "    def _call_callbacks(self, hook, *args):",
    ),
    Edit("loop/trainer.py", "self.call(", "self._call_callbacks(", times=4),
)
_LOOP_RATE = Edit("tasks/translation.py", "lr=3e-4", "lr=5e-4")
_LOOP_STEPS = Edit("run.json", '    "log_every_n_steps": 1\n', '    "log_every_n_steps": 2\n')
_LOOP_SEED = Edit("train.py", "torch.manual_seed(0)", "torch.manual_seed(1234)")

LANGUAGE: dict[str, Case] = {
    # -- gpt
    "gpt: a longer block": Case(
        "gpt",
        "toml",
        (
            _GPT_FORMAT,
            Edit("config/shakespeare.toml", "block_size = 128", "block_size = 160", "a"),
            _GPT_RATE,
            _GPT_QKV,
        ),
        "karpathy/nanoGPT@c3f25484",
    ),
    "gpt: the vocabulary rounded up to more": Case(
        "gpt",
        "default argument",
        (
            Edit("gpt/configurator.py", "def padded(vocab_size, multiple=64):", "def padded(vocab_size, multiple=512):", "a"),
            Edit("gpt/configurator.py", '    """Vocabulary sizes are rounded up for efficiency."""', '    """The vocabulary size, rounded up: multiples of a power of two are faster."""'),
            _GPT_TANH,
            _GPT_TYPES,
        ),
        "karpathy/nanoGPT@77e7e04c",
    ),
    "gpt: no_grad of the estimate removed": Case(
        "gpt",
        "decorator",
        (
            Edit("train.py", "@torch.no_grad()\ndef estimate_loss(", "def estimate_loss(", "a"),
            Edit("train.py", "    out = {}\n    model.eval()\n", "    out = {}\n    # the two parts of the data, with a few batches each\n    model.eval()\n"),
            *_GPT_OPTIM,
        ),
        "kan-bayashi/ParallelWaveGAN#26",
    ),
    "gpt: gradients zeroed in place": Case(
        "gpt",
        "flag",
        (
            Edit(
                "train.py",
                "        # flush the gradients as soon as we can, no need for this memory anymore\n        optimizer.zero_grad(set_to_none=True)\n",
                "        optimizer.zero_grad(set_to_none=False)\n",
                "a",
            ),
            _GPT_COMMENT,
            _GPT_NODECAY,
            _GPT_RATE,
        ),
        "karpathy/nanoGPT@67166079",
    ),
    "gpt: the checkpoint stays": Case(
        "gpt",
        "lifetime",
        (
            Edit("train.py", "        checkpoint = None  # free up memory\n", "", "a"),
            Edit("train.py", 'def load_checkpoint(cfg):\n    """What an earlier run left."""', 'def load_checkpoint(cfg):\n    """The checkpoint of an earlier run: its weights and its number of iterations."""'),
            _GPT_TYPES,
            _GPT_FORMAT,
        ),
        "karpathy/nanoGPT@4ac2e8ce",
    ),
    "gpt: the training step without autocast": Case(
        "gpt",
        "autocast",
        (
            Edit(
                "train.py",
                "        with ctx():\n            logits, loss = model(x, y)\n        loss.backward()\n",
                "        logits, loss = model(x, y)\n        loss.backward()\n",
                "a",
            ),
            _GPT_TANH,
            _GPT_FORMAT,
        ),
        "karpathy/nanoGPT@a855d316",
    ),
    "gpt: attention written out": Case(
        "gpt",
        "size",
        (
            Edit(
                "gpt/model.py",
                """\
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
""",
                """\
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.dropout(F.softmax(att, dim=-1), self.dropout, self.training)
        y = att @ v
""",
                "a",
            ),
            Edit(
                "gpt/model.py",
                "        self.dropout = config.dropout\n",
                "        self.dropout = config.dropout\n        mask = torch.tril(torch.ones(config.block_size, config.block_size))\n        self.register_buffer(\"bias\", mask.view(1, 1, config.block_size, config.block_size))\n",
                "a",
                named=False,
            ),
            _GPT_COMMENT,
            _GPT_RATE,
        ),
        "karpathy/nanoGPT@ae06d0b1",
    ),
    "gpt: logits kept for a plot": Case(
        "gpt",
        "list",
        (
            Edit("train.py", "    history = []\n", "    history = []\n    confidence = []\n"),
            Edit(
                "train.py",
                "        history.append(loss.item())\n",
                "        history.append(loss.item())\n        confidence.append(logits.detach())\n",
                "a",
            ),
            Edit("train.py", "    print(sample.shape)\n", "    print(sample.shape, len(confidence))\n"),
            _GPT_NODECAY,
        ),
        "pytorch/examples@391be73",
    ),
    "gpt: untied weights and a larger batch": Case(
        "gpt",
        "two causes",
        (
            Edit("gpt/model.py", "        self.wte.weight = self.lm_head.weight\n", "", "a"),
            Edit("config/shakespeare.toml", "batch_size = 8\neval", "batch_size = 9\neval", "b"),
            _GPT_RATE,
            _GPT_QKV,
            Edit("train.py", "    torch.manual_seed(1337)", "    torch.manual_seed(2024)"),
        ),
        "karpathy/nanoGPT@eae986c2",
    ),
    # -- lora
    "lora: the logits are not deleted": Case(
        "lora",
        "lifetime",
        (
            Edit(
                "train.py",
                "                # free logits otherwise it peaks backward memory\n                del logits\n                loss.backward()\n",
                "                loss.backward()\n",
                "a",
            ),
            _LORA_LOG,
            _LORA_DOC,
            _LORA_SEED,
        ),
        "pytorch/torchtune@cb3ed29d7",
    ),
    "lora: no activation checkpointing": Case(
        "lora",
        "yaml",
        (
            Edit("configs/lora_single_device.yaml", "enable_activation_checkpointing: true", "enable_activation_checkpointing: false", "a"),
            Edit("configs/lora_single_device.yaml", "# LoRA finetuning on one device.", "# LoRA finetuning on one device.\n#\n# To launch: python train.py"),
            _LORA_DIR,
            _LORA_NORM,
        ),
        "pytorch/torchtune@69ccd2e00",
    ),
    "lora: single precision": Case(
        "lora",
        "yaml",
        (
            Edit("configs/lora_single_device.yaml", "dtype: bf16", "dtype: fp32", "a"),
            _LORA_SEED,
            _LORA_PAD,
            _LORA_DOC,
        ),
        "pytorch/torchtune@46d7c8313",
    ),
    "lora: the base model is trained": Case(
        "lora",
        "lifetime",
        (
            Edit(
                "train.py",
                "        self.adapter_params = get_adapter_params(model)\n        set_trainable_params(model, self.adapter_params)\n",
                "        self.adapter_params = get_adapter_params(model)\n",
                "a",
            ),
            Edit("train.py", "from tune.lora import get_adapter_params, set_trainable_params\n", "from tune.lora import get_adapter_params\n", "a", named=False),
            _LORA_LOG,
            _LORA_NORM,
            _LORA_DIR,
        ),
        "huggingface/peft@13fa0aea7",
    ),
    "lora: chunks joined for the loss": Case(
        "lora",
        "size",
        (
            Edit(
                "tune/loss.py",
                """\
        if not isinstance(logits, list):
            return self.compute_cross_entropy(logits.flatten(0, 1), labels.flatten()) / total
        loss = 0.0
        for part, right in zip(logits, labels.chunk(self.num_output_chunks, dim=1)):
            loss = loss + self.compute_cross_entropy(part.flatten(0, 1), right.flatten())
        return loss / total
""",
                """\
        if isinstance(logits, list):
            logits = torch.cat(logits, dim=1)
        return self.compute_cross_entropy(logits.flatten(0, 1), labels.flatten()) / total
""",
                "a",
            ),
            Edit("tune/loss.py", "import torch.nn.functional as F\n", "import torch\nimport torch.nn.functional as F\n", "a", named=False),
            _LORA_LOG,
            _LORA_PAD,
        ),
        "pytorch/torchtune@8a98fbaa3",
    ),
    "lora: padded to the longest that is allowed": Case(
        "lora",
        "size",
        (
            Edit(
                "tune/data.py",
                "def batches(dataset, batch_size, collate_fn=padded_collate_sft):\n",
                "def batches(dataset, batch_size, collate_fn=padded_collate_sft):\n    # static shapes compile once\n",
            ),
            Edit(
                "tune/data.py",
                "def padded_collate_sft(batch, padding_idx=0, ignore_idx=CROSS_ENTROPY_IGNORE_IDX):\n    longest = max(len(row[\"tokens\"]) for row in batch)\n",
                "def padded_collate_sft(batch, length, padding_idx=0, ignore_idx=CROSS_ENTROPY_IGNORE_IDX):\n    longest = length\n",
                "a",
            ),
            Edit(
                "tune/data.py",
                "        yield collate_fn([dataset[i] for i in range(start, start + batch_size)])\n",
                "        rows = [dataset[i] for i in range(start, start + batch_size)]\n        yield collate_fn(rows, dataset.max_seq_len)\n",
                "a",
                named=False,
            ),
            _LORA_NORM,
            _LORA_DIR,
        ),
        "pytorch/torchtune@2c948c6c1",
    ),
    "lora: a mask for longer sequences": Case(
        "lora",
        "yaml",
        (
            Edit("configs/lora_single_device.yaml", "  embed_dim: 128\n  max_seq_len: 512\n", "  embed_dim: 128\n  max_seq_len: 2048\n", "a"),
            _LORA_SEED,
            _LORA_LOG,
            _LORA_DOC,
        ),
    ),
    # -- moe
    "moe: more capacity": Case(
        "moe",
        "toml",
        (
            Edit("config.toml", "capacity_factor = 1.25", "capacity_factor = 1.75", "a"),
            _MOE_RATE,
            _MOE_DOC,
            _MOE_ORDER,
        ),
    ),
    "moe: moments in single precision": Case(
        "moe",
        "toml",
        (
            Edit("config.toml", 'state_dtype = "bfloat16"', 'state_dtype = "float32"', "a"),
            _MOE_AUX,
            _MOE_PRINT,
        ),
        "facebookresearch/fairseq@68c87f0a",
    ),
    "moe: more experts and a larger vocabulary": Case(
        "moe",
        "two causes",
        (
            Edit("config.toml", "num_experts = 8", "num_experts = 9", "a"),
            Edit("config.toml", "vocab_size = 1000", "vocab_size = 1400", "b"),
            _MOE_ATTEND,
            _MOE_ATTEND_USE,
            _MOE_PRINT,
        ),
    ),
    "moe: gradients filled with zeros": Case(
        "moe",
        "lifetime",
        (
            Edit(
                "train.py",
                "        optimizer.zero_grad(set_to_none=True)\n",
                "        for p in model.parameters():\n            p.grad.zero_()\n",
                "a",
            ),
            _MOE_DOC,
            _MOE_RATE,
            _MOE_ORDER,
        ),
        "huggingface/accelerate@145a98fc",
    ),
    "moe: a second copy of the weights in the optimizer": Case(
        "moe",
        "optimizer",
        (
            Edit(
                "moe/optim.py",
                """\
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=self.state_dtype)
""",
                """\
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=self.state_dtype)
                    state["master"] = p.detach().float().clone()
""",
                "a",
            ),
            Edit(
                "moe/optim.py",
                """\
                p.mul_(1 - group["lr"] * group["weight_decay"])
""",
                """\
                # decoupled weight decay
                p.mul_(1 - group["lr"] * group["weight_decay"])
""",
            ),
            _MOE_PRINT,
            _MOE_AUX,
        ),
        "facebookresearch/fairseq@60d2da70",
    ),
    "moe: an entropy in the loss": Case(
        "moe",
        "size",
        (
            Edit(
                "moe/model.py",
                "        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()) + aux\n",
                "        logp = logits.flatten(0, 1).float().log_softmax(-1)\n"
                "        entropy = -(logp.exp() * logp).sum(-1).mean()\n"
                "        return F.nll_loss(logp, labels.flatten()) + aux - 0.001 * entropy\n",
                "a",
            ),
            _MOE_ATTEND,
            _MOE_ATTEND_USE,
            _MOE_RATE,
        ),
        "huggingface/trl@deae7e00b",
    ),
    "moe: inputs of the experts kept for statistics": Case(
        "moe",
        "module attribute",
        (
            Edit(
                "moe/experts.py",
                "        out = self.experts(buffer.view(self.num_experts, capacity, -1)).flatten(0, 1)\n",
                "        out = self.experts(buffer.view(self.num_experts, capacity, -1)).flatten(0, 1)\n        self.stats.append((counts[-1], out))\n",
                "a",
            ),
            Edit(
                "moe/experts.py",
                "        self.capacity_factor = cfg[\"capacity_factor\"]\n",
                "        self.capacity_factor = cfg[\"capacity_factor\"]\n        self.stats = []\n",
                "a",
                named=False,
            ),
            _MOE_DOC,
            _MOE_PRINT,
        ),
        "Lightning-AI/pytorch-lightning@c9af1a7aec",
    ),
    # -- wordlm
    "wordlm: the hidden state keeps its history": Case(
        "wordlm",
        "detach",
        (
            Edit("train.py", "        hidden = repackage_hidden(hidden)\n        output, hidden = model(data, hidden)\n        loss", "        output, hidden = model(data, hidden)\n        loss", "a"),
            Edit("train.py", "        loss.backward()\n", "        loss.backward(retain_graph=True)\n", "a"),
            _WORDS_PRINT,
            _WORDS_RATE,
            _WORDS_CELL,
        ),
        "pytorch/examples@9dc6538",
    ),
    "wordlm: longer parts of the text": Case(
        "wordlm",
        "ini",
        (
            Edit("settings.ini", "bptt = 35", "bptt = 42", "a"),
            _WORDS_CLIP,
            _WORDS_ERROR,
        ),
    ),
    "wordlm: weights not tied": Case(
        "wordlm",
        "ini",
        (
            Edit("settings.ini", "tied = yes", "tied = no", "a"),
            Edit("settings.ini", "dropout = 0.2", "dropout = 0.25"),
            *_WORDS_CORPUS,
            _WORDS_PRINT,
        ),
    ),
    "wordlm: an evaluation with gradients": Case(
        "wordlm",
        "no_grad",
        (
            Edit(
                "train.py",
                """\
    with torch.no_grad():
        for i in starts:
            data, targets = get_batch(data_source, i, bptt, device)
            output, hidden = model(data, hidden)
            hidden = repackage_hidden(hidden)
            total_loss += criterion(output, targets).item()
    return""",
                """\
    for i in starts:
        data, targets = get_batch(data_source, i, bptt, device)
        output, hidden = model(data, hidden)
        hidden = repackage_hidden(hidden)
        total_loss += criterion(output, targets).item()
    return""",
                "a",
            ),
            _WORDS_CLIP,
            _WORDS_CELL,
        ),
        "pytorch/examples@9dc6538",
    ),
    "wordlm: gradients zeroed in place": Case(
        "wordlm",
        "flag",
        (
            *_WORDS_CORPUS,
            Edit("train.py", "        model.zero_grad()\n", "        model.zero_grad(set_to_none=False)\n", "a"),
            _WORDS_ERROR,
            _WORDS_RATE,
        ),
        "huggingface/accelerate@145a98fc",
    ),
    # -- loop
    "loop: outputs of an epoch kept": Case(
        "loop",
        "list",
        (
            Edit(
                "loop/trainer.py",
                "            # the hooks get the loss alone, without its graph\n            outputs = {\"loss\": outputs[\"loss\"].detach()}\n",
                "            # the hook at the end of the epoch gets all of them\n            self.epoch_outputs.append(outputs)\n",
                "a",
            ),
            Edit("loop/trainer.py", "        self.global_step = 0\n", "        self.global_step = 0\n        self.epoch_outputs = []\n", "a", named=False),
            Edit("tasks/translation.py", "        loss, _ = self.loss(batch)\n        self.log(\"train_loss\", loss)\n        return {\"loss\": loss}\n", "        loss, logits = self.loss(batch)\n        self.log(\"train_loss\", loss)\n        return {\"loss\": loss, \"logits\": logits}\n", "a"),
            _LOOP_DOC,
            _LOOP_RATE,
        ),
        "Lightning-AI/pytorch-lightning@bf51844917",
    ),
    "loop: logits of the validation kept": Case(
        "loop",
        "list",
        (
            Edit(
                "loop/trainer.py",
                "            losses.append(output[\"val_loss\"])\n",
                "            losses.append(output[\"val_loss\"])\n            self.val_outputs.append(output)\n",
                "a",
            ),
            Edit("loop/trainer.py", "        self.global_step = 0\n", "        self.global_step = 0\n        self.val_outputs = []\n", "a", named=False),
            Edit(
                "tasks/translation.py",
                "        return {\"val_loss\": loss, \"accuracy\": right.float().mean()}\n",
                "        return {\"val_loss\": loss, \"accuracy\": right.float().mean(), \"logits\": logits}\n",
                "a",
            ),
            _LOOP_PRINT,
            _LOOP_SEED,
        ),
        "Lightning-AI/pytorch-lightning@46540ee260",
    ),
    "loop: a callback that averages weights": Case(
        "loop",
        "new file",
        (
            Edit(
                "loop/averaging.py",
                "",
                '''\
"""Averages of the weights."""

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from loop.callbacks import Callback


class WeightAveraging(Callback):
    """Averages the weights while a model is trained."""

    def __init__(self, decay=0.99, every_n_steps=1):
        self.decay = decay
        self.every_n_steps = every_n_steps
        self.average = None

    def on_fit_start(self, trainer, module):
        module.trainer = None
        self.average = AveragedModel(module, avg_fn=get_ema_avg_fn(self.decay))
        module.trainer = trainer

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, outputs):
        if trainer.global_step % self.every_n_steps == 0:
            self.average.update_parameters(module)
''',
                "a",
            ),
            Edit("run.json", '"callbacks": ["Progress", "BestScore"]', '"callbacks": ["Progress", "BestScore", "WeightAveraging"]', "a"),
            Edit("train.py", "from loop.callbacks import REGISTRY\n", "from loop.averaging import WeightAveraging\nfrom loop.callbacks import REGISTRY\n", "a", named=False),
            Edit("train.py", "    callbacks = [REGISTRY[name]() for name in run[\"callbacks\"]]\n", "    REGISTRY[\"WeightAveraging\"] = WeightAveraging\n    callbacks = [REGISTRY[name]() for name in run[\"callbacks\"]]\n", "a", named=False),
            _LOOP_DOC,
            _LOOP_RATE,
        ),
        "Lightning-AI/pytorch-lightning@1ec459fb93",
    ),
    "loop: the best weights stay on the device": Case(
        "loop",
        "lifetime",
        (
            Edit(
                "loop/callbacks.py",
                '    """Remembers the weights with the smallest loss, on the host."""\n',
                '    """Remembers the weights with the smallest loss."""\n',
            ),
            Edit("loop/callbacks.py", "self.weights = {name: value.cpu() for name, value in module.state_dict().items()}", "self.weights = copy.deepcopy(module.state_dict())", "a"),
            Edit("loop/callbacks.py", '"""What happens around the steps."""\n', '"""What happens around the steps."""\n\nimport copy\n', "a", named=False),
            _LOOP_STEPS,
            *_LOOP_CALL,
        ),
        "facebookresearch/fairseq@a2314b4e",
    ),
    "loop: errors remembered with their frames": Case(
        "loop",
        "lifetime",
        (
            Edit(
                "loop/trainer.py",
                """\
            with self.forward_context():
                outputs = module.training_step(batch)
            loss = outputs""",
                """\
            try:
                with self.forward_context():
                    outputs = module.training_step(batch)
            except ArithmeticError as error:
                # a batch that is out of line is left out
                self.skipped.append(error)
                continue
            loss = outputs""",
                "a",
            ),
            Edit("loop/trainer.py", "        self.global_step = 0\n", "        self.global_step = 0\n        self.skipped = []\n", "a", named=False),
            Edit(
                "tasks/translation.py",
                "        self.log(\"train_loss\", loss)\n",
                "        self.log(\"train_loss\", loss)\n        if int(batch[\"source\"][0, 0]) % 3 == 0:\n            raise ArithmeticError(\"the loss is not finite\")\n",
                "a",
                named=False,
            ),
            _LOOP_RATE,
        ),
        "huggingface/trl@a0dc55243",
    ),
    "loop: a longer table of positions": Case(
        "loop",
        "json",
        (
            Edit("run.json", '"max_len": 256', '"max_len": 2048', "a"),
            *_LOOP_CALL,
            _LOOP_RATE,
        ),
    ),
}  # fmt: skip
