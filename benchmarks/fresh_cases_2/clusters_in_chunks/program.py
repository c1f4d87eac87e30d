import torch


@torch.no_grad()
def nearest(points, centers, chunk=8192):
    found = torch.empty(len(points), dtype=torch.long, device=points.device)
    for at in range(0, len(points), chunk):
        found[at : at + chunk] = torch.cdist(points[at : at + chunk], centers).argmin(1)
    return found


@torch.no_grad()
def k_means(points, count, rounds):
    centers = points[torch.randperm(len(points), device="cuda")[:count]].clone()
    for _ in range(rounds):
        labels = nearest(points, centers)
        sums = torch.zeros_like(centers).index_add_(0, labels, points)
        sizes = torch.bincount(labels, minlength=count).clamp(min=1)
        centers = sums / sizes[:, None]
    return centers, labels


torch.manual_seed(0)
points = torch.randn(500_000, 96)
centers, labels = k_means(points.cuda(), count=512, rounds=6)
print(tuple(centers.shape), tuple(labels.shape))
