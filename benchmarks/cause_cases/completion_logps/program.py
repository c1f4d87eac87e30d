import torch
from torch import nn

vocab, width, prompt_length = 16000, 192, 768
model = nn.Sequential(nn.Embedding(vocab, width), nn.Linear(width, width), nn.GELU())
lm_head = nn.Linear(width, vocab, bias=False)
model, lm_head = model.cuda(), lm_head.cuda()


def per_token_logps(ids):
    hidden = model(ids)
    logits = lm_head(hidden)[:, :-1]
    logps = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return logps[:, prompt_length - 1 :]


ids = torch.randint(0, vocab, (3, 1024), device="cuda")
optimizer = torch.optim.SGD([*model.parameters(), *lm_head.parameters()], lr=1e-3)
for step in range(2):
    loss = -per_token_logps(ids).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
