import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x, cache, position):
        n, t, c = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        cache[0][:, :, position : position + t] = k
        cache[1][:, :, position : position + t] = v
        k, v = (part[:, :, : position + t] for part in cache)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=t > 1)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, c))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, vocabulary=4000, width=512, depth=4, heads=8):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def new_cache(self, rows, length):
        heads, size = self.layers[0].heads, self.embed.embedding_dim // self.layers[0].heads
        return [torch.zeros(2, rows, heads, length, size, device="cuda") for _ in self.layers]

    def forward(self, ids, caches, position):
        x = self.embed(ids)
        for layer, cache in zip(self.layers, caches):
            x = layer(x, cache, position)
        return self.head(x[:, -1])


class BeamSearch:
    def __init__(self, model, beams):
        self.model, self.beams = model.cuda().eval(), beams

    @torch.inference_mode()
    def __call__(self, prompt, tokens):
        rows = len(prompt) * self.beams
        ids = prompt.cuda().repeat_interleave(self.beams, 0)
        caches = self.model.new_cache(rows, ids.shape[1] + tokens)
        scores, position, step = torch.zeros(rows, device="cuda"), 0, ids
        for _ in range(tokens):
            logps = self.model(step, caches, position).log_softmax(-1)
            position += step.shape[1]
            best, index = (scores[:, None] + logps).view(len(prompt), -1).topk(self.beams)
            rows_of = index // logps.shape[1] + self.beams * torch.arange(
                len(prompt), device="cuda"
            ).unsqueeze(1)
            order = rows_of.flatten()
            for cache in caches:
                cache.copy_(cache.index_select(1, order))
            scores, step = best.flatten(), (index % logps.shape[1]).view(-1, 1)
            ids = torch.cat([ids[order], step], 1)
        return ids.cpu()


def main():
    torch.manual_seed(0)
    search = BeamSearch(Decoder(), beams=4)
    for _ in range(2):
        print(search(torch.randint(0, 4000, (4, 64)), tokens=8).shape)


if __name__ == "__main__":
    main()
