"""Changes that let the host work beside the devices, and turns of loops together: what is changed, and what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.errors import ConfigError
from capibara.observe.profile.changes import Change, changed_script, install, rolled_loops
from capibara.observe.profile.results import compare_results, compare_texts, write_results
from capibara.observe.profile.turns import UNROLLED

HEAD = "import jax, jax.numpy as jnp, numpy as np\n"


class Told:
    """What a change says."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.uses: list[str] = []
        self.found: list[str] = []

    def install(self, kind: str, place: str = " in line 1") -> Any:
        return install(Change(kind), self.notes.append, self.uses.append, lambda: place)

    def run(
        self, kind: str, source: str, tmp_path: Path, loops: tuple[int, ...] | None = None
    ) -> dict[str, Any]:
        path = tmp_path / "script.py"
        path.write_text(HEAD + source)
        code, names = changed_script(
            path, Change(kind, loops=loops), self.notes.append, self.uses.append, self.found.append
        )
        names |= {"__name__": "__main__", "__file__": str(path)}
        exec(code, names)
        return names


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    for module, names in ((jax.lax, ("map", "scan", "fori_loop")), (jax, ("block_until_ready",))):
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))
    kind = type(jnp.zeros(()))
    for name in ("block_until_ready", "__float__", "__int__", "__bool__", "__index__", "item", "tolist"):
        monkeypatch.setattr(kind, name, getattr(kind, name))
    for name in ("__array__", "__format__"):
        monkeypatch.setattr(kind, name, getattr(kind, name))
    return Told()


def eqns(function: Any, *arguments: Any) -> list[str]:
    return [str(one.primitive) for one in jax.make_jaxpr(function)(*arguments).jaxpr.eqns]


W = np.random.default_rng(0).normal(size=(8, 8)).astype("float32") / 3
ROWS = np.random.default_rng(1).normal(size=(40, 8)).astype("float32")

# Each: a function of ROWS, what "batch" says of it, and whether it still is a loop of 40 turns then.
LOOPS: dict[str, tuple[Any, str, bool]] = {
    "map": (
        lambda x: jax.lax.map(lambda row: jnp.tanh(row @ W), x),
        "lax.map in line 1: 40 of its 40",
        False,
    ),
    "map of pairs": (
        lambda x: jax.lax.map(lambda one: {"a": one[0] @ W + one[1]}, (x, jnp.arange(40.0))),
        "lax.map in line 1: 40 of its 40",
        False,
    ),
    "scan that carries nothing": (
        lambda x: jax.lax.scan(lambda carry, row: (carry, row @ W), 0, x),
        "lax.scan in line 1: 40 of its 40",
        False,
    ),
    "backwards, with gradients": (
        lambda x: jax.grad(
            lambda x: jax.lax.scan(lambda c, r: (c, (r @ W).sum()), 1.5, x, reverse=True)[1].sum()
        )(x),
        "lax.scan in line 1: 40 of its 40",
        False,
    ),
    "a recurrence": (
        lambda x: jax.lax.scan(lambda h, row: (jnp.tanh(h @ W + row), h), jnp.zeros(8), x),
        "each turn takes what the one before gave",
        True,
    ),
    "a sum": (
        lambda x: jax.lax.scan(lambda s, row: (s + row.sum(), None), 0.0, x)[0],
        "each turn takes what the one before gave",
        True,
    ),
}


@pytest.mark.parametrize("case", LOOPS)
def test_turns_together(case: str, told: Told):
    function, words, loops = LOOPS[case]
    expected = function(ROWS)
    told.install("batch")
    found = jax.jit(lambda x: function(x))(ROWS)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (mine.shape, mine.dtype) == (jnp.shape(theirs), jnp.result_type(theirs))
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    assert any(words in one for one in (told.notes if loops else told.uses))
    assert bool(told.uses) is not loops


