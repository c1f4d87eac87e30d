"""A transformer over subsampled frames."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len=1000):
        super().__init__()
        position = torch.arange(max_len)[:, None]
        div = torch.exp(torch.arange(0, d_model, 2) * -(math.log(10000.0) / d_model))
        pe = torch.zeros(max_len, d_model)
        pe[:, 0::2] = torch.sin(position * div)
        pe[:, 1::2] = torch.cos(position * div)
        self.register_buffer("pe", pe[None], persistent=False)

    def forward(self, x):
        return x + self.pe[:, : x.size(1)]


class Conv2dSubsampling(nn.Module):
    def __init__(self, idim, odim, channels=32):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, channels, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, 2, 1),
            nn.ReLU(),
        )
        self.out = nn.Linear(channels * (idim // 4), odim)

    def forward(self, x):
        x = self.conv(x[:, None])
        b, c, t, f = x.shape
        return self.out(x.transpose(1, 2).reshape(b, t, c * f))


class MultiHeadedAttention(nn.Module):
    def __init__(self, n_head, n_feat):
        super().__init__()
        self.h = n_head
        self.d_k = n_feat // n_head
        self.linear_qkv = nn.Linear(n_feat, 3 * n_feat)
        self.linear_out = nn.Linear(n_feat, n_feat)
        self.attn = None

    def forward(self, x, mask):
        b, t, _ = x.shape
        q, k, v = self.linear_qkv(x).view(b, t, 3, self.h, self.d_k).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.linear_out(out.transpose(1, 2).reshape(b, t, -1))


class EncoderLayer(nn.Module):
    def __init__(self, size, n_head, units):
        super().__init__()
        self.norm1 = nn.LayerNorm(size)
        self.self_attn = MultiHeadedAttention(n_head, size)
        self.norm2 = nn.LayerNorm(size)
        self.feed_forward = nn.Sequential(nn.Linear(size, units), nn.SiLU(), nn.Linear(units, size))

    def forward(self, x, mask):
        x = x + self.self_attn(self.norm1(x), mask)
        return x + self.feed_forward(self.norm2(x))


class TransformerEncoder(nn.Module):
    def __init__(self, input_size, output_size, attention_heads, linear_units, num_blocks, **_):
        super().__init__()
        self.embed = Conv2dSubsampling(input_size, output_size)
        self.pos_enc = PositionalEncoding(output_size)
        self.encoders = nn.ModuleList(
            EncoderLayer(output_size, attention_heads, linear_units) for _ in range(num_blocks)
        )
        self.after_norm = nn.LayerNorm(output_size)

    def forward(self, xs, ilens):
        xs = self.pos_enc(self.embed(xs))
        frames = torch.arange(xs.size(1), device=xs.device)
        mask = (frames[None] < (ilens[:, None] // 4)) | (frames[None] == 0)
        for layer in self.encoders:
            xs = layer(xs, mask[:, None, None, :])
        return self.after_norm(xs)
