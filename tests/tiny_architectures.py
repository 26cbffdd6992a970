"""Tiny GGUF files of every architecture, as llama.cpp's loader wants them: eight layers of every kind that the architecture has.

Names, shapes and keys are written down from llama.cpp's side, so that a wrong row of our table shows. Weights are float32 and the same for
the same name on every machine. `python tests/tiny_architectures.py FOLDER` writes them all, for `tools.record_logits`.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, WINDOW, VOCAB = 8, 64, 96, 4, 2, 16, 8, 300
BOS, EOS = 298, 299
Shapes = dict[str, tuple[int, ...]]

_Q, _KV = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
_SPLIT: Shapes = {"attn_q.weight": (_Q, HIDDEN), "attn_k.weight": (_KV, HIDDEN), "attn_v.weight": (_KV, HIDDEN)}
_OUT: Shapes = {"attn_output.weight": (HIDDEN, _Q)}
_GATED: Shapes = {"ffn_gate.weight": (INNER, HIDDEN), "ffn_up.weight": (INNER, HIDDEN), "ffn_down.weight": (HIDDEN, INNER)}
_PLAIN: Shapes = {"ffn_up.weight": (INNER, HIDDEN), "ffn_down.weight": (HIDDEN, INNER)}
_FUSED: Shapes = {"ffn_up.weight": (2 * INNER, HIDDEN), "ffn_down.weight": (HIDDEN, INNER)}
_QKV_BIAS: Shapes = {"attn_q.bias": (_Q,), "attn_k.bias": (_KV,), "attn_v.bias": (_KV,)}
_APART: Shapes = {"attn_q_norm.weight": (HEADS, HEAD_DIM), "attn_k_norm.weight": (KV_HEADS, HEAD_DIM)}
_HEAD_NORMS: Shapes = {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}


def _norms(*names: str) -> Shapes:
    return {f"{name}.weight": (HIDDEN,) for name in names}


_PRE, _POST = _norms("attn_norm", "ffn_norm"), _norms("post_attention_norm", "post_ffw_norm")
_LLAMA = _PRE | _SPLIT | _OUT | _GATED
_SWA = {"attention.sliding_window": WINDOW}
_LAYER_NORM: dict[str, Any] = {"attention.layer_norm_epsilon": 1e-5}
_WIDE = {"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM}
_YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}
_MINISTRAL = _YARN | {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.1}
_LONG_ROPE: dict[str, Any] = {
    "rope.dimension_count": 3 * HEAD_DIM // 4, "rope.scaling.attn_factor": 1.2, "rope.scaling.type": "longrope",
}  # fmt: skip
_GRANITE = {"attention.scale": 0.2, "embedding_scale": 3.0, "residual_scale": 0.3, "logit_scale": 2.0}
_LAST_IS_FULL = [(i + 1) % 4 != 0 for i in range(LAYERS)]
_NORM_BIAS: Shapes = {f"{name}.bias": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
_STAR_BIAS: Shapes = {f"{name}.bias": (HIDDEN,) for name in ("attn_norm", "ffn_norm", "attn_output", "ffn_down")} | {
    "ffn_up.bias": (INNER,)
}

_N_EXPERTS, _WIDTH = 8, 32  # experts, and outputs of one's first matrices
_EXPERTS: Shapes = {
    "ffn_gate_inp.weight": (_N_EXPERTS, HIDDEN), "ffn_gate_exps.weight": (_N_EXPERTS, _WIDTH, HIDDEN),
    "ffn_up_exps.weight": (_N_EXPERTS, _WIDTH, HIDDEN), "ffn_down_exps.weight": (_N_EXPERTS, HIDDEN, _WIDTH),
}  # fmt: skip
_SHARED: Shapes = {
    "ffn_gate_inp_shexp.weight": (HIDDEN,), "ffn_gate_shexp.weight": (INNER, HIDDEN), "ffn_up_shexp.weight": (INNER, HIDDEN),
    "ffn_down_shexp.weight": (HIDDEN, INNER),
}  # fmt: skip
_GPT_OSS: Shapes = (
    _norms("attn_norm", "post_attention_norm") | _SPLIT | _QKV_BIAS | _OUT | _EXPERTS
    | {"attn_output.bias": (HIDDEN,), "attn_sinks.weight": (HEADS,), "ffn_gate_inp.bias": (_N_EXPERTS,)}
    | {f"ffn_{name}_exps.bias": (_N_EXPERTS, n) for name, n in (("gate", _WIDTH), ("up", _WIDTH), ("down", HIDDEN))}
)  # fmt: skip
_CHOICE = {"expert_count": _N_EXPERTS, "expert_used_count": 3}
_NARROW = {"feed_forward_length": _WIDTH}
_ATTENTION = _PRE | _SPLIT | _OUT

# Gemma 4: layers 3 and 7 see all; they have wider heads, half as many keys, and values that are their keys.
_WIDER = 2 * HEAD_DIM
_GEMMA4: Shapes = _PRE | _POST | _SPLIT | _OUT | _GATED | _HEAD_NORMS | {"layer_output_scale.weight": (1,)}
_GLOBAL: Shapes = {
    "attn_q.weight": (HEADS * _WIDER, HIDDEN), "attn_k.weight": (_WIDER, HIDDEN), "attn_output.weight": (HIDDEN, HEADS * _WIDER),
    "attn_q_norm.weight": (_WIDER,), "attn_k_norm.weight": (_WIDER,),
}  # fmt: skip
_GEMMA4_KEYS: dict[str, Any] = _SWA | {
    "attention.sliding_window_pattern": _LAST_IS_FULL, "attention.key_length": _WIDER, "attention.value_length": _WIDER,
    "attention.key_length_swa": HEAD_DIM, "attention.value_length_swa": HEAD_DIM, "rope.dimension_count": _WIDER,
    "rope.dimension_count_swa": HEAD_DIM, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "final_logit_softcapping": 10.0,
    "attention.head_count_kv": [KV_HEADS if local else 1 for local in _LAST_IS_FULL], "embedding_length_per_layer_input": 0,
    "attention.shared_kv_layers": 0,
}  # fmt: skip
_PER_LAYER: Shapes = {"inp_gate.weight": (16, HIDDEN), "proj.weight": (HIDDEN, 16)} | _norms("post_norm")
_SHARING: dict[str, Any] = {
    "attention.shared_kv_layers": 4, "embedding_length_per_layer_input": 16, "feed_forward_length": [INNER] * 4 + [2 * INNER] * 4,
}  # fmt: skip
_GEMMA4_EXPERTS: Shapes = _norms("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2") | {
    "ffn_gate_inp.weight": (_N_EXPERTS, HIDDEN), "ffn_gate_inp.scale": (HIDDEN,), "ffn_down_exps.scale": (_N_EXPERTS,),
    "ffn_gate_up_exps.weight": (_N_EXPERTS, 2 * _WIDTH, HIDDEN), "ffn_down_exps.weight": (_N_EXPERTS, HIDDEN, _WIDTH),
}  # fmt: skip
# Gemma 3n in sizes that llama.cpp does not read; it divides variances of an MLP by one less, which matters less the wider that is.
_ALTUP_WIDTH, _LAUREL, _SPARSE, _N_ALTUP = 256, 64, 1024, 4
_GEMMA3N: Shapes = _norms("post_norm", "altup_router_norm", "laurel_post_norm") | {
    "ffn_gate.weight": (_SPARSE, HIDDEN), "ffn_up.weight": (_SPARSE, HIDDEN), "ffn_down.weight": (HIDDEN, _SPARSE),
    "inp_gate.weight": (_ALTUP_WIDTH, HIDDEN), "proj.weight": (HIDDEN, _ALTUP_WIDTH), "laurel_l.weight": (_LAUREL, HIDDEN),
    "laurel_r.weight": (HIDDEN, _LAUREL), "altup_correct_coef.weight": (_N_ALTUP, _N_ALTUP), "altup_correct_scale.weight": (HIDDEN,),
    "altup_predict_coef.weight": (_N_ALTUP**2, _N_ALTUP), "altup_router.weight": (_N_ALTUP, HIDDEN),
}  # fmt: skip

_STATE, _KEY_HEADS = 16, 2  # numbers of a head of keys and of values, heads of keys
_RECURRENT: Shapes = {
    "attn_qkv.weight": (2 * _KEY_HEADS * _STATE + _Q, HIDDEN), "ssm_conv1d.weight": (2 * _KEY_HEADS * _STATE + _Q, 4),
    "attn_gate.weight": (_Q, HIDDEN),
    "ssm_dt.bias": (HEADS,), "ssm_a": (HEADS,), "ssm_beta.weight": (HEADS, HIDDEN), "ssm_alpha.weight": (HEADS, HIDDEN),
    "ssm_norm.weight": (_STATE,), "ssm_out.weight": (HIDDEN, _Q),
}  # fmt: skip
_JOINED_GATES: Shapes = {name: shape for name, shape in _RECURRENT.items() if name not in ("ssm_beta.weight", "ssm_alpha.weight")} | {
    "ssm_ba.weight": (2 * HEADS, HIDDEN)
}
_JOINED: Shapes = {name: shape for name, shape in _JOINED_GATES.items() if not name.startswith("attn")} | {
    "ssm_in.weight": (2 * (_KEY_HEADS * _STATE + _Q), HIDDEN)
}
_GATED_ATTENTION: Shapes = _SPLIT | {"attn_q.weight": (2 * _Q, HIDDEN)} | _OUT | _HEAD_NORMS
_SSM = {
    "ssm.conv_kernel": 4, "ssm.inner_size": _Q, "ssm.state_size": _STATE, "ssm.time_step_rank": HEADS, "ssm.group_count": _KEY_HEADS,
    "rope.dimension_count": 8, "rope.dimension_sections": [2, 1, 1, 0],
}  # fmt: skip
# LFM2: every fourth layer is attention, the others have a short convolution.
_TAPS = 3
_SHORT_CONV: Shapes = {
    "shortconv.in_proj.weight": (3 * HIDDEN, HIDDEN), "shortconv.conv.weight": (HIDDEN, _TAPS),
    "shortconv.out_proj.weight": (HIDDEN, HIDDEN),
}  # fmt: skip
_EVERY_FOURTH = {"attention.head_count_kv": [KV_HEADS if i % 4 == 3 else 0 for i in range(LAYERS)]}  # layers with keys
_LFM2_KEYS = {"shortconv.l_cache": _TAPS} | _EVERY_FOURTH
# Granite 4: every fourth layer is attention, the others have Mamba-2.
_INNER, _MAMBA_GROUPS = 2 * HIDDEN, 2
_CHANNELS = _INNER + 2 * _MAMBA_GROUPS * _STATE
_MAMBA: Shapes = {
    "ssm_in.weight": (_INNER + _CHANNELS + 2 * HEADS, HIDDEN), "ssm_conv1d.weight": (_CHANNELS, 4), "ssm_conv1d.bias": (_CHANNELS,),
    "ssm_dt.bias": (2 * HEADS,), "ssm_a": (2 * HEADS, 1), "ssm_d": (2 * HEADS, 1),
    "ssm_norm.weight": (_MAMBA_GROUPS, _INNER // _MAMBA_GROUPS), "ssm_out.weight": (HIDDEN, _INNER),
}  # fmt: skip
_ONE_GROUP: Shapes = {
    "ssm_in.weight": (_INNER + _CHANNELS - 2 * _STATE + 2 * HEADS, HIDDEN), "ssm_conv1d.weight": (_CHANNELS - 2 * _STATE, 4),
    "ssm_conv1d.bias": (_CHANNELS - 2 * _STATE,), "ssm_norm.weight": (1, _INNER),
}  # fmt: skip
_MAMBA_KEYS = {
    "ssm.conv_kernel": 4, "ssm.inner_size": _INNER, "ssm.state_size": _STATE, "ssm.time_step_rank": 2 * HEADS,
    "ssm.group_count": _MAMBA_GROUPS,
}  # fmt: skip
_GRANITE4_KEYS = _GRANITE | _MAMBA_KEYS | _EVERY_FOURTH
# Falcon-H1: every layer has Mamba-2 beside attention.
_FALCON_H1: Shapes = _norms("attn_norm") | {"ffn_norm": (HIDDEN,)} | _SPLIT | _OUT | _GATED | _MAMBA
# Nemotron-H: a layer is Mamba-2, attention or an MLP.
_NEMOTRON_H = ["mamba", "mlp", "mamba", "attention", "mlp", "mamba", "mamba", "mlp"]
_UNGATED_EXPERTS: Shapes = {name: shape for name, shape in _EXPERTS.items() if "gate_exps" not in name} | {
    "exp_probs_b.bias": (_N_EXPERTS,), "ffn_up_shexp.weight": (INNER, HIDDEN), "ffn_down_shexp.weight": (HIDDEN, INNER),
}  # fmt: skip
_MIXERS: dict[str, Shapes] = {"mamba": _MAMBA, "mlp": _PLAIN | _UNGATED_EXPERTS, "attention": _SPLIT | _OUT}
_NEMOTRON_H_KEYS = _MAMBA_KEYS | _WIDE | {
    "attention.head_count_kv": [KV_HEADS if kind == "attention" else 0 for kind in _NEMOTRON_H],
    "feed_forward_length": [INNER if kind == "mlp" else 0 for kind in _NEMOTRON_H], "attention.layer_norm_epsilon": 1e-5,
}  # fmt: skip
# DeepSeek-V2 and what has its form: the first layer has an MLP, the others experts, two of them shared.
_PLAIN_KEY, _TURNED, _VALUE, _RANK = 32, 16, 48, 32
_LATENT: Shapes = _PRE | {
    "attn_q.weight": (HEADS * (_PLAIN_KEY + _TURNED), HIDDEN), "attn_kv_a_mqa.weight": (_RANK + _TURNED, HIDDEN),
    "attn_kv_a_norm.weight": (_RANK,), "attn_k_b.weight": (HEADS, _RANK, _PLAIN_KEY), "attn_v_b.weight": (HEADS, _VALUE, _RANK),
    "attn_output.weight": (HIDDEN, HEADS * _VALUE),
}  # fmt: skip
_TWO_STEPS: Shapes = {name: shape for name, shape in _LATENT.items() if name != "attn_q.weight"} | {
    "attn_q_a.weight": (2 * _RANK, HIDDEN), "attn_q_a_norm.weight": (2 * _RANK,),
    "attn_q_b.weight": (HEADS * (_PLAIN_KEY + _TURNED), 2 * _RANK),
}  # fmt: skip
_OLDER: Shapes = {name: shape for name, shape in _LATENT.items() if name not in ("attn_k_b.weight", "attn_v_b.weight")} | {
    "attn_kv_b.weight": (HEADS * (_PLAIN_KEY + _VALUE), _RANK)
}
_BESIDE: Shapes = _EXPERTS | {
    "ffn_gate_shexp.weight": (2 * _WIDTH, HIDDEN), "ffn_up_shexp.weight": (2 * _WIDTH, HIDDEN),
    "ffn_down_shexp.weight": (HIDDEN, 2 * _WIDTH),
}  # fmt: skip
_ONE_BESIDE: Shapes = {
    "ffn_gate_shexp.weight": (_WIDTH, HIDDEN), "ffn_up_shexp.weight": (_WIDTH, HIDDEN), "ffn_down_shexp.weight": (HIDDEN, _WIDTH),
}  # fmt: skip
_CORRECTION: Shapes = {"exp_probs_b.bias": (_N_EXPERTS,)}
_DEEPSEEK2_KEYS: dict[str, Any] = _CHOICE | {
    "attention.q_lora_rank": 0, "attention.kv_lora_rank": _RANK, "attention.key_length": _RANK + _TURNED, "attention.value_length": _RANK,
    "attention.key_length_mla": _PLAIN_KEY + _TURNED, "attention.value_length_mla": _VALUE, "attention.head_count_kv": 1,
    "rope.dimension_count": _TURNED, "expert_feed_forward_length": _WIDTH, "expert_shared_count": 2, "leading_dense_block_count": 1,
    "attention.layer_norm_rms_epsilon": 1e-6,
}  # fmt: skip
_OLDER_KEYS = {key: value for key, value in _DEEPSEEK2_KEYS.items() if not key.endswith("_mla")} | {
    "attention.key_length": _PLAIN_KEY + _TURNED, "attention.value_length": _VALUE, "attention.head_count_kv": HEADS,
}  # fmt: skip
_MINICPM3 = {
    name: shape for name, shape in (_OLDER | _TWO_STEPS).items() if name not in ("attn_q.weight", "attn_k_b.weight", "attn_v_b.weight")
} | _GATED
_MINICPM3_KEYS: dict[str, Any] = {
    "attention.q_lora_rank": 2 * _RANK, "attention.kv_lora_rank": _RANK, "attention.key_length": _PLAIN_KEY + _TURNED,
    "rope.dimension_count": _TURNED, "attention.head_count_kv": HEADS,
}  # fmt: skip
_BY_SIGMOID = {"attention.q_lora_rank": 2 * _RANK, "expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5}
_GLM4_MOE_KEYS = _CHOICE | _WIDE | {
    "rope.dimension_count": HEAD_DIM // 2, "expert_feed_forward_length": _WIDTH, "expert_shared_count": 2, "leading_dense_block_count": 1,
    "expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5,
}  # fmt: skip
_MIMO2: Shapes = _PRE | _GATED | _EXPERTS | _CORRECTION | {
    "attn_q.weight": (HEADS * (HEAD_DIM + 8), HIDDEN), "attn_k.weight": (KV_HEADS * (HEAD_DIM + 8), HIDDEN),
    "attn_v.weight": (_KV, HIDDEN), "attn_output.weight": (HIDDEN, _Q), "attn_sinks.weight": (HEADS,),
}  # fmt: skip
_MIMO2_KEYS: dict[str, Any] = _CHOICE | _SWA | {
    "attention.key_length": HEAD_DIM + 8, "attention.value_length": HEAD_DIM, "rope.dimension_count": HEAD_DIM // 2,
    "attention.head_count_kv": [KV_HEADS * (1 + each) for each in _LAST_IS_FULL], "attention.sliding_window_pattern": _LAST_IS_FULL,
    "rope.freq_base": 5e6, "rope.freq_base_swa": 1e4, "attention.value_scale": 0.707, "expert_feed_forward_length": _WIDTH,
    "leading_dense_block_count": 1,
}  # fmt: skip
_LAGUNA_KEYS = _CHOICE | _WIDE | {
    "rope.dimension_count": HEAD_DIM // 2, "expert_feed_forward_length": _WIDTH, "expert_shared_feed_forward_length": _WIDTH,
    "leading_dense_block_count": 1, "expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5,
}  # fmt: skip
# Of four layers the first sees all; the others have twice as many heads.
_LAGUNA_WINDOWS = _SWA | _YARN | {
    "attention.head_count": [HEADS if i % 4 == 0 else 2 * HEADS for i in range(LAYERS)], "rope.freq_base": 5e5, "rope.freq_base_swa": 1e4,
    "rope.dimension_count_swa": HEAD_DIM,
}  # fmt: skip
_NEXTN: Shapes = {
    "nextn.eh_proj.weight": (HIDDEN, 2 * HIDDEN), "nextn.enorm.weight": (HIDDEN,), "nextn.hnorm.weight": (HIDDEN,),
    "nextn.shared_head_norm.weight": (HIDDEN,),
}  # fmt: skip
_OF_IMAGES: dict[str, Any] = {"rope.dimension_sections": [3, 3, 2, 0], "n_deepstack_layers": 3}
# By a name of the case: the architecture, the tensors of a layer, further keys (whole ones behind a slash), and whether the head is a
# matrix of its own.
CASES: dict[str, tuple[str, Shapes, dict[str, Any], bool]] = {
    "afmoe": (
        "afmoe", _ATTENTION | _POST | {"attn_gate.weight": (_Q, HIDDEN)} | _HEAD_NORMS | _GATED | _EXPERTS | _ONE_BESIDE | _CORRECTION,
        _CHOICE | _WIDE | _SWA | {
            "expert_feed_forward_length": _WIDTH, "expert_shared_count": 1, "leading_dense_block_count": 1, "expert_gating_func": 2,
            "expert_weights_norm": True, "expert_weights_scale": 2.5,
        }, True,
    ),
    "llama": ("llama", _LLAMA, {}, True),
    "llama, biases, linear": (
        "llama",
        _LLAMA | _QKV_BIAS
        | {f"{name}.bias": (n,) for name, n in (("attn_output", HIDDEN), ("ffn_gate", INNER), ("ffn_up", INNER), ("ffn_down", HIDDEN))},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        False,
    ),
    "llama, fused": ("llama", _PRE | {"attn_qkv.weight": (_Q + 2 * _KV, HIDDEN)} | _OUT | _GATED, {}, True),
    "seed_oss, fused": (
        "seed_oss",
        _norms("attn_norm", "post_attention_norm") | {"attn_qkv.weight": (_Q + 2 * _KV, HIDDEN), "attn_qkv.bias": (_Q + 2 * _KV,)}
        | _OUT | _GATED, _WIDE, True,
    ),
    "mistral3": ("mistral3", _LLAMA, {}, True),
    "mistral3, yarn alone": ("mistral3", _LLAMA, _YARN | _WIDE | {"rope.scaling.yarn_log_multiplier": 0.5}, True),
    "internlm2": ("internlm2", _LLAMA, {"vocab_size": VOCAB + 20}, True),
    "exaone": ("exaone", _LLAMA, {}, True),
    "minicpm": ("minicpm", _LLAMA, {"embedding_scale": 12.0, "residual_scale": 0.3, "logit_scale": 4.0}, False),
    "minicpm, long": (
        "minicpm", _LLAMA,
        {"embedding_scale": 12.0, "residual_scale": 0.3, "logit_scale": 4.0, "rope.dimension_count": HEAD_DIM}
        | {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 32}, True,
    ),
    "chatglm": (
        "chatglm", _PRE | {"attn_qkv.weight": (_Q + 2 * _KV, HIDDEN), "attn_qkv.bias": (_Q + 2 * _KV,)} | _OUT | _FUSED,
        {"rope.dimension_count": HEAD_DIM // 2}, True,
    ),
    "mistral3, yarn": ("mistral3", _LLAMA, _MINISTRAL | _WIDE, True),
    "smollm3": ("smollm3", _LLAMA, {}, False),
    "granite": ("granite", _LLAMA, _GRANITE, False),
    "seed_oss": ("seed_oss", _norms("attn_norm", "post_attention_norm") | _SPLIT | _QKV_BIAS | _OUT | _GATED, _WIDE, True),
    **{
        f"glm4{name}": ("glm4", _PRE | _POST | _SPLIT | _QKV_BIAS | _OUT | _FUSED, {"rope.dimension_count": HEAD_DIM // 2} | sections, True)
        for name, sections in (("", {}), (", halves", {"rope.dimension_sections": [2, 1, 1, 0]}))
    },
    **{
        f"glm4moe{name}": (
            "glm4moe", _norms("attn_norm", "post_attention_norm") | _SPLIT | _QKV_BIAS | norms | _OUT | _GATED | _BESIDE | _CORRECTION,
            _GLM4_MOE_KEYS | more, True,
        )
        for name, norms, more in (("", {}, {}), (", normed heads", _HEAD_NORMS, {"block_count": LAYERS + 1, "nextn_predict_layers": 1}))
    },
    "bailingmoe": (
        "bailingmoe", _ATTENTION | _BESIDE,
        _CHOICE | {
            "rope.dimension_count": HEAD_DIM,
            "expert_feed_forward_length": _WIDTH, "expert_shared_count": 2, "expert_weights_norm": True, "expert_weights_scale": 1.0,
        }, True,
    ),
    "bailingmoe2": (
        "bailingmoe2", _PRE | {"attn_qkv.weight": (_Q + 2 * _KV, HIDDEN)} | _HEAD_NORMS | _OUT | _GATED | _BESIDE | _CORRECTION,
        _GLM4_MOE_KEYS | {"expert_group_count": 4, "expert_group_used_count": 2, "expert_shared_feed_forward_length": _WIDTH}, True,
    ),
    "exaone-moe": (
        "exaone-moe", _PRE | _SPLIT | _HEAD_NORMS | _OUT | _GATED | _EXPERTS | _ONE_BESIDE | _CORRECTION,
        {key: value for key, value in _GLM4_MOE_KEYS.items() if key != "rope.dimension_count"} | _SWA
        | {"expert_shared_count": 1, "attention.sliding_window_pattern": _LAST_IS_FULL}, True,
    ),
    **{
        f"laguna{name}": ("laguna", _ATTENTION | _HEAD_NORMS | gate | _GATED | _EXPERTS | _ONE_BESIDE | _CORRECTION, keys, True)
        for name, gate, keys in (
            ("", {"attn_gate.weight": (HEADS, HIDDEN)}, _LAGUNA_KEYS | _LAGUNA_WINDOWS),
            (", full", {"attn_gate.weight": (_Q, HIDDEN)}, _LAGUNA_KEYS | {"leading_dense_block_count": 2}),
        )
    },
    "mimo2": ("mimo2", _MIMO2, _MIMO2_KEYS, True),
    "dots1": (
        "dots1",
        _PRE | _SPLIT | {f"attn_{name}.weight": (_Q, HIDDEN) for name in "kv"} | _HEAD_NORMS | _OUT | _GATED | _BESIDE | _CORRECTION,
        {key: value for key, value in _GLM4_MOE_KEYS.items() if key != "rope.dimension_count"} | {"attention.head_count_kv": HEADS}, True,
    ),
    "olmo": ("olmo", _SPLIT | _OUT | _GATED, _LAYER_NORM | {"attention.clamp_kqv": 1.5}, True),
    **{
        f"gptneox{name}": (
            "gptneox", _PRE | {"attn_qkv.weight": (3 * _Q, HIDDEN), "attn_qkv.bias": (3 * _Q,)} | _OUT | _PLAIN | _STAR_BIAS,
            _LAYER_NORM | {"rope.dimension_count": HEAD_DIM // 4, "attention.head_count_kv": HEADS, "use_parallel_residual": parallel},
            True,
        )
        for name, parallel in (("", True), (", in turns", False))
    },
    "olmo2": ("olmo2", _POST | _SPLIT | _OUT | _GATED | {"attn_q_norm.weight": (_Q,), "attn_k_norm.weight": (_KV,)}, {}, True),
    "olmo3": (
        "olmo2",
        _POST | _SPLIT | _OUT | _GATED | {"attn_q_norm.weight": (_Q,), "attn_k_norm.weight": (_KV,)},
        _SWA | {"attention.sliding_window_pattern": _LAST_IS_FULL},
        True,
    ),
    "olmo3, yarn": (
        "olmo2",
        _POST | _SPLIT | _OUT | _GATED | {"attn_q_norm.weight": (_Q,), "attn_k_norm.weight": (_KV,)},
        _SWA | _YARN,
        True,
    ),
    "exaone4": ("exaone4", _POST | _SPLIT | _OUT | _GATED | _HEAD_NORMS, {}, True),
    "cohere2": ("cohere2", _norms("attn_norm") | _SPLIT | _OUT | _GATED, _SWA | _LAYER_NORM | {"logit_scale": 0.5}, False),
    "command-r": ("command-r", _norms("attn_norm") | _SPLIT | _OUT | _GATED, _LAYER_NORM | {"logit_scale": 0.5}, False),
    "command-r, normed heads": (  # which files with 64 layers have
        "command-r", _norms("attn_norm") | _SPLIT | _OUT | _GATED | _APART, _LAYER_NORM | {"logit_scale": 0.5, "block_count": 64}, False,
    ),
    "ernie4_5": ("ernie4_5", _LLAMA, {}, False),
    "ernie4_5-moe": (
        "ernie4_5-moe", _LLAMA | _BESIDE | _CORRECTION,
        _CHOICE | {
            "expert_feed_forward_length": _WIDTH, "expert_shared_feed_forward_length": 2 * _WIDTH, "leading_dense_block_count": 1,
            "interleave_moe_layer_step": 1,
        }, False,
    ),
    "hunyuan-moe": (
        "hunyuan-moe", _ATTENTION | _HEAD_NORMS | _EXPERTS | _ONE_BESIDE, _CHOICE | _NARROW | {"expert_feed_forward_length": _WIDTH}, True,
    ),
    "minimax-m2": (
        "minimax-m2", _ATTENTION | {"attn_q_norm.weight": (_Q,), "attn_k_norm.weight": (_KV,)} | _EXPERTS | _CORRECTION,
        _CHOICE | _WIDE | _NARROW
        | {"rope.dimension_count": HEAD_DIM // 2, "expert_feed_forward_length": _WIDTH, "expert_gating_func": 2}, True,
    ),
    "hunyuan-dense": ("hunyuan-dense", _LLAMA | _HEAD_NORMS, {}, False),
    "apertus": (
        "apertus", _PRE | _SPLIT | _OUT | _PLAIN | _HEAD_NORMS,
        {f"/xielu.{key}": [value + 0.05 * i for i in range(LAYERS)] for key, value in (("alpha_n", 0.1), ("alpha_p", -0.3))}
        | {"/xielu.beta": [0.5] * LAYERS, "/xielu.eps": [-1e-6] * LAYERS}, True,
    ),
    "arcee": ("arcee", _PRE | _SPLIT | _OUT | _PLAIN, {}, True),
    "gemma": ("gemma", _LLAMA, _WIDE, False),
    "gemma2": (
        "gemma2",
        _PRE | _POST | _SPLIT | _OUT | _GATED,
        _WIDE | _SWA | {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0},
        False,
    ),
    "gemma3": ("gemma3", _PRE | _POST | _SPLIT | _OUT | _GATED | _HEAD_NORMS, _WIDE | _SWA | {"rope.freq_base": 1e6}, False),
    "gemma3, scaled": (
        "gemma3",
        _PRE | _POST | _SPLIT | _OUT | _GATED | _HEAD_NORMS,
        _WIDE | _SWA | {"rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        False,
    ),
    "gemma3n": (
        "gemma3n", _PRE | _POST | _SPLIT | _OUT | _HEAD_NORMS | _GEMMA3N,
        _WIDE | _SWA | {
            "block_count": 25, "rope.freq_base": 1e6, "feed_forward_length": _SPARSE, "embedding_length_per_layer_input": _ALTUP_WIDTH,
        }, False,
    ),
    "gemma4": ("gemma4", _GEMMA4, _GEMMA4_KEYS, False),
    "gemma4, shared": ("gemma4", _GEMMA4 | _PER_LAYER, _GEMMA4_KEYS | _SHARING, False),
    "gemma4, experts": ("gemma4", _GEMMA4 | _GEMMA4_EXPERTS, _GEMMA4_KEYS | _CHOICE | {"expert_feed_forward_length": _WIDTH}, False),
    "phi3": ("phi3", _PRE | {"attn_qkv.weight": (_Q + 2 * _KV, HIDDEN)} | _OUT | _FUSED, {}, True),
    "phi3, long": (
        "phi3", _PRE | {"attn_qkv.weight": (_Q + 2 * _KV, HIDDEN)} | _OUT | _FUSED,
        _LONG_ROPE | {"rope.scaling.original_context_length": 32}, False,
    ),
    "phi3, short": (
        "phi3", _PRE | {"attn_qkv.weight": (_Q + 2 * _KV, HIDDEN)} | _OUT | _FUSED,
        _LONG_ROPE | {"rope.scaling.original_context_length": 256}, False,
    ),
    "nemotron": (
        "nemotron", _PRE | _SPLIT | _OUT | _PLAIN | _NORM_BIAS,
        _LAYER_NORM | {"rope.dimension_count": HEAD_DIM // 2}, True,
    ),
    "starcoder2": ("starcoder2", _PRE | _SPLIT | _QKV_BIAS | _OUT | _PLAIN | _STAR_BIAS, _LAYER_NORM, False),
    "codeshell": ("codeshell", _PRE | _SPLIT | _QKV_BIAS | _OUT | _PLAIN | _STAR_BIAS, _LAYER_NORM, True),
    "maincoder": ("maincoder", _LLAMA | _HEAD_NORMS, _WIDE, False),
    "mellum": (
        "mellum", _ATTENTION | _HEAD_NORMS | _EXPERTS,
        _CHOICE | _WIDE | _SWA | _YARN
        | {"expert_feed_forward_length": _WIDTH, "attention.sliding_window_pattern": _LAST_IS_FULL, "rope.freq_base": 5e5}, True,
    ),
    "phi2": (
        "phi2",
        _norms("attn_norm") | _SPLIT | {f"attn_{name}.weight": (_Q, HIDDEN) for name in "kv"} | _OUT | _PLAIN
        | {name: shape for name, shape in _STAR_BIAS.items() if name != "ffn_norm.bias"} | {f"attn_{name}.bias": (_Q,) for name in "qkv"},
        _LAYER_NORM | {"rope.dimension_count": HEAD_DIM // 2, "attention.head_count_kv": HEADS}, True,
    ),
    **{
        f"stablelm{name}": (
            "stablelm", _LLAMA | _NORM_BIAS | biases, _LAYER_NORM | {"rope.dimension_count": HEAD_DIM // 2}, True,
        )
        for name, biases in (("", {}), (", biases", _QKV_BIAS))
    },
    "starcoder": (
        "starcoder", _PRE | {"attn_qkv.weight": (_Q + 2 * HEAD_DIM, HIDDEN), "attn_qkv.bias": (_Q + 2 * HEAD_DIM,)}
        | _OUT | _PLAIN | _STAR_BIAS, _LAYER_NORM | {"attention.head_count_kv": 1}, False,
    ),
    "qwen2": ("qwen2", _LLAMA | _QKV_BIAS, {}, False),
    "qwen2, yarn": ("qwen2", _LLAMA | _QKV_BIAS, _YARN, True),
    "qwen2, yarn, factor": ("qwen2", _LLAMA | _QKV_BIAS, _YARN | {"rope.scaling.attn_factor": 1.3}, True),
    "qwen2, no biases": ("qwen2", _LLAMA, {}, True),
    "qwen3": ("qwen3", _LLAMA | _HEAD_NORMS, _WIDE, True),
    "qwen3, biases": ("qwen3", _LLAMA | _HEAD_NORMS | _QKV_BIAS, _WIDE, True),
    "mixtral": ("llama", _ATTENTION | _EXPERTS, _CHOICE | _NARROW, True),
    "granitemoe": ("granitemoe", _ATTENTION | _EXPERTS, _CHOICE | _NARROW | _GRANITE, False),
    "granitemoe, shared": (
        "granitemoe", _ATTENTION | _EXPERTS | {name: shape for name, shape in _SHARED.items() if "inp" not in name},
        _CHOICE | _NARROW | _GRANITE | {"expert_shared_feed_forward_length": INNER}, False,
    ),
    "olmoe": (
        "olmoe",
        _ATTENTION
        | _EXPERTS
        | {f"attn_{name}.weight": (_Q, HIDDEN) for name in "kv"}
        | {f"attn_{name}_norm.weight": (_Q,) for name in "qk"},
        _CHOICE | _NARROW | {"attention.head_count_kv": HEADS}, True,
    ),
    "gpt-oss": ("gpt-oss", _GPT_OSS, _CHOICE | _SWA | _YARN | {"expert_feed_forward_length": _WIDTH}, True),
    "gpt-oss, mxfp4": (  # all experts, so that rounding chooses no other ones
        "gpt-oss", _GPT_OSS, _CHOICE | _SWA | {"expert_feed_forward_length": _WIDTH, "expert_used_count": _N_EXPERTS}, True,
    ),
    "qwen2moe": (
        "qwen2moe", _ATTENTION | _QKV_BIAS | _EXPERTS | _SHARED,
        _CHOICE | {"expert_feed_forward_length": _WIDTH, "expert_shared_feed_forward_length": INNER}, True,
    ),
    "qwen35": ("qwen35", _norms("attn_norm", "post_attention_norm") | _GATED_ATTENTION | _RECURRENT | _GATED, _WIDE | _SSM, True),
    "qwen35moe": (
        "qwen35moe", _norms("attn_norm", "post_attention_norm") | _GATED_ATTENTION | _RECURRENT | _EXPERTS | _SHARED,
        _WIDE | _SSM | _CHOICE | {"expert_feed_forward_length": _WIDTH, "expert_shared_feed_forward_length": INNER}, True,
    ),
    "qwen35, as many heads": (
        "qwen35",
        _norms("attn_norm", "post_attention_norm")
        | _GATED_ATTENTION
        | _RECURRENT
        | {f"{name}.weight": (3 * _Q, n) for name, n in (("attn_qkv", HIDDEN), ("ssm_conv1d", 4))}
        | _GATED,
        _WIDE | _SSM | {"ssm.group_count": HEADS}, False,
    ),
    **{
        f"qwen3next{name}": (
            "qwen3next", _norms("attn_norm", "post_attention_norm") | _GATED_ATTENTION | recurrent | _EXPERTS | _SHARED,
            _WIDE | _SSM | _CHOICE | {"expert_feed_forward_length": _WIDTH, "expert_shared_feed_forward_length": INNER}, True,
        )
        for name, recurrent in (("", _JOINED_GATES), (", older", _JOINED))
    },
    "lfm2": ("lfm2", _PRE | _SPLIT | _OUT | _HEAD_NORMS | _SHORT_CONV | _GATED, _LFM2_KEYS | {"rope.freq_base": 1e6}, False),
    "lfm2, fused": (
        "lfm2", _PRE | {"attn_qkv.weight": (_Q + 2 * _KV, HIDDEN)} | _OUT | _HEAD_NORMS | _SHORT_CONV | _GATED, _LFM2_KEYS, True,
    ),
    "lfm2moe": (
        "lfm2moe", _PRE | _SPLIT | _OUT | _HEAD_NORMS | _SHORT_CONV | _GATED | _EXPERTS | {"exp_probs_b.bias": (_N_EXPERTS,)},
        _LFM2_KEYS | _CHOICE | {"expert_feed_forward_length": _WIDTH, "leading_dense_block_count": 2, "expert_gating_func": 2}, False,
    ),
    "nemotron_h": ("nemotron_h", _norms("attn_norm") | _MAMBA | _PLAIN | _SPLIT | _OUT, _NEMOTRON_H_KEYS, True),
    "nemotron_h_moe": (
        "nemotron_h_moe", _norms("attn_norm") | _MAMBA | _UNGATED_EXPERTS | _SPLIT | _OUT,
        _NEMOTRON_H_KEYS | _CHOICE | {
            "feed_forward_length": [_WIDTH if kind == "mlp" else 0 for kind in _NEMOTRON_H], "expert_feed_forward_length": _WIDTH,
            "expert_shared_feed_forward_length": INNER, "expert_weights_norm": True, "expert_weights_scale": 2.5,
        }, True,
    ),
    "falcon-h1": (
        "falcon-h1", {name: shape for name, shape in _FALCON_H1.items() if name != "ssm_norm.weight"}, _MAMBA_KEYS | _WIDE, True,
    ),
    "falcon-h1, norm": ("falcon-h1", _FALCON_H1 | _ONE_GROUP | _QKV_BIAS, _MAMBA_KEYS | {"ssm.group_count": 1}, False),
    "granitehybrid": ("granitehybrid", _LLAMA | _MAMBA, _GRANITE4_KEYS | {"rope.scaling.finetuned": False}, False),
    "granitehybrid, rope": (
        "granitehybrid", _LLAMA | _MAMBA | _ONE_GROUP, _GRANITE4_KEYS | {"ssm.group_count": 1}, True,
    ),
    "granitehybrid, experts": (
        "granitehybrid", _ATTENTION | _MAMBA | _EXPERTS | {name: shape for name, shape in _SHARED.items() if "inp" not in name},
        _GRANITE4_KEYS | _CHOICE | _NARROW | {"rope.scaling.finetuned": False, "expert_shared_feed_forward_length": INNER}, False,
    ),
    "deepseek2": (
        "deepseek2", _LATENT | _GATED | _BESIDE, _DEEPSEEK2_KEYS | _YARN | {"rope.scaling.yarn_log_multiplier": 0.0707}, True,
    ),
    "deepseek2, older": ("deepseek2", _OLDER | _GATED | _BESIDE, _OLDER_KEYS | {"expert_weights_scale": 4.0}, True),
    "deepseek2, groups": (
        "deepseek2", _TWO_STEPS | _GATED | _BESIDE | _CORRECTION,
        _DEEPSEEK2_KEYS | _YARN | _BY_SIGMOID
        | {"expert_group_count": 4, "expert_group_used_count": 2, "rope.scaling.yarn_log_multiplier": 0.1}, True,
    ),
    "deepseek2, glm": ("deepseek2", _TWO_STEPS | _GATED | _BESIDE | _CORRECTION, _DEEPSEEK2_KEYS | _BY_SIGMOID, True),
    "minicpm3": ("minicpm3", _MINICPM3, _MINICPM3_KEYS | {"attention.value_length": _VALUE}, False),
    "minicpm3, long": (
        "minicpm3", _MINICPM3 | {"attn_kv_b.weight": (HEADS * (_PLAIN_KEY + HEAD_DIM), _RANK), "attn_output.weight": (HIDDEN, _Q)},
        _MINICPM3_KEYS | {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 32}, True,
    ),
    "mistral4": (
        "mistral4", _TWO_STEPS | _BESIDE,
        _DEEPSEEK2_KEYS | _YARN | {"attention.q_lora_rank": 2 * _RANK, "expert_weights_norm": True, "leading_dense_block_count": 0}
        | {"attention.temperature_scale": 0.1, "attention.temperature_length": 16, "rope.scaling.yarn_log_multiplier": 0.1}, True,
    ),
    **{
        architecture: (
            architecture, _ATTENTION | _HEAD_NORMS | _EXPERTS, _CHOICE | _WIDE | {"expert_feed_forward_length": _WIDTH} | of_images, True,
        )
        for architecture, of_images in (("qwen3moe", {}), ("qwen3vlmoe", _OF_IMAGES))
    },
    "qwen2vl": ("qwen2vl", _LLAMA | _QKV_BIAS, {"rope.dimension_sections": [2, 3, 3, 0]}, False),
    "qwen3vl": ("qwen3vl", _LLAMA | _HEAD_NORMS, _WIDE | _OF_IMAGES, True),
}  # fmt: skip


Stored = tuple[np.ndarray, gguf.GGMLQuantizationType | None]  # rows and their type; None: that of the numbers


def store_as_recorded(case: str) -> Callable[[str, np.ndarray], Stored]:
    """Return how the file of a case has its tensors, by name and weights."""
    kind = gguf.GGMLQuantizationType.MXFP4
    in_blocks = "exps.weight" if case.endswith("mxfp4") else "no tensor"
    return lambda name, x: (gguf.quants.quantize(x, kind), kind) if name.endswith(in_blocks) else (x, None)


def write(
    path: Path, case: str, store: Callable[[str, np.ndarray], Stored] | None = None, changed: Mapping[str, Any] | None = None
) -> Path:
    """Write the file of a case, with tensors as `store` or else the case has them; texts are spelled in bytes.

    `changed`: keys with other values than the case has, or None for one that is left out; tensors are those of the case.
    """
    store = store or store_as_recorded(case)
    architecture, layer, keys, has_head = CASES[case]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    if "attention.layer_norm_epsilon" not in keys:
        writer.add_layer_norm_rms_eps(1e-5)
    for key, value in {**keys, **(changed or {})}.items():
        name = key[1:] if key.startswith("/") else f"{architecture}.{key}"
        writer.kv_data[0].pop(name, None)
        if value is None:
            continue
        add: Any = {
            bool: writer.add_bool, str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array,
        }[type(value)]  # fmt: skip
        add(name, value)
    _write_tokenizer(writer)
    last_norm = "token_embd_norm" if architecture.startswith("lfm2") else "output_norm"
    whole: Shapes = {"token_embd.weight": (VOCAB, HIDDEN), f"{last_norm}.weight": (HIDDEN,)}
    if "attention.layer_norm_epsilon" in keys and "attn_norm.bias" in layer:
        whole["output_norm.bias"] = (HIDDEN,)
    if architecture == "olmo":  # norms have no weights
        del whole["output_norm.weight"]
    if architecture == "starcoder":
        whole["position_embd.weight"] = (256, HIDDEN)
    if architecture == "phi2":
        whole["output.bias"] = (VOCAB,)
    if architecture == "gemma4":
        whole["rope_freqs.weight"] = (_WIDER // 2,)
    if keys.get("rope.scaling.type") == "longrope" and "rope.dimension_count" in keys:
        whole |= {f"rope_factors_{length}.weight": (keys["rope.dimension_count"] // 2,) for length in ("long", "short")}
    if "inp_gate.weight" in layer:
        width = layer["inp_gate.weight"][0]
        n = width * keys.get("block_count", LAYERS)
        whole |= {
            "per_layer_token_embd.weight": (VOCAB, n), "per_layer_model_proj.weight": (n, HIDDEN), "per_layer_proj_norm.weight": (width,),
        }  # fmt: skip
    if architecture == "gemma3n":
        whole |= {f"altup_{name}.weight": (_N_ALTUP - 1, HIDDEN, HIDDEN) for name in ("proj", "unembd_proj")}
    if has_head:
        whole["output.weight"] = (VOCAB, HIDDEN)
    layers = [_list_shapes(architecture, i, layer, keys) for i in range(keys.get("block_count", LAYERS))]
    for name, shape in {**whole, **{f"blk.{i}.{name}": shape for i, each in enumerate(layers) for name, shape in each.items()}}.items():
        rows, kind = store(name, make_weights(name, shape))
        writer.add_tensor(name, rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _list_shapes(architecture: str, i: int, layer: Shapes, keys: dict[str, Any]) -> Shapes:
    """Return the tensors of one layer, of which Gemma 4 and hybrids have several sorts."""
    if "layer_output_scale.weight" in layer and not _LAST_IS_FULL[i]:
        layer = {name: shape for name, shape in layer.items() if name != "attn_v.weight"} | _GLOBAL
    if isinstance(inner := keys.get("feed_forward_length"), list) and inner[i] == 2 * INNER:
        layer = layer | {"ffn_gate.weight": (inner[i], HIDDEN), "ffn_up.weight": (inner[i], HIDDEN), "ffn_down.weight": (HIDDEN, inner[i])}
    of_head = i >= keys.get("block_count", LAYERS) - keys.get("nextn_predict_layers", 0)
    if architecture.startswith(("qwen35", "qwen3next")):  # every fourth layer is attention, and that of a head
        others = _RECURRENT | _JOINED_GATES | _JOINED if i % 4 == 3 or of_head else _GATED_ATTENTION
        layer = {name: shape for name, shape in layer.items() if name not in others} | (_NEXTN if of_head else {})
    if architecture == "mimo2":  # layers with windows have sinks and twice as many heads of keys
        local = {name: (2 * n, HIDDEN) for name, (n, *_) in layer.items() if name in ("attn_k.weight", "attn_v.weight")}
        layer = layer | local if _LAST_IS_FULL[i] else {name: shape for name, shape in layer.items() if name != "attn_sinks.weight"}
    if isinstance(heads := keys.get("attention.head_count"), list) and heads[i] != HEADS:
        q = heads[i] * HEAD_DIM
        layer = layer | {"attn_q.weight": (q, HIDDEN), "attn_output.weight": (HIDDEN, q), "attn_gate.weight": (heads[i], HIDDEN)}
    if architecture in ("deepseek2", "glm4moe", "bailingmoe2", "dots1", "ernie4_5-moe", "afmoe", "exaone-moe", "laguna", "mimo2"):
        others = _BESIDE | _CORRECTION if i < keys["leading_dense_block_count"] else _GATED
        layer = {name: shape for name, shape in layer.items() if name not in others} | (_NEXTN if of_head else {})
    if architecture.startswith("nemotron_h"):
        mine = _MIXERS[_NEMOTRON_H[i]]
        layer = {name: shape for name, shape in layer.items() if name in mine or name == "attn_norm.weight"}
    if architecture == "granitehybrid":
        others = _MAMBA if i % 4 == 3 else _SPLIT | _OUT
        layer = {name: shape for name, shape in layer.items() if name not in others}
    if architecture.startswith("lfm2"):
        others = _SHORT_CONV if i % 4 == 3 else _SPLIT | _OUT | _HEAD_NORMS | {"attn_qkv.weight": ()}
        if architecture == "lfm2moe":
            others = others | (_EXPERTS | {"exp_probs_b.bias": ()} if i < keys["leading_dense_block_count"] else _GATED)
        layer = {name: shape for name, shape in layer.items() if name not in others}
    return layer


def make_weights(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return random weights that keep activations' size; norms are about 1, biases about 0."""
    draw = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if name == "rope_freqs.weight":  # a quarter of a head is rotated
        return np.where(np.arange(*shape) < shape[0] // 4, 1, 1e30).astype(np.float32)
    if name.startswith("rope_factors"):
        return (1 + (20 if "long" in name else 0.5) * np.abs(draw)).astype(np.float32)
    if "scale" in name:
        return (0.2 * draw + 1).astype(np.float32)
    if name.endswith(("norm.weight", "norm")):
        return (0.2 * draw + 1).astype(np.float32)
    if "gate_inp_shexp" in name:  # one row of a matrix
        return (1.5 * shape[-1] ** -0.5 * draw).astype(np.float32)
    if name.endswith("ssm_a"):
        return -np.exp(draw).astype(np.float32)
    if len(shape) == 1:
        return (0.2 * draw + name.endswith("norm.weight")).astype(np.float32)
    return (draw * (1.0 if name.startswith("token_embd") else 1.5 * shape[-1] ** -0.5)).astype(np.float32)


def _write_tokenizer(writer: gguf.GGUFWriter) -> None:
    letters = tiny.byte_letters()
    tokens = [*letters, "ab", *(f"<unused{i}>" for i in range(BOS - len(letters) - 1)), "<bos>", "<eos>"]
    kinds = [gguf.TokenType.NORMAL] * BOS + [gguf.TokenType.CONTROL] * 2
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)


if __name__ == "__main__":
    for name in CASES:
        write(Path(sys.argv[1]) / f"{name}.gguf", name)
