"""Learn the embedding of a new word from a few pictures, and look at samples now and then."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class TextEncoder(nn.Module):
    def __init__(self, words=2000, width=192):
        super().__init__()
        self.words = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, prompt):
        return self.layers(self.words(prompt))


class Denoiser(nn.Module):
    def __init__(self, channels=4, width=256, text=192, depth=4):
        super().__init__()
        self.enter = nn.Conv2d(channels, width, 3, padding=1)
        self.text = nn.ModuleList(nn.Linear(text, width) for _ in range(depth))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.GroupNorm(8, width),
                nn.SiLU(),
                nn.Conv2d(width, 4 * width, 3, padding=1),
                nn.SiLU(),
                nn.Conv2d(4 * width, width, 3, padding=1),
            )
            for _ in range(depth)
        )
        self.leave = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, latents, prompt):
        x = self.enter(latents)
        for text, block in zip(self.text, self.blocks):
            x = x + block(x + text(prompt.mean(1))[:, :, None, None])
        return self.leave(x)


class SamplingPipeline:
    """Everything that a sample needs, loaded like a user of the result would."""

    def __init__(self, text_encoder, denoiser):
        self.text_encoder, self.denoiser = text_encoder, denoiser

    @classmethod
    def from_pretrained(cls, args):
        torch.manual_seed(args.seed)
        return cls(TextEncoder().to(args.device), Denoiser().to(args.device))

    @torch.no_grad()
    def __call__(self, prompt, steps):
        embedding = self.text_encoder(prompt)
        latents = torch.randn(1, 4, 16, 16, device=prompt.device)
        for _ in range(steps):
            latents = latents - self.denoiser(latents, embedding) / steps
        return latents.cpu()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--validation-steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    text_encoder = TextEncoder().to(args.device)
    denoiser = Denoiser().to(args.device).requires_grad_(False)
    text_encoder.layers.requires_grad_(False)
    optimizer = torch.optim.AdamW(text_encoder.words.parameters(), lr=5e-4)
    for step in range(1, args.steps + 1):
        latents = torch.randn(2, 4, 16, 16, device=args.device)
        prompt = torch.randint(0, 2000, (2, 8), device=args.device)
        noise = torch.randn_like(latents)
        predicted = denoiser(latents + noise, text_encoder(prompt))
        loss = F.mse_loss(predicted, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % args.validation_steps == 0:
            pipeline = SamplingPipeline.from_pretrained(args)
            pipeline.text_encoder.load_state_dict(text_encoder.state_dict())
            image = pipeline(prompt[:1], steps=4)
            print(f"step {step}: loss {loss.item():.3f}, sample {image.std().item():.3f}")
    learned = text_encoder.words.weight[1999].detach().cpu()
    print("learned embedding", learned.norm().item())


if __name__ == "__main__":
    main()
