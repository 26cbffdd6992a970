"""Folders of models that also read images: their text decoders compute what the whole models compute of text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ngramspec.models.loader import load_model, open_model

TEXT = {
    "vocab_size": tiny.VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "bos_token_id": 254, "eos_token_id": 255, "pad_token_id": 255,
}  # fmt: skip
EYES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": TEXT | {"model_type": "gemma3_text", "sliding_window": 8},
        "vision_config": EYES | {"model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
    },
    "gemma4": {
        "text_config": TEXT
        | {"model_type": "gemma4_text", "sliding_window": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 0}
        | {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2},
        "vision_config": None,
    },
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
        "vision_config": EYES | {"model_type": "pixtral", "head_dim": 16},
    },
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("tied", [True, False])
def test_text_part_computes_what_the_whole_model_does(kind: str, tied: bool, tmp_path: Path) -> None:
    given = {name: value for name, value in MODELS[kind].items() if value is not None}
    given["text_config"] = given["text_config"] | {"tie_word_embeddings": tied}
    whole = transformers.AutoModelForImageTextToText.from_config(
        CONFIG_MAPPING[kind](**given, tie_word_embeddings=tied), dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in whole.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        for name, buffer in whole.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.5 + float(torch.rand(1, generator=generator)))
    whole.save_pretrained(tmp_path)
    tiny.byte_tokenizer().save_pretrained(tmp_path)
    told: list[str] = []
    mine = load_model(str(tmp_path), progress=told.append).model
    ids = torch.arange(40)[None] * 31 % 240
    with torch.inference_mode():
        assert torch.equal(mine(ids).logits, whole.eval()(input_ids=ids).logits)
    assert [message for message in told if "text alone" in message] == [
        f"{tmp_path} also reads images; here it reads and writes text alone"
    ]
    assert all(parameter.is_meta for parameter in open_model(str(tmp_path)).model.parameters()), "no copy in float32"
    assert not any("vision" in name for name, _ in mine.named_parameters())
