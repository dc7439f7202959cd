"""The meaning of a parameter's dimensions: from logical axis names, or inferred from shapes.

A transformer's matrices connect the residual stream (width ``embed``) to an inner dimension (heads, the feed-forward
layer, the vocabulary). Sharding the *inner* dimension is tensor parallelism: a sub-block then needs one sum over
those devices in the forward pass and one in the backward pass (Shoeybi et al. 2019, "Megatron-LM"). Sharding the
*embed* dimension only saves storage: the matrix is gathered before use (Rajbhandari et al. 2020, "ZeRO").

Without names, the embed width is the last size of a three-dimensional input, or otherwise the size that most arrays
have; a leading dimension shared by all arrays of a subtree is a stack of layers; the remaining dimensions are inner.
If two dimensions are equal, only the arrays' names can distinguish a projection into the block from one out of it;
names are used only for that, and to distinguish a lookup table from an output matrix.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from capibara.plan.sharding.tree import Leaf

__all__ = ["Role", "assign_roles", "embed_width"]

_GENERIC = {"weight", "kernel", "w", "bias", "b", "scale", "embedding"}
_OUT_OF_BLOCK = {"o", "out", "wo", "output", "down", "w2", "fc2", "proj", "wdown", "dense_4h_to_h"}
_INTO_BLOCK = {
    "q",
    "k",
    "v",
    "query",
    "key",
    "wq",
    "wk",
    "wv",
    "qkv",
    "in",
    "up",
    "gate",
    "w1",
    "w3",
    "fc1",
    "fc",
    "wi",
}
_EMBEDDING = {
    "embedding",
    "embeddings",
    "embed",
    "wte",
    "wpe",
    "emb",
    "vocab",
    "token",
    "tokens",
    "position",
    "table",
}
_HEAD = {"head", "unembed", "logits", "lm", "readout"}


@dataclass(frozen=True)
class Role:
    """The role of an array in a step.

    Attributes:
      kind: ``"matrix"``, ``"vector"``, ``"lookup"``, ``"head"``, ``"tied"`` (a lookup that also scores).
      stack: leading dimensions that count layers.
      repeats: number of layers with such an array, in this array or separately.
      embed: the dimension of the residual stream, or None.
      inner: dimensions that tensor parallelism may shard, preferred first.
      group: arrays of one group are sharded together, because activations flow between them.
      flops: floating-point operations for each token, forward.
      forward_sums, backward_sums: sums over devices of activations of width ``sum_width`` if ``inner`` is sharded.
      out_features: output values of the array per token (of one layer).
      experts: whether its first dimension counts the experts of a mixture.
    """

    kind: str
    stack: int = 0
    repeats: int = 1
    embed: int | None = None
    inner: tuple[int, ...] = ()
    group: tuple[str, ...] = ()
    flops: float = 0.0
    forward_sums: float = 0.0
    backward_sums: float = 0.0
    sum_width: int = 0
    out_features: int = 0
    experts: bool = False


def assign_roles(leaves: Sequence[Leaf], input_shape: tuple[int, ...], embed: int) -> list[Role]:
    """A role for every array; see the module."""
    stacks = _stacks(leaves)
    twins = Counter(_without_numbers(leaf) for leaf in leaves)
    torch_order = _torch_order(leaves, stacks, embed)
    holders = _holders(leaves)
    roles: list[Role] = []
    experts = _experts(leaves, stacks, holders, embed)
    for i, (leaf, stack) in enumerate(zip(leaves, stacks, strict=True)):
        if leaf.axes is None:
            role = _from_shape(leaf, stack, embed, torch_order, i in experts)
        else:
            role = _from_names(leaf)
        layers = 1
        for n in leaf.shape[: role.stack]:
            layers *= n
        roles.append(
            replace(role, repeats=layers * twins[_without_numbers(leaf)], group=_group(leaf, holders))
        )
    roles = _embeddings(leaves, roles, input_shape, embed)
    length = input_shape[1] if len(input_shape) > 1 else 1
    roles = [_sized(leaf, role, embed, length) for leaf, role in zip(leaves, roles, strict=True)]
    return _with_sums(leaves, roles, embed)


def embed_width(leaves: Sequence[Leaf], input_shape: tuple[int, ...]) -> int:
    """The width of the residual stream; see the module."""
    for leaf in leaves:
        if leaf.axes and "embed" in leaf.axes and leaf.elements:
            return leaf.shape[leaf.axes.index("embed")]
    sizes: Counter[int] = Counter()
    ends: Counter[int] = Counter()
    for leaf, stack in zip(leaves, _stacks(leaves), strict=True):
        shape = leaf.shape[stack:] if leaf.elements else ()
        sizes.update(set(shape))
        ends.update({shape[0], shape[-1]} if shape else ())
    if len(input_shape) >= 3 and input_shape[-1] in sizes:
        return input_shape[-1]
    if not sizes:
        return 1
    return max(sizes, key=lambda n: (sizes[n], ends[n], -n))


def _stacks(leaves: Sequence[Leaf]) -> list[int]:
    """For each array, how many leading dimensions count layers (0 or 1, without names)."""
    found = [0] * len(leaves)

    def look(members: list[int], depth: int) -> None:
        below: dict[str, list[int]] = {}
        for i in members:
            if len(leaves[i].words) > depth:
                below.setdefault(leaves[i].words[depth], []).append(i)
        for inside in below.values():
            if _is_stack([leaves[i] for i in inside]):
                for i in inside:
                    found[i] = 1
            else:
                look(inside, depth + 1)

    unnamed = [i for i, leaf in enumerate(leaves) if leaf.axes is None]
    look(unnamed, 0)
    for i, leaf in enumerate(leaves):
        if leaf.axes is not None:
            found[i] = leaf.axes.count("layers")
    return found


def _is_stack(arrays: list[Leaf]) -> bool:
    if len(arrays) < 2 or any(len(a.shape) < 2 for a in arrays):
        return False
    others = [a for a in arrays if not any("expert" in word.lower() for word in a.words)]
    if not others and max(len(a.shape) for a in arrays) < 4:
        return False  # what the leading dimension counts are experts
    arrays = others or arrays
    leading = {a.shape[0] for a in arrays}
    ranks = {len(a.shape) for a in arrays}
    if len(leading) > 1 or max(ranks) < 3:
        return False
    # Vectors beside matrices, all with one size more in front; or a size smaller than what it counts.
    return 2 in ranks or all(a.shape[0] < max(a.shape[1:]) for a in arrays)


def _torch_order(leaves: Sequence[Leaf], stacks: Sequence[int], embed: int) -> bool:
    """Whether matrices are stored [out, in]: projections into a block then end with the embed width."""
    votes = 0
    for leaf, stack in zip(leaves, stacks, strict=True):
        shape = leaf.shape[stack:]
        if len(shape) == 2 and embed in shape and shape[0] != shape[1]:
            into, out = _named(leaf, _INTO_BLOCK), _named(leaf, _OUT_OF_BLOCK)
            if into != out:
                votes += 1 if (shape[1] == embed) == into else -1
    return votes > 0


def _named(leaf: Leaf, names: set[str]) -> bool:
    words = [w.lower() for w in leaf.words if w.lower() not in _GENERIC] or [leaf.words[-1].lower()]
    last = words[-1]
    return last in names or any(part in names for part in re.split(r"[_\d]+", last))


def _from_shape(leaf: Leaf, stack: int, embed: int, torch_order: bool, experts: bool) -> Role:
    shape = leaf.shape[stack:]
    if len(shape) < 2:
        cuttable = tuple(range(stack, len(leaf.shape))) if shape and shape[0] != embed else ()
        return Role("vector", stack, inner=cuttable, embed=None if cuttable or not shape else stack)
    places = [i for i, n in enumerate(shape) if n == embed]
    if not places:
        order = sorted(range(len(shape)), key=lambda i: (-shape[i], i))
        return Role("matrix", stack, inner=tuple(stack + i for i in order))
    at = places[0]
    if len(places) > 1:
        # Both ends have the same width: the names say which way it goes.
        out = _named(leaf, _OUT_OF_BLOCK) and not _named(leaf, _INTO_BLOCK)
        at = places[-1] if out != torch_order else places[0]
    others = [i for i in range(len(shape)) if i != at]
    if experts:
        rest = sorted((i for i in others if i), key=lambda i: (-shape[i], i))
        inner = tuple(stack + i for i in (0, *rest))
        return Role("matrix", stack, embed=stack + at, inner=inner, experts=True)
    # Heads come before the features of a head, whichever side the embed dimension is on.
    split_heads = len(shape) == 3 and at in (0, 2)
    inner = others[:1] if split_heads else sorted(others, key=lambda i: (-shape[i], i))
    return Role("matrix", stack, embed=stack + at, inner=tuple(stack + i for i in inner))


def _from_names(leaf: Leaf) -> Role:
    names = leaf.axes or ()
    stack = names.count("layers")
    rank = len(names) - stack
    never = {None, "embed", "latent", "layers", "head_dim", "state", "conv", "codes", "batch", "sequence"}
    inner = tuple(i for i, name in enumerate(names) if name not in never)
    embed = names.index("embed") if "embed" in names else None
    kind = "vector" if rank < 2 else "matrix"
    return Role(kind, stack, embed=embed, inner=inner, experts="experts" in names)


def _embeddings(
    leaves: Sequence[Leaf], roles: list[Role], input_shape: tuple[int, ...], embed: int
) -> list[Role]:
    """Which matrices are tables of tokens: they are looked up in, or score, or both."""
    found = list(roles)
    lookups, heads = [], []
    # Where blocks repeat, what stands once at their ends and is not as wide as the input is a table of tokens.
    blocks = any(role.kind == "matrix" and role.repeats > 1 for role in roles)
    of_tokens = blocks and len(input_shape) == 2
    for i, (leaf, role) in enumerate(zip(leaves, roles, strict=True)):
        if role.kind != "matrix" or role.embed is None or len(leaf.shape) - role.stack != 2:
            continue
        named = leaf.axes is not None
        words = {part for w in leaf.words for part in re.split(r"[_\d]+", w.lower())}
        if named:
            vocabulary = "vocab" in (leaf.axes or ())
            is_head = vocabulary and role.embed < role.inner[0]
            is_lookup = vocabulary and not is_head
        else:
            alone = role.repeats == 1
            at_end = role.embed == len(leaf.shape) - 1
            width = leaf.shape[role.inner[0]]
            table = of_tokens and alone and width not in (embed, input_shape[-1])
            is_head = alone and (bool(words & _HEAD) or (table and not at_end and not words & _EMBEDDING))
            is_lookup = alone and not is_head and (bool(words & _EMBEDDING) or (table and at_end))
        if is_head:
            heads.append(i)
        elif is_lookup:
            lookups.append(i)
    scoring = not heads and len(input_shape) == 2  # tokens go in and something scores them
    for i in lookups:
        positions = {"wpe", "position", "positions", "pos"} & set(
            "_".join(leaves[i].words).lower().split("_")
        )
        tied = scoring and not positions and leaves[i].elements == max(leaves[j].elements for j in lookups)
        found[i] = replace(roles[i], kind="tied" if tied else "lookup", group=(*leaves[i].words, "table"))
    for i in heads:
        found[i] = replace(roles[i], kind="head", group=(*leaves[i].words, "table"))
    return found


def _sized(leaf: Leaf, role: Role, embed: int, length: int) -> Role:
    """With the work of an array: two operations a parameter; what leads out of attention has attention's own, too."""
    if role.kind in ("vector", "lookup"):
        width = embed if role.kind == "lookup" else 0
        return replace(role, out_features=width, sum_width=embed)
    if not leaf.elements:  # of a shape with a 0: it is there, and nothing is done with it
        return replace(role, flops=0.0, out_features=0, sum_width=embed)
    inside = leaf.elements
    for n in leaf.shape[: role.stack]:
        inside //= n
    if role.embed is None:
        shape = leaf.shape[role.stack :]
        return replace(role, flops=2.0 * leaf.elements, out_features=max(shape), sum_width=max(shape))
    outward = role.kind == "matrix" and role.embed == len(leaf.shape) - 1
    width = inside // leaf.shape[role.embed]
    flops = 2.0 * leaf.elements
    if _out_of_attention(leaf, role):
        # Scores and mixing take 4 · length · width a position and layer; causal ones half of it.
        flops += 2.0 * length * width * (leaf.elements // inside)
    return replace(role, flops=flops, sum_width=embed, out_features=embed if outward else width)


def _out_of_attention(leaf: Leaf, role: Role) -> bool:
    last = role.embed == len(leaf.shape) - 1
    if role.kind != "matrix" or role.experts:
        return False
    if leaf.axes is not None:
        return last and "heads" in leaf.axes and "head_dim" in leaf.axes
    if len(leaf.shape) - role.stack == 3:
        return last  # [heads, features of a head, embed]
    parts = {part for word in leaf.words for part in re.split(r"[_\d]+", word.lower())}
    attends = bool(parts & {"attn", "attention"})
    return attends and _named(leaf, _OUT_OF_BLOCK) and not _named(leaf, _INTO_BLOCK)


def _with_sums(leaves: Sequence[Leaf], roles: list[Role], embed: int) -> list[Role]:
    """Share the sums of each group among its matrices: one forward and one backward for each pair in and out."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, role in enumerate(roles):
        if role.kind == "matrix":
            groups.setdefault(role.group, []).append(i)
    found = list(roles)
    for members in groups.values():
        joined = [i for i in members if roles[i].embed is not None]
        out = sum(1 for i in joined if roles[i].embed == len(leaves[i].shape) - 1)
        pairs = max(min(out, len(joined) - out), -(-len(joined) // 4), 1)
        for i in members:
            # Without an embed dimension nothing is known of what stands before and behind: a sum each.
            share = pairs / len(joined) if roles[i].embed is not None else 1.0
            found[i] = replace(roles[i], forward_sums=share, backward_sums=share)
    for i, role in enumerate(roles):
        if role.kind in ("lookup", "tied"):
            found[i] = replace(found[i], forward_sums=1.0)
        if role.kind in ("head", "tied"):
            found[i] = replace(found[i], backward_sums=1.0)
    return found


def _without_numbers(leaf: Leaf) -> tuple[str, ...]:
    return tuple(re.sub(r"\d+", "#", word) for word in leaf.words)


def _experts(
    leaves: Sequence[Leaf], stacks: Sequence[int], holders: set[tuple[str, ...]], embed: int
) -> set[int]:
    """Arrays whose first dimension counts experts: three-dimensional ones, side by side, both into and out of a block.

    Heads do not look so: theirs is the second dimension on the way in, and the first on the way out.
    """
    beside: dict[tuple[str, ...], list[int]] = {}
    for i, (leaf, stack) in enumerate(zip(leaves, stacks, strict=True)):
        shape = leaf.shape[stack:]
        if leaf.axes is None and len(shape) == 3 and shape[0] != embed and embed in shape[1:]:
            beside.setdefault(_group(leaf, holders), []).append(i)
    found: set[int] = set()
    for members in beside.values():
        shapes = [leaves[i].shape[stacks[i] :] for i in members]
        named = any("expert" in word.lower() for i in members for word in leaves[i].words)
        both = any(s[1] == embed for s in shapes) and any(s[2] == embed for s in shapes)
        if len({s[0] for s in shapes}) == 1 and (named or both):
            found.update(members)
    return found


def _holders(leaves: Sequence[Leaf]) -> set[tuple[str, ...]]:
    """Paths of single layers: what is in them is called ``weight``, ``bias`` and the like."""
    children: dict[tuple[str, ...], list[str]] = {}
    for leaf in leaves:
        children.setdefault(leaf.words[:-1], []).append(leaf.words[-1].lower())
    return {path for path, names in children.items() if path and set(names) <= _GENERIC}


def _group(leaf: Leaf, holders: set[tuple[str, ...]]) -> tuple[str, ...]:
    """The path of the block that a layer is in."""
    layer = leaf.words[:-1] if leaf.words[:-1] in holders else leaf.words
    return layer[:-1]
