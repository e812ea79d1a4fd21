"""Training plans for reading: a ranking with its front and its reasons, and the card of one plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from foretell.hardware.cluster import Cluster
from foretell.plan.training.rows import energy, hourly_price
from foretell.plan.training.search import Candidate, Ranking
from foretell.plan.training.uneven import Uneven
from foretell.plan.training.why import NAMES, label, step_text
from foretell.report.text import UNKNOWN, Bar, Flow, Framed, add_row, count, rate, share
from foretell.simulate.training.constants import measured_on
from foretell.simulate.training.memory import PARTS as MEMORY_PARTS
from foretell.simulate.training.memory import MemoryTable
from foretell.simulate.training.plan import TrainingPlan
from foretell.simulate.training.stages import layers_of
from foretell.simulate.training.step import PARTS, StepTable
from foretell.units import format_bytes, format_count, format_energy, format_money, format_power, format_time
from foretell.workload.llm.config import LLMConfig

__all__ = [
    "columns_of", "degrees", "label", "money", "notes_of", "plan_card", "ranking_view", "run_text", "settings",
    "shared_ports", "uneven_view", "worth_showing",
]  # fmt: skip

_FRONT = 10  # rows of the front that are shown
_SLOW = 2.0  # times the fastest: slower plans of the front are not shown
_STAGES = 4  # columns of memory by stage that are shown
_COMMUNICATION = ("tp_s", "cp_s", "ep_s", "pp_s", "dp_s")
_LEAST_PLAN = 24  # cells that the column of plans keeps
# What goes first where not every column fits.
_DISPENSABLE = ("exposed", "energy", "machines", "MFU", "cost")


def ranking_view(found: Ranking, settings: Sequence[str] = ()) -> RenderableType:
    """The best plans as a table, the Pareto front, and why the first is first."""
    best = found.best[0]
    plan = best.plan
    lines: list[RenderableType] = [
        Text(f"training llm:{found.config.name} on {found.cluster.name}", style="bold"),
        Flow(
            f"{format_count(found.config.parameters)} parameters",
            count(found.cluster.device_count, "device"),
            f"{plan.global_batch:,} sequences of {plan.seq_len:,} tokens a step",
            plan.precision,
            plan.framework,
            *settings,
        ),
        Flow(
            f"{found.legal:,} legal plans",
            f"{found.fitting:,} fit into {format_bytes(found.budget_bytes)} a device",
            f"least {found.objective}",
            f"{count(found.reused, 'part')} from the file" if found.reused else None,
        ),
        Text(""),
        _Plans(found.best, found),
    ]
    if found.imported is not None:
        lines += [Text(""), Text("The plan that was imported", style="bold"), _Plans([found.imported], found, False)]
        lines += [Text(_against(found.imported, best, found.budget_bytes))]
        lines += [Text(note, style="dim") for note in found.notes]
    if found.tokens is not None:
        lines += [Text(""), run_text(best, found.tokens)]
    shown = _thinned(worth_showing(found), _FRONT)
    left = len(found.front) - len(shown)
    heading = "Pareto front of time, memory, cost and energy"
    if len(shown) > 1:
        lines += [Text(""), Text(heading, style="bold"), _Plans(shown, found, False)]
        if best not in found.front:
            lines.append(Text("the first is not on it: it gains less than 1 % in each over one that is", style="dim"))
        if left:
            note = f"{left} more, between these or more than {_SLOW:g} times as slow, are left out; --json has all"
            lines.append(Text(note, style="dim"))
    lines += [Text(""), Text("Why the first is first" if len(found.best) > 1 else "Why it", style="bold")]
    lines += [Text(line) for line in found.why]
    lines += [Text(""), Text(notes_of(found), style="dim")]
    return Group(*lines)


def notes_of(found: Ranking) -> str:
    """What holds for every figure of a ranking."""
    price = hourly_price(found.cluster)
    said = ["Times are predictions of one step; memory is of the fullest device, driver and NCCL included"]
    if price is None:
        said.append("no hourly price of the cluster is in the catalogue, so its cost is unknown")
    else:
        said.append(f"cost at {format_money(price)} an hour for the cluster, the catalogue's on-demand price")
    kinds = {node.device.name: node.device.kind for _, node in found.cluster.groups}
    said += [f"{name} is no GPU: its kernels are costed by a roofline, which was not held against training on it"
             for name, kind in kinds.items() if kind != "gpu"]  # fmt: skip
    said += [f"no published training run on {name} was compared with what is predicted"
             for name, kind in kinds.items() if kind == "gpu" and name not in measured_on()]  # fmt: skip
    if found.best[0].energy_j is not None:
        said.append("energy is of the devices, without hosts and network")
    said += shared_ports(found.cluster)
    return "; ".join(said) + "."


def shared_ports(cluster: Cluster) -> list[str]:
    """A note where machines that are no model of the catalogue's were given one port for all their devices."""
    network = cluster.network
    count = max((node.count for _, node in cluster.groups if not node.nics), default=1)
    if network is None or network.count > 1 or count == 1:
        return []
    return [f"{count} devices of a machine share one port to the others: 'over {count}x …' gives each its own"]


