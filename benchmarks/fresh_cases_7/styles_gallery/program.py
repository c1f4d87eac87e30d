"""Images in many styles: each style is a set of low-rank weights."""

import torch
from torch import nn


class LoraLinear(nn.Linear):
    def __init__(self, *size):
        super().__init__(*size)
        self.adapters = nn.ModuleDict()
        self.active = None

    def load(self, name, rank):
        down = nn.Linear(self.in_features, rank, bias=False)
        up = nn.Linear(rank, self.out_features, bias=False)
        self.adapters[name] = nn.Sequential(down, up)
        self.active = name

    def forward(self, x):
        y = super().forward(x)
        return y if self.active is None else y + self.adapters[self.active](x)


class Pipeline:
    def __init__(self, width=768, depth=6):
        self.unet = nn.Sequential(*[LoraLinear(width, width) for _ in range(depth)])
        self.device = "cpu"

    def to(self, device):
        self.unet.to(device)
        self.device = device
        return self

    def load_lora_weights(self, name, rank=128):
        for layer in self.unet:
            layer.load(name, rank)
        self.to(self.device)

    def offload(self, name):
        for layer in self.unet:
            layer.adapters[name].to("cpu")

    @torch.no_grad()
    def __call__(self, latents, steps=3):
        for _ in range(steps):
            latents = latents - 0.1 * self.unet(latents)
        return latents.cpu()


def main(styles):
    torch.manual_seed(0)
    pipe = Pipeline().to("cuda")
    gallery = {}
    for style in styles:
        pipe.load_lora_weights(style)
        gallery[style] = pipe(torch.randn(64, 768, device="cuda"))
        pipe.offload(style)
    print({name: image.std().item() for name, image in gallery.items()})


if __name__ == "__main__":
    main(["ink", "oil", "chalk", "pixel", "clay", "neon", "paper", "noir"])
