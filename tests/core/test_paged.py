"""Steps of many sequences whose keys, values and states lie in pools, against the whole texts computed at once."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulation import emulated
from other_process import run_apart
from small_models import KINDS, SMALL

from capibara.compose.errors import InputError, WiringError
from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.core.paged import StepShape

FURTHER: dict[str, dict[str, Any]] = {
    "windows and sinks": {
        "model.pattern": ["attention", "local"],
        "model.window": 5,
        "model.attention_sinks": True,
        "model.rope.local_theta": 50.0,
        "model.attention_softcap": 3.0,
    },
    "learned positions": {"model.pattern": ["attention"], "model.positions": "learned"},
}
PAGE, PAGES, SLOTS, TABLE = 4, 24, 5, 7
SHAPE = StepShape(2, 1, 5)


def model_of(settings: dict[str, Any]) -> ModularCapibaraModel:
    return ModularCapibaraModel(ModularModelConfig.from_dict({}, SMALL | settings))


class Schedule:
    """Texts that are fed in pieces of random sizes, with pages in random order; a text that ends makes room for the
    next one, which takes over its pages and its slot."""

    def __init__(self, texts: list[np.ndarray], shape: StepShape, seed: int) -> None:
        self.texts, self.shape, self.random = texts, shape, np.random.default_rng(seed)
        self.waiting, self.running = list(range(len(texts))), {}
        self.pages = list(self.random.permutation(np.arange(1, PAGES)))
        self.slots = list(self.random.permutation(np.arange(1, SLOTS)))

    def _start(self) -> None:
        while self.waiting and len(self.running) < self.shape.sequences:
            text = self.waiting.pop(0)
            needed = -(-len(self.texts[text]) // PAGE)
            table = -np.ones(TABLE, np.int32)
            table[:needed] = [self.pages.pop() for _ in range(needed)]
            self.running[text] = [0, table, self.slots.pop()]

    def step(self) -> tuple[dict[str, np.ndarray], dict[int, tuple[int, int]]] | None:
        """The inputs of a step, and for each token that is scored its text and place; None when all have ended."""
        self._start()
        if not self.running:
            return None
        s = self.shape
        zeros, none = np.zeros(s.sequences, np.int32), -np.ones(s.sequences, np.int32)
        inputs = {"tokens": np.zeros(s.tokens, np.int32), "starts": zeros.copy(), "counts": zeros.copy()}
        inputs |= {"slots": none.copy(), "page_table": np.tile(none[:, None], TABLE)}
        inputs["outputs"] = np.arange(s.tokens, dtype=np.int32)
        scored, order = {}, list(self.random.permutation(list(self.running)))
        places = list(self.random.permutation(s.sequences))
        for place, text in zip(places, order, strict=False):
            done, table, slot = self.running[text]
            first = place if place < s.rows else s.rows + (place - s.rows) * s.chunk
            most = 1 if place < s.rows else s.chunk
            count = int(min(self.random.integers(1, most + 1), len(self.texts[text]) - done))
            inputs["tokens"][first : first + count] = self.texts[text][done : done + count]
            inputs["starts"][place], inputs["counts"][place] = done, count
            inputs["page_table"][place], inputs["slots"][place] = table, slot
            scored |= {first + i: (text, done + i) for i in range(count)}
            self.running[text][0] = done + count
            if done + count == len(self.texts[text]):
                del self.running[text]
                self.pages += [int(page) for page in table if page >= 0]
                self.slots.append(slot)
        return inputs, scored


def stepper(model: ModularCapibaraModel, shape: StepShape) -> Any:
    def step(params: Any, state: Any, inputs: Any, cache: Any) -> Any:
        return model.decode_pages(params, inputs, cache, shape, state=state)

    return jax.jit(step, donate_argnums=3, compiler_options={"xla_backend_optimization_level": 0})


def scheduled(
    model: ModularCapibaraModel, dtype: str | None = None, shape: StepShape = SHAPE
) -> tuple[np.ndarray, np.ndarray]:
    """The logits of every token of some texts that share steps, and those of each text computed at once."""
    random = np.random.default_rng(1)
    texts = [random.integers(0, 11, n).astype(np.int32) for n in (13, 4, 17, 1, 22, 9)]
    whole = jax.jit(lambda tokens: model.apply(model.params, tokens))
    want = [np.asarray(whole(jnp.asarray(np.pad(t, (0, 22 - len(t))))[None])[0, : len(t)]) for t in texts]
    schedule, step = Schedule(texts, shape, 2), stepper(model, shape)
    cache, found = model.init_pages(PAGES, PAGE, SLOTS, dtype=dtype), {}
    while (given := schedule.step()) is not None:
        inputs, scored = given
        logits, cache = step(model.params, model.state, inputs, cache)
        found |= {where: np.asarray(logits[output]) for output, where in scored.items()}
    every = [(text, at) for text, tokens in enumerate(texts) for at in range(len(tokens))]
    assert set(found) == set(every)
    return np.stack([found[where] for where in every]), np.concatenate(want)


FEW = ("attention", "mixed", "latent")


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    "kind",
    [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.slow) for kind in [*KINDS, *FURTHER]],
)
def test_any_schedule_gives_the_whole(kind: str) -> None:
    found, want = scheduled(model_of((KINDS | FURTHER)[kind]))
    np.testing.assert_allclose(found, want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("chunk", "softcap"), [(5, None), (9, None), pytest.param(9, 3.0, marks=pytest.mark.slow)]
)
def test_latents_in_either_form_as_on_tpus(
    chunk: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of pieces of 9 tokens keys and values are computed from the latents of a block of pages; and no platform's own
    form of an operation is taken, so that blocks are read from the pages of all layers."""
    forms = []

    def portable(*arrays: Any, default: Any, **_: Any) -> Any:
        forms.append(default)
        return default(*arrays)

    monkeypatch.setattr(jax.lax, "platform_dependent", portable)
    settings = KINDS["latent"] | ({} if softcap is None else {"model.attention_softcap": softcap})
    found, want = scheduled(model_of(settings), shape=StepShape(2, 1, chunk))
    np.testing.assert_allclose(found, want, rtol=2e-4, atol=2e-5)
    assert forms


