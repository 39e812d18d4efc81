"""What every architecture computes, once more: loops over positions and experts, in float64.

Nothing of ``stepserve`` is used: ``logits`` takes a checkpoint's own config keys and tensor names.
"""

import math

import numpy as np

LLAMA_PARTS = {
    "o": "self_attn.o_proj",
    "attn": "input_layernorm",
    "mlp": "post_attention_layernorm",
}
LLADA_PARTS = {"o": "attn_out", "attn": "attn_norm", "mlp": "ff_norm"}
LLADA_PARTS |= {part: f"{part}_proj" for part in "qkv"}


def logits(config, tensors, ids, seen):
    """Rows of logits ``[positions, vocab]`` of token ids; ``seen(query, key)`` is the mask."""
    weights = {name: np.asarray(tensor, dtype=np.float64) for name, tensor in tensors.items()}
    model = _Llada(config, weights) if "d_model" in config else _Model(config, weights)
    states = [model.embedding[token] * model.embedding_scale for token in ids]
    for layer in range(model.layers):
        normed = [model.norm(layer, "attn", x) for x in states]
        keys, values, attended = [], [], []
        for position, x in enumerate(normed):
            keys.append([model.turn(h, position) for h in model.heads(layer, "k", x)])
            values.append(model.heads(layer, "v", x))
        for query, x in enumerate(normed):
            heads = [model.turn(h, query) for h in model.heads(layer, "q", x)]
            share = len(heads) // len(keys[0])
            visible = [key for key in range(len(ids)) if seen(query, key)]
            out = []
            for index, head in enumerate(heads):
                kv = index // share
                scores = np.array([head @ keys[k][kv] / math.sqrt(len(head)) for k in visible])
                mix = np.exp(scores - scores.max())
                mix /= mix.sum()
                out.append(sum(w * values[k][kv] for w, k in zip(mix, visible, strict=True)))
            attended.append(model.weight(layer, "o") @ np.concatenate(out))
        states = [x + a for x, a in zip(states, attended, strict=True)]
        states = [x + model.mlp(layer, model.norm(layer, "mlp", x)) for x in states]
    return np.array([model.head @ _rms(x, model.final, model.eps) for x in states])


def _rms(x, weight, eps):
    return x / math.sqrt((x * x).mean() + eps) * weight


def _silu(x):
    return x / (1.0 + np.exp(-x))


