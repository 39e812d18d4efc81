"""Replays an event log into fresh schedulers: every recorded action must come out again."""

import itertools
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from stepserve.control.global_scheduler import GlobalScheduler
from stepserve.control.local_scheduler import LocalScheduler
from stepserve.core.actions import Action, Send
from stepserve.core.errors import FieldError
from stepserve.families.setup import SchedulerSetup

from .event_log import Entry, Scheduler, read_events


@dataclass(slots=True)
class Replayed:
    """What a replay found. ``actions`` counts by kind; a message counts as what it says.

    ``difference`` tells of the first call that came out otherwise; the replay ends there.
    """

    events: int = 0
    schedulers: int = 0
    actions: Counter[str] = field(default_factory=Counter)
    difference: str | None = None


def replay(path: Path) -> Replayed:
    """Replay a log written by ``EventLog``. Raises FieldError for a file that is none."""
    setup, entries = read_events(path, whole=True)
    schedulers: dict[Scheduler, GlobalScheduler | LocalScheduler] = {}
    found = Replayed()
    failed: dict[Scheduler, str] = {}
    for entry in entries:
        if entry.scheduler in failed:  # the recorded one went on
            found.difference = failed[entry.scheduler]
            break
        scheduler = schedulers.get(entry.scheduler)
        if scheduler is None:
            scheduler = schedulers[entry.scheduler] = _fresh(setup, entry)
        try:
            actions = tuple(scheduler.handle(entry.at_s, entry.event))  # type: ignore[arg-type]
        except Exception as error:
            if entry.instance is None and not entry.actions:  # so did the recorded one, it seems
                failed[entry.scheduler] = f"{_whose(entry)}\nreplayed: {error!r}"
                continue
            found.difference = f"{_whose(entry)}\nreplayed: {error!r}"
            break
        found.events += 1
        found.actions.update(map(_kind, entry.actions))
        if actions != entry.actions:
            found.difference = _difference(entry, actions)
            break
    found.schedulers = len(schedulers)
    return found


def _fresh(setup: SchedulerSetup, entry: Entry) -> GlobalScheduler | LocalScheduler:
    if entry.instance is None:
        return setup.new_global()
    if entry.spec is None:
        raise FieldError("events", f"the first entry of {entry.instance} has no spec")
    return setup.new_local(entry.spec)


def _kind(action: Action) -> str:
    told = action.event if isinstance(action, Send) else action
    return type(told).__name__


def _difference(entry: Entry, actions: tuple[Action, ...]) -> str:
    pairs = itertools.zip_longest(entry.actions, actions)
    recorded, replayed = next((a, b) for a, b in pairs if a != b)
    return f"{_whose(entry)}\nrecorded: {recorded}\nreplayed: {replayed}"


def _whose(entry: Entry) -> str:
    name = f"{entry.instance}, incarnation {entry.incarnation}" if entry.instance else "global"
    return f"{name}, {entry.at_s!r} s, {entry.event}"
