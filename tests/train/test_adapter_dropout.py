"""Dropout of adapters against PEFT's layers and NumPy with the same masks, and the statistics of the masks.

A mask is read from results: a layer whose ``a`` and ``b`` are identities returns its masked input; the gradient of
``a`` from a single token is zero in the rows of features that were dropped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published import write_folder
from small_models import quick_jit
from transformers_oracle import recorded_facts

from capibara import compose as ml
from capibara.compose.library.adapters import Adapter
from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.core.adapters import only_adapters
from capibara.families import save_adapter
from capibara.train import build_optimizer
from capibara.train.placement import Placement
from capibara.train.step import make_train_step

RATE, SCALE, SIZE = 0.4, 1.5, 8
LAYER = ml.compile(
    ml.Linear(SIZE, use_bias=False, inputs=SIZE, adapter=Adapter(SIZE, SCALE, RATE)), ml.JaxBackend()
)
IDENTITY = {"weight": jnp.zeros((SIZE, SIZE)), "lora_a": jnp.eye(SIZE), "lora_b": jnp.eye(SIZE)}


def run(params: Any, x: Any, seed: int, train: bool = True) -> jax.Array:
    return LAYER.apply(params, {"input": x}, key=jax.random.key(seed), train=train)["output"]


def mask(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """1 where the layer keeps an element of its adapter's input, 0 where it drops it."""
    found = np.asarray(run(IDENTITY, jnp.ones(shape), seed))
    assert np.isin(found, np.asarray([0, SCALE / (1 - RATE)], "float32")).all()
    return (found > 0).astype("float32")


