"""Small sources, one question each: what a name means, which arm runs, which call is refused."""

from __future__ import annotations

import dataclasses
import json

import jax
import pytest

from capibara.migrate import MigrationIssue, check_migration_compatibility


def findings(source: str, **flags: bool) -> list[tuple[int, str, str]]:
    report = check_migration_compatibility(source + "\n", **flags)
    return [(issue.line, issue.severity, issue.code) for issue in report.issues]


ERROR = "error"
REMOVED = "removed-name"

SILENT = {
    "not imported": "jax.tree_map(f, x)",
    "another package": "import jaxtyping as jax\njax.tree_map",
    "relative module": "from .jax import tree_map\nfrom . import jax\njax.tree_map",
    "parameter": "import jax\ndef f(jax):\n    return jax.tree_map",
    "keyword-only parameter": "import jax\ndef f(*, jax):\n    return jax.tree_map",
    "star parameters": "import jax\ndef f(*a, **jax):\n    return jax.tree_map",
    "lambda parameter": "import jax\nf = lambda jax: jax.tree_map",
    "local later in the function": "import jax\ndef f():\n    x = jax.tree_map\n    jax = 1",
    "loop variable": "import jax\nfor jax in x:\n    jax.tree_map",
    "comprehension variable": "import jax\n[jax.tree_map for jax in x]",
    "with target": "import jax\ndef f():\n    with x as (jax, y):\n        jax.tree_map",
    "exception name": "import jax\ndef f():\n    try:\n        g()\n    except E as jax:\n        jax.tree_map",
    "rebound in the module": "import jax\njax = object()\njax.tree_map",
    "rebound in a branch": "import jax\nif x:\n    jax = object()\njax.tree_map",
    "class attribute": "import jax\nclass C:\n    jax = 1\n    y = jax.tree_map",
    "enclosing function": "import jax\ndef f(jax):\n    def g():\n        return jax.tree_map\n    return g",
    "global": "import jax\ndef f():\n    global jax\n    jax = 1\ndef g():\n    return jax.tree_map",
    "patched": "import jax\njax.tree_map = 1\njax.tree_map(f)",
    "patched in another scope": "import jax\ndef f():\n    jax.tree_map = g\njax.tree_map(f)",
    "string": "import jax\n'jax.tree_map'",
    "getattr": "import jax\ngetattr(jax, 'tree_map', None)",
    "call result": "import jax\njax.devices()[0].tree_map",
    "instance attribute": "import jax\njax.config.jax_enable_x64, jax.jit(f).lower(1)",
    "lazy module": "import jax\njax.scipy.special.logsumexp",
    "module imported elsewhere": "import jax\ndef f():\n    import jax.experimental.pallas\n"
    "def g():\n    jax.experimental.pallas.pallas_call",
    "module imported by another one": "import jax\nimport jax.experimental.pallas.tpu\n"
    "jax.experimental.pallas.pallas_call",
    "splatted keywords": "import jax\njax.jit(f, **options)\njax.jit(*args)",
    "numpy under the usual name": "import jax\nimport numpy as np\nnp.trapz",
    "numpy or jax": "import jax\nif x:\n    import numpy as np\nelse:\n    import jax.numpy as np\nnp.trapz",
}


@pytest.mark.parametrize("source", SILENT.values(), ids=SILENT.keys())
def test_nothing_is_reported(source):
    assert findings(source) == []


