"""Train both networks against each other."""

import torch
import torch.nn.functional as F

from nets import Judge, Maker

COUNT = 256
NOISE = 64


def judge_loss(judge, real, fake):
    on_real = judge(real)
    on_fake = judge(fake)
    good = F.binary_cross_entropy_with_logits(on_real, torch.ones_like(on_real))
    bad = F.binary_cross_entropy_with_logits(on_fake, torch.zeros_like(on_fake))
    return good + bad


def maker_loss(judge, fake):
    answer = judge(fake)
    return F.binary_cross_entropy_with_logits(answer, torch.ones_like(answer))


def round_of(maker, judge, optimizers, real):
    for_maker, for_judge = optimizers
    fake = maker(torch.randn(len(real), NOISE, device=real.device))
    loss = judge_loss(judge, real, fake.detach())
    for_judge.zero_grad()
    loss.backward()
    for_judge.step()
    fake = maker(torch.randn(len(real), NOISE, device=real.device))
    second = maker_loss(judge, fake)
    for_maker.zero_grad()
    second.backward()
    for_maker.step()
    return loss.item(), second.item()


def main(rounds=5):
    torch.manual_seed(0)
    device = torch.device("cuda")
    maker, judge = Maker(NOISE).to(device), Judge().to(device)
    optimizers = (
        torch.optim.Adam(maker.parameters(), lr=2e-4),
        torch.optim.Adam(judge.parameters(), lr=2e-4),
    )
    for number in range(rounds):
        real = torch.randn(COUNT, 1024, device=device)
        losses = round_of(maker, judge, optimizers, real)
        print(number, losses)


if __name__ == "__main__":
    main()
