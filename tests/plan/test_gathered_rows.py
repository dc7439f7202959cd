"""Programs for TPUs exchange parameters and gradients over a mesh that divides rows, and never the rows themselves."""

from __future__ import annotations

import pytest
from tpu_compiler import needs_libtpu

from capibara.config import ModularModelConfig
from capibara.plan import parse_slice
from capibara.plan.compiler import compile_program
from capibara.plan.planning import as_work
from capibara.plan.program import read_program
from capibara.sharding import Layout
from capibara.sharding.communication import flags_of, whole_products

SETTINGS = (
    "precision.compute_dtype=bfloat16",
    "model.scan_layers=scan",
    "model.num_layers=4",
    "model.embed_dim=1024",
    "model.num_heads=8",
    "model.num_kv_heads=8",
    "model.vocab_size=4096",
    "model.max_sequence_length=1024",
    "train.batch_size=4",
    "train.sequence_length=1024",
)


@pytest.mark.thin(2)
@needs_libtpu
@pytest.mark.parametrize(
    "settings", ["model.norm_placement=after", "model.norm_placement=both model.norm=layer"]
)
def test_norms_of_products_gather_no_rows(settings: str) -> None:
    config = ModularModelConfig.from_toml("demo", [*SETTINGS, *settings.split()])
    target = parse_slice("v6e:2x2")
    layout = Layout(
        mesh=(("data", 4), ("model", 1)), remat="full", flags=flags_of(whole_products(target.generation))
    )
    program = compile_program(as_work(config).job(layout, target), schedule=True)
    found = read_program(program.text).collectives
    # Of a block's parameters the largest has 1024 × 2816 numbers.
    blocks = [each.bytes for each in found if each.trips == 4 and each.kind in ("all-gather", "all-to-all")]
    assert blocks
    assert max(blocks) < 4 * 1024 * 1024 * 2