def drawn(seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Parameters, an input, and the gradient of the output."""
    rng = np.random.default_rng(seed)
    params = {name: normal(rng, SIZE, SIZE) for name in ("weight", "lora_a", "lora_b")}
    return params, normal(rng, 2, 5, SIZE), normal(rng, 2, 5, SIZE)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype("float32")


def ours(seed: int) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]:
    """The output, and the gradients of parameters and input."""
    params, x, back = drawn()
    out, pull = jax.vjp(lambda params, x: run(params, x, seed), params, x)
    return np.asarray(out), *jax.tree.map(np.asarray, pull(jnp.asarray(back)))


@pytest.mark.parametrize("seed", [0, 1])
def test_a_layer_is_numpys_with_the_same_mask(seed: int) -> None:
    out, grads, dx = ours(seed)
    p, x, back = drawn()
    keep = mask(x.shape, seed) / (1 - RATE)
    dropped = x * keep
    inner = SCALE * np.einsum("blo,ro->blr", back, p["lora_b"])
    np.testing.assert_allclose(
        out, x @ p["weight"] + SCALE * dropped @ p["lora_a"] @ p["lora_b"], rtol=1e-5, atol=1e-4
    )
    np.testing.assert_allclose(
        grads["lora_a"], np.einsum("bli,blr->ir", dropped, inner), rtol=1e-5, atol=1e-4
    )
    want = SCALE * np.einsum("blr,blo->ro", dropped @ p["lora_a"], back)
    np.testing.assert_allclose(grads["lora_b"], want, rtol=1e-5, atol=1e-4)
    # The layer's own product takes the input as it is.
    np.testing.assert_allclose(grads["weight"], np.einsum("bli,blo->io", x, back), rtol=1e-5, atol=1e-4)
    want = back @ p["weight"].T + keep * (inner @ p["lora_a"].T)
    np.testing.assert_allclose(dx, want, rtol=1e-5, atol=1e-4)


def test_a_layer_is_pefts_with_the_same_mask() -> None:
    torch, layer = pytest.importorskip("torch"), pytest.importorskip("peft.tuners.lora.layer")
    config = pytest.importorskip("peft").LoraConfig(r=SIZE, lora_alpha=SCALE * SIZE, lora_dropout=RATE)
    p, x, back = drawn()
    base = torch.nn.Linear(SIZE, SIZE, bias=False)
    theirs = layer.Linear(base, "default", config, r=SIZE, lora_alpha=SCALE * SIZE, lora_dropout=RATE)
    own = {
        "weight": base.weight,
        "lora_a": theirs.lora_A["default"].weight,
        "lora_b": theirs.lora_B["default"].weight,
    }
    assert isinstance(theirs.lora_dropout["default"], torch.nn.Dropout)
    theirs.lora_dropout["default"] = Fixed(mask(x.shape, 3) / (1 - RATE))
    for name, parameter in own.items():
        parameter.data = torch.from_numpy(p[name].T.copy())
        parameter.requires_grad_(True)
    given = torch.from_numpy(x).requires_grad_(True)
    result = theirs(given)
    result.backward(torch.from_numpy(back))
    out, grads, dx = ours(3)
    np.testing.assert_allclose(out, result.detach().numpy(), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(dx, given.grad.numpy(), rtol=1e-5, atol=1e-4)
    for name, parameter in own.items():
        np.testing.assert_allclose(grads[name], parameter.grad.numpy().T, rtol=1e-5, atol=1e-4)


def Fixed(factors: np.ndarray) -> Any:
    """A module of PyTorch in the place of its dropout: a product with ``factors``."""
    import torch

    class Module(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x * torch.from_numpy(np.asarray(factors, "float32"))

    return Module()


def test_the_share_that_is_kept_and_the_mean() -> None:
    rows = 4000
    one, other = mask((rows, SIZE), 0), mask((rows, SIZE), 1)
    count = one.size
    deviation = (RATE * (1 - RATE) / count) ** 0.5
    for found in (one, other):
        assert abs(found.mean() - (1 - RATE)) < 5 * deviation
        # Every feature and every row is as likely.
        assert np.abs(found.mean(0) - (1 - RATE)).max() < 5 * deviation * SIZE**0.5
    # Independent of one another: of two calls, of neighbours in a row and in a column.
    for a, b in ((one, other), (one[:, 1:], one[:, :-1]), (one[1:], one[:-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 * count**-0.5
    # The mean over masks is the layer without dropout, which is the layer in evaluation.
    params, x, _ = drawn()
    still = np.asarray(run(params, x, 0, train=False))
    np.testing.assert_allclose(
        still, x @ (params["weight"] + SCALE * params["lora_a"] @ params["lora_b"]), rtol=1e-5, atol=1e-4
    )
    many = np.broadcast_to(x[0, 0], (rows, SIZE))
    found = np.asarray(run(params, many, 2))
    error = found.std(0) / rows**0.5
    assert (np.abs(found.mean(0) - still[0, 0]) < 5 * error).all()


# ---- in a model ----------------------------------------------------------------------------------------------------

# A single token attends to itself alone, whatever queries and keys are: their adapters' masks do not show.
SEEN = {"value": "v_proj", "out": "o_proj", "gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def parts(tree: Any) -> dict[str, Any]:
    """The layers' adapters by target."""
    blocks = tree["blocks"]
    found = {**blocks["attention"], **blocks["mlp"]}
    return {name: found[name] for name in SEEN}


def rows(array: Any) -> np.ndarray:
    """``lora_a`` of all layers as ``[layer, in, rank]``."""
    return np.asarray(array).reshape(len(array), -1, array.shape[-1])


def kept(gradient: Any) -> dict[str, np.ndarray]:
    """The masks ``[layer, in]`` of each target, from gradients of a single token."""
    return {name: (rows(part["lora_a"]) != 0).any(2) for name, part in parts(gradient).items()}


def with_drawn_adapters(params: Any) -> Any:
    rng = np.random.default_rng(0)

    def one(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return jnp.asarray(rng.normal(size=leaf.shape) * 0.3, leaf.dtype) if name == "lora_b" else leaf

    return jax.tree_util.tree_map_with_path(one, params)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_a_model_is_pefts_with_the_same_masks(tmp_path: Path) -> None:
    """Logits in training and the gradients of all adapters."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    facts = recorded_facts()["llama with biases"]
    folder = write_folder(tmp_path / "base", facts["config"], facts["shapes"])
    settings = {"method": "lora", "rank": 3, "alpha": 6.0, "dropout": RATE}
    model = ModularCapibaraModel.from_pretrained(
        folder, overrides={f"finetune.{key}": value for key, value in settings.items()}
    )
    model.params = with_drawn_adapters(model.params)
    assert model.pretrained is not None
    save_adapter(model, model.params, tmp_path / "adapter", model.pretrained.family)
    token = np.array([[7]])
    weights = np.random.default_rng(1).normal(size=model.config.model.vocab_size).astype("float32")

    def forward(params: Any) -> Any:
        logits = model.apply(params, token, key=jax.random.key(5), train=True)
        return jnp.vdot(logits[0, 0], weights), logits

    (_, logits), gradient = quick_jit(jax.value_and_grad(forward, has_aux=True))(model.params)
    masks = kept(gradient)

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float()
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter", is_trainable=True).eval()
    modules = {}
    for name, module in theirs.named_modules():
        if hasattr(module, "lora_dropout"):
            assert isinstance(module.lora_dropout["default"], torch.nn.Dropout)
            assert module.lora_dropout["default"].p == RATE
            _, after = name.split("layers.")
            layer, _, target = after.split(".")
            modules[int(layer), target] = module
    for target, their in SEEN.items():
        for layer, row in enumerate(masks[target]):
            modules[layer, their].lora_dropout["default"] = Fixed(row / (1 - RATE))
    result = theirs(torch.from_numpy(token)).logits
    np.testing.assert_allclose(logits, result.detach().numpy(), atol=1e-4)
    still = np.asarray(model.apply(model.params, token))
    assert np.abs(still - np.asarray(logits)).max() > 1e-2
    (result[0, 0] @ torch.from_numpy(weights)).backward()
    for target, their in SEEN.items():
        own = parts(gradient)[target]
        for layer in range(len(masks[target])):
            module, rank = modules[layer, their], settings["rank"]
            a, b = (getattr(module, key)["default"].weight.grad.numpy().T for key in ("lora_A", "lora_B"))
            np.testing.assert_allclose(rows(own["lora_a"])[layer], a, rtol=1e-3, atol=1e-4)
            np.testing.assert_allclose(
                np.asarray(own["lora_b"])[layer].reshape(rank, -1), b, rtol=1e-3, atol=1e-4
            )


SMALL = (
    "num_layers=3",
    "scan_layers=scan",
    "embed_dim=32",
    "num_heads=4",
    "num_kv_heads=2",
    "mlp_dim=48",
    "train.sequence_length=16",
)


def small(*settings: str) -> ModularCapibaraModel:
    lora = ("finetune.method=lora", "finetune.rank=2", "optimizer.warmup_steps=0")
    return ModularCapibaraModel(ModularModelConfig.from_toml("demo", [*SMALL, *lora, *settings]))


@pytest.mark.slow
def test_each_layer_weight_step_and_microbatch_has_its_own_mask() -> None:
    model = small("finetune.dropout=0.5")
    optimizer = build_optimizer(model.config, param_axes=model.param_axes)
    step = make_train_step(model, optimizer)
    token = np.array([[65, 66]], "int32")

    def first_moments(steps: int, microbatches: int = 1) -> Any:
        params = with_drawn_adapters(jax.tree.map(jnp.copy, model.params))
        placement = Placement.of(model.config, jax.devices()[:1])
        state = placement.make_state(model, optimizer, seed=0, params=params)
        found = []
        for _ in range(steps):
            state, _ = step(state, {"tokens": jnp.asarray(np.stack([token] * microbatches))})
            moments = [
                leaf for leaf in jax.tree.leaves(state.opt_state, is_leaf=is_moment) if is_moment(leaf)
            ]
            found.append(jax.tree.map(np.asarray, moments[0].mu))
        return found

    def is_moment(leaf: Any) -> bool:
        return hasattr(leaf, "mu")

    one, two = first_moments(2)
    beta = model.config.optimizer.beta1
    masks = kept(one)
    # The moments are sums of gradients: the second step's are what was added.
    added = {
        name: np.abs(rows(b["lora_a"]) - beta * rows(a["lora_a"])).max(2) > 1e-9
        for (name, a), b in zip(parts(one).items(), parts(two).values(), strict=True)
    }
    every = [row for found in (masks, added) for mask in found.values() for row in mask]
    assert len(every) == 2 * len(SEEN) * model.config.model.num_layers
    for i, a in enumerate(every):
        for b in every[:i]:
            assert a.shape != b.shape or (a != b).any()
    share = np.concatenate(every).mean()
    assert abs(share - 0.5) < 5 * (0.25 / sum(map(len, every))) ** 0.5
    # The same again from the same seed.
    jax.tree.map(np.testing.assert_array_equal, kept(first_moments(1)[0]), masks)
    # A feature has no gradient from two microbatches if both dropped it: a quarter.
    both = np.concatenate([mask.ravel() for mask in kept(first_moments(1, microbatches=2)[0]).values()])
    assert abs(both.mean() - 0.75) < 5 * (0.1875 / both.size) ** 0.5


@pytest.mark.slow
def test_there_is_none_in_evaluation() -> None:
    model, without = small("finetune.dropout=0.5"), small()
    params = with_drawn_adapters(model.params)
    batch = {"tokens": np.random.default_rng(0).integers(0, 256, (2, 5)).astype("int32")}
    key = jax.random.key(0)
    found, want = (
        quick_jit(lambda p, m=m: m.loss(p, batch, state={}, key=key, train=False)[0])(params)
        for m in (model, without)
    )
    np.testing.assert_array_equal(found, want)
    tokens, cache = batch["tokens"], model.init_cache(2, 5)
    decoded, _ = quick_jit(model.decode)(params, tokens, cache)
    np.testing.assert_allclose(decoded, without.apply(params, tokens), atol=2e-5)
    assert only_adapters(params).keys() == only_adapters(without.params).keys()
