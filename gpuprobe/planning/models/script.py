"""The text of a training or inference script for a model, to read, run and change.

The script is what an estimate runs; nothing in it knows of gpuprobe.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import Final

from gpuprobe.planning.models.run import METHOD_NAMES, ModelRun

AUTO_CLASS: Final = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "sequences": "AutoModelForSeq2SeqLM",
    "images": "AutoModelForImageClassification",
    "speech": "AutoModelForSpeechSeq2Seq",
}
_DTYPE: Final = {
    "bf16": "torch.bfloat16",
    "fp16": "torch.float16",
    "fp32": "torch.float32",
    "bf16-mixed": "torch.float32",
}
_OPTIMIZER: Final = {
    "adamw": "torch.optim.AdamW(parameters, lr=args.learning_rate)",
    "adamw-fused": "torch.optim.AdamW(parameters, lr=args.learning_rate, fused=True)",
    "adamw-8bit": "bnb.optim.AdamW8bit(parameters, lr=args.learning_rate)",
    "adafactor": "torch.optim.Adafactor(parameters, lr=args.learning_rate)",
    "sgd": "torch.optim.SGD(parameters, lr=args.learning_rate, momentum=0.9)",
}
_UNUSED: Final = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"}
)
"""Fields of a config.json without an effect here, or that the script sets."""


def script(run: ModelRun, command: str = "") -> str:
    """The script's text. ``command``: the command that writes it, for its docstring."""
    parts = [
        "\n".join(_docstring(run, command)),
        "\n".join(_imports(run)),
        f"CONFIG = {_literal(_config(run))}",
    ]
    definitions: list[Iterable[str]] = [_options(run), _model(run)]
    definitions += [_generate(run), _MAIN] if run.inference else [_batch(run), _train(run)]
    blocks = ["\n".join(lines) for lines in definitions]
    return "\n\n".join(parts) + "\n\n\n" + "\n\n\n".join(blocks) + "\n\n\n" + _END


_END: Final = 'if __name__ == "__main__":\n    main()\n'


def _config(run: ModelRun) -> dict[str, object]:
    return {key: value for key, value in run.model.fields.items() if key not in _UNUSED}


def _literal(value: object, indent: str = "") -> str:
    """A value of JSON as Python, a line for each field of an object."""
    if not isinstance(value, dict):
        strings = isinstance(value, str) or _are_strings(value)
        text = json.dumps(value) if strings else repr(value)
        if len(indent) + len(text) <= 70 or not isinstance(value, list):
            return text
        inner = f"{indent}    "
        return "[\n" + "".join(f"{inner}{_literal(v, inner)},\n" for v in value) + f"{indent}]"
    if not value:
        return "{}"
    inner = f"{indent}    "
    rows = [f"{inner}{json.dumps(key)}: {_literal(item, inner)},\n" for key, item in value.items()]
    return "{\n" + "".join(rows) + f"{indent}}}"


def _are_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _docstring(run: ModelRun, command: str) -> Iterator[str]:
    if run.inference:
        yield f'"""Generate tokens with {run.model.name}: a prompt, then one token at a time.'
    else:
        how = METHOD_NAMES[run.method]
        yield f'"""Train {run.model.name}: {how}, {run.optimizer}, {run.dtype}.'
    yield ""
    if command:
        yield f"Written by: {command}"
    start = "python" if run.ranks == 1 else f"torchrun --nproc-per-node {run.ranks}"
    yield f"Run it with: {start} SCRIPT --batch-size {run.batch_size}"
    yield ""
    yield "The weights and the data are random numbers: load your own where comments name them."
    yield '"""'


def _imports(run: ModelRun) -> Iterator[str]:
    yield "import argparse"
    if run.ranks > 1:
        yield "import os"
    yield ""
    if run.method == "qlora" or (run.optimizer == "adamw-8bit" and not run.inference):
        yield "import bitsandbytes as bnb"
    yield "import torch"
    yield from sorted(_names_from(run))


