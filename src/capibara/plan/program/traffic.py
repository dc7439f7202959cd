"""Bytes that an operation moves from and to the device's main memory.

An operand or result counts when its layout places it there (no memory space, or 0) and not on the chip. A fusion that
slices an operand reads only the slice, one that updates a slice of its result in place writes only the slice; so a
loop over stacked layers counts each layer once.
"""

from __future__ import annotations

import re

from capibara.plan.program.shapes import HBM, HOST, ArrayShape
from capibara.plan.program.text import Computation, Instruction, Module

__all__ = ["moved_bytes", "reread_bytes", "unchanged"]

_SLICING = {"dynamic-slice", "slice", "gather"}
_VIEW = {"bitcast", "reshape", "convert", "copy", "transpose"}
_NEW_EACH_TIME = {"rng", "rng-bit-generator", "custom-call", "infeed", "recv", "recv-done"}
_DEPTH = 20


def _size(shapes: tuple[ArrayShape, ...], space: int) -> int:
    return sum(shape.padded_size for shape in shapes if shape.space == space)


def moved_bytes(instruction: Instruction, computation: Computation, module: Module) -> tuple[int, int]:
    """Bytes (main memory, host memory) of one run."""
    opcode = instruction.opcode
    names = instruction.operands
    if opcode.endswith(
        "-start"
    ):  # an asynchronous copy: (destination or operands, …), read here and written there
        return _copied(instruction, computation)
    sources = [computation.by_name.get(name) for name in names]
    if opcode in _SLICING:
        read = write = instruction.shapes
        space = (
            sources[0].shapes[0].space if sources and sources[0] is not None and sources[0].shapes else HBM
        )
        return (_as(read, space) + _size(write, HBM), 0)
    if opcode in ("dynamic-update-slice", "scatter"):
        update = sources[-1 if opcode == "scatter" else 1] if len(sources) > 1 else None
        return (2 * _size(update.shapes, HBM) if update is not None else 0, 0)
    total, host = 0, _size(instruction.shapes, HOST)
    inner = _fused(instruction, module)
    for number, source in enumerate(sources):
        if source is None:
            continue
        shapes = source.shapes
        host += _size(shapes, HOST)
        full = _size(shapes, HBM)
        if full and inner is not None and len(shapes) == 1:
            parameter = inner.parameters.get(number)
            part = _read(inner, parameter, module, 0) if parameter is not None else None
            full = full if part is None else min(part, full)
        total += full
    written = _size(instruction.shapes, HBM)
    if written and inner is not None and inner.root is not None:
        written = min(written, _written(inner, inner.root, 0))
    return (total + written, host)


def unchanged(body: Computation, module: Module) -> dict[str, int]:
    """Values in a loop's body that come from arrays which are the same in each turn, and the bytes of these arrays.

    The arrays are constants and the parts of the loop's state that it hands on. What is computed of them alone is the
    same each time; what is sliced from one at a place that changes is another part of the same bytes.
    """
    root = body.root
    if root is None or root.opcode != "tuple":
        return {}
    kept = {
        index
        for index, name in enumerate(root.operands)
        if (value := body.by_name.get(name)) is not None and _part_of_state(value, body) == index
    }
    found: dict[str, int] = {}
    for one in body.instructions:
        part = _part_of_state(one, body)
        if part in kept if part is not None else one.opcode in ("constant", "iota"):
            found[one.name] = _size(one.shapes, HBM)
        elif one.operands and one.opcode not in _NEW_EACH_TIME:
            from_same = [name for name in one.operands if name in found]
            if len(from_same) == len(one.operands) or (from_same and _only_slices(one, body, module, found)):
                found[one.name] = sum(found[name] for name in set(from_same))
    return found


def _only_slices(one: Instruction, body: Computation, module: Module, same: dict[str, int]) -> bool:
    """Whether all that an operation takes beside parts of arrays in ``same`` are single numbers, as their places."""
    others = [body.by_name.get(name) for name in one.operands if name not in same]
    if any(other is None or any(shape.elements > 1 for shape in other.shapes) for other in others):
        return False
    if one.opcode in _SLICING:
        return True
    inner = _fused(one, module)
    if inner is None:
        return False
    parameters = [inner.parameters.get(place) for place, name in enumerate(one.operands) if name in same]
    return all(p is not None and _read(inner, p, module, 0) is not None for p in parameters)


