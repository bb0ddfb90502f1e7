"""`keras-dist bench loops`, once the backend is chosen."""

import pathlib
from collections.abc import Sequence

import keras
from rich.console import Console
from rich.progress import BarColumn
from rich.progress import MofNCompleteColumn
from rich.progress import Progress
from rich.progress import TextColumn

from keras_dist.backend import get_backend
from keras_dist.errors import BackendNotFoundError
from keras_dist.errors import DeviceError
from keras_dist.launch.bench.loops import MODELS
from keras_dist.launch.bench.loops import BenchmarksLoops
from keras_dist.launch.bench.loops import ModelSize
from keras_dist.launch.bench.loops import Setting
from keras_dist.launch.bench.measure import Counts
from keras_dist.launch.bench.measure import Measurement
from keras_dist.launch.bench.measure import measure
from keras_dist.launch.bench.report import as_json
from keras_dist.launch.bench.report import show
from keras_dist.launch.bench.report import write_json
from keras_dist.virtual import list_devices
from keras_dist.virtual import set_virtual_devices


def run_loops(
    replicas: Sequence[int],
    models: Sequence[str],
    device_type: str,
    rounds: int,
    seconds: float,
    json_path: pathlib.Path | None,
) -> None:
    """Measures the portable loop and the backend's own, and shows ratios.

    Args:
        replicas: Sequence of integers, the numbers of replicas.
        models: Sequence of names in `MODELS`.
        device_type: String, `"cpu"` or `"gpu"`.
        rounds: Integer, blocks of each arm.
        seconds: Float, what a block takes about.
        json_path: Path of the file to write, or `None`.

    Raises:
        ValueError: If a model is unknown.
        KerasDistError: If the devices or the native loops can't be had, or if
            the arms don't compute the same.
    """
    sizes = [size_of(name) for name in models]
    devices = devices_for(max(replicas), device_type)
    backend = get_backend()
    if not isinstance(backend, BenchmarksLoops):
        raise BackendNotFoundError(
            f"The plugin of the backend '{keras.backend.backend()}' has no "
            f"loop to compare with. Received: {backend!r}. Expected: a "
            "`BenchmarksLoops`. Choose another backend with --backend."
        )
    settings = [Setting(size, devices[:n]) for size in sizes for n in replicas]
    console = Console(highlight=False)
    measured = measure_all(console, backend, settings, rounds, seconds)
    show(console, measured, backend.native_loop_text)
    if json_path is not None:
        write_json(json_path, as_json(measured, backend.native_loop_text))


def size_of(name: str) -> ModelSize:
    """The model of that name.

    Raises:
        ValueError: If there is none.
    """
    if name not in MODELS:
        raise ValueError(
            f"There is no model of that name. Received: {name!r}. Expected: "
            f"some of {', '.join(MODELS)}, separated by commas."
        )
    return MODELS[name]


def devices_for(num_devices: int, device_type: str) -> tuple[str, ...]:
    """Names of so many devices; of CPUs, virtual ones.

    Raises:
        DeviceError: If there are fewer.
        VirtualDevicesError: If CPUs can't be split any more.
    """
    if device_type == "cpu":
        set_virtual_devices(num_devices)
    present = list_devices(device_type)
    if len(present) < num_devices:
        raise DeviceError(
            f"There are fewer devices than replicas. Received: {num_devices} "
            f"replicas on '{device_type}'. Expected: at most {len(present)}, "
            "or --device cpu, which makes virtual devices."
        )
    return tuple(present[:num_devices])


def measure_all(
    console: Console,
    backend: BenchmarksLoops,
    settings: Sequence[Setting],
    rounds: int,
    seconds: float,
) -> list[Measurement[Counts]]:
    """Measures settings, with a bar on a terminal and lines elsewhere."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    measured = []
    with progress:
        for setting in settings:
            title = f"{setting.size.name}, {setting.num_replicas} replicas"
            if not console.is_terminal:
                console.print(f"Measuring {title}")
            task = progress.add_task(title, total=rounds)

            def advance(task: object = task) -> None:
                progress.advance(task)  # type: ignore[arg-type]

            measured.append(measure(backend, setting, rounds, seconds, advance))
    return measured
