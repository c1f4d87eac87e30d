import torch
import torch.nn.functional as F
from torch import nn


class DataManager:
    """The photographs of a scene and their cameras."""

    def __init__(self, photographs, cameras):
        self.images = [image.cuda().float() / 255 for image in photographs]
        self.cameras = cameras.cuda()

    def __len__(self):
        return len(self.images)

    def next_train(self, step):
        at = step % len(self)
        return self.cameras[at], self.images[at]


class Splats(nn.Module):
    def __init__(self, count=4096):
        super().__init__()
        self.means = nn.Parameter(torch.randn(count, 3))
        self.colors = nn.Parameter(torch.rand(count, 3))

    def render(self, camera, height, width, rows=8):
        weights = (self.means @ camera).softmax(0)
        color = (weights[:, None] * self.colors).sum(0)
        return color.expand(height, width, 3)


def train_step(model, optimizer, camera, image):
    optimizer.zero_grad()
    loss = F.l1_loss(model.render(camera, *image.shape[:2]), image)
    loss.backward()
    optimizer.step()
    return loss.item()


photographs = [torch.randint(0, 256, (480, 720, 3), dtype=torch.uint8) for _ in range(60)]
manager = DataManager(photographs, torch.randn(60, 3))
model = Splats().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(20):
    camera, image = manager.next_train(step)
    loss = train_step(model, optimizer, camera, image)
print(loss, torch.cuda.memory_allocated() >> 20)
