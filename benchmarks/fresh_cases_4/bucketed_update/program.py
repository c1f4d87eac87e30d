import torch
from torch import nn

MEGATRON_TO_HF = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "fc1": ("gate_proj", "up_proj"),
}


class TrainLayer(nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.proj = nn.Linear(hidden, hidden, bias=False)
        self.fc1 = nn.Linear(hidden, 2 * inner, bias=False)
        self.fc2 = nn.Linear(inner, hidden, bias=False)


def convert(name, tensor):
    *prefix, kind, _ = name.split(".")
    parts = MEGATRON_TO_HF.get(kind, (kind,))
    chunks = tensor.chunk(len(parts)) if len(parts) > 1 else (tensor,)
    for part, chunk in zip(parts, chunks):
        yield ".".join((*prefix, part, "weight")), chunk.to(torch.bfloat16, copy=True)


class RolloutEngine:
    def __init__(self, model):
        pairs = (pair for name, p in model.named_parameters() for pair in convert(name, p.data))
        self.weights = dict(pairs)

    def update_weights_from_bucket(self, flat, metadata):
        offset = 0
        for name, shape in metadata:
            size = shape.numel()
            self.weights[name].copy_(flat[offset : offset + size].view(shape))
            offset += size


class UpdateWeight:
    def __init__(self, model, engine, bucket_bytes):
        self.model, self.engine, self.bucket_bytes = model, engine, bucket_bytes

    def buckets(self):
        bucket, size = [], 0
        for name, parameter in self.model.named_parameters():
            for pair in convert(name, parameter.data):
                bucket.append(pair)
                size += pair[1].nbytes
            if size >= self.bucket_bytes:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket

    @torch.no_grad()
    def update_weights(self):
        for named_tensors in self.buckets():
            metadata = [(name, tensor.shape) for name, tensor in named_tensors]
            flat = torch.cat([tensor.flatten() for _, tensor in named_tensors])
            self.engine.update_weights_from_bucket(flat, metadata)


def main():
    torch.manual_seed(0)
    model = nn.ModuleList(TrainLayer(1024, 2816) for _ in range(6)).cuda()
    engine = RolloutEngine(model)
    updater = UpdateWeight(model, engine, bucket_bytes=64 << 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for rollout in range(2):
        x = torch.randn(64, 1024, device="cuda")
        loss = sum(layer.proj(x).square().mean() for layer in model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        updater.update_weights()
        print(rollout, loss.item())


if __name__ == "__main__":
    main()
