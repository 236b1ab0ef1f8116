"""A model as the planner knows it: its shape, its number of parameters, and their source.

Published shapes are in models.json, each with its source; other models are read from a transformers `config.json`;
from a number of parameters alone a GPT's shape is guessed.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from distlab.lab.config import ConfigError
from distlab.lab.config.settings import suggest

TABLE = Path(__file__).with_name("models.json")


@dataclass(frozen=True)
class Shape:
    """A transformer of `layers` blocks, `heads` heads wide.

    `kv_heads` are those of keys and values (fewer in grouped-query attention), `mlp_width` is the feed-forward part's
    inner width, with three matrices if `gated`. Of `experts` each token uses `experts_a_token`, in `moe_layers`
    layers. `tied`: embedding and output layer are one matrix of `vocabulary` rows.

    Fields of 0 follow from others: `head_dim`, numbers of a query's and a key's head, is width / heads; `value_dim`, of
    a value's head, is head_dim; `dense_width`, between the matrices of a layer without experts, is mlp_width.
    `shared_width` is that of the experts that every token takes. Latent attention (DeepSeek-V2, arXiv 2405.04434,
    section 2.1) has keys and values of `kv_rank` numbers, queries of `q_rank`, and `rope_dim` numbers of each head that
    carry positions. In `window_layers` layers a token sees `window` positions at most. Experts of one token are in
    `expert_groups` groups at most, of which each has a node (0: anywhere).
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
    head_dim: int = 0
    value_dim: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    shared_width: int = 0
    dense_width: int = 0
    window: int = 0
    window_layers: int = 0
    expert_groups: int = 0

    @cached_property
    def head(self) -> float:
        """Return the width of a head's query and key; `value` is the width of its value."""
        return self.head_dim or self.width / self.heads

    @cached_property
    def value(self) -> float:
        return self.value_dim or self.head

    @cached_property
    def keys(self) -> float:
        """Return how many numbers of a token's keys and values attention reads."""
        return (self.heads if self.kv_rank else self.kv_heads) * (self.head + self.value)

    @cached_property
    def attention(self) -> list[tuple[float, float]]:
        """Return [inner, outer] of the matrices of one attention; the last is its output projection."""
        output = (self.heads * self.value, float(self.width))
        queries = self.heads * self.head
        if not self.kv_rank:
            return [(self.width, queries + self.keys), output]
        up = self.heads * (self.head - self.rope_dim + self.value)
        query_matrices = [(self.width, self.q_rank), (self.q_rank, queries)] if self.q_rank else [(self.width, queries)]
        return [*query_matrices, (self.width, self.kv_rank + self.rope_dim), (self.kv_rank, up), output]

    def feed_forward(self, inner: int) -> list[tuple[float, float]]:
        """Return [inner, outer] of the matrices of a feed-forward part of this width."""
        return [(self.width, inner * (2 if self.gated else 1)), (inner, self.width)]

    @cached_property
    def mlp(self) -> list[tuple[float, float]]:
        """Return the matrices of one expert, or without experts of the feed-forward part; `dense`: of a layer without
        experts; `beside_experts`: what every token uses in a layer with them, router and shared experts."""
        return self.feed_forward(self.mlp_width)

    @cached_property
    def dense(self) -> list[tuple[float, float]]:
        return self.feed_forward(self.dense_width or self.mlp_width)

    @cached_property
    def beside_experts(self) -> list[tuple[float, float]]:
        return [(self.width, self.experts), *self.feed_forward(self.shared_width)]

    @cached_property
    def body(self) -> float:
        """Count the parameters of all matrices between embedding and output layer by the shape; a GPT has 12·L·h²."""
        total = self.layers * numel(self.attention) + (self.layers - self.moe_layers) * numel(self.dense)
        return total + self.moe_layers * numel(self.beside_experts) + self.expert_parameters

    @cached_property
    def expert_parameters(self) -> float:
        return float(self.moe_layers * self.experts * numel(self.mlp))

    @cached_property
    def ends(self) -> float:
        """Count the parameters of embedding and output layer."""
        return float(self.vocabulary * self.width * (1 if self.tied else 2))

    def kind(self, *, fp8: bool) -> str:
        """Return the kind by which published runs are scored, and which decides an answer's band."""
        return f"{'experts' if self.experts else 'dense'} {'fp8' if fp8 else 'bf16'}"

    def seen(self, seq: int) -> float:
        """Return how many positions a token attends to, averaged over tokens and layers."""
        near = min(self.window or seq, seq)
        in_window = near * (1 - near / (2 * seq))
        return seq / 2 + self.window_layers / self.layers * (in_window - seq / 2)


