"""The use cases, one function each. The CLI, the TUI and plugins call only these.

A package rather than one file: each submodule holds the functions of one use case and imports
only what it needs. Import them from there (``from gpuprobe.api.recordings import load``);
the public ones are also names of `gpuprobe` itself.
"""

from gpuprobe.model.values import draw_with


def _draw(value: object) -> str:
    from gpuprobe.api.views import html_of

    return html_of(value)


def _write(value: object) -> str:
    from gpuprobe.api.views import text_of

    return text_of(value)


draw_with(_draw, _write)
