"""Vector quantisation: :func:`nearest_code`."""

from __future__ import annotations

from capibara.ops.vq.api import nearest_code

__all__ = ["nearest_code"]
