import torch


def euclidean(x, y):
    n, m, d = x.size(1), y.size(1), x.size(2)
    x = x.unsqueeze(2).expand(-1, n, m, d)
    y = y.unsqueeze(1).expand(-1, n, m, d)
    return torch.pow(x - y, 2).sum(3)


x = torch.rand(24, 160, 64, device="cuda", requires_grad=True)
y = torch.rand(24, 144, 64, device="cuda")
for step in range(2):
    cost = euclidean(x, y)
    loss = cost.amin(2).mean() + cost.amin(1).mean()
    (gradient,) = torch.autograd.grad(loss, x)
    with torch.no_grad():
        x -= gradient
print(loss.item())
