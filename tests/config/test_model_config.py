"""ModularModelConfig: values, overrides, every rule's bad input, and the round trip through TOML."""

from __future__ import annotations

import pickle
import tomllib
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from capibara.config import ConfigError, ModularModelConfig, SettingsError
from capibara.config.overrides import leaf_fields
from capibara.config.sections import ModelSection, TPUSection


def bad(*overrides: str, name: str = "demo") -> str:
    """The text of the error that these overrides of a packaged file lead to."""
    with pytest.raises(SettingsError) as caught:
        ModularModelConfig.from_toml(name, list(overrides))
    assert isinstance(caught.value, ConfigError)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def problem_of(call: Callable[[], object]) -> SettingsError | None:
    """The SettingsError of a call, or None; any other error comes through."""
    try:
        call()
    except SettingsError as error:
        return error
    return None


# --- values ---


def test_demo_equals_the_defaults_but_for_what_it_is_tuned_in():
    def flat(tree: dict, prefix: str = "") -> dict:
        return {
            path: leaf
            for key, value in tree.items()
            for path, leaf in (
                flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
            ).items()
        }

    demo, default = (flat(c.to_dict()) for c in (ModularModelConfig.from_toml("demo"), ModularModelConfig()))
    assert {key for key in demo.keys() | default.keys() if demo.get(key) != default.get(key)} == {
        "model.num_heads",
        "model.num_kv_heads",
        "train.steps",
        "train.batch_size",
        "train.eval_every",
        "train.eval_batches",
        "optimizer.learning_rate",
        "optimizer.warmup_steps",
        "optimizer.final_learning_rate_fraction",
        "checkpoint.every_steps",
        "generate.temperature",
        "generate.top_p",
    }


def test_demo_has_the_promised_sizes():
    demo = ModularModelConfig.from_toml("demo")
    assert (demo.model.num_layers, demo.model.embed_dim, demo.model.vocab_size) == (6, 192, 256)
    assert (demo.train.batch_size, demo.train.sequence_length) == (8, 256)
    assert demo.precision.compute_dtype == "float32"
    assert demo.tpu.enabled is False


def test_tpu_v4_is_a_bf16_decoder_of_1_to_7_billion_for_a_4x8_mesh():
    config = ModularModelConfig.from_toml("production/tpu_v4")
    m = config.model
    assert config.tpu.enabled
    assert config.tpu.mesh_shape == (4, 8)
    assert config.precision.compute_dtype == "bfloat16"
    assert config.precision.param_dtype == "float32"
    heads = m.resolved_head_dim * (2 * m.num_heads + 2 * m.num_kv_heads)
    parameters = m.num_layers * m.embed_dim * (heads + 3 * m.resolved_mlp_dim) + m.vocab_size * m.embed_dim
    assert 1e9 < parameters < 7e9
    # Every axis that the mesh cuts is divisible by it.
    assert m.num_kv_heads % 8 == 0
    assert m.resolved_mlp_dim % 8 == 0
    assert m.vocab_size % 8 == 0
    assert config.train.batch_size % 4 == 0


def test_resolved_sizes():
    assert ModelSection().resolved_head_dim == 32
    assert ModelSection().resolved_mlp_dim == 512
    assert ModelSection(mlp_dim=7).resolved_mlp_dim == 7
    # 8/3 * 96 = 256 is a multiple of 64 already; 8/3 * 98 = 261.3 is rounded up.
    assert ModelSection(embed_dim=96).resolved_mlp_dim == 256
    assert ModelSection(embed_dim=98, head_dim=4).resolved_mlp_dim == 320


def test_pattern_is_cycled():
    model = ModelSection(num_layers=5, pattern=("ssm", "attention"))
    assert model.block_kinds == ("ssm", "attention", "ssm", "attention", "ssm")


def test_frozen_hashable_and_picklable():
    config = ModularModelConfig.from_toml("demo")
    with pytest.raises(ValueError, match="frozen"):
        config.train.steps = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert hash(config) == hash(ModularModelConfig.from_toml("demo"))
    assert pickle.loads(pickle.dumps(config)) == config


