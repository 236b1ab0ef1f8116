"""Models by name, by config.json and by number of parameters, compared with the papers' numbers of parameters."""

import json
from pathlib import Path
from typing import Any

import pytest

from distlab.lab.config import ConfigError
from distlab.tools.plan.model import Shape, active, from_config, named, table

MIXTRAL = {
    "model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "hidden_act": "silu",
    "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", list(table()))
def test_shapes_have_the_published_number_of_parameters(name: str) -> None:
    """Within half a percent, because norms, biases, positions and DeepSeek-V3's latent attention are not counted."""
    shape, num_parameters, source = named(name)
    assert (shape.body + shape.ends) / num_parameters == pytest.approx(1, abs=0.005)
    assert shape.width % shape.heads == 0 and shape.heads % shape.kv_heads == 0
    assert "20" in source or "config.json" in source


@pytest.mark.parametrize(("name", "billions"), [("mixtral-8x7b", 12.9), ("deepseek-v3", 37), ("llama3-8b", 8.03)])
def test_active_parameters_equal_the_paper(name: str, billions: float) -> None:
    shape, num_parameters, _ = named(name)
    assert active(shape, num_parameters) / 1e9 == pytest.approx(billions, rel=0.02)


def test_config_json_gives_the_tables_shape(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTRAL))
    shape, num_parameters, source = from_config(path)
    assert shape == named("mixtral-8x7b")[0]
    assert num_parameters == pytest.approx(46.7e9, rel=1e-3)
    assert str(path) in source
    gpt2 = {"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25, "vocab_size": 50257}
    path.write_text(json.dumps(gpt2))
    assert from_config(path)[0] == Shape(48, 1600, 25, 25, 6400, False, 50257, True)


MLA = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
PUBLISHED: dict[str, dict[str, Any]] = {  # only the fields that describe the shape
    "deepseek-v3": MLA | {
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
        "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "vocab_size": 129280,
        "hidden_act": "silu", "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_layer_freq": 1,
        "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "num_nextn_predict_layers": 1, "ep_size": 1,
        "max_position_embeddings": 163840, "bos_token_id": 0, "rope_scaling": {"factor": 40}, "quantization_config": {"fmt": "e4m3"},
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "head_dim": 128,
        "num_key_value_heads": 4, "intermediate_size": 6144, "moe_intermediate_size": 768, "vocab_size": 151936,
        "hidden_act": "silu", "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "max_window_layers": 48, "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": False,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss", "num_hidden_layers": 36, "hidden_size": 2880, "num_attention_heads": 64, "head_dim": 64,
        "num_key_value_heads": 8, "intermediate_size": 2880, "vocab_size": 201088, "hidden_act": "silu",
        "num_local_experts": 128, "num_experts_per_tok": 4, "experts_per_token": 4, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18, "initial_context_length": 4096,
    },
    "llama4-maverick": {
        "model_type": "llama4", "vision_config": {"hidden_size": 1408}, "text_config": {
            "model_type": "llama4_text", "num_hidden_layers": 48, "hidden_size": 5120, "num_attention_heads": 40,
            "head_dim": 128, "num_key_value_heads": 8, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
            "vocab_size": 202048, "hidden_act": "silu", "num_local_experts": 128, "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2, "attention_chunk_size": 8192, "no_rope_layers": [1, 1, 1, 0] * 12,
            "layer_types": ["chunked_attention"] * 3 * 12 + ["full_attention"] * 12,
        },
    },
}  # fmt: skip
GEMMA = {
    "model_type": "gemma3_text", "num_hidden_layers": 26, "hidden_size": 1152, "num_attention_heads": 4, "head_dim": 256,
    "num_key_value_heads": 1, "intermediate_size": 6912, "vocab_size": 262144, "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 512, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
}  # fmt: skip
GEMMA2 = GEMMA | {"model_type": "gemma2", "sliding_window_pattern": None}
BLOOM = {"model_type": "bloom", "n_embed": 4096, "n_head": 32, "n_layer": 30, "vocab_size": 250880, "pretraining_tp": 4}
FALCON = {
    "model_type": "falcon", "num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71, "vocab_size": 65024,
    "multi_query": True, "alibi": False,
}  # fmt: skip


def read(tmp_path: Path, fields: dict[str, Any]) -> Shape:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    return from_config(path)[0]


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_mixture_configs_with_their_own_field_names(name: str, tmp_path: Path) -> None:
    assert read(tmp_path, PUBLISHED[name]) == named(name)[0]


def test_model_families_have_defaults(tmp_path: Path) -> None:
    """Gemma 3 1B has 1.0 billion parameters and windows in five of six layers; Falcon 7B has one key-value head."""
    gemma, falcon = read(tmp_path, GEMMA), read(tmp_path, FALCON)
    assert (gemma.body + gemma.ends) / 1e9 == pytest.approx(1.0, rel=0.01) and gemma.window_layers == 22
    assert (falcon.body + falcon.ends) / 1e9 == pytest.approx(6.92, rel=0.01) and falcon.kv_heads == 1
    assert read(tmp_path, GEMMA2).window_layers == 13, "every second layer"
    assert read(tmp_path, BLOOM) == named("bloom-7b1")[0]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ssm_state_size": 128}, "has ssm_state_size=128, which says something of the shape that is not known"),
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input=256"),
        ({"layers_block_type": ["mamba"]}, "layers_block_type=['mamba']"),
        ({"layer_types": ["linear_attention"]}, "layer_types with 'linear_attention', allowed: full_attention"),
        ({"word_embed_proj_dim": 512}, "word_embed_proj_dim=512"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder=true"),
    ],
)
def test_unknown_config_fields_are_named(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, MIXTRAL | fields)
    assert any(words in fault for fault in caught.value.faults), caught.value.faults


