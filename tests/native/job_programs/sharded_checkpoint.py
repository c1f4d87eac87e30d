# ranks: 2
import tempfile

import torch.distributed.checkpoint as checkpoint
from job import dist, join, network, number, rows, show, torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

rank, ranks, device = join("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
mesh = init_device_mesh(device.type, (ranks,))
model = fully_shard(network(seed=1).to(device), mesh=mesh)
folder = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folder, src=0)
saved = f"{folder[0]}/saved"
checkpoint.save(model.state_dict(), checkpoint_id=saved)
other = fully_shard(network(seed=2).to(device), mesh=mesh)
state = other.state_dict()
checkpoint.load(state, checkpoint_id=saved)
other.load_state_dict(state)
batch = rows(8, 8, seed=5).to(device)
show(number(model(batch).double().sum()), number(other(batch).double().sum()))
dist.destroy_process_group()
