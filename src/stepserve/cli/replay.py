"""``stepserve replay``: check that an event log comes out of fresh schedulers bit for bit."""

import argparse
from pathlib import Path


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "replay",
        help="check that fresh schedulers make every decision of an event log again",
        description="Exit status: 0, or 1 if a decision came out otherwise.",
    )
    parser.add_argument("file", type=Path, help="written by `stepserve serve --events FILE`")


def run(args: argparse.Namespace) -> int:
    """Replay and say what was found."""
    from stepserve.live.replay import replay

    found = replay(args.file)
    for kind, count in sorted(found.actions.items()):
        print(f"{count:9d} {kind}")
    print(f"{found.events} events of {found.schedulers} schedulers replayed")
    if found.difference is None:
        print("every action came out again")
        return 0
    print(f"first difference: {found.difference}")
    return 1
