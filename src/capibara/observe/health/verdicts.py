"""From measurements to verdicts: what failed, on which device, link or axis, and what cannot be known."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from capibara.measure.sizes import size_text
from capibara.observe.health.results import AxisHealth, DeviceHealth, Fault, Temperature

__all__ = ["CHECKS", "LEAST_OF_PEAK", "SLOW", "Rates", "Verdict", "judge", "slow_rates"]

CHECKS = (
    "all_chips_online",
    "temperature_normal",
    "memory_healthy",
    "interconnect_ok",
    "compute_correct",
    "speed_normal",
)
LEAST_OF_PEAK = {"bfloat16": 0.4, "float32": 0.3, "memory": 0.4, "link": 0.2}
"""Shares of the catalogue's rates below which a device or an axis is slow."""
SLOW = 0.5
"""Share of its peers' median rate below which a device is slow."""

Verdict = tuple[bool | None, str]


def judge(
    devices: Sequence[DeviceHealth],
    axes: Sequence[AxisHealth],
    *,
    listed: int,
    expected: int | None,
    expected_by: str = "",
    no_links: str = "",
    no_backend: str = "",
) -> tuple[dict[str, Verdict], tuple[Fault, ...]]:
    """Verdicts with their reasons, and the faults.

    Args:
      devices: of all processes.
      axes: of the mesh.
      listed: number of devices that JAX lists.
      expected: number that there should be; None if nothing says so.
      expected_by: what says so.
      no_links: why no axis was reached; empty if one was.
      no_backend: why JAX lists no devices; empty if it does.
    """
    faults: list[Fault] = []
    if no_backend:
        faults.append(Fault("all_chips_online", "JAX's backend", no_backend))
    verdicts = {
        "all_chips_online": _online(devices, listed, expected, expected_by, faults),
        "temperature_normal": _temperature(devices, faults),
        "memory_healthy": _memory(devices, faults),
        "interconnect_ok": _interconnect(axes, no_links, faults),
        "compute_correct": _products(devices, faults),
        "speed_normal": _speed(devices, axes, faults),
    }
    return verdicts, tuple(sorted(faults, key=lambda fault: CHECKS.index(fault.check)))


def _failed(check: str, faults: Sequence[Fault]) -> Verdict | None:
    own = [str(fault) for fault in faults if fault.check == check]
    if not own:
        return None
    more = f" (and {len(own) - 3} more)" if len(own) > 3 else ""
    return False, "; ".join(own[:3]) + more


def _online(
    devices: Sequence[DeviceHealth],
    listed: int,
    expected: int | None,
    expected_by: str,
    faults: list[Fault],
) -> Verdict:
    check = "all_chips_online"
    faults += [Fault(check, device.name, device.problem) for device in devices if not device.online]
    if len(devices) < listed:
        silent = listed - len(devices)
        faults.append(Fault(check, "devices", f"{silent} of {listed} did not report from their processes"))
    if expected is not None and listed < expected:
        faults.append(
            Fault(
                check,
                "devices",
                f"{expected - listed} missing: JAX lists {listed}, {expected} expected ({expected_by})",
            )
        )
    if failed := _failed(check, faults):
        return failed
    answered = f"{listed} of {listed} listed devices answered correctly"
    if expected is None:
        return True, f"{answered}; nothing states how many to expect"
    return True, f"{answered}; {expected} expected ({expected_by})"


def _temperature(devices: Sequence[DeviceHealth], faults: list[Fault]) -> Verdict:
    check = "temperature_normal"
    readings = [(device, device.temperature) for device in devices if device.temperature is not None]
    for device, reading in readings:
        if reading.normal is False:
            warm = "" if reading.celsius is None else f"{_degrees(reading)}; "
            faults.append(Fault(check, device.name, f"{warm}{reading.reason}"))
    if failed := _failed(check, faults):
        return failed
    unknown = [(device, reading) for device, reading in readings if reading.normal is None]
    if unknown:
        device, reading = unknown[0]
        return None, reading.reason if len(unknown) == len(readings) else f"{device.name}: {reading.reason}"
    if not readings or len(readings) < len(devices):
        return None, "not every device was reached"
    known = [reading for _, reading in readings if reading.celsius is not None]
    if not known:
        return True, readings[0][1].reason
    hottest = max(known, key=lambda reading: reading.celsius or 0.0)
    return True, f"at most {_degrees(hottest)} ({hottest.reason})"