def test_replace_checks():
    assert ModelSection().replace(num_layers=2).num_layers == 2
    with pytest.raises(SettingsError, match="num_layers"):
        ModelSection().replace(num_layers=0)


def test_str_and_describe_show_what_matters():
    config = ModularModelConfig.from_toml("production/tpu_v4")
    assert "24 layers of attention" in str(config)
    assert "data=4, model=8" in str(config)
    described = config.describe()
    for path in leaf_fields(ModularModelConfig):
        assert path.rsplit(".", 1)[-1] in described
    assert "* num_layers" in described  # differs from the default
    assert "  rope_theta" in described
    assert "tpu " not in str(ModularModelConfig())


def test_every_setting_says_what_it_is():
    for path, field in leaf_fields(ModularModelConfig).items():
        assert field.description, path


# --- overrides ---


@pytest.mark.parametrize(
    ("override", "path", "expected"),
    [
        ("model.num_layers=4", "model.num_layers", 4),
        ("num_layers=4", "model.num_layers", 4),
        (" num_layers = 4 ", "model.num_layers", 4),
        ("learning_rate=1e-3", "optimizer.learning_rate", 1e-3),
        ("learning_rate=1", "optimizer.learning_rate", 1.0),
        ("optimizer.name=lion", "optimizer.name", "lion"),
        ("name='lion'", "optimizer.name", "lion"),
        ('directory="runs/x y"', "checkpoint.directory", "runs/x y"),
        ("directory=runs/a=b", "checkpoint.directory", "runs/a=b"),
        ("directory=2024", "checkpoint.directory", "2024"),
        ("resume=false", "checkpoint.resume", False),
        ("resume=False", "checkpoint.resume", False),
        ("max_seconds=none", "train.max_seconds", None),
        ("max_seconds=12", "train.max_seconds", 12.0),
        ("model.head_dim=none", "model.head_dim", None),
        ('pattern=["ssm","vq"]', "model.pattern", ("ssm", "vq")),
        ("pattern=[ssm, vq]", "model.pattern", ("ssm", "vq")),
        ("pattern=ssm,vq", "model.pattern", ("ssm", "vq")),
        ("pattern=vq", "model.pattern", ("vq",)),
        ("data.paths=a.txt", "data.paths", ("a.txt",)),
        ("ssm.state_dim=8", "model.ssm.state_dim", 8),
        ("state_dim=8", "model.ssm.state_dim", 8),
        ("codebook_size=8", "model.vq.codebook_size", 8),
        ("steps=1_000", "train.steps", 1000),
    ],
)
def test_override(override, path, expected):
    value = ModularModelConfig.from_toml("demo", [override])
    for name in path.split("."):
        value = getattr(value, name)
    assert value == expected
    assert type(value) is type(expected)


def test_later_overrides_win_and_mappings_work():
    assert ModularModelConfig.from_toml("demo", ["steps=100", "train.steps=200"]).train.steps == 200
    config = ModularModelConfig.from_toml("demo", {"num_layers": 3, "model.pattern": ("ssm",)})
    assert (config.model.num_layers, config.model.pattern) == (3, ("ssm",))


def test_one_string_is_one_override():
    assert ModularModelConfig.from_toml("demo", "num_layers=2").model.num_layers == 2


def test_overrides_that_only_together_are_right():
    config = ModularModelConfig.from_toml("demo", ["num_heads=4", "num_kv_heads=2", "embed_dim=64"])
    assert config.model.resolved_head_dim == 16
    config = ModularModelConfig.from_toml("demo", ["topology=2x2x2", "num_chips=8", "mesh_axes=a,b,c"])
    assert config.tpu.mesh_shape == (2, 2, 2)


@pytest.mark.parametrize("override", ["num_layers", "=3", "", "  =", "num_layers:3"])
def test_override_without_a_key_or_equals_sign(override):
    assert "key=value" in bad(override)


