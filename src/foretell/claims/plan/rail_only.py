"""Rail-only: a network for training large models without a spine."""

from __future__ import annotations

from foretell.claims.claim import Claim, Claimed, Obtained, Source
from foretell.claims.gpt import SEQ_LEN, gpt
from foretell.claims.rules import AtMost, Equal, Gain

SYSTEM = "rail-only"
DEVICES = 32_768
#: Devices in a high-bandwidth domain, and ports of a switch.
DOMAINS = (8, 16, 32, 64, 128, 256)
RADIXES = (64, 128, 256)


def _source(place: str) -> Source:
    return Source(
        "Wang, Ghobadi, Shakeri, Zhang, Hasani: Rail-only: A Low-Cost High-Performance Network for Training LLMs with"
        " Trillion Parameters (first version: Optimized Network Architectures for Large Language Model Training with"
        " Billions of Parameters)",
        2023,
        "arXiv 2307.12169",
        place,
    )


def _savings(what: str) -> tuple[float, dict[str, float | str]]:
    from foretell.plan.network import Prices, clos, rail_only

    details: dict[str, float | str] = {}
    best, best_at = 0.0, (0, 0)
    for radix in RADIXES:
        usual = clos(DEVICES, radix=radix)
        for domain in DOMAINS:
            rails = rail_only(DEVICES, domain=domain, radix=radix)
            pair = (rails.cost_usd(), usual.cost_usd()) if what == "cost" else (rails.power_w(), usual.power_w())
            saving = 1 - pair[0] / pair[1]
            details[f"{radix} ports, domains of {domain}"] = round(saving, 4)
            if saving > best:
                best, best_at = saving, (radix, domain)
    if what == "cost":
        usual, rails = clos(DEVICES, radix=best_at[0]), rail_only(DEVICES, domain=best_at[1], radix=best_at[0])
        ends = sorted(1 - rails.cost_usd(p) / usual.cost_usd(p) for p in (Prices(0, 1), Prices(1, 0)))
        details["the best, whatever the prices"] = f"{ends[0]:.1%} to {ends[1]:.1%}"
        details["switches, Clos and rail-only"] = f"{usual.switches} and {rails.switches}"
        details["transceivers, Clos and rail-only"] = f"{usual.transceivers} and {rails.transceivers}"
    return best, details


def _cost() -> Obtained:
    best, details = _savings("cost")
    return Obtained(f"up to {best:.1%} less", best, details)


def _power() -> Obtained:
    best, details = _savings("power")
    return Obtained(f"up to {best:.1%} less", best, details)


def _performance() -> Obtained:
    """Speed on rail-only over that on the Clos, of a trillion parameters on 32,768 devices."""
    from foretell.plan.network import KINDS, Wires, compare, traffic
    from foretell.simulate.training import TrainingPlan

    details: dict[str, float | str] = {}
    worst = 1.0
    for domain, wires in ((8, Wires(450e9, 50e9)), (256, Wires(450e9, 50e9))):
        plan = TrainingPlan(4096, SEQ_LEN, tp=8, pp=8, dp=512)
        found = traffic(gpt(128, 25_600, 160), plan, domain=domain)
        compared = compare(found, wires)
        # As if nothing were hidden and compute took no time: the least favourable step.
        speed = sum(compared.clos_s.values()) / sum(compared.rail_only_s.values())
        worst = min(worst, speed)
        details[f"domains of {domain}: relative speed"] = speed
        details[f"domains of {domain}: bytes across rails"] = sum(found.totals()[kind]["cross"] for kind in KINDS)
        details[f"domains of {domain}: pairs of devices that talk"] = f"{found.pairs():.4%}"
    return Obtained(f"{worst:.1%} of the speed", worst, details)