def _part_of_state(value: Instruction, body: Computation) -> int | None:
    if value.opcode != "get-tuple-element" or not value.operands:
        return None
    source = body.by_name.get(value.operands[0])
    index = re.search(r"index=(\d{1,8})", value.head)
    return int(index[1]) if index and source is not None and source.opcode == "parameter" else None


def reread_bytes(
    instruction: Instruction, computation: Computation, module: Module, same: dict[str, int], turns: int
) -> int:
    """Bytes that an operation moves in a turn of a loop and that another turn moves, too.

    Args:
      same: of the loop's body, see :func:`unchanged`. turns: of the loop.
    """
    opcode = instruction.opcode
    if opcode in ("dynamic-update-slice", "scatter"):
        return 0
    total = 0
    inner = _fused(instruction, module)
    for number, name in enumerate(instruction.operands):
        source = computation.by_name.get(name)
        if name not in same or source is None:
            continue
        read = _size(source.shapes, HBM)
        if opcode in _SLICING:
            read = min(read, _size(instruction.shapes, HBM)) if number == 0 else 0
        elif inner is not None and (parameter := inner.parameters.get(number)) is not None:
            part = _read(inner, parameter, module, 0)
            read = read if part is None else min(part, read)
        total += max(0, read - same[name] // turns)
    if instruction.name in same:
        total += max(0, _size(instruction.shapes, HBM) - same[instruction.name] // turns)
    return total


def _as(shapes: tuple[ArrayShape, ...], space: int) -> int:
    return sum(shape.padded_size for shape in shapes) if space == HBM else 0


def _copied(instruction: Instruction, computation: Computation) -> tuple[int, int]:
    shapes = [
        shape for shape in instruction.shapes if shape.dtype not in ("s32", "u32") or shape.elements > 1
    ]
    spaces = {shape.space for shape in shapes}
    if not shapes:
        return (0, 0)
    moved = min(shape.padded_size for shape in shapes)
    hbm = moved * (2 if spaces == {HBM} else 1 if HBM in spaces else 0)
    return (hbm, moved if HOST in spaces else 0)


def _fused(instruction: Instruction, module: Module) -> Computation | None:
    if instruction.opcode != "fusion":
        return None
    return module.computations.get((instruction.called().get("calls") or [""])[0])


def _read(inner: Computation, value: Instruction, module: Module, depth: int) -> int | None:
    """Bytes of a fused parameter that are read, None for all of it."""
    total = 0
    users = inner.users.get(value.name, [])
    if not users or depth > _DEPTH:
        return None
    for user in users:
        operands = user.operands
        if user.opcode in _SLICING and operands[:1] == [value.name] and value.name not in operands[1:]:
            total += sum(shape.padded_size for shape in user.shapes)
        elif user.opcode == "dynamic-update-slice" and operands[:1] == [value.name]:
            continue  # the rest stays where it is
        elif user.opcode in _VIEW and user.opcode in ("bitcast", "reshape"):
            part = _read(inner, user, module, depth + 1)
            if part is None:
                return None
            total += part
        elif user.opcode == "fusion":
            nested = _fused(user, module)
            for number, operand in enumerate(operands):
                if operand != value.name:
                    continue
                parameter = nested.parameters.get(number) if nested is not None else None
                part = (
                    _read(nested, parameter, module, depth + 1) if nested and parameter is not None else None
                )
                if part is None:
                    return None
                total += part
        else:
            return None
    return total


def _written(inner: Computation, value: Instruction, depth: int) -> int:
    """Bytes that the root of a fusion writes to main memory."""
    if depth <= _DEPTH:
        if value.opcode == "tuple":
            parts = [inner.by_name.get(name) for name in value.operands]
            return sum(_written(inner, part, depth + 1) for part in parts if part is not None)
        if value.opcode in ("bitcast", "reshape"):
            source = inner.by_name.get(value.operands[0]) if value.operands else None
            if source is not None and source.opcode == "dynamic-update-slice":
                return _written(inner, source, depth + 1)
        if value.opcode == "dynamic-update-slice":
            operands = value.operands
            update = inner.by_name.get(operands[1]) if len(operands) > 1 else None
            if update is not None:
                return sum(shape.padded_size for shape in update.shapes)
    return _size(value.shapes, HBM) if value.opcode != "parameter" else 0
