import torch
from torch import nn

vocab = 8192
model = nn.Sequential(nn.Embedding(vocab, 128), nn.Linear(128, vocab)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    tokens = torch.randint(0, vocab, (3072,), device="cuda")
    target = torch.randint(0, vocab, (3072,), device="cuda")
    logits = model(tokens)
    log_probs = logits.log_softmax(dim=-1)
    loss = -log_probs.gather(1, target[:, None]).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
