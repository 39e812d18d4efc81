"""Autoregressive requests of a live cluster that are cut where their ids say."""

import asyncio

import torch

from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload, SamplingParams
from stepserve.core.protocols import Placement
from stepserve.core.request import Family, Request
from stepserve.core.segment import Segment
from support.ar_models import VOCAB
from support.live_cluster import assert_at_rest, collect

PROMPT, OUTPUT = 12, 10


class CutAt:
    """Places a request as its id says, ``NAME:CUT``; without a cut on the first instance."""

    def place(self, request, progress, forecast, view):
        first, *others = sorted(view.loads)
        _, _, cut = request.id.partition(":")
        if not cut or progress.emitted or not others:
            return Placement((Segment(request.id, 0, 0, None, first, 0),))
        start = Segment(request.id, 0, 0, int(cut), first, 0)
        return Placement((start, Segment(request.id, 1, int(cut), None, others[0], 0)))


def request(frontend, name, prompt=PROMPT, output=OUTPUT, seed=0, **sampling):
    generator = torch.Generator().manual_seed(seed)
    ids = tuple(torch.randint(3, VOCAB, (prompt,), generator=generator).tolist())
    arrived_s = frontend.now_s()
    made = Request(RequestId(name), Family.AUTOREGRESSIVE, "tiny", prompt, output, arrived_s)
    return made, Payload(ids, SamplingParams(**{"ignore_eos": True, **sampling}))


async def answer(cluster, name, *, on_tokens=None, **shape):
    made, payload = request(cluster.frontend, name, **shape)
    return await collect(cluster.frontend, made, payload, on_tokens)


async def at_rest(cluster):
    """Once the instances have let go of what was taken back."""
    ledger = cluster.loop.supervisor.scheduler.ledger
    while any(i.claims for i in ledger.instances.values()):
        await asyncio.sleep(0.001)
    assert_at_rest(cluster)
