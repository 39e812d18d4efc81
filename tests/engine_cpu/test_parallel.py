"""Models split over processes: the tokens, confidences, keys and values of one process."""

import itertools
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stepserve.core.errors import FieldError
from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload, SamplingParams
from stepserve.core.request import (
    CacheMode,
    DiffusionOptions,
    Family,
    FinishReason,
    Progress,
    Request,
)
from stepserve.core.step import Batch, Step, StepKind
from stepserve.engine.ar_executor import AutoregressiveExecutor
from stepserve.engine.ar_offline import due_step, generate
from stepserve.engine.diffusion_executor import DiffusionExecutor
from stepserve.engine.diffusion_offline import denoise
from stepserve.engine.loader import load_model
from stepserve.engine.models.experts import ExpertsConfig, SoftmaxRouting
from stepserve.engine.models.transformer import ModelConfig
from stepserve.engine.parallel import Share, WorkerLostError
from stepserve.engine.workers import (
    ParallelAutoregressiveExecutor,
    ParallelExecutor,
    Setup,
    remove_folders_left,
)
from support import ar_models, checkpoints
from support.diffusion_models import DREAM, LLADA, write_checkpoint

PAGES = {"page_tokens": 4, "page_capacity": 400, "threads": 1}
MODES = ({}, {"temperature": 0.9}, {"temperature": 1.0, "top_p": 0.8}, {"min_tokens": 9},
         {"temperature": 1.2, "top_k": 5, "min_p": 0.01}, {"logprobs": 3})  # fmt: skip

CHECKPOINTS = {
    "llama": lambda folder: ar_models.write_checkpoint(folder, tied=True, seed=1),
    "qwen2": lambda folder: ar_models.write_checkpoint(folder, "Qwen2ForCausalLM", seed=7),
    "llada": lambda folder: write_checkpoint(folder, LLADA, 3),
    "dream": lambda folder: write_checkpoint(folder, DREAM, 4),
    "qwen3": lambda folder: published(folder, "Qwen3ForCausalLM"),
    "llada-moe": lambda folder: published(folder, "LLaDAMoEModelLM"),
    "llada2": lambda folder: published(folder, "LLaDA2MoeModelLM", block_size=8),
    "fast-dllm": lambda folder: published(folder, "Fast_dLLM_QwenForCausalLM"),
}
AUTOREGRESSIVE = "llama", "qwen2", "qwen3"


def published(folder, architecture, **changes):
    checkpoints.write(folder, architecture, seed=6, **changes)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = {}

    def of(name):
        if name not in made:
            made[name] = CHECKPOINTS[name](tmp_path_factory.mktemp(name))
        return made[name]

    return of


@pytest.fixture(scope="module")
def split(folder):
    """Executors over so many processes, kept for all tests."""
    made = {}

    def of(name, size):
        if (name, size) not in made:
            kind = ParallelAutoregressiveExecutor if name in AUTOREGRESSIVE else ParallelExecutor
            setup = Setup(str(folder(name)), ("cpu",) * size, timeout_s=120.0, **PAGES)
            made[name, size] = kind(setup)
        return made[name, size]

    yield of
    for executor in made.values():
        executor.close()
        assert all(worker.exitcode == 0 for worker in executor._processes)


def assert_same(got, whole):
    assert got.keys() == whole.keys()
    for name, result in whole.items():
        assert (got[name].finished, got[name].error) == (result.finished, None)
        assert got[name].token_ids == result.token_ids
        assert (got[name].steps, got[name].forced) == (result.steps, result.forced)
        for one, other in zip(got[name].tokens, result.tokens, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=2e-5)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


def small(ids):
    """Of every vocabulary here."""
    return tuple(3 + token % 40 for token in ids)


def in_pieces(request, outstanding):
    return min(outstanding, 7 if request.prompt_tokens % 2 else 100)


@pytest.mark.parametrize(("name", "size"), [("llama", 2), ("qwen2", 2), ("qwen2", 4), ("qwen3", 2)])
def test_autoregressive_tokens_are_those_of_one_process(folder, split, name, size):
    """Of two KV heads, each of four ranks holds one that another holds, too."""
    rows = [
        ar_models.make(f"{i}", 3 + 5 * i, 12, i, **({"logprobs": 0} | mode))
        for i, mode in enumerate(MODES)
    ]
    rows = [(request, replace(p, prompt_ids=small(p.prompt_ids))) for request, p in rows]
    whole = generate(ar_models.engine(load_model(folder(name))), rows, in_pieces)
    assert_same(generate(split(name, size), rows, in_pieces), whole)
    assert split(name, size).used_pages == 0


