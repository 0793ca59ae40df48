"""What a workflow commands, as its history has it: the fingerprint by which a change that needs a patch is noticed.

Order is left out: what runs side by side may be commanded in either order, and a replay sees to the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "activityTaskScheduledEventAttributes": ("activityType.name", "taskQueue.name"),
    "timerStartedEventAttributes": (),
    "startChildWorkflowExecutionInitiatedEventAttributes": ("workflowType.name", "taskQueue.name"),
    "signalExternalWorkflowExecutionInitiatedEventAttributes": ("signalName",),
    "requestCancelExternalWorkflowExecutionInitiatedEventAttributes": (),
    "workflowPropertiesModifiedEventAttributes": (),
    "upsertWorkflowSearchAttributesEventAttributes": (),
    "workflowExecutionContinuedAsNewEventAttributes": (),
}
"""The events that commands leave, and what of them tells one from another."""
PATCH: Final = "markerRecordedEventAttributes"


def fingerprint(events: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """How often a history has each command; patches are apart. ``events`` as the API's JSON has them."""
    found: Counter[str] = Counter()
    for event in events:
        for kind in NAMES.keys() & event.keys():
            told = (_at(event[kind], name) for name in NAMES[kind])
            found[" ".join([kind.removesuffix("EventAttributes"), *told])] += 1
    return found


def patches(events: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """The ids of the patches that a history has run through."""
    details = (event[PATCH]["details"] for event in events if PATCH in event)
    return frozenset(payload["data"] for each in details for payload in each["patch-data"]["payloads"])


def change(before: Counter[str], after: Counter[str]) -> list[str]:
    """What is commanded more (+) or less (-) often than before."""
    more, less = after - before, before - after
    return [f"+{count} {name}" for name, count in sorted(more.items())] + [
        f"-{count} {name}" for name, count in sorted(less.items())
    ]


def _at(value: Any, path: str) -> str:
    for name in path.split("."):
        value = value[name]
    return str(value)
