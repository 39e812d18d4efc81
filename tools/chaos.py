"""Serves load for minutes while something is killed, drained, changed or cancelled all the time.

    python tools/chaos.py --seconds 600 --every 3
    python tools/chaos.py --seconds 600 --every 5 --rate 4 --cluster ray --layout 2,1
    python tools/chaos.py --seconds 600 --every 5 --rate 8 --cluster processes

A cluster with a tiny random model of either family in turn: three shares in this process, or on a
Ray that is started for it. ``processes``: a server as users start it, with the bundled model or a
random one; each of its processes is killed in turn, its parent among them. Exits with 1 if a
request hung, or ended otherwise than whole, cancelled, refused or with an error that says why;
fails if anything is left at the end.
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
from support.chaos import Chaos, chaos_cluster
from support.live_cluster import write_random
from support.served import Chaos as ServedChaos


async def serve(family: Family, args: argparse.Namespace) -> Chaos:
    """One family for its share of the time."""
    async with chaos_cluster(family, args.layout, args.cluster, args.seed) as chaos:
        each = max(1, round(args.rate * args.every))
        until_s = time.monotonic() + args.seconds

        async def gap() -> None:
            await asyncio.sleep(chaos.random.expovariate(args.rate))

        await chaos.run(lambda _: time.monotonic() < until_s, lambda: asyncio.sleep(0), gap, each)
        return chaos


async def kill_processes(family: Family, args: argparse.Namespace) -> int:
    """Kill the processes of a real server; what was wrong."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--gateways", "2"]
        if family is Family.AUTOREGRESSIVE:
            write_random(Path(folder))
            options += ["--model", folder]
        chaos = ServedChaos(options, family is Family.AUTOREGRESSIVE, args.seed)
        await chaos.run(max(1, round(args.seconds / args.every)), args.every, args.rate)
    print(f"{family}: {json.dumps(chaos.counts)}; wrong: {chaos.wrong or 'none'}", flush=True)
    return len(chaos.wrong)


def main() -> int:
    """Every family asked for, one after the other; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--family", type=Family, choices=list(Family), action="append", help="default: both"
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="of each family")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between disturbances")
    parser.add_argument("--rate", type=float, default=30.0, help="requests/s")
    parser.add_argument("--cluster", choices=("local", "ray", "processes"), default="local")
    parser.add_argument("--layout", choices=("1,1,1", "2,1"), default="1,1,1", help="at the start")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    wrong = 0
    for family in args.family or list(Family):
        if args.cluster == "processes":
            wrong += asyncio.run(kill_processes(family, args))
            continue
        began_s = time.monotonic()
        chaos = asyncio.run(serve(family, args))
        ends = ("whole", "cancelled", "failed", "refused", "hangs")
        told = chaos.counts["asked"] - sum(chaos.counts[end] for end in ends)
        wrong += chaos.counts["failed"] > 0.01 * chaos.counts["asked"]
        wrong += len(chaos.wrong) + told + chaos.counts["hangs"]
        print(f"{family}: {time.monotonic() - began_s:.0f} s, {json.dumps(chaos.counts)}")
        print(f"longest pause of a request {chaos.paused_s:.2f} s; wrong: {chaos.wrong or 'none'}")
        print("nothing is left", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
