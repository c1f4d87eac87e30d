"""Train a small diffusion model, and draw a few samples from it."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ema import Ema
from schedule import Schedule
from unet import UNet


@dataclass
class Config:
    size: int = 32
    width: int = 32
    multipliers: tuple = (1, 2, 2)
    attention_sizes: tuple = (8,)
    batch: int = 8
    times: int = 100
    samples: int = 4
    drawing_steps: int = 2


def batches(cfg, count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.rand(cfg.batch, 3, cfg.size, cfg.size, generator=generator) * 2 - 1


def denoising_loss(model, schedule, images):
    noise = torch.randn_like(images)
    t = torch.randint(schedule.steps, (len(images),), device=images.device)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        predicted = model(schedule.add_noise(images, noise, t), t)
    return F.mse_loss(predicted.float(), noise)


@torch.no_grad()
def draw(model, schedule, cfg, device):
    x = torch.randn(cfg.samples, 3, cfg.size, cfg.size, device=device)
    for t in reversed(range(cfg.drawing_steps)):
        now = torch.full((cfg.samples,), t, device=device)
        x = schedule.previous(x, model(x, now), t)
    return x.clamp(-1, 1).cpu()


def main():
    torch.manual_seed(0)
    cfg = Config()
    device = torch.device("cuda")
    model = UNet(cfg).to(device)
    ema = Ema(model)
    schedule = Schedule(cfg.times, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, foreach=False)
    losses = []
    for number, images in enumerate(batches(cfg, 6)):
        images = images.to(device, non_blocking=True)
        loss = denoising_loss(model, schedule, images)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ema.update(model)
        losses.append(loss.item())
        print(f"{number}: {losses[-1]:.3f}")
    pictures = draw(ema.model, schedule, cfg, device)
    print(pictures.shape)


if __name__ == "__main__":
    main()
