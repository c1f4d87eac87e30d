"""Scripts that run on the native engine from their start: torch's CUDA code, without a GPU."""

from __future__ import annotations

import os
import sys

from gpuprobe.catalogue.gpus import parse_spec
from gpuprobe.native.libraries import libraries_for, torch_build
from gpuprobe.native.process import add_to_environment, loaded, settings_text


def restart(gpu: str) -> None:
    """Start this script again in a process that has the native engine before it imports torch,
    where torch is a build with CUDA. Call it before that import.
    """
    build = torch_build()
    if build is None or not build.cuda or loaded():
        return
    settings = settings_text(parse_spec(gpu), build)
    add_to_environment(os.environ, libraries_for(build), settings, build)
    os.execv(sys.executable, [sys.executable, *sys.argv])
