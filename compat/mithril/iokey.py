"""Mithril's ``IOKey``: compose's."""

from capibara.compose import IOKey as IOKey
