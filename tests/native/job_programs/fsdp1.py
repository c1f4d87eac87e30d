# ranks: 2
from job import dist, join, network, number, rows, show, torch
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

rank, ranks, device = join()
model = network(inner=30).to(device)
for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
    sharded = FullyShardedDataParallel(
        network(inner=30).to(device),
        sharding_strategy=strategy,
        device_id=device,
        use_orig_params=True,
    )
    optimizer = torch.optim.Adam(sharded.parameters(), lr=0.05)
    for step in range(3):
        loss = (sharded(rows(8, 8, seed=10 * step + rank).to(device)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        norm = sharded.clip_grad_norm_(1.0)
        optimizer.step()
        show(strategy.name, step, number(loss.item()), number(norm))
dist.destroy_process_group()
