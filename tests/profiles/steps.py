"""Reads which steps the traces of a folder have."""

import json
import re

import keras


def recorded(folder):
    """The numbers of the steps in the one trace of a folder, in order."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    assert all(path.stat().st_size for path in files)
    return _READERS[keras.backend.backend()](files)


def _of_jax(files):
    import jax

    (path,) = (path for path in files if path.name.endswith(".xplane.pb"))
    data = jax.profiler.ProfileData.from_file(str(path))
    events = (
        event
        for plane in data.planes
        for line in plane.lines
        for event in line.events
        if event.name == "train"
    )
    return sorted(dict(event.stats)["step_num"] for event in events)


def _of_tensorflow(files):
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    (path,) = (path for path in files if path.name.endswith(".xplane.pb"))
    space = xplane_pb2.XSpace()
    space.ParseFromString(path.read_bytes())
    found = []
    for plane in space.planes:
        names = {key: each.name for key, each in plane.event_metadata.items()}
        kinds = {key: each.name for key, each in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                if names[event.metadata_id] == "train":
                    stats = {
                        kinds[stat.metadata_id]: stat.int64_value
                        for stat in event.stats
                    }
                    found.append(stats["step_num"])
    return sorted(found)


def _of_torch(files):
    (path,) = files
    names = (
        event.get("name", "")
        for event in json.loads(path.read_text())["traceEvents"]
    )
    found = (re.fullmatch(r"ProfilerStep#(\d+)", name) for name in names)
    return sorted(int(each[1]) for each in found if each)


_READERS = {
    "jax": _of_jax,
    "tensorflow": _of_tensorflow,
    "torch": _of_torch,
}
