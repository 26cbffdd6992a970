"""Folders of tiny hybrids with a head that predicts further tokens, and what the head computes by its published formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import PreTrainedModel

HYBRID = "qwen3_5_text"


def make_head(arch: str = HYBRID, seed: int = 7, **overrides: Any) -> dict[str, torch.Tensor]:
    """Make random tensors of a head for `tiny.tiny_model` of the same arguments, by their names in a folder."""
    layer = tiny.tiny_model(arch, seed=seed, **{**overrides, "num_hidden_layers": 1, "layer_types": ["full_attention"]})
    prefix, hidden = "model.layers.0.", layer.config.hidden_size
    head = {f"mtp.layers.0.{name.removeprefix(prefix)}": x for name, x in layer.state_dict().items() if name.startswith(prefix)}
    generator = torch.Generator().manual_seed(seed)
    head["mtp.fc.weight"] = 0.2 * torch.randn(hidden, 2 * hidden, generator=generator)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        head[f"mtp.{name}.weight"] = 0.1 * torch.randn(hidden, generator=generator)
    return head


def save(folder: Path, model: PreTrainedModel, head: dict[str, torch.Tensor]) -> Path:
    """Write a folder of the model, the byte tokenizer and the head."""
    model.save_pretrained(folder)
    tiny.byte_tokenizer().save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file({**load_file(path), **{name: x.contiguous() for name, x in head.items()}}, path, {"format": "pt"})
    return folder


@torch.no_grad()
def compute(
    model: PreTrainedModel, head: dict[str, torch.Tensor], tokens: torch.Tensor, states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute logits [n, V] and states [n, H] of a head from tokens [n] and the model's last states [n, H] of the positions before them.

    The layer is that of transformers' own model, with one layer whose input is given.
    """
    kinds = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    config = type(model.config)(**{**model.config.to_dict(), **kinds})
    one = type(model)(config).eval()
    prefix = "mtp.layers.0."
    inside = {f"model.layers.0.{name.removeprefix(prefix)}": x for name, x in head.items() if name.startswith(prefix)}
    around = {name: x for name, x in model.state_dict().items() if ".layers." not in name}
    one.load_state_dict({**around, **inside, "model.norm.weight": head["mtp.norm.weight"]})
    embedded = model.get_input_embeddings()(tokens)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + model.config.rms_norm_eps).rsqrt()
        return x * scale * (1 + head[f"mtp.{name}.weight"])

    joined = torch.cat([norm(embedded, "pre_fc_norm_embedding"), norm(states, "pre_fc_norm_hidden")], dim=-1)
    x = F.linear(joined, head["mtp.fc.weight"])
    left = one.base_model(inputs_embeds=x[None]).last_hidden_state[0]
    return one.get_output_embeddings()(left), left


def make_foreseeable(context: float = 0.1) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """Make a model whose next token depends mostly on its last one, and a head that knows how: it reads the token, and ignores states.

    `context`: scale of what the model's layers add, which the head does not know; 0: the head is always right.
    """
    model = tiny.tiny_model(HYBRID)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                parameter.mul_(context)
        model.get_output_embeddings().weight.mul_(2)
    head, hidden = make_head(), model.config.hidden_size
    head["mtp.fc.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    head["mtp.pre_fc_norm_embedding.weight"] = torch.zeros(hidden)
    head["mtp.norm.weight"] = model.base_model.norm.weight.clone()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        head[f"mtp.layers.0.{name}.weight"] *= 0
    return model, head
