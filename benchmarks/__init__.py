"""Measured comparisons with named peers: ``python -m benchmarks``.

A benchmark is a module of this folder with ``run() -> list[dict]``. Each row says ``what`` was measured, against
which ``peer``, and the ``ratio``: time of the peer / time of ours, so that above 1 ours is the faster. Other keys are
its own. Two sides are timed in alternation
(:func:`capibara.measure.interleaved`), so that a machine that slows down slows both.
"""
