"""Cross-attention maps of one word, from all layers of a denoiser, for a segmentation probe."""

import torch
from torch import nn


class CrossAttention(nn.Module):
    def __init__(self, dim, context_dim, heads=5):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(context_dim, 2 * dim, bias=False)
        self.probs = nn.Softmax(dim=-1)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, context):
        q = self.to_q(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
        k, v = self.to_kv(context).unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        probs = self.probs(q @ k.transpose(2, 3) * self.scale)
        return x + self.to_out((probs @ v).transpose(1, 2).flatten(2))


class Denoiser(nn.Module):
    def __init__(self, dim=160, context_dim=256, layers=6):
        super().__init__()
        self.proj_in = nn.Linear(4, dim)
        self.attn2 = nn.ModuleList(CrossAttention(dim, context_dim) for _ in range(layers))
        self.proj_out = nn.Linear(dim, 4)

    def forward(self, latents, context):
        x = self.proj_in(latents.flatten(2).transpose(1, 2))
        for layer in self.attn2:
            x = layer(x, context)
        return self.proj_out(x).transpose(1, 2).view_as(latents)


class FeatureExtractor:
    def __init__(self, unet, token):
        self.unet, self.token = unet, token
        self.features = {}
        for number, layer in enumerate(unet.attn2):
            layer.probs.register_forward_hook(self.keep(f"up-block{number}-cross-map"))

    def keep(self, name):
        def hook(module, inputs, output):
            self.features[name] = output[..., self.token]

        return hook

    @torch.no_grad()
    def extract(self, latents, context):
        self.features.clear()
        self.unet(latents, context)
        return torch.stack([maps.mean(1) for maps in self.features.values()], 1)


def main():
    torch.manual_seed(0)
    extractor = FeatureExtractor(Denoiser().cuda().eval(), token=5)
    probe = nn.Linear(6, 21).cuda()
    optimizer = torch.optim.Adam(probe.parameters(), lr=1e-2)
    for step in range(3):
        latents, context = torch.randn(2, 4, 64, 64).cuda(), torch.randn(2, 77, 256).cuda()
        maps = extractor.extract(latents, context).transpose(1, 2).flatten(0, 1)
        labels = torch.randint(0, 21, (len(maps),)).cuda()
        loss = nn.functional.cross_entropy(probe(maps), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


main()
