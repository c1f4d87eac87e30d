import torch

heads, dim, views, tokens = 12, 64, 5, 300
n = views * tokens


def attention(q, k, v, mask):
    mask = mask[:, None].repeat(1, heads, 1, 1)
    out = torch.empty_like(q)
    for i in range(0, n, 250):
        rows = slice(i, i + 250)
        scores = q[:, :, rows] @ k.transpose(2, 3) / dim**0.5 + mask[:, :, rows]
        out[:, :, rows] = scores.softmax(-1) @ v
    return out


with torch.no_grad():
    view = torch.arange(n, device="cuda") // tokens
    mask = torch.zeros(2, n, n, device="cuda").masked_fill_(
        view[:, None] < view[None], float("-inf")
    )
    for layer in range(2):
        q, k, v = (torch.randn(2, heads, n, dim, device="cuda") for _ in range(3))
        out = attention(q, k, v, mask)
print(out.shape)