def _against(mine: Candidate, best: Candidate, budget: float) -> str:
    missing = mine.memory_bytes - budget
    fits = "" if missing <= 0 else f"It does not fit: {format_bytes(missing)} are missing. "
    gain = (mine.time_s - best.time_s) / mine.time_s
    if gain < 1e-4:
        return fits + "None of the plans above is faster."
    return fits + f"The best plan above is {gain:.1%} faster."


def worth_showing(found: Ranking) -> list[Candidate]:
    """The front without what is far slower than the rest of it."""
    return [one for one in found.front if one.time_s <= _SLOW * found.front[0].time_s]


def _thinned(front: Sequence[Candidate], most: int) -> list[Candidate]:
    """At most so many of the front, its ends among them, evenly over it."""
    if len(front) <= most:
        return list(front)
    return [front[round(i * (len(front) - 1) / (most - 1))] for i in range(most)]


class _Plans:
    """A table of candidates with as many columns as the console holds uncut; those left out are named."""

    def __init__(self, rows: Sequence[Candidate], found: Ranking, numbered: bool = True) -> None:
        self.rows = rows
        self.found = found
        self.numbered = numbered

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = columns_of(self.rows, self.found)
        width = {name: max(len(name), *map(len, cells)) for name, cells in columns.items()}
        gap = 2 if options.max_width >= 100 else 1
        number = len(str(len(self.rows))) + gap if self.numbered else 0
        labels = [label(row.plan) for row in self.rows]
        widest = max(len("plan"), *map(len, labels))
        left_out = []
        for name in _DISPENSABLE:  # numbers are never cut: where they do not all fit, columns go
            room = options.max_width - number - sum(w + gap for w in width.values())
            if room >= min(widest, _LEAST_PLAN) or len(width) == 1:
                break
            if name in width:
                width.pop(name)
                left_out.append(name)
        room = options.max_width - number - sum(w + gap for w in width.values())
        table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
        if self.numbered:
            table.add_column("", justify="right", no_wrap=True)
        # A plan that is wider than its column goes on in the next line.
        table.add_column("plan", width=max(min(widest, room), 4), overflow="fold")
        for name in width:
            table.add_column(name, justify="right", no_wrap=True, min_width=width[name])
        for i, text in enumerate(labels):
            cells = [text, *(columns[name][i] for name in width)]
            add_row(table, *([str(i + 1)] if self.numbered else []), *cells)
        yield table
        if left_out:
            yield Text(f"{' and '.join(left_out)} left out for want of width; --json has all", style="dim")


