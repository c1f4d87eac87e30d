"""Trains a GPT on random tokens, from a checkpoint, and draws a sample."""

import contextlib

import torch

from gpt import configurator
from gpt.data import Tokens
from gpt.model import GPT
from gpt.optim import configure_optimizers

device = "cuda"


def load_checkpoint(cfg):
    """What an earlier run left."""
    earlier = GPT(cfg.model).to(device)
    return {"model": earlier.state_dict(), "iter_num": 0}


@torch.no_grad()
def estimate_loss(model, tokens, cfg, ctx):
    out = {}
    model.eval()
    for split in ("train", "val"):
        losses = torch.zeros(cfg.train.eval_iters)
        for k in range(cfg.train.eval_iters):
            x, y = tokens.get_batch(cfg.data.eval_batch_size, cfg.data.block_size, device)
            with ctx():
                logits, loss = model(x, y)
            losses[k] = loss.item()
        out[split] = losses.mean().item()
    model.train()
    return out


def main():
    torch.manual_seed(1337)
    cfg = configurator.load("config/shakespeare.toml")
    tokens = Tokens(cfg.data.vocab_size)
    dtype = {"float32": None, "bfloat16": torch.bfloat16}[cfg.train.dtype]

    def ctx():
        return torch.autocast("cuda", dtype=dtype) if dtype else contextlib.nullcontext()

    model = GPT(cfg.model).to(device)
    if cfg.train.init_from == "checkpoint":
        checkpoint = load_checkpoint(cfg)
        model.load_state_dict(checkpoint["model"])
        checkpoint = None  # free up memory
    optimizer = configure_optimizers(
        model,
        cfg.train.weight_decay,
        cfg.train.learning_rate,
        (cfg.train.beta1, cfg.train.beta2),
    )

    history = []
    for iter_num in range(cfg.train.max_iters):
        if iter_num % cfg.train.eval_interval == 0:
            losses = estimate_loss(model, tokens, cfg, ctx)
            print(f"step {iter_num}: train {losses['train']:.4f}, val {losses['val']:.4f}")
        x, y = tokens.get_batch(cfg.data.batch_size, cfg.data.block_size, device)
        with ctx():
            logits, loss = model(x, y)
        loss.backward()
        if cfg.train.grad_clip != 0.0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.train.grad_clip, foreach=False)
        optimizer.step()
        # flush the gradients as soon as we can, no need for this memory anymore
        optimizer.zero_grad(set_to_none=True)
        history.append(loss.item())
        print(f"iter {iter_num}: loss {history[-1]:.4f}")

    prompt = torch.zeros(cfg.sample.num_samples, cfg.sample.prompt_length, dtype=torch.long)
    with ctx():
        sample = model.generate(prompt.to(device), cfg.sample.max_new_tokens, cfg.sample.top_k)
    print(sample.shape)


if __name__ == "__main__":
    main()
