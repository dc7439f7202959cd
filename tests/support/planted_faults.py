"""Programs with one planted fault each, and the same programs without it, in three sizes.

Half of the scripts were looked at while the rules were written; those of ``HELD_OUT`` were not.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Work = Callable[[], object]


@dataclass(frozen=True)
class Pair:
    """One program, with its fault and without; both give the same results unless ``same`` is False."""

    faulty: Work
    healthy: Work
    warm: bool = True
    same: bool = True


@dataclass(frozen=True)
class Planted:
    """A script: the fault's kind, and how it is made in each of three sizes."""

    kind: str
    make: Callable[[int], Pair]
    sizes: tuple[int, int, int]

    @property
    def name(self) -> str:
        return self.make.__name__


def normal(*shape: int, seed: int = 0) -> jax.Array:
    if math.prod(shape) > 1 << 24:  # on the host it would take seconds
        with jax.enable_x64(False):
            return jax.random.normal(jax.random.key(seed), shape, jnp.float32) / shape[-1] ** 0.5
    values = np.random.default_rng(seed).normal(size=shape).astype("float32")
    return jnp.asarray(values) / shape[-1] ** 0.5


def loop(step: Callable[..., Any], carry: Any, others: Sequence[Any]) -> Any:
    for one in others:
        carry = step(carry, one)
    return carry


# --- recompilation


def growing_batches(size: int) -> Pair:
    w = normal(size, size)
    step = jax.jit(lambda x: jnp.tanh(x @ w).sum(-1))
    batches = [np.ones((rows, size), np.float32) for rows in range(40, 60)]

    def padded() -> list[Any]:
        found = []
        for batch in batches:
            whole = np.zeros((64, size), np.float32)
            whole[: len(batch)] = batch
            found.append(np.asarray(step(whole))[: len(batch)])
        return found

    padded()
    return Pair(lambda: [np.asarray(step(batch)) for batch in batches], padded, warm=False)


def functions_made_in_a_loop(size: int) -> Pair:
    x = normal(size, size)
    once = jax.jit(lambda x: jnp.tanh(x @ x))
    once(x).block_until_ready()
    return Pair(
        lambda: [jax.jit(lambda x: jnp.tanh(x @ x))(x) for _ in range(8)],
        lambda: [once(x) for _ in range(8)],
        warm=False,
    )


def changing_static_values(size: int) -> Pair:
    def scaled(x: jax.Array, factor: Any) -> jax.Array:
        return jnp.tanh(x * factor) @ x

    static, free = jax.jit(scaled, static_argnums=1), jax.jit(scaled)
    x = normal(size, size)
    free(x, 0.5).block_until_ready()
    return Pair(
        lambda: [static(x, 0.1 * step) for step in range(1, 9)],
        lambda: [free(x, 0.1 * step) for step in range(1, 9)],
        warm=False,
    )


def closures_as_static_arguments(size: int) -> Pair:
    """A new lambda for each call is another static value."""
    x = normal(size, size)
    apply = jax.jit(lambda activation, x: activation(x @ x), static_argnums=0)
    apply(jnp.tanh, x).block_until_ready()
    return Pair(
        lambda: [apply(lambda y: jnp.tanh(y), x) for _ in range(10)],
        lambda: [apply(jnp.tanh, x) for _ in range(10)],
        warm=False,
    )


def a_last_batch_of_another_size(size: int) -> Pair:
    """Each epoch ends with what is left, of another size in each."""
    w = normal(size, size)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return (jnp.tanh(x @ w) ** 2).mean()

    step = jax.jit(lambda w, x: w - 0.1 * jax.grad(loss)(w, x))
    epochs = [
        [np.ones((32, size), np.float32)] * 6 + [np.ones((left, size), np.float32)] for left in (5, 9, 17)
    ]
    loop(step, w, epochs[0][:1]).block_until_ready()
    return Pair(
        lambda: loop(step, w, list(itertools.chain(*epochs))),
        lambda: loop(step, w, [batch for epoch in epochs for batch in epoch[:-1]]),
        warm=False,
        same=False,
    )


# --- idle


def _ahead(make: Callable[[int], Any], count: int) -> Iterator[Any]:
    """Made by another thread, two ahead."""
    ready: queue.Queue[Any] = queue.Queue(2)

    def produce() -> None:
        for number in range(count):
            ready.put(make(number))

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    for _ in range(count):
        yield ready.get()
    thread.join()


