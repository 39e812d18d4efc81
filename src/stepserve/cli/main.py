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
from typing import Any

from stepserve import __version__
from stepserve.core.errors import FieldError, StepserveError, nearest

COMMANDS = {
    "serve": "serve a model over an OpenAI-compatible API, under latency deadlines",
    "bench": "load an OpenAI-compatible server and measure latency, deadlines met and accuracy",
    "chat": "ask one question, or hold a conversation, and see what the answer cost",
    "cluster": "show the instances of a running cluster, change its layout",
    "key": "make API keys of tenants",
    "profile": "measure how long steps of each size take on this machine",
    "replay": "check that fresh schedulers make every decision of an event log again",
    "trace": "tell what happened to one request, when, and why, from an event log",
    "simulate": "run an experiment on a simulated cluster, with the real schedulers",
    "plan": "find the tensor-parallel layout for a load, and what it is worth",
    "fit": "train the bundled model, or a predictor of remaining steps from step logs",
}


EXTRAS = {
    "torch": "engine",
    "safetensors": "engine",
    "huggingface_hub": "engine",
    "ray": "ray",
    "matplotlib": "plots",
    "shtab": "completion",
}
"""By package that ``stepserve`` alone does not install: the extra that does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 failed, 2 wrongly asked."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = next((word for word in arguments if not word.startswith("-")), "")
    called = f"stepserve {name}" if name in COMMANDS else "stepserve"
    try:
        args = _parser(name).parse_args(arguments)
        status: int = _module(args.command).run(args)
        sys.stdout.flush()
        return status
    except StepserveError as error:
        print(f"{called}: {error}", file=sys.stderr)
        return 2 if isinstance(error, FieldError) else 1
    except ModuleNotFoundError as error:
        package = (error.name or "stepserve").partition(".")[0]
        if package == "stepserve":
            raise
        wanted = f"'stepserve[{EXTRAS[package]}]'" if package in EXTRAS else package
        print(f"{called}: needs {package}: pip install {wanted}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `stepserve trace ... | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


class _Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that names the nearest command, choice or option to a wrong one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See ``ArgumentParser``; nothing is left over, of a subcommand's arguments either."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            hint = nearest(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += nearest(str(value), map(str, action.choices or ()))
            raise


class _PrintCompletion(argparse.Action):
    """Prints a script that completes commands, options and files in a shell."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None
    ) -> None:
        """Print it and exit."""
        import shtab

        print(shtab.complete(_parser(*COMMANDS), shell=values))
        parser.exit()


def _parser(*chosen: str) -> argparse.ArgumentParser:
    """The parser of the chosen commands; the others are only listed, not imported."""
    parser = _Parser(prog="stepserve", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"stepserve {__version__}")
    parser.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        choices=("bash", "zsh", "tcsh"),
        help="print a script for the completion of commands and options, and exit",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        if name in chosen:
            _module(name).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser


_DESCRIPTION = "Serve diffusion and autoregressive language models under latency deadlines."


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"stepserve.cli.{name}")


if __name__ == "__main__":
    sys.exit(main())
