# ranks: 2
from job import dist, join, network, number, rows, show, torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Rows(Dataset):
    def __len__(self):
        return 22

    def __getitem__(self, index):
        return rows(1, 8, seed=index)[0], index


def main():
    device = join()[2]
    model = DistributedDataParallel(network().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(Rows(), shuffle=True, seed=3)
    loader = DataLoader(
        Rows(), batch_size=4, sampler=sampler, num_workers=2, pin_memory=device.type == "cuda"
    )
    for epoch in range(2):
        sampler.set_epoch(epoch)
        seen, total = [], 0.0
        for batch, indices in loader:
            loss = model(batch.to(device, non_blocking=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += indices.tolist()
            total += loss.item()
        show(epoch, seen, number(total))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