def _deep(size: int, depth: int = 8) -> tuple[jax.Array, Callable[..., Any]]:
    """Weights, and a step long enough to prepare a batch beside it."""
    weights = normal(depth, size, size)

    @jax.jit
    def step(x: jax.Array, batch: Any) -> jax.Array:
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x + batch, weights)[0]

    return normal(size, size, seed=1), step


def input_from_afar(size: int) -> Pair:
    """A batch takes as long to arrive as a step takes, for instance from object storage."""
    x, step = _deep(size)
    batch = np.ones((size, size), np.float32)
    step(x, batch).block_until_ready()
    start = time.perf_counter()
    step(x, batch).block_until_ready()
    wait = max(0.02, time.perf_counter() - start)

    def fetch(_: int) -> np.ndarray:
        time.sleep(wait)
        return batch

    def at_once() -> jax.Array:
        result = x
        for number in range(8):
            result = step(result, fetch(number)).block_until_ready()
        return result

    kept = [batch] * 8
    return Pair(at_once, lambda: loop(step, x, kept))


def python_between_steps(size: int) -> Pair:
    x, step = _deep(size, 2)

    def counted(between: bool) -> jax.Array:
        result = x
        for _ in range(6):
            result = step(result, 0.0)
            if between:
                result.block_until_ready()
                sum(number * number for number in range(300_000))
        return result

    return Pair(partial(counted, True), partial(counted, False))


def numpy_augmentation(size: int) -> Pair:
    """Random crops and noise made by NumPy for each step, while the device waits."""
    x, step = _deep(size, 2)

    def batch(seed: int) -> np.ndarray:
        random = np.random.default_rng(seed)
        noise = random.normal(size=(6, size, size)).astype("float32")
        return np.sort(noise, 0)[0] * 0.01

    prepared = [batch(seed) for seed in range(5)]

    def made() -> jax.Array:
        result = x
        for seed in range(5):
            result = step(result, batch(seed)).block_until_ready()
        return result

    return Pair(made, lambda: loop(step, x, prepared))


def text_files_between_steps(size: int) -> Pair:
    x, step = _deep(size, 2)
    folder = Path(tempfile.mkdtemp(prefix="planted-"))
    for number in range(4):
        (folder / f"{number}.txt").write_text(" ".join(f"word{n % 997}" for n in range(60_000)))

    def read(number: int) -> np.ndarray:
        words = (folder / f"{number}.txt").read_text().split()
        ids = {word: place for place, word in enumerate(sorted(set(words)))}
        numbers = np.fromiter((ids[word] for word in words), np.float32)
        return np.resize(numbers / 1e5, (size, size))

    prepared = [read(number) for number in range(4)]

    def between() -> jax.Array:
        result = x
        for number in range(4):
            result = step(result, read(number)).block_until_ready()
        return result

    return Pair(between, lambda: loop(step, x, prepared))


def metrics_computed_by_python(size: int) -> Pair:
    """Each result is fetched and its quantiles are computed by NumPy before the next step begins."""
    x, step = _deep(size, 2)

    def quantiles(result: jax.Array) -> np.ndarray:
        return np.quantile(np.asarray(result), np.linspace(0, 1, 30), method="hazen", axis=1)

    def each() -> jax.Array:
        result = x
        for _ in range(5):
            result = step(result, 0.0)
            quantiles(result)
            quantiles(result.T)
        return result

    return Pair(each, lambda: loop(step, x, [0.0] * 5))


# --- dispatch


def eager_arithmetic(size: int) -> Pair:
    x = normal(size, size)

    def turns(x: jax.Array) -> jax.Array:
        for _ in range(300):
            x = jnp.tanh(x + 1) * 2
        return x

    compiled = jax.jit(lambda x: lax.fori_loop(0, 300, lambda _, h: jnp.tanh(h + 1) * 2, x))
    return Pair(lambda: turns(x), lambda: compiled(x))


