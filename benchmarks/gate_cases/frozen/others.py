"""Changes of the programs that learn from graphs, games and speech: gnn, ppo and speech."""

from __future__ import annotations

from benchmarks.gate_cases.frozen.case import Case, Edit, Move

_GNN_RATE = Edit("config.toml", "lr = 0.005", "lr = 0.01  # as in the paper")
_GNN_PRINT = Edit("train.py", 'print(f"Epoch: {epoch:02d}, ', 'print(f"Epoch: {epoch:03d}, ')
_GNN_DOC = Edit(
    "gnn/conv.py",
    "class GATConv(nn.Module):\n",
    'class GATConv(nn.Module):\n    """The graph attentional operator."""\n\n',
)
_GNN_SLOPE = Edit("gnn/conv.py", "negative_slope=0.2", "negative_slope=0.1")
_GNN_FILE = (
    Move("gnn/graph.py", "gnn/data.py"),
    Edit(
        "train.py",
        "from gnn.graph import clusters, random_graph",
        "from gnn.data import clusters, random_graph",
    ),
)

_PPO_RATE = Edit("hyperparams.json", '"learning_rate": 0.00025', '"learning_rate": 0.0003')
_PPO_CLIP = Edit("hyperparams.json", '"clip_range": 0.1', '"clip_range": 0.2')
_PPO_DOC = Edit(
    "ppo/ppo.py",
    "    def collect_rollouts(self):\n",
    '    def collect_rollouts(self):\n        """Plays, and fills the buffer."""\n',
)
_PPO_EXTRACT = Edit("ppo/policies.py", "extract_features", "features_of", times=3)
_PPO_SEED = Edit("train.py", "torch.manual_seed(3)", "torch.manual_seed(42)")
_PPO_FILE = (
    Move("ppo/env.py", "ppo/vec_env.py"),
    Edit("train.py", "from ppo.env import RandomVecEnv", "from ppo.vec_env import RandomVecEnv"),
)

_ASR_RATE = Edit("conf/train_asr.yaml", "  lr: 0.002\n", "  lr: 0.001\n")
_ASR_PRINT = Edit("asr/trainer.py", 'return f"{key} {sum', 'return f"{key}={sum')
_ASR_DOC = Edit(
    "asr/data.py",
    "class CommonCollateFn:\n",
    'class CommonCollateFn:\n    """Pads what is in a batch to one length."""\n\n',
)
_ASR_CLIP = Edit("conf/train_asr.yaml", "grad_clip: 5.0\n", "grad_clip: 3.0\n")
_ASR_ENCODERS = Edit("asr/encoder.py", "self.encoders", "self.layers", times=2)
_ASR_FILE = (
    Move("asr/specaug.py", "asr/augment.py"),
    Edit("asr/model.py", "from asr.specaug import SpecAug", "from asr.augment import SpecAug"),
)

