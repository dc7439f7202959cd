"""Parameter counts of models as they are published, from their published ``config.json`` alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from published_models import PUBLISHED, published_folder

from capibara.core import ModularCapibaraModel
from capibara.families import read_config


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_count_is_the_published_one(name: str, tmp_path: Path) -> None:
    config, _ = read_config(published_folder(name, tmp_path))
    assert ModularCapibaraModel(config).num_params == PUBLISHED[name][0]
