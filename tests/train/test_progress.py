"""What the lines of a run say of the time it takes."""

from __future__ import annotations

import io

import pytest

from capibara.train.progress import PlainReporter, duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (89, "89 s"),
        (150, "2 min"),
        (3600, "60 min"),
        (9000, "2.5 h"),
        (86400 * 4.25, "4.2 days"),
    ],
)
def test_durations_have_a_unit_that_fits(seconds, text):
    assert duration(seconds) == text


def test_lines_say_how_long_the_rest_takes(monkeypatch):
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    stream = io.StringIO()
    reporter = PlainReporter(stream)
    reporter.start(100, 400)  # resumed: steps before this process say nothing of its speed
    now = 30.0
    line = {"loss": 1.0, "tokens_per_second": 1000.0, "utilisation": None}
    reporter.log(200, line)
    now = 90.0
    more = {"grad_norm": 0.12345, "learning_rate": 2e-3, "memory": 3 << 29, "passes": 0.126}
    reporter.log(400, {**line, "utilisation": 0.5, **more})
    first, last = stream.getvalue().splitlines()
    assert first == "step 200/400  loss 1.0000  1,000 tokens/s  60 s left"
    assert (
        last
        == "step 400/400  loss 1.0000  1,000 tokens/s  MFU 50%  gradient 0.123  rate 2.00e-03  1.50 GiB  pass 0.13"
    )
