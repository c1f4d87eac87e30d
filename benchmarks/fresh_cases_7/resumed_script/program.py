import os
import tempfile
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

# config
out_dir = tempfile.mkdtemp()
init_from = "scratch"
learning_rate = 1e-3
max_iters = 4
batch_size, block_size, vocab_size, n_embd, n_layer = 2, 64, 4000, 384, 4
device = "cuda"
ctx = nullcontext()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 4 * width)
        self.proj = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.proj(F.gelu(self.fc(self.ln(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.h = nn.ModuleList(Block(n_embd) for _ in range(n_layer))
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, vocab_size), targets.view(-1))


def get_batch():
    data = torch.randint(0, vocab_size, (batch_size, block_size + 1))
    return data[:, :-1].to(device), data[:, 1:].to(device)


def save():
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
    torch.save(state, os.path.join(out_dir, "ckpt.pt"))


torch.manual_seed(1337)
iter_num = 0
for init_from in ("scratch", "resume"):
    if init_from == "scratch":
        model = GPT().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    else:
        ckpt_path = os.path.join(out_dir, "ckpt.pt")
        checkpoint = torch.load(ckpt_path, map_location=device)
        state_dict = checkpoint["model"]
        for k in list(state_dict):
            if k.startswith("_orig_mod."):
                state_dict[k.removeprefix("_orig_mod.")] = state_dict.pop(k)
        model.load_state_dict(state_dict)
        optimizer.load_state_dict(checkpoint["optimizer"])
        iter_num = checkpoint["iter_num"]

    for _ in range(max_iters):
        X, Y = get_batch()
        with ctx:
            logits, loss = model(X, Y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        iter_num += 1
        print(f"iter {iter_num}: loss {loss.item():.4f}")
    save()