def test_what_cannot_be_batched_stays(told: Told):
    """A callback that takes one row at a time, and too few turns."""
    told.install("batch")

    def called(row: jax.Array) -> jax.Array:
        return jax.pure_callback(lambda r: np.asarray(r) * 2, jax.ShapeDtypeStruct((8,), jnp.float32), row)

    np.testing.assert_allclose(jax.lax.map(called, ROWS), 2 * ROWS)
    assert told.uses == []
    assert len(told.notes) == 1
    assert told.notes[0].startswith("lax.map in line 1 was left as it is: ")
    told.notes.clear()
    jax.lax.map(lambda row: row * 2, ROWS[:4])
    jax.lax.map(lambda row: row * 2, ROWS, batch_size=5)
    assert (told.uses, told.notes) == ([], [])


@pytest.mark.parametrize("case", LOOPS)
def test_unrolled(case: str, told: Told):
    function, _, _ = LOOPS[case]
    expected = function(ROWS)
    told.install("unroll")
    found = jax.jit(lambda x: function(x))(ROWS)  # of its own: JAX keeps what it traced for a function
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (mine.shape, mine.dtype) == (jnp.shape(theirs), jnp.result_type(theirs))
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    assert any(f"{UNROLLED} of its 40 turns" in one for one in told.uses)


def test_loops_of_a_known_number_of_turns_are_unrolled(told: Told):
    told.install("unroll")
    known = jax.make_jaxpr(lambda x: jax.lax.fori_loop(0, 40, lambda _, h: h * 1.5, x))(1.0)
    assert UNROLLED in [one.params.get("unroll") for one in known.jaxpr.eqns]
    assert float(jax.lax.fori_loop(0, jnp.int32(3), lambda _, h: h * 2, 1.0)) == 8
    assert told.notes == [
        "lax.fori_loop in line 1 was left as it is: how many turns it has is known when it runs"
    ]
    scanned = jax.make_jaxpr(lambda x: jax.lax.scan(lambda h, _: (h, None), x, None, 40, unroll=4)[0])(1.0)
    assert [one.params.get("unroll") for one in scanned.jaxpr.eqns] == [4]  # as the author wrote it


def test_nothing_is_waited_for(told: Told):
    reads = told.install("no_wait")
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 60, lambda _, h: jnp.tanh(h @ h), x))
    x = jnp.eye(300)
    slow(x).block_until_ready()
    told.uses.clear()
    asked = slow(x)
    assert asked.block_until_ready() is asked
    assert jax.block_until_ready((asked, 3))[0] is asked
    assert set(told.uses) == {"block_until_ready in line 1 does not wait"}
    # What Python reads it waits for, and that is counted; one read is one, though NumPy asks several times.
    assert float(asked[0, 0]) == pytest.approx(float(np.asarray(asked)[0, 0]))
    for _ in range(3):
        asked[0, 0].item()
    (item,) = [one for one in reads.notes() if ".item()" in one]
    assert item.startswith("a result is read in line 1 3 times (.item()), ")
    assert "Read it one step later" in item
    assert [one for one in reads.notes(least=1) if "(float())" in one]


def test_work_of_others_is_waited_for(told: Told):
    """Where no line of the script asks."""
    told.install("no_wait", place="")
    x = jax.jit(lambda x: jax.lax.fori_loop(0, 60, lambda _, h: jnp.tanh(h @ h), x))(jnp.eye(300))
    x.block_until_ready()
    assert x.is_ready()
    assert told.uses == []


def test_items_are_prepared_ahead(told: Told, tmp_path: Path):
    names = told.run(
        "ahead",
        """
import threading, time
made, threads, seen = [], set(), []
def items():
    for n in range(6):
        made.append(n)
        threads.add(threading.current_thread())
        yield n
for item in items():
    time.sleep(0.02)
    seen.append((item, len(made)))
for item in [1, 2]:
    pass
for item in range(2):
    pass
for row in jnp.ones((2, 3)):
    pass
""",
        tmp_path,
    )
    assert [item for item, _ in names["seen"]] == list(range(6))
    assert all(ahead >= min(item + 2, 6) for item, ahead in names["seen"])
    assert len(names["threads"]) == 1
    assert told.uses == ["items of the loop in line 10 are prepared by another thread, 2 ahead"]