@pytest.mark.parametrize(
    ("name", "size", "threshold"),
    [("llada", 2, 0.7), ("llada", 4, 0.7), ("dream", 2, 0.7), ("llada-moe", 3, 0.2)],
)
def test_diffusion_tokens_are_those_of_one_process(folder, split, make, name, size, threshold):
    """Five heads, 42 MLP columns and 45 tokens are not divided evenly."""
    caches = [mode for mode in CacheMode if mode is not CacheMode.BLOCK] * 2
    rows = [
        make(f"{i}", prompt=5 + i, seed=i, cache=caches[i], **({"logprobs": 0} | mode))
        for i, mode in enumerate(MODES)
    ]
    whole = denoise(DiffusionExecutor(load_model(folder(name)), **PAGES), rows, threshold)
    assert_same(denoise(split(name, size), rows, threshold), whole)
    assert sum(result.forced for result in whole.values()) > 0
    assert any(result.steps < len(result.tokens) for result in whole.values())
    assert split(name, size).used_pages == 0


@pytest.mark.parametrize(("name", "size"), [("llada2", 2), ("llada2", 4), ("fast-dllm", 2)])
def test_block_causal_tokens_are_those_of_one_process(folder, split, name, size):
    """LLaDA2 reads queries, keys and values from one tensor, and has experts and a shared one."""
    loaded = load_model(folder(name))
    block = loaded.default_block_length
    rows = []
    for index, (prompt, output) in enumerate([(1, 9), (block, 2 * block), (11, 13)]):
        options = DiffusionOptions(block_tokens=block, cache_mode=CacheMode.BLOCK)
        made = RequestId(str(index)), Family.DIFFUSION, "tiny", prompt, output, 0.0
        payload = Payload(
            small(range(7 * index, 7 * index + prompt)), SamplingParams(logprobs=2 * (index % 2))
        )
        rows.append((Request(*made, diffusion=options), payload))
    whole = denoise(DiffusionExecutor(loaded, **PAGES), rows, 0.3)
    assert_same(denoise(split(name, size), rows, 0.3), whole)
    assert any(result.steps < len(result.tokens) for result in whole.values())


def test_confidences_are_those_of_one_process(folder, split, make):
    request, payload = make(prompt=9, seed=2)
    ends = DiffusionExecutor(load_model(folder("llada")), **PAGES), split("llada", 4)
    seen = []
    for executor in ends:
        executor.add(request, payload, Progress(settled=9), {})
        step = Step(request.id, StepKind.RECOMPUTE, 25, 25, 0.99)
        seen.append(executor.run(Batch(0, (step,))).outcomes[0].confidence)
        executor.remove(request.id)
    assert tuple(seen[1]) == pytest.approx(tuple(seen[0]), abs=1e-5)


def test_what_one_refuses_the_others_do_not_hear_of(split):
    executor = split("qwen2", 2)
    request, payload = ar_models.make("r", 6, 4, ignore_eos=True)
    with pytest.raises(FieldError, match="prompt"):
        executor.add(request, replace(payload, prompt_ids=()), Progress(), {})
    executor.remove("unknown")
    bad = Step("nobody", StepKind.PREFILL, 3, 3)
    (outcome,) = executor.run(Batch(0, (bad,))).outcomes
    assert outcome.finished is FinishReason.ERROR
    assert generate(executor, [(request, payload)])["r"].finished is FinishReason.LENGTH


def test_keys_and_values_go_between_unequal_degrees(folder, split):
    """Cut anywhere, from any degree to any: checksums and tokens of an uncut request."""
    row = ar_models.make("r", 21, 8, 5, ignore_eos=True)
    request, payload = row
    one = AutoregressiveExecutor(load_model(folder("qwen2")), **PAGES)
    ends = [one, split("qwen2", 2), split("qwen2", 4)]
    whole = generate(one, [row])["r"].token_ids
    sums = set()
    for (alpha, beta), cut in itertools.product(itertools.permutations(ends, 2), (18, 26)):
        done, tokens = 0, []
        alpha.add(*row, Progress(), {})
        beta.add(*row, Progress(), {})
        while done < cut:
            step = due_step(request, done, len(tokens))
            if step.context_tokens > cut:
                step = step._replace(query_tokens=cut - done, context_tokens=cut)
            tokens += alpha.run(Batch(0, (step,))).settled["r"]
            done = step.context_tokens
        for start, stop in ((8, cut), (0, 8)):
            chunk = alpha.export_kv("r", 1, start, stop)
            assert not beta.import_kv(replace(chunk, data=chunk.data * 2)), "damaged"
            assert beta.import_kv(chunk)
        sent, got = (end.export_kv("r", 1, 0, cut) for end in (alpha, beta))
        assert sent.checksums == got.checksums
        assert torch.equal(sent.data, got.data)
        sums.add((cut, len(sent.checksums)))
        known = {token.offset: token.token_id for token in tokens}
        beta.add(request, payload, Progress(settled=cut, emitted=len(tokens)), known)
        while len(tokens) < 8:
            tokens += beta.run(Batch(0, (due_step(request, done, len(tokens)),))).settled["r"]
            done = request.prompt_tokens + len(tokens) - 1
        assert [token.token_id for token in tokens] == whole
        for end in (alpha, beta):
            end.remove("r")
            assert end.used_pages == 0
    assert sums == {(18, 5), (26, 7)}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_dies_or_hangs_is_an_error_and_nothing_is_left(folder, how):
    setup = Setup(str(folder("qwen2")), ("cpu",) * 2, timeout_s=1.0, **PAGES)
    executor = ParallelAutoregressiveExecutor(setup)
    workers = [worker.pid for worker in executor._processes]
    row = ar_models.make("r", 6, 4)
    executor.add(*row, Progress(), {})
    os.kill(workers[0], how)
    step = due_step(row[0], 0, 0)
    for _ in range(2):
        with pytest.raises(WorkerLostError):
            executor.run(Batch(0, (step,)))
    executor.close()
    executor.close()
    assert not any(alive(pid) for pid in workers)
    with pytest.raises(WorkerLostError):
        executor.run(Batch(0, (step,)))


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


