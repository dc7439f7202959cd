"""Changes to a script that is run: functions that can be put under ``jax.jit``, and those that cannot."""
# ruff: noqa: NPY002 - scripts draw from the global generator

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.errors import ConfigError
from capibara.observe.profile.changes import Change, Jitted, compile_with_jit, install, jitted_functions, wrap
from capibara.observe.profile.drawn import DrawnNumbers, refuse_random_numbers


def run(source: str, tmp_path: Path, *words: str) -> tuple[dict[str, Any], list[str]]:
    """The script's names, with the functions around the lines that have some words under ``jax.jit``, and the notes."""
    path = tmp_path / "script.py"
    path.write_text(source)
    lines = [
        number for number, line in enumerate(source.splitlines(), 1) if any(word in line for word in words)
    ]
    notes: list[str] = []
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(path), **wrap(notes.append)}
    exec(compile_with_jit(path, lines, notes.append), names)
    return names, notes


HEAD = "import jax, jax.numpy as jnp\nkept = []\n"


@pytest.mark.parametrize(
    ("source", "note"),
    [
        (
            "def f(x):\n    return jnp.tanh(x) + 1\nr = [f(jnp.ones(3)) for _ in range(3)]",
            "f is under jax.jit",
        ),
        (
            "def f(x, n):\n    for _ in range(n):\n        x = jnp.tanh(x)\n    return x\nr = f(jnp.ones(3), 4)",
            "f is under jax.jit",
        ),
        (
            "def f(x, name):\n    return getattr(jnp, name)(x) + 1\nr = f(jnp.ones(3), 'tanh')",
            "f is under jax.jit",
        ),
        ("def f(x):\n    return {'a': jnp.tanh(x).at[0].add(1)}\nr = f(jnp.ones(3))", "f is under jax.jit"),
        (
            "def f(x):\n    new = {}\n    new['a'] = jnp.tanh(x)\n    return new\nr = f(jnp.ones(3))",
            "f is under jax.jit",
        ),
        (
            # A flag that is an array later, by place and by name.
            "def f(x, keep, *, also=True):\n    return jnp.tanh(x) * keep * also\n"
            "r = [f(jnp.ones(3), True, also=True), f(jnp.ones(3), jnp.array(False), also=jnp.array(2))]",
            "f is under jax.jit",
        ),
        (
            "class C:\n    def f(self, x):\n        return jnp.tanh(x)\nr = C().f(jnp.ones(3))",
            "C.f is under jax.jit",
        ),
        (
            "def f(x):\n    return jnp.tanh(x) if x[0] > 0 else x\nr = f(jnp.ones(3))",
            "under jax.jit it does not work",
        ),
        (
            "import random\ndef f(x):\n    return jnp.tanh(x) + random.random()\nr = f(jnp.ones(3))",
            "random numbers that Python draws",
        ),
        (
            "import itertools\nturn = itertools.count()\n"
            "def f(x):\n    return jnp.tanh(x) + next(turn)\nr = f(jnp.ones(3))",
            "gives other results",
        ),
        ("def f(x):\n    kept.append(x)\n    return jnp.tanh(x)\nr = f(jnp.ones(3))", "it calls append()"),
        ("def f(x):\n    print(jnp.tanh(x))\nr = f(jnp.ones(3))", "it calls print()"),
        ("def f(x):\n    x.a = jnp.tanh(x.a)\nclass C: a = jnp.ones(3)\nr = f(C())", "it assigns to x.a"),
        ("def f(x):\n    global kept\n    kept = jnp.tanh(x)\nr = f(jnp.ones(3))", "it changes kept"),
        ("def f(x):\n    yield jnp.tanh(x)\nr = list(f(jnp.ones(3)))", "it is a generator"),
        ("r = jnp.tanh(jnp.ones(3))", "is in no function"),
        ("f = lambda x: jnp.tanh(x)\nr = f(jnp.ones(3))", "is in no function"),
    ],
)
def test_functions_under_jit(source: str, note: str, tmp_path: Path):
    names, notes = run(HEAD + source, tmp_path, "jnp.tanh", "getattr(jnp")
    assert len(notes) == 1
    assert note in notes[0]
    plain: dict[str, Any] = {"__name__": "__main__"}
    exec(HEAD + source, plain)
    if "random" not in source:
        for mine, theirs in zip(jax.tree.leaves(names["r"]), jax.tree.leaves(plain["r"]), strict=True):
            assert jnp.allclose(mine, theirs)
    assert len(names["kept"]) == len(plain["kept"])


