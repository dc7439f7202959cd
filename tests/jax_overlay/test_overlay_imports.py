"""What importing through the overlay does to the process: order, copies, cost in modules, reload."""

from __future__ import annotations

import pytest

EVERYTHING = """
import importlib, importlib.util, json, os, sys, warnings
warnings.simplefilter("ignore")

def names():
    root = os.path.dirname(importlib.util.find_spec("jax").origin)
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith("_"))
        for file in sorted(files):
            if file.endswith(".py") and (file == "__init__.py" or not file.startswith("_")):
                path = os.path.relpath(os.path.join(folder, file), os.path.dirname(root))
                yield path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

def load(prefix):
    for name in names():
        try:
            importlib.import_module(prefix + name)
        except ImportError:
            pass

def jax_modules():
    return {k: m for k, m in sys.modules.items() if k.split(".")[0] == "jax" and m is not None}

def picture(describe):
    return {k: {n: describe(v) for n, v in sorted(vars(m).items())} for k, m in sorted(jax_modules().items())}

def copies():
    by_file = {}
    for name, module in sys.modules.items():
        spec = getattr(module, "__spec__", None)
        if spec is not None and spec.origin and spec.origin.endswith(".py") and "jax" in name:
            by_file.setdefault(spec.origin, set()).add(id(module))
    return sorted(file for file, ids in by_file.items() if len(ids) > 1)
"""


def test_overlay_after_jax_changes_nothing_in_jax(fresh_python):
    """JAX's modules first: importing all of them again through the overlay leaves every attribute alone."""
    result = fresh_python(
        EVERYTHING
        + """
load("")
before = picture(id)
load("capibara.")
after = picture(id)
changed = [(k, n) for k in before for n in {*before[k], *after[k]} if before[k].get(n) != after[k].get(n)]
print(json.dumps({"changed": changed, "new": sorted(set(after) - set(before)), "copies": copies(),
                  "aliases": sum(k.startswith("capibara.jax.") for k in sys.modules)}))
"""
    )
    assert result["changed"] == []
    assert result["new"] == []
    assert result["copies"] == []
    assert result["aliases"] > 150


def test_overlay_before_jax_gives_the_same_jax(fresh_python):
    """The overlay first: what then stands in JAX's modules is what plain imports put there."""
    tail = """
# The kind of each value. Not its name: loop variables over sets of types are left in some modules.
describe = lambda v: type(v).__name__
load(sys.argv[1] if len(sys.argv) > 1 else PREFIX)
print(json.dumps({"picture": picture(describe), "copies": copies()}))
"""
    plain = fresh_python(EVERYTHING + "PREFIX = ''" + tail)
    ours = fresh_python(EVERYTHING + "PREFIX = 'capibara.'" + tail)
    assert ours["copies"] == []
    assert set(ours["picture"]) == set(plain["picture"])
    for module, names in plain["picture"].items():
        assert ours["picture"][module] == names, module


def test_import_loads_nothing_but_jax_s_own_set_and_a_few_of_ours(fresh_python):
    plain = set(fresh_python("import jax, json, sys; print(json.dumps(sorted(sys.modules)))"))
    ours = set(fresh_python("import capibara.jax, json, sys; print(json.dumps(sorted(sys.modules)))"))
    assert plain - ours == set()
    assert {name for name in ours - plain if not name.startswith("capibara")} == set()
    assert {name for name in ours if name.startswith("capibara")} == {
        "capibara",
        "capibara.errors",
        "capibara.jax",
        "capibara.jax._overlay",
        "capibara.jax_versions",
        "capibara.startup",
    }


def test_import_statements_of_every_form(fresh_python):
    assert (
        fresh_python(
            """
        import capibara.jax as jax
        import capibara.jax.numpy as jnp
        import capibara.jax.nn as nn
        from capibara.jax import random, lax as lax2
        import capibara.jax.scipy.linalg
        import capibara.jax.experimental.multihost_utils as multihost
        from capibara.jax.experimental import mesh_utils, array_serialization
        from capibara.jax.numpy import fft, linalg
        from capibara.jax.lax import linalg as lax_linalg
        import capibara.jax.numpy.random as jnp_random
        from capibara.jax._src import core
        from capibara.jax._src.core import Jaxpr, TPUv4MeshConfigurations
        import capibara.jax._src.xla_bridge as bridge
        import capibara.jax.experimental.shard_map as shard_map_module
        from capibara.jax import tools
        import importlib, jax as real
        for name in ("scipy.linalg", "experimental.mesh_utils", "_src.xla_bridge", "experimental.shard_map"):
            importlib.import_module("jax." + name)
        jax = capibara.jax
        pairs = {
            "nn": (nn, real.nn),
            "random": (random, real.random),
            "lax": (lax2, real.lax),
            "scipy.linalg": (capibara.jax.scipy.linalg, real.scipy.linalg),
            "jnp.dot": (jnp.dot, real.numpy.dot),
            "mesh_utils": (mesh_utils, real.experimental.mesh_utils),
            "array_serialization": (array_serialization, real.experimental.array_serialization),
            "multihost_utils": (multihost, real.experimental.multihost_utils),
            "fft": (fft, real.numpy.fft),
            "linalg": (linalg, real.numpy.linalg),
            "lax.linalg": (lax_linalg, real.lax.linalg),
            "tools": (tools, real.tools),
            "jnp.random": (jnp.random, real.random),
            "jnp.random imported": (jnp_random, real.random),
            "Jaxpr": (Jaxpr, real._src.core.Jaxpr),
            "core.Jaxpr": (core.Jaxpr, Jaxpr),
            "xla_bridge": (bridge, real._src.xla_bridge),
            "_src.core": (jax._src.core, core),
            "numpy": (jax.numpy, jnp),
            "shard_map module": (shard_map_module, real.experimental.shard_map),
            "shard_map": (jax.shard_map, real.shard_map),
            "presets": (core.TPUv4MeshConfigurations, jax.tpu_v4.TPUv4MeshConfigurations),
        }
        import json
        print(json.dumps([name for name, (ours, theirs) in pairs.items() if ours is not theirs]))
        """
        )
        == []
    )


