"""Rows of published runs: those of published.json, to which gpus.json's shares are fitted, and a user's file.

A user's file is a list of flat rows: a model, a layout and the measurements. Missing fields without a default are
reported by name; missing fields of the model come from the published shape that it otherwise equals.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from distlab.lab.config import ConfigError
from distlab.tools.plan import gpu as gpus
from distlab.tools.plan.gpu import gpu_named, loss_of
from distlab.tools.plan.job import Job, Link, Savings, Weights
from distlab.tools.plan.layout import Layout, faults_of
from distlab.tools.plan.memory import ROUNDED
from distlab.tools.plan.model import Shape, named, table

PUBLISHED = Path(__file__).with_name("published.json")
LATENCY_S, NODE_LATENCY_S = 10e-6, 5e-6
WEIGHTS = {
    "mixed": Weights(2, masters=True, moment_bytes=8),
    "bf16": Weights(2, masters=False, moment_bytes=4),
    "fp32": Weights(4, masters=False, moment_bytes=8),
}
# The software of a source, by words in its name; the first match counts.
OF_SOURCE = {"torchtitan": "torchtitan", "kempner": "torchtitan", "korthikanti": "megatron", "narayanan": "megatron", "llm-foundry": "mpt", "mosaicml": "mpt", "megatron": "megatron", "nvidia": "megatron", "nemo": "megatron", "simumax": "megatron"}  # fmt: skip


Size = Annotated[int, msgspec.Meta(ge=1)]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A published run: model, layout and measurements of a step and of a GPU's memory.

    `dtypes`: whether the types of its weights and its optimizer's state are published, without which bytes say little.
    """

    name: str
    source: str
    gpu: str
    gpus: Size
    gpus_per_node: Size = 8
    parameters: float
    shape: Shape
    sequence: Size
    tp: Size
    pp: Size
    cp: Size
    dp: Size
    ep: Size = 1
    etp: Size = 1
    zero: Literal[0, 1, 2, 3]
    chunks: Size
    microbatch: Size
    global_batch: Size
    recompute: Literal["none", "selective", "half", "full"]
    flash: bool = True
    sequence_parallel: bool = True
    fp8: bool = False
    overlap_tp: bool = False
    overlap_ep: bool = False
    precision: Literal["mixed", "bf16", "fp32"] = "mixed"
    software: Literal["", "torchtitan", "megatron", "mpt"] = ""
    loss: Literal["", "fp32", "fused", "chunked"] = ""
    no_sync: bool = False
    dtypes: bool = True
    step_s: float | None = None
    peak_bytes: float | None = None
    rest_bytes: float | None = None
    activation_bytes: float | None = None
    note: str = ""

    @property
    def publication(self) -> str:
        """Return the unit in which sources are left out: a repository, or a paper's authors and year."""
        first = self.source.split(maxsplit=1)[0]
        return first if "/" in first else re.split("[,:]", self.source)[0]

    @property
    def left_out(self) -> str:
        """Return the source to predict it without: its own, unless published.json has no row of its page."""
        page = self.source.split()[:2]
        return self.publication if any(row.source.split()[:2] == page for row in published()) else ""


@cache
def published() -> list[Row]:
    return msgspec.json.decode(PUBLISHED.read_bytes(), type=dict[str, list[Row]])["rows"]


def job_and_layout(row: Row, without: str = "") -> tuple[Job, Layout]:
    """Return the row as a job, with shares fitted without the rows of one source."""
    card = gpu_named(row.gpu, row.software, without)
    job = Job(
        row.parameters, row.gpus, card.memory_bytes, row.shape, row.sequence, row.microbatch, row.global_batch, False, card,
        Link(LATENCY_S, card.link_bytes_per_s, gpus.LINK_SHARE),
        Link(NODE_LATENCY_S, card.node_link_bytes_per_s, gpus.NODE_LINK_SHARE), row.gpus_per_node,
        WEIGHTS[row.precision], row.recompute, row.flash, row.sequence_parallel, 0.0, row.fp8, row.overlap_tp, row.chunks,
        savings=Savings(no_sync=row.no_sync), loss=row.loss or loss_of(row.software, fp8=row.fp8), overlap_ep=row.overlap_ep,
    )  # fmt: skip
    return job, Layout(row.tp, row.pp, row.dp, row.zero, row.cp, row.ep, row.chunks, row.etp)


ALIASES = {
    "zero": "zero_stage",
    "chunks": "chunks_per_rank",
    "step_s": "measured_s",
    "peak_bytes": "measured_mem_bytes",
}
NEEDED = ("gpu", "gpus", "layers", "width", "heads", "vocabulary", "sequence", "microbatch", "global_batch")
ASSUMED: dict[str, Any] = {
    "tp": 1, "pp": 1, "cp": 1, "zero": 0, "chunks": 1, "recompute": "none", "gated": True, "tied": False,
    "source": "", "fp8": False,
}  # fmt: skip
SHAPE = tuple(field.name for field in fields(Shape))