def test_what_works_is_known_the_next_time(tmp_path: Path):
    """Functions are not called to find it out, and those of which one version fails stay as they are."""
    source = HEAD + (
        "def f(x, n):\n    kept2.__iadd__([1])\n    return jnp.tanh(x) * n\n"
        "def make(fails):\n"
        "    def g(x):\n        return jnp.tanh(x) if fails and x[0] > 0 else x\n"
        "    return g\n"
        "r = [f(jnp.ones(3), 2) for _ in range(3)], make(False)(jnp.ones(3)), make(True)(jnp.ones(3))\n"
    )
    path = tmp_path / "script.py"
    path.write_text(source)
    told: list[str] = []
    names: dict[str, Any] = {"kept2": (calls := []), **wrap(lambda _: None, None, told.append)}
    exec(compile_with_jit(path, [4, 8], lambda _: None), names)
    assert len(calls) == 2  # without jit, and traced
    known = jitted_functions(told)
    assert known == (Jitted(3, (), ()),)
    calls.clear()
    again: dict[str, Any] = {"kept2": calls, **wrap(lambda _: None, known)}
    exec(compile_with_jit(path, [4, 8], lambda _: None), again)
    assert len(calls) == 1  # traced
    for mine, theirs in zip(jax.tree.leaves(names["r"]), jax.tree.leaves(again["r"]), strict=True):
        assert jnp.allclose(mine, theirs)
    for text in ("", "{}", '{"line": 1}', '{"line": 1, "how": {"line": 1}}', '{"line": [], "how": null}'):
        with pytest.raises(ConfigError, match=r"which wrap\(\) did not write"):
            jitted_functions([text])


def test_what_is_fixed_for_one_version_is_fixed_for_all():
    told = [
        '{"line": 3, "how": {"line": 3, "static": [1], "names": []}}',
        '{"line": 3, "how": {"line": 3, "static": [], "names": ["k"]}}',
    ]
    assert jitted_functions(told) == (Jitted(3, (1,), ("k",)),)
    assert jitted_functions([*told, '{"line": 3, "how": null}']) == ()
    assert jitted_functions(['{"line": 3, "how": null}', *told]) == ()


def test_nothing_of_jax_is_asked_for_before_a_function_is_called(monkeypatch: pytest.MonkeyPatch):
    """A script may set its variables between defining functions and importing JAX."""
    decorate = wrap(lambda _: None, [Jitted(1)])["__capibara_jit__"](1)
    monkeypatch.setattr(jax, "jit", None)
    function = decorate(lambda x: x + 1)
    monkeypatch.undo()
    assert function(1) == 2


def test_a_change_as_text():
    for change in (Change("jit", (3, 7)), Change("jit", (3,), (Jitted(3, (1,), ("n",)),))):
        assert Change.from_json(change.to_json()) == change
    for text in ("", "[]", "{}", '{"kind": "jit", "lines": ["x"]}', '{"kind": "jit"}'):
        with pytest.raises(ConfigError, match=r"which Change\.to_json"):
            Change.from_json(text)
    with pytest.raises(ConfigError, match="expected one of x64_off"):
        Change.from_json('{"kind": "rm", "lines": [], "jitted": null}')


def test_one_function_is_jitted_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "jit", jax.jit)
    install(Change("jit_once"))

    def make(factor: float, other: list[int]) -> Any:
        return jax.jit(lambda x: x * factor + len(other))

    one, two = [1], [1, 2]
    assert make(2.0, one) is make(2.0, one)
    assert make(2.0, one) is not make(3.0, one)
    assert make(2.0, one) is not make(2.0, two)
    assert float(make(3.0, two)(1.0)) == 5.0

    def scaled(factor: float) -> Any:
        def apply(x: float, *, by: float = factor) -> float:
            return x * by

        return jax.jit(apply)

    assert [float(scaled(factor)(1.0)) for factor in (2.0, 3.0)] == [2.0, 3.0]
    assert jax.jit(lambda x: x, static_argnums=0)(3) == 3


