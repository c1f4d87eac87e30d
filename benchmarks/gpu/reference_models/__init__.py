"""Training steps in plain PyTorch whose memory is recorded on real GPUs.

`cases` lists them. Each can be built in full size, for the GPU, and tiny, for a test on the
CPU: the same code with smaller numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from . import language, other, vision
from .training import Step, Training, Work

__all__ = ["Case", "Step", "Training", "Work", "case", "cases"]

MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    """One training step to be measured.

    ``work`` makes the model and its data, trained as in ``training``; or ``whole`` makes the
    complete step. ``full`` and ``tiny`` are the arguments of either. ``values``: what is
    allocated depends on the values that were computed.
    """

    name: str
    about: str
    full: Mapping[str, Any]
    tiny: Mapping[str, Any]
    work: Callable[..., Work] | None = None
    training: Training = field(default_factory=Training)
    whole: Callable[..., Step] | None = None
    values: bool = False

    def build(self, device: str, *, tiny: bool = False) -> Step:
        """The step, with its model on ``device``. The same seed each time."""
        torch.manual_seed(0)
        sizes = self.tiny if tiny else self.full
        if self.whole is not None:
            return self.whole(device, **sizes)
        work = self.work
        if work is None:
            raise TypeError(f"{self.name} has neither work nor a whole step")
        return self.training.start(lambda: work(**sizes), device)


_GPT = {"width": 32, "depth": 2, "head_count": 2, "vocabulary": 101, "batch": 2, "length": 16}
_MEDIUM = {"width": 1024, "depth": 24, "head_count": 16}
_LLAMA = {**_GPT, "head_count": 4, "kv_heads": 2}
_RESNET = {"depths": (1, 1), "width": 8, "size": 32, "classes": 10, "batch": 2}
_CONVNEXT = {"depths": (1, 1), "widths": (8, 16), "size": 32, "classes": 10, "batch": 2}
_UNET = {"width": 16, "levels": 2, "size": 16, "batch": 2}
_ROWS = {"rows": (100, 10, 5), "width": 8, "batch": 8}


def _language() -> list[Case]:
    gpt, llama, bert, t5, moe = (
        language.gpt,
        language.llama,
        language.bert,
        language.t5,
        language.moe,
    )
    return [
        Case(
            "gpt2-small-fp32",
            "GPT-2 small, fp32, AdamW (foreach)",
            {"batch": 4, "length": 512},
            _GPT,
            gpt,
        ),
        Case(
            "gpt2-small-bf16-fused",
            "GPT-2 small, bf16 autocast, fused AdamW",
            {"batch": 8, "length": 1024},
            _GPT,
            gpt,
            Training("adamw-fused", "bf16"),
        ),
        Case(
            "gpt2-small-fp16-scaler",
            "GPT-2 small, fp16 autocast with a gradient scaler, clipping",
            {"batch": 4, "length": 1024},
            _GPT,
            gpt,
            Training("adamw", "fp16", clip=1.0),
        ),
        Case(
            "gpt2-small-loop-on-device",
            "GPT-2 small made on the device, AdamW tensor by tensor, no dropout",
            {"batch": 2, "length": 1024, "dropout": 0.0},
            {**_GPT, "dropout": 0.0},
            gpt,
            Training("adamw-loop", on_device=True),
        ),
        Case(
            "gpt2-medium-bf16-checkpoint",
            "GPT-2 medium, bf16 autocast, every block checkpointed",
            {**_MEDIUM, "batch": 4, "length": 1024, "checkpointed": True},
            {**_GPT, "checkpointed": True},
            gpt,
            Training("adamw", "bf16"),
        ),
        Case(
            "gpt2-medium-accumulate",
            "GPT-2 medium, fp32, four micro-batches a step, gradients kept as zeros",
            {**_MEDIUM, "batch": 1, "length": 512},
            _GPT,
            gpt,
            Training(accumulate=4, set_to_none=False),
        ),
        Case(
            "llama-bf16",
            "Llama style (GQA, RoPE, SwiGLU), bf16 autocast, AdamW, clipping",
            {"batch": 4, "length": 1024},
            _LLAMA,
            llama,
            Training("adamw", "bf16", clip=1.0),
        ),
        Case(
            "llama-pure-bf16-adafactor",
            "Llama style with bf16 parameters, Adafactor",
            {"batch": 4, "length": 1024},
            _LLAMA,
            llama,
            Training("adafactor", "pure-bf16"),
        ),
        Case(
            "llama-accumulate-fp32",
            "Llama style, fp32, two micro-batches a step, fused AdamW",
            {"batch": 1, "length": 768},
            _LLAMA,
            llama,
            Training("adamw-fused", accumulate=2),
        ),
        Case(
            "llama-generate",
            "Llama style, bf16, generation with a key-value cache in inference mode",
            {"batch": 4, "prompt": 256, "new": 32},
            {
                "width": 32,
                "depth": 2,
                "head_count": 4,
                "kv_heads": 2,
                "vocabulary": 101,
                "batch": 2,
                "prompt": 8,
                "new": 3,
            },
            whole=language.llama_generation,
        ),
        Case(
            "bert-base-fp32",
            "BERT base, padded sequences with a mask, dropout, fp32, AdamW",
            {"batch": 8, "length": 256},
            _GPT,
            bert,
        ),
        Case(
            "bert-base-bf16-sgd",
            "BERT base, bf16 autocast, SGD with momentum",
            {"batch": 16, "length": 384},
            _GPT,
            bert,
            Training("sgd-momentum", "bf16"),
        ),
        Case(
            "t5-small-adafactor",
            "T5 style encoder and decoder, fp32, Adafactor",
            {"batch": 8, "length": 256},
            _GPT,
            t5,
            Training("adafactor"),
        ),
        Case(
            "t5-small-fp16-scaler",
            "T5 style encoder and decoder, fp16 autocast with a gradient scaler",
            {"batch": 8, "length": 512},
            _GPT,
            t5,
            Training("adamw", "fp16"),
        ),
        Case(
            "moe-bf16",
            "mixture of 8 experts, two for each token, bf16 autocast",
            {"batch": 4, "length": 512},
            {**_GPT, "experts": 4},
            moe,
            Training("adamw", "bf16"),
            values=True,
        ),
    ]


def _vision() -> list[Case]:
    tiny_vit = {"size": 32, "patch": 16, "width": 32, "depth": 2, "heads": 2, "classes": 10}
    return [
        Case(
            "vit-b16-bf16",
            "ViT-B/16, bf16 autocast, fused AdamW",
            {"batch": 32},
            {**tiny_vit, "batch": 2},
            vision.vit,
            Training("adamw-fused", "bf16"),
        ),
        Case(
            "resnet50-fp32-sgd",
            "ResNet-50, fp32, SGD with momentum",
            {"batch": 16},
            _RESNET,
            vision.resnet50,
            Training("sgd-momentum"),
        ),
        Case(
            "resnet50-fp16-channels-last",
            "ResNet-50, channels last, fp16 autocast with a gradient scaler, fused SGD",
            {"batch": 64},
            _RESNET,
            vision.resnet50,
            Training("sgd-nesterov-fused", "fp16", channels_last=True),
        ),
        Case(
            "convnext-tiny-bf16",
            "ConvNeXt-T, bf16 autocast, AdamW",
            {"batch": 32},
            _CONVNEXT,
            vision.convnext,
            Training("adamw", "bf16"),
        ),
        Case(
            "unet-fp32",
            "U-Net of a diffusion model, fp32, AdamW",
            {"batch": 16},
            _UNET,
            vision.unet,
        ),
        Case(
            "unet-bf16-accumulate",
            "U-Net of a diffusion model, bf16 autocast, two micro-batches a step",
            {"batch": 33},
            _UNET,
            vision.unet,
            Training("adamw", "bf16", accumulate=2),
        ),
        Case(
            "vae-fp32",
            "convolutional VAE, fp32, Adam",
            {"batch": 128},
            {"width": 8, "latent": 4, "size": 16, "batch": 4},
            vision.vae,
            Training("adam"),
        ),
        Case(
            "gan-fp32",
            "DCGAN: two models, two Adam optimizers",
            {"batch": 128},
            {"width": 4, "latent": 6, "size": 32, "batch": 4},
            whole=vision.gan,
        ),
    ]


def _other() -> list[Case]:
    lstm = {"vocabulary": 51, "width": 16, "batch": 2, "length": 6}
    return [
        Case(
            "lstm-fp32-sgd",
            "two-layer LSTM language model, dropout, clipping, SGD",
            {"batch": 64, "length": 70},
            lstm,
            other.lstm,
            Training("sgd", clip=0.25),
        ),
        Case(
            "gru-bf16-rmsprop",
            "three GRU layers in both directions, CTC loss, bf16 autocast, RMSprop",
            {"batch": 16, "length": 400},
            {"features": 5, "width": 8, "depth": 2, "symbols": 6, "batch": 2, "length": 16},
            other.gru,
            Training("rmsprop", "bf16"),
        ),
        Case(
            "recommender-adagrad",
            "recommender with 1.8M embedding rows, dense gradients, Adagrad",
            {"batch": 4096},
            _ROWS,
            other.recommender,
            Training("adagrad"),
        ),
        Case(
            "recommender-sparse-bags",
            "recommender with embedding bags and sparse gradients, SGD",
            {"batch": 8192, "sparse": True, "bags": True},
            {**_ROWS, "sparse": True, "bags": True},
            other.recommender,
            Training("sgd"),
            values=True,
        ),
        *_thresholds(),
    ]


def _thresholds() -> list[Case]:
    """Activations just below and above the sizes where the allocator changes its ways."""
    made = []
    # 4-byte elements: 1 MiB is 256 x 1024 of them, 10 MiB 2560 x 1024, 20 MiB 5120 x 1024.
    for label, batch in (("1mib", 256), ("10mib", 2560), ("20mib", 5120)):
        for side, less in (("at", 0), ("over", 1)):
            made.append(
                Case(
                    f"mlp-{side}-{label}",
                    f"activations of {label[:-3]} MiB" + (" and one row" if less else ""),
                    {"width": 1024, "batch": batch + less, "extra": 129 * less},
                    {"width": 8, "batch": 4 + less, "extra": 3 * less},
                    other.mlp,
                )
            )
    return made


def cases() -> dict[str, Case]:
    """All cases by name, in the order in which they are recorded."""
    found: dict[str, Case] = {}
    for one in (*_language(), *_vision(), *_other()):
        if one.name in found:
            raise ValueError(f"two cases are called {one.name}")
        found[one.name] = one
    return found


def case(name: str) -> Case:
    """The case of that name. Raises KeyError."""
    return cases()[name]