BROKEN = {
    "attribute": ("import jax\njax.tree_map(f, x)", 2),
    "module alias": ("import jax as j\nj.tree_map(f, x)", 2),
    "submodule import binds the root": ("import jax.numpy\njax.tree_map(f, x)", 2),
    "submodule alias": ("import jax.numpy as np\nnp.trapz(x)", 2),
    "from import": ("from jax import numpy\nnumpy.trapz(x)", 2),
    "alias of an alias": ("import jax\nj = jax\nk = j.numpy\nk.trapz(x)", 4),
    "tuple assignment": ("import jax\na, b = jax, 1\na.tree_map", 3),
    "annotated assignment": ("import jax\nj: object = jax\nj.tree_map", 3),
    "walrus": ("import jax\nif (j := jax.numpy) is not None:\n    j.trapz", 3),
    "in a function": ("import jax\ndef f():\n    return jax.tree_map", 3),
    "in a method of a class with that attribute": (
        "import jax\nclass C:\n    jax = 1\n    def f(self):\n        return jax.tree_map",
        5,
    ),
    "in a decorator": ("import jax\n@jax.tree_map\ndef f(jax): ...", 2),
    "in a default": ("import jax\ndef f(jax=jax.tree_map): ...", 2),
    "first iterable of a comprehension": ("import jax\n[jax for jax in jax.tree_map]", 2),
    "imported in a function": ("def f():\n    import jax\n    return jax.tree_map", 3),
    "rebound afterwards": ("import jax\njax.tree_map\njax = 1", 2),
    "restored": ("jax = None\nimport jax\njax.tree_map", 3),
    "optional jax": ("try:\n    import jax\nexcept ImportError:\n    jax = None\njax.tree_map", 5),
    "both arms bad": (
        "import jax\nif x:\n    t = jax.numpy\nelse:\n    t = jax.numpy\nt.trapz",
        6,
    ),
    "global declaration": ("def f():\n    global jax\n    import jax\ndef g():\n    jax.tree_map", 5),
    "nonlocal": (
        "def f():\n    import jax\n    def g():\n        nonlocal jax\n        return jax.tree_map",
        5,
    ),
    "under an unrelated test": ("import jax\nif hasattr(x, 'y'):\n    jax.tree_map", 3),
    "in an unrelated try": ("import jax\ntry:\n    jax.tree_map\nexcept ValueError:\n    pass", 3),
    "in a try that gives up": (
        "import jax\ntry:\n    jax.tree_map\nexcept AttributeError:\n    raise RuntimeError",
        3,
    ),
    "exception of another kind": ("import jax\ntry:\n    jax.tree_map\nexcept ImportError:\n    pass", 3),
    "broad except around work": (
        "import jax\ntry:\n    train()\n    jax.tree_map\nexcept Exception:\n    pass",
        4,
    ),
    "function defined in a try": (
        "import jax\ntry:\n    def f():\n        return jax.tree_map\nexcept AttributeError:\n    pass",
        4,
    ),
    "match": ("import jax\nmatch jax.tree_map:\n    case _: ...", 2),
    "f-string": ("import jax\nf'{jax.tree_map}'", 2),
    "deleted elsewhere": ("import jax\nx = 1\ndel x\njax.tree_map", 4),
    "type parameter scope": ("import jax\nclass C(jax.tree_map): ...", 2),
}


@pytest.mark.parametrize(("source", "line"), BROKEN.values(), ids=BROKEN.keys())
def test_one_error_is_reported(source, line):
    assert findings(source) == [(line, ERROR, REMOVED)]


GUARDED = {
    "try": "import jax\ntry:\n    t = jax.tree_map\nexcept AttributeError:\n    t = jax.tree.map",
    "bare except around assignments": "import jax\ntry:\n    t = jax.tree_map\nexcept:\n    t = None",
    "handler not needed": "import jax\ntry:\n    jax.tree\nexcept AttributeError:\n    jax.tree_map",
    "suppress": "import jax, contextlib\nwith contextlib.suppress(AttributeError):\n    jax.tree_map",
    "raises": "import jax, pytest\nwith pytest.raises(AttributeError):\n    jax.tree_map",
    "hasattr": "import jax\nif hasattr(jax, 'tree_map'):\n    jax.tree_map",
    "not hasattr": "import jax\nif not hasattr(jax, 'tree'):\n    jax.tree_map",
    "conditional expression": "import jax\nt = jax.tree.map if hasattr(jax, 'tree') else jax.tree_map",
    "or": "import jax\nhasattr(jax, 'tree') or jax.tree_map",
    "version tuple": "import jax\nif jax.__version_info__ < (0, 4):\n    jax.tree_map",
    "version parsed": "import jax\nif Version(jax.__version__) <= Version('0.4.25'):\n    jax.tree_map",
    "version text": "import jax\nif jax.__version__ == '0.4.1':\n    jax.tree_map",
    "version split": "import jax\nif int(jax.__version__.split('.')[1]) < 4:\n    jax.tree_map",
    "version flag": "import jax\nIS_OLD_JAX = f()\nif IS_OLD_JAX:\n    jax.tree_map",
    "and": "import jax\nif x and jax.__version_info__ < (0, 4):\n    jax.tree_map",
    "else": "import jax\nif jax.__version_info__ >= (0, 4):\n    pass\nelse:\n    jax.tree_map",
    "type checking": "import jax\nimport typing\nif typing.TYPE_CHECKING:\n    jax.tree_map",
    "nested function": "import jax\nif jax.__version_info__ < (0, 4):\n    def f():\n        jax.tree_map",
}


