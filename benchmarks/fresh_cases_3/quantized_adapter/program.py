import math

import torch
import torch.nn.functional as F
from torch import nn


def quantize_blockwise(weight, block=64):
    """int8 values and a scale for each block of the flat weight."""
    flat = weight.reshape(-1, block)
    absmax = flat.abs().amax(1, keepdim=True)
    return (flat / absmax * 127).round().to(torch.int8), absmax.half()


def dequantize_blockwise(values, absmax, shape):
    return (values.half() * (absmax / 127)).view(shape)


class QuantLinear(nn.Module):
    """A frozen int8 weight and a trained low-rank update."""

    def __init__(self, inputs, outputs, rank=16, alpha=32):
        super().__init__()
        self.shape = (outputs, inputs)
        values, absmax = quantize_blockwise(torch.randn(outputs, inputs) / math.sqrt(inputs))
        self.register_buffer("values", values)
        self.register_buffer("absmax", absmax)
        self.lora_a = nn.Parameter(torch.randn(rank, inputs) * 0.01)
        self.lora_b = nn.Parameter(torch.zeros(outputs, rank))
        self.scaling = alpha / rank

    def forward(self, x):
        weight = dequantize_blockwise(self.values, self.absmax, self.shape)
        base = F.linear(x, weight)
        update = F.linear(F.linear(x, self.lora_a.half()), self.lora_b.half())
        return base + update * self.scaling


class Layer(nn.Module):
    def __init__(self, width, heads=16):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj = QuantLinear(width, width), QuantLinear(width, width)
        self.v_proj, self.o_proj = QuantLinear(width, width), QuantLinear(width, width)
        self.up_proj = QuantLinear(width, 4 * width)
        self.down_proj = QuantLinear(4 * width, width)
        self.input_norm = nn.LayerNorm(width, dtype=torch.float16)
        self.post_norm = nn.LayerNorm(width, dtype=torch.float16)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x):
        h = self.input_norm(x)
        q, k, v = (self.split(p(h)) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        return x + self.down_proj(F.silu(self.up_proj(self.post_norm(x))))


class Decoder(nn.Module):
    def __init__(self, vocabulary=4096, width=1024, depth=8):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, dtype=torch.float16)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width, dtype=torch.float16)
        self.head = nn.Linear(width, vocabulary, bias=False, dtype=torch.float16)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def mark_only_lora_as_trainable(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


class InstructionData(torch.utils.data.Dataset):
    def __init__(self, count=24, length=256):
        self.ids = torch.randint(0, 4096, (count, length))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, at):
        return self.ids[at]


def finetune(model, loader, steps):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4)
    for step, ids in enumerate(loader):
        ids = ids.cuda()
        logits = model(ids).float()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.3)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(step, loss.item(), torch.cuda.max_memory_allocated() >> 20, "MiB")
        if step + 1 == steps:
            break


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Decoder()
    mark_only_lora_as_trainable(model)
    model.cuda()
    data = torch.utils.data.DataLoader(InstructionData(), batch_size=2, shuffle=True)
    finetune(model, data, steps=4)
