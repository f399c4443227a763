"""Pickles of plain containers, read without an unpickler, by a whitelist of opcodes.

A pickle is a program. Any other opcode is refused, so that nothing is imported or called, and only numbers and texts
are hashed. No opcode can create more than it has bytes, because containers are shared, not copied.
"""

import pickletools
from typing import Any

DEPTH = 16  # containers inside each other; FedScale's have three
LONGEST = 16  # bytes of a whole number

CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
VALUES = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINSTRING", "SHORT_BINSTRING"),
}
PUT, GET = {"BINPUT", "LONG_BINPUT"}, {"BINGET", "LONG_BINGET"}


class Refused(ValueError):
    """The pickle holds something other than numbers, texts, lists and dicts."""


class Mark:
    """On the stack: the items of a container begin here."""


def plain(content: bytes) -> Any:
    """The value of a pickle of numbers, texts, lists and dicts."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    depths: dict[int, int] = {}  # of containers, by id; `kept` holds them
    kept: list[Any] = []
    marks: list[int] = []

    def made(container: Any) -> Any:
        kept.append(container)
        depths[id(container)] = 1
        return container

    def fill(container: Any, items: list[Any]) -> None:
        deepest = max((depths.get(id(item), 0) for item in items), default=0) + 1
        if deepest > DEPTH:
            raise Refused(f"containers are nested more than {DEPTH} deep")
        depths[id(container)] = max(depths[id(container)], deepest)
        if type(container) is list:
            container += items
            return
        for key in items[::2]:
            if type(key) not in (str, int):
                raise Refused(f"a key is {type(key).__name__}")
        container.update(zip(items[::2], items[1::2], strict=True))

    def items_since_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start + 1 :]
        del stack[start:]
        return items

    arg: Any
    for opcode, arg, position in pickletools.genops(content):
        name = opcode.name
        if name in VALUES:
            if type(arg) is int and arg.bit_length() > 8 * LONGEST:
                raise Refused("a number is too long")
            stack.append(arg)
        elif name in GET:
            stack.append(memo[arg])
        elif name in PUT or name == "MEMOIZE":
            memo[len(memo) if arg is None else arg] = stack[-1]
        elif name == "MARK":
            marks.append(len(stack))
            stack.append(Mark)
            if len(marks) > DEPTH:
                raise Refused(f"containers are nested more than {DEPTH} deep")
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name == "EMPTY_LIST":
            stack.append(made([]))
        elif name == "EMPTY_DICT":
            stack.append(made({}))
        elif name in ("APPENDS", "SETITEMS"):
            items = items_since_mark()
            fill(container_of(stack, name), items)
        elif name in ("APPEND", "SETITEM"):
            count = 1 if name == "APPEND" else 2
            items = stack[-count:]
            del stack[-count:]
            fill(container_of(stack, name), items)
        elif name == "STOP":
            break
        elif name not in ("PROTO", "FRAME"):
            raise Refused(meaning(name, arg, stack, position))
    if len(stack) != 1 or marks:
        raise Refused("it does not end with one value")
    return stack[0]


def container_of(stack: list[Any], name: str) -> Any:
    if not stack or type(stack[-1]) is not (list if name.startswith("APPEND") else dict):
        raise Refused("an item has no container")
    return stack[-1]


def meaning(name: str, arg: Any, stack: list[Any], position: int | None) -> str:
    """Why the pickle is refused: what an opcode that is not on the whitelist does."""
    if name in ("GLOBAL", "INST"):
        return f"it names {str(arg).replace(' ', '.')[:80]}"
    if name == "STACK_GLOBAL":
        return f"it names {'.'.join(str(part) for part in stack[-2:])[:80]}"
    if name in ("PERSID", "BINPERSID"):
        return "it refers to something outside"
    return f"it has {name} at byte {position}"
