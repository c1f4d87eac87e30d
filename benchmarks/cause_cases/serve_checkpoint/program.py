import tempfile
from pathlib import Path

import torch
from torch import nn


def build():
    return nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(1536, 1536), nn.GELU())])


def load_model(path, device):
    state = torch.load(path, map_location=device)
    model = build()
    model.load_state_dict(state["model"])
    return model.to(device).eval(), state


def main():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        torch.save({"model": build().state_dict(), "epoch": 3}, path)
        model, checkpoint = load_model(path, "cuda")
    print("epoch", checkpoint["epoch"])
    with torch.no_grad():
        for request in range(3):
            out = model(torch.randn(4096, 1536, device="cuda"))
    print(out.mean().item())


main()
