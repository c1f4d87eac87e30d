import torch
from torch import nn


class EpochIterator:
    def __init__(self, batches):
        self.batches = batches
        self.stream = torch.cuda.Stream()

    def __iter__(self):
        for i in range(self.batches):
            raw = torch.randint(0, 255, (32, 3, 160, 160), dtype=torch.uint8)
            with torch.cuda.stream(self.stream):
                image = raw.cuda().float().div_(255)
            torch.cuda.current_stream().wait_stream(self.stream)
            image.record_stream(torch.cuda.current_stream())
            yield image


class Loader:
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(EpochIterator(self.batches))


model = nn.Sequential(
    nn.Conv2d(3, 8, 5, stride=4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)
).cuda()
loader = Loader(2)
for epoch in range(8):
    for image in loader:
        loss = model(image).pow(2).mean()
        loss.backward()
        model.zero_grad()
    torch.cuda.synchronize()
print(torch.cuda.memory_allocated() >> 20, torch.cuda.memory_reserved() >> 20)
