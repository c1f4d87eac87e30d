"""Settings of torch's allocator as remedies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gpuprobe.allocator.settings import merged_conf, parse_conf
from gpuprobe.errors import ConfigError
from gpuprobe.remedies.text import Refusal, Refused

_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The first that is set counts."""


@dataclass(frozen=True)
class AllocatorSetting:
    """Settings such as ``expandable_segments:True``, in addition to those of the environment."""

    conf: str

    def environment(self, current: Mapping[str, str]) -> dict[str, str] | Refused:
        """The variables to set: with all other settings of ``current``."""
        name = next((one for one in _NAMES if current.get(one)), _NAMES[1])
        before = current.get(name, "")
        try:
            after = merged_conf(before, self.conf)
            if replace(parse_conf(after), conf="") == replace(parse_conf(before), conf=""):
                return Refused(Refusal.DONE_ALREADY, before)
        except ConfigError as error:
            return Refused(Refusal.INVALID, str(error))
        return {name: after}
