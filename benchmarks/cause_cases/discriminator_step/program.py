import torch
from torch import nn

G = nn.Sequential(
    nn.Linear(64, 2048),
    nn.ReLU(),
    nn.Linear(2048, 2048),
    nn.ReLU(),
    nn.Linear(2048, 784),
    nn.Tanh(),
).cuda()
D = nn.Sequential(nn.Linear(784, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1)).cuda()
g_optimizer = torch.optim.SGD(G.parameters(), lr=2e-4)
d_optimizer = torch.optim.SGD(D.parameters(), lr=2e-4)
bce = nn.BCEWithLogitsLoss()
for step in range(4):
    batch = 8192
    images = torch.rand(batch, 784, device="cuda")
    fake_images = G(torch.randn(batch, 64, device="cuda"))
    d_loss = bce(D(images), torch.ones(batch, 1, device="cuda")) + bce(
        D(fake_images), torch.zeros(batch, 1, device="cuda")
    )
    d_optimizer.zero_grad()
    d_loss.backward()
    d_optimizer.step()
    if step % 4 == 3:
        small = G(torch.randn(512, 64, device="cuda"))
        g_loss = bce(D(small), torch.ones(512, 1, device="cuda"))
        g_optimizer.zero_grad()
        g_loss.backward()
        g_optimizer.step()
print(d_loss.item(), g_loss.item())
