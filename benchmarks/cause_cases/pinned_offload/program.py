import torch

layers = [torch.empty(n << 20, dtype=torch.uint8) for n in (33, 65, 17, 36, 68)]
hosts = [layer.pin_memory() for layer in layers]
staging = torch.empty(68 << 20, dtype=torch.uint8, device="cuda")
for token in range(3):
    for host in hosts:
        staging[: host.numel()].copy_(host, non_blocking=True)
    torch.cuda.synchronize()
print(sum(h.numel() for h in hosts) >> 20)
