"""What torch.load put on the GPU, and the program keeps after it has copied it."""

from __future__ import annotations

from gpuprobe.causes.answer import Answer, EditKind
from gpuprobe.causes.groups import HeldGroup
from gpuprobe.causes.wording import kept_in
from gpuprobe.model.run.holders import Holder
from gpuprobe.model.text import human_bytes

_LOADS = ("torch/serialization.py", "safetensors/torch.py")


def diagnose(group: HeldGroup) -> Answer | None:
    """Tensors of a file, that are not used again once they have been copied."""
    main = group.main
    if not any(name.endswith(_LOADS) for name in main.file_names):
        return None
    return Answer(
        "loaded-file",
        f"{human_bytes(group.bytes)} were loaded onto the GPU at {main.made_at} and copied from "
        f"there{_kept(group.holder)}",
        'load the file onto the CPU (map_location="cpu"), or delete what was loaded once it is '
        "copied",
        code='torch.load(file, map_location="cpu")',
        edit=EditKind.MAP_LOCATION,
    )


def _kept(holder: Holder | None) -> str:
    return "" if holder is None else f"; {kept_in(holder)} still holds them"
