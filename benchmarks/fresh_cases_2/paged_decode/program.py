import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, width=512, heads=8):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x, cache, at):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        cache[0][:, :, at : at + k.shape[2]] = k
        cache[1][:, :, at : at + k.shape[2]] = v
        mixed = F.scaled_dot_product_attention(q, cache[0], cache[1])
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self, vocabulary=2000, width=512, depth=4):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids, caches, at):
        x = self.tokens(ids)
        for layer, cache in zip(self.layers, caches):
            x = layer(x, cache, at)
        return self.head(x[:, -1])


@torch.inference_mode()
def generate(model, prompt, tokens, longest=512):
    shape = (len(prompt), 8, longest, 64)
    caches = [tuple(torch.zeros(shape, device="cuda") for _ in range(2)) for _ in model.layers]
    ids, at = prompt, 0
    for _ in range(tokens):
        logits = model(ids, caches, at)
        at += ids.shape[1]
        ids = logits.argmax(-1, keepdim=True)
    return ids


model = Decoder().cuda().eval()
prompt = torch.randint(0, 2000, (16, 480))
print(generate(model, prompt.cuda(), tokens=12).shape)
