"""``stepserve trace``: what happened to one request, from an event log."""

import argparse
from pathlib import Path


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "trace", help="tell what happened to one request, when, and why, from an event log"
    )
    parser.add_argument("file", type=Path, help="written by `stepserve serve --events FILE`")
    parser.add_argument(
        "--request",
        metavar="ID",
        help="id of its reply, its X-Request-Id, or its id in the log; left out: list them",
    )


def run(args: argparse.Namespace) -> int:
    """Print a line for every stop, or for every request."""
    from stepserve.live.trace import requests, trace_request

    name = args.request
    for line in requests(args.file) if name is None else trace_request(args.file, name):
        print(line)
    return 0
