"""The replaced functions of torch and Python in the script's process, one row each, hidden from torch.compile.

When torch.compile traces a function that calls one of ours, it traces the original, so the graph is that of a run
without check; torch.compiler tells which case it is, without importing its compiler. When it runs one of ours, it skips
that frame and all of check's frames below.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch

OURS = (  # modules whose functions the script's calls reach
    "distlab.tools.check.", "distlab.tools.prove.", "distlab.lab.measure.",
)  # fmt: skip

Function = Callable[..., Any]


class Patch(NamedTuple):
    """Replace an attribute of an object or module by `around(function, *args, **named)`; if `traced`, torch.compile
    sees it too."""

    holder: Any
    name: str
    around: Function
    traced: bool = False


def put(*patches: Patch) -> None:
    """Apply all patches."""
    for holder, name, around, traced in patches:
        replacement = in_place_of(getattr(holder, name), around, traced)
        static = isinstance(inspect.getattr_static(holder, name), staticmethod)
        setattr(holder, name, staticmethod(replacement) if static else replacement)


def in_place_of(function: Function, around: Function, traced: bool = False) -> Function:
    @functools.wraps(function)
    def replaced(*args: Any, **named: Any) -> Any:
        if not traced and torch.compiler.is_compiling():
            return function(*args, **named)
        return around(function, *args, **named)

    return replaced


def before(observe: Function) -> Function:
    """Return the function preceded by a call of `observe` with its arguments."""

    def observed(function: Function, *args: Any, **named: Any) -> Any:
        observe(*args, **named)
        return function(*args, **named)

    return observed


def after(observe: Function) -> Function:
    """Return the function followed by a call of `observe` with its result and arguments."""

    def observed(function: Function, *args: Any, **named: Any) -> Any:
        result = function(*args, **named)
        observe(result, *args, **named)
        return result

    return observed


def hook(observe: Function) -> Function:
    """Return a hook for torch that torch.compile ignores."""
    return in_place_of(lambda *_, **__: None, lambda _, *args, **named: observe(*args, **named))


def step_hook(observe: Function) -> Function:
    """Return a pre-hook for `optimizer.step` that calls `observe(optimizer)` once gradients are there: after the first
    call of the closure if the step is given one (Lightning gives one), else at once."""

    def before_step(optimizer: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        closure = named.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            observe(optimizer)
            return None
        called = list[bool]()

        def evaluated() -> Any:
            loss = closure()
            if not called:
                called.append(True)
                observe(optimizer)
            return loss

        return (
            (args, {**named, "closure": evaluated}) if "closure" in named else ((args[0], evaluated, *args[2:]), named)
        )

    return hook(before_step)


def harmless(observe: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method of an object with a recorder so that its exceptions are only reported."""

    @functools.wraps(observe)
    def guarded(observer: Any, *args: Any, **named: Any) -> None:
        with observer.recorder.reporting_errors(observe.__name__):
            observe(observer, *args, **named)

    return guarded


def leave_uncompiled() -> None:
    """Make torch.compile skip the frames of all current functions of check, and those below. Nested functions may
    replace others, whose own calls must be compiled as usual."""
    dynamo: Any = torch._C._dynamo.eval_frame
    skip, as_ever = dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT
    for name, module in list(sys.modules.items()):
        if name.startswith(OURS):
            for function in functions_of(vars(module).values(), name):
                dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip))
                for code in codes_in(function.__code__):
                    dynamo.set_code_exec_strategy(code, dynamo._FrameExecStrategy(skip, as_ever))


def functions_of(values: Iterable[Any], module: str) -> Iterator[FunctionType]:
    """Yield the functions among these that a module defines, and its classes' methods."""
    for value in values:
        function = getattr(value, "fget", None) or inspect.unwrap(getattr(value, "__func__", value))
        if isinstance(value, type) and value.__module__ == module:
            yield from functions_of(vars(value).values(), module)
        elif isinstance(function, FunctionType) and function.__module__ == module:
            yield function


def codes_in(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from codes_in(each)
