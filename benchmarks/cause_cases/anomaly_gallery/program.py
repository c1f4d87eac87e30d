import torch

gallery = torch.randn(900, 64, 1, 1, device="cuda")
scores = []
with torch.no_grad():
    for image in range(2):
        feature_map = torch.randn(1, 64, 40, 40, device="cuda")
        distance = torch.pairwise_distance(gallery.flatten(2).mT, feature_map.flatten(2).mT)
        scores.append(distance.amin(0).max().item())
print(scores)
