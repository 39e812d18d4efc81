"""Measured batches of an autoregressive model: kept, extended, read again."""

import pytest

from stepserve.core.errors import FieldError
from stepserve.core.ids import InstanceId
from stepserve.core.instance import InstanceSpec
from stepserve.core.step import Mix
from stepserve.cost.batch_profile import BatchProfile

SPEC = InstanceSpec(InstanceId("i"), 1, 100, 16, 8)
STEPS = [(Mix(0, 0, n, 256 * n), 0.020 + 0.0002 * n) for n in (1, 8, 32)]
STEPS += [(Mix(n, n * (n + 1) // 2), 0.02 + n * 2e-4) for n in (64, 256, 512)]
SHAPE = {"parameters": 1e9, "layers": 16, "hidden": 2048}
BYTES = {"kv_bytes_per_token": 65_536, "weight_bytes": 2e9}


def profile():
    return BatchProfile.fitted(**SHAPE, **BYTES, steps=STEPS, source="made up")


def seconds(of, mix):
    rows = mix.decodes + (mix.prefill_tokens > 0)
    return of.cost_model().step_time_s(mix.prefill_tokens + mix.decodes, rows, SPEC, mix)


def test_what_is_written_is_read_again(tmp_path):
    profile().save(tmp_path / "p.json")
    again = BatchProfile.load(tmp_path / "p.json")
    assert again == profile()
    assert seconds(again, STEPS[0][0]) == seconds(profile(), STEPS[0][0])


def test_batches_measured_later_move_the_table_and_give_way_to_still_later_ones(tmp_path):
    mix = STEPS[2][0]
    later = profile().extended([(mix, 0.08)] * 30)
    assert later.steps == profile().steps
    assert seconds(later, mix) > 1.5 * seconds(profile(), mix)
    later.save(tmp_path / "p.json")
    assert BatchProfile.load(tmp_path / "p.json") == later
    again = later.extended([(mix, 0.03)])
    assert len(again.learned) == 1, "however often a server was started"
    assert profile().extended([]) == profile()


@pytest.mark.parametrize("text", ["{}", "no json", '{"source": "", "line": {}, "steps": [[1]]}'])
def test_a_file_of_another_kind_is_refused(tmp_path, text):
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(FieldError) as error:
        BatchProfile.load(path)
    assert error.value.field == "profile"
