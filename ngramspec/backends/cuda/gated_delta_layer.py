"""Take a layer with Gated DeltaNet (Qwen3.5's linear attention) from transformers' modules, and run such layers within a pass.

Knows modules and products; `gated_delta_kernels` computes the recurrence, `gpu_recurrent_pool` has the states.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ngramspec.backends.cuda.attention_metadata import RecurrentRows
from ngramspec.backends.cuda.gated_delta_kernels import TAPS, DeltaInputs, DeltaShape, DeltaWeights, DeltaWorkspace, run_recurrence
from ngramspec.backends.cuda.gpu_kv_pool import CudaPool
from ngramspec.backends.cuda.gpu_recurrent_pool import CudaRecurrentPool
from ngramspec.backends.cuda.packed import CudaPackedLinear
from ngramspec.backends.cuda.row_invariant_linear import LinearProduct
from ngramspec.errors import UnsupportedModelError

RECURRENT_LAYERS = ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")  # Names of the modules that are computed.


def read_delta_shape(model: PreTrainedModel) -> DeltaShape | None:
    """Return the sizes of a model's layers with Gated DeltaNet, None if it has none. Raises UnsupportedModelError for other recurrences."""
    mixers: list[Any] = [layer.linear_attn for layer in model.base_model.layers if hasattr(layer, "linear_attn")]  # type: ignore[union-attr]
    shapes = {_read_mixer(mixer, len(mixers)) for mixer in mixers}
    if len(shapes) > 1:
        raise UnsupportedModelError(f"{type(model).__name__}: recurrent layers differ in size")
    return shapes.pop() if shapes else None


def _read_mixer(mixer: Any, n_layers: int) -> DeltaShape:
    n_keys, n_heads, key_dim, value_dim = mixer.num_k_heads, mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim
    if type(mixer).__name__ not in RECURRENT_LAYERS or mixer.conv_kernel_size != TAPS or mixer.conv1d.bias is not None:
        raise UnsupportedModelError(f"{type(mixer).__name__}: not Qwen3.5's form of Gated DeltaNet with a convolution over {TAPS} tokens")
    if key_dim & (key_dim - 1) or n_heads % n_keys:
        raise UnsupportedModelError(f"{type(mixer).__name__}: {n_heads} heads of values, {n_keys} heads of keys of size {key_dim}; on CUDA "
                                    "that size must be a power of two")  # fmt: skip
    n_channels = 2 * n_keys * key_dim + n_heads * value_dim
    width, n_gates = n_channels + n_heads * value_dim, 2 * n_heads
    packed = {isinstance(getattr(mixer, f"in_proj_{name}"), CudaPackedLinear) for name in ("qkv", "z", "b", "a")}
    is_one = len(packed) == 1
    return DeltaShape(n_layers, n_keys, n_heads, key_dim, value_dim, n_channels, width + n_gates * is_one, n_gates + width * is_one)


class GatedDeltaLayer:
    """A layer's weights. Its output projection is the decoder's."""

    def __init__(self, mixer: Any, shape: DeltaShape, inputs: LinearProduct, gates: LinearProduct | None) -> None:
        """Take over a module. `inputs`: product for the convolution's inputs, the gates z and, if `gates` is None, the gates b and a."""
        self.shape, self.inputs, self.gates, self.eps = shape, inputs, gates, float(mixer.norm.variance_epsilon)
        rates = torch.stack([-mixer.A_log.detach().float().exp(), mixer.dt_bias.detach().float()])
        conv = mixer.conv1d.weight.detach().reshape(shape.n_channels, TAPS).contiguous()
        self.weights = DeltaWeights(conv, rates, mixer.norm.weight.detach())

    def multiply(self, normed: torch.Tensor) -> DeltaInputs:
        rows = self.inputs(normed)
        return DeltaInputs(rows, rows[:, self.shape.row_width - 2 * self.shape.n_heads :] if self.gates is None else self.gates(normed))


class RecurrentPass:
    """The recurrent layers of one pass, run in their order."""

    def __init__(self, pool: CudaPool, rows: RecurrentRows, shape: DeltaShape, x: torch.Tensor) -> None:
        """`x` [R, any] has the model's dtype and device."""
        assert isinstance(pool, CudaRecurrentPool)
        self._states, self._rows, self._shape = iter(pool.states), rows, shape
        self._work = DeltaWorkspace(shape, rows, x.dtype, x.device)

    def run(self, layer: GatedDeltaLayer, normed: torch.Tensor) -> torch.Tensor:
        """Compute the heads' outputs [R, n_heads · V] from the normed rows [R, H]."""
        x = layer.multiply(normed)
        return run_recurrence(x, layer.weights, layer.eps, next(self._states), self._rows, self._shape, self._work)
