"""How columns of results are named and shown, in tables and figures alike."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Column:
    """A quantity: shown is ``factor`` times the value, in ``unit``, as ``form`` in tables.

    A figure's axis has ``limits``, or at least ``span`` from end to end, so that noise does not
    look like an effect; or it begins at zero.
    """

    name: str
    unit: str = ""
    factor: float = 1.0
    form: str = "{:.2f}"
    limits: tuple[float, float] | None = None
    span: float = 0.0
    from_zero: bool = True

    @property
    def label(self) -> str:
        """On an axis."""
        return f"{self.name} ({self.unit})" if self.unit else self.name

    @property
    def heading(self) -> str:
        """Of a table's column."""
        return f"{self.name}, {self.unit}" if self.unit else self.name


def _share(name: str, form: str = "{:.1f}") -> Column:
    return Column(name, "%", 100.0, form, limits=(-3.0, 103.0))


COLUMNS = {
    "rate_per_s": Column("load", "requests/s", from_zero=False),
    "rate_per_gpu_per_s": Column("load", "requests/s per GPU", from_zero=False),
    "slo_multiple": Column("deadline", "multiple of the unloaded latency", from_zero=False),
    "capacity_per_s": Column("capacity", "requests/s"),
    "attainment": _share("SLO attainment"),
    "accuracy": Column("accuracy", "%", 100.0, "{:.1f}", span=8.0, from_zero=False),
    "accuracy_weighted": Column("weighted accuracy", "%", 100.0, "{:.1f}", None, 8.0, False),
    "threshold_mean": Column("mean threshold", "", 1.0, "{:.3f}", None, 0.2, False),
    "tbt_attainment": _share("TBT within the target", "{:.2f}"),
    "tbt_p99_s": Column("TBT p99", "ms", 1e3, "{:.0f}"),
    "goodput_tokens_per_s": Column("goodput", "tokens/s", form="{:.0f}"),
    "ttft_p50_s": Column("TTFT p50", "s"),
    "ttft_p99_s": Column("TTFT p99", "s"),
    "served_share": _share("served"),
    "latency_mean_s": Column("mean latency", "s"),
    "latency_p99_s": Column("latency p99", "s"),
    "exposed_transfer_mean_s": Column("exposed transfer, mean", "ms", 1e3),
}


def column(name: str) -> Column:
    """How a column is shown; by its own name, if nothing is said of it."""
    return COLUMNS.get(name) or Column(name, from_zero=False)


NAMES = {
    "llada-8b": "LLaDA-8B",
    "dream-7b": "Dream-7B",
    "bundled": "the bundled model",
    "qwen2.5-14b": "Qwen2.5-14B",
    "qwen2.5-32b": "Qwen2.5-32B",
    "qwen2.5-72b": "Qwen2.5-72B",
    "gsm8k": "GSM8K",
    "mmlu-pro": "MMLU-Pro",
    "mbpp": "MBPP",
    "sharegpt": "ShareGPT",
    "azure-code": "Azure Code",
    "burstgpt": "BurstGPT",
    "arxiv": "arXiv",
    "mini-reasoning": "Mini Reasoning",
    "hybrid": "the hybrid workload",
}
"""Models and workloads as they are written."""