@pytest.mark.parametrize("source", GUARDED.values(), ids=GUARDED.keys())
def test_dormant_code_is_a_note(source):
    assert [item[1:] for item in findings(source)] == [("info", REMOVED)]


def test_a_fallback_that_is_needed_and_broken_is_an_error():
    source = (
        "try:\n    from jax import linear_util as lu\n"
        "except ImportError:\n    from jax.util import wrap_init as lu"
    )
    assert findings(source) == [(2, "info", REMOVED), (4, ERROR, "removed-module")]


def test_module_not_found_error_does_not_catch_a_missing_name():
    body = "try:\n    from jax import tree_map\nexcept {}:\n    tree_map = None"
    assert findings(body.format("ModuleNotFoundError")) == [(2, ERROR, REMOVED)]
    assert findings(body.format("ImportError")) == [(2, "info", REMOVED)]


def test_annotations_that_are_not_evaluated_are_warnings():
    source = "import jax.numpy as jnp\ndef f(x: jnp.DeviceArray): ..."
    assert findings(source) == [(2, ERROR, REMOVED)]
    assert findings("from __future__ import annotations\n" + source) == [(3, "warning", REMOVED)]
    local = "import jax.numpy as jnp\ndef f():\n    x: jnp.DeviceArray = 1"
    assert findings(local) == [(3, "warning", REMOVED)]


def test_an_alias_is_reported_once():
    assert findings("from jax import tree_map\ntree_map(f)\ntree_map(g)") == [(1, ERROR, REMOVED)]


def test_misspelled_names_get_the_nearest_spelling():
    (issue,) = check_migration_compatibility("import jax.numpy as jnp\njnp.lingalg.norm(x)\n").issues
    assert (issue.code, issue.name, issue.fix) == (
        "unknown-name",
        "jax.numpy.lingalg",
        "use jax.numpy.linalg",
    )
    (issue,) = check_migration_compatibility("import jax.numpi\n").issues
    assert (issue.code, issue.fix) == ("unknown-module", "use jax.numpy")


def test_submodule_that_nothing_imports():
    source = "import jax\njax.experimental.pallas.pallas_call\njax.experimental.pallas.BlockSpec"
    assert findings(source) == [(2, "warning", "submodule-not-imported")]
    # another package may import it
    assert findings("import flax\n" + source) == [(3, "info", "submodule-not-imported")]


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("jax.jit(f, static_argnum=0)", "unknown-keyword"),
        ("functools.partial(jax.jit, static_argnum=0)", "unknown-keyword"),
        ("jax.jit(f, (0,))", "too-many-arguments"),
        ("functools.partial(jax.jit, f, 0)", "too-many-arguments"),
        ("jax.jit(fun=f)", "unknown-keyword"),
        ("jax.numpy.clip(x, a_min=0)", "removed-keyword"),
        ("jax.numpy.sort(x, kind='stable')", "removed-keyword"),
        ("jax.grad(f, reduce_axes=('i',))", "removed-keyword"),
    ],
)
def test_calls_that_are_refused(call, code):
    assert findings(f"import functools\nimport jax\n{call}") == [(3, ERROR, code)]


@pytest.mark.parametrize(
    "call",
    [
        "jax.grad(f, reduce_axes=())",
        "jax.numpy.sort(x, kind=None)",
        "jax.jit(static_argnames=['n'])",
        "functools.partial(jax.jit, static_argnums=0)",
        "jax.numpy.add(x, y)",
        "jax.sharding.NamedSharding(mesh, spec, memory_kind='device')",
    ],
)
def test_calls_that_are_accepted(call):
    assert findings(f"import functools\nimport jax\n{call}") == []


def test_keyword_of_the_binding_that_is_in_force():
    source = (
        "try:\n    from jax import shard_map\nexcept ImportError:\n"
        "    from jax.experimental.shard_map import shard_map\n"
        "shard_map(f, mesh=m, in_specs=s, out_specs=s, {}=False)"
    )
    assert (5, ERROR, "removed-keyword") in findings(source.format("check_rep"))
    assert [item for item in findings(source.format("check_vma")) if item[0] == 5] == []


