"""Switches, links and transceivers of a fabric, and what they cost and draw."""

from __future__ import annotations

import math
from dataclasses import dataclass

from foretell.errors import InfeasibleError, InputError

__all__ = ["Bill", "Powers", "Prices", "clos", "rail_only"]

MOST_TIERS = 5


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars of one switch port and one transceiver. Network adapters are the same on every fabric: left out.

    By default of 200 Gb/s, from the table of component costs in Wang et al.: TopoOpt (NSDI 2023). Savings depend on
    their ratio only.
    """

    port_usd: float = 374.0
    transceiver_usd: float = 198.0


@dataclass(frozen=True, slots=True)
class Powers:
    """Watts of one switch port and one transceiver.

    By default of 400 Gb/s: NVIDIA Quantum-2 QM9700 data sheet (747 W typical with passive cables, 64 ports), and NVIDIA
    MMS4X00-NS400 transceiver (9 W).
    """

    port_w: float = 747.0 / 64
    transceiver_w: float = 9.0


@dataclass(frozen=True, slots=True)
class Bill:
    """What a fabric is built of. A link has a transceiver at either end; `radix` is the ports of a switch."""

    endpoints: int
    radix: int
    tiers: int
    switches: int
    links: int

    @property
    def ports(self) -> int:
        """Ports of all switches, used or not."""
        return self.switches * self.radix

    @property
    def transceivers(self) -> int:
        """Transceivers, those of the endpoints included."""
        return 2 * self.links

    def cost_usd(self, prices: Prices | None = None) -> float:
        """Price of switches and transceivers."""
        prices = prices or Prices()
        return self.ports * prices.port_usd + self.transceivers * prices.transceiver_usd

    def power_w(self, powers: Powers | None = None) -> float:
        """Power of switches and transceivers."""
        powers = powers or Powers()
        return self.ports * powers.port_w + self.transceivers * powers.transceiver_w


def clos(endpoints: int, *, radix: int) -> Bill:
    """A folded Clos (fat tree) with full bisection: half of the ports of every switch but the top ones go down.

    Raises InfeasibleError where five tiers do not reach that many endpoints.
    """
    _check(endpoints, radix)
    tiers = 1
    while 2 * (radix // 2) ** tiers < endpoints:
        tiers += 1
        if tiers > MOST_TIERS:
            raise InfeasibleError(
                f"{MOST_TIERS} tiers of switches with {radix} ports reach"
                f" {2 * (radix // 2) ** MOST_TIERS} endpoints, not {endpoints}",
                "use switches with more ports",
            )
    if tiers == 1:
        return Bill(endpoints, radix, 1, 1, endpoints)
    below = math.ceil(endpoints / (radix // 2))
    top = math.ceil(endpoints / radix)
    return Bill(endpoints, radix, tiers, (tiers - 1) * below + top, tiers * endpoints)


def rail_only(devices: int, *, domain: int, radix: int) -> Bill:
    """A Clos for each rail and nothing between rails; `domain` devices share a high-bandwidth domain, one on each rail.

    Raises InputError where domains are not full.
    """
    _check(devices, radix)
    if domain < 1 or devices % domain:
        raise InputError(f"{devices} devices in domains of {domain}", "rail-only fabric", "let them divide")
    rail = clos(devices // domain, radix=radix)
    return Bill(devices, radix, rail.tiers, domain * rail.switches, domain * rail.links)


def _check(endpoints: int, radix: int) -> None:
    if endpoints < 1:
        raise InputError(f"{endpoints} endpoints", "fabric", "give at least 1")
    if radix < 4 or radix % 2:
        raise InputError(f"switches with {radix} ports", "fabric", "give an even number from 4 on")
