"""The measured grid names what was run; how long it took is the machine's affair."""

import pytest

from stepserve.core.step import Mix
from stepserve.cost.measured_batches import measure_grid
from stepserve.engine.loader import load_model
from stepserve.engine.torch_engine import facts_of
from support.ar_models import engine, write_checkpoint


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(write_checkpoint(tmp_path_factory.mktemp("m"), seed=7))


def spied(executor):
    """The batches that an executor runs, told to the list returned."""
    ran, run = [], executor.run
    executor.run = lambda batch: ran.append(batch) or run(batch)
    return ran


def test_each_point_is_the_mix_that_ran(loaded):
    executor, facts = engine(loaded), facts_of(loaded, loaded.folder)
    ran = spied(executor)
    points = measure_grid(executor, facts, (0, 5), (0, 12), (0, 2), repeats=1)
    assert [mix for mix, _ in points] == [
        Mix(0, 0, 2, 2),
        Mix(5, 15, 0, 0),
        Mix(5, 15, 2, 2),
        Mix(0, 0, 2, 26),
        Mix(5, 75, 0, 0),
        Mix(5, 75, 2, 26),
    ]
    assert all(seconds > 0.0 for _, seconds in points)
    assert [len(batch.steps) for batch in ran] == [2, 2, 1, 1, 3, 3, 1, 2, 2, 1, 1, 3, 3]
    assert executor.used_pages == 0


def test_points_without_room_are_left_out(loaded):
    """700 positions, and 60 pages of 4."""
    executor, facts = engine(loaded, page_capacity=60), facts_of(loaded, loaded.folder)
    points = measure_grid(executor, facts, (0, 100, 699, 700), (0, 120, 700), (0, 1), repeats=1)
    assert [(mix.prefill_tokens, mix.decode_context) for mix, _ in points] == [
        (0, 1),
        (100, 0),
        (100, 1),
        (0, 121),
        (100, 0),
    ]
    assert executor.used_pages == 0