def test_former_names_are_read(tmp_path):
    path = tmp_path / "old.toml"
    path.write_text("[model.ssm]\nchunk_length = 16\n")
    assert ModularModelConfig.from_toml(path).model.ssm.chunk_size == 16
    for key in ("model.ssm.chunk_length", "chunk_length", "chunk_size"):
        assert ModularModelConfig.from_toml(path, [f"{key}=8"]).model.ssm.chunk_size == 8
    path.write_text("[model.ssm]\nchunk_length = 16\nchunk_size = 8\n")
    with pytest.raises(SettingsError, match="chunk_length: there is no such setting"):
        ModularModelConfig.from_toml(path)


def test_override_cannot_smuggle_in_a_second_key():
    assert "num_layers" in bad("num_layers=1\nembed_dim = 2")


def test_ambiguous_bare_name_lists_the_candidates():
    text = bad("seed=3")
    assert "train.seed" in text
    assert "generate.seed" in text


def test_section_is_not_a_setting():
    text = bad("model=3")
    assert "section" in text
    assert "model.num_layers" in text
    assert "section" in bad("model.ssm=3")


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("num_layer=3", "num_layers"),
        ("model.num_heds=3", "model.num_heads"),
        ("modle.num_heads=3", "model.num_heads"),
        ("trian.steps=3", "train.steps"),
        ("learning_rat=1", "learning_rate"),
    ],
)
def test_unknown_override_gives_the_nearest_spelling(override, nearest):
    text = bad(override)
    assert f"Did you mean '{nearest}'?" in text
    assert override in text


# --- each rule's bad input ---