def an_eager_optimizer(size: int) -> Pair:
    parameters = [normal(size, seed=seed) for seed in range(150)]
    gradients = [normal(size, seed=seed + 500) for seed in range(150)]

    def update(parameters: list[jax.Array], gradients: list[jax.Array]) -> list[jax.Array]:
        return [p - 0.1 * g / (jnp.sqrt(g * g) + 1e-8) for p, g in zip(parameters, gradients, strict=True)]

    compiled = jax.jit(update)
    return Pair(lambda: update(parameters, gradients), lambda: compiled(parameters, gradients))


def one_short_step_at_a_time(size: int) -> Pair:
    def step(x: jax.Array) -> jax.Array:
        return x * 1.01 + 0.1

    compiled = jax.jit(step)
    together = jax.jit(lambda x: lax.fori_loop(0, 1500, lambda _, h: step(h), x))
    x = normal(size)

    def turns() -> jax.Array:
        result = x
        for _ in range(1500):
            result = compiled(result)
        return result

    return Pair(turns, lambda: together(x))


def rows_one_by_one(size: int) -> Pair:
    """A Python loop over the rows of an array."""
    x = normal(200, size)
    compiled = jax.jit(jax.vmap(lambda row: jnp.exp(row - row.max()).sum()))
    return Pair(
        lambda: jnp.stack([jnp.exp(row - row.max()).sum() for row in x]),
        lambda: compiled(x),
    )


def a_recurrent_net_in_python(size: int) -> Pair:
    inputs = normal(2000, size)

    def cell(h: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(h * 0.5 + x)

    compiled = jax.jit(cell)
    together = jax.jit(lambda h, xs: lax.scan(lambda h, x: (cell(h, x), None), h, xs)[0])
    apart, h = list(inputs), jnp.zeros(size)
    return Pair(lambda: loop(compiled, h, apart), lambda: together(h, inputs))


# --- unfused


def an_eager_chain(size: int) -> Pair:
    def chain(x: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.maximum(jnp.exp(x * 1.5) - 1.0, 0.1)) + x

    return _eager(chain, size)


def an_eager_normalisation(size: int) -> Pair:
    def normalised(x: jax.Array) -> jax.Array:
        centred = x - x.mean(-1, keepdims=True)
        return centred / jnp.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-5) * 1.1 + 0.1

    return _eager(normalised, size)


def an_eager_activation(size: int) -> Pair:
    def gelu(x: jax.Array) -> jax.Array:
        return 0.5 * x * (1 + jnp.tanh(0.797 * (x + 0.0447 * x * x * x)))

    return _eager(gelu, size)


def an_eager_clipped_update(size: int) -> Pair:
    def update(x: jax.Array) -> jax.Array:
        change = jnp.clip(x * 0.1, -0.5, 0.5)
        return jnp.abs(x - 0.9 * change) - 0.1 * change * change

    return _eager(update, size)


def _eager(function: Callable[[jax.Array], jax.Array], size: int) -> Pair:
    x, compiled = normal(size, size), jax.jit(function)

    def turns(one: Callable[[jax.Array], jax.Array]) -> jax.Array:
        result = x
        for _ in range(6):
            result = one(result)
        return result

    return Pair(lambda: turns(function), lambda: turns(compiled))


# --- small products


def heads_one_by_one(size: int) -> Pair:
    x, w = normal(8000, size, size), normal(8000, size, size, seed=1)
    each = jax.jit(lambda x, w: lax.scan(lambda carry, one: (carry, one[0] @ one[1]), 0, (x, w))[1])
    # The matrices side by side: as many operations as a product of batches has, in one.
    together = jax.jit(lambda x, w: jnp.einsum("bij,bjk->bik", x, w))
    return Pair(lambda: each(x, w), lambda: together(x, w))


def examples_one_by_one(size: int) -> Pair:
    x, w = normal(6000, size), normal(size, size)
    each = jax.jit(lambda x: lax.map(lambda row: jnp.tanh(row[None] @ w)[0], x))
    together = jax.jit(lambda x: jnp.tanh(x @ w))
    return Pair(lambda: [each(x) for _ in range(6)], lambda: [together(x) for _ in range(6)])


