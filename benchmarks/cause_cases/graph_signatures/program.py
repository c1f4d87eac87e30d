import torch
from torch import nn

model = (
    nn.Sequential(
        *[m for _ in range(4) for m in (nn.Linear(768, 1536), nn.ReLU(), nn.Linear(1536, 768))]
    )
    .cuda()
    .eval()
)
runners = {}


def capture(tokens):
    static = torch.zeros(tokens, 768, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        model(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        output = model(static)
    return graph, static, output


for tokens in (8192, 7168, 6144, 5120, 4096, 3072):
    runners[tokens] = capture(tokens)
for graph, static, output in runners.values():
    static.normal_()
    graph.replay()
print(output.mean().item(), torch.cuda.memory_reserved() >> 20)