@pytest.mark.parametrize(
    ("override", "key", "expected"),
    [
        ("num_layers=0", "model.num_layers: got 0", "an integer ≥ 1 and ≤ 4096"),
        ("num_layers=5000", "model.num_layers: got 5000", "≤ 4096"),
        ("num_layers=2.5", "model.num_layers: got 2.5", "an integer"),
        ("num_layers=true", "model.num_layers: got True", "an integer"),
        ("num_layers=six", "model.num_layers: got 'six'", "an integer"),
        ('num_layers="6"', "model.num_layers: got '6'", "an integer"),
        ("vocab_size=1", "model.vocab_size: got 1", "≥ 2"),
        ("embed_dim=-4", "model.embed_dim: got -4", "≥ 1"),
        ("pattern=[]", "model.pattern: got []", "at least 1"),
        ("pattern=atention", "model.pattern[0]: got 'atention'", "Did you mean 'attention'?"),
        ("remat=ful", "model.remat: got 'ful'", "Did you mean 'full'?"),
        ("scan_layers=3", "model.scan_layers: got 3", "'auto', 'scan', 'unroll'"),
        ("dropout_rate=1.0", "model.dropout_rate: got 1.0", "< 1.0"),
        ("dropout_rate=nan", "model.dropout_rate: got nan", "a number"),
        ("rope_theta=1", "model.rope_theta: got 1", "> 1.0"),
        ("norm_epsilon=0", "model.norm_epsilon: got 0", "> 0.0"),
        ("tie_embeddings=1", "model.tie_embeddings: got 1", "true or false"),
        ("model.head_dim=0", "model.head_dim: got 0", "or left out"),
        ("compute_dtype=bfloat", "precision.compute_dtype: got 'bfloat'", "Did you mean 'bfloat16'?"),
        ("decay=1.0", "model.vq.decay: got 1.0", "< 1.0"),
        ("conv_width=0", "model.ssm.conv_width: got 0", "≥ 1"),
        ("steps=0", "train.steps: got 0", "≥ 1"),
        ("train.seed=-1", "train.seed: got -1", "≥ 0"),
        ("max_seconds=0", "train.max_seconds: got 0", "> 0.0"),
        ("max_seconds=inf", "train.max_seconds: got inf", "a number"),
        ("learning_rate=0", "optimizer.learning_rate: got 0", "> 0.0"),
        ("optimizer.name=adam", "optimizer.name: got 'adam'", "Did you mean 'adamw'?"),
        ("beta2=1", "optimizer.beta2: got 1", "< 1.0"),
        ("validation_fraction=0", "data.validation_fraction: got 0", "> 0.0"),
        ("data.paths=[3]", "data.paths[0]: got 3", "a string"),
        ("directory=", "checkpoint.directory: got ''", "a string that is not empty"),
        ("keep=0", "checkpoint.keep: got 0", "≥ 1"),
        ("top_p=0", "generate.top_p: got 0", "> 0.0"),
        ("temperature=-1", "generate.temperature: got -1", "≥ 0.0"),
        ("memory_limit_gb=0", "tpu.memory_limit_gb: got 0", "> 0.0"),
        ("mesh_axes=1a,b", "tpu.mesh_axes[0]: got '1a'", "letters, digits and '_'"),
    ],
)
def test_value_out_of_range_or_of_the_wrong_type(override, key, expected):
    text = bad(override)
    assert key in text
    assert expected in text
    assert f"override {override!r}" in text


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ["model.pattern=attention,ssm", "model.causal=false"],
            ["model.causal", "got false", "ssm"],
        ),
        (
            ["model.pooler=true", "model.token_types=2", "model.head=none"],
            ["model.pooler", "model.token_types", "model.head", "only encoders", "causal = false"],
        ),
        (
            ["num_heads=6", "num_kv_heads=4"],
            ["model.num_kv_heads", "got 4", "divisor of num_heads = 6", "1, 2, 3, 6"],
        ),
        (
            ["num_heads=6", "embed_dim=100"],
            ["model.embed_dim", "got 100", "num_heads = 6", "102", "head_dim"],
        ),
        (["model.head_dim=31"], ["model.head_dim", "got 31", "even"]),
        (["num_heads=6", "embed_dim=18"], ["model.head_dim", "got 3", "even"]),
        (["experts.count=4", "per_token=5"], ["model.experts.per_token", "got 5", "at most count = 4"]),
        (["experts.count=4", "experts.groups=3"], ["model.experts.groups", "got 3", "divisor of count = 4"]),
        (["experts.count=4", "top_groups=2"], ["model.experts.top_groups", "at most groups = 1"]),
        (
            ["experts.count=4", "per_token=3", "experts.groups=2"],
            ["model.experts.per_token", "at most 2", "groups = 2"],
        ),
        (["latent.kv_rank=8", "num_kv_heads=2"], ["model.num_kv_heads", "got 2", "latent.kv_rank = 8"]),
        (["latent.kv_rank=8", "pattern=ssm"], ["model.latent.kv_rank", "no block is attention"]),
        (["query_rank=8"], ["model.latent.query_rank", "Set kv_rank"]),
        (["latent.kv_rank=8", "rotary_dim=3"], ["model.latent.rotary_dim", "got 3", "even"]),
        (["rope.mscale=1.0"], ["model.rope.mscale", "needs scaling='yarn'"]),
        (
            ["scaling=yarn", "original_length=64", "rope.mscale=1.0"],
            ["model.rope.mscale_all_dim", "is missing", "mscale = 1.0 needs both"],
        ),
        (["choice_bias=true"], ["model.experts.choice_bias", "Set count"]),
        (["first_dense=2"], ["model.experts.first_dense", "got 2", "Set count"]),
        (["experts.count=4", "first_dense=6"], ["model.experts.first_dense", "less than num_layers = 6"]),
        (["experts.count=4", "mlp=plain"], ["model.mlp", "'plain'", "expected 'gated'"]),
        (["logit_bias=true"], ["model.experts.logit_bias", "Set count"]),
        (["model.activation=swiglu_clamped", "mlp=plain"], ["model.mlp", "expected 'gated'", "two inputs"]),
        (["pattern=ssm", "ssm.head_dim=7"], ["model.ssm.head_dim", "got 7", "384"]),
        (["pattern=ssm", "ssm.groups=5"], ["model.ssm.groups", "got 5", "number of heads", "12"]),
        (["ssm.step_min=0.5", "ssm.step_max=0.1"], ["model.ssm.step_max", "got 0.1", "step_min = 0.5"]),
        (["mlp=none", "mlp_bias=true"], ["model.mlp_bias", "no feed-forward layer"]),
        (
            ["pattern=ssm", "mlp=none", "finetune.method=lora"],
            ["finetune.targets", "no block has such weights", "finetune.method=full"],
        ),
        (
            ["mlp=none", "finetune.method=lora", "finetune.targets=up"],
            ["finetune.targets", "they have ['key'"],
        ),
        (["topology=4x9"], ["tpu.topology", "'4x9'", "36", "num_chips = 32"]),
        (["num_chips=31"], ["tpu.topology", "'4x8'", "num_chips = 31"]),
        (["topology=4 by 8"], ["tpu.topology", "'4 by 8'"]),
        (["topology=v9:4x8"], ["tpu.topology", "v9"]),
        (["mesh_axes=data"], ["tpu.mesh_axes", "1 names", "expected 2"]),
        (["mesh_axes=data,data"], ["tpu.mesh_axes", "differ"]),
        (
            ["gradient_accumulation_steps=3"],
            ["train.gradient_accumulation_steps", "got 3", "batch_size = 8"],
        ),
        (["sequence_length=512"], ["train.sequence_length", "got 512", "max_sequence_length = 256"]),
    ],
)
def test_settings_that_do_not_fit_each_other(overrides, parts):
    text = bad(*overrides)
    for part in parts:
        assert part in text


