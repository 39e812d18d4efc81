"""The step-time table that ``stepserve profile`` measures."""

from pathlib import Path

from stepserve.cost import measured_steps
from stepserve.cost.step_table import StepProfile
from stepserve.engine.diffusion_executor import DiffusionExecutor
from stepserve.engine.torch_engine import facts_of
from support.live_cluster import tiny_model


def test_every_width_is_measured_for_both_kinds_of_step(monkeypatch):
    monkeypatch.setattr(measured_steps, "ROWS", (1, 2))
    model = tiny_model()
    executor = DiffusionExecutor(model, threads=1)
    seconds = measured_steps.measure_steps(executor, facts_of(model, Path()), repeats=2)
    assert list(seconds) == [8, 16, 128, 256]
    assert executor.used_pages == 0
    StepProfile(tuple(seconds), tuple(seconds.values()), "a valid table")
