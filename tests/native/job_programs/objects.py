# ranks: 3
from job import dist, join, show

rank, ranks, device = join()
gathered = [None] * ranks
dist.all_gather_object(gathered, {"rank": rank, "text": "x" * (100 * rank)})
show("all_gather_object", [(one["rank"], len(one["text"])) for one in gathered])
named = [{"steps": 7, "name": "plan"} if rank == 0 else None, rank]
dist.broadcast_object_list(named, src=0)
show("broadcast_object_list", named)
given = [[("part", i)] * i for i in range(ranks)] if rank == 0 else None
got = [None]
dist.scatter_object_list(got, given, src=0)
show("scatter_object_list", got)
collected = [None] * ranks if rank == 1 else None
dist.gather_object(f"from {rank}", collected, dst=1)
show("gather_object", collected)
if rank == 0:
    dist.send_object_list(["to one", 5], dst=1)
elif rank == 1:
    received = [None, None]
    dist.recv_object_list(received, src=0)
    show("recv_object_list", received)
show("steps", sum(len(one["text"]) for one in gathered))
dist.destroy_process_group()
