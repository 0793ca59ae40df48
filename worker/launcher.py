"""Run a command that the kernel ends when the supervisor dies, however it dies.

    python -I -S worker/launcher.py SUPERVISOR_PID COMMAND [ARGUMENT ...]

A file of its own, started as a script on the standard library alone, because the request must be made in
the child between fork and exec, and Python code there (`preexec_fn`) is unsafe in a process with threads.
The request survives exec, so the command keeps this process's pid and start time.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Replace this process by the command, or leave with 127 where that fails."""
    supervisor, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    # SIGKILL: the state of every service is durable, and a wish (SIGTERM) could be left unheard.
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    # The supervisor may have died before the request was made; then nobody would ever end this.
    if os.getppid() != supervisor:
        sys.exit("the supervisor is gone")
    try:
        os.execv(command[0], command)  # noqa: S606
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