class _Model:
    """Llama's keys and names, and those of what was built on it."""

    parts = LLAMA_PARTS

    def __init__(self, config, weights):
        self.config, self.weights = config, weights
        self.layers, self.eps = config["num_hidden_layers"], config["rms_norm_eps"]
        self.count = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
        self.count["v"] = self.count["k"]
        self.size = config.get("head_dim") or config["hidden_size"] // self.count["q"]
        self.embedding_scale = 1.0
        self.name = "model.layers.{}.{}"
        self.fused = "model.layers.0.attention.query_key_value.weight" in weights
        embedding = "word_embeddings" if self.fused else "embed_tokens"
        self.embedding = weights[f"model.{embedding}.weight"]
        self.head = weights.get("lm_head.weight", self.embedding)
        self.final = weights["model.norm.weight"]

    def weight(self, layer, part, kind="weight"):
        name = "attention.dense" if self.fused and part == "o" else self.parts.get(part, part)
        return self.weights[f"{self.name.format(layer, name)}.{kind}"]

    def norm(self, layer, part, x):
        return _rms(x, self.weight(layer, part), self.eps)

    def heads(self, layer, part, x):
        """Heads of the queries, keys or values of one position."""
        if self.fused:
            both = self.weight(layer, "attention.query_key_value") @ x
            first = {"q": 0, "k": self.count["q"], "v": self.count["q"] + self.count["k"]}[part]
            flat = both[first * self.size : (first + self.count[part]) * self.size]
        else:
            name = self.parts.get(part, f"self_attn.{part}_proj")
            flat = self.weight(layer, name) @ x
            if f"{self.name.format(layer, name)}.bias" in self.weights:
                flat = flat + self.weight(layer, name, "bias")
        heads = flat.reshape(self.count[part], self.size)
        kind = {"q": "query", "k": "key"}.get(part)
        norm = f"attention.{kind}_layernorm" if self.fused else f"self_attn.{part}_norm"
        if f"{self.name.format(layer, norm)}.weight" in self.weights:
            return [_rms(head, self.weight(layer, norm), self.eps) for head in heads]
        return list(heads)

    def turn(self, head, position):
        """Rotate pairs (i, i + half) of the first part of a head."""
        dim = int(self.size * self.config.get("partial_rotary_factor", 1.0))
        half, out = dim // 2, head.copy()
        for i in range(half):
            speed, factor = self.speed(i, dim)
            c, s = math.cos(position * speed) * factor, math.sin(position * speed) * factor
            out[i] = head[i] * c - head[half + i] * s
            out[half + i] = head[half + i] * c + head[i] * s
        return out

    def speed(self, i, dim):
        """Radians per position of pair i, and the factor on sines and cosines."""
        theta = self.config["rope_theta"]
        speed, rope = theta ** (-2 * i / dim), self.config.get("rope_scaling")
        if not rope:
            return speed, 1.0
        factor, first = rope["factor"], rope["original_max_position_embeddings"]
        if rope["rope_type"] == "llama3":
            wavelength = 2 * math.pi / speed
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            if wavelength > first / low:
                return speed / factor, 1.0
            if wavelength < first / high:
                return speed, 1.0
            smooth = (first / wavelength - low) / (high - low)
            return (1 - smooth) * speed / factor + smooth * speed, 1.0
        ends = [
            dim * math.log(first / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (32, 1)
        ]
        low, high = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), dim - 1)
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        return speed / factor * ramp + speed * (1 - ramp), 0.1 * math.log(factor) + 1.0

    def mlp(self, layer, x):
        if f"model.layers.{layer}.mlp.gate.weight" not in self.weights:
            return self.swiglu(layer, "mlp", x)
        out = sum(w * self.swiglu(layer, f"mlp.experts.{e}", x) for e, w in self.chosen(layer, x))
        for shared in ("mlp.shared_experts", "shared_expert"):
            if f"model.layers.{layer}.{shared}.gate_proj.weight" in self.weights:
                out = out + self.swiglu(layer, shared, x)
        return out

    def swiglu(self, layer, name, x):
        gate, up, down = (
            self.weight(layer, f"{name}.{part}_proj") for part in ("gate", "up", "down")
        )
        return down @ (_silu(gate @ x) * (up @ x))

    def chosen(self, layer, x):
        """(expert, weight) of one token."""
        config, scores = self.config, self.weight(layer, "mlp.gate") @ x
        most = config["num_experts_per_tok"]
        if "n_group" not in config:
            chances = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
            return [(e, chances[e]) for e in np.argsort(-chances)[:most]]
        chances = 1.0 / (1.0 + np.exp(-scores))
        biased = chances + self.weight(layer, "mlp.gate", "expert_bias")
        size = len(scores) // config["n_group"]
        groups = [range(g * size, (g + 1) * size) for g in range(config["n_group"])]
        groups.sort(key=lambda g: -sum(sorted(biased[e] for e in g)[-2:]))
        among = [e for group in groups[: config["topk_group"]] for e in group]
        best = sorted(among, key=lambda e: -biased[e])[:most]
        total = sum(chances[e] for e in best)
        return [(e, config["routed_scaling_factor"] * chances[e] / total) for e in best]


class _Llada(_Model):
    """LLaDA's keys and names."""

    parts = LLADA_PARTS

    def __init__(self, config, weights):
        self.config = {"rope_theta": config["rope_theta"]}
        self.weights, self.fused = weights, False
        self.layers, self.eps = config["n_layers"], config["rms_norm_eps"]
        self.count = {"q": config["n_heads"], "k": config["n_kv_heads"], "v": config["n_kv_heads"]}
        self.size = config["d_model"] // config["n_heads"]
        self.embedding_scale = 1.0
        self.name = "model.transformer.blocks.{}.{}"
        self.embedding = weights["model.transformer.wte.weight"]
        self.head = weights["model.transformer.ff_out.weight"]
        self.final = weights["model.transformer.ln_f.weight"]

    def mlp(self, layer, x):
        gate, up, down = (self.weight(layer, part) for part in ("ff_proj", "up_proj", "ff_out"))
        return down @ (_silu(gate @ x) * (up @ x))