def short_blocks(size: int) -> Pair:
    """A long product cut into blocks that are too short."""
    x, w = normal(8192, 4 * size), normal(4 * size, 4 * size)
    blocks = x.reshape(-1, size // 8, 4 * size)
    each = jax.jit(lambda b: lax.map(lambda one: one @ w, b).reshape(x.shape))
    together = jax.jit(lambda b: b.reshape(x.shape) @ w)
    return Pair(lambda: each(blocks), lambda: together(blocks))


def experts_token_by_token(size: int) -> Pair:
    tokens, experts = normal(4000, size), normal(4, size, size)
    chosen = jnp.arange(4000) // 1000

    @jax.jit
    def each(tokens: jax.Array) -> jax.Array:
        return lax.map(lambda one: one[0] @ experts[one[1]], (tokens, chosen))

    @jax.jit
    def together(tokens: jax.Array) -> jax.Array:
        return (tokens.reshape(4, -1, size) @ experts).reshape(-1, size)

    return Pair(lambda: [each(tokens) for _ in range(8)], lambda: [together(tokens) for _ in range(8)])


# --- float64


@contextlib.contextmanager
def _wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def _both(step: Callable[..., jax.Array], *arguments: np.ndarray, times: int = 12) -> Pair:
    """With arrays of float64, and of float32."""

    def repeated(kind: Any) -> Work:
        with _wide():
            compiled = jax.jit(step)
            first, *rest = (jnp.asarray(one, kind) for one in arguments)

        def work() -> Any:
            with _wide():
                result = first
                for _ in range(times):
                    result = compiled(result, *rest)
                return jax.block_until_ready(result)

        return work

    return Pair(repeated(jnp.float64), repeated(jnp.float32))


def products_in_float64(size: int) -> Pair:
    x = np.asarray(normal(size, size))
    return _both(lambda h, w: jnp.tanh(h @ w), x, x)


def layers_in_float64(size: int) -> Pair:
    return _both(
        lambda x, weights: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0],
        np.asarray(normal(size, size)),
        np.asarray(normal(6, size, size)),
        times=4,
    )


def training_in_float64(size: int) -> Pair:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)

    return _both(step, np.asarray(normal(size, size)), np.asarray(normal(2 * size, size)), times=8)


# --- callbacks


def printing_inside(size: int) -> Pair:
    x, quiet = normal(size, size), lambda _: None

    def turns(look: bool) -> Work:
        def turn(_: int, h: jax.Array) -> jax.Array:
            if look:
                jax.debug.callback(quiet, h[0, 0])
            return jnp.tanh(h @ x)

        compiled = jax.jit(lambda h: lax.fori_loop(0, 300, turn, h))
        return lambda: compiled(x)

    return Pair(turns(True), turns(False))


