"""What a script does with a model: the choices of ``gpuprobe estimate --model``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Final

from gpuprobe.errors import EnvironmentUnavailable, MissingExtra, UsageError
from gpuprobe.planning.models.configs import ModelConfig

_SEQUENCE: Final = 2048  # tokens, by default

_LEARNED_POSITIONS: Final = {
    "bert": "max_position_embeddings",
    "distilbert": "max_position_embeddings",
    "gpt2": "n_positions",
    "gpt_bigcode": "n_positions",
    "opt": "max_position_embeddings",
    "roberta": "max_position_embeddings",
    "whisper": "max_target_positions",
}
"""The field with the length of the table of positions, by type of model: a longer sequence has no
positions there."""

METHOD_NAMES: Final = {"full": "all parameters", "lora": "LoRA", "qlora": "QLoRA"}

_WITHOUT_LINEAR: Final = ("gpt2", "openai-gpt")


@dataclass(frozen=True)
class ModelRun:
    """A training run of a model, or (``inference``) a generation of ``new_tokens`` tokens.

    ``batch_size`` is that of one rank; ``sequence_length`` counts tokens, 0 for the default: 2048
    or what the model's table of positions has. ``lora_targets`` are names of layers; none: all
    linear layers but the head. ``attention``: none for what transformers selects, which is sdpa for
    classes that support it.
    """

    model: ModelConfig
    method: str = "full"
    lora_rank: int = 16
    lora_targets: tuple[str, ...] = ()
    optimizer: str = "adamw"
    dtype: str = "bf16"
    batch_size: int = 1
    sequence_length: int = 0
    checkpointing: bool = False
    attention: str = ""
    ranks: int = 1
    sharding: str = "fsdp"
    inference: bool = False
    new_tokens: int = 32

    @property
    def positions(self) -> int:
        """The most tokens of a sequence; 0 for a model without such a limit."""
        name = _LEARNED_POSITIONS.get(self.model.model_type)
        if name is None:
            return 0
        reserved = 2 if self.model.model_type == "roberta" else 0  # for the padding's position
        return int(self.model.fields.get(name, 0) or 0) - reserved

    @property
    def tokens(self) -> int:
        """The tokens of a sequence: of a prompt, for inference."""
        most = self.positions - (self.new_tokens if self.inference else 0)
        if self.sequence_length:
            return self.sequence_length
        return min(_SEQUENCE, most) if self.positions else _SEQUENCE

    @property
    def in_words(self) -> str:
        """All choices, with the defaults: ``llama-3.1-8b, LoRA of rank 16 on all linear layers,
        adamw, bf16, batch size 1, sequence length 2048, checkpointing``.
        """
        words = [self.model.name]
        if self.inference:
            words.append(f"{self.new_tokens} new tokens")
        elif self.method == "full":
            words += [f"{METHOD_NAMES[self.method]} trained", self.optimizer]
        else:
            layers = ", ".join(self.lora_targets) or "all linear layers"
            words += [
                f"{METHOD_NAMES[self.method]} of rank {self.lora_rank} on {layers}",
                self.optimizer,
            ]
        words += [self.dtype, f"batch size {self.batch_size}"]
        if self.model.task != "images":
            words.append(f"{'prompt' if self.inference else 'sequence'} length {self.tokens}")
        words += ["checkpointing"] if self.checkpointing else []
        words += [f"{self.attention} attention"] if self.attention else []
        words += [f"{self.ranks} ranks with {self.sharding}"] if self.ranks > 1 else []
        return ", ".join(words)

    @property
    def sharded(self) -> bool:
        """Whether ranks hold parts of parameters or gradients (FSDP2)."""
        return self.ranks > 1 and self.sharding in ("fsdp", "zero2", "zero3")

    @property
    def least_memory(self) -> int:
        """Bytes of weights, gradients and optimizer state on each rank: less than the run needs. 0
        if the number of parameters is unknown.
        """
        size = {"fp32": 4.0, "bf16-mixed": 4.0}.get(self.dtype, 2.0)
        if self.method == "qlora":
            size = 0.5
        # zero2 has whole weights in the forward and backward pass.
        weights = size / (self.ranks if self.sharding in ("fsdp", "zero3") else 1)
        trained = 0.0
        if self.method == "full" and not self.inference:
            states = {"adamw": 2 * size, "adamw-fused": 2 * size, "adamw-8bit": 2.0}
            gradients = size / (self.ranks if self.sharded else 1)
            shards = 1 if self.sharding == "ddp" else self.ranks
            trained = gradients + states.get(self.optimizer, 0.0) / shards
        return int((weights + trained) * self.model.parameters)

    def changed(self, **fields: Any) -> ModelRun:
        return replace(self, **fields)

    def check(self) -> None:
        """Raises UsageError for choices that exclude each other, MissingExtra or
        EnvironmentUnavailable for a package that the script needs and this environment lacks.
        """
        self._check_length()
        self._check_method()
        self._check_ranks()
        if self.inference:
            self._check_inference()
        for package, why in self._packages():
            if find_spec(package) is None:
                raise MissingExtra(package, "models", why=why)
        if self.attention == "flash_attention_2" and find_spec("flash_attn") is None:
            raise EnvironmentUnavailable(
                "flash_attn is not installed (--attention flash_attention_2)",
                hint="--attention sdpa also runs FlashAttention, with torch's kernels",
            )

    def _packages(self) -> list[tuple[str, str]]:
        needed = [("transformers", "--model builds its classes")]
        if self.method != "full" and not self.inference:
            needed.append(("peft", f"--method {self.method}"))
        if self.method == "qlora":
            needed.append(("bitsandbytes", "--method qlora"))
        elif self.optimizer == "adamw-8bit" and not self.inference:
            needed.append(("bitsandbytes", "--optimizer adamw-8bit"))
        if self.sharded or self.method == "qlora":
            needed.append(("accelerate", "parameters without memory"))
        return needed

    def _check_length(self) -> None:
        task = self.model.task
        if self.positions and self.tokens > self.positions:
            raise UsageError(
                f"{self.model.name} has {self.positions} positions; a sequence of {self.tokens} "
                "tokens is too long",
                hint=f"--sequence-length of at most {self.positions}",
            )
        if task == "images" and self.sequence_length:
            raise UsageError(
                f"{self.model.name} reads images: --sequence-length has no effect",
                hint="the size of the images is in the model's configuration",
            )

    def _check_method(self) -> None:
        if self.method == "qlora" and self.dtype in ("fp32", "fp16"):
            raise UsageError(
                f"--method qlora computes in bf16, not {self.dtype}", hint="leave --dtype out"
            )
        if self.method == "qlora" and self.model.model_type in _WITHOUT_LINEAR:
            raise UsageError(
                f"--method qlora needs linear layers; those of {self.model.name} are of "
                "transformers' class Conv1D",
                hint="--method lora",
            )

    def _check_inference(self) -> None:
        if self.method == "lora":
            raise UsageError(
                "--inference runs the model without adapters: --method lora has no effect",
                hint="merged adapters need no memory; --method qlora: the model in 4 bits",
            )
        if self.ranks > 1:
            raise UsageError(
                "--inference runs on one GPU; its script does not split the model over --ranks",
                hint="for a server on vLLM: gpuprobe estimate --gpu GPU -- vllm serve MODEL",
            )
        if self.dtype == "bf16-mixed":
            raise UsageError("--dtype bf16-mixed is for training", hint="--dtype bf16")

    def _check_ranks(self) -> None:
        if self.ranks == 1:
            return
        if self.method == "qlora" and self.sharding != "ddp":
            raise UsageError(
                "4-bit parameters are not sharded by FSDP2 or ZeRO",
                hint="--sharding ddp: every rank holds the whole model in 4 bits",
            )
        if self.optimizer == "adamw-8bit" and self.sharding != "ddp":
            raise UsageError(
                f"the 8-bit optimizer of bitsandbytes does not support --sharding {self.sharding}",
                hint="--optimizer adamw, or --sharding ddp",
            )
