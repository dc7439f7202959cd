"""The estimate against the TPU compiler where computing and accumulating have one dtype, and where steps are tiny."""

from __future__ import annotations

import pytest

from capibara.config import ModularModelConfig
from capibara.plan import parse_slice
from capibara.plan.memory import estimate_memory
from capibara.plan.search.space import WHOLE_PRODUCTS
from capibara.sharding import Layout

# Slice, data × model, layers, width, heads and their width, feed-forward width, vocabulary, batch, sequence, remat,
# microbatches, whether products are whole, whether the counts (but for those of a loss in chunks) were fixed before it
# was compiled, and bytes a device by measure_memory (libtpu 0.0.42).
# fmt: off
FLOAT32 = [
    ("v5e:2x2", (4, 1), 8, 1024, 8, 128, 2816, 512, 16, 512, "none", 1, True, False, 2_264_254_464),
    ("v5e:2x2", (4, 1), 8, 1024, 8, 128, 2816, 512, 16, 512, "full", 1, True, False, 625_051_648),
    ("v5e:2x2", (4, 1), 8, 1024, 8, 128, 2816, 512, 16, 512, "dots", 1, True, False, 1_243_826_176),
    ("v5e:1x1", (1, 1), 8, 512, 8, 128, 1408, 32768, 8, 1024, "full", 1, True, False, 1_349_794_816),
    ("v5e:1x1", (1, 1), 8, 512, 8, 128, 1408, 32768, 8, 1024, "dots", 1, True, False, 3_149_757_440),
    ("v4:2x2x1", (2, 2), 8, 1024, 8, 128, 2816, 512, 32, 512, "none", 1, True, False, 5_099_080_704),
    ("v4:2x2x1", (2, 2), 8, 1024, 8, 128, 2816, 32768, 32, 512, "full", 1, True, False, 1_198_509_056),
    ("v5p:2x2x1", (4, 1), 4, 2048, 8, 128, 5632, 512, 16, 512, "full", 1, True, False, 1_201_967_424),
    ("v5e:2x2", (4, 1), 8, 1024, 8, 128, 2816, 512, 64, 512, "full", 4, True, False, 730_202_112),
    ("v4:2x2x1", (4, 1), 8, 1024, 8, 128, 2816, 512, 64, 512, "full", 1, True, False, 1_241_153_536),
    ("v5p:2x2x1", (4, 1), 8, 1024, 8, 128, 2816, 32768, 32, 1024, "dots", 1, True, False, 4_175_080_800),
    ("v5e:1x1", (1, 1), 8, 512, 4, 128, 1408, 32768, 8, 1024, "none", 1, False, False, 4_401_396_736),
    ("v5p:2x2x1", (4, 1), 8, 512, 4, 128, 1408, 32768, 64, 1024, "none", 1, False, False, 7_801_296_800),
    ("v4:1x1x1", (1, 1), 8, 1024, 4, 256, 2816, 32768, 8, 1024, "none", 1, False, False, 9_827_144_704),
    ("v5e:2x4", (8, 1), 6, 2048, 8, 128, 5632, 32768, 32, 1024, "dots", 1, True, True, 3_313_707_008),
    ("v6e:2x2", (4, 1), 4, 1536, 8, 128, 4096, 32000, 32, 1024, "none", 1, True, True, 6_223_317_408),
    ("v4:2x2x2", (8, 1), 12, 2048, 8, 128, 5632, 8192, 32, 1024, "full", 1, True, True, 2_290_690_048),
    ("v5p:2x2x1", (2, 2), 8, 2048, 8, 128, 5632, 32768, 16, 2048, "full", 1, True, True, 4_336_554_304),
    ("v4:2x2x1", (1, 4), 6, 2048, 8, 128, 5632, 32768, 8, 1024, "dots", 2, True, True, 2_698_970_112),
    ("v5e:2x2", (2, 2), 6, 1024, 8, 128, 4096, 50304, 16, 1024, "none", 1, True, True, 4_997_774_336),
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
        ("production/tpu_v4", ("v4:2x2x1", (4, 1), 4, 256, 4, 64, 1024, 8192, 32, 512, "none", 1, False), 354_687_488,
         1.4),
        ("demo", ("v4:2x2x1", (4, 1), 4, 256, 4, 64, 1024, 8192, 32, 512, "none", 1, False), 617_536_000, 1.25),
        ("production/tpu_v4", ("v5e:2x2", (4, 1), 2, 64, 4, 16, 256, 512, 8, 128, "none", 1, False), 3_439_104, 3.5),
        ("demo", ("v5e:2x2", (4, 1), 2, 64, 4, 16, 256, 512, 8, 128, "none", 1, False), 3_275_264, 3.5),
    ],
)  # fmt: skip
def test_of_tiny_steps_the_estimate_is_never_too_little(base, row, total, most):
    """The compiler keeps what is small in the chip's own memory, which is not estimated."""
    assert total <= case(base, *row).total <= most * total
