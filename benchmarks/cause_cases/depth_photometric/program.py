import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
depth_net = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 256)).cuda()
pose_net = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 6)).cuda()
optimizer = torch.optim.Adam([*depth_net.parameters(), *pose_net.parameters()], lr=1e-4)


def training_step(batch):
    depth = depth_net(batch["image"])
    pose = pose_net(torch.cat([batch["image"], batch["context"]], dim=1))
    loss = F.l1_loss(depth, batch["target"]) + pose.abs().mean()
    smoothness = depth_net(batch["context"]).diff(dim=1).abs().mean()
    return loss, smoothness


outputs = []
for step in range(14):
    batch = {k: torch.rand(2048, 256, device="cuda") for k in ("image", "context", "target")}
    loss, smoothness = training_step(batch)
    outputs.append({"smoothness": smoothness, "step": step})
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

average = torch.stack([out["smoothness"] for out in outputs]).mean()
print("smoothness", average.item())
