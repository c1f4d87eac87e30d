"""Where gpuprobe holds on to torch: optimizer hooks, the autograd engine, DataLoader, modules.

Each hook only reports what begins and ends; the `Listener` decides what it means.
`Hooks.remove` puts everything back.

``torch.compile`` guards on a module's hooks: one that comes or goes makes it compile again. So
as soon as the program asks for compilation, every module hook is taken out, and the forward
phase is inferred. The other hooks stay: inside code that is being traced they are empty
(``torch.compiler.is_compiling()`` is a constant there) and add no graph break.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch

from gpuprobe.sampler import recompute
from gpuprobe.sampler.discover import compile_in_use, live_roots

__all__ = ["Hooks", "Listener"]


class Listener(Protocol):
    """What happens in the program. No method may raise."""

    def begin(self, phase: str) -> None: ...
    def end(self, phase: str) -> None: ...
    def optimizer_begins(self, optimizer: Any) -> None: ...
    def optimizer_ends(self, optimizer: Any) -> None: ...
    def found_models(self, models: list[Any]) -> None: ...
    def module_begins(self, module: Any) -> None: ...
    def module_ends(self, module: Any) -> None: ...
    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...
    def loaded(self, batch: Any) -> None: ...
    def forward_done(self, module: Any) -> None: ...
    def compiles(self) -> None: ...
    def fault(self, error: Exception) -> None: ...


class Hooks:
    """All hooks of one recorder. Made active by `install`, inactive by `remove`."""

    def __init__(self, listener: Listener, models: list[Any] | None = None) -> None:
        self._listener = listener
        self._models = models
        self._handles: list[Any] = []
        self._module_handles: list[Any] = []
        self._compiles = False
        self._restore: list[Callable[[], None]] = []
        self._first_call: Any = None
        self._hooked: set[int] = set()

    def install(self, *, every_module: bool = False) -> None:
        """Hook into torch. ``every_module``: report each module call (level ``trace``)."""
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        self._handles.append(register_optimizer_step_pre_hook(self._before_step))
        self._handles.append(register_optimizer_step_post_hook(self._after_step))
        self._wrap(torch.autograd, "_engine_run_backward", "backward")
        self._wrap(torch.utils.data.dataloader._BaseDataLoaderIter, "__next__", "data")
        self._restore += recompute.watch(self._listener)
        self._watch_for_compile(torch)
        self._watch_for_compile(torch.nn.Module)
        if compile_in_use():
            self._compile_seen()
        elif self._models is not None:
            self.watch(self._models)
        else:
            from torch.nn.modules.module import register_module_forward_pre_hook

            self._first_call = register_module_forward_pre_hook(self._on_first_call)
        if every_module and not self._compiles:
            self._install_module_hooks()

    def remove(self) -> None:
        """Take every hook out again. Safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._remove_module_hooks()
        while self._restore:
            self._restore.pop()()

    def watch(self, models: list[Any]) -> None:
        """Report the forward pass of these modules as a phase."""
        if self._compiles:
            return
        for model in models:
            if id(model) in self._hooked or isinstance(model, torch.jit.ScriptModule):
                continue
            self._hooked.add(id(model))
            self._module_handles.append(
                model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
            )
            # always_call: a forward that raises ends its phase too.
            self._handles.append(model.register_forward_hook(self._after_forward, always_call=True))

    def look_again(self) -> None:
        """Look for models that were made since the last look."""
        if self._models is None:  # the first call may still tell: a root need not be called
            self._found(live_roots())

    def _wrap(self, owner: Any, name: str, phase: str) -> None:
        """Put a function around ``owner.name`` that reports the phase it stands for."""
        original = getattr(owner, name)
        listener = self._listener

        def reported(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            listener.begin(phase)
            try:
                result = original(*args, **kwargs)
            finally:
                listener.end(phase)
            if phase == "data":
                listener.loaded(result)
            return result

        reported.__wrapped__ = original  # type: ignore[attr-defined]
        self._replace(owner, name, reported)

    def _watch_for_compile(self, owner: Any) -> None:
        """Notice ``owner.compile`` being called, before it does anything."""
        original = owner.compile

        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            self._compile_seen()
            return original(*args, **kwargs)

        self._replace(owner, "compile", compile)

    def _compile_seen(self) -> None:
        if not self._compiles:
            self._compiles = True
            self._remove_module_hooks()
            self._listener.compiles()

    def _remove_module_hooks(self) -> None:
        self._forget_first_call()
        for handle in self._module_handles:
            handle.remove()
        self._module_handles.clear()
        self._hooked.clear()

    def _replace(self, owner: Any, name: str, replacement: Any) -> None:
        original = getattr(owner, name)
        setattr(owner, name, replacement)

        def restore() -> None:
            # Someone may have wrapped it again since: then theirs must stay, and ours inside
            # it only passes calls on, because the listener has been switched off.
            if getattr(owner, name) is replacement:
                setattr(owner, name, original)

        self._restore.append(restore)

    def _install_module_hooks(self) -> None:
        from torch.nn.modules.module import (
            register_module_forward_hook,
            register_module_forward_pre_hook,
        )

        self._module_handles.append(register_module_forward_pre_hook(self._before_module))
        self._module_handles.append(
            register_module_forward_hook(self._after_module, always_call=True)
        )

    # Hooks proper. Each returns None: it changes neither arguments nor results.

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._listener.optimizer_begins(optimizer)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._listener.optimizer_ends(optimizer)

    def _before_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._listener.begin("forward")
            self._listener.inputs(args, kwargs)

    def _after_forward(self, module: Any, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._listener.end("forward")
            self._listener.forward_done(module)

    def _before_module(self, module: Any, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._listener.module_begins(module)

    def _after_module(self, module: Any, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._listener.module_ends(module)

    def _on_first_call(self, module: Any, args: Any) -> None:
        """The first module called is a whole model. Find all of them, then get out of the way.

        torch collects the hooks it will call before it calls the first of them, so those
        installed here fire from the next call on; this call is reported here.
        """
        if torch.compiler.is_compiling():
            return
        self._forget_first_call()
        try:
            self._first_called(module, args)
        except Exception as error:  # noqa: BLE001 - the program's own code called us
            self._listener.fault(error)

    def _first_called(self, module: Any, args: Any) -> None:
        known = id(module) in self._hooked  # then its own hook reports this call, too
        roots = live_roots()
        self._found(roots)
        # A program may call a part of its model directly: then that part is what to watch.
        if all(module is not root for root in roots):
            self.watch([module])
        if id(module) in self._hooked and not known:
            # The module's own post hook is registered by now and will end the phase.
            self._listener.begin("forward")
            self._listener.inputs(args, {})

    def _found(self, roots: list[Any]) -> None:
        self._listener.found_models(roots)
        self.watch(roots)

    def _forget_first_call(self) -> None:
        if self._first_call is not None:
            with contextlib.suppress(KeyError):
                self._first_call.remove()
            self._first_call = None
