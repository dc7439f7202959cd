"""Random malformed compositions: each compiles, or is refused with an error of the library's own.

Everything that the logical API takes is tried with everything that could be given to it: names that are none, shapes
and kinds that do not fit, expressions of other models, blocks used twice, settings of what is not there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capibara import compose as ml

BACKEND = ml.JaxBackend()
NUMPY = ml.NumpyBackend()
NAMES = ("x", "y", "h", "output", "input", "out")
ODD_NAMES = ("", "1x", "a b", "class", "_z", "é", "x.y")

BLOCKS: tuple[Callable[[], Any], ...] = (
    ml.Relu,
    ml.Add,
    ml.MatrixMultiply,
    ml.Where,
    ml.LogicalNot,
    lambda: ml.Linear(3),
    lambda: ml.Linear(2, name="twice"),
    lambda: ml.Embedding(4, 3),
    lambda: ml.Concat(2, 1),
    lambda: ml.Split(2, -1),
    lambda: ml.Sum(1),
    lambda: ml.Reshape((2, -1)),
    lambda: ml.Transpose((1, 0)),
    lambda: ml.Indexer((0, slice(1, None))),
    lambda: ml.Repeat(ml.Linear(3), 2, mode="unroll"),
    lambda: ml.Remat(ml.RMSNorm()),
    lambda: ml.op("unknown"),
    lambda: ml.functional(lambda a, b=2.0: (a + b, a @ b)),
    lambda: ml.MLP(activations=[ml.Relu(), ml.Tanh()], dimensions=[3, 2]),
    ml.Model,
)
VALUES: tuple[Any, ...] = (
    None, 0, 1, -2.5, True, float("nan"), float("inf"), 10**40, [1, 2, 3], [[1.0], [2.0]], [], [[1], [2, 3]], [True, 2],
    (0.5, None), ["x"], np.ones((2, 3)), np.arange(3), np.array([True, False]), np.array(["a"]), np.ones((2, 0)), {},
    object(), slice(0, 2), "x", ..., 1j, ml.TBD, ml.Tensor([1.0, 2.0]), b"x", ml.Relu, np.float32(2), np.int64(3),
)  # fmt: skip
SHAPES: tuple[Any, ...] = (
    (2, 3), (), (None,), (..., 3), ("n", "n"), ("*a", 2), ("*a", "*b"), (-1,), "2 3", "b *r", 3, (2.5,), (0,), None,
    (10**12,),
)  # fmt: skip
TYPES: tuple[Any, ...] = (
    float, int, bool, "float", "int", "nothing", ml.Tensor, ml.Tensor[int], ml.float32, tuple, list[float], str, 3,
    int | float, None,
)  # fmt: skip
OPERATORS: tuple[Callable[[Any, Any], Any], ...] = (
    lambda a, b: a + b, lambda a, b: b - a, lambda a, b: a * b, lambda a, b: a / b, lambda a, b: a // b,
    lambda a, b: b**a, lambda a, b: a @ b, lambda a, b: a % b, lambda a, b: a > b, lambda a, b: a <= b,
    lambda a, b: a & b, lambda a, b: a ^ b, lambda a, b: a << b, lambda a, b: a.eq(b), lambda a, b: a[b],
    lambda a, b: a[b, 0], lambda a, b: a[:, None, ..., b], lambda a, b: a[b:], lambda a, b: a.sum(b),
    lambda a, b: a.mean(0, b), lambda a, b: a.reshape(b), lambda a, b: a.reshape(b, 2), lambda a, b: a.transpose(b),
    lambda a, b: a.cast(b), lambda a, b: a.split(b)[0], lambda a, b: a.size(b), lambda a, b: a.clip(b),
    lambda a, b: a.expand_dims(b), lambda a, b: a.broadcast_to(b), lambda a, b: a.var(0, False, b),
    lambda a, b: a.T.shape, lambda a, b: abs(-a).exp().log(), lambda a, b: (~a).any(0), lambda a, b: a.argmax(b),
    lambda a, b: a.flatten(b), lambda a, b: a.item(), lambda a, b: a.swapaxes(b, 0), lambda a, b: a.squeeze(b),
)  # fmt: skip


class Maker:
    """A model that grows by random steps, each of which may be refused."""

    def __init__(self, data: st.DataObject) -> None:
        self.draw = data.draw
        self.model = ml.Model()
        self.models = [self.model]
        self.blocks: list[Any] = []
        self.things: list[Any] = [ml.IOKey("x"), ml.IOKey()]
        self.wild = self.pick((True, False))  # or mostly of what could be right
        self.refused = 0

    def pick(self, row: Any) -> Any:
        return row[self.draw(st.integers(0, len(row) - 1))]

    def name(self) -> Any:
        return self.pick(NAMES + NAMES + NAMES + ODD_NAMES if self.wild else NAMES)

    def value(self) -> Any:
        """Something that a port may be told to be joined to, or that no port may."""
        kind = self.pick("nnnnttttpppvkl" if self.wild else "nnnnttttpppp")
        if kind == "n":
            return self.name()
        if kind == "t":
            return self.pick(self.things)
        if kind == "p" and self.blocks:
            block = self.pick(self.blocks)
            return block.port(self.pick(list(block.wires) or ["input"]))
        if kind == "k":
            return ml.IOKey(
                self.pick((None, *NAMES)),
                self.pick((ml.TBD, ml.TBD, ml.TBD, *VALUES)),
                self.pick((None, None, *SHAPES)),
                self.pick((None, None, *TYPES)),
                self.pick((None, True, False)),
                self.pick((None, None, True, False)),
                self.pick((None, None, None, (0, 1), (2, 1))),
            )
        if kind == "l":
            return [self.pick(self.things), self.pick(VALUES)]
        return self.pick(VALUES)

    def step(self) -> None:
        try:
            self.pick(
                (
                    self.add,
                    self.add,
                    self.add,
                    self.chain,
                    self.express,
                    self.express,
                    self.call,
                    self.set,
                    self.join,
                )
            )()
        except ml.ComposeError:
            self.refused += 1

    def block(self) -> Any:
        if self.blocks and self.pick((False, False, False, True)):
            return self.pick(self.blocks)
        block = self.pick(BLOCKS)()
        self.blocks.append(block)
        if isinstance(block, ml.Model):
            self.models.append(block)
        return block

    def placed(self) -> Any:
        block = self.block()
        keys = [*block.wires] or ["input"]
        given = {self.pick(keys): self.value() for _ in range(self.pick((0, 1, 2, 3)))}
        if self.pick((False,) * 9 + (True,)):
            given["nothing"] = self.value()
        return block(**given)

    def add(self) -> None:
        model = self.pick([self.model, self.model, *self.models])
        model |= self.placed()

    def chain(self) -> None:
        model = self.pick([self.model, self.model, *self.models])
        model += self.pick((self.placed, self.block, self.value))()

    def call(self) -> None:
        block = self.block()
        made = block(*[self.value() for _ in range(self.pick((1, 1, 2, 3)))])
        self.things.extend(made if isinstance(made, tuple) else [made])

    def express(self) -> None:
        left = self.pick(self.things)
        self.things.append(
            self.pick(OPERATORS)(left, self.pick((self.value, lambda: self.pick(self.things)))())
        )

    def set(self) -> None:
        model, key = self.pick(self.models), self.value()
        config = {key: self.pick((*SHAPES, *TYPES, *VALUES))} if isinstance(key, str | ml.Port) else {}
        self.pick(
            (
                lambda: model.set_shapes(config),
                lambda: model.set_types(config),
                lambda: model.set_values(config),
                lambda: model.set_differentiability(config),
                lambda: model.bind_state_keys(key, self.value(), self.pick(VALUES)),
                lambda: model.rename_key(key, self.name()),
                lambda: model.expose_keys(key, **{self.pick(NAMES): self.value()}),
                lambda: model.set_cins(key),
                lambda: model.set_couts(key),
                lambda: (model.cin, model.cout),
            )
        )()

    def join(self) -> None:
        model = self.pick(self.models)
        key = self.pick((None, self.name(), ml.IOKey(self.pick((None, *NAMES)))))
        self.pick((model.connect, model.merge_connections))(self.value(), self.value())
        if key is not None:
            model.connect(self.value(), key=key)

    def finish(self) -> None:
        for model in self.models[:3]:
            text = model.summary(verbose=False, depth=None, types=True)
            assert "parameters" in text
        try:
            model = self.model
            if self.pick((False, True)):
                model = ml.Model.create(**{self.pick(NAMES): self.pick(self.things)})
            given = {
                k: self.pick(((2, 3), (3, 3), (3,), ()))
                for k in model.input_keys
                if self.pick((True, True, False))
            }
            options = {"shapes": given, "jit": False, "safe_names": self.pick((True, False))}
            compiled = ml.compile(model, BACKEND, **options)
        except ml.ComposeError:
            self.refused += 1
            return
        assert "def forward" in compiled.source
        self.run(compiled, model, options)

    def run(self, compiled: Any, model: Any, options: dict[str, Any]) -> None:
        """What compiled also runs, where all sizes are known and small."""
        shapes = list(compiled.get_shapes(symbolic=False).values())
        if any(s is None or None in s or np.prod(s) > 1000 for s in shapes):
            return
        try:
            params, state = compiled.randomize_params(), compiled.init_state()
            inputs = {
                k: np.ones(spec.shape, {"int32": "int32", "bool": "bool"}.get(spec.dtype, "float32"))
                for k, spec in compiled.inputs.items()
            }
            outputs, _ = compiled.evaluate(params, inputs, state=state)
        except ml.ComposeError:
            return
        for key, spec in compiled.outputs.items():
            assert outputs[key].shape == spec.shape
            kind = {"int32": "i", "bool": "b"}.get(spec.dtype, "f")
            assert np.asarray(outputs[key]).dtype.kind == kind
        self.agrees_with_numpy(model, options, outputs, params, inputs, state)

    def agrees_with_numpy(
        self, model: Any, options: dict[str, Any], outputs: Any, params: Any, inputs: Any, state: Any
    ) -> None:
        """The same model with NumPy's operations, which share no code with JAX's, gives the same numbers."""
        with np.errstate(all="ignore"):
            oracle = ml.compile(model, NUMPY, **options)
            expected, _ = oracle.evaluate(params, inputs, state=state)
        for key, value in outputs.items():
            np.testing.assert_allclose(
                np.asarray(value), np.asarray(expected[key]), rtol=1e-4, atol=1e-5, err_msg=key
            )


def grow(data: st.DataObject) -> None:
    maker = Maker(data)
    for _ in range(data.draw(st.integers(1, 16))):
        maker.step()
    maker.finish()


COMMON: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "derandomize": True,
    "database": None,
}


@given(data=st.data())
@settings(max_examples=150, **COMMON)
def test_malformed_compositions_are_refused_by_the_library(data: st.DataObject) -> None:
    grow(data)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=5000, **COMMON)
def test_five_thousand_malformed_compositions(data: st.DataObject) -> None:
    grow(data)


@pytest.mark.slow
def test_ten_thousand_nodes() -> None:
    model = ml.Model()
    for _ in range(10_000):
        model += ml.Relu()
    compiled = ml.compile(model, BACKEND, shapes={"input": (2,)}, jit=False)
    assert compiled.source.count("ops.relu(") == 10_000
    x: Any = ml.IOKey("x")
    for _ in range(10_000):
        x = x + 1
    compiled = ml.compile(ml.Model.create(y=x), BACKEND, shapes={"x": (2,)}, jit=False)
    assert compiled.source.count("ops.add(") == 10_000
