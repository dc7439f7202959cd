"""What a chip is, how chips are arranged, what they cost, and what they report now.

:func:`get_chip` and :func:`list_chips` read a catalogue of vendor figures, each with its source;
:func:`detect_chip` describes the chip here; :func:`parse_topology` reads ``"4x8"``, ``"v4:2x2x4"`` and
``"v4-32"``; :func:`get_price` knows dated prices and says so when it does not know one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara.lazy import on_demand

if TYPE_CHECKING:
    from capibara.hardware.bounds import roofline
    from capibara.hardware.catalogue import chip_for_device_kind, get_chip, list_chips
    from capibara.hardware.chip import Chip, ChipError, Source
    from capibara.hardware.detect import detect_chip
    from capibara.hardware.meshes import arrange_devices, build_mesh
    from capibara.hardware.prices import Price, PriceError, UnknownPriceError, get_price, load_prices
    from capibara.hardware.processor import cpu_name
    from capibara.hardware.telemetry import (
        CpuTimes,
        DeviceMemory,
        HostMemory,
        cpu_times,
        device_memory,
        host_memory,
        live_array_bytes,
    )
    from capibara.hardware.topology import Topology, TopologyError, parse_topology

__all__ = [
    "Chip",
    "ChipError",
    "CpuTimes",
    "DeviceMemory",
    "HostMemory",
    "Price",
    "PriceError",
    "Source",
    "Topology",
    "TopologyError",
    "UnknownPriceError",
    "arrange_devices",
    "build_mesh",
    "chip_for_device_kind",
    "cpu_name",
    "cpu_times",
    "detect_chip",
    "device_memory",
    "get_chip",
    "get_price",
    "host_memory",
    "list_chips",
    "live_array_bytes",
    "load_prices",
    "parse_topology",
    "roofline",
]

_HOMES = {
    "bounds": ("roofline",),
    "catalogue": ("chip_for_device_kind", "get_chip", "list_chips"),
    "chip": ("Chip", "ChipError", "Source"),
    "detect": ("detect_chip",),
    "meshes": ("arrange_devices", "build_mesh"),
    "prices": ("Price", "PriceError", "UnknownPriceError", "get_price", "load_prices"),
    "processor": ("cpu_name",),
    "telemetry": (
        "CpuTimes",
        "DeviceMemory",
        "HostMemory",
        "cpu_times",
        "device_memory",
        "host_memory",
        "live_array_bytes",
    ),
    "topology": ("Topology", "TopologyError", "parse_topology"),
}

__getattr__, __dir__ = on_demand(__name__, _HOMES)
