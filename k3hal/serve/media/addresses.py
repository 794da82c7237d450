"""Which internet addresses media may be fetched from: those of the public internet and no other.

The blocks are those of IANA's registries of special-purpose addresses; what `ipaddress` makes of them differs from one
Python to the next.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

_SPECIAL_V4 = [
    IPv4Network(block)
    for block in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
        "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
        "224.0.0.0/4", "240.0.0.0/4",
        "168.63.129.16/32",  # public by its number, but Azure answers every virtual machine from here
    )
]  # fmt: skip
# The only block that global unicast addresses are given out from (RFC 4291, 2.4), and what in it is none: among it
# the tunnels, whose addresses hold IPv4 ones (Teredo, 6to4).
_UNICAST_V6 = IPv6Network("2000::/3")
_SPECIAL_V6 = [IPv6Network(block) for block in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")]
# Addresses of a translator, the IPv4 address it leads to in the last 32 bits (RFC 6052).
_NAT64 = IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Whether `address`, in numbers, is one of the public internet.

    Not public are private, shared, loopback, link-local (cloud metadata), unique local, multicast, reserved and
    documentation addresses; IPv4 addresses of these kinds inside of IPv6 ones; and tunnels.
    """
    try:
        ip = ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, IPv4Address):
        return _public_v4(ip)
    if ip.ipv4_mapped is not None:
        return _public_v4(ip.ipv4_mapped)
    return _public_v4(IPv4Address(int(ip) & 0xFFFFFFFF)) if ip in _NAT64 else _public_v6(ip)


def _public_v4(ip: IPv4Address) -> bool:
    return not any(ip in block for block in _SPECIAL_V4)


def _public_v6(ip: IPv6Address) -> bool:
    return ip in _UNICAST_V6 and not any(ip in block for block in _SPECIAL_V6)