def read_rows(path: Path) -> tuple[list[Row], list[str]]:
    """Return the rows of a user's file, and sentences on missing fields: the default, or why a row is not scored;
    raises ConfigError if no row can be."""
    try:
        found = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ConfigError([f"--score={str(path)!r} is no JSON file that can be read: {error}"]) from None
    if not isinstance(found, list) or not found or not all(isinstance(each, dict) for each in found):
        raise ConfigError([f"--score={str(path)!r} is not a list of rows, each a table of fields"])
    rows, questions, faults = [], [], []
    for place, row_fields in enumerate(found):
        name = str(row_fields.get("name", f"row {place}"))
        try:
            row, assumed = row_of(name, row_fields)
        except (ConfigError, msgspec.ValidationError) as error:
            faults += [f"{name}: {fault}" for fault in getattr(error, "faults", [error])]
            continue
        rows.append(row)
        questions += [f"{name}: {text}" for text in assumed]
    if not rows:
        raise ConfigError([f"--score: {fault}" for fault in faults])
    return rows, [*(f"{fault}; not scored" for fault in faults), *questions]


def row_of(name: str, row_fields: Mapping[str, Any]) -> tuple[Row, list[str]]:
    """Return one row and sentences on its missing fields; raises ConfigError or msgspec.ValidationError."""
    fields = {field: row_fields.get(field, row_fields.get(alias)) for field in Row.__struct_fields__ for alias in [ALIASES.get(field, field)]}  # fmt: skip
    fields = {field: value for field, value in fields.items() if value is not None} | {"name": name}
    flat = dict(row_fields["shape"]) if isinstance(row_fields.get("shape"), dict) else dict(row_fields)
    shape: dict[str, Any] = {field: flat[field] for field in SHAPE if flat.get(field) is not None}
    lacks = [field for field in NEEDED if field not in fields and field not in shape]
    if "step_s" not in fields and "peak_bytes" not in fields:
        lacks.append("measured_s or measured_mem_bytes")
    if lacks:
        raise ConfigError([f"leaves out {', '.join(lacks)}: needed"])
    assumed = [f"{field} (taken: {ASSUMED[field]})" for field in ASSUMED if field not in fields and field not in shape]  # fmt: skip
    shape = {"kv_heads": shape["heads"], "mlp_width": 4 * shape["width"], "gated": True, "tied": False} | shape
    shape |= (of_published := as_published(shape))
    shape_of_row = msgspec.convert(shape, Shape)
    text = f"{fields.get('source', '')} {name}".lower()
    software = next((software for word, software in OF_SOURCE.items() if word in text), "")
    known = {"parameters": shape_of_row.body + shape_of_row.ends, "software": software, "no_sync": "kempner" in text}
    fields = ASSUMED | known | fields | {"shape": shape_of_row}
    fields["gpu"] = (card := gpu_named(str(fields["gpu"]))).name
    if "gpus_per_node" not in fields or card.gpus_per_node > 8:  # a rack is one node, of many trays
        fields["gpus_per_node"] = card.gpus_per_node
    fields.setdefault("dp", fields["gpus"] // (fields["tp"] * fields["pp"] * fields["cp"]))
    row = msgspec.convert(fields, Row)
    faults = [f"tp{row.tp} x pp{row.pp} x cp{row.cp} x dp{row.dp} are not its {row.gpus} GPUs"]
    if row.tp * row.pp * row.cp * row.dp == row.gpus:
        job, layout = job_and_layout(row)  # its microbatches need not be a multiple of its stages: it ran
        faults = faults_of(job, replace(layout, chunks=1))
    if faults:
        raise ConfigError(faults)
    questions = [f"leaves out {', '.join(assumed)}"] if assumed else []
    part = (shape_of_row.body + shape_of_row.ends) / row.parameters
    if not of_published and abs(part - 1) > ROUNDED:
        lacking = ", ".join(field for field in SHAPE if field.endswith(("_dim", "_rank", "d_width", "e_width")))
        questions.append(f"its shape has {part:.0%} of its parameters; which of these does it leave out: {lacking}?")
    return row, questions


def as_published(shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return the other fields of the published mixture of this width; a row may have fewer of its layers."""
    for name in table():
        known = asdict(named(name)[0])
        same_shape = all(shape.get(field) == known[field] for field in ("width", "heads", "mlp_width", "experts"))
        if shape.get("experts") and same_shape and shape.get("kv_heads") == known["kv_heads"]:
            part = shape["layers"] / known["layers"]
            missing = {field: value for field, value in known.items() if field not in shape and value}
            return missing | (
                {"window_layers": round(part * missing["window_layers"])} if "window_layers" in missing else {}
            )
    return {}
