"""The transformer shared by every model that stepserve serves.

LLaDA (a Llama block without a causal mask) and Dream (a Qwen2 block without one) differ in
a handful of config values: biases on the query/key/value projections, the number of KV
heads, tied embeddings, and whether the logits that predict position ``i`` stand at ``i``
(LLaDA) or at ``i - 1`` (Dream). Llama and Qwen2 themselves are the same blocks again, Qwen3
and SDAR add a norm to queries and keys, and mixtures of experts (``experts``) another MLP.
One file serves all; ``engine/architectures.py`` maps their checkpoints' names onto those here.

Attention is passed in: training attends within padded rows, the executors attend over
packed rows whose keys and values live in pages, causally or not. The model never learns which.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepserve.engine.models.experts import Experts, ExpertsConfig
from stepserve.engine.models.rotary import Scaling, rotary_tables

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, q, k, v)``: q is ``[*shape, heads, head_dim]``, k and v are
``[*shape, kv_heads, head_dim]``; returns ``[*shape, heads, head_dim]``."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a transformer, and the token ids with a meaning to it.

    ``mask_token_id`` is ``None`` for an autoregressive model. ``head_dim`` and ``rotary_dim``
    are filled in where they are 0: the hidden size shared out to the heads, all of a head.
    """

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    mlp_size: int
    max_positions: int
    mask_token_id: int | None
    eos_token_id: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    scale_embeddings: bool = False  # multiply embeddings by sqrt(hidden_size)
    qkv_bias: bool = False
    shift_logits: bool = False  # the logits for position i stand at i - 1 (Dream)
    more_eos_token_ids: tuple[int, ...] = ()  # that end a text, too (Llama 3, Qwen2)
    head_dim: int = 0
    rotary_dim: int = 0  # the first so many of a head are rotated
    rope_scaling: Scaling | None = None
    qk_norm: bool = False  # each head of queries and keys is normalised (Qwen3)
    attention_block: int | None = None  # a position sees its own block and those before it
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        """Fill in what follows from the rest."""
        head_dim = self.head_dim or self.hidden_size // self.heads
        object.__setattr__(self, "head_dim", head_dim)
        object.__setattr__(self, "rotary_dim", self.rotary_dim or head_dim)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token id that ends a text."""
        return (self.eos_token_id, *self.more_eos_token_ids)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, half-split layout (as Llama, Qwen2 and LLaDA).

    x is ``[*shape, heads, head_dim]``; cos and sin are ``[*shape, 1, rotary_dim / 2]``. What
    lies behind the first ``rotary_dim`` of a head stays as it is.
    """
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


class Layer(nn.Module):
    """One pre-norm block: attention, then a SwiGLU MLP."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        hidden, head_dim = config.hidden_size, config.head_dim
        self.index = index
        self.attn_norm = nn.RMSNorm(hidden, eps=config.norm_eps)
        self.q_proj = nn.Linear(hidden, config.heads * head_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, config.kv_heads * head_dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, config.kv_heads * head_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.heads * head_dim, hidden, bias=False)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(head_dim, eps=config.norm_eps)
            self.k_norm = nn.RMSNorm(head_dim, eps=config.norm_eps)
        self.mlp_norm = nn.RMSNorm(hidden, eps=config.norm_eps)
        self.experts: Experts | None = None
        if config.experts is not None and index not in config.experts.dense_layers:
            self.experts = Experts(hidden, config.experts)
        else:
            self.gate_proj = nn.Linear(hidden, config.mlp_size, bias=False)
            self.up_proj = nn.Linear(hidden, config.mlp_size, bias=False)
            self.down_proj = nn.Linear(config.mlp_size, hidden, bias=False)
        self.head_dim, self.qk_norm = head_dim, config.qk_norm

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Map x ``[*shape, hidden]`` to the same shape."""
        normed = self.attn_norm(x)
        heads = (*x.shape[:-1], -1, self.head_dim)
        q, k = self.q_proj(normed).view(heads), self.k_proj(normed).view(heads)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        v = self.v_proj(normed).view(heads)
        x = x + self.o_proj(attend(self.index, q, k, v).flatten(-2))
        return x + self.mlp(self.mlp_norm(x))

    def mlp(self, x: Tensor) -> Tensor:
        """The MLP, or the experts in its place; x ``[*shape, hidden]``, as is the answer."""
        if self.experts is not None:
            mixed: Tensor = self.experts(x)
            return mixed
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderModel(nn.Module):
    """Token ids and positions in, hidden states out; logits only where they are asked for."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        self.set_rotary_tables()

    def set_rotary_tables(self, device: torch.device | None = None) -> None:
        """Build the rotary tables, float32 ``[max_positions, rotary_dim / 2]`` each."""
        config = self.config
        cos, sin = rotary_tables(
            dim=config.rotary_dim,
            theta=config.rope_theta,
            positions=config.max_positions,
            scaling=config.rope_scaling,
            device=device,
        )
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def hidden(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Final hidden states ``[*shape, hidden]`` of token_ids ``[*shape]`` at positions."""
        x = self.embed(token_ids)
        if self.config.scale_embeddings:
            x = x * self.config.hidden_size**0.5
        cos = self.cos[positions].unsqueeze(-2).to(x.dtype)
        sin = self.sin[positions].unsqueeze(-2).to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        out: Tensor = self.norm(x)
        return out

    def logits(self, hidden: Tensor, ids: slice | None = None) -> Tensor:
        """Logits ``[*shape, vocab]`` in float32 of hidden ``[*shape, hidden]``.

        With ``ids`` those of a range of token ids alone: ``[*shape, ids]``.
        """
        out: Tensor = self.head(hidden) if ids is None else F.linear(hidden, self.head.weight[ids])
        return out.float()
