"""The report that all workers agree on."""

import json
from typing import TYPE_CHECKING

import numpy as np
from keras import ops

from keras_dist.verification.report import Report

if TYPE_CHECKING:
    from keras_dist.plugin.workers import Workers


def agreed(report: Report, workers: "Workers | None") -> Report:
    """Returns the same report on every worker.

    It is that of the first worker whose numbers differ, or else worker 0's.
    """
    if workers is None:
        return report
    text = json.dumps(report.to_dict())
    own = np.frombuffer(text.encode(), "uint8").astype("int32")
    told = workers.concatenate_numbers([int(report.same), own.size])
    same, sizes = told[::2], told[1::2]
    first = same.index(0) if 0 in same else 0
    padded = np.zeros(max(sizes), "int32")
    padded[: own.size] = own
    everyone = workers.gather([ops.convert_to_tensor(padded)])
    numbers = np.asarray(ops.convert_to_numpy(everyone[first][0]))
    chosen = numbers[: sizes[first]].astype("uint8").tobytes().decode()
    found = Report.from_dict(json.loads(chosen))
    if first and not found.same:
        note = f"Worker {first} is the first whose numbers differ."
        found = found.with_note(note)
    return found