def _names_from(run: ModelRun) -> Iterator[str]:
    yield f"from transformers import AutoConfig, {AUTO_CLASS[run.model.task]}"
    if run.method == "qlora" or run.sharded:
        yield "from accelerate import init_empty_weights"
    if run.method == "qlora":
        yield "from torch import nn"
    if run.method != "full" and not run.inference:
        more = ", prepare_model_for_kbit_training" if run.method == "qlora" else ""
        yield f"from peft import LoraConfig, get_peft_model{more}"
    if run.sharded:
        yield "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard"
    elif run.ranks > 1:
        yield "from torch.nn.parallel import DistributedDataParallel"
        if run.sharding == "zero1":
            yield "from torch.distributed.optim import ZeroRedundancyOptimizer"


def _options(run: ModelRun) -> Iterator[str]:
    yield "def options():"
    yield "    parser = argparse.ArgumentParser(description=__doc__)"
    yield _option("batch-size", "int", run.batch_size, "sequences on each GPU")
    if run.model.task != "images":
        what = "tokens of a prompt" if run.inference else "tokens of a sequence"
        yield _option("sequence-length", "int", run.tokens, what)
    if run.inference:
        if run.model.task in ("causal", "sequences", "speech"):
            yield _option("new-tokens", "int", run.new_tokens, "tokens to generate")
    else:
        if run.method != "full":
            yield _option("lora-rank", "int", run.lora_rank, "rank of the adapters")
        yield _option("learning-rate", "float", "1e-5" if run.method == "full" else "2e-4", "")
        yield _option("steps", "int", 1000, "optimizer steps")
    yield "    return parser.parse_args()"


def _option(name: str, kind: str, default: object, text: str) -> str:
    line = f'    parser.add_argument("--{name}", type={kind}, default={default}'
    return f'{line}, help="{text}")' if text else f"{line})"


# -- the model


_NEWEST: Final = (1_000_000, 0)


def _transformers() -> tuple[int, int]:
    """The version of transformers; if it is unknown, one after all others."""
    try:
        parts = metadata.version("transformers").split(".")
        return int(parts[0]), int(parts[1])
    except (metadata.PackageNotFoundError, ValueError, IndexError):
        return _NEWEST


def _dtype_argument() -> str:
    """The name of the argument for the dtype: transformers renamed ``torch_dtype`` in 4.56."""
    return "dtype" if _transformers() >= (4, 56) else "torch_dtype"


def _name_of_checkpointing() -> str:
    """What transformers calls it: it renamed ``gradient_checkpointing_enable`` in 5.23, and 6 will
    not have the old name.
    """
    renamed = _transformers() >= (5, 23)
    return "activation_checkpointing" if renamed else "gradient_checkpointing"


def _model(run: ModelRun) -> Iterator[str]:
    if run.method == "qlora":
        yield from _QUANTIZE
        yield "\n"
    yield "def build_model(args):"
    yield "    config = AutoConfig.for_model(**CONFIG)"
    if run.model.task == "causal" and not run.inference:
        yield "    config.use_cache = False  # of keys and values, for generation only"
    dtype = "torch.bfloat16" if run.method == "qlora" else _DTYPE[run.dtype]
    attention = f', attn_implementation="{run.attention}"' if run.attention else ""
    build = [
        f"model = {AUTO_CLASS[run.model.task]}.from_config(",
        f"    config, {_dtype_argument()}={dtype}{attention}",
        ")",
    ]
    if run.method == "qlora":
        yield "    # from_pretrained(..., quantization_config=...) does this with a checkpoint."
        yield '    with torch.device("cuda"), init_empty_weights(include_buffers=False):'
        yield from (f"        {line}" for line in build)
        yield "    quantize(model)"
        yield "    model.tie_weights()"
    elif run.sharded:
        yield "    # Parameters without memory: no rank ever holds the whole model."
        yield '    with torch.device("cuda"), init_empty_weights(include_buffers=False):'
        yield from (f"        {line}" for line in build)
    else:
        yield "    # from_pretrained(...) loads the weights of a checkpoint."
        yield '    with torch.device("cuda"):'
        yield from (f"        {line}" for line in build)
    if run.sharded:
        yield "    block_names = model._no_split_modules"
    if run.inference:
        yield "    return model.eval()"
        return
    yield from _checkpointing(run)
    yield from _adapters(run)
    yield from _distribution(run)
    yield "    return model.train()"