def test_head_dim_frees_embed_dim_from_num_heads():
    config = ModularModelConfig.from_toml("demo", ["embed_dim=100", "model.head_dim=8"])
    assert config.model.resolved_head_dim == 8


def test_attention_rules_do_not_bind_a_model_without_attention():
    model = ModelSection(pattern=("ssm",), num_heads=5, num_kv_heads=4, embed_dim=64)
    assert model.block_kinds == ("ssm",) * 6
    # … nor do those of the state-space block one without it.
    assert ModelSection(ssm={"head_dim": 7}).ssm.head_dim == 7  # pyright: ignore[reportArgumentType]


def test_all_faults_are_reported_at_once():
    text = bad("num_layers=0", "steps=-1", "remat=ful")
    assert text.startswith("3 settings are wrong")
    assert "model.num_layers" in text
    assert "train.steps" in text
    assert "model.remat" in text


def test_direct_construction_gives_the_same_errors():
    with pytest.raises(SettingsError) as caught:
        ModularModelConfig(model={"num_heds": 3, "ssm": {"expnd": 1}}, trian={})  # pyright: ignore
    text = str(caught.value)
    assert "model.num_heds" in text
    assert "Did you mean 'num_heads'?" in text
    assert "model.ssm.expnd" in text
    assert "Did you mean 'expand'?" in text
    assert "Did you mean 'train'?" in text
    assert [p.key for p in caught.value.problems] == ["model.ssm.expnd", "model.num_heds", "trian"]


def test_errors_survive_pickling():
    with pytest.raises(SettingsError) as caught:
        TPUSection(num_chips=3)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.problems == caught.value.problems


def test_from_dict_with_odd_keys():
    with pytest.raises(SettingsError):
        ModularModelConfig.from_dict({3: 4})  # pyright: ignore[reportArgumentType]
    with pytest.raises(SettingsError, match="table of settings"):
        ModularModelConfig.from_dict({"model": 4})
    with pytest.raises(SettingsError, match="table of settings"):
        ModularModelConfig.from_dict({"model": 4}, ["num_layers=3"])


# --- round trip ---

_texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=20)


def _floats(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False, exclude_min=True, exclude_max=True)


