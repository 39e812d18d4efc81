"""What the server says of a run, in virtual time."""

import asyncio

import pytest

from stepserve.cli.watch import ServerSide, Watch, parse


def scrape(cap, running=1, count=0):
    names = ("migrations_done", "forecasts_refreshed", "caps_updates", "scheduler_events")
    return {
        "stepserve:cap_lowest": cap,
        "stepserve:cap_mean": (1 + cap) / 2,
        "vllm:num_requests_running": running,
        "stepserve:plans_solved_total": 2 * count,
        "stepserve:scheduler_seconds_total": count * 3e-5,
        **{f"stepserve:{name}_total": 10.0 + count for name in names},
    }


def watched(run_virtual, scrapes, seconds):
    asked = []

    async def ask():
        asked.append(asyncio.get_running_loop().time())
        return scrapes[min(len(asked), len(scrapes)) - 1]

    async def run():
        watch = Watch(ask)
        async with watch.watching():
            await asyncio.sleep(seconds)
        return watch.found()

    return run_virtual(run()), asked


def test_counts_grow_and_caps_are_seen_under_load_only(run_virtual):
    scrapes = [scrape(1.0, 0), scrape(0.5, 3, 1), scrape(0.7, 3, 2), scrape(1.0, 0, 4)]
    found, asked = watched(run_virtual, scrapes, 2.5)
    assert asked == [0.0, 1.0, 2.0, 2.5]
    assert found == ServerSide(
        migrations=4,
        forecast_refreshes=4,
        caps_updates=4,
        cap_lowest=0.5,
        cap_mean=pytest.approx(0.8),
        plans=8,
        layout_changes=0,
        scheduler_us=pytest.approx(30.0),
    )


@pytest.mark.parametrize("scrapes", [[None], [{"vllm:num_requests_running": 1.0}]])
def test_a_server_that_does_not_say_is_asked_once(run_virtual, scrapes):
    found, asked = watched(run_virtual, scrapes, 9.0)
    assert found is None
    assert asked == [0.0]


def test_samples_of_a_name_are_added_up():
    text = '# HELP a b\na{x="1"} 2.0\na{x="2 3"} 0.5\nb 1\n'
    assert parse(text) == {"a": 2.5, "b": 1.0}
    with pytest.raises(ValueError, match="could not convert"):
        parse("<html> page\n")
