"""Runs random simulated worlds with every invariant checked after every event.

    python tools/fuzz_simulations.py --seeds 1000
    python tools/fuzz_simulations.py --seeds 1000 --family autoregressive

The worlds of ``tests/sim/test_random_worlds.py``, or of ``test_ar_worlds.py``, from another
first seed, by the thousand. Exits with 1 if one failed, and says which seed repeats it.
"""

import argparse
import functools
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.random_worlds import random_config, random_faults, run_world
from support.toy_ar import random_token_faults, run_token_world


def one(family: str, seed: int) -> tuple[int, int, str]:
    """Run a world: its seed, its events, and what went wrong."""
    try:
        if family == "diffusion":
            world = run_world(seed, random_config(seed), **random_faults(seed))
        else:
            world = run_token_world(seed, **random_token_faults(seed))
    except Exception:  # whatever it is, the seed repeats it
        return seed, 0, traceback.format_exc(limit=-3)
    return seed, world.world.events, ""


def main() -> int:
    """Run the seeds and count; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1000, help="how many worlds")
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    families = ("diffusion", "autoregressive")
    parser.add_argument("--family", choices=families, default="diffusion", help="of the models")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args()
    passed = events = 0
    with ProcessPoolExecutor(args.jobs) as pool:
        seeds = range(args.first, args.first + args.seeds)
        for seed, ran, error in pool.map(functools.partial(one, args.family), seeds, chunksize=8):
            passed += not error
            events += ran
            if error:
                print(f"seed {seed}:\n{error}")
    print(f"{passed} of {args.seeds} worlds passed, {events} events checked")
    return int(passed < args.seeds)


if __name__ == "__main__":
    sys.exit(main())
