"""Composed models for tests on several devices, and what a program compiled for them says of its collectives."""

from __future__ import annotations

import re
from typing import Any

from capibara import compose as ml


def mlp() -> Any:
    """Two layers: the first split by columns over ``model``, the second by rows."""
    model = ml.Model()
    model.add_input("x", ("batch", 32), "float", axes=("batch", None))
    model |= ml.Linear(64, axes=("embed", "mlp"))(input="x", output="hidden")
    model |= ml.Relu()(input="hidden", output="active")
    model |= ml.Linear(32, axes=("mlp", "embed"))(input="active", output="y")
    model.expose("y")
    return model


def block() -> Any:
    """A transformer block: attention of eight heads, and a gated feed-forward layer."""
    model = ml.Model()
    model.add_input("x", ("batch", 8, 32), "float", axes=("batch", None, None))
    model |= ml.RMSNorm()(input="x", output="n")
    model.add_input("positions", (8,), "int")
    model |= ml.RotaryTable(4)(positions="positions", cos="cos", sin="sin")
    model.add(ml.SelfAttention(32, 8), "attend", input="n", cos="cos", sin="sin", output="mixed")
    model |= ml.Add()(left="x", right="mixed", output="middle")
    model |= ml.RMSNorm()(input="middle", output="m")
    model.add(ml.SwiGLU(64, 32), "feed", input="m", output="fed")
    model |= ml.Add()(left="middle", right="fed", output="y")
    model.expose("y")
    return model


_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
_COLLECTIVE = re.compile(rf"= (?P<type>.*?) (?P<kind>{_KINDS})(?:-start)?\((?P<rest>.*)")


def groups(text: str, mesh_shape: tuple[int, int]) -> str:
    """Which of the axes ``data`` and ``model`` a collective's replica groups run over; "both", or the text."""
    import numpy as np

    devices = np.arange(mesh_shape[0] * mesh_shape[1]).reshape(mesh_shape)
    rows: Any
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", text):
        names = re.findall(r"'(\w+)'=(\d+)", found[1])
        summed = [i for i, (name, _) in enumerate(names) if f"'{name}'" in found[2]]
        others = [i for i in range(len(names)) if i not in summed]
        grid = np.arange(devices.size).reshape([int(n) for _, n in names]).transpose(others + summed)
        rows = grid.reshape(-1, int(np.prod([int(names[i][1]) for i in summed]))).tolist()
    elif found := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", text):
        rows = [[int(n) for n in row.split(",")] for row in found[1].strip("{}").split("},{")]
    elif found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, over, order = ([int(n) for n in g.split(",")] if g else None for g in found.groups())
        iota = np.arange(devices.size).reshape(over)
        rows = (iota if order is None else iota.transpose(order)).reshape(shape).tolist()
    else:
        return text[:200]
    rows = sorted(sorted(row) for row in rows)
    if rows == devices.T.tolist():
        return "data"
    if rows == devices.tolist():
        return "model"
    return "both" if rows == [devices.ravel().tolist()] else str(rows)


def collectives(hlo: str, mesh_shape: tuple[int, int]) -> list[tuple[str, str, str]]:
    """``(kind, mesh axis, type of the result)`` of each collective of a compiled program."""
    found = filter(None, map(_COLLECTIVE.search, hlo.splitlines()))
    return [(each["kind"], groups(each["rest"], mesh_shape), each["type"]) for each in found]
