"""One tiny model of an architecture of transformers, built from its configuration class.

No weights are downloaded: every size among the arguments of the configuration class is replaced
by a small one, by the name of the argument, and probabilities of dropout by zero, so that
losses on two devices can be compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

VOCABULARY = 128
HIDDEN = 32
LENGTH = 16
IMAGE = 32

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_kv": 8,
    "d_ff": 64,
    "head_dim": 8,
    "attention_head_dim": 8,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "multi_query": False,
    "n_inner": 64,
    "max_window_layers": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "qk_head_dim": 16,
    "sliding_window": 8,
    "attention_window": 8,
    "state_size": 8,
    "ssm_state_size": 8,
    "mamba_d_state": 8,
    "mamba_d_head": 8,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "mamba_expand": 2,
    "mamba_dt_rank": 4,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "time_step_rank": 4,
    "image_size": IMAGE,
    "embedding_size": HIDDEN,
    "embed_dim": HIDDEN,
    "word_embed_proj_dim": HIDDEN,
    "rotary_dim": 8,
    "n_positions": 64,
    "n_ctx": 64,
    "max_position_embeddings": 64,
    "max_source_positions": 32,
    "max_target_positions": 64,
    "num_mel_bins": 16,
    "num_queries": 8,
    "num_labels": 3,
    "layerdrop": 0.0,
    "activation_dropout": 0.0,
    "router_jitter_noise": 0.0,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "use_cache": False,
    "use_mambapy": False,
    "ctc_zero_infinity": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "relative_attention_num_buckets": 8,
    "num_buckets": 8,
    "max_expert_num": 4,
}
"""Values of arguments by name; those below by what the name ends in."""

_ENDINGS: tuple[tuple[tuple[str, ...], Any], ...] = (
    (
        ("dropout", "dropout_prob", "drop", "pdrop", "drop_rate", "drop_path_rate", "dropout_rate"),
        0.0,
    ),
    (("layerdrop",), 0.0),
    (("hidden_size", "d_model", "n_embd", "hidden_dim", "model_dim", "emb_dim"), HIDDEN),
    (("projection_dim", "proj_dim", "lru_width"), HIDDEN),
    (("intermediate_size", "ffn_dim", "ffn_hidden_size", "mlp_dim", "dim_feedforward"), 64),
    (("num_hidden_layers", "num_layers", "n_layers", "n_layer", "encoder_layers"), 2),
    (("decoder_layers", "num_decoder_layers", "num_encoder_layers"), 2),
    (("attention_heads", "n_heads", "n_head", "num_heads", "num_attention_heads"), 4),
)


class NotBuilt(Exception):
    """No tiny model of this architecture can be made in this generic way."""


def shrunk(config_class: type, **forced: Any) -> Any:
    """A configuration of a class with all of its sizes small, its sub-configurations too."""
    from transformers import AutoConfig

    values: dict[str, Any] = {}
    for name, parameter in inspect.signature(config_class).parameters.items():
        sub = getattr(config_class, "sub_configs", {}).get(name)
        if sub is not None:
            if sub is not AutoConfig:
                values[name] = shrunk(sub).to_dict()
            continue
        found = _small(name, parameter.default)
        if found is not None:
            values[name] = found
    if "kv_lora_rank" in values and "num_key_value_heads" in values:
        values["num_key_value_heads"] = values[
            "num_attention_heads"
        ]  # latent attention has no groups
    values.update(forced)
    return config_class(**values)


def _small(name: str, default: Any) -> Any:
    """The small value of an argument; None to leave it as it is."""
    value = None
    if name in _SIZES:
        value = _SIZES[name]
    else:
        for endings, size in _ENDINGS:
            if name.endswith(endings):
                value = size
                break
    if value is None:
        return None
    if isinstance(default, (list, tuple)):
        return (
            None
            if isinstance(value, float) or name != "image_size"
            else type(default)([IMAGE] * len(default))
        )
    if isinstance(default, str):
        return None
    return value


def batches(task: str, config: Any) -> dict[str, Any]:
    """The arguments of one call, as tensors on the host."""
    import torch

    draw = torch.Generator().manual_seed(0)

    def ids(*shape: int, most: int = VOCABULARY) -> Any:
        return torch.randint(3, most, shape, generator=draw)

    def floats(*shape: int) -> Any:
        return torch.randn(shape, generator=draw)

    tokens = ids(2, LENGTH)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, -4:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    image = _image_size(config)
    channels = getattr(config, "num_channels", 3)
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "causal-lm": lambda: {"input_ids": tokens, "attention_mask": mask, "labels": labels},
        "masked-lm": lambda: {"input_ids": tokens, "attention_mask": mask, "labels": labels},
        "seq2seq": lambda: {
            "input_ids": tokens,
            "attention_mask": mask,
            "labels": ids(2, 8),
        },
        "sequence-classification": lambda: {
            "input_ids": tokens,
            "attention_mask": mask,
            "labels": torch.tensor([0, 1]),
        },
        "token-classification": lambda: {
            "input_ids": tokens,
            "attention_mask": mask,
            "labels": ids(2, LENGTH) % 2,
        },
        "image-classification": lambda: {
            "pixel_values": floats(2, channels, image, image),
            "labels": torch.tensor([0, 1]),
        },
        "segmentation": lambda: {
            "pixel_values": floats(2, channels, image, image),
            "labels": torch.randint(0, 2, (2, image, image), generator=draw),
        },
        "detection": lambda: {
            "pixel_values": floats(2, channels, 64, 64),
            "labels": [
                {
                    "class_labels": torch.tensor([0, 1]),
                    "boxes": torch.rand(2, 4, generator=draw) / 2 + 0.1,
                }
                for _ in range(2)
            ],
        },
        "audio-classification": lambda: {
            "input_values": floats(2, 4000),
            "labels": torch.tensor([0, 1]),
        },
        "ctc": lambda: {"input_values": floats(2, 8000), "labels": ids(2, 5, most=30)},
        "speech-seq2seq": lambda: {
            "input_features": floats(2, 16, 64),
            "labels": ids(2, 8),
        },
        "masked-image": lambda: {
            "pixel_values": floats(2, channels, image, image),
            "bool_masked_pos": torch.rand(2, _patches(config, image), generator=draw) > 0.5,
        },
        "time-series": lambda: {
            "past_values": floats(
                2, getattr(config, "context_length", 32), getattr(config, "num_input_channels", 1)
            ),
            "future_values": floats(
                2, getattr(config, "prediction_length", 8), getattr(config, "num_input_channels", 1)
            ),
        },
    }
    return makers[task]()


def _image_size(config: Any) -> int:
    size = getattr(config, "image_size", 64)
    return size if isinstance(size, int) else int(size[0])


def _patches(config: Any, image: int) -> int:
    patch = getattr(config, "patch_size", 16)
    return int(image // (patch if isinstance(patch, int) else patch[0])) ** 2


TASKS = {
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "speech-seq2seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
    "audio-classification": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "segmentation": "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
    "detection": "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES",
    "masked-image": "MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING_NAMES",
    "sequence-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token-classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "time-series": "MODEL_FOR_TIME_SERIES_PREDICTION_MAPPING_NAMES",
}
"""Tasks that have a loss, with transformers' table of the models for each."""


def model_class(task: str, architecture: str) -> Any:
    """The class that ``transformers`` names for a task. Raises NotBuilt where it has none."""
    import transformers
    from transformers.models.auto import modeling_auto

    name = getattr(modeling_auto, TASKS[task]).get(architecture)
    if name is None:
        raise NotBuilt(f"no model of {architecture} for {task}")
    return getattr(transformers, name if isinstance(name, str) else name[0])


def imports(task: str, architecture: str) -> tuple[str, ...]:
    """The modules that a program imports."""
    return (
        "transformers.modeling_utils",
        "torch.optim",
        model_class(task, architecture).__module__,
    )


def train(task: str, architecture: str, device: str, steps: int = 2) -> list[Any]:
    """A few steps of AdamW; the losses, as tensors on the device."""
    import torch
    from transformers import CONFIG_MAPPING

    torch.manual_seed(0)
    config = shrunk(CONFIG_MAPPING[architecture])
    model = model_class(task, architecture)(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        batch = _moved(batches(task, config), device)
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, list):
        return [_moved(item, device) for item in value]
    return value.to(device)
