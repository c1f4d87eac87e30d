"""A chat engine whose cache has its full size from the beginning."""

import torch
from torch import nn


class PagedKVCache:
    def __init__(self, layers, heads, slots, dim, device):
        shape = (layers, heads, slots, dim)
        self.keys = torch.zeros(shape, device=device)
        self.values = torch.zeros(shape, device=device)
        self.length = 0

    def write(self, layer, k, v):
        stop = self.length + k.shape[1]
        self.keys[layer, :, self.length : stop] = k
        self.values[layer, :, self.length : stop] = v
        return self.keys[layer], self.values[layer]

    def mask(self, count):
        slots = torch.arange(self.keys.shape[2], device=self.keys.device)
        return slots > torch.arange(self.length, self.length + count, device=slots.device)[:, None]


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x, number, cache):
        q, k, v = self.qkv(x).unflatten(1, (3, self.heads, -1)).permute(1, 2, 0, 3)
        k, v = cache.write(number, k, v)
        return x + self.proj((self.weights(q, k, cache) @ v).transpose(0, 1).flatten(1))

    @staticmethod
    def weights(q, k, cache):
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(1, 2)
        return scores.masked_fill_(cache.mask(q.shape[1]), float("-inf")).softmax(-1)


class ChatModule:
    def __init__(self, slots=3072, width=512, heads=8, layers=4, words=2000):
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers)).cuda()
        self.embed = nn.Embedding(words, width).cuda()
        self.cache = PagedKVCache(layers, heads, slots, width // heads, "cuda")

    def forward(self, ids):
        x = self.embed(ids)
        for number, layer in enumerate(self.layers):
            x = layer(x, number, self.cache)
        self.cache.length += len(ids)
        return (x[-1] @ self.embed.weight.t()).argmax()

    @torch.inference_mode()
    def chat(self, prompt, answer_length, chunk=256):
        for ids in prompt.cuda().split(chunk):
            token = self.forward(ids)
        answer = [token]
        while len(answer) < answer_length:
            answer.append(self.forward(answer[-1][None]))
        return torch.stack(answer).tolist()


if __name__ == "__main__":
    torch.manual_seed(0)
    engine = ChatModule()
    for turn in range(2):
        print(turn, engine.chat(torch.randint(0, 2000, (1528,)), 9), engine.cache.length)
