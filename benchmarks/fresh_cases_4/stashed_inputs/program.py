import torch
import torch.nn.functional as F
from torch import nn

contiguous_data = []
saved_arguments = []


class CheckpointFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run_function, anchor, *args):
        ctx.run_function = run_function
        ctx.index = len(saved_arguments)
        with torch.no_grad():
            outputs = run_function(*args)
        saved_arguments.append(args)
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in saved_arguments[ctx.index]]
        with torch.enable_grad():
            outputs = ctx.run_function(*inputs)
        torch.autograd.backward(outputs, grads)
        return (None, None, *[x.grad for x in inputs])


class Checkpointing:
    def __init__(self):
        self.anchor = torch.zeros(1, device="cuda", requires_grad=True)

    def __call__(self, function, *args):
        return CheckpointFunction.apply(function, self.anchor, *args)


class ParallelLayer(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.dense_h_to_4h = nn.Linear(hidden, 4 * hidden)
        self.dense_4h_to_h = nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        return x + self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(self.norm(x))))


class Transformer(nn.Module):
    def __init__(self, vocabulary=2000, hidden=384, layers=6):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(ParallelLayer(hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, vocabulary)
        self.checkpoint = Checkpointing()

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = self.checkpoint(layer, x)
        return self.head(x)


def train_step(model, optimizer, tokens):
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def pretrain(model, optimizer, iterations):
    losses = []
    for _ in range(iterations):
        tokens = torch.randint(0, 2000, (8, 129)).cuda()
        losses.append(train_step(model, optimizer, tokens))
    return losses


def main():
    torch.manual_seed(0)
    model = Transformer().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    print(pretrain(model, optimizer, 10))


if __name__ == "__main__":
    main()
