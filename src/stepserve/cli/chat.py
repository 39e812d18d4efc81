"""``stepserve chat``: ask one question, or hold a conversation, and see what each answer cost."""

import argparse
import asyncio
import sys
from typing import Any

from stepserve.cli.client import Client, Outcome, Reply
from stepserve.core.errors import StepserveError
from stepserve.engine.bundled.tasks import known_question

BUNDLED = "stepserve-bundled"
_FOUR_TASKS = """\
the bundled model knows four tasks alone: try "Sort up: 5, 3, 8.", "Tom told Ana. Ben told Mia. \
Sam told Leo. Keep Ben, Tom.", "Tom has 5 pens. He buys 3. How many pens?" or "Write a story: Tom, \
a fox, a red kite, the park." and the like"""
_DESCRIPTION = """\
Ask one question, or hold a conversation when none is given (end it with an empty line). Each
answer streams to standard output; what it cost is one line on standard error."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the ``chat`` parser."""
    parser = subparsers.add_parser("chat", description=_DESCRIPTION)
    parser.add_argument("question", nargs="?", help="left out: read questions line by line")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="default: %(default)s")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
    parser.add_argument("--deadline-ms", type=float, metavar="MS", help="for the whole answer")
    parser.add_argument(
        "--on-miss",
        choices=("degrade", "best_effort", "reject"),
        help="when the deadline cannot be met at the preferred quality",
    )
    parser.add_argument(
        "--threshold", type=float, metavar="T", help="preferred confidence threshold"
    )
    parser.add_argument(
        "--min-threshold", type=float, metavar="T", help="floor it may be lowered to"
    )


def run(args: argparse.Namespace) -> int:
    """Hold the conversation; 1 if an answer failed."""
    return asyncio.run(_converse(args))


async def _converse(args: argparse.Namespace) -> int:
    messages: list[dict[str, str]] = []
    async with Client(args.url) as client:
        model = await client.model(args.model)
        if model == BUNDLED and not args.question:
            print(f"[{_FOUR_TASKS}]", file=sys.stderr)
        while question := args.question or _next_question():
            messages.append({"role": "user", "content": question})
            reply = await client.ask(client.body(model, messages, _fields(args)), _show)
            print()
            if reply.outcome is not Outcome.COMPLETED:
                raise StepserveError(f"{reply.outcome}: {reply.error}")
            print(cost_line(reply), file=sys.stderr)
            if hint := _hint(model, question, reply.text):
                print(f"[{hint}]", file=sys.stderr)
            if args.question:
                break
            messages.append({"role": "assistant", "content": reply.text})
    return 0


def _hint(model: str, question: str, answer: str) -> str:
    """What a newcomer may want to know of an answer, if anything."""
    empty = "" if answer.strip() else "the answer is empty"
    if model == BUNDLED:
        asked = _FOUR_TASKS if empty or not known_question(question) else ""
        return f"{empty}: {asked}" if empty else asked
    return f"{empty}; under whatever name, {_FOUR_TASKS}" if empty else ""


def _next_question() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _fields(args: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, and nothing else: a foreign server may refuse our fields."""
    asked: dict[str, Any] = {
        "max_tokens": args.max_tokens,
        "slo": _given(e2e_ms=args.deadline_ms, on_miss=args.on_miss),
        "dlm": _given(
            confidence_threshold=args.threshold, min_confidence_threshold=args.min_threshold
        ),
    }
    return {name: value for name, value in asked.items() if value}


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


_TOLD = {
    "metrics.forwards": "{:.0f} forwards",
    "dlm.threshold_mean": "mean threshold {:.2f}",
    "slo.slack_ms": "slack {:.0f} ms",
}


def cost_line(reply: Reply) -> str:
    """What an answer cost, in one line."""
    parts = [f"{1e3 * (reply.ended_s - reply.sent_s):.0f} ms"]
    if reply.events:
        parts.append(f"first text {1e3 * (reply.events[0].at_s - reply.sent_s):.0f} ms")
    if reply.tokens is not None:
        parts.append(f"{reply.tokens} tokens")
    parts += [text.format(reply.told[name]) for name, text in _TOLD.items() if name in reply.told]
    return f"[{', '.join(parts)}]"
