"""Evaluate many adapters of one base model, one after the other."""

import torch
from peft import LoraConfig, get_peft_model
from torch import nn


class Base(nn.Module):
    def __init__(self, width=768, depth=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 16)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def adapter_config(rank=96):
    names = [f"layers.{i}" for i in range(6)]
    return LoraConfig(r=rank, lora_alpha=16, target_modules=names)


@torch.no_grad()
def evaluate(model, batches=2):
    right = 0
    for _ in range(batches):
        inputs = torch.randn(64, 768, device="cuda")
        labels = torch.randint(0, 16, (64,), device="cuda")
        right += (model(inputs).argmax(-1) == labels).sum().item()
    return right / (64 * batches)


def main():
    torch.manual_seed(0)
    base = Base().cuda().requires_grad_(False)
    peft_model = get_peft_model(base, adapter_config(), adapter_name="task0")
    peft_model.eval()
    results = {"task0": evaluate(peft_model)}
    for task in range(1, 12):
        name = f"task{task}"
        peft_model.add_adapter(name, adapter_config())
        peft_model.set_adapter(name)
        results[name] = evaluate(peft_model)
    print(results)


if __name__ == "__main__":
    main()
