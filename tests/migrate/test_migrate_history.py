"""Every entry of the table of removals is held against the installed JAX."""

from __future__ import annotations

import importlib
import re
import warnings

import jax
import jax.numpy as jnp
import pytest

from capibara.migrate.history import History, parse_version
from capibara.migrate.installed import installed_api

HISTORY = History.load()
VERSION = tuple(int(part) for part in re.findall(r"\d+", jax.__version__)[:3])


def reachable(path: str) -> bool:
    """Independent of the checker's lookup: import the longest module prefix, then getattr."""
    parts = path.split(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for end in range(len(parts), 0, -1):
            try:
                value = importlib.import_module(".".join(parts[:end]))
            except ImportError as error:
                # There, but it needs a package that is not installed here.
                if not (error.name or "jax").startswith("jax") and end == len(parts):
                    return True
                continue
            try:
                for name in parts[end:]:
                    value = getattr(value, name)
            except AttributeError:
                return False
            return True
    return False


def importable(module: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importlib.import_module(module)
        except ImportError:
            return False
    return True


def replacements(text: str) -> list[str]:
    return re.findall(r"\bjax(?:lib)?(?:\.[A-Za-z_]\w*)+", text)


def test_the_table_is_not_small():
    assert len(HISTORY.names) > 450
    assert len(HISTORY.modules) > 50
    assert len(HISTORY.keywords) > 35


def test_removed_names_are_unreachable_and_the_others_are_there():
    wrong = [
        change.name
        for change in HISTORY.names.values()
        if reachable(change.name) == change.removed_by(VERSION)
    ]
    assert wrong == []


def test_removed_modules_cannot_be_imported():
    wrong = [
        change.name
        for change in HISTORY.modules.values()
        if importable(change.name) == change.removed_by(VERSION)
    ]
    assert wrong == []


@pytest.mark.parametrize("table", ["names", "modules", "keywords", "options", "attributes"])
def test_every_replacement_is_there(table):
    missing = [
        (change.name, name)
        for change in getattr(HISTORY, table).values()
        for name in replacements(change.replacement)
        # What 0.11 removes got its replacement in the course of 0.10.
        if not reachable(name) and not (change.removed == "0.11.0" and VERSION < (0, 10, 2))
    ]
    assert missing == []


@pytest.mark.parametrize("table", ["names", "modules", "keywords", "options", "attributes"])
def test_versions_are_in_order(table):
    for change in getattr(HISTORY, table).values():
        assert change.removed or change.deprecated, change
        if change.removed and change.deprecated:
            assert parse_version(change.deprecated) < parse_version(change.removed), change


def test_keywords_that_are_gone_are_not_accepted():
    api = installed_api()
    for (function, keyword), change in HISTORY.keywords.items():
        signature = api.signature(function)
        if change.effect == "gone":
            assert signature is not None, function
            parameter = signature.parameters.get(keyword)
            assert parameter is None or parameter.kind is parameter.POSITIONAL_ONLY, (function, keyword)
        elif signature is not None and not (change.removed and VERSION >= (0, 11)):
            # What 0.10 still names in order to refuse it may be gone later.
            assert keyword in signature.parameters, (function, keyword)


def double(x):
    return 2 * x


# A call for each keyword that the signature still has (or hides in **kwargs): it must raise, or warn.
PROBES = {
    ("jax.jit", "device"): lambda: jax.jit(double, device=jax.devices()[0]),
    ("jax.jit", "backend"): lambda: jax.jit(double, backend="cpu"),
    ("jax.checkpoint", "concrete"): lambda: jax.checkpoint(double, concrete=True),
    ("jax.remat", "concrete"): lambda: jax.remat(double, concrete=True),
    ("jax.grad", "reduce_axes"): lambda: jax.grad(double, reduce_axes=("i",))(1.0),
    ("jax.value_and_grad", "reduce_axes"): lambda: jax.value_and_grad(double, reduce_axes=("i",))(1.0),
    ("jax.vjp", "reduce_axes"): lambda: jax.vjp(double, 1.0, reduce_axes=("i",)),
    ("jax.local_devices", "host_id"): lambda: jax.local_devices(host_id=0),
    ("jax.numpy.sort", "kind"): lambda: jnp.sort(jnp.ones(2), kind="stable"),  # type: ignore[arg-type]
    ("jax.numpy.argsort", "kind"): lambda: jnp.argsort(jnp.ones(2), kind="stable"),  # type: ignore[arg-type]
    ("jax.pure_callback", "vectorized"): lambda: jax.block_until_ready(
        jax.pure_callback(double, jnp.ones(2), jnp.ones(2), vectorized=True)
    ),
}


def test_there_is_a_probe_for_each_remaining_keyword():
    assert set(PROBES) == {key for key, change in HISTORY.keywords.items() if change.effect != "gone"}


@pytest.mark.parametrize("key", PROBES, ids="-".join)
def test_remaining_keywords_raise_or_warn(key, caplog):
    change = HISTORY.keywords[key]
    if change.effect == "warns":
        with pytest.warns((DeprecationWarning, UserWarning)):
            PROBES[key]()
    else:
        with pytest.raises((NotImplementedError, TypeError, jax.errors.JaxRuntimeError)):
            PROBES[key]()


def test_removed_options_are_refused():
    for name, change in HISTORY.options.items():
        assert change.removed_by(VERSION)
        with pytest.raises(AttributeError):
            jax.config.update(name, True)


def test_removed_array_attributes_are_gone():
    array = jnp.ones(3)
    for name in HISTORY.attributes:
        assert not hasattr(jax.Array, name)
        with pytest.raises(AttributeError):
            getattr(array, name)


def test_notices_are_about_names_that_exist():
    for notice in HISTORY.notices.values():
        assert reachable(notice.name)
        assert parse_version(notice.since) <= VERSION
        assert all(map(reachable, replacements(notice.fix)))


def test_make_mesh_notice_is_true():
    assert jax.make_mesh((1,), ("x",)).axis_types == (jax.sharding.AxisType.Explicit,)
