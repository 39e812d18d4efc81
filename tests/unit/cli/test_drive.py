import asyncio

import pytest

from stepserve.cli.client import Reply
from stepserve.cli.drive import one_by_one, open_loop


def server(seconds, log=None):
    async def send(index):
        now = asyncio.get_running_loop().time
        reply = Reply(sent_s=now())
        await asyncio.sleep(seconds)
        reply.ended_s = now()
        if log is not None:
            log.append(index)
        return reply

    return send


def test_slow_answers_do_not_delay_later_arrivals(run_virtual):
    async def go():
        await asyncio.sleep(7.0)  # arrivals count from the call, not from the loop's zero
        return await open_loop([0.0, 1.0, 1.0, 5.0], server(100.0))

    records = run_virtual(go())
    assert [r.reply.sent_s for r in records] == pytest.approx([7.0, 8.0, 8.0, 12.0])
    assert [r.reply.ended_s - r.due_s for r in records] == pytest.approx([100.0] * 4)
    assert [r.lag_s for r in records] == pytest.approx([0.0] * 4)


def test_records_keep_the_order_of_arrival(run_virtual):
    done = []

    async def send(index):
        return await server(10.0 - index, done)(index)

    records = run_virtual(open_loop([0.0, 0.1, 0.2], send))
    assert done == [2, 1, 0]
    assert [r.due_s for r in records] == [0.0, 0.1, 0.2]


def test_a_client_that_is_held_up_shows_lag_and_counts_it_as_latency(run_virtual):
    async def send(index):
        await asyncio.sleep(0.25)  # stands for a busy event loop before the request leaves
        return await server(1.0)(index)

    (record,) = run_virtual(open_loop([2.0], send))
    assert record.lag_s == pytest.approx(0.25)
    assert record.reply.ended_s - record.due_s == pytest.approx(1.25)


def test_one_by_one_never_overlaps(run_virtual):
    ticks = []
    records = run_virtual(one_by_one(3, server(2.0), ticks.append))
    assert [r.reply.sent_s for r in records] == pytest.approx([0.0, 2.0, 4.0])
    assert [r.reply.ended_s - r.due_s for r in records] == pytest.approx([2.0] * 3)
    assert ticks == [r.reply for r in records]
