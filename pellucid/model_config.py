"""The shape of a model, by the keys of a Hugging Face ``config.json``, and shapes by name."""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from pellucid.errors import ConfigError, require
from pellucid.registry import nearest
from pellucid.rope_scaling import check_rope_scaling

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    },
    "small": {
        "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256,
    },
    "base": {
        "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 1024,
    },
}  # fmt: skip
"""About 1M, 12M and 110M parameters with vocabularies of 2,048, 8,192 and 32,768."""
MAX_LAYERS = 10_000
"""Far more than any model has; a damaged file may say billions, and lists of layers are made before any weight is read."""

_MOST = (
    dict.fromkeys(("vocab_size", "max_position_embeddings", "sliding_window"), 2**31 - 1)
    | dict.fromkeys(("hidden_size", "intermediate_size", "kv_lora_rank", "q_lora_rank"), 2**24)
    | dict.fromkeys(("moe_intermediate_size",), 2**20)
    | dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 2**16)
    | dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 2**16)
    | dict.fromkeys(("n_routed_experts", "n_shared_experts"), 2**12)
)
"""Far above any model; the bytes of every weight are then a number of 64 bits, so that a plan can be made of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The shape of a decoder. Keys are those of a Hugging Face ``config.json``."""

    vocab_size: int = 0
    """Rows of the embedding; 0 takes the vocabulary of the data's tokenizer."""
    hidden_size: int = 384
    """Width of the residual stream."""
    intermediate_size: int = 1024
    """Width inside the SwiGLU feed-forward."""
    num_hidden_layers: int = 6
    """Decoder blocks."""
    num_attention_heads: int = 6
    """Query heads."""
    num_key_value_heads: int = 0
    """Key and value heads, shared by groups of query heads; 0: as many as query heads."""
    head_dim: int = 0
    """Width of one head; 0: hidden_size / num_attention_heads."""
    max_position_embeddings: int = 256
    """The window: the longest sequence the model is made for, in tokens."""
    rms_norm_eps: float = 1e-5
    """Added to the mean square inside each RMSNorm."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling: dict[str, Any] | None = None
    """Stretches the window: {rope_type = "linear" | "ntk" | "dynamic" | "yarn" | "llama3", factor = ..., ...}, with the
    further keys of Hugging Face."""
    tie_word_embeddings: bool = True
    """The output head is the embedding matrix."""
    attention_bias: bool = False
    """Biases on the query, key and value projections; with latent attention on those that narrow."""
    attention_out_bias: bool | None = None
    """Bias on the output projection of attention; "none": as attention_bias."""
    mlp_bias: bool = False
    """Biases on the feed-forward projections."""
    qk_norm: bool = False
    """RMSNorm on each query and key head before the rotary embedding (Qwen3)."""
    attention_gate: bool = False
    """Multiply the attention output by sigmoid(Linear(x)) before its output projection."""
    sliding_window: int | None = None
    """A token sees this many tokens, itself included; none: all before it."""
    max_window_layers: int = 0
    """The first layers that keep full attention although sliding_window is set."""
    kv_lora_rank: int | None = None
    """Width of the latent that keys and values are made of: multi-head latent attention (DeepSeek-V2). "none": ordinary."""
    q_lora_rank: int | None = None
    """Latent attention: width of the latent that queries are made of; "none": made of the residual stream itself."""
    qk_nope_head_dim: int = 0
    """Latent attention: width of a query or key head without rotary embedding."""
    qk_rope_head_dim: int = 0
    """Latent attention: width of the rotary part of a head, whose key all heads share; head_dim is this."""
    v_head_dim: int = 0
    """Latent attention: width of a value head."""
    rope_interleave: bool = False
    """Latent attention: rotary elements stand in the weights as pairs, not in halves (DeepSeek's own)."""
    n_routed_experts: int = 0
    """Feed-forward experts that each token chooses from: a mixture of experts; 0: one dense feed-forward."""
    num_experts_per_tok: int = 0
    """Experts that a token goes to."""
    moe_intermediate_size: int = 0
    """Width inside an expert."""
    n_shared_experts: int = 0
    """Experts that every token goes to, built as one of so many times the width."""
    first_k_dense_replace: int = 0
    """The first layers that keep a dense feed-forward of intermediate_size."""
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    """How a token scores experts."""
    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"] = "greedy"
    """How experts are chosen: the best; the best within the groups that have the best expert; "noaux_tc": the best after a
    bias for each expert, within the groups whose two best sum highest (DeepSeek-V3)."""
    n_group: int = 1
    """Groups that the experts form, in order."""
    topk_group: int = 1
    """Groups that a token may choose from."""
    norm_topk_prob: bool = False
    """Divide the chosen scores by their sum."""
    routed_scaling_factor: float = 1.0
    """Multiplies the chosen scores."""
    router_aux_loss_coef: float = 0.0
    """Weight of the balancing loss of each sequence (DeepSeek-V3, eq. 17 to 20); 0: none."""
    router_bias_update_speed: float = 0.0
    """With "noaux_tc": after each step an expert's bias rises by this if it got fewer tokens than the mean, else falls."""
    dropout: float = 0.0
    """Probability of dropping elements of the embedding and of each residual branch in training."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights; residual projections get it / sqrt(2 * layers)."""
    embedding_range: float | None = None
    """Standard deviation of the initial embedding; "none": initializer_range. With an untied head, 1.0 lets a small
    model tell tokens apart from the start and copy names much sooner."""
    attend: Literal["sdpa", "canonical"] = "sdpa"
    """Attention kernel: "sdpa" is fast; "canonical" gives the same bits whatever is batched, cached or chunked."""

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        for name in (*sizes, "max_position_embeddings"):
            require(getattr(self, name) >= 1, f"model.{name} must be at least 1, got {getattr(self, name)}")
        require(
            self.num_hidden_layers <= MAX_LAYERS,
            f"model.num_hidden_layers must be at most {MAX_LAYERS:,}, got {self.num_hidden_layers}",
        )
        for name in ("vocab_size", "num_key_value_heads", "head_dim", "max_window_layers"):
            require(getattr(self, name) >= 0, f"model.{name} must not be negative, got {getattr(self, name)}")
        for name, most in _MOST.items():
            value = getattr(self, name)
            require(value is None or value <= most, f"model.{name} must be at most {most:,}, got {value}")
        if not self.num_key_value_heads:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.attention_out_bias == self.attention_bias:
            object.__setattr__(self, "attention_out_bias", None)
        _check_latent_attention(self)
        _check_experts(self)
        if not self.head_dim:
            require(
                self.hidden_size % self.num_attention_heads == 0,
                f"model.hidden_size {self.hidden_size} is not divisible by model.num_attention_heads "
                f"{self.num_attention_heads}; change one of them or set model.head_dim",
            )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        require(self.head_dim % 2 == 0, f"model.head_dim must be even for rotary embeddings, got {self.head_dim}")
        require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"model.num_attention_heads {self.num_attention_heads} is not divisible by "
            f"model.num_key_value_heads {self.num_key_value_heads}",
        )
        for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"model.{name} must be positive and finite, got {value}")
        require(0 <= self.dropout < 1, f"model.dropout must be in [0, 1), got {self.dropout}")
        require(
            self.embedding_range is None or self.embedding_range > 0,
            f'model.embedding_range must be positive or "none", got {self.embedding_range}',
        )
        require(
            self.sliding_window is None or self.sliding_window >= 1,
            f'model.sliding_window must be at least 1 or "none", got {self.sliding_window}',
        )
        if self.rope_scaling is not None:
            check_rope_scaling(self.rope_scaling)
            kind = self.rope_scaling["rope_type"]
            require(
                kind not in ("ntk", "dynamic") or self.head_dim > 2,
                f"model.rope_scaling.rope_type {kind!r} needs model.head_dim above 2, got {self.head_dim}",
            )
            require(
                kind != "yarn" or self.rope_theta > 1,
                f"model.rope_scaling.rope_type 'yarn' needs model.rope_theta above 1, got {self.rope_theta}",
            )

    @property
    def is_latent(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.kv_lora_rank is not None

    @property
    def expert_layers(self) -> range:
        """The layers whose feed-forward is a mixture of experts."""
        return range(
            self.first_k_dense_replace if self.n_routed_experts else self.num_hidden_layers, self.num_hidden_layers
        )


def _check_latent_attention(config: ModelConfig) -> None:
    widths = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    if not config.is_latent:
        for name in ("q_lora_rank", *widths, "rope_interleave"):
            value = getattr(config, name)
            require(
                not value,
                f"model.{name} is {value} and belongs to latent attention; set model.kv_lora_rank, or leave it out",
            )
        return
    for name in ("kv_lora_rank", *widths):
        value = getattr(config, name)
        require(value >= 1, f"model.{name} must be at least 1 where model.kv_lora_rank is set, got {value}")
    require(
        config.q_lora_rank is None or config.q_lora_rank >= 1,
        f'model.q_lora_rank must be at least 1 or "none", got {config.q_lora_rank}',
    )
    require(
        config.qk_rope_head_dim % 2 == 0,
        f"model.qk_rope_head_dim must be even for rotary embeddings, got {config.qk_rope_head_dim}",
    )
    require(
        config.num_key_value_heads == config.num_attention_heads,
        f"model.num_key_value_heads is {config.num_key_value_heads}; latent attention makes keys and values for each of the "
        f"{config.num_attention_heads} query heads, leave it out or set it to 0",
    )
    require(
        config.head_dim in (0, config.qk_rope_head_dim),
        f"model.head_dim is {config.head_dim}; with latent attention it is model.qk_rope_head_dim ({config.qk_rope_head_dim}), "
        "leave it out or set it to 0",
    )
    object.__setattr__(config, "head_dim", config.qk_rope_head_dim)


def _check_experts(config: ModelConfig) -> None:
    names = (
        "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "first_k_dense_replace",
    )  # fmt: skip
    for name in names:
        require(getattr(config, name) >= 0, f"model.{name} must not be negative, got {getattr(config, name)}")
    experts, chosen = config.n_routed_experts, config.num_experts_per_tok
    if not experts:
        defaults = {f.name: f.default for f in fields(ModelConfig)}
        also = (
            "scoring_func", "topk_method", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor",
            "router_aux_loss_coef", "router_bias_update_speed",
        )  # fmt: skip
        for name in (*names[1:], *also):
            value = getattr(config, name)
            require(
                value == defaults[name],
                f"model.{name} is {value!r} and belongs to a mixture of experts; set model.n_routed_experts, or leave it out",
            )
        return
    require(
        1 <= chosen <= experts,
        f"model.num_experts_per_tok must be between 1 and model.n_routed_experts ({experts}), got {chosen}",
    )
    require(
        config.moe_intermediate_size >= 1,
        "model.moe_intermediate_size must be at least 1 where there are experts, got 0",
    )
    require(
        config.first_k_dense_replace <= config.num_hidden_layers,
        f"model.first_k_dense_replace {config.first_k_dense_replace} is more than model.num_hidden_layers "
        f"({config.num_hidden_layers})",
    )
    require(not config.mlp_bias, "model.mlp_bias is true; a mixture of experts has no biases, leave it out")
    _check_routing(config)


def _check_routing(config: ModelConfig) -> None:
    experts, groups, allowed = config.n_routed_experts, config.n_group, config.topk_group
    known = {"scoring_func": ("softmax", "sigmoid"), "topk_method": ("greedy", "group_limited_greedy", "noaux_tc")}
    for name, choices in known.items():  # a value that nobody built from a table would otherwise mean another one
        value = getattr(config, name)
        require(value in choices, f"model.{name} must be one of {', '.join(choices)}; got {value!r}")
    require(
        groups >= 1 and experts % groups == 0,
        f"model.n_routed_experts {experts} is not divisible by model.n_group {groups}",
    )
    require(1 <= allowed <= groups, f"model.topk_group must be between 1 and model.n_group ({groups}), got {allowed}")
    require(
        config.topk_method != "greedy" or groups == 1,
        f'model.n_group is {groups} and model.topk_method "greedy" knows no groups; choose "group_limited_greedy" or "noaux_tc"',
    )
    require(
        config.num_experts_per_tok <= allowed * (experts // groups),
        f"model.num_experts_per_tok {config.num_experts_per_tok} is more than the experts of model.topk_group {allowed} groups "
        f"of {experts // groups}",
    )
    require(
        config.topk_method != "noaux_tc" or allowed == groups or experts // groups >= 2,
        f'model.n_group is {groups} for {experts} experts, and model.topk_method "noaux_tc" compares groups by their two best '
        'experts; lower model.n_group, or choose "group_limited_greedy"',
    )
    for name in ("routed_scaling_factor", "router_aux_loss_coef", "router_bias_update_speed"):
        value = getattr(config, name)
        require(0 <= value < math.inf, f"model.{name} must be finite and not negative, got {value}")
    require(config.routed_scaling_factor > 0, "model.routed_scaling_factor must be positive, got 0.0")
    require(
        config.router_bias_update_speed == 0 or config.topk_method == "noaux_tc",
        f'model.router_bias_update_speed needs the bias of model.topk_method "noaux_tc", which is {config.topk_method!r}',
    )


def with_preset(model: dict[str, Any]) -> dict[str, Any]:
    """The table ``model`` with the sizes of the ``preset`` that it names, where it does not write them itself."""
    if "preset" not in model:
        return model
    preset = model["preset"]
    if not isinstance(preset, str) or preset not in PRESETS:
        known = ", ".join(PRESETS)
        raise ConfigError(f"model.preset is {preset!r}{nearest(str(preset), list(PRESETS))}; known: {known}")
    return PRESETS[preset] | {key: value for key, value in model.items() if key != "preset"}
