"""The estimate against the TPU compiler where computing and accumulating have one dtype, and where steps are tiny."""

from __future__ import annotations

import pytest

from capibara.config import ModularModelConfig
from capibara.plan import Layout, parse_slice
from capibara.plan.memory import estimate_memory
from capibara.plan.search.space import WHOLE_PRODUCTS

# Slice, data × model, layers, width, heads and their width, feed-forward width, vocabulary, batch, sequence, remat,
# microbatches, whether products are whole, whether the counts were fixed before it was compiled, and bytes a device
# by measure_memory (libtpu 0.0.42).
# fmt: off
FLOAT32 = [
    ("v5e:2x2", (4, 1), 8, 1024, 8, 128, 2816, 512, 16, 512, "none", 1, True, False, 2_264_254_464),
    ("v5e:2x2", (4, 1), 8, 1024, 8, 128, 2816, 512, 16, 512, "full", 1, True, False, 625_051_648),
    ("v5e:2x2", (4, 1), 8, 1024, 8, 128, 2816, 512, 16, 512, "dots", 1, True, False, 1_243_826_176),
    ("v5e:1x1", (1, 1), 8, 512, 8, 128, 1408, 32768, 8, 1024, "full", 1, True, False, 1_976_957_952),
    ("v5e:1x1", (1, 1), 8, 512, 8, 128, 1408, 32768, 8, 1024, "dots", 1, True, False, 3_655_875_584),
    ("v4:2x2x1", (2, 2), 8, 1024, 8, 128, 2816, 512, 32, 512, "none", 1, True, False, 5_099_080_704),
    ("v4:2x2x1", (2, 2), 8, 1024, 8, 128, 2816, 32768, 32, 512, "full", 1, True, False, 1_389_677_568),
    ("v5p:2x2x1", (4, 1), 4, 2048, 8, 128, 5632, 512, 16, 512, "full", 1, True, False, 1_201_967_424),
    ("v5e:2x2", (4, 1), 8, 1024, 8, 128, 2816, 512, 64, 512, "full", 4, True, False, 730_202_112),
    ("v4:2x2x1", (4, 1), 8, 1024, 8, 128, 2816, 512, 64, 512, "full", 1, True, False, 1_241_153_536),
    ("v5p:2x2x1", (4, 1), 8, 1024, 8, 128, 2816, 32768, 32, 1024, "dots", 1, True, False, 4_640_468_320),
    ("v4:2x2x1", (4, 1), 4, 256, 4, 64, 1024, 8192, 32, 512, "none", 1, False, False, 788_224_512),
    ("v5e:1x1", (1, 1), 8, 512, 4, 128, 1408, 32768, 8, 1024, "none", 1, False, False, 5_305_465_856),
    ("v5p:2x2x1", (4, 1), 8, 512, 4, 128, 1408, 32768, 64, 1024, "none", 1, False, False, 9_588_774_816),
    ("v4:1x1x1", (1, 1), 8, 1024, 4, 256, 2816, 32768, 8, 1024, "none", 1, False, False, 10_254_472_192),
    ("v5e:2x4", (8, 1), 6, 2048, 8, 128, 5632, 32768, 32, 1024, "dots", 1, True, True, 3_345_033_216),
    ("v6e:2x2", (4, 1), 4, 1536, 8, 128, 4096, 32000, 32, 1024, "none", 1, True, True, 6_952_061_344),
    ("v4:2x2x2", (8, 1), 12, 2048, 8, 128, 5632, 8192, 32, 1024, "full", 1, True, True, 2_198_136_832),
    ("v5p:2x2x1", (2, 2), 8, 2048, 8, 128, 5632, 32768, 16, 2048, "full", 1, True, True, 4_287_041_856),
    ("v4:2x2x1", (1, 4), 6, 2048, 8, 128, 5632, 32768, 8, 1024, "dots", 2, True, True, 2_631_271_424),
    ("v5e:2x2", (2, 2), 6, 1024, 8, 128, 4096, 50304, 16, 1024, "none", 1, True, True, 5_613_894_656),
]
# fmt: on


def case(base, slice, mesh, layers, width, heads, head_dim, inner, words, batch, length, remat, micro, whole):
    config = ModularModelConfig.from_toml(
        base,
        [f"model.num_layers={layers}", f"model.embed_dim={width}", f"model.num_heads={heads}",
         f"model.num_kv_heads={heads}", f"model.head_dim={head_dim}", f"model.mlp_dim={inner}",
         f"model.vocab_size={words}", "model.scan_layers=scan", f"model.max_sequence_length={length}",
         f"train.batch_size={batch}", f"train.sequence_length={length}"],
    )  # fmt: skip
    layout = Layout(
        mesh=(("data", mesh[0]), ("model", mesh[1])),
        remat=remat,
        microbatches=micro,
        flags=WHOLE_PRODUCTS if whole else (),
    )
    return estimate_memory(config, layout, parse_slice(slice))


@pytest.mark.parametrize(
    "row", FLOAT32, ids=lambda row: "-".join(map(str, row[:5])) + f"-{row[10]}-{row[11]}"
)
def test_float32_steps_are_within_a_twentieth_of_the_compiler(row):
    *given, _, total = row
    assert case("demo", *given).total == pytest.approx(total, rel=0.05)


def test_there_are_cases_that_nothing_was_fitted_to():
    assert sum(row[-2] for row in FLOAT32) >= 5
    assert {row[10] for row in FLOAT32 if row[-2]} == {"none", "dots", "full"}


@pytest.mark.parametrize(
    ("base", "row", "total", "most"),
    [
        ("production/tpu_v4", ("v4:2x2x1", (4, 1), 4, 256, 4, 64, 1024, 8192, 32, 512, "none", 1, False), 514_955_776,
         1.25),
        ("production/tpu_v4", ("v5e:2x2", (4, 1), 2, 64, 4, 16, 256, 512, 8, 128, "none", 1, False), 3_439_104, 3.5),
        ("demo", ("v5e:2x2", (4, 1), 2, 64, 4, 16, 256, 512, 8, 128, "none", 1, False), 3_275_264, 3.5),
    ],
)  # fmt: skip
def test_of_tiny_steps_the_estimate_is_never_too_little(base, row, total, most):
    """The compiler keeps what is small in the chip's own memory, which is not estimated."""
    assert total <= case(base, *row).total <= most * total
