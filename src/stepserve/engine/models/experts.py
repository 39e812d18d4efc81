"""Mixtures of experts: an MLP of which each token uses a few parts.

Two routers are known. LLaDA-MoE's is OLMoE's: a softmax over all experts, the best few with
their own probabilities as weights. LLaDA2's is that of Ling 2 (and DeepSeek-V3): sigmoids plus
a learned bias choose, first groups of experts, then experts within them; the weights are the
sigmoids without the bias, normalised. Sources: ``modeling_fused_lladamoe.py`` and
``modeling_llada2_moe.py`` of inclusionAI/dInfer. Deviation: routers compute in float32.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class SoftmaxRouting:
    """The ``per_token`` most probable experts, weighted by their probabilities."""

    per_token: int


@dataclass(frozen=True, slots=True)
class GroupedRouting:
    """The best ``per_token`` experts of the best ``groups_per_token`` of ``groups`` groups.

    A group is as good as its two best experts together. Weights sum to ``scale``.
    """

    per_token: int
    groups: int
    groups_per_token: int
    scale: float


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """``count`` experts of ``mlp_size``, and one of ``shared_size`` that all tokens use (0: none).

    ``dense_layers`` have a plain MLP of the model's ``mlp_size`` instead.
    """

    count: int
    mlp_size: int
    routing: SoftmaxRouting | GroupedRouting
    shared_size: int = 0
    dense_layers: frozenset[int] = frozenset()


class SoftmaxRouter(nn.Module):
    """See ``SoftmaxRouting``."""

    def __init__(self, hidden: int, experts: int, routing: SoftmaxRouting) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        self.routing = routing

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights float32 and experts int64, both ``[N, per_token]``, of x ``[N, hidden]``."""
        scores = F.linear(x.float(), self.weight.float()).softmax(-1)
        weights, chosen = scores.topk(self.routing.per_token, dim=-1)
        return weights, chosen


class GroupedRouter(nn.Module):
    """See ``GroupedRouting``. ``bias`` is float32 whatever the model is."""

    def __init__(self, hidden: int, experts: int, routing: GroupedRouting) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        self.bias = nn.Parameter(torch.zeros(experts))
        self.routing = routing

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights float32 and experts int64, both ``[N, per_token]``, of x ``[N, hidden]``."""
        routing = self.routing
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        grouped = (scores + self.bias).view(len(x), routing.groups, -1)
        worth = grouped.topk(2, dim=-1).values.sum(-1)
        best = worth.topk(routing.groups_per_token, dim=-1).indices
        passed_over = torch.ones_like(worth, dtype=torch.bool).scatter_(-1, best, False)
        among = grouped.masked_fill(passed_over[..., None], float("-inf")).flatten(-2)
        chosen = among.topk(routing.per_token, dim=-1).indices
        weights = scores.gather(-1, chosen)
        return routing.scale * weights / (weights.sum(-1, keepdim=True) + 1e-20), chosen


class SharedExpert(nn.Module):
    """A SwiGLU MLP."""

    def __init__(self, hidden: int, size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, size, bias=False)
        self.up_proj = nn.Linear(hidden, size, bias=False)
        self.down_proj = nn.Linear(size, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x ``[N, hidden]`` to the same shape."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Experts(nn.Module):
    """The MLP of a layer. Experts are stacked: ``gate_proj`` is ``[experts, mlp_size, hidden]``."""

    def __init__(self, hidden: int, config: ExpertsConfig) -> None:
        super().__init__()
        count, size, routing = config.count, config.mlp_size, config.routing
        self.router = (
            SoftmaxRouter(hidden, count, routing)
            if isinstance(routing, SoftmaxRouting)
            else GroupedRouter(hidden, count, routing)
        )
        self.gate_proj = nn.Parameter(torch.empty(count, size, hidden))
        self.up_proj = nn.Parameter(torch.empty(count, size, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, size))
        self.shared = SharedExpert(hidden, config.shared_size) if config.shared_size else None

    def forward(self, x: Tensor) -> Tensor:
        """Map x ``[*shape, hidden]`` to the same shape, expert by expert."""
        flat = x.flatten(0, -2)
        weights, chosen = self.router(flat)
        order = chosen.flatten().argsort(stable=True)
        rows = order // chosen.shape[1]
        weight = weights.flatten()[order, None].to(x.dtype)
        out = torch.zeros_like(flat) if self.shared is None else self.shared(flat)
        counts = chosen.flatten().bincount(minlength=len(self.gate_proj)).tolist()
        shares = zip(rows.split(counts), weight.split(counts), strict=True)
        for expert, (own, share) in enumerate(shares):
            if len(own):
                mine = flat[own]
                inner = F.silu(mine @ self.gate_proj[expert].T) * (mine @ self.up_proj[expert].T)
                out.index_add_(0, own, inner @ self.down_proj[expert].T * share)
        return out.view(x.shape)
