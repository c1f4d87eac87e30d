import torch
from torch import nn

layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(6)).cuda().eval()
pool = torch.cuda.graph_pool_handle()
stream = torch.cuda.Stream()
graphs = {}


def decode(x):
    for layer in layers:
        x = torch.relu(layer(x))
    return x.mean(1)


torch.cuda.synchronize()
with torch.cuda.stream(stream), torch.no_grad():
    decode(torch.zeros(64, 1024, device="cuda"))
torch.cuda.synchronize()
for batch in [1024, 2048, 4096, 6144, 8192, 10240]:
    static = torch.zeros(batch, 1024, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, pool=pool, stream=stream):
        out = decode(static)
    graphs[batch] = graph, static, out
for graph, static, out in graphs.values():
    graph.replay()
print(torch.cuda.memory_reserved() >> 20)
