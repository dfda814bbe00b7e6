"""RoPE angles under each scaling against Megatron's and Hugging Face's frequencies, element by element."""

from __future__ import annotations

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from roll_batching.errors import LayoutError
from roll_batching.modeling.rotary import RotarySettings

POSITIONS = torch.tensor([0, 1, 2, 7, 100, 4095, 8191, 20000])
HEAD_DIM, BASE = 64, 500000.0
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
OTHER = {"factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 8.0, "original_max_position_embeddings": 4096}


def tables(settings: RotarySettings) -> tuple[torch.Tensor, torch.Tensor]:
    return settings.tables(POSITIONS, settings.inverse_frequencies(HEAD_DIM))


def expected(angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.cat([angles, angles], -1)
    return both.cos(), both.sin()


@pytest.mark.parametrize("percent", [1.0, 0.5])
@pytest.mark.parametrize(
    ("settings", "theirs"),
    [
        ({}, {}),
        ({"scaling": "linear", "factor": 4.0}, {"seq_len_interpolation_factor": 4.0}),
        ({"scaling": "llama3", **LLAMA3}, {"rope_scaling": True, "rope_scaling_factor": 8.0}),
        ({"scaling": "llama3", **LLAMA3, "factor": 32.0}, {"rope_scaling": True, "rope_scaling_factor": 32.0}),
    ],
    ids=["plain", "linear", "llama3", "llama3 by 32"],
)
def test_angles_are_megatrons(settings, theirs, percent) -> None:
    """Bitwise: a checkpoint of one runs in the other."""
    megatron = RotaryEmbedding(HEAD_DIM, percent, rotary_base=BASE, use_cpu_initialization=True, **theirs)
    angles = megatron.get_freqs_non_repeated(int(POSITIONS.max()) + 1)[POSITIONS]
    found = tables(RotarySettings(base=BASE, percent=percent, **settings))
    assert all(torch.equal(ours, right) for ours, right in zip(found, expected(angles), strict=True))


@pytest.mark.parametrize(
    ("scaling", "options"),
    [("linear", {"factor": 4.0}), ("llama3", LLAMA3), ("llama3", OTHER)],
    ids=["linear", "llama3", "llama3, other bands"],
)
def test_frequencies_are_hugging_faces(scaling, options) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        rope_parameters={"rope_type": scaling, "rope_theta": BASE, **options},
    )
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[scaling](config, torch.device("cpu"))
    assert attention_factor == 1.0
    settings = RotarySettings(base=BASE, scaling=scaling, **options)
    ours = settings.inverse_frequencies(HEAD_DIM) / (options["factor"] if scaling == "linear" else 1.0)
    assert ours.tolist() == pytest.approx(frequencies.tolist(), rel=1e-6)
    if scaling == "llama3":
        plain = RotarySettings(base=BASE).inverse_frequencies(HEAD_DIM)
        share = (plain / ours).tolist()
        kept, divided = share.count(1.0), sum(x == pytest.approx(options["factor"]) for x in share)
        assert kept and divided and kept + divided < len(share), "all three bands are there"
    angles = POSITIONS.float()[:, None] * frequencies
    for found, right in zip(tables(settings), expected(angles), strict=True):
        # 20,000 radians have a last bit of 0.002 in fp32.
        assert torch.allclose(found, right, atol=5e-3)


@pytest.mark.parametrize(
    "settings",
    [{}, {"percent": 0.5}, {"scaling": "linear", "factor": 4.0}, {"scaling": "llama3", "factor": 8.0}],
    ids=["plain", "half", "linear", "llama3"],
)
def test_the_model_rotates_alike_before_cores_that_do_not(settings) -> None:
    from roll_batching.modeling.rotary import megatron_rotation

    ours = RotarySettings(base=BASE, **settings)
    options = megatron_rotation(ours)
    assert options.pop("position_embedding_type") == "rope"
    megatron = RotaryEmbedding(kv_channels=HEAD_DIM, use_cpu_initialization=True, **options)
    angles = megatron.get_freqs_non_repeated(int(POSITIONS.max()) + 1)[POSITIONS]
    assert all(torch.equal(a, b) for a, b in zip(tables(ours), expected(angles), strict=True))


def test_llama3_parameters_that_megatron_lacks_are_an_error() -> None:
    from roll_batching.modeling.rotary import megatron_rotation

    with pytest.raises(LayoutError, match="low_freq_factor=1, high_freq_factor=4"):
        megatron_rotation(RotarySettings(scaling="llama3", **OTHER))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("field", "value"),
    [("base", -1.0), ("percent", 5.0), ("factor", 0.0), ("rotated_factor", torch.inf), ("scaling", "ntk")],
)
def test_settings_that_give_no_angles_are_refused(field, value) -> None:
    with pytest.raises(LayoutError, match=rf"RotarySettings\.{field} is {value!r}; it must be "):
        RotarySettings(**{field: value})
