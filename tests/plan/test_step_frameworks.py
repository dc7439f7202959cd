"""Step functions of Flax and Equinox: which leaves are arrays, names of dimensions, rules for these, meshes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P
from tpu_compiler import needs_libtpu

import capibara.plan
from capibara.config.axes import AxisRules
from capibara.plan import PlanError, parse_slice, plan, step_work
from capibara.plan.step_arguments import RuleList, arrays_of, axis_names, mesh_choices, only_arrays, rules_of
from capibara.sharding import Layout

PAGE = Path(__file__).parents[2] / "docs" / "plan" / "steps.md"
# Of MaxText's base.yml, those that a dense decoder uses.
MAXTEXT = [
    ["activation_embed_and_logits_batch", ["data", "stage", "fsdp", "fsdp_transpose", "expert"]],
    ["activation_vocab", ["tensor", "tensor_sequence"]],
    ["activation_vocab", ["tensor"]],
    ["activation_vocab", "tensor_sequence"],
    ["vocab", ["tensor", "tensor_sequence", "autoregressive"]],
    ["embed_vocab", ["fsdp", "fsdp_transpose", "context", "context_usp_ulysses", "expert"]],
    ["q_heads", ["tensor", "tensor_sequence", "autoregressive"]],
    ["kv", []],
    ["mlp", ["fsdp_transpose", "tensor", "tensor_sequence", "autoregressive"]],
    ["embed", ["fsdp", "fsdp_transpose", "context", "context_usp_ulysses", "expert"]],
    ["embed", ["fsdp", "context", "context_usp_ulysses", "expert"]],
    ["norm", ["tensor"]],
    ["layers", "stage"],
]


def described(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def two_layers(params: Any, x: Any) -> Any:
    return x @ params["in"] @ params["out"]


ARGS = ({"in": described(64, 256), "out": described(256, 64)}, described(32, 64))
NAMES = ({"in": ("embed", "mlp"), "out": ("mlp", "embed")}, ("rows", None))
RULES = [("rows", ("data", "fsdp")), ("embed", "fsdp"), ("mlp", "tensor")]


def test_what_is_not_an_array_is_part_of_the_program(tmp_path):
    """An activation function, a text, and a number, which is an argument as for jax.jit."""

    def step(model, x):
        assert model["name"] == "relu"
        return {**model, "w": model["w"] * model["scale"]}, model["act"](x @ model["w"])

    model = {"act": jax.nn.relu, "name": "relu", "w": described(128, 64), "scale": 2.0}
    work = step_work(step, (model, described(32, 128)), folder=tmp_path)
    assert work.shapes == ((), (128, 64), (32, 128))
    specs, rows = work.specs(Layout(mesh=(("data", 4), ("model", 1))))
    assert specs["act"] is None
    assert specs["name"] is None
    assert specs["w"] == P("data", None)
    assert rows == P("data", None)
    # The flat result: the arrays, in order, without the function and the text.
    exported = jax.export.deserialize(bytearray(work.path.read_bytes()))
    assert [aval.shape for aval in exported.out_avals] == [(), (128, 64), (32, 64)]


def test_an_equinox_module_is_planned_as_it_is(tmp_path):
    import equinox as eqx

    mlp = eqx.filter_eval_shape(eqx.nn.MLP, 32, 32, 64, depth=1, key=jax.random.key(0))
    work = step_work(
        eqx.filter_jit(lambda m, x: jax.vmap(m)(x)),
        (mlp, described(16, 32)),
        donate_argnums=(),
        folder=tmp_path,
    )
    assert work.flops == 2 * 16 * (32 * 64 + 64 * 32)
    specs = work.specs(Layout(mesh=(("data", 2), ("model", 2))))[0]
    arrays = eqx.filter(mlp, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    assert jax.tree.structure(specs) == jax.tree.structure(arrays)


def test_arrays_and_the_rest_come_together_again():
    tree = ({"f": len, "x": described(2), "none": None}, [described(3), "words", 1.5])
    shown, whole = arrays_of(tree)
    assert shown == ({"f": None, "x": described(2), "none": None}, [described(3), None, 1.5])
    filled = whole(["x", "y", "z"])
    assert filled == ({"f": len, "x": "x", "none": None}, ["y", "words", "z"])
    assert only_arrays({"a": described(1), "f": len, "n": 3}) == (described(1), 3)


def test_names_of_a_flax_state(tmp_path):
    """Those that NNX gives, with boxes of its own round them."""
    import optax
    from flax import nnx

    def make() -> Any:
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"), eager_sharding=False)
        model = nnx.Linear(64, 256, rngs=nnx.Rngs(0), kernel_init=init)
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    graph, state = nnx.split(nnx.eval_shape(make))

    def step(state: Any, x: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)
        gradients = nnx.grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer))

    work = step_work(
        step, (state, described(32, 64)), axes=(nnx.get_partition_spec(state), None), folder=tmp_path
    )
    layout = Layout(mesh=(("data", 2), ("model", 2)))
    specs = work.specs(layout)[0]
    assert specs[0]["kernel"].get_value() == P("data", "model")
    assert specs[1]["opt_state"][0]["mu"]["kernel"].get_value() == P("data", "model")
    assert specs[0]["bias"].get_value() == P(None)  # a name for none of its dimensions


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (({"in": ("embed", "mlp")}, None), r"axes\[0\] names 1 arrays, but args\[0\] has 2"),
        (({"in": ("embed",), "out": None}, None), "one name a dimension"),
        (({"in": ("embed", 3), "out": None}, None), r"has \('embed', 3\).*expected a tuple of names"),
        (({"in": P(("a", "b"), None), "out": None}, None), "expected a tuple of names"),
        (({"in": P("embed", None, "mlp"), "out": None}, None), "one name a dimension"),
    ],
)
def test_names_that_are_none(axes, message):
    with pytest.raises(PlanError, match=message):
        axis_names(axes, ARGS)


def test_a_partition_spec_may_be_short():
    assert axis_names(({"in": P("embed"), "out": P()}, None), ARGS) == (("embed", None), (None, None), None)


@pytest.mark.parametrize(
    "names", [("q_heads", "embed"), ("vocab", "embed_vocab"), ("layers", "embed", "mlp"), ("norm",)]
)
@pytest.mark.parametrize(
    "mesh",
    [
        (("data", 2), ("fsdp", 2), ("tensor", 2)),
        (("data", 1), ("fsdp", 4), ("tensor", 2)),
        (("fsdp", 2), ("fsdp_transpose", 2), ("tensor", 2)),
    ],
)
def test_rules_mean_what_flax_makes_of_them(mesh, names):
    """Against flax's own function, with MaxText's rules: axes without a mesh axis have one device there."""
    from flax.linen.spmd import logical_to_mesh_axes

    sizes = dict(mesh)
    rules, _ = rules_of(MAXTEXT, list(sizes))
    assert rules is not None
    mine = rules.spec(names, Sizes(sizes), (64,) * len(names))
    named = [(name, (axes,) if isinstance(axes, str) else tuple(axes)) for name, axes in MAXTEXT]
    inside = [(name, tuple(axis for axis in axes if axis in sizes) or None) for name, axes in named]
    theirs = logical_to_mesh_axes(names, inside)
    assert theirs is not None

    def cuts(spec: Any) -> list[set[str]]:
        return [
            {axis for axis in ((entry,) if isinstance(entry, str) else entry or ()) if sizes[axis] > 1}
            for entry in spec
        ]

    assert cuts(mine) == cuts(theirs)


class Sizes:
    def __init__(self, shape: dict[str, int]) -> None:
        self.shape = shape


def test_every_mesh_of_the_rules_whose_devices_have_work(tmp_path):
    work = step_work(two_layers, ARGS, axes=NAMES, rules=RULES, folder=tmp_path)
    found = {layout.mesh for layout in work.layouts(parse_slice("v5e:2x4"))}
    every = {
        (("data", d), ("fsdp", f), ("tensor", t))
        for d in (1, 2, 4, 8)
        for f in (1, 2, 4, 8)
        for t in (1, 2, 4, 8)
        if d * f * t == 8
    }
    assert found == every
    # 12 rows go over four devices, and not over eight.
    odd = (ARGS[0], described(12, 64))
    few = step_work(two_layers, odd, axes=NAMES, rules=RULES, folder=tmp_path)
    assert {layout.mesh for layout in few.layouts(parse_slice("v5e:2x4"))} == {
        mesh for mesh in every if dict(mesh)["data"] * dict(mesh)["fsdp"] <= 4
    }
    layout = Layout(mesh=(("data", 2), ("fsdp", 2), ("tensor", 2)))
    params, rows = work.specs(layout)
    assert params == {"in": P("fsdp", "tensor"), "out": P("tensor", "fsdp")}
    assert rows == P(("data", "fsdp"), None)
    assert work.rough(layout, parse_slice("v5e:2x4")).memory["state"] == 2 * 64 * 256 * 4 // 4
    narrowed = step_work(two_layers, ARGS, axes=NAMES, rules=RULES, mesh_axes=("fsdp",), folder=tmp_path)
    assert [layout.mesh for layout in narrowed.layouts(parse_slice("v5e:2x4"))] == [(("fsdp", 8),)]
    assert plan(work, "v5e:2x4", compile=False).best.layout.mesh in every


def test_meshes_of_some_axes():
    found = list(mesh_choices(12, ("a", "b")))
    assert found == [(("a", n), ("b", 12 // n)) for n in (1, 2, 3, 4, 6, 12)]


def test_rules_of_ones_own_and_capibaras():
    rules, axes = rules_of(AxisRules(), ("data", "model"))
    assert (rules, axes) == (AxisRules(), ("data", "model"))
    rules, axes = rules_of({"embed": "fsdp", "batch": ["data", "fsdp"], "layers": None}, None)
    assert axes == ("fsdp", "data")
    assert rules == RuleList((("embed", ("fsdp",)), ("batch", ("data", "fsdp")), ("layers", ())))
    # An earlier rule goes first; a dimension that an axis does not divide leaves it to another.
    order = RuleList((("b", ("x",)), ("a", ("x",)), ("a", ("y",))))
    sizes = Sizes({"x": 2, "y": 2})
    assert order.spec(("a", "b"), sizes, (4, 4)) == P("y", "x")
    assert order.spec(("a", "b"), sizes, (4, 3)) == P("x", None)
    assert order.spec(("a", None), sizes, (3, 4)) == P(None, None)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"rules": "embed"}, "rules is str, expected pairs"),
        ({"rules": 3}, "rules is int, expected pairs"),
        ({"rules": [("embed", "fsdp", "x")]}, "expected pairs such as"),
        ({"rules": [("embed", 3)]}, "expected a mesh axis, a tuple of them, or None"),
        ({"rules": [("embed", None)]}, "rules name no mesh axis"),
        (
            {"rules": RULES, "mesh_axes": ("tensr",)},
            "mesh_axes has 'tensr', which no rule names: data, fsdp, tensor",
        ),
        ({"mesh_axes": ("data",)}, "mesh_axes is for rules"),
        ({"rules": RULES, "axes": None}, "the batch has no names"),
        ({"rules": RULES[:2]}, None),
        (
            {
                "rules": [*RULES[:1], ("mlp", "tensor")],
                "axes": ({"in": ("emb", None), "out": None}, ("rows", None)),
            },
            "emb",
        ),
    ],
)
def test_rules_that_are_none(more, message, tmp_path):
    arguments = {"axes": NAMES, "folder": tmp_path, **more}
    with pytest.raises(ValueError, match=message):
        step_work(two_layers, ARGS, **arguments)


@pytest.mark.slow
@needs_libtpu
def test_the_examples_of_the_page_are_compiled(tmp_path, monkeypatch):
    """Each example as it stands on the page, by the real compiler."""
    plans: list[Any] = []
    whole: Callable[..., Any] = capibara.plan.plan

    def compiled(work: Any, topology: str, *, compile: bool) -> Any:
        assert compile is False  # what the page has
        plans.append(whole(work, topology, max_compiles=1, cache=tmp_path, workers=1))
        return plans[-1]

    monkeypatch.setattr(capibara.plan, "plan", compiled)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks[:3]:
        exec(compile(block, "steps.md", "exec"), names)
        best = plans[-1].best
        assert best.memory_source == "compiler"
        assert best.program.memory.total == best.hbm_bytes
        # What holds the state is what its shardings say.
        state = best.memory.get("state", best.memory.get("arguments"))
        assert 0 < state <= 1.1 * names["work"].rough(best.layout, best.target).memory["state"]
    assert [len(each.best.layout.mesh) for each in plans] == [2, 2, 3]
    assert plans[2].best.tokens_per_second > 0
