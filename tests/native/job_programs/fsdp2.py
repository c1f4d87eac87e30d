# ranks: 2
from job import dist, join, network, number, rows, show, torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

rank, ranks, device = join()
mesh = init_device_mesh(device.type, (ranks,))
model = torch.nn.Sequential(
    network(inner=30), torch.nn.Linear(1, 7), torch.nn.ReLU(), torch.nn.Linear(7, 1)
).to(device)
for layer in (model[0], model[1], model[3]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
for step in range(4):
    loss = (model(rows(8, 8, seed=10 * step + rank).to(device)) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    show(step, number(loss.item()), number(norm.full_tensor()))
whole = {
    name: number(value.full_tensor().double().sum()) for name, value in model.state_dict().items()
}
show(sorted(whole.items()))
dist.destroy_process_group()
