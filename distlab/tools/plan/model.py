"""A model on paper: its shape, how many parameters it has, and where that is from.

Published shapes are in models.json, each with its source; a `config.json` of transformers says the same of any other;
and of a number of parameters alone a GPT's shape is guessed.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from distlab.lab.config import ConfigError
from distlab.lab.config.settings import suggest

TABLE = Path(__file__).with_name("models.json")


@dataclass(frozen=True)
class Shape:
    """A transformer of `layers` blocks, `heads` heads in all `width` numbers wide.

    `kv_heads` are those of keys and values (fewer in grouped-query attention), `mlp_width` what is between the matrices
    of the feed-forward part, three where it is `gated`. Of `experts` each token takes `experts_a_token`, in `moe_layers`
    layers. `tied`: embedding and output layer are one matrix of `vocabulary` rows.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp_width: int
    gated: bool
    vocabulary: int
    tied: bool
    experts: int = 0
    experts_a_token: int = 0
    moe_layers: int = 0

    @cached_property
    def products(self) -> list[tuple[int, int]]:
        """[inner, outer] of the matrices that a token meets in a layer without experts."""
        keys = self.width * self.kv_heads // self.heads
        return [(self.width, self.width + 2 * keys), (self.width, self.width), *self.mlp]

    @cached_property
    def mlp(self) -> list[tuple[int, int]]:
        """[inner, outer] of one feed-forward part, or of one expert's."""
        return [(self.width, self.mlp_width * (2 if self.gated else 1)), (self.mlp_width, self.width)]

    @cached_property
    def body(self) -> float:
        """Parameters of all matrices between embedding and output layer, as far as the shape says; a GPT's are 12·L·h²."""
        whole = self.layers * numel(self.products)
        return whole - self.moe_layers * numel(self.mlp) + self.expert_parameters

    @cached_property
    def expert_parameters(self) -> float:
        return float(self.moe_layers * self.experts * numel(self.mlp))

    @cached_property
    def ends(self) -> float:
        """Of the embedding and the output layer."""
        return float(self.vocabulary * self.width * (1 if self.tied else 2))


def numel(products: list[tuple[int, int]]) -> int:
    return sum(inner * outer for inner, outer in products)


def active(shape: Shape, num_parameters: float) -> float:
    """Parameters that a token meets: all but the experts that it does not take."""
    if not shape.experts:
        return num_parameters
    return num_parameters - shape.expert_parameters * (1 - shape.experts_a_token / shape.experts)


# Of a number of parameters alone: a GPT.

ASPECT = 128  # width over layers, as in GPT-3 of 6.7B (4096 over 32) and of 175B (12288 over 96)
GPT2_VOCABULARY = 50304  # filled up to a multiple of 64


def guessed(
    num_parameters: float, layers: int | None = None, width: int | None = None, heads: int | None = None,
    vocabulary: int | None = None,
) -> Shape:  # fmt: skip
    """A GPT-like shape of P = 12·L·h² with h = 128·L; whatever is given stays. 7B: 32 layers, 4096 wide; 175B: 96,
    12288. It chooses from GPT-2's tokens, or in a small model from as many as take a third of its parameters."""
    layers = layers or guessed_layers(num_parameters, width)
    width = width or guessed_width(math.sqrt(num_parameters / (12 * layers)), heads)
    heads = heads or guessed_heads(width)
    vocabulary = vocabulary or max(1, min(GPT2_VOCABULARY, round(num_parameters / (3 * width))))
    return Shape(layers, width, heads, heads, 4 * width, False, vocabulary, True)


def guessed_layers(num_parameters: float, width: int | None) -> int:
    """L = P/(12·h²), or with h = 128·L a multiple of 4."""
    if width is not None:
        return max(1, round(num_parameters / (12 * width**2)))
    exact: float = (num_parameters / (12 * ASPECT**2)) ** (1 / 3)
    return max(1, 4 * round(exact / 4) or round(exact))


