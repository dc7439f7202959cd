"""The devices that take part in a collective, in all forms of HLO text.

* lists: ``{{0,1,2,3},{4,5,6,7}}``; ``{}`` means all devices; * iotas: ``[8,4]<=[4,8]T(1,0)``: count 0, 1, 2, … in an
array of 4 × 8, transpose it, cut it into 8 groups of 4; * meshes: ``mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0))
{'b'}``: groups run along the named axes of a mesh, whose
  devices count in order unless ``device_ids`` says otherwise (``'a':(1)2`` names a part of an axis: after
  a factor of 1, two);
* pairs (collective-permute): ``{{0,1},{1,2}}``, from → to.

Numbers are positions in the device assignment, so positions in ``mesh.devices.flat`` of the JAX mesh.
"""

from __future__ import annotations

import math
import re

import numpy as np

from capibara.plan.errors import PlanError

__all__ = ["groups_text", "mesh_axes_of", "parse_groups", "parse_pairs"]

_MOST_DEVICES = 1 << 17
_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?)?$")
_AXIS = re.compile(r"'([^']*)'=(\d{1,9})")
_USED = re.compile(r"'([^']*)'(?::\((\d{1,9})\)(\d{1,9}))?")


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdigit() and len(part) < 10 for part in parts):
        raise PlanError(f"replica groups with {text[:60]!r}, where numbers of devices were expected")
    return [int(part) for part in parts]


def _count(dims: list[int], text: str) -> int:
    total = math.prod(dims)
    if not 0 < total <= _MOST_DEVICES:
        raise PlanError(f"replica groups {text[:80]!r} over {total} devices; between 1 and {_MOST_DEVICES}")
    return total


