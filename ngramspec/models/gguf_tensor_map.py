"""Map the tensors of a GGUF file to the parameters of transformers' model, by the names in `gguf_architectures`.

A file and its config go in; out comes, for every parameter, which tensor it is made of, and by which rule. No weights are read here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ngramspec.models import qwen3_next
from ngramspec.models.gguf import Gguf, GgufTensor
from ngramspec.models.gguf_architectures import Architecture, get_architecture
from ngramspec.models.gguf_configs import Config
from ngramspec.models.gguf_metadata import LONG_FACTORS, SHORT_FACTORS, GgufMetadata
from ngramspec.models.head_parameters import HEAD, HEAD_LAYER
from ngramspec.models.latent_weights import BOTH, KEYS, VALUES
from ngramspec.models.tensor_source import KINDS
from ngramspec.models.tensor_use import TensorUse

# Stems of tensors that are parameters of a module that has others.
_PARAMETERS = ("altup_correct_scale", "attn_sinks", "exp_probs_b", "layer_output_scale", "ssm_a", "ssm_d", "ssm_dt")
# Tensors of heads with an embedding or projection of their own, which are not read.
_OWN_VOCABULARY = ("nextn.embed_tokens", "nextn.shared_head_head")
_CORRECTION = ".moe_statics.e_score_correction_bias"  # end of a name in ERNIE 4.5; files need not have one


_TENSOR = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<stem>[\w.]+?)(?:\.(?P<kind>weight|bias|scale))?")


def map_tensors(file: Gguf, config: Config) -> dict[str, TensorUse]:
    """Return which tensor each parameter is made of; tensors that no parameter needs are left out.

    The layer behind the last one is that of a head that predicts further tokens (`head_parameters`), if the architecture's is read.
    """
    row, uses = get_architecture(file), {}
    of_head = list_head_tensors(file)
    for tensor in file.tensors.values():
        if tensor.name not in of_head and (found := _TENSOR.fullmatch(tensor.name)) is not None:
            uses.update(_map_tensor(row, config, tensor, found))
    numbers = {
        f"{row.prefix}.{i}.{path}": TensorUse(key, "number", first=i)
        for key, path in row.numbers.items()
        for i in range(config["num_hidden_layers"])
    }
    return uses | numbers | _map_head(file, row, config, of_head)


def add_zero_biases(uses: Mapping[str, TensorUse], parameters: Sequence[str]) -> dict[str, TensorUse]:
    """Return uses of the biases among a model's parameters that the file lacks: they are zero, one for each row of the weight beside."""
    lacking = {name: f"{name.removesuffix('.bias')}.weight" for name in parameters if name.endswith(".bias") and name not in uses}
    lacking |= {name: f"{name.removesuffix(_CORRECTION)}.weight" for name in parameters if name.endswith(_CORRECTION) and name not in uses}
    return {name: uses[weight]._replace(rule="zeros") for name, weight in lacking.items() if weight in uses}


def _map_head(file: Gguf, row: Architecture, config: Config, names: set[str]) -> dict[str, TensorUse]:
    """Return the parameters of a head of one layer that has the model's own embedding and projection; of others none."""
    uses: dict[str, TensorUse] = {}
    found = {name: match for name in names if (match := _TENSOR.fullmatch(name)) is not None}
    layers = {match["layer"] for match in found.values()}
    own = {match["stem"] for match in found.values()} & {*_OWN_VOCABULARY}
    if not row.head or len(layers) != 1 or own or any(file.tensors[name].kind not in KINDS for name in names):
        return {}
    for name, match in found.items():
        if (path := row.head.get(match["stem"])) is not None:
            uses[f"{HEAD}{path}.{match['kind']}"] = _make_use(row, config, name, match["stem"], match["kind"])
        else:
            for parameter, use in _map_tensor(row, config, file.tensors[name], match).items():
                uses[parameter.replace(f"{row.prefix}.{match['layer']}.", HEAD_LAYER)] = use
    uses.setdefault(f"{HEAD}norm.weight", _make_use(row, config, "output_norm.weight", "output_norm", "weight"))
    return uses


