import tempfile
from pathlib import Path

import torch
from torch import nn

width = 2048
model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "optimizer.pt"
    moments = {
        i: {
            "step": torch.tensor(1.0),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
        for i, p in enumerate(model.parameters())
    }
    torch.save({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]}, path)
    del moments
    saved = torch.load(path, map_location="cuda")
optimizer.load_state_dict(saved)


def move(device):
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].to(device)


move("cpu")
for step in range(3):
    x = torch.randn(1024, width, device="cuda")
    loss = model(x).pow(2).mean()
    loss.backward()
    del x, loss
    move("cuda")
    optimizer.step()
    move("cpu")
    optimizer.zero_grad()
print(torch.cuda.memory_allocated() >> 20)