@st.composite
def configs(draw: st.DrawFn) -> ModularModelConfig:
    kv_heads, groups = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    heads, half = kv_heads * groups, draw(st.integers(1, 16))
    given_head = draw(st.booleans())
    length = draw(st.integers(1, 4096))
    parts, per_part = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    chips = 1
    for size in shape:
        chips *= size
    data = {
        "model": {
            "vocab_size": draw(st.integers(2, 70_000)),
            "embed_dim": draw(st.integers(1, 300)) if given_head else heads * 2 * half,
            "num_layers": draw(st.integers(1, 100)),
            "pattern": draw(st.lists(st.sampled_from(["attention", "vq"]), min_size=1, max_size=4)),
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "max_sequence_length": length + draw(st.integers(0, 100)),
            "tie_embeddings": draw(st.booleans()),
            "norm_epsilon": draw(_floats(0, 0.1)),
            "dropout_rate": draw(_floats(0, 1)),
            "remat": draw(st.sampled_from(["none", "dots", "full"])),
            "vq": {"decay": draw(_floats(0, 1)), "codebook_size": draw(st.integers(2, 1000))},
        },
        "precision": {"compute_dtype": draw(st.sampled_from(["bfloat16", "float16", "float32"]))},
        "tpu": {
            "enabled": draw(st.booleans()),
            "num_chips": chips,
            "topology": "x".join(map(str, shape)),
            "mesh_axes": [f"axis_{i}" for i in range(len(shape))],
        },
        "train": {
            "batch_size": parts * per_part,
            "gradient_accumulation_steps": parts,
            "sequence_length": length,
            "seed": draw(st.integers(0, 2**32 - 1)),
        },
        "optimizer": {
            "learning_rate": draw(_floats(0, 10)),
            "name": draw(st.sampled_from(["adamw", "lion", "adafactor", "muon", "sgd"])),
        },
        "data": {"paths": draw(st.lists(_texts, max_size=3))},
        "checkpoint": {"directory": draw(_texts)},
    }
    if given_head:
        data["model"]["head_dim"] = 2 * half
    if draw(st.booleans()):
        data["train"]["max_seconds"] = draw(_floats(0, 1e6))
    return ModularModelConfig.from_dict(data)


@settings(max_examples=60, deadline=None)
@given(configs())
def test_toml_round_trip(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("toml") / "settings.toml"
    text = config.to_toml(path)
    assert path.read_text(encoding="utf-8") == text
    assert ModularModelConfig.from_toml(path) == config
    assert ModularModelConfig.from_dict(tomllib.loads(text)) == config
    assert ModularModelConfig.from_dict(config.to_dict()) == config


@settings(max_examples=60, deadline=None)
@given(configs())
def test_every_setting_round_trips_as_an_override(config):
    overrides = []
    for path in leaf_fields(ModularModelConfig):
        value = config
        for name in path.split("."):
            value = getattr(value, name)
        overrides.append(f"{path}={_spelt(value)}")
    assert ModularModelConfig().with_overrides(overrides) == config


def _spelt(value) -> str:
    import tomli_w

    if value is None:
        return "none"
    if isinstance(value, tuple):
        value = list(value)
    return tomli_w.dumps({"v": value}).removeprefix("v = ").strip()


@settings(max_examples=80, deadline=None)
@given(st.text(max_size=40))
def test_no_override_text_raises_anything_but_a_settings_error(text):
    problem = problem_of(lambda: ModularModelConfig.from_toml("demo", [text]))
    assert problem is None or str(problem)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(list(leaf_fields(ModularModelConfig))), st.text(max_size=12))
def test_no_override_value_raises_anything_but_a_settings_error(path, text):
    problem = problem_of(lambda: ModularModelConfig.from_toml("demo", [f"{path}={text}"]))
    assert problem is None or path.split(".")[0] in str(problem)


_junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.sampled_from([*ModularModelConfig.model_fields, "junk"]), _junk, max_size=4))
def test_no_tables_raise_anything_but_a_settings_error(data):
    problem = problem_of(lambda: ModularModelConfig.from_dict(data))
    assert problem is None or problem.problems