def guessed_width(exact: float, heads: int | None) -> int:
    """The nearest multiple of the heads; or of 8 heads, each of 128 numbers or, in a narrow model, a smaller power of
    two."""
    if heads is None:
        heads = 8 * min(128, 1 << max(0, int(math.log2(max(1.0, exact / 16)))))
    return heads * max(1, round(exact / heads))


def guessed_heads(width: int) -> int:
    """As many as divide the width, of 128 numbers or more each; in a narrow model 8 at most."""
    return max(count for count in range(1, max(8, width // 128) + 1) if width % count == 0)


# By name, or by the config.json that stands beside its weights.


@cache
def table() -> dict[str, dict[str, Any]]:
    """Published shapes by name."""
    found: dict[str, dict[str, Any]] = json.loads(TABLE.read_text())
    return found


def named(name: str) -> tuple[Shape, float, str]:
    """Shape, parameters and source of a published model; raises ConfigError."""
    key = name.lower().replace("_", "-")
    if key not in table():
        raise ConfigError(
            [f"--model={name!r} is not in the table{suggest(key, list(table()))}, allowed: {', '.join(table())};"
             " any other: --config config.json, or --params"]
        )  # fmt: skip
    row = dict(table()[key])
    num_parameters, source = float(row.pop("parameters")), str(row.pop("source"))
    return Shape(**row), num_parameters, source


def from_config(path: Path) -> tuple[Shape, float, str]:
    """Shape and parameters by a transformers config.json; raises ConfigError, all that is missing at once."""
    try:
        found = json.loads(path.read_bytes())
        fields: Mapping[str, Any] = found if isinstance(found, dict) else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError([f"--config={str(path)!r} is no JSON file that can be read: {error}"]) from None
    faults: list[str] = []

    def number(*names: str, otherwise: int | None = None) -> int:
        name = next((name for name in names if fields.get(name) is not None), None)
        if name is None:
            if otherwise is None:
                faults.append(f"--config={str(path)!r} has no {' or '.join(names)}, a whole number from 1 on")
            return otherwise or 1
        value = fields[name]
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 10**9:
            faults.append(f"--config={str(path)!r} has {name}={value!r}, allowed: a whole number from 1 to a billion")
            return 1
        return value

    layers = number("num_hidden_layers", "n_layer", "n_layers")
    width = number("hidden_size", "n_embd", "d_model")
    heads = number("num_attention_heads", "n_head", "n_heads")
    kv_heads = number("num_key_value_heads", otherwise=heads)
    inner = number("intermediate_size", "ffn_dim", "n_inner", otherwise=4 * width)
    vocabulary = number("vocab_size")
    experts = number("num_local_experts", "n_routed_experts", "num_experts", otherwise=0) if has_experts(fields) else 0
    taken = number("num_experts_per_tok", otherwise=1) if experts else 0
    dense = number("first_k_dense_replace", otherwise=0) if fields.get("first_k_dense_replace") else 0
    if experts and fields.get("moe_intermediate_size"):
        inner = number("moe_intermediate_size")
    if faults:
        raise ConfigError(faults)
    if width % heads or heads % kv_heads:
        raise ConfigError([f"--config={str(path)!r} has {heads} heads, {kv_heads} of keys and values, in a width of"
                           f" {width}: each number has to divide the one before"])  # fmt: skip
    gated = fields.get("hidden_act") in ("silu", "swiglu") or str(fields.get("model_type")) in GATED
    tied = bool(fields.get("tie_word_embeddings", fields.get("model_type") in TIED))
    shape = Shape(layers, width, heads, kv_heads, inner, gated, vocabulary, tied, experts, taken, layers - dense if experts else 0)  # fmt: skip
    return shape, shape.body + shape.ends, f"{path}: matrices of its shape, without norms and biases"


GATED = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "deepseek_v2", "deepseek_v3")
TIED = ("gpt2", "opt", "bloom", "gemma", "gemma2")  # where config.json leaves it to the class


def has_experts(fields: Mapping[str, Any]) -> bool:
    return any(fields.get(name) for name in ("num_local_experts", "n_routed_experts", "num_experts"))
