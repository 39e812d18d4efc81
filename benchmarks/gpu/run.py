"""How long steps take on a GPU, against its roofline: see README.md beside this file.

Measurements are made in the order of their importance until ``--budget-s`` is used up; the files
in ``--out`` are complete after each of them.
"""

import argparse
import dataclasses
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from shapes import (
    PEAKS,
    SHAPES,
    Executor,
    Size,
    ar_row,
    build,
    diffusion_row,
    held,
    kv_bytes_per_token,
    layer_weights,
    roofline,
    shape_name,
    small,
    step_seconds,
    tokens_of,
)

from stepserve.core.errors import CapacityError
from stepserve.core.request import Family, Request
from stepserve.core.step import Mix, Step, StepKind
from stepserve.cost.batch_profile import BatchProfile
from stepserve.cost.step_table import StepProfile
from stepserve.engine.ar_executor import AutoregressiveExecutor
from stepserve.engine.diffusion_executor import DiffusionExecutor
from stepserve.engine.loader import LoadedModel
from stepserve.engine.models.transformer import ModelConfig

PAGE_TOKENS = 16

Kind = TypeVar("Kind", DiffusionExecutor, AutoregressiveExecutor)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured; the first of each are the most important ones."""

    dtype: torch.dtype = torch.bfloat16
    block: int = 32
    widths: tuple[int, ...] = (1, 8, 32, 4, 16, 2, 24, 3, 6, 12)
    few_widths: tuple[int, ...] = (1, 8, 32)
    context: int = 1024
    contexts: tuple[int, ...] = (512, 2048)
    recompute: tuple[int, ...] = (1536, 512, 8192, 4096, 2048, 1024, 256, 128, 64, 32, 3072, 6144)
    row_tokens: int = 512
    prefill: tuple[int, ...] = (1024, 256, 2048)
    decodes: tuple[int, ...] = (0, 16)
    most_tokens: int = 8192
    repeats: int = 9
    copy_bytes: int = 1 << 31
    matmul: int = 8192


SMALL = Plan(
    dtype=torch.float32,
    block=8,
    widths=(1, 3),
    few_widths=(2,),
    context=64,
    contexts=(32,),
    recompute=(96, 32),
    row_tokens=48,
    prefill=(32,),
    decodes=(0, 2),
    most_tokens=64,
    repeats=2,
    copy_bytes=1 << 22,
    matmul=128,
)


class Bench:
    """Measures, prints and keeps what was measured."""

    def __init__(self, given: argparse.Namespace, arguments: Sequence[str]) -> None:
        self.plan = SMALL if given.small else Plan()
        self.given, self.device = given, given.device
        self.ends_s = time.monotonic() + given.budget_s
        self.out: Path = given.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.rows: list[dict[str, Any]] = []
        self.memory: list[dict[str, Any]] = []
        self.skipped: list[str] = []
        self.failed: list[str] = []
        self.mixes: list[tuple[Mix, float]] = []
        self.facts: dict[str, Any] = {}
        self.value_bytes = torch.empty(0, dtype=self.plan.dtype).element_size()
        self.provenance = {
            "torch": torch.__version__,
            "commit": commit(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": " ".join(("benchmarks/gpu/run.py", *arguments)),
        }

    def sync(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)

    def attempt(self, what: str, measure: Callable[[], None]) -> None:
        """Measure if there is time and room, and write down everything so far."""
        if time.monotonic() >= self.ends_s:
            self.skipped.append(f"{what}: no time left")
        else:
            try:
                measure()
            except (CapacityError, RuntimeError) as error:  # the others may still be measured
                self.failed.append(f"{what}: {error!r}")
                print(self.failed[-1], flush=True)
        self.save()

    def device_facts(self) -> None:
        """Name, published peaks, and what a large copy and a matrix product reach."""
        plan = self.plan
        name = "cpu" if self.device == "cpu" else torch.cuda.get_device_name(self.device)
        peaks = next((p for known, p in PEAKS.items() if known in name), None)
        source = torch.ones(plan.copy_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        copy_s = self.best_s(lambda: target.copy_(source))
        a, b = torch.randn(2, plan.matmul, plan.matmul, device=self.device).to(plan.dtype)
        product_s = self.best_s(lambda: a @ b)
        measured = (2 * plan.copy_bytes / copy_s, 2 * plan.matmul**3 / product_s)
        self.facts = {
            "name": name,
            "measured_bytes_per_s": measured[0],
            "measured_flops_per_s": measured[1],
            "roofline": "published peaks" if peaks else "measured copy and product",
            "bytes_per_s": (peaks or measured)[0],
            "flops_per_s": (peaks or measured)[1],
        }
        print(
            f"{name}: copies {measured[0] / 1e12:.2f} TB/s, multiplies {measured[1] / 1e12:.1f} "
            f"Tflop/s; ratios are to the {self.facts['roofline']}"
        )

    def best_s(self, function: Callable[[], object]) -> float:
        seconds = []
        for _ in range(5):
            self.sync()
            began = time.perf_counter()
            function()
            self.sync()
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    def record(self, ex: Executor, kind: str, graphs: str, times: list[float], size: Size) -> None:
        """Keep a measurement: its median, the roofline of the same pass, and their ratio."""
        if self.device != "cpu" and graphs == "on" and not ex.captured_graphs:
            raise RuntimeError("no graph was captured")
        rates = self.facts["flops_per_s"], self.facts["bytes_per_s"]
        least_s, bound = roofline(ex.config, self.value_bytes, *rates, size)
        seconds, model = statistics.median(times), shape_name(ex.config)
        what = {"model": model, "kind": kind, "graphs": graphs, **size._asdict()}
        times_s = {"seconds": seconds, "fastest_s": min(times), "roofline_s": least_s}
        ratio = {"ratio": seconds / least_s, "bound": bound, "captured": ex.captured_graphs}
        self.rows.append({**what, **times_s, **ratio})
        print(
            f"{model:9} {kind:9} graphs {graphs:3} {size.rows:3} rows {size.tokens:5} tokens "
            f"{size.read:6} read {seconds * 1e3:9.3f} ms  {least_s * 1e3:9.3f} ms ({bound}) "
            f"{seconds / least_s:6.2f}x",
            flush=True,
        )

    def save(self) -> None:
        """Write all files anew: the results, and a profile of each model measured so far."""
        everything = {
            "provenance": self.provenance,
            "device": self.facts,
            "measurements": self.rows,
            "memory": self.memory,
            "skipped": self.skipped,
            "failed": self.failed,
        }
        (self.out / "results.json").write_text(json.dumps(everything, indent=1) + "\n")
        for model in ("llada-8b", "dream-7b"):
            cached = {g: self.table(model, "cached", g) for g in ("on", "off")}
            whole = self.table(model, "recompute", "off")
            served = dict(whole)
            for tokens, seconds in cached["on"].items():
                served[tokens] = max(seconds, served.get(tokens, 0.0))
            tables = {"": served, "_recompute": whole}
            tables |= {"_cached": cached["on"], "_cached_eager": cached["off"]}
            for suffix, table in tables.items():
                if table and (suffix or (whole and cached["on"])):
                    source = self.source(model, suffix)
                    sizes = sorted(table)
                    profile = StepProfile(tuple(sizes), tuple(table[n] for n in sizes), source)
                    profile.save(self.out / f"{model}{suffix}.json")
        if self.mixes:
            self.save_ar()

    def table(self, model: str, kind: str, graphs: str) -> dict[int, float]:
        """Seconds by tokens executed, at the usual context."""
        wanted = (model, kind, graphs)
        return {
            row["tokens"]: row["seconds"]
            for row in self.rows
            if (row["model"], row["kind"], row["graphs"]) == wanted
            and row["read"] in (0, row["rows"] * self.plan.context)
        }

    def save_ar(self) -> None:
        config = self.config("causal-7b")
        weights = layer_weights(config) + 2 * config.hidden_size * config.vocab_size
        BatchProfile.fitted(
            parameters=weights,
            layers=config.layers,
            hidden=config.heads * config.head_dim,
            kv_bytes_per_token=kv_bytes_per_token(config, self.value_bytes),
            weight_bytes=weights * self.value_bytes,
            steps=self.mixes,
            source=self.source("causal-7b", ""),
        ).save(self.out / "causal-7b.json")

    def source(self, model: str, suffix: str) -> str:
        what = suffix.replace("_", " ").strip() or (
            "decodes with CUDA graphs" if model == "causal-7b" else "slower of cached, recompute"
        )
        size = "a small model like " * self.given.small + model
        device = self.facts.get("name", self.device)
        return (
            f"measured: {size}, random weights, {str(self.plan.dtype)[6:]}, {what}, on {device}; "
            + ", ".join(f"{key} {value}" for key, value in self.provenance.items())
        )

    def config(self, model: str) -> ModelConfig:
        return small(SHAPES[model]) if self.given.small else SHAPES[model]

    @contextmanager
    def executor(self, kind: type[Kind], loaded: LoadedModel, graphs: str) -> Iterator[Kind]:
        """An executor with pages for the widest batch, or for what fits; memory is noted."""
        longest = max(self.plan.context, *self.plan.contexts) + self.plan.most_tokens
        tokens = max(self.plan.widths) * (self.plan.context + 64) + longest
        page_bytes = PAGE_TOKENS * kv_bytes_per_token(loaded.config, self.value_bytes)
        pages = tokens // PAGE_TOKENS
        if self.device != "cpu":
            torch.cuda.reset_peak_memory_stats(self.device)
            free, _ = torch.cuda.mem_get_info(self.device)
            pages = min(pages, int(0.6 * free) // page_bytes)
        try:
            yield kind(loaded, page_tokens=PAGE_TOKENS, page_capacity=pages, graphs=graphs)
        finally:
            note = {"model": loaded.name, "graphs": graphs, "pages_bytes": pages * page_bytes}
            note["weights_bytes"] = sum(p.nbytes for p in loaded.model.parameters())
            if self.device != "cpu":
                note["peak_allocated_bytes"] = torch.cuda.max_memory_allocated(self.device)
                note["reserved_bytes"] = torch.cuda.memory_reserved(self.device)
            self.memory.append(note)
            self.clean()

    def clean(self) -> None:
        gc.collect()
        if self.device != "cpu":
            torch.cuda.empty_cache()

    def check(self) -> None:
        """Greedy tokens of small models on the device are those of the CPU, in float32."""
        for name, shape in SHAPES.items():
            config = small(shape)
            host = build(name, config, "cpu", torch.float32, std=0.3)
            loaded = build(name, config, self.device, torch.float32)
            loaded.model.load_state_dict(host.model.state_dict())
            rows = [diffusion_row(i, 20 + 9 * i, 16, 8) for i in range(5)]
            if host.family is Family.AUTOREGRESSIVE:
                rows = [ar_row(i, 20 + 9 * i, 12) for i in range(5)]
            expected = tokens_of(host, rows, "off")
            for graphs in ("off", "on"):
                if tokens_of(loaded, rows, graphs) != expected:
                    raise SystemExit(f"{name}, graphs {graphs}: other tokens than on the CPU")
        print("tokens of small models in float32: as on the CPU, with graphs and without")

    def cached(self, ex: DiffusionExecutor, graphs: str, width: int, context: int) -> None:
        """Cached steps of one block a row, after a recompute step of each."""
        block = self.plan.block
        rows = [diffusion_row(i, context - block, block, block) for i in range(width)]
        with held(ex, rows):
            for request, _ in rows:
                step_seconds(ex, [Step(request.id, StepKind.RECOMPUTE, context, context, 1.0)])
            steps = [Step(r.id, StepKind.CACHED, block, context, 1.0) for r, _ in rows]
            times = [step_seconds(ex, steps) for _ in range(self.plan.repeats + 2)][2:]
        tokens = width * block
        size = Size(width, tokens, tokens * context, width * context, tokens)
        self.record(ex, "cached", graphs, times, size)

    def recompute(self, ex: DiffusionExecutor, tokens: int) -> None:
        """Recompute steps of rows of ``row_tokens``, or of one shorter row."""
        length = min(tokens, self.plan.row_tokens)
        block, width = min(self.plan.block, length // 2), tokens // length
        rows = [diffusion_row(i, length - block, block, block) for i in range(width)]
        with held(ex, rows):
            steps = [Step(r.id, StepKind.RECOMPUTE, length, length, 1.0) for r, _ in rows]
            times = [step_seconds(ex, steps) for _ in range(min(self.plan.repeats, 5) + 2)][2:]
        size = Size(width, tokens, tokens * length, 0, width * block)
        self.record(ex, "recompute", "off", times, size)

    def causal(
        self, ex: AutoregressiveExecutor, graphs: str, chunk: int, decodes: int, context: int
    ) -> None:
        """Batches of ``decodes`` beside a chunk of a prompt, all after ``context`` positions."""
        repeats = self.plan.repeats
        rows = [ar_row(i, context, repeats + 8) for i in range(decodes)]
        with held(ex, rows):
            for request, _ in rows:
                self.prefill(ex, request, context)
            times, mixes = [], []
            for n in range(repeats + 2):
                steps = [Step(r.id, StepKind.DECODE, 1, context + n + 1) for r, _ in rows]
                row = ar_row(decodes, context + chunk, 4)
                with held(ex, [row] if chunk else []):
                    if chunk:
                        self.prefill(ex, row[0], context)
                        steps.append(Step(row[0].id, StepKind.PREFILL, chunk, context + chunk))
                    times.append(step_seconds(ex, steps))
                mixes.append(Mix.of(steps))
        mix, times = mixes[2 + repeats // 2], times[2:]
        if graphs == "on" or chunk:
            self.mixes.append((mix, statistics.median(times)))
        prefilled, pairs, _, decode_context = mix
        read = decode_context + (context if chunk else 0)
        size = Size(len(steps), prefilled + decodes, pairs + decode_context, read, len(steps))
        self.record(ex, "prefill" if chunk else "decode", "off" if chunk else graphs, times, size)

    def prefill(self, ex: AutoregressiveExecutor, request: Request, tokens: int) -> None:
        for start in range(0, tokens, 1024):
            stop = min(start + 1024, tokens)
            step_seconds(ex, [Step(request.id, StepKind.PREFILL, stop - start, stop)])

    def diffusion_model(self, model: str) -> None:
        plan = self.plan
        loaded = build(model, self.config(model), self.device, plan.dtype)
        with self.executor(DiffusionExecutor, loaded, "on") as ex:
            cached = partial(self.cached, ex, "on")
            for width in plan.few_widths:
                self.attempt(f"{model} cached", partial(cached, width, plan.context))
            for tokens in plan.recompute:
                self.attempt(f"{model} recompute", partial(self.recompute, ex, tokens))
            for width in plan.widths:
                if width not in plan.few_widths:
                    self.attempt(f"{model} cached", partial(cached, width, plan.context))
            for context in plan.contexts:
                self.attempt(f"{model} cached", partial(cached, 1, context))
        del ex, cached
        self.clean()
        with self.executor(DiffusionExecutor, loaded, "off") as ex:
            for width in plan.widths:
                measure = partial(self.cached, ex, "off", width, plan.context)
                self.attempt(f"{model} cached, no graphs {width}", measure)

    def ar_model(self, model: str) -> None:
        plan = self.plan
        loaded = build(model, self.config(model), self.device, plan.dtype)
        for graphs in ("on", "off"):
            with self.executor(AutoregressiveExecutor, loaded, graphs) as ex:
                points = [(0, width, plan.context) for width in plan.widths]
                points += [(0, width, c) for c in plan.contexts for width in plan.few_widths[:2]]
                if graphs == "on":
                    points += [(n, d, plan.context) for n in plan.prefill for d in plan.decodes]
                    points += [(n, 0, 0) for n in plan.prefill]
                for point in points:
                    what = f"{model} {point}, graphs {graphs}"
                    self.attempt(what, partial(self.causal, ex, graphs, *point))
            del ex
            self.clean()


def commit() -> str:
    folder = Path(__file__).parent
    done = subprocess.run(
        ("git", "rev-parse", "--short", "HEAD"), cwd=folder, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def main(arguments: Sequence[str]) -> int:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder of the results")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget-s", type=float, default=420.0, help="no measurement begins later")
    parser.add_argument("--small", action="store_true", help="tiny models, float32: a dry run")
    given = parser.parse_args(arguments)
    if given.device == "cpu" and not given.small:
        parser.error("needs a CUDA device; --small is a dry run without one")
    bench = Bench(given, arguments)
    bench.device_facts()
    bench.check()
    bench.save()
    bench.diffusion_model("llada-8b")
    bench.clean()
    bench.ar_model("causal-7b")
    bench.clean()
    bench.diffusion_model("dream-7b")
    bench.save()
    counts = f"measured {len(bench.rows)}, failed {len(bench.failed)}"
    print(f"{counts}, no time for {len(bench.skipped)}; written to {bench.out}")
    return int(bool(bench.failed))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
