"""Every task queue, timeout and retry policy, with its reason. Nothing else in the project sets one."""

from __future__ import annotations

from datetime import timedelta

from temporalio.common import RetryPolicy

RUN_QUEUE = "ray-train"
"""Workflows, short activities and launches."""
WATCH_QUEUE = "ray-train-watch"
"""Async activities only, many at once: a watcher waits and never blocks a thread."""
RELEASE_QUEUE = "ray-train-release"
"""Slots of its own, so that a release never waits behind launches or watchers."""

HEARTBEAT = timedelta(seconds=30)
"""A silent activity is given to another worker after this. Shorter would mistake a loaded machine for a dead one."""

SHORT = timedelta(minutes=2)
"""Activities that look or write something small."""
LONG = timedelta(days=60)
"""Activities bounded by a durable timer of the workflow instead: run deadline, custody's deadline."""
PREFLIGHT = timedelta(minutes=10)
"""Everything that can fail is tried, resume's checkpoint loaded included."""
SUBMIT = timedelta(minutes=5)
"""A claim, an upload of the source, one request; retried within this."""
STRIKE = timedelta(minutes=5)
"""Choosing and striking the victim: a helper job starts, looks, and signals."""
RECORDS = timedelta(minutes=1)
"""Saving logs and status before the hosts go; where nothing answers, release must not wait for long."""
VERIFY = timedelta(minutes=60)
"""Downloading and checking the artifacts of a long run."""
RELEASE_ATTEMPT = timedelta(minutes=30)
"""One attempt at a whole release, both proofs of absence and the wait between them included."""
SWEEP = timedelta(minutes=10)
"""Reading an inventory and asking for thousands of custodies; a cloud's API may take its time."""
BETWEEN_LOOKS = timedelta(minutes=2)
"""What looks like an orphan is looked at again after this. A custody that is just closing has then released, and a
lease that anybody keeps has been renewed (at most a minute apart, `policy.lease_renewal_s`)."""
REPORT = timedelta(minutes=3)
"""Writing the report; a run is not held up for longer by a storage that is gone."""

RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=1), backoff_coefficient=2.0, maximum_interval=timedelta(seconds=15)
)
"""Until the phase's deadline, which always exists. What cannot get better is raised as non-retryable."""
MUTATE = RetryPolicy(
    initial_interval=timedelta(seconds=1), backoff_coefficient=2.0, maximum_interval=timedelta(seconds=60)
)
"""As RETRY, for activities that claim: each attempt is an update, and a signal, in custody's history."""
FEW = RetryPolicy(
    initial_interval=timedelta(seconds=1),
    backoff_coefficient=2.0,
    maximum_interval=timedelta(seconds=10),
    maximum_attempts=4,
)
"""For steps that are worth a few tries and then worth going on without."""
RELEASE_FIRST = RetryPolicy(
    initial_interval=timedelta(seconds=2),
    backoff_coefficient=1.5,
    maximum_interval=timedelta(seconds=10),
    maximum_attempts=5,
)
"""The usual release; when it did not get everything, custody says so and goes on with the next."""
RELEASE_FOR_EVER = RetryPolicy(
    initial_interval=timedelta(seconds=5), backoff_coefficient=1.5, maximum_interval=timedelta(seconds=60)
)
"""What cannot be proved absent is retried for as long as it takes: one activity, constant history."""
RELEASE_AGAIN = timedelta(minutes=5)
"""Between two releases that ended without a retry, which only a bug or a misconfigured worker can do."""
KEEPER = RetryPolicy(
    initial_interval=timedelta(seconds=1), backoff_coefficient=1.5, maximum_interval=timedelta(seconds=10)
)
"""The keeper outlives any outage of its own worker."""