def _degrees(reading: Temperature) -> str:
    limit = "" if reading.limit is None else f", limit {reading.limit:.0f} °C"
    return f"{reading.celsius:.0f} °C{limit}"


def _memory(devices: Sequence[DeviceHealth], faults: list[Fault]) -> Verdict:
    check = "memory_healthy"
    tested = [(device, device.memory) for device in devices if device.memory is not None]
    for device, memory in tested:
        if memory.wrong:
            bits = f", wrong bits 0x{memory.wrong_bits or 0:08x}"
            faults.append(
                Fault(
                    check,
                    device.name,
                    f"{memory.wrong:,} wrong words in {size_text(memory.tested)}, "
                    f"the first at byte {memory.first_offset:,} of the tested memory{bits}",
                )
            )
        elif memory.failed:
            faults.append(Fault(check, device.name, memory.problem))
    if failed := _failed(check, faults):
        return failed
    if untested := [(device, memory) for device, memory in tested if not memory.tested]:
        device, memory = untested[0]
        return None, f"{device.name}: not tested: {memory.problem}"
    if not tested or len(tested) < len(devices):
        return None, "not every device was reached"
    sizes = [memory.tested for _, memory in tested]
    return True, f"{size_text(min(sizes))} of each device written, inverted and read back"


def _interconnect(axes: Sequence[AxisHealth], no_links: str, faults: list[Fault]) -> Verdict:
    check = "interconnect_ok"
    for axis in axes:
        where = f"axis {axis.name!r}"
        if axis.problem:
            faults.append(Fault(check, where, axis.problem))
        if axis.wrong_on:
            shown = ", ".join(axis.wrong_on[:8]) + (" …" if len(axis.wrong_on) > 8 else "")
            faults.append(Fault(check, where, f"wrong all-reduce on {shown}"))
        faults += [
            Fault(check, f"link {sender} → {receiver}", f"{count:,} wrong elements received ({where})")
            for sender, receiver, count in axis.bad_links
        ]
    if failed := _failed(check, faults):
        return failed
    if no_links or not axes:
        return None, no_links or "no axis was reached"
    names = ", ".join(f"{axis.name!r} ({axis.size} devices)" for axis in axes)
    return True, f"all-reduces and exchanges with both neighbours correct along {names}"


def _products(devices: Sequence[DeviceHealth], faults: list[Fault]) -> Verdict:
    check = "compute_correct"
    done = [(device, device.products) for device in devices if device.products is not None]
    for device, products in done:
        if products.wrong:
            faults.append(
                Fault(
                    check,
                    device.name,
                    f"{products.wrong:,} wrong elements of matrix products; {products.first}",
                )
            )
        if products.failed:
            faults.append(Fault(check, device.name, products.problem))
    if failed := _failed(check, faults):
        return failed
    if untested := [(device, products) for device, products in done if products.problem]:
        device, products = untested[0]
        return None, f"{device.name}: not tested: {products.problem}"
    if not done or len(done) < len(devices):
        return None, "not every device was reached"
    return True, f"{min(products.checked for _, products in done)} matrix products on each device, all exact"


Rates = Mapping[str, tuple[float, float | None]]
"""Measured rates with the catalogue's (None if it has none), by name; :meth:`DeviceHealth.rates`."""


