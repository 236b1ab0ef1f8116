"""What the report shows of it: bytes beside loss, and where top-k stops paying."""

from collections.abc import Mapping

import torch

from distlab.compression.costs import sign_pays_below, topk_pays_below
from distlab.config import Config
from distlab.contract import Counted
from distlab.lab import Lab

from .predictions import METHODS, cannot, options_of, sent_bytes

WORLDS = (2, 4, 8, 16, 32, 64, 128, 256)


def summary(config: Config) -> str:
    """One line of what is sent, before it is."""
    dense = sent_bytes(config, "dense", config.world_size)
    if not dense:
        return "one rank has nobody to send to: what is left out and comes later shows all the same"
    possible = [name for name in METHODS if name not in cannot(config)]
    parts = [f"{name} {over_dense(config, name, config.world_size):.3f}" for name in possible]
    return f"a rank sends {dense / 1e6:.3g} MB a step dense; as part of it: {', '.join(parts)}"


def show(lab: Lab, measured: Mapping[str, Counted]) -> None:
    """Tables and charts, from what rank 0 measured."""
    sent = {name: bytes_of(each) for name, each in measured.items()}
    by_variant(lab, sent, lab.losses())
    by_world(lab, sent)


def bytes_of(counted: Counted) -> float:
    """On the wire, or as called where the system has no counters."""
    traffic = counted.traffic
    return traffic.wire_bytes if traffic.wire_error is None else traffic.called_bytes


def by_variant(lab: Lab, sent: Mapping[str, float], losses: Mapping[str, list[float]]) -> None:
    """What each variant sends and reaches, and the way there: loss against the bytes that it took."""
    rows: list[list[str]] = []
    config = lab.config
    dense = sent_bytes(config, "dense", config.world_size)
    samples = config.steps * config.batch
    for name in sent:
        formula = sent_bytes(config, name, config.world_size)
        kilobytes = [f"{value / 1e3:.1f}" for value in (sent[name], formula)]
        rows.append([name, *kilobytes, part(sent[name], dense), figure(losses.get(name, []))])
    columns = ["variant", "kB a step", "by the formula", "of dense", f"loss after {samples} samples"]
    lab.table("What each sends, and what it reaches", columns, rows)
    curves = {
        name: [[sent[name] * step / 1e6 for step in range(1, len(losses[name]) + 1)], losses[name]]
        for name in sent
        if losses.get(name)
    }
    lab.chart("Loss by bytes sent", "MB that a rank has sent", "loss", curves, log_x=True)


def by_world(lab: Lab, sent: Mapping[str, float]) -> None:
    """Bytes over dense as N grows, by the formulas, with the points of this run; and from where on top-k sends more."""
    config, here = lab.config, lab.world_size
    methods = [name for name in METHODS if name in sent]
    lines = {name: [over_dense(config, name, worlds) for worlds in WORLDS] for name in methods}
    points = {name: part(sent[name], sent_bytes(config, "dense", here)) for name in methods}
    columns = ["variant", f"measured, N={here}", *(f"N={worlds}" for worlds in WORLDS)]
    rows = [[name, points[name], *(f"{value:.3g}" for value in lines[name])] for name in methods]
    lab.table(
        f"Bytes sent over dense, with LAB_RATIO={options_of(config).ratio:g} and"
        f" LAB_LOW_RANK={options_of(config).low_rank}",
        columns,
        rows,
    )
    itemsize = getattr(torch, config.dtype).itemsize
    lab.say(
        f"topk sends less than dense below N = {topk_pays_below(options_of(config).ratio, itemsize):.4g}, "
        f"sign below N = {sign_pays_below(itemsize)}", "all_gather",
    )  # fmt: skip
    series = {name: [[float(worlds) for worlds in WORLDS], values] for name, values in lines.items()}
    if here > 1:
        series |= {f"{name}, measured": [[float(here)], [float(points[name])]] for name in methods}
    lab.chart("Bytes sent over dense", "ranks", "part of dense", series, log_x=True, log_y=True)


def over_dense(config: Config, method: str, world_size: int) -> float:
    """The formula's bytes of a step, as part of the dense sum's."""
    return sent_bytes(config, method, world_size) / sent_bytes(config, "dense", world_size)


def part(sent: float, dense: float) -> str:
    """As part of the dense sum; nothing is sent by one rank alone."""
    return f"{sent / dense:.4f}" if dense else "-"


def figure(values: list[float]) -> str:
    return f"{values[-1]:.4f}" if values else "-"
