import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Surrogate(nn.Module):
    """Predicts the next state of a fluid: one scalar field and a vector field."""

    def __init__(self, width=24, scalars=1, vectors=2):
        super().__init__()
        self.scalars = scalars
        fields = scalars + vectors
        self.body = nn.Sequential(
            nn.Conv2d(fields, width, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(width, fields, 3, padding=1),
        )

    def forward(self, state):
        return state + self.body(state)

    def training_step(self, batch):
        state, target = (part.cuda() for part in batch)
        prediction = self(state)
        loss = F.mse_loss(prediction, target)
        scalar, vector = prediction[:, : self.scalars], prediction[:, self.scalars :]
        scalar_loss = F.smooth_l1_loss(scalar, target[:, : self.scalars])
        vector_loss = F.smooth_l1_loss(vector, target[:, self.scalars :])
        return {"loss": loss, "scalar_loss": scalar_loss, "vector_loss": vector_loss}


class Loop:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.outputs = []

    def epoch(self, loader):
        self.outputs.clear()
        for batch in loader:
            output = self.model.training_step(batch)
            self.optimizer.zero_grad()
            output["loss"].backward()
            self.optimizer.step()
            self.outputs.append(output)
        return {key: self.mean(key) for key in self.outputs[0]}

    def mean(self, key):
        return torch.stack([output[key] for output in self.outputs]).mean().item()


data = TensorDataset(torch.randn(96, 3, 128, 128), torch.randn(96, 3, 128, 128))
model = Surrogate().cuda()
loop = Loop(model, torch.optim.SGD(model.parameters(), lr=0.01))
for epoch in range(2):
    print(epoch, loop.epoch(DataLoader(data, batch_size=8, shuffle=True)))