def test_config_options():
    template = "import jax\njax.config.update({!r}, True)"
    assert findings(template.format("jax_enable_x64")) == []
    assert findings(template.format("jax_omnistaging")) == [(2, ERROR, "removed-option")]
    assert findings(template.format("jax_no_such_flag")) == [(2, ERROR, "unknown-option")]
    assert findings(template.format("someone_elses_flag")) == []


def test_array_attributes_need_an_array():
    assert findings("import jax.numpy as jnp\nx = jnp.ones(3)\nx.to_py()") == [
        (3, ERROR, "removed-attribute")
    ]
    assert findings("import jax.numpy as jnp\ndef f(x):\n    return x.to_py(), x.split(',')") == []
    assert findings("import jax\ndef f(x):\n    return x.device_buffer") == [
        (3, "warning", "removed-attribute")
    ]
    assert findings("def f(x):\n    return x.device_buffer") == []


@pytest.mark.parametrize(
    ("decorator", "traced"),
    [
        ("jax.jit", {"x", "n"}),
        ("functools.partial(jax.jit, static_argnums=1)", {"x"}),
        ("functools.partial(jax.jit, static_argnames='x')", {"n"}),
        ("functools.partial(jax.grad, argnums=0)", set()),
        ("jax.vmap", set()),
    ],
)
def test_numpy_on_traced_arguments_is_found_under_each_spelling_of_jit(decorator, traced):
    for name in ("x", "n"):
        imports = "import functools\nimport jax\nimport numpy as np"
        source = f"{imports}\n@{decorator}\ndef f(x, n):\n    return np.sum({name})"
        expected = [(6, "warning", "numpy-in-jit")] if name in traced else []
        assert findings(source) == expected, name


def test_flags_switch_checks_off():
    source = (
        "import jax\nimport numpy as np\nfrom jax import tree_map\njax.tree_leaves(x)\n"
        "jax.jit(f, static_argnum=0)\n@jax.jit\ndef f(x):\n    return np.sum(x)"
    )
    imports, names = (3, ERROR, REMOVED), (4, ERROR, REMOVED)
    call, speed = (5, ERROR, "unknown-keyword"), (8, "warning", "numpy-in-jit")
    assert findings(source) == [imports, names, call, speed]
    assert findings(source, check_imports=False) == [names, call, speed]
    assert findings(source, check_functions=False) == [imports, speed]
    assert findings(source, check_performance=False) == [imports, names, call]
    off = {"check_imports": False, "check_functions": False, "check_performance": False}
    assert findings(source, **off) == []
    assert check_migration_compatibility("x = (\n", **off).is_compatible is False


def test_report_and_issue():
    report = check_migration_compatibility("import jax\nx = 'ä', jax.tree_map\n")
    assert report.is_compatible is False
    assert report.jax_version == jax.__version__
    assert report.counts == {"error": 1, "warning": 0, "info": 0}
    (issue,) = report.issues
    assert isinstance(issue, MigrationIssue)
    assert (issue.path, issue.line, issue.column, issue.cell) == ("<source>", 2, 10, None)
    assert str(issue).startswith("<source>:2:10: error: jax.tree_map was removed in JAX 0.6.0")
    assert str(issue).endswith("Fix: use jax.tree.map")
    assert str(report).splitlines()[0] == str(issue)
    assert "1 error" in str(report)
    with pytest.raises(dataclasses.FrozenInstanceError):
        issue.line = 3  # type: ignore[misc]
    data = json.loads(report.to_json())
    assert data["issues"][0]["name"] == "jax.tree_map"
    assert data["counts"] == report.counts
    assert set(data["issues"][0]) == {field.name for field in dataclasses.fields(MigrationIssue)}


def test_the_checked_code_is_never_run(tmp_path):
    witness = tmp_path / "ran"
    source = f"import jax\nopen({str(witness)!r}, 'w')\njax.tree_map\n"
    assert not check_migration_compatibility(source).is_compatible
    assert not witness.exists()


def test_a_deprecated_name_that_this_process_touched_before_is_still_a_warning():
    import warnings

    import jax.experimental.pjit

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        getattr(jax.experimental.pjit, "pjit", None)  # JAX warns of it the first time only
    report = check_migration_compatibility("import jax.experimental.pjit as p\np.pjit(f)\n")
    assert {issue.severity for issue in report.issues} & {"error", "warning"}
