import functools

import torch


class KernelModel:
    def __init__(self, train_x, train_y):
        self.train_x, self.train_y = train_x, train_y
        distance = torch.cdist(train_x, train_x)
        self.gram = torch.exp(-distance.pow(2)) + 1e-2 * torch.eye(len(train_x), device="cuda")

    @functools.lru_cache(maxsize=16)
    def weights(self, noise):
        return self.train_y / (self.gram.diagonal() + noise)

    def predict(self, x, noise=0.1):
        cross = torch.exp(-torch.cdist(x, self.train_x).pow(2))
        return cross @ self.weights(noise)


for trial in range(8):
    train_x = torch.rand(2048, 16, device="cuda")
    model = KernelModel(train_x, torch.sin(train_x.sum(1)))
    answer = model.predict(torch.rand(256, 16, device="cuda"))
print(answer.mean().item())
