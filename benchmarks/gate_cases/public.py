"""Nine memory changes from the history of public projects, in programs reduced to what matters.

Where the project made memory smaller, the case takes that back. ``source`` is the project's own
description.
"""

from __future__ import annotations

from benchmarks.gate_cases.edits import Case, Edit

_TRL = """\
    chosen = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    norms = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    return chosen - norms
"""
_TITAN = """\
    total = hidden.new_zeros((), dtype=torch.float32)
    for part, right in zip(hidden.chunk(chunks), labels.chunk(chunks)):
        total = total + checkpoint(part_of_loss, part, weight, right, use_reentrant=False)
    return total / len(labels)
"""

PUBLIC: dict[str, Case] = {
    "llama": Case(
        "public",
        (
            Edit("llama.py", "        logits = self.lm_head(hidden_states)\n", "        logits = self.lm_head(hidden_states)\n        logits = logits.float()\n"),
        ),
        ("        logits = logits.float()",),
        source="https://github.com/huggingface/transformers/pull/33902",
    ),
    "accelerator": Case(
        "public",
        (
            Edit("accelerator.py", "        return model\n", "        model.forward = convert_to_fp32(model.forward)\n        return model\n"),
        ),
        ("        model.forward = convert_to_fp32(model.forward)",),
        source="https://github.com/huggingface/accelerate/pull/134",
    ),
    "logprobs": Case(
        "public",
        (
            Edit("logprobs.py", _TRL, "    logprobs = logits.log_softmax(-1)\n    return logprobs.gather(-1, index.unsqueeze(-1)).squeeze(-1)\n"),
        ),
        ("    logprobs = logits.log_softmax(-1)", "    return logprobs.gather(-1, index.unsqueeze(-1)).squeeze(-1)"),
        source="https://github.com/huggingface/trl/pull/2799",
    ),
    "titan": Case(
        "public",
        (Edit("titan.py", _TITAN, "    return part_of_loss(hidden, weight, labels) / len(labels)\n"),),
        ("    return part_of_loss(hidden, weight, labels) / len(labels)",),
        source="https://github.com/pytorch/torchtitan/pull/996",
    ),
    "loop": Case(
        "public",
        (
            Edit("loop.py", 'outputs.append({"loss": output["loss"].item()})', "outputs.append({name: value.detach() for name, value in output.items()})"),
        ),
        ("            outputs.append({name: value.detach() for name, value in output.items()})",),
        source="https://github.com/Lightning-AI/pytorch-lightning/issues/1510",
    ),
    "wrapped": Case(
        "public",
        (Edit("wrapped.py", "            set_to_none = True\n", "            set_to_none = False\n"),),
        ("            set_to_none = False",),
        source="https://github.com/huggingface/accelerate/pull/2472",
    ),
    "depth": Case(
        "public",
        (
            Edit("depth.py", "attn_mask=attn_mask[:, None] if", "attn_mask=attn_mask[:, None].repeat(1, self.num_heads, 1, 1) if"),
        ),
        ("            attn_mask=attn_mask[:, None].repeat(1, self.num_heads, 1, 1) if attn_mask is not None else None,",),
        source="https://github.com/ByteDance-Seed/Depth-Anything-3/pull/268",
    ),
    "wavegan": Case(
        "public",
        (Edit("wavegan.py", "    @torch.no_grad()\n", ""),),
        ("    def _eval_step(self, batch):",),
        source="https://github.com/kan-bayashi/ParallelWaveGAN/pull/26",
    ),
    "arena": Case(
        "public",
        (
            Edit("arena.py", "            \"scalar_loss\": scalar_loss.detach(),\n", "            \"scalar_loss\": scalar_loss,\n"),
            Edit("arena.py", "            \"vector_loss\": vector_loss.detach(),\n", "            \"vector_loss\": vector_loss,\n"),
        ),
        ('            "scalar_loss": scalar_loss,', '            "vector_loss": vector_loss,'),
        source="https://github.com/pdearena/pdearena/pull/4",
    ),
}  # fmt: skip
