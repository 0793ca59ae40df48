"""Command line of the operator: a worker, its setup, the embedded stack, the demo."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from worker.output import outlive_readers
from worker.settings import CHECKOUT, DEFAULT_TEMPORAL_ADDRESS, Settings, SettingsError
from worker.version import __version__

_EPILOG = f"""\
environment:
  TEMPORAL_ADDRESS, TEMPORAL_NAMESPACE, TEMPORAL_API_KEY, TEMPORAL_TLS..., TEMPORAL_PROFILE, TEMPORAL_CONFIG_FILE
                        any Temporal service, as temporalio.envconfig and the temporal CLI read them
                        (default {DEFAULT_TEMPORAL_ADDRESS}, namespace default)
  AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, ...
                        S3, for the worker and for the hosts; never in an argument, a file or run.json
  LANYARD_DEPLOYMENT    the mark on everything this deployment creates; the same for all of its workers
  LANYARD_SECRET_FILE   file (mode 0600) with the key of the per-run tokens; the same for all workers
  LANYARD_METRICS_ADDRESS
                        address:port on which a worker serves its metrics to Prometheus (default: nowhere)
  LANYARD_HOME          state of the embedded stack and downloaded reports (default <checkout>/.lanyard)

`stack` and `demo` start their own Temporal and S3 on 127.0.0.1 and need none of these.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m worker",
        description="Lanyard's operator: guarded Ray Train runs on Temporal. Without a command it runs a worker.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"lanyard {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("run", help="a worker against the configured Temporal service, until SIGTERM (the default)")
    commands.add_parser("setup", help="prepare the namespace: the reaper's schedule, search attributes; safe to repeat")
    commands.add_parser("stack", help="embedded Temporal, S3 and a worker in the foreground, until Ctrl-C")
    demo = commands.add_parser("demo", help="one guarded run on the embedded stack, from start to verdict")
    demo.add_argument(
        "--run",
        type=Path,
        default=CHECKOUT / "examples" / "local.json",
        metavar="FILE",
        help="the run.json to start (default examples/local.json)",
    )
    commands.add_parser("schema", help="print the JSON Schema of run.json")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 fine, 1 the command's own failure, 2 a setting to correct."""
    options = parser().parse_args(arguments)
    if options.command == "schema":
        from worker.schema import render

        sys.stdout.write(render())  # its output is all there is of it, so here a write that fails is a failure
        return 0
    outlive_readers()
    try:
        return asyncio.run(_run(options))
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if not _is_told(error):
            traceback.print_exc()
            return 1
        print(f"error: {error}", file=sys.stderr)
        return 1


async def _run(options: argparse.Namespace) -> int:
    settings = Settings.load()
    # Each command imports what it needs: `setup` must not load a worker, nor a worker the demo.
    if options.command == "setup":
        from worker.connect import connect
        from worker.setup import setup

        deployment = settings.require_deployment()
        async for line in setup(await connect(settings), deployment):
            print(line)
        return 0
    if options.command == "stack":
        from worker.foreground import run_stack

        return await run_stack(settings)
    if options.command == "demo":
        from worker.demo import run_demo

        return await run_demo(settings, options.run)
    from worker.wiring import run_worker

    await run_worker(settings)
    return 0


def _is_told(error: Exception) -> bool:
    """Whether the message is meant for people, so that a traceback would only hide it."""
    from worker.connect import ConnectError
    from worker.services import ServiceError
    from worker.setup import SetupError
    from worker.stack import StackError

    return isinstance(error, (ConnectError, ServiceError, SetupError, StackError))


def leave(status: int) -> NoReturn:
    """End this process at once, with its output written.

    Not sys.exit: with a call to Temporal still in flight, Python's finalization and the SDK's own threads can wait for
    each other for ever (seen with temporalio 1.35.0 on a loaded machine, after a third Ctrl-C). By now everything of
    ours is closed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main())
