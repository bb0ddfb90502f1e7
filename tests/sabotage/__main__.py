"""The command that breaks promises and prints which tests notice.

Run it in `tests/`, for all patches, or for those whose names are given:

    python -m sabotage --backend torch share_weight_ignored
"""

import argparse
import pathlib
import sys
import tempfile
import time

from sabotage.checkout import FAILED
from sabotage.checkout import PASSED
from sabotage.checkout import Checkout
from sabotage.patch import BACKENDS
from sabotage.patch import load

CAUGHT, BROKEN = "caught", "broken patch"


def main():
    """Returns the exit status: 1 unless tests notice every patch."""
    options = _options()
    chosen = [
        (patch, backend)
        for patch in load()
        for backend in patch.backends
        if _is_chosen(patch, options) and backend in options.backend
    ]
    if not chosen:
        sys.exit("No patch has such a name and backend.")
    rows = []
    with tempfile.TemporaryDirectory(prefix="sabotage-") as name:
        checkout = Checkout(pathlib.Path(name).resolve())
        if not options.trust and not _pass_unbroken(checkout, chosen):
            return 1
        for patch, backend in chosen:
            start = time.monotonic()
            found = _outcome(checkout, patch, backend, options.verbose)
            seconds = time.monotonic() - start
            rows.append((patch.name, backend, found, f"{seconds:.0f}"))
            _say("  ".join(rows[-1]))
    print(_table(rows))
    missed = [row for row in rows if row[2] != CAUGHT]
    print(f"{len(rows) - len(missed)} of {len(rows)} caught.")
    return int(bool(missed))


def _pass_unbroken(checkout, chosen):
    """Returns whether the tests pass without an edit, as they have to."""
    for backend in BACKENDS:
        tests = {t: 0 for p, b in chosen if b == backend for t in p.tests}
        if not tests:
            continue
        _say(f"{backend}: {len(tests)} files and tests, unbroken")
        status, output = checkout.test(list(tests), backend)
        if status != PASSED:
            print(output)
            print(f"Without any edit, these tests fail on {backend}.")
            return False
    return True


def _outcome(checkout, patch, backend, is_verbose):
    if not patch.is_whole(checkout.top):
        return BROKEN
    with checkout.edited(patch):
        status, output = checkout.test(patch.tests, backend, "-x")
    if is_verbose:
        _say(output)
    if status == FAILED:
        return CAUGHT
    if status == PASSED:
        return "survived"
    return "hung" if status is None else f"no test ran (status {status})"


def _table(rows):
    rows = [("patch", "backend", "found", "s"), *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows
    )


def _is_chosen(patch, options):
    names = options.names
    return not names or any(name in (patch.name, patch.area) for name in names)


def _say(text):
    print(text, file=sys.stderr, flush=True)


def _options():
    parser = argparse.ArgumentParser(
        prog="python -m sabotage", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--backend",
        action="append",
        choices=BACKENDS,
        help="may be given more than once; all by default",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="don't run the tests without an edit first",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="show what pytest prints"
    )
    parser.add_argument(
        "names", nargs="*", help="names of patches or of files in patches/"
    )
    options = parser.parse_args()
    options.backend = options.backend or list(BACKENDS)
    return options


if __name__ == "__main__":
    sys.exit(main())
