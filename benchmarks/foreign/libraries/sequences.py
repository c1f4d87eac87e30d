"""Sequence models: x-transformers, torchtune, pytorch-forecasting; einops."""

from __future__ import annotations

from typing import Any

from foreign.libraries.adaptation import steps_of
from foreign.programs import program


@program("x-transformers/encoder-decoder", "x_transformers")
def encoder_decoder(device: str) -> Any:
    import torch
    from x_transformers import XTransformer

    model = XTransformer(
        dim=32,
        enc_num_tokens=64,
        enc_depth=2,
        enc_heads=2,
        enc_max_seq_len=16,
        dec_num_tokens=64,
        dec_depth=2,
        dec_heads=2,
        dec_max_seq_len=16,
    ).to(device)
    source = torch.randint(1, 64, (2, 16)).to(device)
    mask = torch.ones(2, 16, dtype=torch.bool)
    mask[1, 10:] = False
    mask = mask.to(device)
    aim = torch.randint(1, 64, (2, 16)).to(device)
    return steps_of(model, lambda: model(source, aim, mask=mask))
