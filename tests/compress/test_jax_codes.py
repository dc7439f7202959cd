"""Functions of JAX whose weights stay in codes: the results of the decoded weights, without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.compress.container import Archive, ArchiveWriter, writer
from capibara.compress.direct import Piece, QuantisedMatrix, QuantisedStack, describe_codes, load_codes
from capibara.compress.formats import get_format
from capibara.compress.jax_codes import quantized

RANDOM = np.random.default_rng(0)
F32 = get_format("F32")


def stored(path: Path, shape: tuple[int, ...], codec: str = "nf4", **chosen: Any) -> tuple[Any, np.ndarray]:
    """A weight in codes, and decoded."""
    weight = RANDOM.normal(size=shape).astype(np.float32)
    with ArchiveWriter(path / "w.capi") as archive:
        archive.add("w", weight.reshape(-1).view("<u4"), F32, shape, codec=codec, settings=chosen)
    with Archive(path / "w.capi") as archive:
        return load_codes(archive, "w"), archive.read("w").view("<f4").reshape(shape)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RANDOM.normal(size=shape), jnp.float32)


def same(function: Any, codes: Any, read: np.ndarray, *args: Any, decoded: tuple[str, ...] = ()) -> None:
    """The function does with codes what it does with what is read, and makes no other weights into numbers."""
    told: list[str] = []
    run = quantized(function, decoded=lambda name, operation: told.append(operation))
    found = jax.jit(run)({"w": codes}, *args)
    expected = function({"w": jnp.asarray(read)}, *args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), found, expected)
    assert tuple(told) == decoded


PRODUCTS = {
    "x @ w": lambda p, x: x[..., :64] @ p["w"],
    "x @ w.T": lambda p, x: x @ p["w"].T,
    "w @ x": lambda p, x: p["w"] @ x.T,
    "w.T @ x": lambda p, x: p["w"].T @ x[:, :64].T,
    "heads": lambda p, x: jnp.einsum("bi,ihd->bhd", x[:, :64], p["w"].reshape(64, 3, 32)),
    "heads first": lambda p, x: jnp.einsum("bi,ihd->hbd", x[:, :64], p["w"].reshape(64, 3, 32)),
    "out of heads": lambda p, x: jnp.einsum(
        "bhd,hdo->bo", x[:, :64].reshape(-1, 2, 32), p["w"].reshape(2, 32, 96)
    ),
    "along a row's end": lambda p, x: jnp.einsum("bc,iac->bia", x[:, :32], p["w"].reshape(64, 3, 32)),
    "in a branch": lambda p, x: jax.lax.cond(x[0, 0] > 9, lambda v: v[:, :64], lambda v: v @ p["w"].T, x),
    "remembered": lambda p, x: jax.checkpoint(lambda v, w: jnp.tanh(v @ w.T))(x, p["w"]),
    "in a call": lambda p, x: jax.jit(lambda v, w: v @ w)(x[:, :64], p["w"]),
    "in a loop": lambda p, x: jax.lax.scan(lambda c, r: (c + r @ p["w"].T, c[0]), jnp.zeros(64), x),
    "rows": lambda p, x: p["w"][jnp.array([[3, 63], [0, 200]])],
    "taken": lambda p, x: jnp.take(p["w"], jnp.array([3, -1, 70]), axis=0, mode="clip"),
}


@pytest.mark.parametrize("how", PRODUCTS)
def test_products_and_rows(how: str, tmp_path: Path) -> None:
    same(PRODUCTS[how], *stored(tmp_path, (64, 96)), normal(5, 96))


@pytest.mark.parametrize("codec", ["int8", "int4", "nf4"])
@pytest.mark.parametrize("chosen", [{}, {"axis": 0}, {"outliers": 0.02}], ids=str)
def test_both_directions_of_every_layout(
    codec: str, chosen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "CHUNK", 40 * 20)
    codes, read = stored(tmp_path, (48, 40), codec, **chosen)
    assert isinstance(codes, QuantisedMatrix)
    same(lambda p, x: (x @ p["w"], x[:, :40] @ p["w"].T), codes, read, normal(3, 48))


def test_what_needs_numbers_gets_them(tmp_path: Path) -> None:
    codes, read = stored(tmp_path, (64, 96))
    same(lambda p, x: jnp.exp(p["w"]) + x, codes, read, normal(64, 96), decoded=("exp",))
    same(lambda p, x: p["w"][3:5] @ x, codes, read, normal(96), decoded=("slice",))
    same(lambda p, x: p["w"], codes, read, normal(1), decoded=("an output",))
    turned, read = stored(tmp_path, (64, 96), axis=0)
    same(lambda p, x: p["w"][jnp.arange(3)], turned, read, normal(1), decoded=("gather",))
    folded = lambda p, x: jnp.einsum("bac,iac->bi", x, p["w"].reshape(64, 48, 2))  # noqa: E731
    same(folded, *stored(tmp_path, (64, 96)), normal(2, 48, 2))
    split = lambda p, x: jnp.einsum("bc,iac->bia", x, p["w"].reshape(64, 48, 2))  # noqa: E731
    same(split, *stored(tmp_path, (64, 96)), normal(2, 2), decoded=("dot_general",))


@pytest.mark.parametrize("several", [False, True], ids=["one chunk", "several"])
@pytest.mark.parametrize("codec", ["int8", "int4", "nf4"])
def test_stacked_layers(codec: str, several: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if several:
        monkeypatch.setattr(writer, "CHUNK", 64 * 64 * 2)
    codes, read = stored(tmp_path, (5, 64, 64), codec)
    assert isinstance(codes, QuantisedStack)
    assert codes.each == (2 if several else 5)
    np.testing.assert_allclose(codes.dequantise(), read, rtol=1e-6, atol=1e-7)

    def layers(p: Any, x: Any) -> Any:
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w / 8), c[0]), x, p["w"])

    same(layers, codes, read, normal(3, 64))


@pytest.mark.thin(4)
@pytest.mark.parametrize("several", [False, True], ids=["one chunk", "several"])
@pytest.mark.parametrize("chosen", [{}, {"axis": 0}, {"outliers": 0.02}, {"group": 16}], ids=str)
@pytest.mark.parametrize("shape", [(48, 41), (5, 64, 32), (5, 3, 20), (48, 8), (6, 3, 5), (40,)], ids=str)
@pytest.mark.parametrize("codec", ["int8", "int4", "nf4", "lossless"])
def test_codes_are_described_as_they_are_loaded(
    codec: str,
    shape: tuple[int, ...],
    chosen: dict[str, Any],
    several: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if len(shape) < 2 or codec == "lossless":
        chosen = {}
    if several:
        monkeypatch.setattr(writer, "CHUNK", 2 * int(np.prod(shape[1:])))
    found, _ = stored(tmp_path, shape, codec, **chosen)
    with Archive(tmp_path / "w.capi") as archive:
        described = describe_codes(archive, "w")
    assert isinstance(described, str) == isinstance(found, str)
    if isinstance(found, str):
        assert described == found
        return
    assert jax.tree.structure(described) == jax.tree.structure(found)
    for like, array in zip(jax.tree.leaves(described), jax.tree.leaves(found), strict=True):
        assert isinstance(like, jax.ShapeDtypeStruct)
        assert (like.shape, like.dtype) == (array.shape, array.dtype)


def test_parts_of_stacked_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CHUNK", 64 * 64 * 2)
    codes, read = stored(tmp_path, (5, 64, 64))
    heads = lambda p, x: jax.lax.scan(  # noqa: E731
        lambda c, w: (jnp.einsum("bi,ihd->bhd", c, w).reshape(c.shape) / 8, None),
        x,
        p["w"].reshape(5, 64, 2, 32),
    )
    same(heads, codes, read, normal(3, 64))
    by_index = lambda p, x: sum(x @ p["w"][i] for i in range(5)) + x @ p["w"][jnp.argmax(x) % 5]  # noqa: E731
    same(by_index, codes, read, normal(3, 64))
    same(lambda p, x: x @ p["w"][1:3].reshape(2, 64, 2, 32)[1].reshape(64, 64), codes, read, normal(3, 64))
    same(lambda p, x: x @ p["w"][::2][0], codes, read, normal(3, 64), decoded=("slice",))
    same(lambda p, x: x @ p["w"].reshape(10, 32, 64)[0].T, codes, read, normal(3, 64), decoded=("reshape",))
    codes, read = stored(tmp_path, (5, 64, 2, 32), "int8")
    heads = lambda p, x: jax.lax.scan(  # noqa: E731
        lambda c, w: (jnp.einsum("bi,ihd->bhd", c, w).reshape(c.shape) / 8, None), x, p["w"]
    )
    same(heads, codes, read, normal(3, 64))


def test_gradients_of_the_inputs_and_low_precision(tmp_path: Path) -> None:
    codes, read = stored(tmp_path, (64, 96))

    def function(p: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(x @ p["w"]) ** 2)

    x = normal(4, 64)
    found = jax.grad(quantized(function), argnums=1)({"w": codes}, x)
    np.testing.assert_allclose(
        found, jax.grad(function, argnums=1)({"w": jnp.asarray(read)}, x), rtol=1e-3, atol=1e-3
    )

    def short(p: Any, x: Any) -> Any:
        return jax.lax.dot(x, p["w"].astype(jnp.bfloat16), preferred_element_type=jnp.float32)

    y = quantized(short)({"w": codes}, x.astype(jnp.bfloat16))
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(
        y, short({"w": jnp.asarray(read)}, x.astype(jnp.bfloat16)), rtol=0.03, atol=0.1
    )


def test_weights_are_never_there_as_a_whole() -> None:
    rows, length = 1 << 15, 512

    def struct(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    none = struct(jnp.int32, 0)
    piece = Piece(
        struct(jnp.int8, rows, length), struct(jnp.uint8, rows, length // 64), struct(jnp.float32, 256), None,
        none, none, struct(jnp.float32, 0), length, 64,
    )  # fmt: skip
    matrix = QuantisedMatrix((piece,), (rows, length), False)
    for function, size in ((lambda p, x: x @ p["w"], rows), (lambda p, x: x @ p["w"].T, length)):
        x = struct(jnp.float32, 1, size)
        memory = jax.jit(quantized(function)).lower({"w": matrix}, x).compile().memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes < 0.6 * 4 * rows * length