def columns_of(rows: Sequence[Candidate], found: Ranking) -> dict[str, list[str]]:
    """The figures of some candidates as text, by the column's name. With tokens, energy and cost are of the run."""
    tokens = found.tokens
    columns = {"step": [step_text(row.time_s) for row in rows]}
    if len({row.nodes for row in (*found.best, *found.front)}) > 1:
        columns["machines"] = [str(row.nodes) for row in rows]
    columns |= {
        "tok/s/GPU": [rate(row.tokens_per_s_per_device) for row in rows],
        "MFU": [share(row.mfu) for row in rows],
        "memory": [format_bytes(row.memory_bytes) for row in rows],
        "exposed": [share(row.exposed_s / row.time_s) for row in rows],
    }
    times = [row.plan.tokens if tokens is None else tokens for row in rows]  # of one step, or the run
    runs = [row.run(number) for row, number in zip(rows, times, strict=True)]
    if tokens is not None:
        columns["run"] = [format_time(run.time_s) for run in runs]
    columns["energy"] = ["?" if run.energy_j is None else format_energy(run.energy_j) for run in runs]
    columns["cost"] = ["?" if run.cost_usd is None else money(run.cost_usd) for run in runs]
    return columns


def money(value: float) -> str:
    """Dollars, in millions where they are many."""
    return format_money(value) if value < 1e4 else "$" + format_count(value).replace("G", "bn")


def run_text(one: Candidate, tokens: float) -> RenderableType:
    """What a run of so many tokens takes with a plan: days, GPU-hours, dollars, energy."""
    run = one.run(tokens)
    return Flow(
        Text(f"{format_count(tokens)} tokens", style="bold"),
        f"{run.steps:,.0f} steps",
        f"{run.time_s / 86400:,.1f} days",
        f"{run.device_hours:,.0f} GPU-hours",
        "cost unknown: no hourly price" if run.cost_usd is None else money(run.cost_usd),
        None if run.energy_j is None else f"{format_energy(run.energy_j)} (devices)",
    )


def uneven_view(config: LLMConfig, cluster: Cluster, found: Sequence[Uneven], tokens: float | None) -> RenderableType:
    """Ways to share a model among machines of several kinds: what each kind gets, and how long it takes for it."""
    plan = found[0].plan
    lines: list[RenderableType] = [
        Text(f"training llm:{config.name} on {cluster.name}", style="bold"),
        Flow(
            f"{format_count(config.parameters)} parameters", count(cluster.device_count, "device"),
            f"{plan.global_batch:,} sequences of {plan.seq_len:,} tokens a step", plan.precision, plan.framework,
        ),
        Text(""),
    ]  # fmt: skip
    for i, one in enumerate(found, 1):
        run = None if tokens is None else one.time_s * tokens / one.plan.tokens
        cost = None if one.cost_usd is None else one.cost_usd * (1.0 if tokens is None else tokens / one.plan.tokens)
        head = Flow(
            Text(f"{i}. uneven {one.by}", style="bold"), label(one.plan), f"{step_text(one.time_s)} a step",
            f"{rate(one.tokens_per_s / one.plan.devices)} tok/s a GPU",
            None if run is None else format_time(run), None if cost is None else money(cost),
        )  # fmt: skip
        lines.append(head)
        unit, part = ("stage", "layer") if one.by == "stages" else ("replica", "micro-batch")
        for kind in one.kinds:
            parts = f"{part}es" if part.endswith("ch") else f"{part}s"
            lines.append(Padding(Flow(
                f"{kind.machines}x {kind.name}: {count(kind.units, unit)} of up to {kind.each} "
                f"{part if kind.each == 1 else parts}",
                f"{kind.total} together", step_text(kind.time_s), format_bytes(kind.memory_bytes),
            ), (0, 0, 0, 3)))  # fmt: skip
    note = ("The step is that of the slowest kind, taken as if every stage or replica were like its own; embedding, "
            "loss and the first stage's micro-batches count for every kind.")  # fmt: skip
    return Group(*lines, Text(""), Text(note, style="dim"))


