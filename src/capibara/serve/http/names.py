"""Names that a server is asked by."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from capibara.errors import ConfigError

__all__ = ["host_names", "is_loopback", "without_port"]

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:/@\[\]\s]+))(?::\d*)?")


def is_loopback(host: str) -> bool:
    """Whether a name or an address means this machine, whoever asks: ``localhost``, ``127.0.0.1``, ``::1`` …"""
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def host_names(names: Iterable[str]) -> tuple[str, ...]:
    """Names that requests may have in ``Host``, as they are compared.

    Args:
      names: without a port: ``example.com``, ``*.example.com`` (what ends so), ``192.0.2.1``, ``[2001:db8::1]``, ``*``
        (any).

    Raises:
      ConfigError: one has a scheme, a port, a path, or a star elsewhere.
    """
    found = []
    for name in names:
        plain = name.strip().lower()
        address = plain.removeprefix("[").removesuffix("]")
        try:
            found.append(str(ipaddress.ip_address(address)))
            continue
        except ValueError:
            pass
        rest = plain.removeprefix("*").removeprefix(".")
        if plain != "*" and (not rest or not all(c.isalnum() or c in "-._" for c in rest)):
            raise ConfigError(
                f"allowed hosts: got {name!r:.100}, expected a name or an address without scheme and port: "
                "example.com, *.example.com, 192.0.2.1, or * for any"
            )
        found.append(plain.removesuffix("."))
    return tuple(found)


def without_port(host: str) -> str:
    """A name as :func:`host_names` has it, of ``name:port`` or ``[address]:port``; empty if it is neither."""
    found = _HOST.fullmatch(host.strip().lower())
    if found is None:
        return ""
    address, name = found.groups()
    if name is not None:
        return name.removesuffix(".")
    try:
        return str(ipaddress.IPv6Address(address))
    except ValueError:
        return ""