def numel(products: Iterable[tuple[float, float]]) -> float:
    return sum(inner * outer for inner, outer in products)


def active(shape: Shape, num_parameters: float) -> float:
    """Count the parameters that a token uses: all except unselected experts."""
    if not shape.experts:
        return num_parameters
    return num_parameters - shape.expert_parameters * (1 - shape.experts_a_token / shape.experts)


# A GPT guessed from a number of parameters alone.

ASPECT = 128  # width over layers, as in GPT-3 of 6.7B (4096 over 32) and of 175B (12288 over 96)
GPT2_VOCABULARY = 50304  # filled up to a multiple of 64


def guessed(
    num_parameters: float, layers: int | None = None, width: int | None = None, heads: int | None = None,
    vocabulary: int | None = None,
) -> Shape:  # fmt: skip
    """Guess a GPT's shape from P = 12·L·h² with h = 128·L; given values stay. 7B: 32 layers, 4096 wide; 175B: 96,
    12288. It has GPT-2's vocabulary, or in a small model one that takes a third of its parameters."""
    layers = layers or guessed_layers(num_parameters, width)
    width = width or guessed_width(math.sqrt(num_parameters / (12 * layers)), heads)
    heads = heads or guessed_heads(width)
    vocabulary = vocabulary or max(1, min(GPT2_VOCABULARY, round(num_parameters / (3 * width))))
    return Shape(layers, width, heads, heads, 4 * width, False, vocabulary, True)


def guessed_layers(num_parameters: float, width: int | None) -> int:
    """Return L = P/(12·h²), or with h = 128·L a multiple of 4."""
    if width is not None:
        return max(1, round(num_parameters / (12 * width**2)))
    exact: float = (num_parameters / (12 * ASPECT**2)) ** (1 / 3)
    return max(1, 4 * round(exact / 4) or round(exact))


def guessed_width(exact: float, heads: int | None) -> int:
    """Return a multiple of the heads; or of 8 heads, each of 128 numbers or, in a narrow model, a smaller power of
    two."""
    if heads is None:
        heads = 8 * min(128, 1 << max(0, int(math.log2(max(1.0, exact / 16)))))
    return heads * max(1, round(exact / heads))