def test_a_function_that_reads_other_values_of_the_module_is_jitted_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "jit", jax.jit)
    install(Change("jit_once"))
    names: dict[str, Any] = {"jax": jax}
    exec(
        "made, out = [], []\n"
        "for scale in (2.0, 3.0, 3.0):\n"
        "    made.append(jax.jit(lambda x: (lambda y: y * scale)(x)))\n"
        "    out.append(float(made[-1](1.0)))\n",
        names,
    )
    assert names["out"] == [2.0, 3.0, 3.0]
    assert names["made"][1] is names["made"][2]

    def nothing_or(one: Any, other: Any) -> Any:
        return jax.jit(lambda x: x * 2 if one is None else (x * 3 if other is None else x))

    assert [float(nothing_or(*pair)(1.0)) for pair in ((None, "a"), ("a", None))] == [2.0, 3.0]


def test_callbacks_that_only_look_are_left_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax.debug, "print", jax.debug.print)
    monkeypatch.setattr(jax.debug, "callback", jax.debug.callback)
    install(Change("no_debug_callbacks"))
    seen: list[Any] = []

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        jax.debug.callback(seen.append, x)
        return x + 1

    assert float(step(jnp.ones(()))) == 2
    jax.effects_barrier()
    assert seen == []


def test_results_take_the_place_of_arguments(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "jit", jax.jit)
    install(Change("donate"))

    @jax.jit
    def write(cache: jax.Array, row: jax.Array, at: Any) -> jax.Array:
        return cache.at[at].set(row)

    cache, row = jnp.zeros((64, 32)), jnp.ones(32)
    later = write(cache, row, 3)
    assert cache.is_deleted()
    assert not row.is_deleted()
    assert float(later.sum()) == 32
    # Within another function, with settings of its own, and of an array that is given twice it is as it was.
    outer = jax.jit(lambda cache: write(cache, row, 4) + 1)
    assert outer.lower(later).as_text()
    kept = jnp.ones(8)
    assert float(jax.jit(lambda x, n: x * n, static_argnums=1)(kept, 2).sum()) == 16
    assert not kept.is_deleted()
    twice = jax.jit(lambda x, y: (x + y, x - y))
    twice(kept, kept)
    assert not kept.is_deleted()
    sizes = jax.jit(lambda x: x.sum())
    whole = jnp.ones(8)
    assert float(sizes(whole)) == 8
    assert not whole.is_deleted()


def test_a_scheduler_for_exposed_communication():
    from types import SimpleNamespace

    from capibara.observe.bottlenecks.remedies import choose_remedies

    found: Any = SimpleNamespace(kind="communication", evidence={})
    chosen = {
        platform: choose_remedies(SimpleNamespace(platform=platform), found, None, Path())  # type: ignore[arg-type]
        for platform in ("cpu", "gpu", "tpu")
    }
    assert chosen["cpu"] == []
    assert "latency_hiding" in chosen["gpu"][0].environment["XLA_FLAGS"]
    assert "latency_hiding" in chosen["tpu"][0].environment["LIBTPU_INIT_ARGS"]


@pytest.mark.parametrize(
    ("draw", "drawn"),
    [
        (lambda: None, False),
        (lambda: np.random.default_rng(0).normal(), False),
        (random.random, True),
        (np.random.normal, True),
    ],
)
def test_random_numbers_that_are_drawn(draw: Callable[[], object], drawn: bool):
    random.seed(0)
    np.random.seed(0)
    with pytest.raises(DrawnNumbers) if drawn else contextlib.nullcontext(), refuse_random_numbers():
        draw()
    after = random.random(), np.random.normal()
    random.seed(0)
    np.random.seed(0)
    assert (random.random(), np.random.normal()) == after  # as if nothing had been drawn


def test_random_numbers_of_another_generator_of_numpy():
    of_numpy: Any = np.random  # whose stubs lack these two
    before = of_numpy.get_bit_generator()
    of_numpy.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(DrawnNumbers), refuse_random_numbers():
            np.random.normal()
    finally:
        of_numpy.set_bit_generator(before)
