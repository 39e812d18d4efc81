"""``stepserve key``: API keys for a tenants file."""

import argparse
import json

from stepserve.gateway.keys import hash_of, new_key

_DESCRIPTION = """\
Make an API key. It is printed once and kept nowhere; the lines for the tenants file
(`stepserve serve --tenants FILE`) have its hash. A tenant may have several keys: add the hash to
its list."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the ``key`` parser."""
    parser = subparsers.add_parser("key", description=_DESCRIPTION)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    new = actions.add_parser("new", help="make a key", description=_DESCRIPTION)
    whose = new.add_mutually_exclusive_group(required=True)
    whose.add_argument("tenant", nargs="?", metavar="TENANT", help="whose it is to be")
    whose.add_argument("--operator", action="store_true", help="for /cluster and /metrics")


def run(args: argparse.Namespace) -> int:
    """Make one and print it."""
    key = new_key()
    table = "operator" if args.operator else f"tenants.{json.dumps(args.tenant)}"
    print(f"key, shown only now:  {key}\n\n[{table}]\nkeys = [{json.dumps(hash_of(key))}]")
    return 0