def _checkpointing(run: ModelRun) -> Iterator[str]:
    if run.checkpointing and run.method != "qlora":
        name = _name_of_checkpointing()
        yield f"    model.{name}_enable("
        yield f'        {name}_kwargs={{"use_reentrant": False}}'
        yield "    )"


def _adapters(run: ModelRun) -> Iterator[str]:
    if run.method == "full":
        return
    if run.method == "qlora":
        yield "    model.is_loaded_in_4bit = True"
        yield "    model = prepare_model_for_kbit_training("
        yield "        model,"
        yield f"        use_gradient_checkpointing={run.checkpointing},"
        yield '        gradient_checkpointing_kwargs={"use_reentrant": False},'
        yield "    )"
    targets = f'"{_ALL_LINEAR}"' if not run.lora_targets else _literal(list(run.lora_targets))
    yield "    adapters = LoraConfig("
    yield "        r=args.lora_rank,"
    yield "        lora_alpha=2 * args.lora_rank,"
    yield f"        target_modules={targets},"
    yield "    )"
    more = ", autocast_adapter_dtype=False" if run.sharded else ""
    yield f"    model = get_peft_model(model, adapters{more})"
    yield "    model.print_trainable_parameters()"


_ALL_LINEAR: Final = "all-linear"


def _distribution(run: ModelRun) -> Iterator[str]:
    if run.ranks == 1:
        return
    if not run.sharded:
        yield '    device = int(os.environ["LOCAL_RANK"])'
        yield "    model = DistributedDataParallel(model, device_ids=[device])"
        return
    keep = run.sharding != "zero2"
    dtype = "torch.bfloat16" if run.dtype == "bf16-mixed" else "None"
    yield f"    policy = MixedPrecisionPolicy(param_dtype={dtype}, reduce_dtype=torch.float32)"
    yield "    for module in list(model.modules()):"
    yield "        if type(module).__name__ in block_names:"
    yield f"            fully_shard(module, mp_policy=policy, reshard_after_forward={keep})"
    yield f"    fully_shard(model, mp_policy=policy, reshard_after_forward={keep})"
    yield "    # Load your shards of a checkpoint here, in place of empty ones."
    yield '    model._apply(lambda t: torch.empty_like(t, device="cuda") if t.is_meta else t)'


_QUANTIZE: Final = '''\
def quantize(model):
    """Put the parameters on the GPU, those of linear layers in 4 bits (NF4), except the head's."""
    head = model.get_output_embeddings()
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear) and layer is not head:
                setattr(module, name, quantized(layer))
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                empty = torch.empty_like(parameter, device="cuda")
                module._parameters[name] = nn.Parameter(empty, requires_grad=False)


def quantized(layer):
    """A 4-bit layer in place of a linear one. Only one layer at a time is on the GPU in bf16."""
    shape = layer.out_features, layer.in_features
    weight = torch.empty(shape, dtype=torch.bfloat16, device="cuda")  # the layer's weights
    new = bnb.nn.Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        compute_dtype=torch.bfloat16,
        quant_type="nf4",
        device="meta",
    )
    new.weight = bnb.nn.Params4bit(
        weight, requires_grad=False, quant_type="nf4", module=new
    ).to("cuda")
    return new'''.splitlines()


# -- training


def _batch(run: ModelRun) -> Iterator[str]:
    yield "def random_batch(args, config):"
    yield '    """A batch of random data, in place of one from your data loader."""'
    task = run.model.task
    if task == "images":
        yield from _images(run)
        yield "    labels = torch.randint("
        yield '        config.num_labels, (args.batch_size,), device="cuda"'
        yield "    )"
        yield '    return {"pixel_values": images, "labels": labels}'
        return
    yield "    shape = args.batch_size, args.sequence_length"
    yield '    tokens = torch.randint(config.vocab_size, shape, device="cuda")'
    if task == "speech":
        yield from _sound(run)
        yield '    return {"input_features": sound, "labels": tokens}'
    else:
        yield '    return {"input_ids": tokens, "labels": tokens}'


