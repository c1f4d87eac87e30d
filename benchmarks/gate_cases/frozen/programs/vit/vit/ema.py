"""A moving average of the weights."""

from copy import deepcopy

import torch


class ModelEmaV2:
    def __init__(self, model, decay=0.9999, device="cpu"):
        self.module = deepcopy(model)
        self.module.eval()
        self.decay = decay
        self.device = device
        if self.device is not None:
            self.module.to(device=device)

    @torch.no_grad()
    def update(self, model):
        for ema_v, model_v in zip(self.module.state_dict().values(), model.state_dict().values()):
            if self.device is not None:
                model_v = model_v.to(device=self.device)
            ema_v.copy_(self.decay * ema_v + (1.0 - self.decay) * model_v)