def _all_to_all() -> Obtained:
    """How much longer an all-to-all over all devices takes, forwarding being a phase of its own."""
    from foretell.hardware import node
    from foretell.plan.network import Wires

    details: dict[str, float | str] = {}
    worst = 0.0
    for name, domain, nodes in (("dgx-a100", 8, 128), ("dgx-h100", 8, 128), ("dgx-h100", 256, 128)):
        box = node(name)
        assert box.link is not None
        assert box.link.total_bandwidth_bytes_per_s is not None
        port = box.nics[0].bandwidth_bytes_per_s
        assert port is not None
        overhead = _uniform(Wires(box.link.total_bandwidth_bytes_per_s, port), domain, nodes * domain)
        details[f"{name}, domains of {domain}"] = round(overhead, 4)
        worst = max(worst, overhead)
    least = min(v for v in details.values() if isinstance(v, float))
    return Obtained(f"{least:.1%} to {worst:.1%} longer", worst, details)


def _uniform(wires, domain: int, devices: int) -> float:  # type: ignore[no-untyped-def]
    """The overhead where all send equally to all: by symmetry that of one device's flows, moved to every device."""
    import numpy as np

    from foretell.plan.network import Traffic, compare
    from foretell.plan.network.flows import KINDS

    # A smaller fabric with the same domain has nearly the same shares; 8 domains are made explicit.
    ranks = min(devices, 8 * domain)
    source, target = np.nonzero(~np.eye(ranks, dtype=np.bool_))
    # Weigh flows within the domain as in the whole fabric, where fewer of them are.
    near = source // domain == target // domain
    weight = np.where(near, 1.0, (devices - domain) / (ranks - domain))
    every = Traffic(ranks, domain, source, target, weight, np.full(len(source), KINDS.index("ep")))
    return compare(every, wires).overhead("ep")


CLAIMS = (
    Claim(
        id="rail-only/cost",
        system=SYSTEM,
        title="A rail-only network costs less than a full-bisection Clos",
        source=_source("abstract"),
        metric="saving of network cost (share)",
        claimed=Claimed("up to 75 % less", 0.75),
        setting="32,768 GPUs; domains of 8 to 256 GPUs, switches of 64 to 256 ports; switches and transceivers, prices"
        " of 200 Gb/s parts; adapters left out",
        rule=Gain(),
        how="modelled",
        run=_cost,
        cheap=True,
        note="The largest saving needs domains so large that a rail fits one switch: 128 GPUs a rail, 128 ports. With"
        " nodes of 8 it is 0 to 37 %.",
    ),
    Claim(
        id="rail-only/power",
        system=SYSTEM,
        title="A rail-only network draws less power than a full-bisection Clos",
        source=_source("abstract of version 5"),
        metric="saving of network power (share)",
        claimed=Claimed("37 % to 75 % less", 0.75),
        setting="as for cost; power of 400 Gb/s switches and transceivers",
        rule=Gain(),
        how="modelled",
        run=_power,
        cheap=True,
    ),
    Claim(
        id="rail-only/training-performance",
        system=SYSTEM,
        title="Training is as fast on a rail-only network",
        source=_source("abstract"),
        metric="speed over that on a Clos of the same ports",
        claimed=Claimed("not compromised", 1.0),
        setting="GPT of a trillion parameters on 32,768 GPUs, tensor parallelism 8, pipeline 8, data 512, collectives"
        " in hierarchies; communication alone, nothing hidden",
        rule=Equal(0.01),
        how="modelled",
        run=_performance,
        cheap=True,
        note="Dense models send nothing across rails, so nothing is forwarded.",
    ),
    Claim(
        id="rail-only/all-to-all",
        system=SYSTEM,
        title="An all-to-all of experts takes little longer though it is forwarded",
        source=_source("abstract of version 5"),
        metric="extra time of a uniform all-to-all (share)",
        claimed=Claimed("8.2 % to 11.2 % longer", 0.112),
        setting="128 domains: of 8 A100 (300 GB/s inside, 25 GB/s a port), 8 H100 and 256 H100 (450 and 50 GB/s);"
        " forwarding before sending",
        rule=AtMost(),
        how="modelled",
        run=_all_to_all,
        cheap=True,
    ),
)
