"""One backward pass, and the step."""

import torch


def dispatch_clip_grad(parameters, value):
    torch.nn.utils.clip_grad_norm_(parameters, value, foreach=False)


class NativeScaler:
    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, create_graph=False):
        loss.backward(create_graph=create_graph)
        if clip_grad is not None:
            dispatch_clip_grad(parameters, clip_grad)
        optimizer.step()
