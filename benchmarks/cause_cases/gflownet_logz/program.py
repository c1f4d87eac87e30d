import torch
from torch import nn


class Agent:
    def __init__(self, ema_alpha=0.5):
        self.policy = nn.Sequential(
            nn.Linear(128, 1024), nn.LeakyReLU(), nn.Linear(1024, 64)
        ).cuda()
        self.opt = torch.optim.Adam(self.policy.parameters(), lr=1e-3)
        self.ema_alpha = ema_alpha
        self.loss_term_ema = None

    def flowmatch_loss(self, states):
        return self.policy(states).logsumexp(dim=1).pow(2)

    def train_step(self, states, terminal):
        loss = self.flowmatch_loss(states).mean()
        term_loss = self.flowmatch_loss(terminal).mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        if self.loss_term_ema is None:
            self.loss_term_ema = term_loss
        else:
            self.loss_term_ema = (
                self.ema_alpha * term_loss + (1 - self.ema_alpha) * self.loss_term_ema
            )
        return loss.item()


agent = Agent()
for it in range(20):
    states = torch.randn(4096, 128, device="cuda")
    terminal = torch.randn(2048, 128, device="cuda")
    value = agent.train_step(states, terminal)
print("loss", value, "terminal", agent.loss_term_ema.item())
