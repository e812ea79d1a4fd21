"""Networks for training: counts by hand, flows that conserve bytes, and forwarding on fabrics small enough to draw."""

import itertools
import math

import numpy as np
import pytest

from foretell.errors import InfeasibleError, InputError
from foretell.plan.network import KINDS, Powers, Prices, Traffic, Wires, clos, compare, rail_only, traffic
from foretell.plan.network.forwarding import loads
from foretell.simulate.training import TrainingPlan
from foretell.workload.llm.config import LLMConfig, MoE
from foretell.workload.llm.weights import count_parameters

DENSE = LLMConfig("dense", layers=8, hidden=64, heads=8, intermediate=256, vocab=1000)
SPARSE = DENSE.replace(name="sparse", moe=MoE(experts=8, top_k=2, intermediate=32))


@pytest.mark.parametrize(
    ("endpoints", "radix", "tiers", "switches", "links"),
    [
        (4, 4, 1, 1, 4),
        (8, 4, 2, 6, 16),  # k²/2 hosts: 4 leaves, 2 spines
        (16, 4, 3, 20, 48),  # the fat tree of Al-Fares et al. (SIGCOMM 2008): 5k²/4 switches, k³/4 hosts
        (54, 6, 3, 45, 162),
        (2048, 64, 2, 96, 4096),
        (32768, 128, 3, 1280, 98304),
    ],
)
def test_full_trees_have_the_textbook_counts(endpoints: int, radix: int, tiers: int, switches: int, links: int) -> None:
    bill = clos(endpoints, radix=radix)
    assert (bill.tiers, bill.switches, bill.links, bill.transceivers) == (tiers, switches, links, 2 * links)
    if endpoints == 2 * (radix // 2) ** tiers:
        # A full tree: its ports are its links' ends, but for those at the hosts.
        assert bill.ports == 2 * links - endpoints


def test_rail_only_is_a_clos_for_each_rail() -> None:
    # 16 devices, domains of 4: each rail joins 4 of them, which one switch does.
    bill = rail_only(16, domain=4, radix=4)
    assert (bill.tiers, bill.switches, bill.links) == (1, 4, 16)
    for devices, domain, radix in itertools.product((64, 128, 512), (2, 4, 8, 16), (8, 16, 32)):
        bill, rail = rail_only(devices, domain=domain, radix=radix), clos(devices // domain, radix=radix)
        assert (bill.tiers, bill.switches, bill.links) == (rail.tiers, domain * rail.switches, domain * rail.links)
    assert rail_only(4, domain=1, radix=4) == clos(4, radix=4)


def test_cost_and_power_are_linear_in_ports_and_transceivers() -> None:
    bill = clos(16, radix=4)
    assert bill.cost_usd(Prices(10, 1)) == 20 * 4 * 10 + 96 * 1
    assert bill.power_w(Powers(2, 3)) == 20 * 4 * 2 + 96 * 3
    # Whatever the prices, the saving lies between that of switches alone and of transceivers alone.
    usual, rails = clos(32768, radix=128), rail_only(32768, domain=256, radix=128)
    ends = [1 - rails.cost_usd(p) / usual.cost_usd(p) for p in (Prices(0, 1), Prices(1, 0))]
    assert ends == pytest.approx([2 / 3, 4 / 5])
    assert ends[0] < 1 - rails.cost_usd() / usual.cost_usd() < ends[1]


def test_fabrics_that_cannot_be_built_are_refused() -> None:
    with pytest.raises(InfeasibleError, match="more ports"):
        clos(10**9, radix=4)
    for wrong in ({"endpoints": 0, "radix": 4}, {"endpoints": 8, "radix": 5}, {"endpoints": 8, "radix": 2}):
        with pytest.raises(InputError):
            clos(**wrong)
    with pytest.raises(InputError, match="let them divide"):
        rail_only(30, domain=8, radix=4)


PLANS = [
    TrainingPlan(32, 128, tp=4, dp=4, pp=2),
    TrainingPlan(32, 128, tp=2, dp=2, pp=4, vp=2, recompute="full"),
    TrainingPlan(32, 128, tp=2, cp=2, dp=4, zero=0),
    TrainingPlan(32, 128, tp=1, dp=16, zero=3),
    TrainingPlan(32, 128, tp=2, dp=8, pp=1, ep=4, sequence_parallel=False),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("domain", [1, 2, 4, 8, 16])
def test_the_same_bytes_flow_whatever_the_domain_and_all_get_what_all_send(plan: TrainingPlan, domain: int) -> None:
    config = SPARSE if plan.ep > 1 else DENSE
    found, flat = traffic(config, plan, domain=domain), traffic(config, plan, domain=1)
    assert (found.source != found.target).all()
    assert (found.nbytes > 0).all()
    for kind in KINDS:
        # A hierarchy sends as much as a ring: 2 (n - 1) / n in all.
        assert sum(found.totals()[kind].values()) == pytest.approx(sum(flat.totals()[kind].values()))
    matrix = found.matrix()
    assert matrix.sum() == pytest.approx(found.nbytes.sum())
    assert np.trace(matrix) == 0
    # Collectives send as much as they get on every rank.
    for kind in ("tp", "cp", "ep", "dp"):
        one = found.of(kind).matrix()
        assert one.sum(axis=0) == pytest.approx(one.sum(axis=1))


def test_bytes_by_hand() -> None:
    plan = TrainingPlan(8, 128, micro_batch=2, tp=2, dp=2, pp=2, zero=1)
    found = traffic(DENSE, plan, domain=2)
    micro, activations = 2, 2 * 2 * 128 * 64  # micro-batches a rank, bytes of one's activations
    totals = found.totals()
    # Four layers a rank, four all-reduces each of 2 (2 - 1) / 2 of the activations, on eight ranks.
    assert totals["tp"] == {"domain": 8 * 4 * 4 * micro * activations, "rail": 0, "cross": 0}
    # Down and up between the stages' four ranks each, a half on each tensor-parallel rank.
    assert totals["pp"] == {"domain": 0, "rail": 4 * 2 * micro * activations / 2, "cross": 0}
    # Gradients scattered in fp32, parameters gathered in 16 bits, from half a ring: every weight once over both ranks.
    sent = count_parameters(DENSE) * (4 + 2) * (1 / 2) * 2
    assert sum(totals["dp"].values()) == pytest.approx(sent, rel=0.02)  # norms are on all tensor-parallel ranks
    assert totals["dp"]["cross"] == 0


def test_no_parallelism_no_traffic() -> None:
    assert len(traffic(DENSE, TrainingPlan(8, 128), domain=1).nbytes) == 0
    assert traffic(DENSE, TrainingPlan(8, 128), domain=1).pairs() == 0


def test_dense_training_never_crosses_rails_and_leaves_nearly_all_pairs_of_devices_silent() -> None:
    """The observation behind rail-only, with tensor parallelism inside domains."""
    plan = TrainingPlan(512, 128, tp=8, dp=16, pp=4)
    found = traffic(DENSE, plan, domain=8)
    assert sum(found.totals()[kind]["cross"] for kind in KINDS) == 0
    assert found.pairs() < 0.01
    same = compare(found, Wires(450e9, 50e9))
    assert same.extra_s == 0
    assert same.rail_only_s == same.clos_s
    # A domain that cuts through tensor-parallel groups loses that.
    assert traffic(DENSE, plan.replace(tp=16, dp=8), domain=8).totals()["tp"]["cross"] > 0


def flow(source: int, target: int, nbytes: float, ranks: int = 8, domain: int = 4) -> Traffic:
    return Traffic(ranks, domain, np.array([source]), np.array([target]), np.array([nbytes]), np.array([2]))


def test_a_flow_to_another_rail_is_forwarded_by_its_own_domain() -> None:
    inside, port = loads(flow(1, 7, 100.0), "rail-only")  # rail 1 of domain 0 to rail 3 of domain 1, by way of device 3
    assert inside[0].tolist() == [0, 100, 0, 0, 0, 0, 0, 0]
    assert inside[1].tolist() == [0, 0, 0, 100, 0, 0, 0, 0]
    assert port[0].tolist() == [0, 0, 0, 100, 0, 0, 0, 0]
    assert port[1].tolist() == [0, 0, 0, 0, 0, 0, 0, 100]
    inside, port = loads(flow(1, 7, 100.0), "clos")
    assert inside.sum() == 0
    assert port[0].tolist() == [0, 100, 0, 0, 0, 0, 0, 0]
    for target, ends in ((3, "domain"), (5, "rail")):
        one = flow(1, target, 100.0)
        assert one.totals()["ep"][ends] == 100
        for fabric in ("clos", "rail-only"):
            inside, port = loads(one, fabric)
            assert (inside.sum(), port.sum()) == ((200, 0) if ends == "domain" else (0, 200))
    with pytest.raises(InputError, match="clos or rail-only"):
        loads(flow(1, 7, 1.0), "torus")


def test_all_to_all_by_hand() -> None:
    """Everyone sends one byte to everyone: ports carry the same, domains also what goes to other rails."""
    ranks, domain = 16, 4
    pairs = np.array([(a, b) for a in range(ranks) for b in range(ranks) if a != b])
    every = Traffic(ranks, domain, pairs[:, 0], pairs[:, 1], np.ones(len(pairs)), np.full(len(pairs), 2))
    near, far = domain - 1, ranks - domain
    forwarded = far * (domain - 1) / domain
    for fabric, more in (("clos", 0.0), ("rail-only", forwarded)):
        inside, port = loads(every, fabric)
        assert (inside == near + more).all()
        assert (port == far).all()
    fast, slow = 9.0, 1.0
    found = compare(every, Wires(fast, slow))
    assert found.clos_s["ep"] == pytest.approx(near / fast + far / slow)
    assert found.rail_only_s["ep"] == pytest.approx((near + forwarded) / fast + far / slow)
    assert found.overhead("ep") == pytest.approx(forwarded / fast / (near / fast + far / slow))
    assert found.overhead("tp") == 0
    assert found.slowdown(100.0) == pytest.approx(forwarded / fast / 100)
    together = compare(every, Wires(fast, slow, pipelined=True))
    assert together.extra_s == 0  # the port is the slower either way


def test_experts_over_domains_are_what_rail_only_slows() -> None:
    plan = TrainingPlan(32, 128, tp=1, dp=16, ep=8)
    found = traffic(SPARSE, plan, domain=4)
    assert found.totals()["ep"]["cross"] > 0
    assert compare(found, Wires(450e9, 50e9)).overhead("ep") > 0.05
    assert compare(traffic(SPARSE, plan.replace(ep=4), domain=4), Wires(450e9, 50e9)).extra_s == 0


def test_ten_thousand_devices_are_a_matter_of_seconds_and_matrices_have_a_limit() -> None:
    plan = TrainingPlan(16384, 128, tp=8, dp=512, pp=4)
    found = traffic(DENSE, plan, domain=8)
    assert len(found.nbytes) < 100_000
    with pytest.raises(InputError, match="use the flows"):
        found.matrix()
    assert math.isfinite(compare(found, Wires(450e9, 50e9)).clos_s["dp"])


def test_wrong_questions_are_refused() -> None:
    with pytest.raises(InputError, match="let them divide"):
        traffic(DENSE, TrainingPlan(8, 128, dp=8), domain=3)
    with pytest.raises(InputError, match="positive"):
        Wires(0.0, 1.0)
    with pytest.raises(InputError, match="ep 3 does not divide"):
        traffic(SPARSE, TrainingPlan(8, 128, dp=8, ep=3), domain=8)
