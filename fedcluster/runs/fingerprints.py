"""Fingerprints of a user's own code, so that a run is not resumed with another function of the same name."""

import functools
import inspect
from hashlib import sha256
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from fedcluster.experiment import import_object
from fedcluster.models.pretrained import is_pretrained


def is_own(thing: Any) -> bool:
    """Whether the value of a key is a user's own code, not one of fedcluster's names."""
    return not isinstance(thing, str) or (":" in thing and not is_pretrained(thing))


def digest(thing: Any) -> str:
    """The digest of a function, a class, an object (by its class), or of what `package.module:name` stands for.

    It covers the source (of a torch module, also that of its layers), default arguments, plain values in closures, and
    functions and classes of the same Python module that it uses. Without source, as for code typed at a prompt, the
    bytecode is used.
    """
    parts = list[str]()
    describe(import_object(thing) if isinstance(thing, str) else thing, parts, set())
    return sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()


def describe(thing: Any, parts: list[str], seen: set[int]) -> None:
    if isinstance(thing, (FunctionType, type)):
        if id(thing) in seen:
            return
        seen.add(id(thing))
    if isinstance(thing, functools.partial):
        describe((thing.func, *thing.args, *thing.keywords.items()), parts, seen)
    elif isinstance(thing, tuple):
        for part in thing:
            describe(part, parts, seen)
    elif isinstance(thing, (staticmethod, classmethod)) or inspect.ismethod(thing):
        describe(thing.__func__, parts, seen)
    elif isinstance(thing, FunctionType):
        parts.append(source(thing))
        cells = [cell.cell_contents for cell in thing.__closure__ or () if has_content(cell)]
        describe((thing.__defaults__, *(thing.__kwdefaults__ or {}).items(), *cells), parts, seen)
        for name in names(thing.__code__):
            used = thing.__globals__.get(name)
            if isinstance(used, (FunctionType, type)) and used.__module__ == thing.__module__:
                describe(used, parts, seen)
    elif isinstance(thing, type):
        if thing.__module__.split(".")[0] in ("builtins", "torch", "fedcluster"):
            parts.append(f"{thing.__module__}:{thing.__qualname__}")
            return
        parts.append(source(thing))
        for value in (*thing.__bases__, *vars(thing).values()):
            if isinstance(value, (FunctionType, type, staticmethod, classmethod)):
                describe(value, parts, seen)
    elif isinstance(thing, nn.Module):
        parts.append(repr(thing))
        for module in thing.modules():
            describe(type(module), parts, seen)
    elif thing is None or isinstance(thing, (bool, int, float, complex, str, bytes)):
        parts.append(repr(thing))
    else:
        describe(type(thing), parts, seen)


def source(thing: Any) -> str:
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return compiled(thing.__code__) if isinstance(thing, FunctionType) else str(thing.__qualname__)


def compiled(code: CodeType) -> str:
    constants = [compiled(one) if isinstance(one, CodeType) else plain(one) for one in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def plain(constant: Any) -> str:
    return str(sorted(map(repr, constant))) if isinstance(constant, frozenset) else repr(constant)


def names(code: CodeType) -> list[str]:
    """All names that the code looks up, also in functions inside it."""
    inner = [name for one in code.co_consts if isinstance(one, CodeType) for name in names(one)]
    return [*code.co_names, *inner]


def has_content(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # not filled yet
        return False