def test_an_iterator_that_is_left_goes_on(told: Told, tmp_path: Path):
    names = told.run(
        "ahead",
        """
def items():
    yield from range(5)
    raise ValueError("no more")
source, seen = items(), []
for item in source:
    seen.append(item)
    if item == 1:
        break
try:
    for item in source:
        seen.append(item)
except ValueError as error:
    seen.append(str(error))
def traced(x):
    for factor in (n for n in (2.0, 3.0)):  # not in another thread: this is traced
        x = x * factor
    return x
r = jax.jit(traced)(jnp.ones(()))
""",
        tmp_path,
    )
    assert names["seen"] == [0, 1, 2, 3, 4, "no more"]
    assert float(names["r"]) == 6


# Each: a script with one loop in line 4, and what is said of it (empty: it becomes a program).
SCRIPTS = {
    "x = jnp.ones(3)\n\nfor i in range(50):\n    x = x * 0.9 + 0.1 * i\n": "",
    "x, s = jnp.ones(3), 0\n\nfor i in range(5, 300, 3):\n    s += i\n    x = x * 0.9 + s\n": "",
    "h = jnp.zeros(3)\n\nfor row in jnp.arange(90.0).reshape(30, 3):\n    h = jnp.tanh(h * 0.5 + row)\n": "",
    "x = jnp.ones(3)\n\nfor f in [0.5] * 40:\n    y = x * f\n    x = {'a': y}['a'] + 1\n": "",
    "def g(x):\n    w = x + 1\n    for i in range(40):\n        x = jnp.tanh(x) * w\n    return x, i\n"
    "x, i = g(jnp.ones(3))\n": "",
    "step = jax.jit(lambda x: x + 1, donate_argnums=0)\nx = jnp.ones(3)\nfor i in range(40):\n    x = step(x)\n": "",
    "x = jnp.ones(3)\n\nfor i in range(40):\n    x = x + (1 if x[0] > 3 else 2)\n": "Attempted boolean conversion",
    "import random\nx = jnp.ones(3)\nfor i in range(40):\n    x = x + random.random()\n": "random numbers that",
    "x = jnp.ones(3)\n\nfor i in range(40):\n    x = x + np.random.normal()\n": "random numbers that",
    "turn = iter(range(99))\nx = jnp.ones(3)\nfor i in range(40):\n    x = x + next(turn)\n": "it gives other results",
    "x = jnp.ones(1)\n\nfor i in range(30):\n    x = jnp.concatenate([x, x[:1]])\n": "was left as it is",
    "x, s = jnp.ones(3), []\n\nfor i in range(40):\n    s = s + [str(i)]\n": "it assigns a name that holds no arrays",
    "x, s = jnp.ones(3), []\n\nfor i in range(40):\n    s.append(x)\n": "does more than assign names",
    "x = np.ones(3)\n\nfor i in range(40):\n    x[0] = i\n": "assigns to x[0]",
    "x = jnp.ones(3)\n\nfor i in range(40):\n    if i > 3: break\n": "may end a turn early",
    "x = jnp.ones(3)\n\nfor i, j in zip(range(40), range(40)):\n    x = x + i\n": "has several targets",
}


@pytest.mark.parametrize("source", SCRIPTS)
def test_loops_as_programs(source: str, told: Told, tmp_path: Path):
    names = told.run("roll", source, tmp_path)
    plain: dict[str, Any] = {"__name__": "__main__"}
    exec(HEAD + source, plain)
    if "random" not in source:
        for name in {"x", "h", "s", "y", "i"} & set(plain):
            assert type(names[name]) is type(plain[name])
            for mine, theirs in zip(jax.tree.leaves(names[name]), jax.tree.leaves(plain[name]), strict=True):
                if not isinstance(mine, str):
                    np.testing.assert_allclose(mine, theirs, rtol=1e-5)
    if SCRIPTS[source]:
        assert any(SCRIPTS[source] in one for one in told.notes), told.notes
        assert rolled_loops(told.found) == ()
        return
    (line,) = rolled_loops(told.found)
    turns = [f"the loop in line {line} is one program: {n} turns of lax.scan" for n in (30, 40, 50, 99)]
    assert len(told.uses) == 1
    assert told.uses[0] in turns
    # What is known is not tried again: the results come from the program alone.
    again = Told()
    names = again.run("roll", source, tmp_path, loops=(line,))
    assert again.uses == told.uses
    for name in {"x", "h", "s", "y", "i"} & set(plain):
        for mine, theirs in zip(jax.tree.leaves(names[name]), jax.tree.leaves(plain[name]), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5)
    # And a loop that is not known to work stays Python's.
    other = Told()
    other.run("roll", source, tmp_path, loops=(line + 100,))
    assert other.uses == []


