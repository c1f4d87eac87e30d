import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Actor(nn.Module):
    def __init__(self, vocabulary=32_000, width=256, depth=2):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.tokens(ids)
        past = x.cumsum(1) / torch.arange(1, ids.shape[1] + 1, device=ids.device)[:, None]
        for layer in self.layers:
            past = past + torch.tanh(layer(past))
        return self.head(past)


def log_probs_from_logits(logits, labels):
    log_probs = F.log_softmax(logits, dim=-1)
    return log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def action_log_probs(actor, ids):
    return log_probs_from_logits(actor(ids[:, :-1]), ids[:, 1:])


@torch.no_grad()
def make_experience(actor, reference, ids):
    log_probs = action_log_probs(actor, ids)
    kl = log_probs - action_log_probs(reference, ids)
    reward = torch.rand(len(ids), device="cuda") - 0.1 * kl.sum(1)
    return ids.cpu(), log_probs.cpu(), (reward - reward.mean()).cpu()


def ppo_step(actor, optimizer, ids, old, advantage):
    optimizer.zero_grad()
    ratio = (action_log_probs(actor, ids) - old).exp()
    clipped = ratio.clamp(0.8, 1.2)
    loss = -torch.min(ratio * advantage[:, None], clipped * advantage[:, None]).mean()
    loss.backward()
    optimizer.step()
    return loss.item()


torch.manual_seed(0)
actor, reference = Actor().cuda(), Actor().cuda().requires_grad_(False)
reference.load_state_dict(actor.state_dict())
optimizer = torch.optim.SGD(actor.parameters(), lr=1e-3, foreach=False)
prompts = TensorDataset(torch.randint(0, 32_000, (64, 65)))
for episode in range(2):
    experiences = []
    for (ids,) in DataLoader(prompts, batch_size=32, shuffle=True):
        experiences.append(make_experience(actor, reference, ids.cuda()))
    experience = TensorDataset(*map(torch.cat, zip(*experiences)))
    for ids, old, advantage in DataLoader(experience, batch_size=4, shuffle=True):
        loss = ppo_step(actor, optimizer, ids.cuda(), old.cuda(), advantage.cuda())
    print(episode, loss)
