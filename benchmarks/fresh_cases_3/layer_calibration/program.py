import torch
import torch.nn.functional as F
from torch import nn


class DecoderLayer(nn.Module):
    def __init__(self, width, heads=8):
        super().__init__()
        self.heads = heads
        self.input_norm, self.post_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.o_proj = nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        n, t, c = x.shape
        q, k, v = self.qkv(self.input_norm(x)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).reshape(n, t, c))
        return x + self.fc2(F.relu(self.fc1(self.post_norm(x))))


class CausalLM(nn.Module):
    def __init__(self, vocabulary=8192, width=512, depth=4):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(DecoderLayer(width) for _ in range(depth))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


class StopForward(Exception):
    pass


class InputCatcher(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.cache = []

    def forward(self, x):
        self.cache.append(x)
        raise StopForward


class GPTQ:
    def __init__(self, layer):
        self.layer = layer
        columns = layer.weight.shape[1]
        self.hessian = torch.zeros(columns, columns, device=layer.weight.device)
        self.samples = 0

    def add_batch(self, inputs):
        inputs = inputs.reshape(-1, inputs.shape[-1])
        self.hessian *= self.samples / (self.samples + len(inputs))
        self.samples += len(inputs)
        self.hessian.addmm_(inputs.T, inputs, alpha=2 / self.samples)

    def quantize(self, bits=4):
        damp = 0.01 * self.hessian.diagonal().mean()
        self.hessian.diagonal().add_(damp)
        weight = self.layer.weight.data
        importance = self.hessian.diagonal().clamp(min=1e-8).sqrt()
        scale = (weight * importance).abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        self.layer.weight.data = ((weight * importance / scale).round() * scale) / importance


class Quantizer:
    def __init__(self, model, device="cuda"):
        self.model = model
        self.device = device

    def collect_inputs(self, dataset):
        first = self.model.layers[0]
        self.model.embed.to(self.device)
        catcher = InputCatcher(first)
        self.model.layers[0] = catcher
        for ids in dataset:
            try:
                self.model(ids.to(self.device))
            except StopForward:
                pass
        self.model.layers[0] = first
        self.model.embed.to("cpu")
        return catcher.cache

    def calibrate(self, layer, inputs):
        linears = {name: m for name, m in layer.named_modules() if isinstance(m, nn.Linear)}
        solvers = {name: GPTQ(module) for name, module in linears.items()}
        handles = [
            module.register_forward_pre_hook(
                lambda _, args, solver=solvers[name]: solver.add_batch(args[0])
            )
            for name, module in linears.items()
        ]
        for x in inputs:
            layer(x)
        for handle in handles:
            handle.remove()
        for solver in solvers.values():
            solver.quantize()

    @torch.no_grad()
    def quantize(self, dataset):
        inputs = self.collect_inputs(dataset)
        for index, layer in enumerate(self.model.layers):
            layer.to(self.device)
            self.calibrate(layer, inputs)
            outputs = [layer(x) for x in inputs]
            layer.to("cpu")
            inputs = outputs
            print(index, torch.cuda.max_memory_allocated() >> 20)
        return self.model


def main():
    torch.manual_seed(0)
    calibration = [torch.randint(0, 8192, (1, 1024)) for _ in range(48)]
    Quantizer(CausalLM().eval()).quantize(calibration)


if __name__ == "__main__":
    main()
