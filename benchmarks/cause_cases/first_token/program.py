import torch
import torch.nn.functional as F
from torch import nn


class CausalLM(nn.Module):
    def __init__(self, vocab=32000, width=256):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.mix = nn.Sequential(nn.Linear(width, 512), nn.GELU(), nn.Linear(512, width))
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        hidden = F.layer_norm(hidden + self.mix(hidden.cumsum(1)), (256,))
        return self.lm_head(hidden)


model = CausalLM().cuda().eval()
tokens = torch.randint(0, 32000, (2, 1500), device="cuda")
with torch.no_grad():
    for new in range(3):
        logits = model(tokens)
        choice = logits[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, choice], dim=1)
        del logits
print(tokens.shape)
