import torch
from torch import nn

G = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 2048), nn.Tanh()).cuda()
D = nn.Sequential(nn.Linear(2048, 1024), nn.LeakyReLU(0.2), nn.Linear(1024, 1)).cuda()
opt_g = torch.optim.Adam(G.parameters(), lr=2e-4)
opt_d = torch.optim.Adam(D.parameters(), lr=2e-4)
bce = nn.functional.binary_cross_entropy_with_logits
for step in range(3):
    z = torch.randn(4096, 64, device="cuda")
    real = torch.rand(4096, 2048, device="cuda")
    D.requires_grad_(True)
    with torch.no_grad():
        fake = G(z)
    loss_d = bce(D(real), torch.ones(4096, 1, device="cuda")) + bce(
        D(fake), torch.zeros(4096, 1, device="cuda")
    )
    opt_d.zero_grad()
    loss_d.backward()
    opt_d.step()
    opt_d.zero_grad()
    del real, fake
    D.requires_grad_(False)
    loss_g = bce(D(G(z)), torch.ones(4096, 1, device="cuda"))
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()
    opt_g.zero_grad()
print(loss_d.item(), loss_g.item())