def numpy_inside(size: int) -> Pair:
    """A running maximum that Python computes row by row."""

    def running(x: np.ndarray) -> np.ndarray:
        return np.stack([np.maximum.accumulate(row) for row in np.asarray(x)])

    @jax.jit
    def called(x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(running, shape, jnp.tanh(x @ x))

    @jax.jit
    def written(x: jax.Array) -> jax.Array:
        return lax.associative_scan(jnp.maximum, jnp.tanh(x @ x), axis=1)

    x = normal(size, size)
    return Pair(lambda: [called(x) for _ in range(50)], lambda: [written(x) for _ in range(50)])


def logging_inside(size: int) -> Pair:
    weights, x, seen = normal(6, size, size), normal(size, size), []

    def record(loss: Any) -> None:
        seen.append(float(loss))
        sum(range(40_000))

    def step(look: bool) -> Callable[[jax.Array], jax.Array]:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            if look:
                jax.debug.callback(record, h[0, 0])
            return jnp.tanh(h @ w), None

        return jax.jit(lambda x: lax.scan(layer, x, weights)[0])

    def turns(one: Callable[[jax.Array], jax.Array]) -> jax.Array:
        result = x
        for _ in range(10):
            result = one(result)
        return result

    loud, quiet = step(True), step(False)
    return Pair(lambda: turns(loud), lambda: turns(quiet))


# --- copies


def a_cache_that_is_not_donated(size: int) -> Pair:
    def write(cache: jax.Array, place: Any) -> jax.Array:
        return lax.dynamic_update_slice(cache, jnp.ones((1, cache.shape[1])), (place, 0))

    keeping, donating = jax.jit(write), jax.jit(write, donate_argnums=0)
    places = [np.int32(place) for place in range(30)]

    def turns(one: Callable[..., jax.Array]) -> jax.Array:
        return loop(one, jnp.zeros((size, 1024)), places)

    return Pair(lambda: turns(keeping), lambda: turns(donating))


def transposed_and_back(size: int) -> Pair:
    x = normal(size, size, 64)
    turned = jax.jit(lambda x: jnp.transpose(x, (2, 1, 0)))
    straight = jax.jit(lambda x: x * 1.01)

    def around() -> jax.Array:
        result = x
        for _ in range(8):
            result = straight(turned(turned(result)))
        return result

    return Pair(around, lambda: loop(lambda h, _: straight(h), x, range(8)))


def transposed_before_products(size: int) -> Pair:
    """Heads are moved to the front for products that could take them where they are."""
    x, w = normal(size, 1024, 32), normal(32, 8)

    @jax.jit
    def moved(x: jax.Array) -> jax.Array:
        return lax.optimization_barrier(jnp.transpose(x, (1, 0, 2)))

    product = jax.jit(lambda x: (x.reshape(-1, 32) @ w).reshape(1024, -1, 8).sum(0))
    whole = jax.jit(lambda x: (x.reshape(-1, 32) @ w).reshape(-1, 1024, 8).sum(1))
    return Pair(
        lambda: [product(moved(x)) for _ in range(6)], lambda: [whole(x) for _ in range(6)], same=False
    )


def a_state_that_is_not_donated(size: int) -> Pair:
    """One row of a large table changes in a step; all of it is copied."""

    def step(table: jax.Array, row: Any) -> jax.Array:
        return table.at[row].add(jnp.tanh(table[row]))

    keeping, donating = jax.jit(step), jax.jit(step, donate_argnums=0)
    rows = [np.int32(row % 50) for row in range(30)]

    def turns(one: Callable[..., jax.Array]) -> jax.Array:
        return loop(one, jnp.ones((size, 512)), rows)

    return Pair(lambda: turns(keeping), lambda: turns(donating))


# --- scripts that the rules had not seen when they were written


def numbers_that_change_their_type(size: int) -> Pair:
    """A step's number is now an int and now a float, and the rate a new NumPy type."""
    x = normal(size, size)
    step = jax.jit(lambda x, rate: jnp.tanh(x @ x) * rate)
    kinds = [1, 1.0, np.float16(1), np.int16(1), np.float32(1), np.int32(1), np.uint8(1), np.int8(1)]
    step(x, np.float32(1)).block_until_ready()
    return Pair(
        lambda: [step(x, rate) for rate in kinds],
        lambda: [step(x, np.float32(rate)) for rate in kinds],
        warm=False,
    )


def a_gradient_made_each_time(size: int) -> Pair:
    w, x = normal(size, size), normal(64, size)

    def loss(w: jax.Array) -> jax.Array:
        return (jnp.tanh(x @ w) ** 2).mean()

    once = jax.jit(jax.grad(loss))
    once(w).block_until_ready()
    return Pair(
        lambda: [jax.jit(jax.grad(lambda w: loss(w)))(w) for _ in range(6)],
        lambda: [once(w) for _ in range(6)],
        warm=False,
    )


def a_vocabulary_looked_up_in_python(size: int) -> Pair:
    x, step = _deep(size, 2)
    words = [f"w{number % 5000}" for number in range(120_000)]
    table = {f"w{number}": number for number in range(5000)}

    def batch(_: int) -> np.ndarray:
        return np.resize(np.array([table[word] for word in words], np.float32) / 1e6, (size, size))

    prepared = [batch(number) for number in range(6)]

    def between() -> jax.Array:
        result = x
        for number in range(6):
            result = step(result, batch(number)).block_until_ready()
        return result

    return Pair(between, lambda: loop(step, x, prepared))


def a_lock_held_by_another_thread(size: int) -> Pair:
    """Each step waits for a lock that a thread holds half of the time."""
    x, step = _deep(size, 2)
    lock = threading.Lock()

    def waiting() -> jax.Array:
        stop = threading.Event()

        def hold() -> None:
            while not stop.is_set():
                with lock:
                    time.sleep(0.02)
                time.sleep(0.001)

        other = threading.Thread(target=hold)
        other.start()
        result = x
        for _ in range(6):
            time.sleep(0.0005)
            with lock:
                result = step(result, 0.0).block_until_ready()
        stop.set()
        other.join()
        return result

    return Pair(waiting, lambda: loop(step, x, [0.0] * 6))


def metrics_one_by_one(size: int) -> Pair:
    """Many small statistics of arrays, none of them jitted."""
    arrays = [normal(size, seed=seed) for seed in range(100)]

    def statistics(arrays: list[jax.Array]) -> list[jax.Array]:
        return [
            jnp.stack([one.mean(), jnp.abs(one).max(), jnp.sqrt((one * one).sum()), one.min()])
            for one in arrays
        ]

    compiled = jax.jit(statistics)
    return Pair(lambda: statistics(arrays), lambda: compiled(arrays))


def euler_steps_in_python(size: int) -> Pair:
    def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        place, speed = state
        return place + 0.01 * speed, speed - 0.01 * jnp.sin(place)

    compiled = jax.jit(step)
    together = jax.jit(lambda s: lax.fori_loop(0, 2000, lambda _, s: step(s), s))
    start = (normal(size), jnp.zeros(size))

    def turns() -> Any:
        state = start
        for _ in range(2000):
            state = compiled(state)
        return state

    return Pair(turns, lambda: together(start))


def an_eager_loss(size: int) -> Pair:
    def focal(x: jax.Array) -> jax.Array:
        p = 1 / (1 + jnp.exp(-x))
        return x - 0.1 * (1 - p) * (1 - p) * jnp.log(p + 1e-6)

    return _eager(focal, size)


def an_eager_mixture(size: int) -> Pair:
    def mixed(x: jax.Array) -> jax.Array:
        return jnp.where(x > 0, x * 0.9 + 0.1, jnp.exp(x) - 1) * jnp.cos(x)

    return _eager(mixed, size)


def filters_one_by_one(size: int) -> Pair:
    """A bank of filters, each its own small product with the same signal."""
    signal, bank = normal(size, 256), normal(2000, 4, size)
    each = jax.jit(lambda bank: lax.map(lambda one: one @ signal, bank))
    together = jax.jit(lambda bank: (bank.reshape(-1, size) @ signal).reshape(2000, 4, 256))
    return Pair(lambda: each(bank), lambda: together(bank))


def queries_one_by_one(size: int) -> Pair:
    """Scores of one query at a time against all keys."""
    queries, keys = normal(4000, size), normal(512, size)
    each = jax.jit(lambda q: lax.map(lambda one: keys @ one, q))
    together = jax.jit(lambda q: q @ keys.T)
    return Pair(lambda: [each(queries) for _ in range(4)], lambda: [together(queries) for _ in range(4)])


def attention_in_float64(size: int) -> Pair:
    def attention(x: jax.Array) -> jax.Array:
        scores = jnp.einsum("bqhd,bkhd->bhqk", x, x) / 8
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), x)

    return _both(attention, np.asarray(normal(2, size, 8, 64)), times=4)


