"""Symbolic shapes and their unification.

A model is composed before its sizes are known, so a shape is a sequence of :class:`Dim` (sizes that may still be
unknown) with at most one :class:`Rest`, which stands for any number of further dimensions::

    (*batch, sequence, 64)        Rest("batch"), Dim("sequence"), Dim(64)

Connecting two values makes their shapes equal: :func:`unify` merges dimension with dimension (a union-find), and
assigns the remaining dimensions to a ``Rest``. What cannot be decided yet (``(*a, 3)`` against ``(4, *b)`` may be one
dimension or many) is stored as a :class:`Constraint` and retried when something that it depends on changes. The rules
of single operations, such as broadcasting, use the same mechanism.

Every change is recorded in the :mod:`~capibara.compose.logical.trail`, so that a failed connection leaves the model
unchanged.

Each ``Dim`` may also have a logical axis name (``"embed"``, ``"heads"`` …). Unification propagates names: naming the
axes of parameters also names those of the activations between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from capibara.compose.errors import ShapeError
from capibara.compose.logical.trail import building, put, root_of, symbol

__all__ = [
    "MAX_SIZE",
    "Constraint",
    "Dim",
    "Rest",
    "Shape",
    "as_shape",
    "product_of",
    "quotient",
    "set_size",
    "settle",
    "unify",
]

MAX_SIZE = 1 << 48
"""Of one dimension, or of an array: more than the memory of any machine holds."""


class Dim:
    """One dimension: its size if known, a readable name, and the logical axis it belongs to.

    ``factors``: dimensions whose product it is, if these are known and its size is not.
    """

    __slots__ = ("axis", "factors", "name", "parent", "size", "watchers")

    def __init__(self, size: int | None = None, name: str | None = None, axis: str | None = None) -> None:
        self.size = size
        self.name = name
        self.axis = axis
        self.factors: tuple[Dim, ...] | None = None
        self.parent: Dim | None = None
        self.watchers: tuple[Constraint, ...] = ()

    def find(self) -> Dim:
        return root_of(self)

    def __repr__(self) -> str:
        root = self.find()
        return str(root.size) if root.size is not None else (root.name or "?")


class Rest:
    """Any number of dimensions; ``value`` is the shape it turned out to be."""

    __slots__ = ("name", "value", "watchers")

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.value: Shape | None = None
        self.watchers: tuple[Constraint, ...] = ()

    def __repr__(self) -> str:
        return "*" + (self.name or "")


class Shape:
    """A sequence of dimensions with at most one :class:`Rest`."""

    __slots__ = ("items",)

    def __init__(self, items: Iterable[Dim | Rest] = ()) -> None:
        self.items: tuple[Dim | Rest, ...] = tuple(items)

    def resolve(self) -> tuple[list[Dim], Rest | None, list[Dim]]:
        """``(dimensions before the rest, the rest or None, dimensions after it)``, with known rests filled in."""
        prefix: list[Dim] = []
        suffix: list[Dim] = []  # collected back to front
        items: Sequence[Dim | Rest] = self.items
        way: list[Rest] = []
        while True:
            at = next((i for i, item in enumerate(items) if isinstance(item, Rest)), None)
            if at is None:
                prefix.extend(d.find() for d in items)  # type: ignore[union-attr]
                found = None
                break
            prefix.extend(d.find() for d in items[:at])  # type: ignore[union-attr]
            suffix.extend(d.find() for d in reversed(items[at + 1 :]))  # type: ignore[union-attr]
            rest = items[at]
            assert isinstance(rest, Rest)
            if rest.value is None:
                found = rest
                break
            way.append(rest)
            items = rest.value.items
        if len(way) > 1:
            _shorten(way)
        return prefix, found, suffix[::-1]

    def dims(self) -> list[Dim] | None:
        """All dimensions, or None while the number of dimensions is unknown."""
        prefix, rest, suffix = self.resolve()
        return None if rest is not None else prefix + suffix

    @property
    def known(self) -> tuple[int | None, ...] | None:
        """The sizes (None where unknown), or None while the rank is unknown."""
        dims = self.dims()
        return None if dims is None else tuple(d.size for d in dims)

    def __repr__(self) -> str:
        prefix, rest, suffix = self.resolve()
        parts = [repr(d) for d in prefix] + ([repr(rest)] if rest else []) + [repr(d) for d in suffix]
        return "(" + ", ".join(parts) + ("," if len(parts) == 1 else "") + ")"


def _shorten(way: Sequence[Rest]) -> None:
    """Let each of a chain of rests (each one's value holds the next) have a value without known rests in it."""
    shape = way[-1].value
    for rest in reversed(way[:-1]):
        assert shape is not None
        assert rest.value is not None
        items: list[Dim | Rest] = []
        for item in rest.value.items:
            items.extend(shape.items if isinstance(item, Rest) else (item,))
        shape = shape if len(items) == len(rest.value.items) == 1 else Shape(items)
        put(rest, "value", shape)


class Constraint:
    """A rule between shapes that is retried whenever one of them changes, until it is settled."""

    __slots__ = ("describe", "done", "rule", "shapes", "where")

    def __init__(
        self,
        rule: Callable[..., bool],
        shapes: Sequence[Shape],
        where: Callable[[ShapeError], ShapeError] | None = None,
    ) -> None:
        self.rule = rule  # called with the shapes; returns True when nothing is left to learn
        self.shapes = tuple(shapes)
        self.where = where  # adds the place in the model to an error
        self.done = False

    def post(self) -> None:
        """Try the rule now, and again on every change until it is settled."""
        building.waiting.append(self)

    def _attempt(self) -> None:
        if self.done:
            return
        try:
            done = self.rule(*self.shapes)
        except ShapeError as error:
            raise (self.where(error) if self.where else error) from None
        if done:
            put(self, "done", True)
            return
        for shape in self.shapes:
            prefix, rest, suffix = shape.resolve()
            for node in (*prefix, *suffix, *((rest,) if rest else ())):
                if (isinstance(node, Rest) or node.size is None) and self not in node.watchers:
                    put(node, "watchers", (*node.watchers, self))


def settle() -> None:
    """Run the pending constraints, whose shapes have changed."""
    waiting = building.waiting
    try:
        while waiting:
            waiting.popleft()._attempt()
    except BaseException:
        waiting.clear()  # nothing of a refused connection may run later, in the middle of another
        raise


def _wake(*watchers: Constraint) -> None:
    building.waiting.extend(c for c in watchers if not c.done)


def _unify_dims(a: Dim, b: Dim) -> None:
    a, b = a.find(), b.find()
    if a is b:
        return
    if a.size is not None and b.size is not None and a.size != b.size:
        raise ShapeError(f"{a.size} is not {b.size}")
    if len(b.watchers) > len(a.watchers):
        a, b = b, a
    known_before = a.size is not None and b.size is not None
    # Only who learned something is tried again: of two unknown sizes who looks at both of them, otherwise who looks
    # at the unknown one. (To wake all would never end: a rule may give a result fresh dimensions each time that it
    # is tried.)
    if a.size is None and b.size is None:
        learned = tuple(w for w in b.watchers if w in a.watchers)
        if (a.factors is None) != (b.factors is None):  # what it is the product of is news to the other
            learned += a.watchers if a.factors is None else b.watchers
    else:
        learned = (a.watchers if a.size is None else ()) + (b.watchers if b.size is None else ())
    put(b, "parent", a)
    if a.size is None and b.size is not None:
        put(a, "size", b.size)
    if a.axis is None and b.axis is not None:
        put(a, "axis", b.axis)
    if a.name is None and b.name is not None:
        put(a, "name", b.name)
    if a.factors is None and b.factors is not None:
        put(a, "factors", b.factors)
    if not known_before:
        watchers = a.watchers
        if b.watchers:
            put(a, "watchers", (*watchers, *(w for w in b.watchers if w not in watchers)))
        _wake(*learned)


def set_size(dim: Dim, size: int) -> None:
    """Set the size of a dimension, or check the existing one."""
    _unify_dims(dim, Dim(size))


def product_of(dims: Iterable[Dim]) -> tuple[int, list[Dim]]:
    """A product of sizes: its known part, and the unknown dimensions (possibly repeated)."""
    known, open_dims = 1, []
    stack: list[tuple[Dim, tuple[Dim, ...]]] = [(dim, ()) for dim in dims]
    while stack:
        dim, around = stack.pop()
        dim = dim.find()
        if dim.size is not None:
            known *= dim.size
        elif dim.factors is not None and dim not in around:
            stack.extend((factor, (*around, dim)) for factor in dim.factors)
        else:
            open_dims.append(dim)
    return known, open_dims


def quotient(whole: Iterable[Dim], part: Iterable[Dim]) -> Dim | None:
    """The size ``whole / part`` as a dimension; None while it is not known.

    Raises:
        ShapeError: both are known and there is no such size.
    """
    have, left = product_of(whole)
    want, right = product_of(part)
    for dim in right[:]:
        if dim in left:
            left.remove(dim)
            right.remove(dim)
    if right or (left and (not want or have % want)):
        return None
    if not want or have % want:
        raise ShapeError(f"{have} is not a multiple of {want}")
    if not left:
        return Dim(have // want)
    if len(left) == 1 and have == want:
        return left[0]
    made = Dim()
    made.factors = (Dim(have // want), *left)
    return made


def _fill(rest: Rest, items: Sequence[Dim | Rest]) -> None:
    put(rest, "value", Shape(items))
    _wake(*rest.watchers)


def _unify_resolved(a: Shape, b: Shape) -> bool:
    """One pass of unification; False when a case has to wait until more is known."""
    pa, ra, sa = a.resolve()
    pb, rb, sb = b.resolve()
    if ra is None and rb is None:
        da, db = pa + sa, pb + sb
        if len(da) != len(db):
            raise ShapeError(f"{len(da)} dimensions are not {len(db)}")
        for x, y in zip(da, db, strict=True):
            _unify_dims(x, y)
        return True
    if ra is None or rb is None:
        if ra is None:
            pa, ra, sa, pb, rb, sb = pb, rb, sb, pa, ra, sa
        fixed = pb + sb
        if len(fixed) < len(pa) + len(sa):
            raise ShapeError(
                f"{len(fixed)} dimensions are fewer than the {len(pa) + len(sa)} needed (one of size 1 is added with "
                "x[None, :], x[:, None] or ExpandDims(axis))"
            )
        end = len(fixed) - len(sa)
        for x, y in zip(pa, fixed, strict=False):
            _unify_dims(x, y)
        for x, y in zip(sa, fixed[end:], strict=True):
            _unify_dims(x, y)
        assert ra is not None
        _fill(ra, fixed[len(pa) : end])
        return True
    head = min(len(pa), len(pb))
    tail = min(len(sa), len(sb))
    for x, y in zip(pa[:head], pb[:head], strict=True):
        _unify_dims(x, y)
    for x, y in zip(sa[len(sa) - tail :], sb[len(sb) - tail :], strict=True):
        _unify_dims(x, y)
    left_a: list[Dim | Rest] = [*pa[head:], ra, *sa[: len(sa) - tail]]
    left_b: list[Dim | Rest] = [*pb[head:], rb, *sb[: len(sb) - tail]]
    if ra is rb:
        if len(left_a) != len(left_b):
            raise ShapeError(f"{a} cannot equal {b}")
        return len(left_a) == 1  # (2, *r) with (*r, 3): what follows shows when r is known
    if len(left_a) == 1:
        _fill(ra, left_b)
        return True
    if len(left_b) == 1:
        _fill(rb, left_a)
        return True
    return False


def unify(a: Shape, b: Shape, where: Callable[[ShapeError], ShapeError] | None = None) -> None:
    """Make two shapes equal.

    Raises:
        ShapeError: their sizes or ranks cannot be made equal.
    """
    if a is b:
        return
    if not _unify_resolved(a, b):
        Constraint(_unify_resolved, (a, b), where).post()


def _size(field: Any, spec: Any) -> int:
    try:
        if isinstance(field, bool):
            raise TypeError
        size: int = field.__index__() if not isinstance(field, str) else int(field[:40])
    except (AttributeError, TypeError, ValueError):
        raise ShapeError(f"{field!r:.80} in shape {spec!r:.200} is neither a size nor a name") from None
    if not 0 <= size <= MAX_SIZE:
        raise ShapeError(
            f"size {size:.6g} in shape {spec!r:.200} is {'negative' if size < 0 else 'more than any array has'}"
        )
    return size


def as_shape(
    spec: Iterable[Any] | str, symbols: dict[str, Dim | Rest], axes: Sequence[str | None] = ()
) -> Shape:
    """Read a shape: ``"*batch sequence 64"`` or ``("*batch", "sequence", 64)``; equal names are equal sizes.

    Args:
        spec: sizes, names (``"sequence"``), ``"*name"`` for any number of dimensions, None for an unnamed size,
            an ellipsis for unnamed further dimensions, or ready :class:`Dim` / :class:`Rest`.
        symbols: the names seen so far; new ones are added.
        axes: logical axis names, one per dimension (none for a ``Rest``), or empty.

    Raises:
        ShapeError: a negative size, or something that is not a dimension.
    """
    items: list[Dim | Rest] = []
    try:
        fields: list[Any] = spec.split() if isinstance(spec, str) else list(spec)
    except TypeError:
        raise ShapeError(f"shape {spec!r} is not a row of sizes: write [32, 128] or 'batch 128'") from None
    for field in fields:
        if isinstance(field, Dim | Rest):
            items.append(field)
        elif field is None:
            items.append(Dim())
        elif field is ...:
            items.append(Rest())
        elif not isinstance(field, str) or field.lstrip("-").isdigit():
            items.append(Dim(_size(field, spec)))
        elif field.startswith("*"):
            items.append(symbol(symbols, field, Rest(field[1:] or None)))
        else:
            items.append(symbol(symbols, field, Dim(name=field)))
    if sum(isinstance(i, Rest) for i in items) > 1:
        raise ShapeError(f"shape {spec!r} has more than one '*', expected at most one")
    if axes:
        dims = [i for i in items if isinstance(i, Dim)]
        if len(axes) != len(dims):
            raise ShapeError(
                f"{len(axes)} axis names {tuple(axes)!r} for the {len(dims)} dimensions of {spec!r}"
            )
        for dim, axis in zip(dims, axes, strict=True):
            root = dim.find()
            if axis is not None and root.axis is None:
                put(root, "axis", axis)
    return Shape(items)
