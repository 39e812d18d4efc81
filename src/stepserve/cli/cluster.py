"""``stepserve cluster``: the state of a running cluster, and changes of its layout."""

import argparse
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from stepserve.core.errors import FieldError, StepserveError
from stepserve.files import read_text

KEY_VARIABLE = "STEPSERVE_OPERATOR_KEY"

_DESCRIPTION = """\
Show the instances of a cluster that `stepserve serve --operator-api` runs. With --layout or --drain
begin a change first: instances finish or hand on what they hold, and requests are accepted all the
while. The change goes on in the server; ask again to see how far it is."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the ``cluster`` parser."""
    parser = subparsers.add_parser("cluster", description=_DESCRIPTION)
    address = "of the operator's port; default: %(default)s"
    parser.add_argument("--url", default="http://127.0.0.1:8001", help=address)
    key = f"file with a key of the operator's, where one is asked for; else of {KEY_VARIABLE}"
    parser.add_argument("--key-file", type=Path, metavar="FILE", help=key)
    change = parser.add_mutually_exclusive_group()
    change.add_argument("--layout", metavar="2,1,1", help="tensor-parallel degrees to change to")
    change.add_argument("--drain", metavar="ID", help="an instance to stop")
    change.add_argument(
        "--restart-scheduler",
        action="store_true",
        help="have a new global scheduler take over what instances hold",
    )


def run(args: argparse.Namespace) -> int:
    """Change what is asked for, print the state."""
    headers = _headers(args.key_file)
    with httpx.Client(base_url=args.url, timeout=30.0, headers=headers) as client:
        if args.layout is not None:
            reply = _ask(client, "PUT", "/cluster/layout", {"layout": degrees(args.layout)})
        elif args.drain is not None:
            name = quote(args.drain, safe="")
            reply = _ask(client, "POST", f"/cluster/instances/{name}/drain")
        elif args.restart_scheduler:
            reply = _ask(client, "POST", "/cluster/scheduler/restart")
        else:
            reply = _ask(client, "GET", "/cluster")
    print("\n".join(lines(reply)))
    return 0


def _headers(file: Path | None) -> dict[str, str]:
    """Never on the command line, where others of the machine could read it."""
    given = os.environ.get(KEY_VARIABLE, "")
    key = given if file is None else read_text(file, "--key-file").strip()
    return {"authorization": f"Bearer {key}"} if key else {}


def degrees(text: str) -> list[int]:
    """``2,1,1``. Raises FieldError for anything else."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise FieldError("layout", f"{text!r} is not like 2,1,1") from error


def lines(state: dict[str, Any]) -> list[str]:
    """The state as text, an instance per line."""
    told = f"{state['running']} running, {state['waiting']} waiting, {state['losses']} losses"
    restarts = state["scheduler_restarts"]
    told += f", scheduler restarted {restarts} times" if restarts else ""
    told += ", asking instances what they hold" if state["recovering"] else ""
    changing = ", layout changing" if state["changing"] else ""
    head = f"{'instance':16s} {'state':9s} TP   running   pages free"
    rows = [
        f"{i['id']:16s} {i['state']:9s} {i['tp_degree']:2d} {i['running']:4d} of"
        f" {i['max_running']:3d} {_known(i['pages_free']):>6s} of {i['pages']}"
        for i in state["instances"]
    ]
    return [told + changing, head, *rows]


def _known(count: int | None) -> str:
    return "?" if count is None else str(count)


def _ask(
    client: httpx.Client, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    try:
        reply = client.request(method, path, json=body)
    except httpx.HTTPError as error:
        raise StepserveError(f"{client.base_url} cannot be reached: {error}") from error
    try:
        state: dict[str, Any] = reply.json()
        told = state.get("error")
        known = told is not None or "instances" in state
    except (ValueError, AttributeError):
        known, told = False, None
    if not known or (told is not None and told["param"] is None and reply.status_code == 404):
        raise StepserveError(f"{client.base_url} has no /cluster: serve with --operator-api")
    if told is not None:
        raise StepserveError(told["message"])
    return state
