"""Becomes another program, which ends when this program's parent does.

The call is `python guard.py PARENT_PROCESS_ID PROGRAM [ARGUMENTS]...`, by path
and without site packages, so that it takes no time. A `preexec_fn` would do the
same between fork and exec, where Python code can deadlock.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Asks the kernel for SIGKILL at the parent's death, then calls exec."""
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    # The parent may have died before the kernel was asked.
    if os.getppid() != int(parent):
        sys.exit(1)
    # Python ignores SIGPIPE, and exec keeps ignored signals ignored.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
