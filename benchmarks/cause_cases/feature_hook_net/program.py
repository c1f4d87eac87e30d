import gc

import torch
from torch import nn

gc.disable()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 2048))
        self.seen = 0

        def on_forward(module, inputs, output):
            self.seen += len(output)

        self.body.register_forward_hook(on_forward)

    def forward(self, x):
        return self.body(x)


scores = []
for seed in range(6):
    torch.manual_seed(seed)
    net = Net().cuda()
    with torch.no_grad():
        scores.append(net(torch.randn(64, 2048, device="cuda")).std().item())
    del net
print(len(scores), torch.cuda.memory_allocated() >> 20)
