"""``mithril.compile``: compose's, with Mithril's flat names of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from capibara import compose
from capibara.compose.logical.block import Block
from capibara.compose.logical.model import Model
from capibara.compose.logical.trail import what_if
from mithril.naming import name_all
from mithril.targets import follow_targets

__all__ = ["compile"]


def compile(
    model: Block,
    backend: Any = None,
    *,
    constant_keys: Mapping[Any, Any] | None = None,
    data_keys: Iterable[Any] | None = None,
    discard_keys: Iterable[Any] | None = None,
    trainable_keys: Iterable[Any] | None = None,
    shapes: Mapping[Any, Any] | None = None,
    use_short_namings: bool = True,
    **options: Any,
) -> Any:
    """:func:`capibara.compose.compile`, with parameters named as Mithril names them; see :mod:`mithril.naming`.

    Args:
        model, backend, constant_keys, data_keys, trainable_keys, shapes: as compose's ``compile`` takes them.
        discard_keys: outputs that are left out; an input is named for nothing and ignored.
        use_short_namings: name parameters by their own name, numbered; False: by their whole place.
        options: ``inference``, ``jit``, ``file_path``, ``verbose``, ``safe_shapes``, ``safe_names``.

    Returns:
        A :class:`capibara.compose.CompiledModel` whose ``params`` is a flat dict, and whose ``evaluate`` takes
        Mithril's arguments (:mod:`mithril.physical`).
    """
    if isinstance(model, Model):
        model._finish()
    with what_if():
        if isinstance(model, Model) and model.parent is None:
            name_all(model, short=use_short_namings)
            constant_keys = {k: _floats(model, k, v) for k, v in (constant_keys or {}).items()}
            follow_targets(model, shapes or {}, constant_keys)
        return compose.compile(
            model,
            backend,
            shapes=shapes,
            constant_keys=constant_keys,
            data_keys=data_keys or (),
            trainable_keys=trainable_keys or (),
            discard_keys=discard_keys or (),
            use_short_namings=use_short_namings,
            **options,
        )


def _floats(model: Model, key: Any, value: Any) -> Any:
    """Integers for a connection of floats as floats: Mithril converts where compose refuses."""
    wire = model.wires.get(key) if isinstance(key, str) else None
    if (
        wire is None
        or wire.find().kind.find().value != "float"
        or "int" not in str(getattr(value, "dtype", ""))
    ):
        return value
    return np.asarray(value).astype("float32")