def test_a_loop_that_closes_over_other_values_each_time(told: Told, tmp_path: Path):
    source = (
        "def g(x, w):\n    for i in range(40):\n        x = x * 0.5 + w\n    return x\n"
        "r = [float(g(jnp.ones(()), jnp.float32(w))) for w in (1, 2, 1)]\n"
        "scale = 1.0\nfor i in range(30):\n    x = jnp.ones(()) * scale\n"
    )
    told.run("roll", source, tmp_path)
    assert len(rolled_loops(told.found)) == 2
    names = Told().run("roll", source, tmp_path, loops=rolled_loops(told.found))
    assert names["r"] == pytest.approx([2, 4, 2], rel=1e-4)


# Each gives a global `out`, as the script alone does.
AS_THEY_ARE = {
    "comprehension": """
ws, w = [0.1, 0.2, 0.3], 7.0
def run(x):
    for i in range(30):
        y = sum([one * w * x for one in ws])
        x = jnp.tanh(y)
    return x
out = run(jnp.ones(3))
""",
    "comprehension over a name of the module": """
w = jnp.float32(0.5)
def run(x):
    for i in range(30):
        x = jnp.tanh(sum([w * x for w in (0.1, 0.2)]))
    return x + w
out = run(jnp.ones(3))
""",
    "a function reads what the body assigns": """
x = jnp.ones(3)
def step():
    return jnp.tanh(x * 0.9 + 0.1)
for i in range(30):
    x = step()
out = x
""",
    "an array that others hold": """
def add(total):
    for i in range(30):
        total += np.float32(i)
total = np.zeros(3, np.float32)
add(total)
out = total
""",
    "large numbers": """
x = jnp.ones(3)
for k in range(10**10, 10**10 + 30):
    x = jnp.tanh(x + k % 7)
for k in range(2**31 - 30, 2**31):
    x = jnp.tanh(x + k % 7)
out = x
""",
    "a column with labels": """
class Column(np.ndarray):
    def __getitem__(self, key):
        return super().__getitem__(key if isinstance(key, slice) else -1 - key)
    def __iter__(self):
        return iter(np.asarray(self))
x = jnp.ones(3)
for v in np.linspace(0, 1, 30).astype(np.float32).view(Column):
    x = jnp.tanh(0.5 * x + v)
out = x
""",
    "a declaration": """
x = jnp.ones(3)
for k in range(30):
    y: int
    x = jnp.tanh(x + k)
out = x
""",
}


@pytest.mark.parametrize("source", AS_THEY_ARE.values(), ids=AS_THEY_ARE)
def test_loops_give_what_the_script_gives(source: str, told: Told, tmp_path: Path):
    names: dict[str, Any] = {}
    exec(HEAD + source, names)
    found = told.run("roll", source, tmp_path)
    np.testing.assert_allclose(found["out"], names["out"], rtol=1e-5)
    again = told.run("roll", source, tmp_path, loops=rolled_loops(told.found))
    np.testing.assert_allclose(again["out"], names["out"], rtol=1e-5)


def test_a_loop_whose_function_keeps_something_stays(told: Told, tmp_path: Path):
    source = """
class Model:
    weights = jnp.ones(3)
    def step(self):
        object.__setattr__(self, "weights", 0.9 * self.weights)
        return jnp.float32(1) + 0 * self.weights
model = Model()
for i in range(30):
    loss = model.step()
"""
    told.run("roll", source, tmp_path)
    assert rolled_loops(told.found) == ()
    assert "was left as it is: Leaked" in told.notes[0]