def _images(run: ModelRun) -> Iterator[str]:
    yield "    size = config.num_channels, config.image_size, config.image_size"
    yield f'    images = torch.rand(args.batch_size, *size, dtype={_input(run)}, device="cuda")'


def _sound(run: ModelRun) -> Iterator[str]:
    yield "    frames = 2 * config.max_source_positions  # 30 s of sound"
    yield "    sound = torch.rand("
    yield "        args.batch_size, config.num_mel_bins, frames,"
    yield f'        dtype={_input(run)}, device="cuda",'
    yield "    )"


def _input(run: ModelRun) -> str:
    return "torch.bfloat16" if run.method == "qlora" else _DTYPE[run.dtype]


def _train(run: ModelRun) -> Iterator[str]:
    yield "def main():"
    yield "    args = options()"
    if run.ranks > 1:
        yield '    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'
        yield '    torch.distributed.init_process_group("nccl")'
    yield "    model = build_model(args)"
    inner = "model.module" if run.ranks > 1 and not run.sharded else "model"
    yield f"    config = {inner}.config"
    yield "    parameters = [each for each in model.parameters() if each.requires_grad]"
    yield from _optimizer(run)
    yield "    for step in range(args.steps):"
    yield "        batch = random_batch(args, config)"
    forward = "loss = model(**batch).loss"
    if run.method == "qlora" or (run.dtype == "bf16-mixed" and not run.sharded):
        yield '        with torch.autocast("cuda", dtype=torch.bfloat16):'
        yield f"            {forward}"
    else:
        yield f"        {forward}"
    yield "        loss.backward()"
    yield "        optimizer.step()"
    yield "        optimizer.zero_grad()"
    if run.ranks > 1:
        yield "    torch.distributed.destroy_process_group()"


def _optimizer(run: ModelRun) -> Iterator[str]:
    if run.ranks == 1 or run.sharding != "zero1":
        yield f"    optimizer = {_OPTIMIZER[run.optimizer]}"
        return
    kind, _, rest = _OPTIMIZER[run.optimizer].partition("(parameters, ")
    yield "    optimizer = ZeroRedundancyOptimizer("
    yield f"        parameters, optimizer_class={kind}, {rest.removesuffix(')')}"
    yield "    )"


# -- inference


def _generate(run: ModelRun) -> Iterator[str]:
    task = run.model.task
    yield "@torch.inference_mode()"
    yield "def generate(args, model):"
    yield "    config = model.config"
    if task == "images":
        yield from _images(run)
        yield "    model(pixel_values=images)"
        return
    yield "    shape = args.batch_size, args.sequence_length"
    yield '    tokens = torch.randint(config.vocab_size, shape, device="cuda")  # the prompt'
    if task == "masked":
        yield "    model(input_ids=tokens)"
    elif task == "causal":
        yield "    # Prefill: the whole prompt. Only the last position's logits are needed."
        yield "    output = model(input_ids=tokens, use_cache=True, logits_to_keep=1)"
        yield from _decode("input_ids=token, past_key_values=output.past_key_values")
    else:
        if task == "speech":
            yield from _sound(run)
            yield "    encoded = model.get_encoder()(sound)"
        else:
            yield "    encoded = model.get_encoder()(input_ids=tokens)"
        yield "    start = tokens[:, :1]"
        yield "    output = model("
        yield "        encoder_outputs=encoded, decoder_input_ids=start, use_cache=True"
        yield "    )"
        yield from _decode(
            "encoder_outputs=encoded, decoder_input_ids=token, "
            "past_key_values=output.past_key_values"
        )


_MAIN: Final = [
    "def main():",
    "    args = options()",
    "    generate(args, build_model(args))",
]


def _decode(arguments: str) -> Iterator[str]:
    yield "    # Decode: one token at a time, with the cached keys and values of those before it."
    yield "    for _ in range(args.new_tokens):"
    yield "        token = output.logits[:, -1:].argmax(-1)"
    yield "        output = model("
    yield f"            {arguments}, use_cache=True"
    yield "        )"