def largest_floats(text: str) -> int:
    """Elements of the largest array of floats in a program of StableHLO."""
    shapes = re.findall(r"tensor<((?:\d+x)*)(?:f32|f64|bf16)>", text)
    return max(math.prod(int(size) for size in shape.split("x") if size) for shape in shapes)


@pytest.mark.thin(3)
@pytest.mark.parametrize("kind", ["latent", "windows and sinks"])
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("shape", [StepShape(2), StepShape(0, 1, 9)])
def test_no_array_has_room_for_all_pages(kind: str, platform: str, shape: StepShape) -> None:
    """However long texts may become, a step gathers a few of their pages at a time."""
    model, table = model_of((KINDS | FURTHER)[kind]), 5000
    cache = jax.eval_shape(lambda: model.init_pages(PAGES, PAGE, SLOTS))
    of = dict.fromkeys(("starts", "counts", "slots", "outputs"), (shape.sequences,))
    inputs = of | {"tokens": (shape.tokens,), "page_table": (shape.sequences, table)}
    given = {key: jax.ShapeDtypeStruct(size, jnp.int32) for key, size in inputs.items()}
    step = jax.jit(
        lambda params, state, inputs, cache: model.decode_pages(params, inputs, cache, shape, state=state)
    )
    traced = step.trace(model.params, model.state, given, cache)
    lowered = traced.lower(lowering_platforms=(platform,))
    # 256 positions of a text at a time, of 4 heads of 7 elements or fewer each; a row of all is 20 000 positions.
    assert largest_floats(lowered.as_text()) <= shape.sequences * 256 * 4 * 9 < table * PAGE
    if platform == "cpu":
        memory = lowered.compile({"xla_backend_optimization_level": "0"}).memory_analysis()
        assert memory is not None
        # Rows have 8 elements or more, of 4 bytes.
        assert memory.temp_size_in_bytes < shape.sequences * table * PAGE * 8 * 4 / 2


@pytest.mark.parametrize("kind", ["grouped", pytest.param("windows and sinks", marks=pytest.mark.slow)])
def test_codes_are_close_to_the_whole(kind: str) -> None:
    """A code is at most 1/254 of the largest number of its row off."""
    model = model_of((KINDS | FURTHER)[kind])
    cache = model.init_pages(PAGES, PAGE, SLOTS, dtype="int8")
    assert {str(x.dtype) for x in jax.tree.leaves(cache)} == {"int8", "float32"}
    described = model.describe_pages(PAGES, PAGE, SLOTS, dtype="int8")
    assert jax.tree.map(lambda x: (x.shape, x.dtype), described) == jax.tree.map(
        lambda x: (x.shape, x.dtype), cache
    )
    found, want = scheduled(model, dtype="int8")
    # Of the operation alone, tests/compose/test_paged_codes.py has the exact answer.
    assert 0 < np.abs(found - want).max() < 0.06 * np.std(want)


