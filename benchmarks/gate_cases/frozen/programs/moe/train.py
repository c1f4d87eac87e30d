"""Trains a decoder with experts on random tokens."""

import sys

import torch

from moe.model import MoEForCausalLM
from moe.optim import AdamW

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def batches(cfg, vocab_size, steps):
    generator = torch.Generator().manual_seed(11)
    for _ in range(steps):
        shape = (cfg["batch_size"], cfg["seq_len"] + 1)
        tokens = torch.randint(vocab_size, shape, generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def build_optimizer(model, cfg):
    return AdamW(
        model.parameters(),
        lr=cfg["lr"],
        weight_decay=cfg["weight_decay"],
        state_dtype=getattr(torch, cfg["state_dtype"]),
    )


def clip_gradients(model, max_norm):
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    total = torch.linalg.vector_norm(torch.stack(norms))
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(scale)
    return total


def main():
    with open("config.toml", "rb") as file:
        cfg = tomllib.load(file)
    torch.manual_seed(cfg["seed"])
    device = torch.device("cuda")
    model = MoEForCausalLM(cfg["model"]).to(device)
    optimizer = build_optimizer(model, cfg["optimizer"])
    for step, (tokens, labels) in enumerate(
        batches(cfg["data"], cfg["model"]["vocab_size"], cfg["steps"])
    ):
        tokens, labels = tokens.to(device), labels.to(device)
        loss = model(
            tokens,
            labels,
            aux_coef=cfg["loss"]["router_aux_coef"],
            z_coef=cfg["loss"]["router_z_coef"],
        )
        loss.backward()
        norm = clip_gradients(model, cfg["optimizer"]["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step}: loss {loss.item():.3f}, norm {norm.item():.2f}")


if __name__ == "__main__":
    main()
