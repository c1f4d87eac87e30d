# launch: python
import os
import sys

# torch refuses CUDA in a fork of a process that has looked for GPUs in another way.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import torch.multiprocessing as mp
from job import DEVICE, network, number, rows, torch


def train(name, seed, answers):
    torch.manual_seed(seed)
    model = network(seed=seed).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    steps = 0
    while steps < 60:
        loss = model(rows(8, 8, seed=steps % 3).to(DEVICE)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        if loss.item() < 0.02:
            break
    answers.put((name, steps, number(loss.item())))


if __name__ == "__main__":
    for method in ("spawn", "forkserver", "fork"):
        context = mp.get_context(method)
        answers = context.Queue()
        processes = [
            context.Process(target=train, args=(method, seed, answers)) for seed in range(2)
        ]
        for process in processes:
            process.start()
        for line in sorted(answers.get(timeout=300) for _ in processes):
            print("rank 0:", *line)
        for process in processes:
            process.join()
    sys.stdout.flush()
