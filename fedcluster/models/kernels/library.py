"""The compiled library as ctypes functions, loaded once per process."""

import ctypes
from contextlib import suppress
from functools import cache
from typing import Any

from fedcluster.files import cache_folder
from fedcluster.models.kernels import self_check
from fedcluster.models.kernels.build import BuildFailed
from fedcluster.models.kernels.cache import cached_library
from fedcluster.models.kernels.prebuilt import prebuilt_library
from fedcluster.models.kernels.structures import NetworkSpec, Samples, layout

INT, INT64, FLOAT, DOUBLE, POINTER = (
    ctypes.c_int,
    ctypes.c_int64,
    ctypes.c_float,
    ctypes.c_double,
    ctypes.c_void_p,
)
SPEC, SAMPLES = ctypes.POINTER(NetworkSpec), ctypes.POINTER(Samples)
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {  # result and arguments, as in csrc/engine.h
    "workspace_size": (INT64, [SPEC, INT, INT, INT]),
    "sgd": (INT, [POINTER, POINTER, SPEC, SAMPLES, POINTER, INT, INT, FLOAT, POINTER]),
    "compute_gradient": (INT, [POINTER, POINTER, SPEC, SAMPLES, POINTER, INT, POINTER]),
    "evaluate": (INT, [POINTER, SPEC, SAMPLES, POINTER, INT64, INT, POINTER, POINTER, POINTER]),
    "all_finite": (INT, [POINTER, INT64]),
    "sum_of_squares": (DOUBLE, [POINTER, POINTER, INT64]),
    "add_rounded": (None, [POINTER, POINTER, INT64, DOUBLE, DOUBLE]),
    "structure_layout": (INT, [POINTER]),
}

_reason = ""


@cache
def load() -> Any:
    """The library that came with the package, else one that is built on this machine, or None; then
    `unavailable_reason` says why."""
    global _reason
    _reason = ""
    if path := prebuilt_library():
        with suppress(BuildFailed, OSError, AttributeError):
            library = open_library(path)
            self_check.compare_with_torch(library)
            return library
    try:
        library = open_library(cached_library(cache_folder()))
        self_check.compare_with_torch(library)
    except (BuildFailed, OSError, AttributeError) as error:
        _reason = str(error)
        return None
    return library


def open_library(path: object) -> Any:
    """The functions of a library file, with their types."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    found = (INT64 * 100)()
    if found[: library.structure_layout(found)] != layout():
        raise BuildFailed("the compiled code lays structures out differently from Python")
    return library


def unavailable_reason() -> str:
    """Why there is no compiled library on this machine; empty if there is one."""
    return "" if load() is not None else _reason