def test_a_window_and_latent_attention_are_counted() -> None:
    """Half of GPT-OSS' layers attend to 128 positions; DeepSeek-V3's keys have 192 numbers per head, its values 128."""
    oss, deepseek = named("gpt-oss-120b")[0], named("deepseek-v3")[0]
    assert oss.seen(4096) == pytest.approx((2048 + 128 - 2) / 2)
    assert (deepseek.head, deepseek.value, deepseek.keys) == (192, 128, 128 * 320)
    assert oss.seen(64) == 32


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is no JSON file that can be read"),
        ("[1]", "has no num_hidden_layers or n_layer"),
        (json.dumps(MIXTRAL | {"hidden_size": "wide"}), "has hidden_size='wide', allowed: a whole number"),
        (json.dumps(MIXTRAL | {"num_attention_heads": 33}), "33 heads, 8 of keys and values, in a width of 4096"),
        ("[" * 100_000, "is no JSON file that can be read"),
    ],
)
def test_an_unusable_config_is_refused(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        from_config(path)
    assert any(words in fault for fault in caught.value.faults), caught.value.faults


def test_all_missing_config_fields_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"vocab_size": True}))
    with pytest.raises(ConfigError) as caught:
        from_config(path)
    assert len(caught.value.faults) == 4


def test_an_unknown_model_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'llama3-70b'"):
        named("llama3-7b0")


def whole(sizes: dict[str, Any]) -> Shape:
    return Shape(2, 64, 4, 2, 128, True, 100, False, **sizes)


def test_parameters_counted_by_hand() -> None:
    dense = 64 * (64 + 2 * 32) + 64 * 64 + 64 * 256 + 128 * 64
    assert whole({}).body == 2 * dense
    assert whole({}).ends == 2 * 100 * 64
    mixed = whole({"experts": 3, "experts_a_token": 1, "moe_layers": 1})
    assert mixed.body == 2 * dense + 2 * (64 * 256 + 128 * 64) + 64 * 3, "the router has a column for each expert"