def _map_tensor(row: Architecture, config: Config, tensor: GgufTensor, found: re.Match[str]) -> dict[str, TensorUse]:
    layer, stem, kind = found["layer"], found["stem"], found["kind"] or "weight"  # Falcon-H1's ffn_norm is named without it
    if layer is not None and (joined := row.divided.get(stem)) is not None:
        return {
            f"{row.prefix}.{layer}.linear_attn.{name}.{kind}": TensorUse(tensor.name, "divided", part.n_groups, parts=part.parts)
            for name, part in qwen3_next.list_parts(config).items()
            if part.joined == joined and tensor.shape[0] == part.n_rows
        }
    path = row.whole.get(stem) if layer is None else row.layer.get(f"{stem}.{kind}" if kind == "scale" else stem)
    if layer is not None and stem == "attn_qkv" and path is None:
        return _split_fused(row, config, tensor, int(layer), kind)
    if path is None:
        return {}
    if "*" in path:
        n, n_rows = tensor.shape[:2]
        return {f"{path.replace('*', str(i))}.{kind}": TensorUse(tensor.name, first=i * n_rows, end=(i + 1) * n_rows) for i in range(n)}
    path = path if layer is None else f"{row.prefix}.{layer}.{path}"
    if kind == "scale":
        return {path: TensorUse(tensor.name)}
    if stem.endswith("_exps") or stem in _PARAMETERS:  # parameters that have no module of their own
        other = f"blk.{layer}.ffn_up_exps.{kind}" if stem == "ffn_gate_exps" else ""
        use = _make_use(row, config, tensor.name, stem, kind)
        return {f"{path}_bias" if kind == "bias" else path: use._replace(other=other)}
    use = _make_use(row, config, tensor.name, stem, kind)
    if path.endswith("self_attn.gate_proj"):
        use = use._replace(heads=config["num_attention_heads"])
    if row.latent and kind == "weight" and stem in ("attn_k_b", "attn_kv_b"):
        return _map_heads(config, tensor.name, stem, path) | {f"{path}.{kind}": use}
    return {f"{path}.{kind}": use._replace(other=tensor.name.replace("gate", "up")) if use.rule == "joined" else use}


def _map_heads(config: Config, name: str, stem: str, path: str) -> dict[str, TensorUse]:
    """Return what is made of the matrices of latent attention's keys, besides themselves: transformers' one of keys and values, or of that
    the matrices of keys and values.
    """
    at, n_heads, of_keys = path.rpartition(".")[0], config["num_attention_heads"], ((0, config["qk_nope_head_dim"]),)
    if stem == "attn_k_b":
        return {f"{at}.{BOTH}.weight": TensorUse(name, "joined heads", n_heads, other=name.replace("attn_k_b", "attn_v_b"), parts=of_keys)}
    return {
        f"{at}.{part}.weight": TensorUse(name, f"head {what}", n_heads, parts=of_keys)
        for part, what in ((KEYS, "keys"), (VALUES, "values"))
    }


def _make_use(row: Architecture, config: Config, name: str, stem: str, kind: str, first: int = 0, end: int = 0) -> TensorUse:
    rule = row.rules.get(stem, "same")
    if rule in ("transposed", "minus one") and kind == "bias":
        rule = "same"
    if rule == "by heads":
        n, size = config["hidden_size"], config["head_dim"]
        return TensorUse(name, "divided", 1, parts=tuple((at, at + size) for h in range(0, n, size) for at in (h, n + h, 2 * n + h)))
    n_halved = config.get("halved_rows", 0)
    if rule == "halved" and not n_halved:
        rule = "same"
    heads = config["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"] if rule in ("interleaved", "halved") else 0
    if stem.endswith("norm"):
        heads = min(1, heads)  # all heads have the same
    n = n_halved if rule == "halved" else 0
    if rule == "repeated":
        heads = config["linear_key_repeats"]
        rule, n = (rule, config["linear_num_key_heads"] // heads * config["linear_key_head_dim"]) if heads > 1 else ("same", 0)
    return TensorUse(name, rule, heads, first, end, parts=((0, n),) if n else ())


def _split_fused(row: Architecture, config: Config, tensor: GgufTensor, layer: int, kind: str) -> dict[str, TensorUse]:
    """Cut a tensor of queries, keys and values, which newer conversions write for any architecture, into three parameters."""
    heads = config.get("num_attention_heads_per_layer", {layer: config["num_attention_heads"]})
    q, kv = heads[layer] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    if tensor.shape[0] != q + 2 * kv:
        return {}
    ends = {"attn_q": (0, q), "attn_k": (q, q + kv), "attn_v": (q + kv, q + 2 * kv)}
    return {
        f"{row.prefix}.{layer}.{row.layer[stem]}.{kind}": _make_use(row, config, tensor.name, stem, kind, *ends[stem])
        for stem in ends
        if stem in row.layer
    }


def list_idle_tensors(file: Gguf, config: Config) -> set[str]:
    """Return the names of tensors that are no parameters: keys and values of layers that have those of others, numbers of the config."""
    n_shared = config.get("num_kv_shared_layers", 0)
    layers = range(config["num_hidden_layers"] - n_shared, config["num_hidden_layers"]) if n_shared else range(0)
    names = {f"blk.{i}.{stem}.weight" for i in layers for stem in ("attn_k", "attn_v", "attn_k_norm")}
    if (config.get("rope_parameters") or {}).get("rope_type") == "longrope":
        names |= {LONG_FACTORS, SHORT_FACTORS}
    return names & file.tensors.keys()


def list_head_tensors(file: Gguf) -> set[str]:
    """Return the names of the tensors of heads that predict further tokens: layers behind the model's last one, as the file counts them."""
    metadata = GgufMetadata(file)
    heads = range(metadata.n_layers, metadata.get_int("block_count"))
    return {name for name in file.tensors if (found := _TENSOR.match(name)) and found["layer"] and int(found["layer"]) in heads}
