"""Hooks into torch: optimizers, the autograd engine, checkpointing, DataLoader, modules.

Each hook only reports what begins and ends; the `Listener` decides what it means.
`Hooks.remove` removes all of them.

Nothing is attached to the program's own modules: what is copied with `copy.deepcopy` or pickled
with `torch.save` takes its hooks along. So models are recorded in the ``__call__`` of their
classes. A part of a model (``model.module`` of `DistributedDataParallel`, ``model.encoder`` in a
method of the model) is reported if no reported call is around it: for the others this is a look-up,
and layers of torch, which are most calls of modules, have no wrapped class.

``torch.compile`` guards on a module's hooks: adding or removing one makes it compile again. So as
soon as the program calls it, every module hook is removed, and the forward phase is inferred. The
other hooks stay: inside code that is being traced they are empty (``torch.compiler.is_compiling()``
is a constant there) and add no graph break. ``torch.export`` refuses any module hook
(``strict=True``): there are none while it runs.

``torch.utils.checkpoint`` runs a module's forward again in one of two ways: with the saved-tensor
hooks of ``use_reentrant=False`` (a `_recomputation_hook` is entered around it), or in the backward
of an autograd function with ``use_reentrant=True``, which then starts a backward pass inside the
backward pass. Both are Python, so both can be reported as a phase named ``recompute``.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn import Module
from torch.utils import checkpoint

from gpuprobe.clocks import monotonic
from gpuprobe.patching import patch
from gpuprobe.recursion import count_here
from gpuprobe.sampler.failures import from_program
from gpuprobe.sampler.hooks.discover import ModelPart, compile_in_use, live_roots, parts_of
from gpuprobe.sampler.tracing.tensors import named_modules
from gpuprobe.torch_support import compile_watch, compiled_code

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

RECOMPUTE = "recompute"
"""The phase, inside ``backward``, in which a checkpointed forward is recomputed."""


class _Phases(Protocol):
    def begin(self, phase: str) -> None: ...
    def end(self, phase: str) -> None: ...


Restore = Callable[[], None]


def watch_checkpoints(listener: _Phases) -> list[Restore]:
    """Report recomputation to ``listener``; returns functions that restore torch.

    A torch without these (private) names is not changed: then recomputation is part of the backward
    phase.
    """
    restore: list[Restore] = []
    hook = getattr(checkpoint, "_recomputation_hook", None)
    if hook is not None:
        restore += _wrap_recomputation_hook(listener, hook)
    function = getattr(checkpoint, "CheckpointFunction", None)
    if function is not None:
        restore.append(_wrap_checkpoint_function(listener, function))
    return restore


def in_engine() -> bool:
    """Whether this thread is running a backward pass: the thread that started it, or one of the
    autograd engine's threads, one for each device.
    """
    return bool(torch._C._current_graph_task_id() != -1)


def _wrap_recomputation_hook(listener: _Phases, hook: Any) -> list[Restore]:
    enter, leave = hook.__enter__, hook.__exit__

    @functools.wraps(enter)
    def entered(self: Any) -> Any:
        if torch.compiler.is_compiling():
            return enter(self)
        listener.begin(RECOMPUTE)
        try:
            return enter(self)
        except BaseException:
            listener.end(RECOMPUTE)
            raise

    @functools.wraps(leave)
    def left(self: Any, *error: Any) -> Any:
        if torch.compiler.is_compiling():
            return leave(self, *error)
        try:
            return leave(self, *error)
        finally:
            listener.end(RECOMPUTE)

    return [patch(hook, "__enter__", entered), patch(hook, "__exit__", left)]


def _wrap_checkpoint_function(listener: _Phases, function: Any) -> Restore:
    original = function.backward

    @functools.wraps(original)
    def backward(ctx: Any, *gradients: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(ctx, *gradients)
        listener.begin(RECOMPUTE)
        try:
            return original(ctx, *gradients)
        finally:
            listener.end(RECOMPUTE)

    return patch(function, "backward", staticmethod(backward))


SEARCHES = 8
"""Searches at new optimizers that are made immediately. After them, searching takes two percent of
the time: it visits all objects of the process."""


class Listener(Protocol):
    """What happens in the program. No method may raise."""

    def begin(self, phase: str, *, evaluation: bool = False) -> None: ...
    def end(self, phase: str) -> None: ...
    def optimizer_begins(self, optimizer: Optimizer, caller: FrameType) -> None: ...
    def optimizer_ends(self, optimizer: Optimizer) -> None: ...
    def found_models(self, models: list[Module]) -> None: ...
    def module_begins(self, module: Module) -> None: ...
    def module_ends(self, module: Module) -> None: ...
    def inputs(
        self, module: Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None: ...
    def outputs(self, result: object) -> None: ...
    def loaded(self, batch: object) -> None: ...
    def forward_done(self, module: Module) -> None: ...
    def compiles(self) -> None: ...
    def fault(self, error: Exception) -> None: ...


class _Running(threading.local):
    """The calls of models in progress in this thread that are reported."""

    calls = 0


class Hooks:
    """All hooks of one recorder. Made active by `install`, inactive by `remove`."""

    def __init__(self, listener: Listener, models: list[Module] | None = None) -> None:
        self._listener = listener
        self._models = models
        self._handles: list[RemovableHandle] = []
        self._module_handles: list[RemovableHandle] = []
        self._compiles = False
        self._exports = 0  # calls of torch.export in progress
        self._searches = 0
        self._next = 0.0  # time of the next search, on the monotonic clock
        self._restore: list[Callable[[], None]] = []
        self._every_module = False
        self._first_call: RemovableHandle | None = None
        self._awaits_first_call = False
        self._models_by_id: dict[int, weakref.ref[Module]] = {}  # by id
        self._parts_by_id: dict[int, ModelPart] = {}
        self._running = _Running()
        self._restore_class: dict[type, Callable[[], None]] = {}  # by class
        self._first: Module | None = None  # the module of the first call, until it returns
        self._first_return: RemovableHandle | None = None
        self._handled: BaseException | None = None  # being handled when the first call began

    def install(self, *, every_module: bool = False) -> None:
        """Add the hooks. ``every_module``: report each module call (level ``trace``)."""
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        self._handles.append(register_optimizer_step_pre_hook(self._before_step))
        self._handles.append(register_optimizer_step_post_hook(self._after_step))
        self._wrap(torch.autograd, "_engine_run_backward", "backward")
        self._wrap(torch.utils.data.dataloader._BaseDataLoaderIter, "__next__", "data")
        self._restore += watch_checkpoints(self._listener)
        self._wrap_compile(torch)
        self._wrap_compile(torch.nn.Module)
        for name in ("export", "export_for_training"):
            if hasattr(torch.export, name):
                self._no_hooks_during(torch.export, name)
        self._restore.append(compile_watch.start())
        self._every_module = every_module
        if every_module:
            self._restore.append(compiled_code.search_with(self._named_modules))
        if compile_in_use():
            self._compile_called()
            return
        self._awaits_first_call = self._models is None
        if self._models is not None:
            self.watch(self._models)
        self._install_module_hooks()

    def remove(self) -> None:
        """Remove every hook. Safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._forget_first_return()
        self._remove_module_hooks()
        self._models_by_id.clear()
        self._parts_by_id.clear()
        while self._restore:
            self._restore.pop()()

    def watch(self, models: list[Module]) -> None:
        """Report the forward pass of these modules as a phase."""
        if self._compiles:
            return
        by_id, parts = self._models_by_id, self._parts_by_id
        for key in [key for key, ref in by_id.items() if ref() is None]:
            del by_id[key]  # another module may have that id now
        for key in [key for key, part in parts.items() if part.module() is None]:
            del parts[key]
        for model in models:
            if not isinstance(model, torch.jit.ScriptModule):
                by_id[id(model)] = weakref.ref(model)
                parts.update(parts_of(model))
        if not self._exports:
            self._wrap_classes()

    def _reports(self, module: Module) -> bool:
        ref = self._models_by_id.get(id(module))
        return ref is not None and ref() is module

    def _part(self, module: Module) -> ModelPart | None:
        part = self._parts_by_id.get(id(module))
        return part if part is not None and part.module() is module else None

    def _trains(self, module: Module) -> bool:
        """Whether a call is one of training, by the mode of the module and of its model."""
        part = self._part(module)
        return module.training if part is None else part.training

    def _wrap_classes(self) -> None:
        """Wrap the calls of the classes of the models. A class is wrapped together with the one
        that it derives from, so that a call is reported once.
        """
        parts = (part.module for part in self._parts_by_id.values())
        kinds = {type(one()) for one in chain(self._models_by_id.values(), parts)}
        for kind in sorted(kinds - {type(None)}, key=lambda kind: len(kind.__mro__)):
            if self._restore_class.keys().isdisjoint(kind.__mro__):
                for derived in [one for one in self._restore_class if issubclass(one, kind)]:
                    self._restore_class.pop(derived)()
                self._restore_class[kind] = self._wrap_calls(kind)

    def _wrap_calls(self, kind: type[Module]) -> Callable[[], None]:
        own = vars(kind).get("__call__")
        listener, running = self._listener, self._running

        @functools.wraps(kind.__call__)
        def call(module: Module, *args: Any, **kwargs: Any) -> Any:
            # Resolved at each call: what replaces torch.nn.Module.__call__ meanwhile comes first.
            original: Any = partial(own, module) if own is not None else None
            if original is None:
                original = super(kind, module).__call__  # type: ignore[misc]
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            count = count_here()
            if count is not None:  # a program may recurse as deep as without this frame
                count.forget(1)
            try:
                whole = self._reports(module)
                if not whole:
                    part = self._part(module)
                    # What is around a call of a part reports it, or is a backward pass, which
                    # recomputes.
                    if part is None or running.calls or in_engine():
                        return original(*args, **kwargs)
                    whole = part.whole
                if self._first is None:
                    self._forget_first_return()  # it belongs to a first call that raised
                running.calls += 1
                listener.begin("forward", evaluation=not self._trains(module))
                try:
                    if whole:
                        listener.inputs(module, args, kwargs)
                    result = original(*args, **kwargs)
                    listener.outputs(result)
                    return result
                finally:  # a forward that raises ends its phase too
                    running.calls -= 1
                    listener.end("forward")
                    if whole:
                        listener.forward_done(module)
            finally:
                if count is not None:
                    count.forget(-1)

        return patch(kind, "__call__", call)

    def search_again(self) -> None:
        """Search for models that were created since the last time. In a program that creates
        optimizers all the time, this takes a small part of the time (`SEARCHES`).
        """
        if self._models is not None or (self._searches >= SEARCHES and monotonic() < self._next):
            return
        started = monotonic()
        self._searches += 1
        self._found(live_roots())  # the first call may find more: a root is not always called
        ended = monotonic()
        self._next = ended + 50 * (ended - started)

    def _wrap(self, owner: Any, name: str, phase: str) -> None:
        """Wrap ``owner.name`` in a function that reports the phase."""
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
        self._restore.append(patch(owner, name, reported))

    def _wrap_compile(self, owner: Any) -> None:
        """Detect calls of ``owner.compile``, before they do anything."""
        original = owner.compile

        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            self._compile_called()
            return original(*args, **kwargs)

        self._restore.append(patch(owner, "compile", compile))

    def _compile_called(self) -> None:
        if not self._compiles:
            self._compiles = True
            self._remove_module_hooks()
            self._models_by_id.clear()
            self._parts_by_id.clear()
            self._listener.compiles()

    def _no_hooks_during(self, owner: Any, name: str) -> None:
        """Remove module hooks while ``owner.name`` runs."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._exports += 1
            self._remove_module_hooks()
            try:
                return original(*args, **kwargs)
            finally:
                self._exports -= 1
                if self._restore and not (self._exports or self._compiles):
                    self._install_module_hooks()

        self._restore.append(patch(owner, name, call))

    def _remove_module_hooks(self) -> None:
        self._forget_first_call()
        if self._first is None:
            self._forget_first_return()
        for handle in self._module_handles:
            handle.remove()
        self._module_handles.clear()
        while self._restore_class:
            self._restore_class.popitem()[1]()

    def _install_module_hooks(self) -> None:
        from torch.nn.modules.module import (
            register_module_forward_hook,
            register_module_forward_pre_hook,
        )

        self._wrap_classes()
        if self._awaits_first_call:
            self._first_call = register_module_forward_pre_hook(self._on_first_call)
        if not self._every_module:
            return
        self._module_handles.append(register_module_forward_pre_hook(self._before_module))
        self._module_handles.append(
            register_module_forward_hook(self._after_module, always_call=True)
        )

    # The hooks. Each returns None: it changes neither arguments nor results.

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if not torch.compiler.is_compiling():
            self._listener.optimizer_begins(optimizer, sys._getframe(1))

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if not torch.compiler.is_compiling():
            self._listener.optimizer_ends(optimizer)

    def _before_module(self, module: Module, args: tuple[object, ...]) -> None:
        if not torch.compiler.is_compiling():
            self._listener.module_begins(module)

    def _after_module(self, module: Module, args: Any, output: object) -> None:
        if not torch.compiler.is_compiling():
            self._listener.module_ends(module)

    def _on_first_call(self, module: Module, args: tuple[object, ...]) -> None:
        """Handle the call of the first module, which is a whole model: find all models.

        torch collects the hooks it will call before it calls the first of them, so those installed
        here apply from the next call on; this call is reported here.
        """
        if torch.compiler.is_compiling():
            return
        self._awaits_first_call = False
        self._forget_first_call()
        try:
            self._first_called(module, args)
        except Exception as error:  # the program's own code called this hook
            if from_program(error):
                raise
            self._listener.fault(error)

    def _first_called(self, module: Module, args: tuple[object, ...]) -> None:
        from torch.nn.modules.module import register_module_forward_hook

        known = self._reports(module)  # then this call is already reported
        roots = live_roots()
        self._found(roots)
        # A program may call a submodule of its model directly: then that submodule is reported.
        if all(module is not root for root in roots):
            self.watch([module])
        if self._reports(module) and not known:
            self._first = module
            self._handled = sys.exc_info()[1]
            self._first_return = register_module_forward_hook(
                self._first_returned, always_call=True
            )
            self._running.calls += 1
            self._listener.begin("forward", evaluation=not self._trains(module))
            self._listener.inputs(module, args, {})

    def _first_returned(self, module: Module, args: Any, output: object) -> None:
        """The first call returned. A hook on the module itself would be copied with the module."""
        if module is not self._first:
            return
        self._first = None
        self._running.calls -= 1
        # If forward raised, torch is iterating over the hooks that contain this one.
        if sys.exc_info()[1] is self._handled:
            self._forget_first_return()
        self._handled = None
        self._listener.outputs(output)
        self._listener.end("forward")
        self._listener.forward_done(module)

    def _forget_first_return(self) -> None:
        if self._first_return is not None:
            self._first_return.remove()
            self._first_return = None

    def _named_modules(self) -> Iterator[tuple[str, Module]]:
        roots = live_roots() if self._models is None else self._models
        return chain.from_iterable(map(named_modules, roots))

    def _found(self, roots: list[Module]) -> None:
        self._listener.found_models(roots)
        self.watch(roots)

    def _forget_first_call(self) -> None:
        if self._first_call is not None:
            with contextlib.suppress(KeyError):
                self._first_call.remove()
            self._first_call = None