def parse_groups(text: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """Groups of devices, each in its order.

    Args:
      text: the value of ``replica_groups``; empty or ``{}`` is one group of all devices.
      devices: number of devices that run the program.

    Raises:
      PlanError: a form that HLO does not have.
    """
    text = text.strip()
    if text in ("", "{}", "{{}}"):
        return (tuple(range(_count([devices], text))),)
    if text.startswith("mesh["):
        return _mesh(text)
    if text.startswith("["):
        found = _IOTA.match(text)
        if not found:
            raise PlanError(f"replica groups {text[:80]!r} are not a list such as [8,4]<=[4,8]T(1,0)")
        shape = _numbers(found[1])
        total = _count(shape, text)
        ids = _iota(_numbers(found[2]) if found[2] else [total], found[3], total, text)
        return tuple(map(tuple, ids.reshape(-1, shape[-1]).tolist()))
    if text.startswith("{") and len(text) <= 16 * _MOST_DEVICES:
        return tuple(
            tuple(_numbers(part)) for part in re.findall(r"\{([^{}]*)\}", text[1:-1]) if part.strip()
        )
    raise PlanError(f"replica groups {text[:80]!r} are in no form that is known")


def _iota(dims: list[int], order: str | None, total: int, text: str) -> np.ndarray:
    if math.prod(dims) != total:
        raise PlanError(f"replica groups {text[:80]!r}: {dims} are not {total} devices")
    ids = np.arange(total).reshape(dims)
    if order:
        axes = _numbers(order)
        if sorted(axes) != list(range(len(dims))):
            raise PlanError(
                f"replica groups {text[:80]!r}: T({order}) is not an order of {len(dims)} dimensions"
            )
        ids = ids.transpose(axes)
    return ids.reshape(-1)


def _mesh(text: str) -> tuple[tuple[int, ...], ...]:
    closed = text.find("]")
    axes = [(name, int(size)) for name, size in _AXIS.findall(text[5:closed])]
    sizes = [size for _, size in axes]
    if not axes or len({name for name, _ in axes}) != len(axes):
        raise PlanError(f"replica groups {text[:80]!r} are along a mesh without axes")
    total = _count(sizes, text)
    used_at = text.rfind("{")
    given = re.search(r"device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))\)", text[closed:used_at])
    if given and given[1]:
        ids = _iota(_numbers(given[1]), given[2], total, text)
    elif given:
        ids = np.asarray(_numbers(given[3]))
        if ids.size != total:
            raise PlanError(f"replica groups {text[:80]!r} name {ids.size} devices on a mesh of {total}")
    else:
        ids = np.arange(total)
    if "device_ids" in text[closed:used_at] and given is None:
        raise PlanError(f"replica groups {text[:80]!r}: device_ids in a form that is not known")
    # Axes used in part are cut in three: what stands before, the part, what stands after.
    parts: list[tuple[int, bool]] = []
    used = {name: (pre, size) for name, pre, size in _USED.findall(text[used_at:])}
    if set(used) - {name for name, _ in axes}:
        raise PlanError(f"replica groups {text[:80]!r} run along axes that the mesh does not have")
    for name, size in axes:
        if name not in used:
            parts.append((size, False))
        elif not used[name][1]:
            parts.append((size, True))
        else:
            before, part = int(used[name][0]), int(used[name][1])
            if not before or not part or size % (before * part):
                raise PlanError(
                    f"replica groups {text[:80]!r}: an axis of {size} has no part ({before}){part}"
                )
            parts += [(before, False), (part, True), (size // before // part, False)]
    order = [i for i, (_, taken) in enumerate(parts) if not taken] + [
        i for i, (_, taken) in enumerate(parts) if taken
    ]
    group = math.prod(size for size, taken in parts if taken)
    cube = ids.reshape([size for size, _ in parts]).transpose(order)
    return tuple(map(tuple, cube.reshape(-1, group).tolist()))


def parse_pairs(text: str) -> tuple[tuple[int, int], ...]:
    """Pairs from → to of a collective-permute."""
    pairs = [_numbers(part) for part in re.findall(r"\{([^{}]*)\}", text[1:-1])]
    if any(len(pair) != 2 for pair in pairs) or len(pairs) > _MOST_DEVICES:
        raise PlanError(f"source_target_pairs={text[:80]!r} must be pairs such as {{{{0,1}},{{1,0}}}}")
    return tuple((a, b) for a, b in pairs)


def groups_text(head: str, at: int) -> str:
    """The text of replica groups that begins at ``at`` in an instruction's attributes: its forms hold commas too."""
    if head.startswith("mesh[", at):
        found = re.match(r"mesh\[[^\]]*\](?:, device_ids=\([^{]*\))? ?\{[^}]*\}", head[at:])
        return found[0] if found else head[at : at + 200]
    if head.startswith("[", at):
        found = re.match(r"\[[\d,]+\](?:<=\[[\d,]+\](?:T\([\d,]+\))?)?", head[at:])
        return found[0] if found else head[at : at + 200]
    depth = 0
    for position in range(at, len(head)):
        depth += {"{": 1, "}": -1}.get(head[position], 0)
        if depth == 0:
            return head[at : position + 1]
    return head[at:]


def mesh_axes_of(groups: tuple[tuple[int, ...], ...], mesh: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    """Axes of a mesh along which the devices of a group differ.

    Args:
      groups: groups (or pairs) of positions in the mesh.
      mesh: names and sizes of the axes, slowest first.

    Returns:
      Names in the mesh's order; groups of a part of an axis name the whole axis.

    Raises:
      PlanError: a position beyond the mesh.
    """
    names = [name for name, _ in mesh]
    sizes = [size for _, size in mesh]
    total = math.prod(sizes)
    differs = np.zeros(len(sizes), bool)
    for group in groups:
        if not group:
            continue
        members = np.asarray(group)
        if members.max() >= total:
            raise PlanError(
                f"mesh={mesh} has {total} devices, but the program's collectives reach device {members.max()}"
            )
        places = np.stack(np.unravel_index(members, sizes)) if sizes else np.zeros((0, len(group)))
        differs |= (places != places[:, :1]).any(axis=1)
        if differs.all():
            break
    return tuple(name for name, yes in zip(names, differs, strict=True) if yes)
