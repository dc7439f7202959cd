"""Whole models that run in the codes of their archive: the outputs of the decoded ones, in the memory of the file."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import numpy as np
import pytest

from capibara.compress.compressed import CompressedModel
from capibara.compress.container import writer
from capibara.compress.errors import CompressError
from capibara.compress.model_api import ModelCompressionAPI
from capibara.compress.profile import CompressionProfile

torch: Any = pytest.importorskip("torch")
CODECS = ("int8", "int4", "nf4")


def compressed(model: Any, strategy: str = "nf4", **more: Any) -> Any:
    decode = more.pop("decode", False)
    profile = CompressionProfile(strategy=strategy, smallest=more.pop("smallest", 4096))
    return ModelCompressionAPI(profile).compress(model, decode=decode, **more)


def network() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 640), torch.nn.LayerNorm(640), torch.nn.ReLU(), torch.nn.Linear(640, 96)
    )


class Decoder(torch.nn.Module):
    """An embedding that is also the head, a convolution, and a layer that runs with numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(200, 64)
        self.conv = torch.nn.Conv1d(64, 64, 3, padding=1)
        self.attend = torch.nn.MultiheadAttention(64, 4, batch_first=True)
        self.head = torch.nn.Linear(64, 200, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("places", torch.arange(9.0), persistent=False)

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        x = self.conv(x.mT).mT
        x = x + self.attend(x, x, x)[0] + self.places[0]
        return self.head(x)


def close(found: Any, expected: Any, atol: float = 2e-4) -> None:
    np.testing.assert_allclose(
        found.detach().float().numpy(), expected.detach().float().numpy(), atol=atol, rtol=2e-4
    )


@pytest.mark.parametrize("strategy", CODECS)
@pytest.mark.parametrize("several", [False, True], ids=["one chunk", "several"])
def test_a_torch_module_is_that_of_its_decoded_weights(
    strategy: str, several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if several:
        monkeypatch.setattr(writer, "CHUNK", 64 * 100)
    model = network()
    made = compressed(model, strategy)
    x = torch.randn(2, 5, 64, requires_grad=True)
    plain = CompressedModel.load(made.path, model)
    expected = plain(x)
    close(made(x), expected)
    (slope,) = torch.autograd.grad(expected.square().sum(), x)
    (found,) = torch.autograd.grad(made(x).square().sum(), x)
    close(found, slope, 2e-3)
    assert made.running.quantized == ("0.weight", "3.weight")
    assert set(made.running.decoded) == {"0.bias", "1.weight", "1.bias", "3.bias"}
    made(x).sum().backward()
    assert made.module[3].bias.grad is not None


@pytest.mark.parametrize("strategy", CODECS)
def test_memory_is_that_of_the_file(strategy: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(600, 256), torch.nn.Linear(256, 512), torch.nn.Linear(512, 256)
    )
    made = compressed(model, strategy)
    kept = {t.data_ptr(): t.nbytes for t in (*made.parameters(), *made.buffers()) if t.numel()}
    assert made.running.nbytes == sum(kept.values())
    assert made.running.nbytes <= 1.1 * made.path.stat().st_size
    assert made.running.archive_bytes == made.path.stat().st_size
    assert "3 quantized weights" in str(made.running)
    jax = pytest.importorskip("jax")
    params = {n: jax.numpy.asarray(v.detach().numpy()) for n, v in model.state_dict().items()}
    made = compressed(params, strategy, apply=lambda p, x: p["0.weight"][x] @ p["1.weight"].T)
    arrays = {id(a): a.nbytes for a in jax.tree_util.tree_leaves(made.model)}
    assert made.running.nbytes == sum(arrays.values())
    assert made.running.nbytes <= 1.1 * made.path.stat().st_size
    made(jax.numpy.arange(3))
    assert made.running.on_the_way == {}


def test_tied_tables_convolutions_and_what_runs_with_numbers() -> None:
    model = Decoder().eval()
    made = compressed(model)
    tokens = torch.randint(0, 200, (2, 7))
    close(made(tokens), CompressedModel.load(made.path, model)(tokens))
    running = made.running
    assert set(running.quantized) == {"embed.weight", "head.weight", "conv.weight"}
    assert "MultiheadAttention, which runs with numbers" in running.decoded["attend.in_proj_weight"]
    assert "stored as lossless" in running.decoded["conv.bias"]
    assert made.module.head.coded is made.module.embed.coded
    with pytest.raises(IndexError, match="from 200 to 200, expected 0 to 199"):
        made(torch.full((1, 1), 200))


def test_states_copies_and_types() -> None:
    made = compressed(network())
    x = torch.randn(3, 64)
    expected = made(x).detach()
    state = made.state_dict()
    assert state["0.coded.pieces.0.codes"].dtype == torch.uint8
    other = compressed(network().apply(lambda m: [p.data.mul_(2) for p in m.parameters(recurse=False)]))
    assert not torch.equal(other(x), expected)
    other.load_state_dict(state)
    torch.testing.assert_close(other(x), expected)
    again = copy.deepcopy(made)
    torch.testing.assert_close(again.to(torch.float64)(x.double()).float(), expected, atol=1e-4, rtol=1e-4)
    half = copy.deepcopy(made).to(torch.bfloat16)
    assert half.module[0].weight.dtype == torch.bfloat16
    assert half(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(half(x.bfloat16()).float(), expected, atol=0.05, rtol=0.05)
    torch.testing.assert_close(half.float()(x), expected, atol=0.02, rtol=0.02)  # codes were left as they are
    torch.testing.assert_close(made(x), expected)
    decoded = made.decompress()
    assert list(decoded.state_dict()) == list(network().state_dict())
    assert type(decoded[0]) is torch.nn.Linear
    torch.testing.assert_close(decoded(x), expected, atol=1e-4, rtol=1e-4)


def test_decoding_again_keeps_what_was_tied_and_second_gradients_are_right() -> None:
    made = compressed(Decoder().eval())
    decoded = made.decompress()
    assert decoded.head.weight is decoded.embed.weight
    tokens = torch.randint(0, 200, (2, 7))
    close(made(tokens), decoded(tokens))
    layer = compressed(torch.nn.Linear(32, 8).double(), "int8", smallest=1)
    assert torch.autograd.gradcheck(
        lambda v: layer(v) ** 2, torch.randn(1, 32, dtype=torch.float64, requires_grad=True)
    )


def test_a_model_without_numbers_is_filled(tmp_path: Any) -> None:
    model = Decoder().eval()
    path = compressed(model).save(tmp_path / "m.capi")
    with torch.device("meta"):
        empty = Decoder().eval()
    with pytest.raises(CompressError, match="the buffer places is on the device 'meta'"):
        CompressedModel.load(path, empty, decode=False)
    empty.places = torch.arange(9.0)
    tokens = torch.randint(0, 200, (2, 7))
    for decode in (True, False):
        made: Any = CompressedModel.load(path, empty, decode=decode)
        close(made(tokens), CompressedModel.load(path, model)(tokens))
        assert not any(p.is_meta for p in made.parameters())
    assert made.module.attend.in_proj_weight.requires_grad
    with pytest.raises(CompressError, match="expected a dense one in memory"):
        ModelCompressionAPI().compress(empty)


def test_the_originals_numbers_may_go() -> None:
    model = network()
    made = compressed(model)
    gone = weakref.ref(model[3].weight)
    del model
    gc.collect()
    assert gone() is None
    assert made(torch.ones(1, 64)).shape == (1, 96)


def test_what_cannot_run_quantized() -> None:
    model = network()
    with pytest.raises(CompressError, match=r"no weight of .* can run quantized: 0.weight is stored as"):
        ModelCompressionAPI(CompressionProfile(mode="lossless")).compress(model, decode=False)
    made = ModelCompressionAPI(CompressionProfile(mode="lossless")).compress(model, decode="auto")
    assert made.running.quantized == ()
    torch.testing.assert_close(made(torch.ones(1, 64)), model(torch.ones(1, 64)))
    with pytest.raises(CompressError, match="decode: got 'yes'"):
        compressed(model, decode="yes")
    arrays = {"w": np.ones((128, 64), np.float32)}
    with pytest.raises(CompressError, match="an array of NumPy's"):
        compressed(arrays)
    path = compressed(model).path
    with pytest.raises(CompressError, match=r"load\(path, model, decode=False\)"):
        CompressedModel.load(path, decode=False)
    hooked = network()
    hooked[0].register_forward_hook(lambda *_: None)
    assert compressed(hooked).running.quantized == ("3.weight",)


def test_functions_of_jax(tmp_path: Any) -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    rng = np.random.default_rng(0)
    params = {
        "table": jnp.asarray(rng.normal(size=(100, 64)), "float32"),
        "up": {"w": jnp.asarray(rng.normal(size=(64, 128)) / 8, "float32"), "b": jnp.ones(128)},
        "odd": jnp.asarray(rng.normal(size=(128, 64)), "float32"),
    }
    params["head"] = params["table"]

    def apply(p: Any, tokens: Any) -> Any:
        x = jnp.tanh(p["table"][tokens] @ p["up"]["w"] + p["up"]["b"])
        return (x @ jnp.sin(p["odd"])) @ p["head"].T

    made = compressed(params, apply=apply)
    tokens = jnp.asarray([[1, 5, 99]])
    plain = CompressedModel.load(made.path, params, apply=apply)
    np.testing.assert_allclose(made(tokens), plain(tokens), atol=1e-3)
    assert made.running.quantized == ("table", "up.w", "odd", "head")
    assert made.running.on_the_way == {"odd": "sin"}
    assert "decoded while it runs, for sin" in str(made.running)
    assert made.model["head"] is made.model["table"]
    np.testing.assert_array_equal(made.decompress()["up"]["w"], plain.model["up"]["w"])
    gone = weakref.ref(params["odd"])
    del params, plain
    gc.collect()
    assert gone() is None
    assert copy.deepcopy(made)(tokens).shape == (1, 3, 100)
    loaded = CompressedModel.load(
        made.save(tmp_path / "a.capi"), made.decompress(), apply=apply, decode="auto"
    )
    np.testing.assert_allclose(loaded(tokens), made(tokens), atol=1e-6)


def test_parameters_of_other_packages_stay_theirs() -> None:
    jnp = pytest.importorskip("jax.numpy")
    torch = pytest.importorskip("torch")
    mine = np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32)

    def apply(p: Any, x: Any) -> Any:
        return x @ p["w"]

    made = compressed({"w": torch.from_numpy(mine)}, apply=apply, decode="auto")
    assert isinstance(made.model["w"], torch.Tensor)
    assert made(torch.ones(2, 64)).shape == (2, 128)
    both = {"theirs": torch.from_numpy(mine), "mine": mine, "jax": jnp.asarray(2 * mine)}
    running = compressed(both, apply=apply).running
    assert running.quantized == ("jax",)
    assert running.decoded == {"theirs": "a tensor of PyTorch's", "mine": "an array of NumPy's"}


def test_functions_that_jax_cannot_trace() -> None:
    jnp = pytest.importorskip("jax.numpy")
    params = {"w": jnp.ones((128, 64))}
    made = compressed(params, apply=lambda p, x: np.asarray(p["w"]) @ x)
    with pytest.raises(CompressError, match="JAX cannot trace it"):
        made(jnp.ones(64))


def test_composed_models() -> None:
    jax = pytest.importorskip("jax")
    ml = pytest.importorskip("capibara.compose")
    model = ml.Model()
    model |= ml.Linear(96)(input="x", output="h")
    model += ml.Relu()
    model += ml.Linear(64)(output="y")
    compiled = ml.compile(model, ml.JaxBackend(), shapes={"x": [None, 64]})
    params = compiled.randomize_params(seed=0)
    x = {"x": jax.random.normal(jax.random.key(0), (16, 64))}
    made = compressed((compiled, params), "int8")
    expected = CompressedModel.load(made.path, (compiled, params))(x)["y"]
    np.testing.assert_allclose(made(x)["y"], expected, atol=1e-4)
    assert len(made.running.quantized) == 2
    assert made.running.on_the_way == {}


@pytest.mark.slow  # XLA compiles the model twice
def test_the_decoder() -> None:
    pytest.importorskip("jax")
    from capibara.config import ModularModelConfig
    from capibara.core import ModularCapibaraModel

    config = ModularModelConfig.from_toml("demo").with_overrides({"model.num_layers": 3})
    decoder = ModularCapibaraModel(config)
    tokens = np.arange(12, dtype=np.int32).reshape(1, 12)
    made = compressed(decoder, "int8")
    np.testing.assert_allclose(made(tokens), CompressedModel.load(made.path, decoder)(tokens), atol=2e-3)
    assert made.running.on_the_way == {}
    assert made.running.nbytes <= 1.1 * made.running.archive_bytes
