import pytest

from stepserve.cli.jobs import bundled_jobs, text_jobs
from stepserve.core.errors import FieldError
from stepserve.engine.bundled.tasks import held_out
from stepserve.sim.workload import Arrival


def test_bundled_problems_are_held_out_seeded_and_scored():
    jobs = bundled_jobs(20, seed=1, max_tokens=None)
    assert all(held_out(job.prompt) for job in jobs)
    assert [job.prompt for job in jobs] == [job.prompt for job in bundled_jobs(20, 1, 64)]
    assert [job.prompt for job in jobs] != [job.prompt for job in bundled_jobs(20, 2, None)]
    for job in jobs:
        assert job.correct(job.problem.response)
        assert job.correct("I do not know.") is False
        assert 1 <= job.expected_tokens <= job.max_tokens == 96


def test_text_has_the_length_of_the_arrival_or_the_one_given():
    jobs = text_jobs([Arrival(0.0, 5000, 7), Arrival(1.0)], seed=0, prompt_tokens=3, max_tokens=9)
    assert [(len(job.prompt.split()), job.max_tokens) for job in jobs] == [(5000, 7), (3, 9)]
    assert jobs[0].correct("anything") is None


@pytest.mark.parametrize(
    ("prompt", "output", "option"), [(None, 1, "--prompt-tokens"), (1, None, "--max-tokens")]
)
def test_a_missing_length_names_its_option(prompt, output, option):
    with pytest.raises(FieldError) as error:
        text_jobs([Arrival(0.0)], 0, prompt, output)
    assert error.value.field == option


def test_a_share_of_the_prompts_is_long():
    arrivals = [Arrival(float(i)) for i in range(200)]
    jobs = text_jobs(arrivals, 0, 10, 5, long_prompts=(0.25, 400))
    lengths = [len(job.prompt.split()) for job in jobs]
    assert set(lengths) == {10, 400}
    assert 30 <= lengths.count(400) <= 70
