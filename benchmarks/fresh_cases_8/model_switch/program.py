"""An inpainting server whose model is chosen by the user."""

import torch
from torch import nn


class Inpainter:
    name = ""
    width = 64

    def __init__(self, device):
        self.device = device
        self.init_model(device)

    def init_model(self, device):
        width = self.width
        net = nn.Sequential(
            nn.Conv2d(4, width, 3, padding=1),
            nn.ReLU(),
            *(nn.Conv2d(width, width, 3, padding=1) for _ in range(6)),
            nn.Conv2d(width, 3, 1),
        )
        self.net = net.to(device)

    @torch.no_grad()
    def __call__(self, image, mask):
        x = torch.cat([image * (1 - mask), mask], 1).to(self.device)
        return self.net(x).clamp(0, 1).cpu()


class MAT(Inpainter):
    name, width = "mat", 512


class SD15(Inpainter):
    name, width = "sd1.5", 640


class SD2(Inpainter):
    name, width = "sd2", 704


MODELS = {model.name: model for model in (MAT, SD15, SD2)}


class ModelManager:
    def __init__(self, name, device):
        self.name, self.device = name, device
        self.model = self.init_model(name)

    def init_model(self, name):
        if name not in MODELS:
            raise NotImplementedError(f"Not supported model: {name}")
        return MODELS[name](self.device)

    def __call__(self, image, mask):
        return self.model(image, mask)

    def switch(self, new_name):
        if new_name == self.name:
            return
        self.model = self.init_model(new_name)
        self.name = new_name


def serve(requests, size=48):
    manager = ModelManager("mat", torch.device("cuda"))
    for name in requests:
        manager.switch(name)
        image, mask = torch.rand(1, 3, size, size), torch.zeros(1, 1, size, size)
        mask[..., size // 4 : size // 2, size // 4 : size // 2] = 1
        yield manager.name, manager(image, mask).mean().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    for answer in serve(["mat", "sd1.5", "sd1.5", "sd2"]):
        print(*answer)