def waves_in_float64(size: int) -> Pair:
    """Element-wise work alone."""
    return _both(lambda x: jnp.sin(x * 1.5) + jnp.tanh(x), np.asarray(normal(size, size)), times=8)


def a_check_inside(size: int) -> Pair:
    """A loop that asks Python whether all is well."""
    weights, x = normal(8, size, size), normal(size, size)

    def check(value: Any) -> None:
        if not np.isfinite(np.asarray(value)).all():
            raise FloatingPointError("not finite")
        sorted(np.asarray(value).ravel().tolist())

    def turns(look: bool) -> Callable[[jax.Array], jax.Array]:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            h = jnp.tanh(h @ w)
            if look:
                jax.debug.callback(check, h[:64])
            return h, None

        return jax.jit(lambda x: lax.scan(layer, x, weights)[0])

    loud, quiet = turns(True), turns(False)
    return Pair(lambda: [loud(x) for _ in range(4)], lambda: [quiet(x) for _ in range(4)])


def a_table_looked_up_by_python(size: int) -> Pair:
    table = {number: float(number % 97) for number in range(1000)}

    def look_up(ids: np.ndarray) -> np.ndarray:
        return np.array([table[int(one)] for one in np.asarray(ids).ravel()], np.float32)

    values = jnp.asarray([table[number] for number in range(1000)], jnp.float32)
    ids = jnp.arange(4 * size) % 1000

    @jax.jit
    def called(ids: jax.Array) -> jax.Array:
        return jax.pure_callback(look_up, jax.ShapeDtypeStruct(ids.shape, jnp.float32), ids) * 2

    written = jax.jit(lambda ids: values[ids] * 2)
    return Pair(lambda: [called(ids) for _ in range(60)], lambda: [written(ids) for _ in range(60)])


