import torch
import torch.nn.functional as F

CHUNK = 16


@torch.no_grad()
def postprocess_masks(masks, size):
    chunks = []
    for start in range(0, len(masks), CHUNK):
        resized = F.interpolate(masks[start : start + CHUNK, None], size=size, mode="bilinear")
        chunks.append(resized)
    return torch.cat(chunks, dim=0)


masks = torch.randn(96, 64, 64, device="cuda")
for image in range(2):
    out = None
    out = postprocess_masks(masks, (768, 768))
print(out.shape, out.max().item())
