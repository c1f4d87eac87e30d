import torch
import torch.nn.functional as F
from torch import nn

classes = 12
net = nn.Conv2d(3, classes, 3, padding=1).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    image = torch.rand(2, 3, 512, 512, device="cuda")
    label = torch.randint(0, classes, (2, 512, 512), device="cuda")
    target = F.one_hot(label, classes).permute(0, 3, 1, 2).float()
    log_probs = net(image).log_softmax(1)
    loss = -(target * log_probs).sum(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    del target, log_probs
print(loss.item())
