import torch
from torch import nn

model = (
    nn.Sequential(
        *[m for _ in range(8) for m in (nn.Linear(2048, 2048), nn.ReLU())], nn.Linear(2048, 10)
    )
    .cuda()
    .eval()
)


def perturb(x, y, eps=0.1):
    xadv = x.clone().requires_grad_()
    loss = nn.functional.cross_entropy(model(xadv), y)
    loss.backward()
    return (xadv + eps * xadv.grad.sign()).detach()


wrong = []
for batch in range(3):
    x = torch.rand(256, 2048, device="cuda")
    y = torch.randint(0, 10, (256,), device="cuda")
    adversarial = perturb(x, y)
    with torch.no_grad():
        wrong.append((model(adversarial).argmax(1) != y).cpu())
print(torch.cat(wrong).shape)
