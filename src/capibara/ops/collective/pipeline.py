"""Training a stack of layers that is cut into stages, one for each device along a mesh axis.

A batch is cut into microbatches, which go through the stages one after the other, so that all stages are busy, each
with another microbatch. With *one forward, one backward* (1F1B; Narayanan et al., "PipeDream", SOSP 2019, and
"Efficient Large-Scale Language Model Training on GPU Clusters", arXiv:2104.04473) the gradient of a microbatch is
computed as soon as it can be, and not when all have passed. So a stage has the inputs of at most
``2 p - 1`` of them in memory, for ``p`` stages, however many there are in all.

In one tick every stage takes one microbatch forward and another one, an earlier, backward::

    tick         0    1    2    3    4    5           F n: forward, B n: backward of microbatch n
    stage 0     F0   F1   F2 B0   F3 B1   B2   B3     stage s: F n in tick n + s, B n in tick n + 2 (p - 1) - s
    stage 1          F0 B0   F1 B1  F2 B2   F3 B3

Devices wait for each other in every tick, so it is the tick's work that counts: a forward pass in the first ``p - 1``
ticks, only a backward pass in the last ``p - 1``, and both in the ``m`` between them. That is the time of ``m + p - 1``
passes in both directions: the *bubble*, the part of it that a stage does nothing useful, is ``(p - 1) / (m + p - 1)``.
If forward and backward passes were in ticks of their own, every tick would take as long as a backward pass. All devices
run one program without branches: what a stage computes while it has nothing to do is dropped.

Of a microbatch a stage keeps only its input, and state that goes with it. The backward pass computes the stage again.

What comes after the last stage (scores and loss) is often more work than a layer. Its tokens are divided among all
stages, which have nothing else to do at that time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.jax_versions import varying_axes

__all__ = ["Pipeline", "Sums"]


@dataclass(frozen=True)
class Sums:
    """Of all microbatches: the loss and other scalars, each times the microbatch's share, the state after them, and the
    scores as they are."""

    total: Any
    extras: Any
    state: Any
    scores: Any


jax.tree_util.register_dataclass(Sums, data_fields=["total", "extras", "state", "scores"], meta_fields=[])


@dataclass(frozen=True)
class Pipeline:
    """A model in three parts, inside ``jax.shard_map`` over ``axis``.

    Attributes:
      axis: the mesh axis of the stages.
      enter: ``(outer, rows, key) -> x``, what the first stage is given of a microbatch.
      stage: ``(blocks, x, rows, state, key) -> (x, state, extras)``; ``blocks`` and ``state`` are this device's, and
        ``extras`` a dict of scalars.
      leave: ``(outer, x, targets) ->`` the sum of the losses of the tokens of ``x``, or with ``score`` an array of
        such sums; ``targets`` are arrays ``[rows, positions]``.
      counted: the extra that is added to the loss; the others are only reported.
      place: ``(what, tree) -> tree`` constrains the sharding over other mesh axes of ``"x"`` (also with leading
        dimensions), ``"outer"`` or ``"blocks"``.
      score: ``(sums, rows) -> (loss, scores)`` for a loss that is not a sum over tokens: of a microbatch, from what
        ``leave`` gives for all of its tokens, in float32; ``scores`` is a dict of scalars. None: the sum is the loss.
    """

    axis: str
    enter: Callable[..., Any]
    stage: Callable[..., Any]
    leave: Callable[..., Any]
    counted: str | None = None
    place: Callable[[str, Any], Any] = lambda what, tree: tree
    score: Callable[[Any, Any], Any] | None = None

    def losses(
        self, outer: Any, blocks: Any, state: Any, rows: Any, targets: Any, scale: Any, share: Any, key: Any
    ) -> Sums:
        """The loss without gradients: of all microbatches, in ``m + p - 1`` ticks.

        Args:
          outer: the parameters of ``enter`` and ``leave``, the same on all devices. blocks, state: this stage's.
          rows, targets: arrays ``[microbatches, …]``, the same on all devices.
          scale: what the sum of the losses (with ``score``: each microbatch's loss) is multiplied by.
          share: ``[microbatches]``, what the extras of each are multiplied by.
          key: a random key, or None.
        """
        run = _Run(self, outer, blocks, rows, targets, scale, share, key)
        carry = _varying(self.axis, run.start(state, memory=False))
        carry, _ = lax.scan(lambda c, t: (run.tick(c, t, head=False, back=False), ()), carry, run.warm_up)
        carry, _ = lax.scan(lambda c, t: (run.tick(c, t, head=True, back=False), ()), carry, run.steady)
        return run.finish(carry)

    def sums(self, outer: Any, blocks: Any, state: Any, rows: Any, targets: Any, key: Any) -> Any:
        """What ``leave`` gives for all tokens of each microbatch: arrays ``[microbatches, …]`` in float32.

        Arguments as of :meth:`losses`.
        """
        run = _Run(self, outer, blocks, rows, targets, None, None, key)
        # What only a score reads of the rows need not be there.
        carry = _varying(self.axis, run.start(state, memory=False, scored=False))
        carry, _ = lax.scan(lambda c, t: (run.tick(c, t, head=False, back=False), ()), carry, run.warm_up)
        _, found = lax.scan(run.leaving, carry, run.steady)
        return jax.tree.map(lambda part: lax.psum(part, self.axis), found)

    def gradients(
        self, outer: Any, blocks: Any, state: Any, rows: Any, targets: Any, scale: Any, share: Any, key: Any
    ) -> tuple[Sums, Any, Any]:
        """``(sums, gradient of outer, gradient of blocks)``; arguments as of :meth:`losses`."""
        run = _Run(self, outer, blocks, rows, targets, scale, share, key)
        carry = _varying(self.axis, run.start(state, memory=True))
        carry, _ = lax.scan(
            lambda c, t: (run.tick(c, t, head=False, back=False, keep=True), ()), carry, run.warm_up
        )
        carry, _ = lax.scan(lambda c, t: (run.tick(c, t, head=True, back=True), ()), carry, run.steady)
        carry, _ = lax.scan(lambda c, t: (run.drain(c, t), ()), carry, run.ending)
        of_outer = jax.tree.map(lambda g: lax.psum(g, self.axis), carry["of_outer"])
        return run.finish(carry), of_outer, carry["of_blocks"]


class _Run:
    """One pass over a batch."""

    def __init__(
        self,
        pipeline: Pipeline,
        outer: Any,
        blocks: Any,
        rows: Any,
        targets: Any,
        scale: Any,
        share: Any,
        key: Any,
    ) -> None:
        self.p, self.axis = pipeline, pipeline.axis
        self.stages, self.here = lax.axis_size(self.axis), lax.axis_index(self.axis)
        self.count = jax.tree.leaves(rows)[0].shape[0]
        # Typed as different on each device: otherwise the gradient of each use would be summed over them at once.
        self.outer, self.blocks = _varying(self.axis, (outer, blocks))
        self.rows, self.targets, self.scale, self.share = _varying(self.axis, (rows, targets, scale, share))
        self.key = key
        ahead = self.stages - 1
        self.warm_up = jnp.arange(ahead)
        self.steady = jnp.arange(ahead, ahead + self.count)
        self.ending = jnp.arange(ahead + self.count, 2 * ahead + self.count)
        # The microbatches of which the first stage has the input at one time; one place more is for what is dropped.
        self.slots = min(self.count + 1, 2 * self.stages - 1)

    def start(self, state: Any, *, memory: bool, scored: bool = True) -> dict[str, Any]:
        """What a tick carries on, before the first one."""
        first = jax.eval_shape(lambda: self.p.enter(self.outer, _at(self.rows, 0), self._key(0, 0)))
        x = self.p.place("x", jnp.zeros(first.shape, first.dtype))
        extras = jax.eval_shape(
            lambda: self.p.stage(self.blocks, x, _at(self.rows, 0), state, self._key(0, 1))[2]
        )
        carry = {
            "x": x,
            "state": state,
            "total": jnp.zeros((), jnp.float32),
            "extras": jax.tree.map(lambda e: jnp.zeros((), jnp.float32), extras),
            "scores": self._scores(x) if scored else {},
        }
        if memory:
            kept = self.p.place("x", jnp.zeros((self.slots, *x.shape), x.dtype))
            states = jax.tree.map(lambda s: jnp.zeros((self.slots, *s.shape), s.dtype), state)
            carry |= {
                "kept": (kept, states),
                "cotangent": x,
                "of_outer": self.p.place("outer", _zeros(self.outer)),
                "of_blocks": self.p.place("blocks", _zeros(self.blocks)),
            }
        return carry

    def _forward(self, carry: dict[str, Any], t: Any, *, keep: bool = False) -> tuple[dict[str, Any], Any]:
        """A forward pass; also what this stage gives."""
        number = t - self.here
        active = (number >= 0) & (number < self.count)
        safe = jnp.clip(number, 0, self.count - 1)
        rows = _at(self.rows, safe)
        entered = self.p.enter(self.outer, rows, self._key(safe, 0))
        x = self.p.place("x", jnp.where(self.here == 0, entered, carry["x"]))
        before = carry["state"]
        y, after, extras = self.p.stage(self.blocks, x, rows, before, self._key(safe, 1))
        y = self.p.place("x", y)
        carry = dict(carry)
        carry["state"] = _where(active, after, before)
        if self.share is not None:
            share = jnp.where(active, self.share[safe], 0.0)
            carry["extras"] = {
                name: carry["extras"][name] + jnp.where(active, value, 0) * share
                for name, value in extras.items()
            }
        if keep:
            place = jnp.where(active, number, self.count) % self.slots
            carry["kept"] = jax.tree.map(
                lambda ring, new: lax.dynamic_update_index_in_dim(ring, new, place, 0),
                carry["kept"],
                (x, before),
            )
        return carry, y

    def _send(self, carry: dict[str, Any], y: Any) -> None:
        """What this stage gives, to the next one."""
        carry["x"] = lax.ppermute(y, self.axis, [(i, i + 1) for i in range(self.stages - 1)])

    def tick(
        self, carry: dict[str, Any], t: Any, *, head: bool, back: bool, keep: bool = False
    ) -> dict[str, Any]:
        """A forward pass; with ``head`` also the loss of the last stage's, with ``back`` a backward pass."""
        carry, y = self._forward(carry, t, keep=keep or back)
        of_y = None
        if head:
            carry["total"], carry["scores"], of_outer, of_y = self._head(
                carry["total"], carry["scores"], y, t - (self.stages - 1), back
            )
            if back:
                carry["of_outer"] = self._added("outer", carry["of_outer"], of_outer)
        self._send(carry, y)
        return self._backward(carry, t, of_y) if back else carry

    def leaving(self, carry: dict[str, Any], t: Any) -> tuple[dict[str, Any], Any]:
        """A forward pass, and this device's part of the last stage's sums."""
        carry, y = self._forward(carry, t)
        part, own, divided = self._part(y, t - (self.stages - 1))
        self._send(carry, y)
        sums = self._left(self.outer, part, own)
        last = self.here == self.stages - 1
        return carry, sums if divided else _where(last, sums, jax.tree.map(jnp.zeros_like, sums))

    def drain(self, carry: dict[str, Any], t: Any) -> dict[str, Any]:
        """A backward pass alone."""
        return self._backward(dict(carry), t, None)

    def _backward(self, carry: dict[str, Any], t: Any, of_y: Any) -> dict[str, Any]:
        number = t - (2 * (self.stages - 1) - self.here)
        active = (number >= 0) & (number < self.count)
        safe = jnp.clip(number, 0, self.count - 1)
        rows = _at(self.rows, safe)
        x, before = _at(carry["kept"], safe % self.slots)
        cotangent = carry["cotangent"]
        if of_y is not None:
            cotangent = jnp.where(self.here == self.stages - 1, of_y, cotangent)

        def again(blocks: Any, x: Any) -> Any:
            y, _, extras = self.p.stage(blocks, x, rows, before, self._key(safe, 1))
            return y, {} if self.p.counted is None else {self.p.counted: extras[self.p.counted]}

        (_, extras), pull = jax.vjp(again, self.blocks, x)
        of_extras = jax.tree.map(lambda e: self.share[safe].astype(e.dtype), extras)
        of_blocks, of_x = pull((cotangent, of_extras))
        carry["of_blocks"] = self._added("blocks", carry["of_blocks"], of_blocks, active)
        of_x = self.p.place("x", of_x)
        _, pull = jax.vjp(lambda outer: self.p.enter(outer, rows, self._key(safe, 0)), self.outer)
        carry["of_outer"] = self._added("outer", carry["of_outer"], pull(of_x)[0], active & (self.here == 0))
        carry["cotangent"] = lax.ppermute(of_x, self.axis, [(i + 1, i) for i in range(self.stages - 1)])
        return carry

    def _part(self, y: Any, number: Any) -> tuple[Any, Any, bool]:
        """Of the last stage's output this device's positions, with the targets of microbatch ``number``; and whether
        they are a part, or all of them on all devices."""
        targets = _at(self.targets, number)
        positions = y.shape[1]
        if positions % self.stages:
            return y, targets, False
        # Part by part: for a sum or a gather along this axis XLA's TPU compiler first gathers the rows of all devices
        # along the others (in float32 for a sum, as XLA for CPUs has none over a part of the mesh in bfloat16).
        last, size = self.stages - 1, positions // self.stages
        *others, part = jnp.split(y, self.stages, axis=1)
        for i, each in enumerate(others):
            part = jnp.where(self.here == i, lax.ppermute(each, self.axis, [(last, i)]), part)
        part = self.p.place("x", part)
        own = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, self.here * size, size, 1), targets)
        return part, own, True

    def _left(self, outer: Any, x: Any, targets: Any) -> Any:
        return self.p.leave(outer, x, targets).astype(jnp.float32)

    def _head(self, total: Any, scores: Any, y: Any, number: Any, back: bool) -> tuple[Any, Any, Any, Any]:
        """The loss of the last stage's output, that of microbatch ``number``, added to ``total``, and its scores;
        its gradients."""
        last = self.here == self.stages - 1
        part, own, divided = self._part(y, number)
        if back:
            sums, pull = jax.vjp(lambda outer, x: self._left(outer, x, own), self.outer, part)
        else:
            sums, pull = self._left(self.outer, part, own), None
        if self.p.score is None:
            counted = True if divided else last
            weight = jnp.where(counted, self.scale, 0)
            total = total + jnp.where(counted, sums * weight, 0)
        else:
            rows = _at(self.rows, number)
            whole = lax.psum(sums, self.axis) if divided else sums
            (value, more), of_sums = jax.value_and_grad(self.p.score, has_aux=True)(whole, rows)
            weight = of_sums * self.scale
            total = total + jnp.where(last, value * self.scale, 0)
            scores = {name: scores[name] + jnp.where(last, found, 0) for name, found in more.items()}
        if pull is None:
            return total, scores, None, None
        of_outer, of_part = pull(jnp.asarray(weight, sums.dtype))
        if not divided:
            of_outer = _where(last, of_outer, jax.tree.map(jnp.zeros_like, of_outer))
            return total, scores, of_outer, of_part
        return total, scores, of_outer, self._joined(of_part)

    def _joined(self, part: Any) -> Any:
        """For the last stage all positions, from each device's part of them."""
        last = self.stages - 1
        parts = [lax.ppermute(part, self.axis, [(i, last)]) for i in range(last)]
        return self.p.place("x", jnp.concatenate([*parts, part], axis=1))

    def _scores(self, x: Any) -> dict[str, Any]:
        """Where scores are added up, before the first one."""
        score = self.p.score
        if score is None:
            return {}
        rows, targets = _at(self.rows, 0), _at(self.targets, 0)
        names = jax.eval_shape(lambda: score(self._left(self.outer, x, targets), rows)[1])
        return {name: jnp.zeros((), jnp.float32) for name in names}

    def _added(self, what: str, sums: Any, more: Any, active: Any = None) -> Any:
        def add(total: Any, new: Any) -> Any:
            new = new if active is None else jnp.where(active, new, jnp.zeros((), new.dtype))
            return total + new.astype(total.dtype)

        return self.p.place(what, jax.tree.map(add, sums, self.p.place(what, more)))

    def _key(self, number: Any, part: int) -> Any:
        """The key of a microbatch: of its entry, or of this stage."""
        if self.key is None:
            return None
        own = jax.random.fold_in(self.key, number)
        return jax.random.fold_in(own, self.here + 1 if part else 0)

    def finish(self, carry: dict[str, Any]) -> Sums:
        whole = {name: lax.psum(carry[name], self.axis) for name in ("total", "extras", "scores")}
        return Sums(state=carry["state"], **whole)


def _at(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, keepdims=False), tree)


def _where(condition: Any, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def _zeros(tree: Any) -> Any:
    """For sums of many small numbers: at least float32, whatever the parameters are stored in."""
    return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), tree)


def _varying(axis: str, tree: Any) -> Any:
    """The same values, typed as different on each device along the axis."""

    def vary(x: Any) -> Any:
        return x if axis in varying_axes(jax.typeof(x)) else lax.pcast(x, (axis,), to="varying")

    return jax.tree.map(vary, tree)
