# ranks: 3
from job import dist, join, numbers, show, torch

rank, ranks, device = join()
got = torch.empty(ranks, device=device)
dist.all_to_all_single(got, torch.arange(float(ranks), device=device) + 10 * rank)
show("even", numbers(got))
sent = [rank + i for i in range(ranks)]
received = [i + rank for i in range(ranks)]
source = torch.cat(
    [torch.full((n,), float(100 * rank + i), device=device) for i, n in enumerate(sent)]
)
got = torch.empty(sum(received), device=device)
dist.all_to_all_single(got, source, received, sent)
show("uneven", numbers(got))
# a mixture of experts: how much each rank receives is sent first
tokens = torch.arange(12.0, device=device) + 100 * rank
expert = torch.tensor([(i * (rank + 2)) % ranks for i in range(12)], device=device)
order = expert.argsort(stable=True)
counts = torch.bincount(expert, minlength=ranks)
theirs = torch.empty_like(counts)
dist.all_to_all_single(theirs, counts)
arrived = torch.empty(int(theirs.sum()), device=device)
dist.all_to_all_single(arrived, tokens[order], theirs.tolist(), counts.tolist())
show("experts", theirs.tolist(), numbers(arrived))
back = torch.empty(12, device=device)
dist.all_to_all_single(back, arrived * 2, counts.tolist(), theirs.tolist())
restored = torch.empty_like(back)
restored[order] = back
show("restored", bool((restored == tokens * 2).all()), "buffer", arrived.numel() * 1024)
dist.destroy_process_group()