def guessed_heads(width: int) -> int:
    """Return a number of heads that divides the width, each 128 wide or more; in a narrow model at most 8."""
    return max(count for count in range(1, max(8, width // 128) + 1) if width % count == 0)


# By name, or by the config.json next to its weights.


@cache
def table() -> dict[str, dict[str, Any]]:
    """Return published shapes by name."""
    found: dict[str, dict[str, Any]] = json.loads(TABLE.read_text())
    return found


def named(name: str) -> tuple[Shape, float, str]:
    """Return shape, parameters and source of a published model; raises ConfigError."""
    key = name.lower().replace("_", "-")
    if key not in table():
        raise ConfigError(
            [f"--model={name!r} is not in the table{suggest(key, list(table()))}, allowed: {', '.join(table())};"
             " any other: --config config.json, or --params"]
        )  # fmt: skip
    row = dict(table()[key])
    num_parameters, source = float(row.pop("parameters")), str(row.pop("source"))
    return Shape(**row), num_parameters, source


class Config:
    """The fields of a transformers config.json; it records which were read and their faults."""

    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        self.option, self.fields = f"--config={str(path)!r}", fields
        self.read: set[str] = set()
        self.faults: list[str] = []

    def value(self, *names: str) -> Any:
        self.read |= {*names}
        return next((self.fields[name] for name in names if self.fields.get(name) is not None), None)

    def number(self, *names: str, otherwise: int | None = None) -> int:
        """Return a whole number by any of these names; 0 counts as missing."""
        value = self.value(*names)
        if value is None or (value == 0 and otherwise is not None and value is not False):
            if otherwise is None:
                self.faults.append(f"{self.option} has no {' or '.join(names)}, a whole number from 1 on")
            return 1 if otherwise is None else otherwise
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 10**9:
            name = next(name for name in names if self.fields.get(name) is not None)
            self.faults.append(f"{self.option} has {name}={value!r}, allowed: a whole number from 1 to a billion")
            return 1
        return value

    def refuse_unknown(self) -> None:
        """Report unknown fields that affect the shape: numbers, lists and tables of layers,
        heads, widths and the like."""
        for name, value in self.fields.items():
            large = (isinstance(value, int) and not isinstance(value, bool) and value > 0) or (value and isinstance(value, list | dict))  # fmt: skip
            if large and name not in self.read and SHAPING.search(name) and not SHAPELESS.search(name):
                self.faults.append(f"{self.option} has {name}={value!r}, which says something of the shape that is not known here: --params with --layers, --width and --heads")  # fmt: skip
        if self.value("is_encoder_decoder"):
            self.faults.append(f"{self.option} has is_encoder_decoder=true, allowed: a decoder alone")


SHAPING = re.compile(r"size|dim|width|rank|head|layer|block|expert|hidden|inner|kernel|expand|state|period|mamba|ssm|conv|lru|_config$|^(n|num|d)_")  # fmt: skip
SHAPELESS = re.compile(
    r"^(max_window_layers|no_rope_layer.*|num_nextn_predict_layers|ep_size|chunk_size_feed_forward|n_(positions|ctx|group)"
    r"|(num_)?rotary_n?dims?|qk_head_dim|num_(labels|beams\w*|return_sequences|logits_to_keep)|(vision|audio|quantization|rope|init|generation"
    r"|compression)_config|rope\w*|type_vocab_size|hidden_act\w*|\w*_layer_?norm\w*|pretraining_tp|output_\w+|.*_token.*)$"
)


def from_config(path: Path) -> tuple[Shape, float, str]:
    """Return shape and parameters by a transformers config.json; raises ConfigError with all missing fields."""
    try:
        found = json.loads(path.read_bytes())
        fields: dict[str, Any] = found if isinstance(found, dict) else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError([f"--config={str(path)!r} is no JSON file that can be read: {error}"]) from None
    for part in ("text_config", "attn_config", "ffn_config"):  # of vision models, and of MPT and DBRX
        fields |= inside if isinstance(inside := fields.pop(part, {}), dict) else {}
    config = Config(path, fields)
    shape = plain_shape(config)
    shape = replace(shape, **experts_of(config, shape.layers), **windows_of(config, shape.layers))
    config.refuse_unknown()
    if config.faults:
        raise ConfigError(config.faults)
    if (shape.width % shape.heads and not shape.head_dim) or shape.heads % shape.kv_heads:
        raise ConfigError([f"--config={str(path)!r} has {shape.heads} heads, {shape.kv_heads} of keys and values, in a width of"
                           f" {shape.width}: each number has to divide the one before"])  # fmt: skip
    return shape, shape.body + shape.ends, f"{path}: matrices of its shape, without norms and biases"


def plain_shape(config: Config) -> Shape:
    """Return the fields of every decoder; latent attention if keys and values have a rank."""
    family = str(config.value("model_type"))
    layers = config.number("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    width = config.number("hidden_size", "n_embd", "n_embed", "d_model")
    heads = config.number("num_attention_heads", "n_head", "n_heads", "attention_heads")
    one_key = config.value("multi_query") and not config.value("new_decoder_architecture")
    kv_heads = config.number("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads", "multi_query_group_num", otherwise=1 if one_key else heads)  # fmt: skip
    times = config.value("expansion_ratio")
    inner = config.number("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", otherwise=int(times * width) if isinstance(times, int | float) else 4 * width)  # fmt: skip
    vocabulary = config.number("vocab_size", "padded_vocab_size")
    act = config.value("hidden_act", "hidden_activation", "activation_function", "ffn_act_fn")
    gated = act in ("silu", "swiglu", {"name": "silu"}) or family.startswith(GATED)
    tied = bool(config.fields.get("tie_word_embeddings", family.startswith(TIED)))
    shape = Shape(layers, width, heads, kv_heads, inner, gated, vocabulary, tied)
    rank = config.number("kv_lora_rank", otherwise=0)
    if config.number("word_embed_proj_dim", otherwise=width) != width:
        config.read.discard("word_embed_proj_dim")
    head_dim = config.number("head_dim", "kv_channels", "attention_head_dim", otherwise=0)
    if not rank:
        return replace(shape, head_dim=head_dim if head_dim * heads != width else 0)
    rope = config.number("qk_rope_head_dim")
    nope, value = config.number("qk_nope_head_dim"), config.number("v_head_dim")
    q_rank = config.number("q_lora_rank", otherwise=0)
    return replace(shape, head_dim=nope + rope, value_dim=value, q_rank=q_rank, kv_rank=rank, rope_dim=rope)


def experts_of(config: Config, layers: int) -> dict[str, Any]:
    """Return the fields of a mixture of experts; each family names the layers with experts in its own way."""
    experts = config.number("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts", otherwise=0)
    per_token = config.number(
        "num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_top_k", otherwise=1
    )
    shared = config.number("shared_expert_intermediate_size", "shared_intermediate_size", otherwise=0)
    count = config.number("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", otherwise=int(str(config.value("model_type")).startswith("llama4")))  # fmt: skip
    dense = config.number("intermediate_size_mlp", "intermediate_size", "ffn_hidden_size", otherwise=1)
    inner = config.number("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size", otherwise=dense)  # fmt: skip
    step = config.number("interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_freq", otherwise=1)
    first = config.number("first_k_dense_replace", otherwise=0)
    plain, listed = config.value("mlp_only_layers") or [], config.value("moe_layers")
    groups = config.number("topk_group", otherwise=0)
    if not experts:
        return {}
    after = 0 if config.value("moe_layer_freq") else 1  # DeepSeek begins a period with one, others end it
    sparse = listed or [i for i in range(first, layers) if (i + after) % step == 0 and i not in plain]
    found = {"experts": experts, "experts_a_token": per_token, "moe_layers": len(sparse), "mlp_width": inner}
    if len(sparse) < layers and dense != inner:
        found["dense_width"] = dense
    return found | {"shared_width": shared or count * inner, "expert_groups": groups if config.number("n_group", otherwise=1) > 1 else 0}  # fmt: skip


def windows_of(config: Config, layers: int) -> dict[str, Any]:
    """Return how many layers attend only to a window, and its width."""
    window = config.number("sliding_window", "sliding_window_size", "attention_chunk_size", otherwise=0)
    kinds, usual = config.value("layer_types") or [], PATTERNS.get(str(config.value("model_type")), 0)
    pattern = config.number("sliding_window_pattern", "no_rope_layer_interval", otherwise=usual)
    for kind in sorted({*map(str, kinds)} - {"full_attention", "sliding_attention", "chunked_attention"}):
        config.faults.append(f"{config.option} has layer_types with {kind!r}, allowed: full_attention, sliding_attention, chunked_attention")  # fmt: skip
    if not window or config.value("use_sliding_window") is False:
        return {}
    limited = sum(kind != "full_attention" for kind in kinds) if kinds else layers - (layers // pattern if pattern else 0)  # fmt: skip
    return {"window": window, "window_layers": limited} if limited else {}


GATED = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "deepseek", "gpt_oss", "dbrx", "jetmoe")
PATTERNS = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "llama4_text": 4}  # the last of a period sees all
TIED = ("gpt2", "opt", "bloom", "gemma", "mpt", "falcon", "gpt_bigcode", "xglm")  # if config.json does not state it
