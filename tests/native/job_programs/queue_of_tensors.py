# launch: python
import torch.multiprocessing as mp
from job import DEVICE, torch


def add(items, ready, done):
    tensor = items.get()
    tensor.add_(torch.arange(4.0, device=DEVICE))
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print("rank 1: saw", tensor.sum().item(), flush=True)
    ready.set()
    done.wait()


if __name__ == "__main__":
    context = mp.get_context("spawn")
    items, ready, done = context.Queue(), context.Event(), context.Event()
    process = context.Process(target=add, args=(items, ready, done))
    process.start()
    tensor = torch.full((1000, 4), 2.0, device=DEVICE)
    if DEVICE == "cpu":
        tensor.share_memory_()
    items.put(tensor)
    ready.wait(300)
    print("rank 0: sees", tensor.sum().item(), tensor[7].tolist())
    tensor.zero_()
    done.set()
    process.join()
    print("rank 0: code", process.exitcode)
