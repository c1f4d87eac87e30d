# ranks: 3
from job import dist, join, number, rows, show, torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

rank, ranks, device = join()
torch.manual_seed(rank)
for kind in (ScheduleGPipe, Schedule1F1B):
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()).to(device)
    stage = PipelineStage(layer, rank, ranks, device)
    schedule = kind(stage, n_microbatches=4, loss_fn=lambda y, t: (y - t).square().mean())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        losses = []
        if rank == 0:
            schedule.step(rows(8, 8, seed=step).to(device))
        elif rank == ranks - 1:
            schedule.step(target=rows(8, 8, seed=100 + step).to(device), losses=losses)
        else:
            schedule.step()
        optimizer.step()
        show(
            kind.__name__,
            step,
            [number(loss) for loss in losses],
            number(layer[0].weight.double().sum()),
        )
dist.destroy_process_group()
