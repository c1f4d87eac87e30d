"""Sequence models: x-transformers, torchtune, pytorch-forecasting; einops."""

from __future__ import annotations

from typing import Any

from foreign.libraries.adaptation import steps_of
from foreign.programs import program


@program("x-transformers/autoregressive", "x_transformers")
def autoregressive(device: str) -> Any:
    import torch
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    net = TransformerWrapper(
        num_tokens=64,
        max_seq_len=24,
        attn_layers=Decoder(dim=32, depth=2, heads=2, rotary_pos_emb=True, attn_flash=True),
    )
    model = AutoregressiveWrapper(net).to(device)
    ids = torch.randint(1, 64, (2, 20)).to(device)
    found = steps_of(model, lambda: model(ids))
    model.eval()
    made = model.generate(ids[:, :4], 4, temperature=0.0)
    return [*found, float(made.shape[1])]


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


@program("einops/mixer", "einops.layers.torch")
def mixer(device: str) -> Any:
    import torch
    from einops import rearrange, reduce, repeat
    from einops.layers.torch import EinMix, Rearrange

    model = torch.nn.Sequential(
        Rearrange("b c (h p) (w q) -> b (h w) (c p q)", p=8, q=8),
        EinMix("b t c -> b t d", weight_shape="c d", bias_shape="d", c=192, d=32),
        torch.nn.GELU(),
        EinMix("b t c -> b s c", weight_shape="t s", t=16, s=16),
    ).to(device)
    images = torch.randn(2, 3, 32, 32).to(device)

    def loss() -> Any:
        out = reduce(model(images), "b t c -> b c", "mean")
        return rearrange(repeat(out, "b c -> b k c", k=2), "b k c -> (b k) c").square().mean()

    return steps_of(model, loss)


@program(
    "pytorch-forecasting/temporal-fusion", "pytorch_forecasting", "lightning.pytorch", "pandas"
)
def forecasting(device: str) -> Any:
    import lightning.pytorch as pl
    import pandas as pd
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
    from pytorch_forecasting.metrics import QuantileLoss

    table = pd.DataFrame(
        {
            "value": [float((i * 7) % 13) for i in range(80)],
            "group": ["a"] * 40 + ["b"] * 40,
            "time": list(range(40)) * 2,
        }
    )
    data = TimeSeriesDataSet(
        table,
        time_idx="time",
        target="value",
        group_ids=["group"],
        max_encoder_length=8,
        max_prediction_length=2,
        time_varying_unknown_reals=["value"],
    )
    model = TemporalFusionTransformer.from_dataset(
        data, hidden_size=8, attention_head_size=1, dropout=0.0, loss=QuantileLoss()
    )
    trainer = pl.Trainer(
        max_steps=2,
        accelerator="gpu" if device == "cuda" else "cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, data.to_dataloader(train=True, batch_size=8, num_workers=0))
    return [float(trainer.callback_metrics["train_loss_step"])]
