"""The process of one backend, which describes itself and then does jobs.

The argument is a file descriptor for replies, a line of JSON each. The first
reply describes the backend and its devices; the others answer the lines of JSON
on standard input.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from keras_dist.cli.jobs.self_test.collectives import check_collectives
from keras_dist.cli.jobs.self_test.look import look
from keras_dist.cli.jobs.self_test.parity import DifferentNumbersError
from keras_dist.cli.jobs.self_test.parity import compare
from keras_dist.cli.jobs.self_test.users_model import RefusedError
from keras_dist.cli.jobs.self_test.users_model import verify_model
from keras_dist.cli.jobs.self_test.users_model import verify_workers
from keras_dist.cli.jobs.self_test.workers import compare_workers
from keras_dist.errors import KerasDistError
from keras_dist.verification.report import Report

_JOBS: dict[str, Callable[..., "str | Report"]] = {
    "train": compare,
    "collectives": check_collectives,
    "workers": compare_workers,
    "verify": verify_model,
    "verify workers": verify_workers,
}


def main(channel: int) -> None:
    """Replies to requests until standard input ends.

    `channel` is the file descriptor for replies.
    """
    os.set_inheritable(channel, False)
    with os.fdopen(channel, "w") as replies:

        def reply(content: dict[str, Any]) -> None:
            replies.write(json.dumps(content) + "\n")
            replies.flush()

        reply(look())
        for line in sys.stdin:
            reply(_answer(json.loads(line)))


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        found = _JOBS[request["job"]](**request["arguments"])
        return (
            _reported(found) if isinstance(found, Report) else {"found": found}
        )
    except Exception as error:
        traceback.print_exc()
        if isinstance(error, RefusedError):
            return {"refused": str(error)}
        name = f"{type(error).__name__}: "
        if isinstance(error, DifferentNumbersError):
            name = ""
        return {
            "error": f"{name}{error}",
            # The messages of these errors say what to do.
            "is_ours": isinstance(error, KerasDistError),
            "is_late": isinstance(error, TimeoutError),
        }


def _reported(report: Report) -> dict[str, Any]:
    answer: dict[str, Any] = {"report": report.to_dict()}
    if report.same:
        return {**answer, "found": report.verdict}
    return {
        **answer,
        "error": f"the numbers differ: {report.first}",
        "text": str(report),
        "is_ours": True,
        "is_late": False,
    }


if __name__ == "__main__":
    main(int(sys.argv[1]))
