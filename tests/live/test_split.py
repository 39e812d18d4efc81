"""Requests on two live instances: cut anywhere, the answer is that of an uncut one."""

import asyncio
import contextlib
import dataclasses
import gc
import unittest.mock
from typing import ClassVar

import pytest

from stepserve.core.config import Choice, ControlConfig, ServeConfig
from stepserve.core.errors import FieldError
from stepserve.core.payload import KvChunk
from stepserve.core.request import FinishReason
from stepserve.cost.batch_profile import BatchProfile
from stepserve.engine import torch_engine
from stepserve.engine.ar_executor import AutoregressiveExecutor
from stepserve.engine.loader import load_model
from stepserve.families import profiles, setup
from stepserve.live import deploy
from support.ar_models import write_checkpoint
from support.live_cluster import engine_of, quick_profile, running_cluster, tiny_model
from support.parts import make_control
from support.split_requests import OUTPUT, PROMPT, CutAt, answer, at_rest

LONG = {"prompt": 400, "output": 60, "seed": 9}
MIDDLE = {"prompt": 300, "output": 80, "seed": 7}
"""Of these seeds the best two logits are 0.02 apart or more: rounding, which depends on what a
batch is made of, does not decide."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(write_checkpoint(tmp_path_factory.mktemp("causal")))


@pytest.fixture(scope="module")
def profile(loaded):
    return quick_profile(loaded)


class WatchedExecutor(AutoregressiveExecutor):
    """Compares checksums of what it was sent with those of what it holds then."""

    copies: ClassVar[list]
    damage: ClassVar[frozenset]  # requests whose first chunk is damaged on its way

    def import_kv(self, chunk):
        if chunk.request_id in self.damage and not chunk.start:
            chunk = dataclasses.replace(chunk, data=chunk.data + 1.0)
        good = super().import_kv(chunk)
        if good:
            held = self.export_kv(chunk.request_id, chunk.epoch, chunk.start, chunk.stop)
            self.copies.append((chunk.checksums, held.checksums))
        return good


@contextlib.asynccontextmanager
async def split_cluster(loaded, profile, damage=(), **options):
    """A cluster whose requests are cut where their ids say."""
    options = {"instances": 2, "threads_per_instance": 1, "kv_pages": 200, **options}
    watched = type("Watched", (WatchedExecutor,), {"copies": [], "damage": frozenset(damage)})
    with (
        unittest.mock.patch.object(torch_engine, "AutoregressiveExecutor", watched),
        unittest.mock.patch.object(profiles, "_measured", return_value=profile),
    ):
        config = ServeConfig(**options)
        async with running_cluster(config, loaded=loaded) as cluster:
            cluster.loop.supervisor.scheduler._placement = CutAt()
            while len(cluster.loop.status().instances) < config.instances:
                await asyncio.sleep(0)
            yield cluster, watched.copies


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 5}])
async def test_every_cut_gives_the_tokens_of_an_uncut_request(loaded, profile, sampling):
    async with split_cluster(loaded, profile) as (cluster, copies):
        cuts = range(1, PROMPT + OUTPUT - 1)
        names = ["whole", *(f"r:{cut}" for cut in cuts)]
        whole, *parts = await asyncio.gather(*(answer(cluster, name, **sampling) for name in names))
        assert len(whole.tokens) == OUTPUT
        for cut, part in zip(cuts, parts, strict=True):
            assert part.tokens == whole.tokens, cut
            assert part.end.reason is FinishReason.LENGTH
        assert len(copies) >= len(cuts)
        assert all(sent == held for sent, held in copies)
        assert cluster.loop.migrations == 0
        await at_rest(cluster)


@pytest.mark.parametrize("pages", [8, 0])
async def test_long_requests_are_pushed_while_they_run(loaded, profile, pages):
    control = ControlConfig(chunk_tokens=64, push_pages=pages)
    async with split_cluster(loaded, profile, control=control) as (cluster, copies):
        names = ["whole", "r:150", "r:333", "r:400", "r:415", "r:457"]
        whole, *parts = await asyncio.gather(*(answer(cluster, n, **LONG) for n in names))
        assert all(part.tokens == whole.tokens for part in parts)
        assert (len(copies) > len(parts)) is (pages > 0)
        assert all(sent == held for sent, held in copies)
        await at_rest(cluster)


async def test_a_damaged_copy_is_computed_anew(loaded, profile):
    async with split_cluster(loaded, profile, damage=["r:9", "r:15"]) as (cluster, copies):
        whole = await answer(cluster, "whole")
        for name in ("r:9", "r:15"):
            assert (await answer(cluster, name)).tokens == whole.tokens
        assert copies == []
        await at_rest(cluster)


async def test_an_answer_that_ends_early_is_not_handed_over(loaded, profile):
    """Its second token stops it, before and after the cut."""
    async with split_cluster(loaded, profile) as (cluster, _):
        whole = await answer(cluster, "whole")
        stop = whole.tokens[3]
        early = await asyncio.gather(
            *(answer(cluster, f"r:{cut}", stop_token_ids=(stop,)) for cut in (5, 12, 13, 19))
        )
        for part in early:
            assert part.end.reason is FinishReason.STOP
            assert part.tokens == whole.tokens[: whole.tokens.index(stop) + 1]
        await at_rest(cluster)


@pytest.mark.parametrize("cut", [150, 330])
@pytest.mark.parametrize("after", [1, 40])
async def test_a_cancelled_request_leaves_nothing_behind(loaded, profile, cut, after):
    async with split_cluster(loaded, profile) as (cluster, _):
        seen = []

        def leave(made):
            seen.append(made)
            if len(seen) == after:
                cluster.frontend.cancel(made.id, FinishReason.CANCELLED)

        end = (await answer(cluster, f"r:{cut}", on_tokens=leave, **MIDDLE)).end
        assert end.reason is FinishReason.CANCELLED
        await at_rest(cluster)


@pytest.mark.parametrize("cut", [150, 330])
@pytest.mark.parametrize("after", [1, 20, 45])
@pytest.mark.parametrize("victim", [0, 1])
async def test_an_instance_is_lost_before_and_after_the_hand_over(
    loaded, profile, cut, after, victim
):
    """The second emits everything where the prompt is cut; else the first emits 31 tokens."""
    async with split_cluster(loaded, profile) as (cluster, _):
        whole = await answer(cluster, "whole", **MIDDLE)
        seen, names = [], sorted(i.spec.id for i in cluster.loop.status().instances)

        def lose(made):
            seen.append(made)
            if len(seen) == after:
                cluster.transport.kill(names[victim])

        part = await answer(cluster, f"r:{cut}", on_tokens=lose, **MIDDLE)
        assert part.tokens == whole.tokens
        assert cluster.loop.losses <= 1
        await at_rest(cluster)


def build(config, loaded):
    return deploy.build_cluster(config, engine_of(config, loaded))


ALONE = {"instances": 1, "threads_per_instance": 1, "kv_pages": 64}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"control": make_control(planner="greedy")}, "control.planner"),
        ({"predictor": Choice("boosted")}, "predictor"),
        ({"log_steps": "steps.csv"}, "log_steps"),
        ({"control": make_control(threshold="deadline_fit")}, "control.threshold"),
        ({"control": make_control(migration="any_step")}, "control.migration"),
        (
            {"control": make_control(placement="disaggregated")},
            "control.placement.prefill_instances",
        ),
        ({"profile": "nowhere.json"}, "profile"),
    ],
)
def test_settings_that_mean_nothing_to_an_autoregressive_model_are_refused(
    loaded,
    profile,
    monkeypatch,
    change,
    field,
):
    monkeypatch.setattr(profiles, "_measured", lambda *_: profile)
    with pytest.raises(FieldError) as error:
        build(ServeConfig(**ALONE | change), loaded)
    assert error.value.field == field


@pytest.mark.parametrize("placement", ["tandem_split", "disaggregated"])
def test_a_diffusion_model_is_not_cut(placement):
    config = ServeConfig(**ALONE, control=make_control(placement=placement))
    with pytest.raises(FieldError, match="autoregressive") as error:
        build(config, tiny_model())
    assert error.value.field == "control.placement"


def test_batch_times_of_a_diffusion_model_are_not_kept():
    with pytest.raises(FieldError) as error:
        build(ServeConfig(**ALONE, keep_profile="batches.json"), tiny_model())
    assert error.value.field == "keep_profile"


async def test_measured_batches_are_kept_for_the_next_start(loaded, profile, tmp_path):
    path = tmp_path / "batches.json"
    async with split_cluster(loaded, profile, keep_profile=str(path)) as (cluster, _):
        await answer(cluster, "r:12")
        await at_rest(cluster)
        assert not path.exists()
    kept = BatchProfile.load(path)
    assert kept.steps == profile.steps
    assert kept.learned
    config = ServeConfig(**ALONE, keep_profile=str(path))
    assert setup.make_setup(config, engine_of(config, loaded)).profile == kept
    other = dataclasses.replace(kept, line=dataclasses.replace(kept.line, weight_bytes=1.0))
    other.save(path)
    with pytest.raises(FieldError, match="weights") as error:
        setup.make_setup(config, engine_of(config, loaded))
    assert error.value.field == "keep_profile"


async def test_hand_overs_are_counted_and_are_no_migrations(loaded, profile):
    async with split_cluster(loaded, profile) as (cluster, _):
        cut = await answer(cluster, "r:12")
        early = await answer(cluster, "r:20", output=4)  # ends before its cut
        await at_rest(cluster)
        reading = cluster.control_reading()
        assert reading.handovers == 1
        assert reading.migrations_asked == reading.migrations_done == 0
        assert (cut.end.report.migrations, cut.end.report.handovers) == (0, 1)
        assert (early.end.report.migrations, early.end.report.handovers) == (0, 0)


async def test_nothing_keeps_the_copies_alive(loaded, profile):
    """The reminder of a hand-over lasts for seconds; keys and values do not."""
    control = ControlConfig(push_pages=0)
    async with split_cluster(loaded, profile, control=control) as (cluster, _):
        await answer(cluster, "r:290", **MIDDLE)
        await at_rest(cluster)
        gc.collect()
        chunks = [kept for kept in gc.get_objects() if type(kept) is KvChunk]
        assert "r:290" not in {chunk.request_id for chunk in chunks}