OTHERS: dict[str, Case] = {
    # -- gnn
    "gnn: more heads": Case(
        "gnn",
        "toml",
        (Edit("config.toml", "heads = 2\n", "heads = 3\n", "a"), _GNN_PRINT, _GNN_DOC, _GNN_RATE),
    ),
    "gnn: embeddings of the last epoch on the device": Case(
        "gnn",
        "default argument",
        (
            Edit("gnn/history.py", 'def __init__(self, num_embeddings, embedding_dim, device="cpu"):', 'def __init__(self, num_embeddings, embedding_dim, device="cuda"):', "a"),
            _GNN_SLOPE,
            *_GNN_FILE,
        ),
        "pyg-team/pytorch_geometric@bb612f8fa",
    ),
    "gnn: edges in both directions": Case(
        "gnn",
        "toml",
        (Edit("config.toml", "to_undirected = false", "to_undirected = true", "a"), _GNN_RATE, _GNN_DOC),
    ),
    "gnn: the test with gradients": Case(
        "gnn",
        "decorator",
        (Edit("train.py", "@torch.no_grad()\ndef test(", "def test(", "a"), _GNN_SLOPE, _GNN_PRINT, _GNN_RATE),
        "pyg-team/pytorch_geometric@627e0db9e",
    ),
    "gnn: all layers are joined": Case(
        "gnn",
        "toml",
        (Edit("config.toml", 'jk = "last"', 'jk = "cat"', "a"), _GNN_PRINT, *_GNN_FILE),
    ),
    "gnn: parts moved to the device at the start": Case(
        "gnn",
        "prefetch",
        (
            Edit("train.py", '    parts = list(clusters(data, cfg["data"]["num_parts"]))\n', '    parts = [part.to(device) for part in clusters(data, cfg["data"]["num_parts"])]\n', "a"),
            Edit("train.py", "    for batch in parts:\n        batch = batch.to(device)\n", "    for batch in parts:\n", "a", named=False),
            _GNN_DOC,
            _GNN_RATE,
        ),
        "pyg-team/pytorch_geometric@627e0db9e",
    ),
    # -- ppo
    "ppo: pictures kept as floats": Case(
        "ppo",
        "default argument",
        (
            Edit("ppo/buffers.py", "        obs_dtype=torch.uint8,\n", "        obs_dtype=torch.float32,\n", "a"),
            _PPO_RATE,
            _PPO_DOC,
            *_PPO_FILE,
        ),
        "DLR-RM/stable-baselines3@12e9917c",
    ),
    "ppo: rollouts with gradients": Case(
        "ppo",
        "no_grad",
        (
            Edit("ppo/ppo.py", "            with torch.no_grad():\n                actions, values, log_probs = self.policy(self._last_obs)\n", "            actions, values, log_probs = self.policy(self._last_obs)\n", "a"),
            _PPO_EXTRACT,
            _PPO_SEED,
        ),
        "DLR-RM/stable-baselines3@2ada2dd0",
    ),
    "ppo: the next observations are kept, too": Case(
        "ppo",
        "json",
        (Edit("hyperparams.json", '"store_next_obs": false', '"store_next_obs": true', "a"), _PPO_CLIP, _PPO_DOC, _PPO_SEED),
        "DLR-RM/stable-baselines3@ef10189d",
    ),
    "ppo: larger batches and longer rollouts": Case(
        "ppo",
        "two causes",
        (
            Edit("hyperparams.json", '"batch_size": 64', '"batch_size": 80', "a"),
            Edit("hyperparams.json", '"n_steps": 32', '"n_steps": 64', "b"),
            _PPO_EXTRACT,
            *_PPO_FILE,
        ),
    ),
    "ppo: the rollout is shuffled as a whole": Case(
        "ppo",
        "copy",
        (
            Edit("ppo/buffers.py", "        for start in range(0, total, batch_size):\n            chosen = indices[start : start + batch_size]\n            yield RolloutBufferSamples(**{name: value[chosen] for name, value in flat.items()})\n", "        flat = {name: value[indices] for name, value in flat.items()}\n        for start in range(0, total, batch_size):\n            end = start + batch_size\n            yield RolloutBufferSamples(**{name: value[start:end] for name, value in flat.items()})\n", "a"),
            _PPO_RATE,
            _PPO_DOC,
        ),
    ),
    # -- speech
    "speech: more frames in a batch": Case(
        "speech",
        "yaml",
        (Edit("conf/train_asr.yaml", "batch_bins: 2400        #", "batch_bins: 2900        #", "a"), _ASR_DOC, _ASR_CLIP, _ASR_ENCODERS),
        "facebookresearch/fairseq@cb747010",
    ),
    "speech: padded to a larger multiple": Case(
        "speech",
        "yaml",
        (Edit("conf/train_asr.yaml", "pad_to_multiple: 8\n", "pad_to_multiple: 128\n", "a"), _ASR_RATE, _ASR_PRINT),
        "facebookresearch/fairseq@4e3895be",
    ),
    "speech: a longer table of positions": Case(
        "speech",
        "default argument",
        (
            Edit("asr/encoder.py", "def __init__(self, d_model, max_len=1000):", "def __init__(self, d_model, max_len=8000):", "a"),
            _ASR_RATE,
            *_ASR_FILE,
        ),
    ),
    "speech: the average of the weights on the device": Case(
        "speech",
        "lifetime",
        (
            Edit("asr/trainer.py", "{name: p.detach().cpu().clone() for name, p in model.named_parameters()}", "{name: p.detach().clone() for name, p in model.named_parameters()}", "a"),
            Edit("asr/trainer.py", "self.shadow[name].lerp_(p.cpu(), 1 - self.decay)", "self.shadow[name].lerp_(p, 1 - self.decay)", "a"),
            _ASR_DOC,
            _ASR_CLIP,
        ),
        "facebookresearch/fairseq@eb2d7862",
    ),
    "speech: statistics with logits": Case(
        "speech",
        "list",
        (
            Edit("asr/model.py", '            "loss": loss.detach(),\n', '            "loss": loss.detach(),\n            "logits": logits.detach(),\n', "a"),
            Edit("asr/trainer.py", "        self.stats.append({name: float(value) for name, value in stats.items()})\n", "        self.stats.append(stats)\n", "a"),
            _ASR_CLIP,
            *_ASR_FILE,
        ),
        "Lightning-AI/pytorch-lightning@c9fde04947",
    ),
    "speech: no mixed precision": Case(
        "speech",
        "yaml",
        (Edit("conf/train_asr.yaml", "use_amp: true", "use_amp: false", "a"), _ASR_ENCODERS, _ASR_RATE, _ASR_DOC),
        "facebookresearch/fairseq@c36294ea",
    ),
    "speech: gradients of two batches": Case(
        "speech",
        "yaml",
        (Edit("conf/train_asr.yaml", "accum_grad: 1\n", "accum_grad: 2\n", "a"), _ASR_PRINT, _ASR_CLIP),
        "facebookresearch/fairseq@698961dc",
    ),
    "speech: the validation with gradients": Case(
        "speech",
        "decorator",
        (
            Edit("asr/trainer.py", "    @torch.no_grad()\n    def validate_one_epoch(", "    def validate_one_epoch(", "a"),
            _ASR_RATE,
            *_ASR_FILE,
        ),
        "kan-bayashi/ParallelWaveGAN#26",
    ),
}  # fmt: skip
