"""The step-time table that ``stepserve profile`` measures."""

from stepserve.cost.step_table import StepProfile
from stepserve.engine import diffusion_profiling as profiling
from stepserve.engine.diffusion_executor import DiffusionExecutor
from support.live_cluster import tiny_model


def test_every_width_is_measured_for_both_kinds_of_step(monkeypatch):
    monkeypatch.setattr(profiling, "ROWS", (1, 2))
    executor = DiffusionExecutor(tiny_model(), threads=1)
    seconds = profiling.measure(executor, block_tokens=8, repeats=2)
    assert list(seconds) == [8, 16, 128, 256]
    assert executor.used_pages == 0
    StepProfile(tuple(seconds), tuple(seconds.values()), "a valid table")
