"""Fingerprints of a user's own code, so that a run is not resumed with another function of the same name."""

import functools
import inspect
from hashlib import sha256
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from fedcluster.experiment import import_object
from fedcluster.models.pretrained import is_pretrained


def is_own(obj: Any) -> bool:
    """Whether the value of a key is a user's own code, not one of fedcluster's names."""
    return not isinstance(obj, str) or (":" in obj and not is_pretrained(obj))


def digest(obj: Any) -> str:
    """The digest of a function, a class, an object (by its class), or of what `package.module:name` stands for.

    It covers the source (of a torch module, also that of its layers), default arguments, plain values in closures, and
    functions and classes of the same Python module that it uses. Without source, as for code typed at a prompt, the
    bytecode is used.
    """
    parts = list[str]()
    describe(import_object(obj) if isinstance(obj, str) else obj, parts, set())
    return sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()


def describe(obj: Any, parts: list[str], seen: set[int]) -> None:
    if isinstance(obj, (FunctionType, type)):
        if id(obj) in seen:
            return
        seen.add(id(obj))
    if isinstance(obj, functools.partial):
        describe((obj.func, *obj.args, *obj.keywords.items()), parts, seen)
    elif isinstance(obj, tuple):
        for part in obj:
            describe(part, parts, seen)
    elif isinstance(obj, (staticmethod, classmethod)) or inspect.ismethod(obj):
        describe(obj.__func__, parts, seen)
    elif isinstance(obj, FunctionType):
        parts.append(source(obj))
        cells = [cell.cell_contents for cell in obj.__closure__ or () if has_content(cell)]
        describe((obj.__defaults__, *(obj.__kwdefaults__ or {}).items(), *cells), parts, seen)
        for name in names(obj.__code__):
            used = obj.__globals__.get(name)
            if isinstance(used, (FunctionType, type)) and used.__module__ == obj.__module__:
                describe(used, parts, seen)
    elif isinstance(obj, type):
        if obj.__module__.split(".")[0] in ("builtins", "torch", "fedcluster"):
            parts.append(f"{obj.__module__}:{obj.__qualname__}")
            return
        parts.append(source(obj))
        for value in (*obj.__bases__, *vars(obj).values()):
            if isinstance(value, (FunctionType, type, staticmethod, classmethod)):
                describe(value, parts, seen)
    elif isinstance(obj, nn.Module):
        parts.append(repr(obj))
        for module in obj.modules():
            describe(type(module), parts, seen)
    elif obj is None or isinstance(obj, (bool, int, float, complex, str, bytes)):
        parts.append(repr(obj))
    else:
        describe(type(obj), parts, seen)


def source(obj: Any) -> str:
    try:
        return inspect.getsource(obj)
    except (OSError, TypeError):
        return compiled(obj.__code__) if isinstance(obj, FunctionType) else str(obj.__qualname__)


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
