import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads=8):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.up_proj = nn.Linear(width, 4 * width, bias=False)
        self.down_proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        n, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).reshape(n, t, c))
        return x + self.down_proj(F.gelu(self.up_proj(self.norm2(x))))


class LanguageModel(nn.Module):
    def __init__(self, vocabulary=2048, width=768, depth=6):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Recorder:
    """The input and output of one module, for both prompt sets."""

    def __init__(self, module):
        self.module = module
        self.inputs, self.outputs = [], []

    def __enter__(self):
        self.handle = self.module.register_forward_hook(self.store)
        return self

    def store(self, module, args, output):
        self.inputs.append(args[0][:, -1].clone())
        self.outputs.append(output[:, -1].clone())

    def __exit__(self, *exc):
        self.handle.remove()


class Ablation:
    """Rewrites each projection so that "bad" prompts give the residuals of good ones."""

    def __init__(self, model):
        self.model = model
        for parameter in model.parameters():
            parameter.requires_grad_(False)

    def targets(self):
        for block in self.model.blocks:
            yield from (block.qkv, block.o_proj, block.up_proj, block.down_proj)

    @torch.no_grad()
    def residuals(self, module, prompts):
        with Recorder(module) as recorder:
            for batch in prompts:
                self.model(batch)
        return torch.cat(recorder.inputs), torch.cat(recorder.outputs)

    def optimize_module(self, module, good, bad, steps=4):
        good_in, good_out = self.residuals(module, good)
        bad_in, _ = self.residuals(module, bad)
        target = good_out.mean(0, keepdim=True)
        module.weight.requires_grad_(True)
        optimizer = torch.optim.LBFGS([module.weight], lr=0.5, max_iter=steps, history_size=2)

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(module(good_in), good_out)
            loss = loss + F.mse_loss(module(bad_in), target.expand(len(bad_in), -1))
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        module.weight.requires_grad_(False)
        return float(loss)

    def run(self, good, bad):
        return [self.optimize_module(module, good, bad) for module in self.targets()]


@torch.no_grad()
def evaluate(model, prompts):
    total = 0.0
    for batch in prompts:
        logits = model(batch)
        total += F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()).item()
    return total / len(prompts)


def main():
    torch.manual_seed(0)
    model = LanguageModel().cuda().eval()
    good = [torch.randint(0, 2048, (4, 64), device="cuda") for _ in range(2)]
    bad = [torch.randint(0, 2048, (4, 64), device="cuda") for _ in range(2)]
    losses = Ablation(model).run(good, bad)
    print("losses", losses)
    validation = [torch.randint(0, 2048, (16, 256), device="cuda") for _ in range(2)]
    print("perplexity", evaluate(model, validation))


if __name__ == "__main__":
    main()