def test_latents_have_no_codes() -> None:
    with pytest.raises(InputError, match="hold latents, which have no codes"):
        model_of(KINDS["latent"]).init_pages(4, 4, dtype="int8")
    with pytest.raises(InputError, match="must be 'int8', for codes with scales, or one of floats"):
        model_of(KINDS["grouped"]).init_pages(4, 4, dtype="int16")
    few, eight = (
        ModularCapibaraModel(
            ModularModelConfig.from_dict(
                {}, SMALL | {"model.num_heads": n, "model.num_kv_heads": n, "model.head_dim": 8}
            ),
            platform="tpu",
        )
        for n in (4, 8)
    )
    with pytest.raises(InputError, match="a multiple of 8 key heads for pages of codes, here it has 4"):
        few.describe_pages(4, 4, dtype="int8")
    assert eight.describe_pages(4, 4, dtype="int8")


def alone_and_together(
    model: ModularCapibaraModel, place: int, dtype: str | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The logits of one text: with others whose tokens, lengths, pages and slots are random, in pools in which
    earlier ones left what is not finite; and with none in empty pools."""
    random = np.random.default_rng(place)
    text = random.integers(0, 11, 18).astype(np.int32)
    step, found = stepper(model, SHAPE), []
    for others in (True, False):
        draw = np.random.default_rng([place, others])
        numbers, slots = draw.permutation(np.arange(1, PAGES)), draw.permutation(np.arange(1, SLOTS))
        cache, logits, done = model.init_pages(PAGES, PAGE, SLOTS, dtype=dtype), [], 0
        if others:
            cache = jax.tree.map(lambda x: jnp.full_like(x, 77 if x.dtype == jnp.int8 else jnp.nan), cache)
        while done < len(text):
            count = 1 if place < SHAPE.rows else min(5 if done else 3, len(text) - done)
            first = place if place < SHAPE.rows else SHAPE.rows
            inputs = {
                "tokens": draw.integers(0, 11, SHAPE.tokens).astype(np.int32),
                "starts": draw.integers(1, 12, SHAPE.sequences).astype(np.int32),
                "counts": np.full(SHAPE.sequences, int(others), np.int32),
                "page_table": numbers[: TABLE * 3].reshape(3, TABLE).astype(np.int32),
                "slots": slots[:3].astype(np.int32),
                "outputs": np.arange(SHAPE.tokens, dtype=np.int32),
            }
            inputs["tokens"][first : first + count] = text[done : done + count]
            inputs["starts"][place], inputs["counts"][place] = done, count
            out, cache = step(model.params, model.state, inputs, cache)
            logits.append(np.asarray(out)[first : first + count])
            done += count
        found.append(np.concatenate(logits))
    return found[0], found[1]


@pytest.mark.parametrize(
    "kind",
    ["grouped", *(pytest.param(k, marks=pytest.mark.slow) for k in ("mixed", "latent", "windows and sinks"))],
)
@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_what_shares_the_step_changes_no_bit(kind: str, place: int, dtype: str | None) -> None:
    if kind == "latent" and dtype == "int8":
        pytest.skip("latents have no codes")
    together, alone = alone_and_together(model_of((KINDS | FURTHER)[kind]), place, dtype)
    assert np.isfinite(alone).all()
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("shape", [StepShape(1), StepShape(2, 1, 5)])
@pytest.mark.parametrize(
    "kind", ["grouped", *(pytest.param(k, marks=pytest.mark.slow) for k in ("latent", "mixed", "ssm"))]
)
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_pools_are_written_where_they_stand(kind: str, shape: StepShape, dtype: str | None) -> None:
    """Of one token and of several: XLA treats a write of one row as another operation."""
    model = model_of(KINDS[kind])
    if dtype == "int8" and kind in ("latent", "ssm"):
        pytest.skip("there are no keys and values to be coded")
    cache = jax.eval_shape(lambda: model.init_pages(4096, PAGE, 4096, dtype=dtype))
    inputs = {
        "tokens": shape.tokens,
        **dict.fromkeys(("starts", "counts", "slots", "outputs"), shape.sequences),
    }
    given = {key: jax.ShapeDtypeStruct((size,), jnp.int32) for key, size in inputs.items()}
    given["page_table"] = jax.ShapeDtypeStruct((shape.sequences, TABLE), jnp.int32)
    program = stepper(model, shape).lower(model.params, model.state, given, cache).compile()
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)]
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= sum(sizes)
    assert memory.temp_size_in_bytes < min(sizes) / 2


MESH_SCRIPT = """
import json
import jax, numpy as np
from small_models import KINDS, SMALL
from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.core.paged import StepShape

found = {}
for kind in ("grouped", "latent", "mixed"):
    config = ModularModelConfig.from_dict({}, SMALL | KINDS[kind])
    one = ModularCapibaraModel(config)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    many = ModularCapibaraModel(config, mesh=mesh)
    shape, logits, same = StepShape(1, 1, 4), [], True
    inputs = {"tokens": np.array([3, 1, 4, 1, 5], np.int32), "starts": np.zeros(2, np.int32)}
    inputs |= {"counts": np.array([1, 4], np.int32),
              "slots": np.array([1, 2], np.int32), "page_table": np.array([[1, 2, 3], [4, 5, 6]], np.int32),
              "outputs": np.arange(5, dtype=np.int32)}
    for model in (one, many):
        params = one.params if model is one else jax.device_put(one.params, many.compiled.propose_shardings()["params"])
        step = lambda p, s, c, i: model.decode_pages(p, i, c, shape, state=s)
        cache = model.init_pages(8, 4, 4)
        before = jax.tree.map(lambda x: x.sharding, cache)
        program = jax.jit(step, donate_argnums=2).lower(params, model.state, cache, inputs).compile()
        for start in (0, 1, 2):  # a compiled program takes its own cache only where its shardings are the same
            given = inputs | {"starts": np.array([start, 4 * start], np.int32)}
            out, cache = program(params, model.state, cache, given)
        logits.append(np.asarray(out))
        same &= all(jax.tree.leaves(jax.tree.map(lambda b, x: b.is_equivalent_to(x.sharding, x.ndim), before, cache)))
    split = "shard_map" in str(jax.make_jaxpr(step)(params, model.state, cache, inputs))
    found[kind] = [float(np.abs(logits[0] - logits[1]).max()), same, split]
print("RESULT", json.dumps(found))
"""


@pytest.mark.slow
def test_pools_stay_where_they_are_over_a_mesh() -> None:
    for kind, (gap, same, split) in run_apart(MESH_SCRIPT, "[]", XLA_FLAGS=emulated(4, quick=True)).items():
        assert gap < 1e-5, kind
        assert same, kind
        assert split == (kind != "latent"), kind  # latents have one head, of which each device has all


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.zeros(6, np.int32)}, r"tokens has shape \(6,\).*needs \(7\)"),
        ({"page_table": np.zeros((2, 3), np.int32)}, r"page_table has shape \(2, 3\).*needs \(3, any\)"),
        ({"starts": None}, "inputs has no 'starts'"),
    ],
)
def test_arrays_of_other_shapes_are_named(change: dict[str, Any], message: str) -> None:
    model = model_of(KINDS["attention"])
    inputs = Schedule([np.zeros(3, np.int32)], SHAPE, 0).step()[0] | change  # type: ignore[index]
    inputs = {key: value for key, value in inputs.items() if value is not None}
    with pytest.raises(InputError, match=message):
        model.decode_pages(model.params, inputs, model.init_pages(8, 4), SHAPE)


def test_a_step_has_tokens_and_pools_have_pages() -> None:
    with pytest.raises(WiringError, match="a step needs rows or chunks"):
        StepShape(0, 0, 4)
    with pytest.raises(WiringError, match="chunk=0 must be an integer of at least 1"):
        StepShape(1, 1, 0)
    with pytest.raises(InputError, match="pages=0 must be an integer of at least 1"):
        model_of(KINDS["attention"]).init_pages(0, 4)
    for dtype in ("int16", "nonsense"):
        with pytest.raises(InputError, match=f"dtype='{dtype}' must be .int8., for codes"):
            model_of(KINDS["attention"]).init_pages(3, 4, dtype=dtype)


def test_a_pool_has_another_dtype_than_arithmetic() -> None:
    cache = model_of(KINDS["mixed"]).init_pages(3, 4, 2, dtype="bfloat16")
    kinds = {
        jax.tree_util.keystr(path)[-12:]: x.dtype for path, x in jax.tree_util.tree_leaves_with_path(cache)
    }
    assert {dtype for name, dtype in kinds.items() if "pages" in name} == {jnp.dtype("bfloat16")}
    assert all(dtype == jnp.dtype("float32") for name, dtype in kinds.items() if "pages" not in name)