def images_turned_and_turned_back(size: int) -> Pair:
    """Channels go first and last again between steps that do not care."""
    x = normal(32, size, size, 16)
    first = jax.jit(lambda x: jnp.moveaxis(x, -1, 1))
    last = jax.jit(lambda x: jnp.moveaxis(x, 1, -1))
    step = jax.jit(lambda x: x * 0.9 + 0.1)

    def turned() -> jax.Array:
        result = x
        for _ in range(6):
            result = last(step(first(result)))
        return result

    return Pair(turned, lambda: loop(lambda h, _: step(h), x, range(6)))


def a_buffer_that_is_copied_to_be_kept(size: int) -> Pair:
    """A ring of past states, of which one row is written in a step; the caller keeps the old one for nothing."""

    def write(ring: jax.Array, place: Any, row: jax.Array) -> jax.Array:
        return ring.at[place].set(row)

    keeping, donating = jax.jit(write), jax.jit(write, donate_argnums=0)
    row = normal(256)

    def turns(one: Callable[..., jax.Array]) -> jax.Array:
        ring = jnp.zeros((size, 256))
        for place in range(40):
            ring = one(ring, np.int32(place), row)
        return ring

    return Pair(lambda: turns(keeping), lambda: turns(donating))


TUNED_ON = (
    Planted("recompilation", growing_batches, (64, 256, 512)),
    Planted("recompilation", functions_made_in_a_loop, (32, 256, 512)),
    Planted("recompilation", changing_static_values, (32, 256, 512)),
    Planted("idle", input_from_afar, (128, 256, 512)),
    Planted("idle", python_between_steps, (128, 256, 384)),
    Planted("idle", numpy_augmentation, (128, 256, 512)),
    Planted("dispatch", eager_arithmetic, (4, 16, 64)),
    Planted("dispatch", an_eager_optimizer, (16, 256, 2048)),
    Planted("dispatch", one_short_step_at_a_time, (8, 256, 2048)),
    Planted("unfused", an_eager_chain, (1200, 1800, 2600)),
    Planted("unfused", an_eager_normalisation, (1200, 1800, 2600)),
    Planted("small_products", heads_one_by_one, (8, 12, 16)),
    Planted("small_products", examples_one_by_one, (64, 128, 192)),
    Planted("float64", products_in_float64, (384, 512, 768)),
    Planted("callback", printing_inside, (16, 64, 128)),
    Planted("copies", a_cache_that_is_not_donated, (4096, 8192, 16384)),
    Planted("copies", transposed_and_back, (160, 224, 320)),
    Planted("recompilation", closures_as_static_arguments, (32, 256, 512)),
    Planted("recompilation", a_last_batch_of_another_size, (64, 256, 512)),
    Planted("idle", text_files_between_steps, (128, 256, 384)),
    Planted("idle", metrics_computed_by_python, (128, 256, 512)),
    Planted("dispatch", rows_one_by_one, (16, 128, 512)),
    Planted("dispatch", a_recurrent_net_in_python, (16, 128, 1024)),
    Planted("unfused", an_eager_activation, (1200, 1800, 2600)),
    Planted("unfused", an_eager_clipped_update, (1200, 1800, 2600)),
    Planted("small_products", short_blocks, (16, 32, 64)),
    Planted("small_products", experts_token_by_token, (32, 64, 128)),
    Planted("float64", layers_in_float64, (384, 512, 640)),
    Planted("float64", training_in_float64, (384, 512, 640)),
    Planted("callback", numpy_inside, (64, 128, 256)),
    Planted("callback", logging_inside, (64, 128, 256)),
    Planted("copies", transposed_before_products, (64, 128, 256)),
    Planted("copies", a_state_that_is_not_donated, (8192, 16384, 32768)),
)

