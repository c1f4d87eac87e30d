import torch
from torch import nn

vocab = 4096


def compute_metrics(logits, labels):
    return (logits.argmax(-1) == labels).float().mean().item()


@torch.no_grad()
def evaluation_loop(model, steps=14):
    all_logits, all_labels = None, None
    for step in range(steps):
        tokens = torch.randint(0, vocab, (8, 128), device="cuda")
        logits = model(tokens)
        all_logits = logits if all_logits is None else torch.cat((all_logits, logits))
        all_labels = tokens if all_labels is None else torch.cat((all_labels, tokens))
    return compute_metrics(all_logits, all_labels)


model = nn.Sequential(
    nn.Embedding(vocab, 256), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, vocab)
).cuda()
print(evaluation_loop(model))
