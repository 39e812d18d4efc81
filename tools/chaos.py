"""Serves load for minutes while something is killed, drained, changed or cancelled all the time.

    python tools/chaos.py --seconds 600 --every 3

A cluster of three instances in this process, with a tiny random model of either family in turn.
Exits with 1 if a request hung, or ended otherwise than whole, cancelled, refused or with an
error that says why.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from stepserve.core.request import Family
from stepserve.engine.loader import load_model
from support.causal_models import write_checkpoint
from support.chaos import Chaos, chaos_config
from support.live_cluster import assert_at_rest, running_cluster, tiny_checkpoint
from support.step_profiles import write_step_profiles


async def serve(family: Family, folder: Path, args: argparse.Namespace) -> Chaos:
    """One family for its share of the time."""
    if family is Family.DIFFUSION:
        tiny_checkpoint(folder)
        write_step_profiles(folder, (1, 2))
    else:
        write_checkpoint(folder)
    loaded = load_model(folder)
    async with running_cluster(chaos_config(family, folder), loaded=loaded) as cluster:
        chaos = Chaos(cluster, family, args.seed)
        await chaos.learn()
        each = max(1, round(args.rate * args.every))
        requests = round(args.rate * args.seconds)

        async def gap() -> None:
            await asyncio.sleep(chaos.random.expovariate(args.rate))

        await chaos.run(requests, lambda: asyncio.sleep(0), gap, each)
        while cluster.loop.scheduler.reconfiguration.under_way:
            await asyncio.sleep(0.01)
        assert_at_rest(cluster)
        return chaos


def main() -> int:
    """Both families, one after the other; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="of each family")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between disturbances")
    parser.add_argument("--rate", type=float, default=30.0, help="requests/s")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    wrong = 0
    for family in Family:
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            chaos = asyncio.run(serve(family, Path(folder), args))
        ends = ("whole", "cancelled", "failed", "refused", "hangs")
        told = chaos.counts["asked"] - sum(chaos.counts[end] for end in ends)
        wrong += chaos.counts["failed"] > 0.01 * chaos.counts["asked"]
        wrong += len(chaos.wrong) + told + chaos.counts["hangs"]
        print(f"{family}: {time.monotonic() - began_s:.0f} s, {json.dumps(chaos.counts)}")
        print(f"longest pause of a request {chaos.paused_s:.2f} s; wrong: {chaos.wrong or 'none'}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
