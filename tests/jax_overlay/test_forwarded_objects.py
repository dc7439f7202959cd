"""Objects that come through the overlay behave as JAX's own: pickle, isinstance, inspect, warnings, errors."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import sys
import types
import typing
import warnings
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import shard_map as shard_map_module

import capibara.jax as cjax
import capibara.jax.numpy as cjnp
from capibara.errors import ConfigError

flags: Any = jax.config  # its flags are attributes that no type checker can know


@pytest.mark.parametrize(
    "value",
    [
        cjax.jit,
        cjax.ShapeDtypeStruct,
        cjnp.apply_along_axis,
        cjax.tree_util.tree_map,
        cjax.P,
        cjax.lax.Precision,
    ],
)
def test_pickled_by_reference_to_jax_s_own_place(value):
    text = pickle.dumps(value)
    assert b"capibara" not in text
    assert pickle.loads(text) is value


def test_values_made_through_the_overlay_pickle_and_compare():
    spec = cjax.sharding.PartitionSpec("data", None)
    assert pickle.loads(pickle.dumps(spec)) == jax.sharding.PartitionSpec("data", None)
    array = pickle.loads(pickle.dumps(cjnp.arange(3)))
    assert isinstance(array, jax.Array)
    np.testing.assert_array_equal(array, [0, 1, 2])


def test_overlay_modules_travel_with_cloudpickle():
    """Functions that mention a module are what Ray, Dask and Beam send about."""
    cloudpickle = pytest.importorskip("cloudpickle")
    assert cloudpickle.loads(cloudpickle.dumps(cjax)) is cjax
    assert pickle.loads(pickle.dumps(cjnp)) is cjnp
    assert copy.deepcopy(cjax) is cjax


def test_isinstance_both_ways():
    assert isinstance(cjnp.ones(2), jax.Array)
    assert isinstance(jax.numpy.ones(2), cjnp.ndarray)
    assert isinstance(cjax, types.ModuleType)
    assert isinstance(cjax.config, type(jax.config))
    assert inspect.ismodule(cjnp)


def test_inspect_sees_jax_s_source():
    assert inspect.signature(cjax.jit) == inspect.signature(jax.jit)
    assert inspect.getsource(cjax.vmap) == inspect.getsource(jax.vmap)
    assert inspect.getmodule(cjax.nn.gelu) is inspect.getmodule(jax.nn.gelu)
    assert inspect.getdoc(cjnp.dot) == inspect.getdoc(jax.numpy.dot)
    nn = importlib.import_module("capibara.jax.nn")
    assert inspect.getsource(nn) == inspect.getsource(jax.nn)
    assert typing.get_type_hints(cjax.named_scope) == typing.get_type_hints(jax.named_scope)
    members = dict(inspect.getmembers(cjax))
    assert members["jit"] is jax.jit


def test_name_version_and_documentation_are_told_apart():
    assert cjax.__name__ == "capibara.jax"
    assert cjax.__version__ == jax.__version__
    assert "Capibara" in (cjax.__doc__ or "")
    assert cjnp.__name__ == "capibara.jax.numpy"


def test_a_typo_says_what_was_meant():
    for module, typo, meant in (
        (cjax, "jitt", "'jit'"),
        (cjnp, "onez", "'ones'"),
        (cjax, "get_backnd_info", "info'"),
    ):
        with pytest.raises(AttributeError) as caught:
            getattr(module, typo)
        text = str(caught.value)
        assert f"module {module.__name__!r}" in text
        assert f"no attribute {typo!r}" in text
        assert "Did you mean" in text
        assert meant in text
        assert caught.value.name == typo


def test_a_name_jax_removed_gives_jax_s_own_advice():
    with pytest.raises(AttributeError) as theirs:
        getattr(jax, "device_put_replicated")  # noqa: B009
    with pytest.raises(AttributeError) as ours:
        getattr(cjax, "device_put_replicated")  # noqa: B009
    assert str(theirs.value) in str(ours.value)


def _fresh_deprecation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give ``jax`` a deprecated name; JAX caches its own lookups, so each test needs a new one."""
    original = vars(jax)["__getattr__"]

    def lookup(name: str) -> Any:
        if name == "old_name":
            warnings.warn("jax.old_name is deprecated", DeprecationWarning, stacklevel=2)
            return jax.jit
        return original(name)

    monkeypatch.setattr(jax, "__getattr__", lookup)