PARENT = """
import multiprocessing, sys
from stepserve.engine import workers

def never(*_):
    print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)
    sys.stdin.read()

if __name__ == "__main__":
    setup = workers.Setup(sys.argv[1], ("cpu",) * 2)
    idle = workers.ParallelExecutor(setup)
    workers._join = never
    workers.ParallelExecutor(setup)
"""


@pytest.fixture
def short_folder():
    """Names of sockets are short."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def test_workers_end_with_a_parent_that_is_killed(folder, short_folder, monkeypatch):
    """One that waits for a call, and one that waits for the other ranks to meet.

    What files the parent left, the next one removes.
    """
    script = short_folder / "parent.py"
    script.write_text(PARENT)
    words = [sys.executable, str(script), str(folder("llada"))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    env = {**os.environ, "TMPDIR": str(short_folder)}
    with subprocess.Popen(words, env=env, **pipes) as parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(alive(pid) for pid in pids)
        parent.kill()
        parent.stdout.read()  # ends when the workers have closed it, too
    assert not any(alive(pid) for pid in pids)
    assert len(list(short_folder.glob("stepserve-tp-*"))) == 1
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(short_folder))
        remove_folders_left()
    assert list(short_folder.iterdir()) == [script]


def test_a_checkpoint_that_does_not_load_is_an_error_that_leaves_nothing(tmp_path):
    folder = ar_models.write_checkpoint(
        tmp_path, change=lambda config, tensors: tensors.pop("model.norm.weight")
    )
    with pytest.raises(FieldError, match=r"missing tensors: model\.norm\.weight"):
        ParallelAutoregressiveExecutor(Setup(str(folder), ("cpu",) * 2))


EXPERTS = ExpertsConfig(6, 9, SoftmaxRouting(2), shared_size=11)
SHAPE = ModelConfig(45, 64, 2, 8, 4, 50, 64, None, 2, experts=EXPERTS)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_shares_tile_the_model(size):
    shares = [Share.of(SHAPE, rank, size) for rank in range(size)]
    assert [i for share in shares for i in share.heads] == list(range(8))
    for part, columns in (("mlp", 50), ("expert", 9), ("shared", 11)):
        assert [i for share in shares for i in getattr(share, part)] == list(range(columns))
    assert [i for share in shares for i in share.vocab][:45] == list(range(45))
    assert {len(share.vocab) for share in shares} == {-(-45 // size)}
    for share in shares:
        assert {head // 2 for head in share.heads} == set(share.kv_heads)


@pytest.mark.parametrize("size", [5, 6, 7, 16])
def test_a_degree_that_leaves_a_rank_without_heads_is_refused(size):
    with pytest.raises(FieldError, match="tp_degree: "):
        Share.of(SHAPE, 0, size)


def test_a_degree_that_leaves_a_rank_without_columns_of_an_expert_is_refused():
    few = replace(SHAPE, experts=replace(EXPERTS, mlp_size=3))
    with pytest.raises(FieldError, match="tp_degree: 4 ranks, but 3 MLP columns"):
        Share.of(few, 0, 4)


def test_experts_are_split_by_columns_and_chosen_by_all():
    share = Share.of(SHAPE, 1, 2)
    assert share.cut("layers.1.experts.router.weight") is None
    assert share.cut("layers.1.experts.router.bias") is None
    assert share.cut("layers.1.experts.up_proj") == (0, range(4, 9))
    assert share.cut("layers.1.experts.down_proj") == (1, range(4, 9))
    assert share.shape("layers.1.experts.down_proj", (6, 64, 9)) == [6, 64, 5]
    assert share.cut("layers.1.experts.shared.gate_proj.weight") == (0, range(5, 11))
    assert share.cut("layers.1.up_proj.weight") == (0, range(25, 50))


def test_what_nobody_taught_to_be_split_is_refused():
    share = Share.of(SHAPE, 1, 2)
    assert share.cut("layers.0.q_norm.weight") is None
    assert share.cut("layers.0.o_proj.weight") == (1, range(32, 64))
    for name in ("layers.0.scale.weight", "layers.0.o_proj.bias"):
        with pytest.raises(FieldError, match="not made to be split"):
            share.cut(name)
