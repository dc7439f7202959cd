"""Several prompts at once, against each by itself."""

from __future__ import annotations

import numpy as np
import pytest
from small_models import small_config, small_params

from capibara.core import ModularCapibaraModel
from capibara.errors import ConfigError
from capibara.serve.generate import Generator
from capibara.serve.sampling import Sampling

PROMPTS = [[1, 2, 3, 4, 5], [7], [3, 1, 4]]


@pytest.fixture(scope="module")
def model() -> ModularCapibaraModel:
    model = ModularCapibaraModel(small_config("grouped", **{"model.num_layers": 1}))
    model.params, _ = small_params(model, 4)
    return model


def test_each_row_goes_on_as_it_does_alone(model: ModularCapibaraModel) -> None:
    generator = Generator(model, model.params, sampling=Sampling(temperature=0.0), places=16)
    want = [list(generator.tokens(prompt, max_tokens=9)) for prompt in PROMPTS]
    assert generator.batch(PROMPTS, max_tokens=9) == want
    # A token that ends some rows early, and not the others.
    stop = next(t for t in want[0] if any(t not in row for row in want))
    ended = [row[: row.index(stop)] if stop in row else row for row in want]
    assert generator.batch(PROMPTS, max_tokens=9, stop=[stop]) == ended
    assert generator.batch([], max_tokens=9) == []


def test_what_is_drawn_for_a_row_does_not_depend_on_the_others(model: ModularCapibaraModel) -> None:
    generator = Generator(model, model.params, sampling=Sampling(temperature=1.5), places=16)
    drawn = generator.batch(PROMPTS, max_tokens=8, seed=3)
    other = generator.batch([PROMPTS[0], [2, 2, 2, 2, 2, 2], PROMPTS[2]], max_tokens=8, seed=3)
    assert (drawn[0], drawn[2]) == (other[0], other[2])
    assert generator.batch([PROMPTS[0]] * 3, max_tokens=8, seed=3)[1] != drawn[0]
    assert drawn != generator.batch(PROMPTS, max_tokens=8, seed=4)
    assert all(0 <= token < 11 for row in drawn for token in row)


def test_bad_arguments_are_refused(model: ModularCapibaraModel) -> None:
    generator = Generator(model, model.params, places=8)
    assert len(generator.batch([[1, 2, 3]], max_tokens=6)[0]) == 6
    with pytest.raises(ConfigError, match="need 9 places, the cache has 8"):
        generator.batch([[1], [1, 2, 3]], max_tokens=7)
    with pytest.raises(ConfigError, match="prompt has the token id 11"):
        generator.batch([[1], np.array([11])], max_tokens=1)