@pytest.mark.slow
def test_a_rebound_attribute_of_a_jax_package_survives(fresh_python):
    """``jax.experimental.roofline.roofline`` is a function and a module; importing keeps the function."""
    for first in ("", "import jax.experimental.roofline", "import capibara.jax.experimental.roofline"):
        assert fresh_python(
            f"{first}\n"
            "import capibara.jax.experimental.roofline.roofline, sys, types, json\n"
            "import jax.experimental.roofline as real\n"
            "module = sys.modules['capibara.jax.experimental.roofline.roofline']\n"
            "print(json.dumps([isinstance(real.roofline, types.FunctionType), "
            "module is sys.modules['jax.experimental.roofline.roofline']]))"
        ) == [True, True]


def test_reload(fresh_python):
    assert fresh_python(
        """
        import importlib, json, sys
        import capibara.jax as jax, capibara.jax.numpy as jnp, capibara.jax.experimental.ode as ode
        import jax as real
        reloaded = importlib.reload(jax)
        importlib.reload(jnp)
        # Reloading an alias reloads JAX's module in place, under its own name, as with plain JAX.
        again = importlib.reload(ode)
        print(json.dumps([reloaded is jax, jax.jit is real.jit, jnp.dot is real.numpy.dot, jax.numpy is jnp,
                          again is ode is sys.modules["jax.experimental.ode"], ode.__name__,
                          sum(type(f).__name__ == "AliasFinder" for f in sys.meta_path)]))
        """
    ) == [True, True, True, True, True, "jax.experimental.ode", 1]


def test_find_spec_and_python_dash_m(fresh_python):
    """``python -m`` reads the code through the alias; ``find_spec`` does not import what it finds."""
    assert fresh_python(
        """
        import importlib.util, inspect, json, runpy, sys
        spec = importlib.util.find_spec("capibara.jax.experimental.ode")
        loaded = "jax.experimental.ode" in sys.modules
        namespace = runpy.run_module("capibara.jax.experimental.ode", run_name="not_main")
        import jax.experimental.ode as real
        print(json.dumps([spec.origin == real.__file__, loaded, namespace["__file__"] == real.__file__,
                          spec.loader.get_source(spec.name) == inspect.getsource(real),
                          spec.loader.is_package(""),
                          importlib.util.find_spec("capibara.jax.nope") is None,
                          importlib.util.find_spec("capibara.jax.experimental.nope") is None]))
        """
    ) == [True, False, True, True, False, True, True]


@pytest.mark.parametrize(
    ("statement", "type_", "words"),
    [
        ("import capibara.jax.nope", "ModuleNotFoundError", ["capibara.jax.nope"]),
        ("import capibara.jax.scipy.nope", "ModuleNotFoundError", ["capibara.jax.scipy.nope"]),
        ("from capibara.jax import nope", "ImportError", ["nope", "capibara.jax"]),
        ("from capibara.jax.nn import nope", "ImportError", ["nope"]),
    ],
)
def test_importing_what_is_not_there(statement, type_, words):
    with pytest.raises(ImportError) as caught:
        exec(statement, {})
    assert type(caught.value).__name__ == type_
    assert all(word in str(caught.value) for word in words)


def test_a_stub_folder_without_a_jax_module_is_not_an_empty_package(tmp_path, monkeypatch):
    """A later JAX may drop a module whose stub Capibara still ships; importing it has to fail."""
    import capibara.jax
    from capibara.jax import _overlay

    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "__init__.pyi").write_text("")
    monkeypatch.setattr(_overlay, "OWN_FOLDER", str(tmp_path))
    monkeypatch.setattr(capibara.jax, "__path__", [str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match=r"the installed JAX has no 'jax\.gone'"):
        exec("import capibara.jax.gone", {})


@pytest.mark.parametrize("blocked", ["jax", "jaxlib"])
def test_missing_jax_is_one_clear_import_error(fresh_python, blocked):
    message = fresh_python(
        f"""
        import json, sys
        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == {blocked!r}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        sys.meta_path.insert(0, Blocker())
        from capibara.errors import CapibaraError
        try:
            import capibara.jax
        except ImportError as error:
            chain, text = 0, str(error)
            assert isinstance(error, CapibaraError)
            import capibara.measure.installation as installation
            report = installation.check_installation()
            print(json.dumps([text, error.name, report.jax_native_available, report.error_message]))
        """
    )
    text, name, available, reason = message
    assert name == "jax"
    assert "capibara.jax needs JAX" in text
    assert "pip install" in text
    assert available is False
    assert "import jax" in reason
