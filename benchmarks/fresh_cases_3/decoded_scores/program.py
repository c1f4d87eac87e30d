from collections import namedtuple
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

GenerateOutput = namedtuple("GenerateOutput", ["sequences", "scores"])


@dataclass
class InferenceParams:
    max_seqlen: int
    offset: int = 0
    states: dict = field(default_factory=dict)


class Mixer(nn.Module):
    """A gated linear recurrence with a state of its own for each channel."""

    def __init__(self, index, width, expand=2):
        super().__init__()
        self.index = index
        inner = expand * width
        self.in_proj = nn.Linear(width, 2 * inner, bias=False)
        self.dt = nn.Linear(inner, inner)
        self.decay = nn.Parameter(torch.rand(inner))
        self.out_proj = nn.Linear(inner, width, bias=False)

    def recur(self, x, state):
        outputs = []
        for at in range(x.shape[1]):
            step = F.softplus(self.dt(x[:, at]))
            state = state * torch.exp(-step * self.decay) + step * x[:, at]
            outputs.append(state)
        return torch.stack(outputs, 1), state

    def forward(self, x, params):
        x, gate = self.in_proj(x).chunk(2, dim=-1)
        state = params.states.get(self.index)
        if state is None:
            state = x.new_zeros(len(x), x.shape[-1])
        y, params.states[self.index] = self.recur(x, state)
        return self.out_proj(y * F.silu(gate))


class RecurrentLM(nn.Module):
    def __init__(self, vocabulary=50280, width=256, depth=3):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.mixers = nn.ModuleList(Mixer(index, width) for index in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.norm_f = nn.LayerNorm(width)

    def forward(self, ids, params, num_last_tokens=0):
        x = self.embedding(ids)
        for norm, mixer in zip(self.norms, self.mixers):
            x = x + mixer(norm(x), params)
        if num_last_tokens > 0:
            x = x[:, -num_last_tokens:]
        return F.linear(self.norm_f(x), self.embedding.weight)


def sample(logits, top_k=1, temperature=1.0):
    if top_k == 1:
        return logits.argmax(dim=-1)
    values, indices = torch.topk(logits, top_k, dim=-1)
    choice = torch.multinomial(torch.softmax(values / temperature, -1), 1)
    return indices.gather(1, choice).squeeze(1)


@torch.inference_mode()
def decode(ids, model, max_length, top_k=1, temperature=1.0):
    params = InferenceParams(max_seqlen=max_length)

    def get_logits(ids):
        logits = model(ids, params, num_last_tokens=1).squeeze(1)
        params.offset += ids.shape[1]
        return logits

    def should_stop(token):
        return params.offset >= max_length - 1

    scores, sequences = [], [ids]
    token = None
    while token is None or not should_stop(token):
        scores.append(get_logits(ids if token is None else token))
        token = sample(scores[-1], top_k, temperature).unsqueeze(1)
        sequences.append(token)
    return GenerateOutput(sequences=torch.cat(sequences, dim=1), scores=tuple(scores))


class Generator:
    def __init__(self, model):
        self.model = model

    def generate(self, ids, max_length, return_dict_in_generate=False, **options):
        output = decode(ids, self.model, max_length, **options)
        return output if return_dict_in_generate else output.sequences


def main():
    torch.manual_seed(0)
    generator = Generator(RecurrentLM().cuda().eval())
    for request in range(2):
        prompts = torch.randint(0, 50280, (16, 12), device="cuda")
        text = generator.generate(prompts, max_length=76)
        print(request, text.shape)


if __name__ == "__main__":
    main()
