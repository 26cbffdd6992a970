"""Read Mamba-2 off a layer of transformers: its options, names of weights, and factors where it is beside attention (Falcon-H1).

See `weight_map_reader`. What a forward does is assumed from the names of its parts; the runner compares the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import nn

from ngramspec.backends.cpu.layer_weight_map import MambaNames, MatrixName, divide_rows
from ngramspec.backends.cpu.linear import CpuPackedLinear
from ngramspec.backends.cpu.llama_layers import MambaOptions

NameModule: TypeAlias = Callable[[str], MatrixName]  # of the module at a path


def read_mamba_options(mixer: Any) -> MambaOptions | None:
    """Return the options of a layer with Mamba-2; None for another kind of recurrence."""
    if not is_mamba(mixer) or mixer.activation not in ("silu", "swish"):
        return None
    sizes = mixer.num_heads, mixer.head_dim, mixer.n_groups, mixer.ssm_state_size, mixer.conv_kernel_size
    least, most = mixer.time_step_limit
    n_inner, normed = mixer.num_heads * mixer.head_dim, not isinstance(mixer.norm, nn.Identity)
    if normed and getattr(mixer.norm, "group_size", n_inner // getattr(mixer.norm, "n_groups", 1)) * mixer.n_groups != n_inner:
        return None
    if normed and getattr(mixer.norm, "norm_before_gate", False):
        return None
    factors = [1.0] * 5
    if (vector := getattr(mixer, "mup_vector", None)) is not None:  # Falcon-H1's
        n = mixer.n_groups * mixer.ssm_state_size
        factors = [float(vector.flatten()[at]) * mixer.ssm_in_multiplier for at in (0, n_inner, 2 * n_inner, 2 * n_inner + n, -1)]
    return MambaOptions(*sizes, float(least), float(most), normed, *factors)


def map_mamba(mixer: Any, at: str, names: NameModule) -> list[MatrixName] | None:
    """Return the names of the matrices of Mamba-2 at a path; None for another recurrence, or if one does not begin with a panel."""
    options, inputs, output = read_mamba_options(mixer), getattr(mixer, "in_proj", None), getattr(mixer, "out_proj", None)
    if options is None or not isinstance(inputs, CpuPackedLinear) or not isinstance(output, CpuPackedLinear):
        return None
    sizes = options.n_inner, options.n_channels, options.n_heads
    if inputs.out_features != sum(sizes) or (divided := divide_rows(names(f"{at}.in_proj"), sizes)) is None:
        return None
    return [*divided, names(f"{at}.out_proj")]


def name_mamba(at: str, names: NameModule, mixer: Any) -> MambaNames:
    conv, norm = names(f"{at}.conv1d"), None if isinstance(mixer.norm, nn.Identity) else f"{at}.norm.weight"
    return MambaNames(conv[0], conv[1], f"{at}.A_log", f"{at}.dt_bias", f"{at}.D", norm)


def is_mamba(mixer: Any) -> bool:
    return type(mixer).__name__.endswith(("MambaLayer", "Mamba2Mixer", "BambaMixer", "FalconH1Mixer"))


def get_score_scale(layer: Any, attn: Any) -> float:
    """Return the factor of queries times keys, those of Falcon-H1's layers among them."""
    factor = float(getattr(layer, "attention_in_multiplier", 1.0))
    return float(attn.scaling) * float(getattr(attn, "key_multiplier", 1.0)) * factor * factor


def adds_plainly(layer: Any, matrices: Sequence[MatrixName]) -> bool:
    """Return whether no bias lacks a factor: inputs of attention and of Mamba-2 beside it, and what attention adds, may have one."""
    inside = float(getattr(layer.mamba, "ssm_in_multiplier", 1.0))
    plain = inside == float(getattr(layer, "attention_in_multiplier", 1.0)) == float(getattr(layer, "attn_out_multiplier", 1.0)) == 1
    return plain or not any(matrix.bias for matrix in matrices)


def read_beside_scales(layer: Any) -> tuple[float, float]:
    """Return the factors of what attention and Mamba-2 beside it add, as Falcon-H1's layers have them."""
    given, of_attention, of_mamba = (float(getattr(layer, f"{name}_multiplier", 1.0)) for name in ("attention_in", "attn_out", "ssm_out"))
    return given * of_attention, of_mamba
