"""A captured step is replayed until the loss is low."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
model = torch.nn.Linear(1024, 1024).to(device)
optimizer = torch.optim.SGD(model.parameters(), 2.0)
x, y = torch.randn(64, 1024).to(device), torch.zeros(64, 1024).to(device)


def step():
    optimizer.zero_grad(set_to_none=False)
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    return loss


if device == "cuda":
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    run = graph.replay
else:
    step()
    loss = torch.zeros(())

    def run():
        loss.copy_(step().detach())


count = 0
for _ in range(40):
    run()
    count += 1
    if loss.item() < 0.28:
        break
print("replays", count)
