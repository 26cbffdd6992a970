"""Read Qwen3-Next (Coder-Next) as a Qwen3.5 mixture of experts: its layers are the same, with two projections where the other has four.

`in_proj_qkvz` has, for each head of keys, the rows of its query, its key, and its heads of values and their gates; `in_proj_ba` those of
the gates of update and decay. A config goes in; the config of the Qwen3.5 model and the rows of each projection come out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ngramspec.errors import UnsupportedModelError
from ngramspec.models.tensor_source import DividedTensor, RowParts, StoredTensor, count_divided_rows

MODEL_TYPE, TARGET_TYPE = "qwen3_next", "qwen3_5_moe_text"


def convert_config(config: dict[str, Any], spec: str) -> dict[str, Any]:
    """Return the config of the Qwen3.5 model that computes the same. Raises UnsupportedModelError."""
    import torch  # which a later start from a GGUF file does without

    from ngramspec.models.random_weights import empty_model

    if (method := config.pop("quantization_config", None)) is not None:
        raise UnsupportedModelError(f"{spec}: Qwen3-Next with weights quantised by {method!r:.80} is not read; accepted: a GGUF file of it")
    whole: dict[str, Any] = empty_model(config, torch.float32).config.to_dict()
    accepted = {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1}
    for name, value in accepted.items():
        if whole.pop(name, value) != value:
            raise UnsupportedModelError(f"{spec}: {name} is {config[name]!r:.80}; accepted for Qwen3-Next: {value!r}")
    n_keys, n_values = whole["linear_num_key_heads"], whole["linear_num_value_heads"]
    if n_keys < 1 or n_values % n_keys:
        raise UnsupportedModelError(f"{spec}: linear_num_value_heads is {n_values}; accepted: a multiple of linear_num_key_heads, {n_keys}")
    return {name: value for name, value in whole.items() if name != "transformers_version"} | {"model_type": TARGET_TYPE}


class ProjectionPart(NamedTuple):
    """Location of one of Qwen3.5's projections."""

    joined: str
    """The projection of Qwen3-Next that has its rows."""
    n_groups: int
    """Groups of these rows, one for each head of keys."""
    n_rows: int
    """Rows of all groups."""
    parts: RowParts
    """Rows within a group."""

    def divide_rows(self, stored: StoredTensor, spec: str) -> DividedTensor:
        """Return the rows. Raises UnsupportedModelError if the stored projection has another number of them than the config says."""
        if stored.shape[0] != self.n_rows:
            raise UnsupportedModelError(
                f"{spec}: config and weights disagree: {self.joined} is {list(stored.shape)} in the files; by the config it has "
                f"{self.n_rows} rows"
            )
        shape = count_divided_rows(self.n_groups, self.parts), *stored.shape[1:]
        return DividedTensor(kind=stored.kind, shape=shape, stored=stored, n_groups=self.n_groups, parts=self.parts)


def list_parts(config: Mapping[str, Any]) -> dict[str, ProjectionPart]:
    """Return where the projections of Qwen3.5's recurrent layers lie, by their names."""
    keys, values, n_groups = config["linear_key_head_dim"], config["linear_value_head_dim"], config["linear_num_key_heads"]
    n = config["linear_num_value_heads"] // n_groups
    gates = 2 * keys + n * values
    found: dict[str, tuple[str, RowParts]] = {
        "in_proj_qkv": ("in_proj_qkvz", ((0, keys), (keys, 2 * keys), (2 * keys, gates))),
        "in_proj_z": ("in_proj_qkvz", ((gates, gates + n * values),)),
        "in_proj_b": ("in_proj_ba", ((0, n),)),
        "in_proj_a": ("in_proj_ba", ((n, 2 * n),)),
    }
    n_rows = {"in_proj_qkvz": n_groups * (gates + n * values), "in_proj_ba": n_groups * 2 * n}
    return {name: ProjectionPart(joined, n_groups, n_rows[joined], parts) for name, (joined, parts) in found.items()}


def divide_projections(
    config: Mapping[str, Any], get: Callable[[str], StoredTensor | None], spec: str
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the projections of all recurrent layers by name; `get` returns one of Qwen3-Next's, or None. Raises as `divide_rows` does."""
    parts = list_parts(config)
    for i in range(config["num_hidden_layers"]):
        for name, part in parts.items():
            if (stored := get(f"model.layers.{i}.linear_attn.{part.joined}.weight")) is not None:
                yield f"model.layers.{i}.linear_attn.{name}.weight", part.divide_rows(stored, spec)