def plan_card(
    config: LLMConfig,
    plan: TrainingPlan,
    cluster: Cluster,
    step: StepTable,
    memory: MemoryTable,
    *,
    tokens: float | None = None,
    notes: Sequence[str] = (),
    interval: str = "",
    counted: str = "",
) -> RenderableType:
    """The whole of one plan: degrees, step time with its parts as bars, rates, memory by part and stage, a run's cost.

    `step` is a table of this one plan, `memory` has a row for each rank of the pipeline (`memory.by_rank`). `interval`
    and what the MFU has `counted` are said in words beside the figures.
    """
    one = step.take([0])
    time_s = float(one.time_s[0])
    rows = Table.grid(padding=(0, 2), expand=True)
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(ratio=1)

    def add(name: str, *lines: RenderableType) -> None:
        add_row(rows, name, Group(*lines))

    def gap() -> None:
        add_row(rows, "", "")

    add("Plan", Flow(*degrees(plan), separator=" · "), Flow(*settings(plan)))
    gap()
    tokens_per_s = plan.tokens / time_s
    said = [Text(interval, style="dim")] if interval else []
    add("Step", Text(format_time(time_s), style="bold"), *said, _parts(one))
    exposed, hidden = float(one.exposed_s[0]), float(one.hidden_s[0])
    add(
        "Network",
        Flow(f"{format_time(exposed)} exposed, {share(exposed / time_s)} of the step",
             f"{format_time(hidden)} hidden behind compute"),
    )  # fmt: skip
    add(
        "Rate",
        Flow(f"{rate(tokens_per_s)} tokens/s", f"{rate(tokens_per_s / plan.devices)} tokens/s a GPU",
             f"MFU {share(float(one.mfu[0]))}" + (f" ({counted})" if counted else "")),
    )  # fmt: skip
    gap()
    add("Memory", *_memory(config, plan, memory))
    gap()
    busy = one.compute_s + one.recompute_s + one.optimizer_s
    joules = float(energy(cluster, one.time_s, busy)[0])
    price = hourly_price(cluster)
    unknown_power = joules != joules
    add("Energy", Text(f"{UNKNOWN}: the devices' power is not in the catalogue") if unknown_power else Flow(
        f"{format_energy(joules)} a step", f"{format_power(joules / time_s)} on average", "devices only",
    ))  # fmt: skip
    cost = None if price is None else price * time_s / 3600.0
    add("Cost", Text(f"{UNKNOWN}: no hourly price of the cluster is in the catalogue") if cost is None else Flow(
        f"{format_money(cost)} a step", f"{format_money(1e6 * cost / plan.tokens)} per million tokens",
        f"at {format_money(price or 0.0)} an hour",
    ))  # fmt: skip
    if tokens is not None:
        candidate = Candidate(plan, cluster.node_count, time_s, one.parts(0), hidden, float(memory.peak_bytes.max()),
                              float(one.mfu[0]), None if unknown_power else joules, cost)  # fmt: skip
        add("Run", run_text(candidate, tokens))
    if notes:
        gap()
        add("Notes", *(Text(note) for note in notes))
    title = f"llm:{config.name} · training on {cluster.name}"
    return Framed(title, rows, f"{plan.devices:,} devices · {plan.framework}")


def degrees(plan: TrainingPlan) -> list[str]:
    """The degrees of a plan in words."""
    names = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline", "ep": "expert", "vp": "chunks a rank"}
    return [f"{word} {getattr(plan, name)}" for name, word in names.items()
            if getattr(plan, name) > 1 or name in ("tp", "dp", "pp")]  # fmt: skip


