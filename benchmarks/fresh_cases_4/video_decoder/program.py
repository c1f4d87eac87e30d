from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


class TextEncoder(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.out = nn.Linear(width, width)

    def forward(self, ids):
        return self.out(self.embed(ids))


class Transformer3D(nn.Module):
    def __init__(self, channels=8, width=1024, depth=4):
        super().__init__()
        self.inner = nn.Linear(channels, width)
        self.context = nn.Linear(256, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
            )
            for _ in range(depth)
        )
        self.outer = nn.Linear(width, channels)

    def forward(self, latents, prompt, timestep):
        x = self.inner(latents) + self.context(prompt).mean(1, keepdim=True) * timestep
        for block in self.blocks:
            x = x + block(x)
        return self.outer(x)


class VideoVAE(nn.Module):
    def __init__(self, channels=8, width=80):
        super().__init__()
        self.first = nn.Conv3d(channels, width, 3, padding=1)
        self.ups = nn.ModuleList(nn.Conv3d(width, width, 3, padding=1) for _ in range(3))
        self.last = nn.Conv3d(width, 3, 3, padding=1)

    def decode(self, latents):
        x = self.first(latents)
        for up in self.ups:
            x = F.silu(up(F.interpolate(x, scale_factor=(1, 2, 2))))
        return self.last(x)


class LTXVideoPipeline:
    def __init__(self, text_encoder, transformer, vae):
        self.text_encoder, self.transformer, self.vae = text_encoder, transformer, vae

    def to(self, device):
        for module in (self.text_encoder, self.transformer, self.vae):
            module.to(device)
        self.device = device
        return self

    def denoise(self, latents, prompt, steps):
        for step in reversed(range(steps)):
            noise = self.transformer(latents, prompt, (step + 1) / steps)
            latents = latents - noise / steps
        return latents

    @torch.no_grad()
    def __call__(self, ids, frames=8, height=24, width=32, steps=4):
        prompt = self.text_encoder(ids.to(self.device))
        latents = torch.randn(1, frames * height * width, 8, device=self.device)
        latents = self.denoise(latents, prompt, steps)
        latents = latents.view(1, frames, height, width, 8).permute(0, 4, 1, 2, 3)
        video = self.vae.decode(latents)
        return SimpleNamespace(frames=video.clamp(-1, 1).cpu())


def main():
    torch.manual_seed(0)
    pipeline = LTXVideoPipeline(TextEncoder(), Transformer3D(), VideoVAE()).to("cuda")
    output = pipeline(torch.randint(0, 1000, (1, 16)))
    print(output.frames.shape)


if __name__ == "__main__":
    main()
