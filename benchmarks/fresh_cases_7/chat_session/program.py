"""A session that instructs a language model, and validates what it says."""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel


@dataclass
class ModelOutputThunk:
    value: list[int]
    _meta: dict[str, Any] = field(default_factory=dict)


class Backend:
    def __init__(self):
        config = GPT2Config(
            vocab_size=4000,
            n_embd=256,
            n_layer=4,
            n_head=4,
            n_positions=512,
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=0,
        )
        self._model = GPT2LMHeadModel(config).cuda().eval()

    @torch.no_grad()
    def generate(self, prompt, new_tokens):
        hf_output = self._model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        text = hf_output.sequences[0, prompt.shape[1] :].tolist()
        mot = ModelOutputThunk(text)
        mot._meta["hf_output"] = hf_output
        return mot


class Session:
    def __init__(self, backend):
        self.backend = backend
        self.log = []

    def instruct(self, tokens, retries=2):
        for attempt in range(retries):
            answer = self.backend.generate(tokens, new_tokens=6)
            self.log.append(answer)
            verdict = self.backend.generate(tokens.flip(-1), new_tokens=2)
            self.log.append(verdict)
            if sum(verdict.value) % 7 == 0:
                break
        return answer.value


if __name__ == "__main__":
    torch.manual_seed(0)
    session = Session(Backend())
    for turn in range(4):
        print(turn, session.instruct(torch.randint(2, 4000, (2, 320)).cuda()))
