"""Trains a residual network on random pictures."""

import copy
import json
from types import SimpleNamespace

import torch
import torch.nn as nn

from vision import resnet
from vision.data import Prefetcher, loader
from vision.meters import AverageMeter, accuracy

device = torch.device("cuda")


def train(batches, model, criterion, optimizer, epoch, args):
    losses = AverageMeter("Loss", ":.4e")
    top1 = AverageMeter("Acc@1", ":6.2f")
    model.train()
    for i, (images, target) in enumerate(Prefetcher(batches, device, args.prefetch)):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=args.amp):
            output = model(images)
            loss = criterion(output, target)
        losses.update(loss.item(), images.size(0))
        top1.update(accuracy(output, target)[0], images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % args.print_freq == 0:
            print(f"[{epoch}][{i}]", losses, top1)


@torch.no_grad()
def validate(batches, model, criterion, args):
    losses = AverageMeter("Loss", ":.4e")
    top5 = AverageMeter("Acc@5", ":6.2f")
    model.eval()
    for images, target in Prefetcher(batches, device, 1):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=args.amp):
            output = model(images)
            loss = criterion(output, target)
        losses.update(loss.item(), images.size(0))
        top5.update(accuracy(output, target, topk=(1, 5))[1], images.size(0))
    print("validation", losses, top5)
    return top5.sum / top5.count


def main():
    torch.manual_seed(0)
    with open("args.json") as file:
        args = SimpleNamespace(**json.load(file))
    model = resnet.create(args.arch, args.classes).to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(
        model.parameters(),
        args.lr,
        momentum=args.momentum,
        weight_decay=args.weight_decay,
        foreach=False,
    )
    train_batches = loader(args, 3 * args.batch_size, args.batch_size, True, 1)
    val_batches = loader(args, 2 * args.val_batch_size, args.val_batch_size, False, 2)
    best, best_acc = None, -1.0
    for epoch in range(args.epochs):
        train(train_batches, model, criterion, optimizer, epoch, args)
        acc = validate(val_batches, model, criterion, args)
        if acc > best_acc:
            best_acc = acc
            best = {name: value.cpu() for name, value in copy.copy(model.state_dict()).items()}
    print(f"best {best_acc:.2f}, {len(best)} tensors")


if __name__ == "__main__":
    main()