def slow_rates(measured: Iterable[tuple[DeviceHealth, Rates]]) -> dict[tuple[int, str], str]:
    """What is slower than the device's peers, or than the catalogue's figure allows.

    Args:
      measured: devices, and rates that were measured under the same conditions.

    Returns:
      (the device's number, the rate's name) → what was found.
    """
    found: dict[tuple[int, str], str] = {}
    groups: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for device, rates in measured:
        for name, (rate, peak) in rates.items():
            groups[device.kind, name].append((device.id, rate))
            if peak and rate < LEAST_OF_PEAK[name] * peak:
                share = f"{rate / peak:.0%} of the catalogue's {_rate(name, peak)}"
                found[device.id, name] = f"{_what(name)} {_rate(name, rate)}, {share}"
    for (_, name), members in groups.items():
        for number, rate in members:
            others = [other for peer, other in members if peer != number]
            if others and rate < SLOW * (median := statistics.median(others)):
                than = f"{rate / median:.0%} of its peers' median {_rate(name, median)}"
                found.setdefault((number, name), f"{_what(name)} {_rate(name, rate)}, {than}")
    return found


def _speed(devices: Sequence[DeviceHealth], axes: Sequence[AxisHealth], faults: list[Fault]) -> Verdict:
    check = "speed_normal"
    slow = {(device.id, name): what for device in devices for name, what in device.slow.items()}
    # Devices of other processes are compared, too; not CPUs, whose processors other programs use as well.
    slow = slow_rates((device, device.rates()) for device in devices if device.platform != "cpu") | slow
    faults += [
        Fault(check, device.name, what)
        for device in devices
        for (number, _), what in slow.items()
        if number == device.id
    ]
    compared = 0
    for axis in axes:
        if axis.link_bandwidth and axis.peak_link:
            compared += 1
            if axis.link_bandwidth < LEAST_OF_PEAK["link"] * axis.peak_link:
                share = f"{axis.link_bandwidth / axis.peak_link:.0%} of the catalogue's"
                what = f"{_rate('link', axis.link_bandwidth)} to a neighbour, {share} {_rate('link', axis.peak_link)}"
                faults.append(Fault(check, f"axis {axis.name!r}", what))
    if failed := _failed(check, faults):
        return failed
    if uncompared := [(device, why) for device in devices if (why := _uncompared(device, devices))]:
        device, why = uncompared[0]
        return None, f"{device.name}: {why}"
    if not devices:
        return None, "no device was reached"
    known = sum(peak is not None for device in devices for _, peak in device.rates().values()) + compared
    some = any(_has_peer(device, devices) for device in devices)
    peers = f"no device below {SLOW:.0%} of its peers' median" if some else ""
    figures = f"{known} rate{'s' * (known != 1)} compared with the catalogue" if known else ""
    return True, "; ".join(filter(None, (peers, figures)))


def _uncompared(device: DeviceHealth, devices: Sequence[DeviceHealth]) -> str:
    """Why no rate of a device was compared with a peer's or the catalogue's; empty if one was."""
    rates = device.rates()
    if not rates:
        return "no rate was measured"
    if any(peak for _, peak in rates.values()) or _has_peer(device, devices):
        return ""
    where = " of its process" if device.platform == "cpu" else ""
    return f"the catalogue has no rates of {device.kind!r}, and there is no second one{where} to compare with"


def _has_peer(device: DeviceHealth, devices: Sequence[DeviceHealth]) -> bool:
    """Whether a rate of a device is compared with another device's."""
    return any(
        peer is not device
        and peer.kind == device.kind
        # CPUs of other processes are not compared.
        and (device.platform != "cpu" or peer.process == device.process)
        and peer.rates().keys() & device.rates().keys()
        for peer in devices
    )


def _what(name: str) -> str:
    return "memory bandwidth" if name == "memory" else f"{name} matrix products"


def _rate(name: str, value: float) -> str:
    if name in ("memory", "link"):
        return f"{value / 1e9:,.3g} GB/s"
    return f"{value / 1e12:,.4g} TFLOP/s" if value >= 1e11 else f"{value / 1e9:,.3g} GFLOP/s"