def settings(plan: TrainingPlan) -> list[str | None]:
    """The other settings of a plan in words; None for what does not apply."""
    recompute = "no recomputation" if plan.recompute == "none" else f"{plan.recompute} recomputation"
    if plan.recompute_layers:
        recompute += f" of {plan.recompute_layers} layers a rank"
    return [
        f"{plan.global_batch:,} sequences of {plan.seq_len:,} tokens",
        f"{plan.micro_batches:,} micro-batch{'' if plan.micro_batches == 1 else 'es'} of {plan.micro_batch}",
        f"schedule {plan.schedule}" if plan.pp > 1 else None,
        f"ZeRO {plan.zero}" + (f" in groups of {plan.shard}" if plan.shard else ""),
        "sequence parallelism" if plan.tp > 1 and plan.sequence_parallel else None,
        f"context scheme {plan.context_scheme}" if plan.cp > 1 else None,
        f"dispatcher {plan.dispatcher}" if plan.ep > 1 else None,
        recompute,
        plan.precision,
        f"LoRA rank {plan.lora_rank}" if plan.lora_rank else None,
        "CUDA graphs" if plan.cuda_graph else None,
    ]


def _bars(parts: Mapping[str, float], total: float, show: Mapping[str, str]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column()
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    for name, value in parts.items():
        part = value / total if total else 0.0
        add_row(grid, name, Bar(part, 20), share(part), show[name])
    return grid


def _parts(one: StepTable) -> RenderableType:
    found = {NAMES[name]: float(getattr(one, name)[0]) for name in PARTS}
    found = {name: value for name, value in found.items() if value > 0}
    return _bars(found, float(one.time_s[0]), {name: format_time(value) for name, value in found.items()})


def _memory(config: LLMConfig, plan: TrainingPlan, memory: MemoryTable) -> list[RenderableType]:
    """The fullest stage against the device, then every part on a few stages: first, fullest and last among them."""
    peak = memory.peak_bytes
    fullest = int(peak.argmax())
    lines: list[RenderableType] = []
    used = f"{format_bytes(float(peak[fullest]))}"
    if memory.capacity_bytes is None:
        lines.append(Text(f"{used}; the device's capacity is unknown, so whether it fits is too"))
    else:
        part = float(peak[fullest]) / memory.capacity_bytes
        grid = Table.grid(padding=(0, 2))
        verdict = Text("fits", style="green") if part <= 1 else Text("DOES NOT FIT", style="bold red")
        add_row(grid, f"{used} of {format_bytes(memory.capacity_bytes)}", Bar(part, 12), share(part), verdict)
        lines.append(grid)
    lines.append(Flow(f"allocated {format_bytes(float(memory.allocated_bytes[fullest]))}",
                      f"reserved {format_bytes(float(memory.reserved_bytes[fullest]))}"))  # fmt: skip
    stages = _shown_stages(len(memory), fullest)
    layers = layers_of(config, plan.pp, plan.vp, plan.first_layers, plan.last_layers).sum(axis=(1, 2))
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    grid.add_column("GiB" if len(memory) == 1 else "GiB on stage", no_wrap=True)
    for stage in stages:
        grid.add_column("" if len(memory) == 1 else str(stage), justify="right", no_wrap=True)
    for name in MEMORY_PARTS:
        column = memory[name]
        if column.max() > 0:
            add_row(grid, name, *(_gib(float(column[stage])) for stage in stages))
    add_row(grid, Text("together", style="bold"), *(_gib(float(peak[stage])) for stage in stages))
    if len(memory) > 1:
        add_row(grid, Text("layers", style="dim"), *(Text(str(layers[stage]), style="dim") for stage in stages))
    lines += [Text(""), grid]
    if len(stages) < len(memory):
        note = f"of {len(memory)} stages the first, the fullest and the last are shown"
        lines.append(Padding(Text(note, style="dim"), (0, 0)))
    return lines


def _shown_stages(stages: int, fullest: int) -> list[int]:
    if stages <= _STAGES:
        return list(range(stages))
    return sorted({0, fullest, stages - 1})


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f}" if nbytes >= 0.05 * 2**30 else ("0" if nbytes == 0 else "< 0.1")