def test_few_turns_together_where_they_take_much_memory(told: Told):
    told.install("batch")
    xs = jnp.arange(40.0)

    def wide(x: Any) -> Any:
        return jax.jit(lambda x: jnp.sum(jnp.sin(x + jnp.arange(2.0**23))))(x)  # 32 MiB

    jax.make_jaxpr(lambda xs: jax.lax.map(wide, xs))(xs)
    assert told.uses == ["lax.map in line 1: 8 of its 40 turns at once"]
    jax.make_jaxpr(lambda xs: jax.lax.map(lambda x: jnp.sum(x + jnp.arange(2.0**26)), xs))(xs)
    assert told.notes == ["lax.map in line 1 was left as it is: arrays of two turns take more than 256 MiB"]


def test_what_the_loops_say_is_checked():
    assert rolled_loops(
        ['{"loop": 3, "works": true}', '{"loop": 4, "works": true}', '{"loop": 3, "works": false}']
    ) == (4,)
    for text in ("", "[]", '{"loop": "x"}', '{"loop": 3}'):
        with pytest.raises(ConfigError, match="which the change did not write"):
            rolled_loops([text])
    change = Change("roll", loops=(3, 7))
    assert Change.from_json(change.to_json()) == change


# --- whether two runs gave the same


def test_results_of_two_runs(tmp_path: Path):
    names = {
        "a": jnp.arange(6.0).reshape(2, 3),
        "half": jnp.ones(4, jnp.bfloat16),
        "tree": {"w": [np.float64(2.0), 3, jnp.array(True)]},
        "z": np.array([1 + 2j]),
        "text": "not compared",
        "nan": float("nan"),
        "__name__": 3,
    }
    write_results(tmp_path / "one.npz", names)
    write_results(tmp_path / "near.npz", names | {"a": names["a"] * 1.0004})
    write_results(tmp_path / "far.npz", names | {"z": np.array([1 + 2.1j])})
    write_results(tmp_path / "shape.npz", names | {"a": names["a"].reshape(3, 2)})
    write_results(tmp_path / "fewer.npz", {key: one for key, one in names.items() if key != "half"})
    one = tmp_path / "one.npz"
    assert compare_results(one, one, 0.0) == (7, "")
    assert compare_results(one, tmp_path / "near.npz", 1e-3) == (7, "")
    assert compare_results(one, tmp_path / "near.npz", 1e-5) == (7, "a")
    assert compare_results(one, tmp_path / "far.npz", 1e-3) == (7, "z")
    assert compare_results(one, tmp_path / "shape.npz", 1e-3) == (7, "a")
    assert compare_results(one, tmp_path / "fewer.npz", 1e-3) == (7, "half")
    (tmp_path / "rubbish.npz").write_bytes(b"PK\x03\x04 rubbish")
    assert compare_results(tmp_path / "rubbish.npz", tmp_path / "missing.npz", 1e-3) == (0, "")
    # A difference is not hidden by a large shape, and a deleted array is left out.
    gone = jnp.ones(3)
    gone.delete()
    for name, value in (("long", 1.0), ("other", 1.5)):
        write_results(tmp_path / f"{name}.npz", {"gone": gone, "x": np.full(200_000, value)})
    assert compare_results(tmp_path / "long.npz", tmp_path / "other.npz", 1e-3) == (1, "x")


@pytest.mark.parametrize(
    ("one", "other", "differs"),
    [
        ("loss 0.12345, 3 steps", "loss 0.12346, 3 steps", ""),
        ("loss 0.12345", "loss 0.13345", "0.12345 and 0.13345"),
        ("loss 1e-9", "loss 2e-9", ""),
        ("done", "failed", "'done' and 'failed'"),
        ("[1. 2.]", "[1. 2. 3.]", "']' and ''"),
        ("same", "same", ""),
    ],
)
def test_outputs_of_two_runs(one: str, other: str, differs: str):
    assert compare_texts(one.encode(), other.encode(), 1e-3) == differs
