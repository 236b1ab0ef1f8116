"""What of torch and of Python is replaced in the script's process, each by one row; and what torch.compile sees of it:
nothing.

Where it traces a function that calls one of ours, it traces the one that ours stands for, so the graph is that of a run
without check; that is asked of torch.compiler, which is there without its compiler. Where it runs one of ours instead,
it leaves its frame and those of all that it calls of check alone.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch

OURS = (  # modules whose functions are called from the script's calls
    "distlab.tools.check.", "distlab.tools.prove.", "distlab.lab.measure.",
)  # fmt: skip

Function = Callable[..., Any]


class Patch(NamedTuple):
    """`around(function, *args, **named)` is called in the place of what an object or a module has by this name; with
    `traced` torch.compile sees it too."""

    holder: Any
    name: str
    around: Function
    traced: bool = False


def put(*patches: Patch) -> None:
    """Put each in its place."""
    for holder, name, around, traced in patches:
        made = in_place_of(getattr(holder, name), around, traced)
        static = isinstance(inspect.getattr_static(holder, name), staticmethod)
        setattr(holder, name, staticmethod(made) if static else made)


def in_place_of(function: Function, around: Function, traced: bool = False) -> Function:
    @functools.wraps(function)
    def either(*args: Any, **named: Any) -> Any:
        if not traced and torch.compiler.is_compiling():
            return function(*args, **named)
        return around(function, *args, **named)

    return either


def before(look: Function) -> Function:
    """The same function, whose arguments `look` is told first."""

    def both(function: Function, *args: Any, **named: Any) -> Any:
        look(*args, **named)
        return function(*args, **named)

    return both


def after(look: Function) -> Function:
    """The same function, whose result and arguments `look` is told."""

    def both(function: Function, *args: Any, **named: Any) -> Any:
        result = function(*args, **named)
        look(result, *args, **named)
        return result

    return both


def hook(look: Function) -> Function:
    """What is given to torch to be called, and is nothing for torch.compile."""
    return in_place_of(lambda *_, **__: None, lambda _, *args, **named: look(*args, **named))


def harmless(look: Callable[..., None]) -> Callable[..., None]:
    """The same method of what has a recorder; its exceptions are told."""

    @functools.wraps(look)
    def tried(watch: Any, *args: Any, **named: Any) -> None:
        with watch.recorder.telling_what_fails(look.__name__):
            look(watch, *args, **named)

    return tried


def leave_uncompiled() -> None:
    """Let torch.compile skip the frames of all functions of check that are there now, and those of what they call. What
    a function has inside of it may be what stands for another one, whose own calls are to be compiled as ever."""
    dynamo: Any = torch._C._dynamo.eval_frame
    skip, as_ever = dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT
    for name, module in list(sys.modules.items()):
        if name.startswith(OURS):
            for function in functions_of(vars(module).values(), name):
                dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip))
                for code in codes_in(function.__code__):
                    dynamo.set_code_exec_strategy(code, dynamo._FrameExecStrategy(skip, as_ever))


def functions_of(values: Iterable[Any], module: str) -> Iterator[FunctionType]:
    """Those among these that a module has written, and the methods of its classes."""
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
