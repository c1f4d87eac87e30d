import gc

import torch

gc.disable()

weight = torch.nn.Linear(2048, 2048).to("cuda")


class Trial:
    def __init__(self, lr):
        self.lr = lr
        self.op = torch.optim.Adam(weight.parameters(), lr=1.0)
        self.sc = torch.optim.lr_scheduler.LambdaLR(self.op, lr_lambda=lambda step: self.lr)

    def run(self):
        loss = weight(torch.randn(64, 2048, device="cuda")).mean()
        self.op.zero_grad()
        loss.backward()
        self.op.step()
        self.sc.step()
        return loss.item()


for lr in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2):
    print(lr, Trial(lr).run())