def test_a_deprecation_warning_points_at_the_user_s_line(monkeypatch):
    """Python hides a DeprecationWarning that does not point into the program itself."""
    _fresh_deprecation(monkeypatch)
    overlay: Any = cjax
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert overlay.old_name is jax.jit
    (warning,) = caught
    assert warning.category is DeprecationWarning
    assert warning.filename == __file__


def test_deprecated_names_of_aliased_modules_warn_as_in_jax():
    overlay = importlib.import_module("capibara.jax.experimental.shard_map")
    assert overlay is shard_map_module
    # JAX caches the lookup and warns once a process, so only the value can be compared here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert overlay.shard_map is shard_map_module.shard_map


def test_assigning_to_the_overlay_leaves_jax_alone(monkeypatch):
    monkeypatch.setattr(cjax, "jit", "mine")
    assert jax.jit != "mine"
    monkeypatch.undo()
    assert cjax.jit is jax.jit


def test_jnp_random_is_jax_random():
    assert cjnp.random is jax.random
    assert sys.modules["capibara.jax.numpy"] is cjnp
    draw = cjnp.random.normal(cjax.random.PRNGKey(0), (4,))
    np.testing.assert_array_equal(draw, jax.random.normal(jax.random.PRNGKey(0), (4,)))


def test_config_forwards_every_attribute():
    for name in dir(jax.config):
        if not name.startswith("__") and name != "update":
            theirs, ours = getattr(jax.config, name), getattr(cjax.config, name)
            assert ours is theirs or ours == theirs, name
    assert pickle.loads(pickle.dumps(cjax.config)) is cjax.config


def test_config_update_sets_jax_s_own_flag():
    before = flags.jax_log_compiles
    try:
        cjax.config.update("jax_log_compiles", not before)
        assert flags.jax_log_compiles is (not before)
        assert cjax.config.jax_log_compiles is (not before)
    finally:
        jax.config.update("jax_log_compiles", before)


def test_config_unknown_flag_and_wrong_value():
    with pytest.raises(AttributeError, match="jax_no_such_flag"):
        cjax.config.update("jax_no_such_flag", True)
    with pytest.raises(AttributeError, match="no_such_attribute"):
        cjax.config.no_such_attribute
    with pytest.raises(ConfigError, match=r"jax_debug_mode.*'yes'.*True"):
        cjax.config.update("jax_debug_mode", "yes")
    with pytest.raises(AttributeError, match=r"config\.update"):
        cjax.config.jax_debug_mode = True


@pytest.fixture
def debug_mode_off():
    names = ("jax_debug_nans", "jax_check_tracer_leaks", "jax_traceback_filtering")
    before = {name: jax.config.values[name] for name in names}
    yield before
    cjax.config.update("jax_debug_mode", False)
    for name, value in before.items():
        jax.config.update(name, value)


def test_debug_mode_really_finds_a_nan_and_is_undone(debug_mode_off):
    divide = cjax.jit(lambda x: x / x)
    cjax.config.update("jax_debug_mode", True)
    assert cjax.config.jax_debug_mode is True
    assert flags.jax_traceback_filtering == "off"
    with pytest.raises(FloatingPointError):
        divide(cjnp.zeros(2))
    leaked = []
    with pytest.raises(Exception, match="Leaked"):
        cjax.jit(lambda x: leaked.append(x) or x)(1.0)
    cjax.config.update("jax_debug_mode", False)
    assert {name: jax.config.values[name] for name in debug_mode_off} == debug_mode_off
    assert np.isnan(divide(cjnp.zeros(2))).all()
    assert cjax.config.jax_debug_mode is False


def test_debug_mode_twice_still_restores_the_first_values(debug_mode_off):
    cjax.config.update("jax_debug_mode", True)
    cjax.config.update("jax_debug_mode", True)
    cjax.config.update("jax_debug_mode", False)
    cjax.config.update("jax_debug_mode", False)
    assert {name: jax.config.values[name] for name in debug_mode_off} == debug_mode_off


@pytest.mark.parametrize("through", [cjax, jax])
def test_a_flag_set_by_hand_in_debug_mode_stays(debug_mode_off, through):
    cjax.config.update("jax_debug_mode", True)
    through.config.update("jax_traceback_filtering", "tracebackhide")
    cjax.config.update("jax_debug_mode", False)
    assert flags.jax_traceback_filtering == "tracebackhide"
    assert jax.config.values["jax_debug_nans"] == debug_mode_off["jax_debug_nans"]
