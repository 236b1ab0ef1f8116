"""Models by name, by config.json and by a number of parameters: as many parameters as their papers say."""

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
def test_a_published_shape_has_the_published_number_of_parameters(name: str) -> None:
    """Within half a percent: norms, biases and positions are left out, and DeepSeek-V3's latent attention."""
    shape, num_parameters, source = named(name)
    assert (shape.body + shape.ends) / num_parameters == pytest.approx(1, abs=0.005)
    assert shape.width % shape.heads == 0 and shape.heads % shape.kv_heads == 0
    assert "20" in source or "config.json" in source


@pytest.mark.parametrize(("name", "billions"), [("mixtral-8x7b", 12.9), ("deepseek-v3", 37), ("llama3-8b", 8.03)])
def test_a_token_meets_the_parameters_that_the_paper_calls_active(name: str, billions: float) -> None:
    shape, num_parameters, _ = named(name)
    assert active(shape, num_parameters) / 1e9 == pytest.approx(billions, rel=0.02)


def test_a_config_says_what_the_table_does(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTRAL))
    shape, num_parameters, source = from_config(path)
    assert shape == named("mixtral-8x7b")[0]
    assert num_parameters == pytest.approx(46.7e9, rel=1e-3)
    assert str(path) in source
    gpt2 = {"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25, "vocab_size": 50257}
    path.write_text(json.dumps(gpt2))
    assert from_config(path)[0] == Shape(48, 1600, 25, 25, 6400, False, 50257, True)


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
def test_a_config_that_says_no_shape_is_refused(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        from_config(path)
    assert any(words in fault for fault in caught.value.faults), caught.value.faults


def test_all_that_a_config_lacks_is_said_at_once(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"vocab_size": True}))
    with pytest.raises(ConfigError) as caught:
        from_config(path)
    assert len(caught.value.faults) == 4


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'llama3-70b'"):
        named("llama3-7b0")


def whole(sizes: dict[str, Any]) -> Shape:
    return Shape(2, 64, 4, 2, 128, True, 100, False, **sizes)


def test_parameters_are_those_of_the_matrices() -> None:
    dense = 64 * (64 + 2 * 32) + 64 * 64 + 64 * 256 + 128 * 64
    assert whole({}).body == 2 * dense
    assert whole({}).ends == 2 * 100 * 64
    mixed = whole({"experts": 3, "experts_a_token": 1, "moe_layers": 1})
    assert mixed.body == 2 * dense + 2 * (64 * 256 + 128 * 64)