HELD_OUT = (
    Planted("recompilation", numbers_that_change_their_type, (32, 256, 512)),
    Planted("recompilation", a_gradient_made_each_time, (64, 256, 512)),
    Planted("idle", a_vocabulary_looked_up_in_python, (128, 256, 512)),
    Planted("idle", a_lock_held_by_another_thread, (128, 256, 384)),
    Planted("dispatch", metrics_one_by_one, (16, 256, 2048)),
    Planted("dispatch", euler_steps_in_python, (16, 256, 2048)),
    Planted("unfused", an_eager_loss, (1200, 1800, 2600)),
    Planted("unfused", an_eager_mixture, (1200, 1800, 2600)),
    Planted("small_products", filters_one_by_one, (16, 32, 64)),
    Planted("small_products", queries_one_by_one, (16, 32, 64)),
    Planted("float64", attention_in_float64, (128, 256, 384)),
    Planted("float64", waves_in_float64, (600, 1200, 2000)),
    Planted("callback", a_check_inside, (128, 256, 384)),
    Planted("callback", a_table_looked_up_by_python, (256, 1024, 4096)),
    Planted("copies", images_turned_and_turned_back, (48, 64, 96)),
    Planted("copies", a_buffer_that_is_copied_to_be_kept, (16384, 32768, 65536)),
)

# Of both, with sizes for a GPU that does a thousand times as much in a second: those that are healthy there without
# their fault. (A loop of small operations is not, for the host starts each; nor is what NumPy feeds.)
ON_GPU = (
    Planted("recompilation", functions_made_in_a_loop, (512, 1024, 4096)),
    Planted("recompilation", changing_static_values, (512, 1024, 4096)),
    Planted("recompilation", closures_as_static_arguments, (512, 1024, 4096)),
    Planted("recompilation", numbers_that_change_their_type, (512, 1024, 4096)),
    Planted("recompilation", a_gradient_made_each_time, (512, 1024, 4096)),
    Planted("idle", python_between_steps, (2048, 4096, 8192)),
    Planted("idle", numpy_augmentation, (256, 384, 512)),
    Planted("idle", text_files_between_steps, (256, 384, 512)),
    Planted("idle", metrics_computed_by_python, (256, 384, 512)),
    Planted("idle", a_vocabulary_looked_up_in_python, (256, 384, 512)),
    Planted("idle", a_lock_held_by_another_thread, (2048, 4096, 8192)),
    Planted("dispatch", rows_one_by_one, (16, 128, 512)),
    Planted("dispatch", metrics_one_by_one, (16, 256, 2048)),
    Planted("unfused", an_eager_chain, (12288, 14336, 16384)),
    Planted("unfused", an_eager_normalisation, (12288, 14336, 16384)),
    Planted("unfused", an_eager_activation, (12288, 14336, 16384)),
    Planted("unfused", an_eager_clipped_update, (12288, 14336, 16384)),
    Planted("unfused", an_eager_loss, (12288, 14336, 16384)),
    Planted("unfused", an_eager_mixture, (12288, 14336, 16384)),
    Planted("small_products", heads_one_by_one, (8, 12, 16)),
    Planted("small_products", examples_one_by_one, (64, 128, 192)),
    Planted("small_products", short_blocks, (16, 32, 64)),
    Planted("small_products", experts_token_by_token, (32, 64, 128)),
    Planted("small_products", filters_one_by_one, (16, 32, 64)),
    Planted("small_products", queries_one_by_one, (16, 32, 64)),
    Planted("float64", products_in_float64, (3072, 4096, 6144)),
    Planted("float64", layers_in_float64, (3072, 4096, 6144)),
    Planted("float64", training_in_float64, (3072, 4096, 6144)),
    Planted("float64", attention_in_float64, (3072, 4096, 6144)),
    Planted("float64", waves_in_float64, (8192, 12288, 16384)),
    Planted("callback", printing_inside, (1024, 2048, 3072)),
    Planted("callback", numpy_inside, (256, 512, 1024)),
    Planted("callback", logging_inside, (512, 1024, 2048)),
    Planted("callback", a_check_inside, (512, 1024, 2048)),
    Planted("copies", transposed_and_back, (1280, 1536, 1792)),
    Planted("copies", images_turned_and_turned_back, (512, 640, 768)),
    Planted("copies", transposed_before_products, (8192, 12288, 16384)),
)
