"""DeepSeek-V3 (arXiv:2412.19437): as V2, with experts chosen by sigmoids and a bias that evens their load out."""

from __future__ import annotations

from typing import Any

from capibara.config.sections import ModelSection
from capibara.families import deepseek_v2
from capibara.families.deepseek_v2 import read_latent, read_mixture, write_latent, write_mixture
from capibara.families.family import Family
from capibara.families.keys import Keys
from capibara.families.rope import read_rope
from capibara.families.tensors import Rule

__all__ = ["FAMILY"]


def _read(keys: Keys) -> dict[str, Any]:
    mixture = read_mixture(keys, first_dense=3)
    keys.only("scoring_func", "sigmoid")
    keys.only("topk_method", "noaux_tc")
    mixture |= {
        "router": "sigmoid",
        "normalise": keys.flag("norm_topk_prob", True),
        "scale": keys.number("routed_scaling_factor", 2.5),
        "groups": keys.whole("n_group"),
        "top_groups": keys.whole("topk_group"),
        "group_score": "top2",
        "choice_bias": True,
    }
    settings = read_latent(keys, length=4096) | {"experts": mixture}
    keys.whole("num_nextn_predict_layers", 0, least=0)
    rope = read_rope(keys, mscale=True)
    turned = rope.get("rope", {}) | {"interleaved": keys.flag("rope_interleave", True)}
    return settings | rope | {"rope": turned}


def _write(model: ModelSection) -> dict[str, Any]:
    more = {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_interleave": model.rope.interleaved,
        "num_nextn_predict_layers": 0,
    }
    return write_latent(model) | write_mixture(model) | more


FAMILY = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    read=_read,
    write=_write,
    further="num_nextn_predict_layers",
    outside=deepseek_v2.FAMILY.outside,
    inside=(
        *deepseek_v2.FAMILY.inside,
        Rule.of("model.layers.{layer}.mlp.gate.e_score_correction_bias", ("mlp.router_bias", "d -> d")),
    ),
)
