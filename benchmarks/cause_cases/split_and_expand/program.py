import torch

torch.cuda.memory._set_allocator_settings("max_split_size_mb:128,expandable_segments:True")
kept = []
for cycle in range(24):
    a = torch.empty(91 << 20, dtype=torch.uint8, device="cuda")
    b = torch.empty(91 << 19, dtype=torch.uint8, device="cuda")
    kept.append(torch.empty(2 << 20, dtype=torch.uint8, device="cuda"))
    del a, b
print(torch.cuda.memory_allocated() >> 20, torch.cuda.memory_reserved() >> 20)
