import copy

import torch
import torch.nn.functional as F
from torch import nn

encoder = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 256)).cuda()
momentum_encoder = copy.deepcopy(encoder).requires_grad_(False)
bank = F.normalize(torch.randn(65536, 256, device="cuda"), dim=1)
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.03)
pointer = 0
for step in range(4):
    view1 = torch.randn(256, 512, device="cuda")
    view2 = view1 + 0.1 * torch.randn_like(view1)
    q = F.normalize(encoder(view1), dim=1)
    with torch.no_grad():
        for slow, fast in zip(momentum_encoder.parameters(), encoder.parameters()):
            slow.lerp_(fast, 0.01)
        k = F.normalize(momentum_encoder(view2), dim=1)
    positive = (q * k).sum(1).div(0.2)
    negative = (q @ bank.T).div_(0.2)
    loss = (torch.logaddexp(negative.logsumexp(1), positive) - positive).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    bank[pointer : pointer + 256] = k
    pointer = (pointer + 256) % len(bank)
    del q, k, positive, negative, loss, view1, view2
print(pointer)
