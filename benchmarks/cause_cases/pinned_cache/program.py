import torch

max_local_cpu_size = 0.16
size = int(max_local_cpu_size * 1024**3)
buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
keys = torch.randn(4, 1024, 2048, device="cuda")
offset = 0
for chunk in keys.split(1):
    raw = chunk.reshape(-1).view(torch.uint8)
    buffer[offset : offset + len(raw)].copy_(raw)
    offset += len(raw)
print(offset >> 20, len(buffer) >> 20)
