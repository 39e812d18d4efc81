"""The ``stepserve`` command. Each subcommand is a module of its name, imported when asked for.

A subcommand module defines ``add_parser(subparsers)``, which adds one parser of its own name,
and ``run(args)``, which returns the exit status. What a user can put right is raised as a
``StepserveError`` and printed as one line.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from stepserve import __version__
from stepserve.core.errors import StepserveError

COMMANDS = {
    "serve": "serve a model over an OpenAI-compatible API, under latency deadlines",
    "bench": "load an OpenAI-compatible server and measure latency, deadlines met and accuracy",
    "chat": "ask one question, or hold a conversation, and see what the answer cost",
    "cluster": "show the instances of a running cluster, change its layout",
    "profile": "measure how long steps of each size take on this machine",
    "replay": "check that fresh schedulers make every decision of an event log again",
    "trace": "tell what happened to one request, when, and why, from an event log",
    "simulate": "run an experiment on a simulated cluster, with the real schedulers",
    "plan": "find the tensor-parallel layout for a load, and what it is worth",
    "fit": "train the bundled model, or a predictor of remaining steps from step logs",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 failed, 2 wrongly asked."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = next((word for word in arguments if not word.startswith("-")), None)
    try:
        args = _parser(name).parse_args(arguments)
        status: int = _module(args.command).run(args)
        sys.stdout.flush()
        return status
    except StepserveError as error:
        print(f"stepserve {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `stepserve trace ... | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser of the chosen command; the others are only listed, not imported."""
    parser = argparse.ArgumentParser(prog="stepserve", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"stepserve {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        if name == chosen:
            _module(name).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser


_DESCRIPTION = "Serve diffusion and autoregressive language models under latency deadlines."


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"stepserve.cli.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("stepserve"):
            raise
        extra = "pip install 'stepserve[engine]'"
        raise StepserveError(f"needs the package {error.name!r}; try {extra}") from error


if __name__ == "__main__":
    sys.exit(main())
