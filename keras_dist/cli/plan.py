"""The command `keras-dist plan`."""

import json as json_module
import os
import pathlib
from typing import Annotated
from typing import Any
from typing import Literal

import typer

from keras_dist.cli.environment import CPU_ONLY
from keras_dist.cli.environment import Backend
from keras_dist.cli.environment import check_backend
from keras_dist.cli.environment import check_folder
from keras_dist.cli.environment import fail
from keras_dist.cli.environment import select_backend
from keras_dist.cli.json_option import JsonFile
from keras_dist.cli.json_option import is_stdout
from keras_dist.cli.json_option import stdout_kept_for
from keras_dist.cli.json_option import write_json
from keras_dist.cli.log_noise import without_log_noise
from keras_dist.errors import KerasDistError
from keras_dist.planning.estimates import ALL_SPLIT
from keras_dist.planning.estimates import SLOTS_SPLIT
from keras_dist.planning.estimates import Load
from keras_dist.planning.estimates import load_of_parameters

OptimizerState = Annotated[
    Literal["mirrored", "sharded"],
    typer.Option(help="Each replica has all optimizer state, or a part."),
]
Variables = Annotated[
    Literal["mirrored", "sharded"],
    typer.Option(help="Each replica has all variables, or a part of them."),
]


def plan(
    strategy: Annotated[
        Literal["one-device", "mirrored", "central", "multi-worker"] | None,
        typer.Option(
            help="Where variables are, and which devices compute.",
            show_default="mirrored; multi-worker for a target with hosts",
        ),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10_000,
            help="Devices that compute, on each worker.",
            show_default="1 for one-device, else 8",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of workers, for multi-worker.",
            show_default="2 for multi-worker",
        ),
    ] = None,
    parameter_devices: Annotated[
        int,
        typer.Option(
            min=1, max=10_000, help="Devices that keep variables, for central."
        ),
    ] = 1,
    optimizer_state: OptimizerState = "mirrored",
    variables: Variables = "mirrored",
    params: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER",
            help="Number of parameters, all trained: 350000, 7e9, 7B.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Function that returns a Keras model to count, alone or "
            "first in a tuple; used in place of --params.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Keras dtype policy of --params.", show_default="float32"
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="Keras' name of the optimizer, such as adam or sgd.",
            show_default="the model's, else adam",
        ),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="How many numbers the optimizer keeps for each parameter.",
            show_default="the optimizer's",
        ),
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Bytes of one replica's activations in a step: 20e9, 20G.",
            show_default="not counted",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="KIND:SIZE",
            help="Compile the training step of --model for a machine that "
            "need not be here: h100:8, h100:4x8, v5e:16x16, cpu:8. list: "
            "print the kinds. Needs JAX, and keras-dist with its extra "
            "'targets'.",
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Rows of a global batch, for --target.",
            show_default="32 for each replica",
        ),
    ] = None,
    logical_devices: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Devices of each replica, for --target.",
            show_default="1",
        ),
    ] = None,
    layout_map: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="JSON file with the layout_map for --logical-devices: "
            # Rich reads a bracket as markup.
            '{".*up/kernel": \\[null, "logical"]}.',
            exists=True,
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
    json: JsonFile = None,
    backend: Backend = None,
) -> None:
    """Compute memory and traffic of a training before it is started.

    With --params, the result is arithmetic, and no framework is imported. With
    --model, variables are counted without memory for their values. With
    --target, the model's training step is compiled, too.
    """
    # Imported late: rich would delay every command's start.
    from keras_dist.planning.report import Choice
    from keras_dist.planning.report import as_json
    from keras_dist.planning.report import report_of
    from keras_dist.planning.tables import read_bytes
    from keras_dist.planning.tables import read_number

    if backend is not None:
        check_backend(backend, "--backend")
    split = split_of(optimizer_state, variables)
    if target is not None:
        _refuse(
            "with --target, the target has its own devices, and the model its "
            "own variables.",
            devices=devices,
            workers=workers,
            params=params,
            dtype=dtype,
            slots=slots,
            activations=activations,
            optimizer=optimizer,
        )
        if parameter_devices > 1:
            fail("--parameter-devices: a target has one, the CPU of its host.")
        logical = logical_devices, layout_map
        _compile(
            target, model, strategy, split, logical, batch_size, backend, json
        )
        return
    _refuse(
        "it is for --target, which compiles a model.",
        batch_size=batch_size,
        logical_devices=logical_devices,
        layout_map=layout_map,
    )
    if (params is None) == (model is None):
        fail("say what to train, with either --params or --model.")
    check_folder("--json", json)
    strategy = strategy or "mirrored"
    choice = Choice(strategy, devices, workers, parameter_devices, split)
    try:
        choice.check(optimizer)
        room = 0 if activations is None else read_bytes(activations)
        if model is None:
            assert params is not None
            count = read_number(params)
            load, what = _of_parameters(count, dtype, optimizer, slots)
        else:
            _refuse(
                "the model of --model has its own.", dtype=dtype, slots=slots
            )
            # No values are computed, so no device is needed.
            os.environ.update(CPU_ONLY)
            select_backend(backend)
            with without_log_noise(), stdout_kept_for(json):
                from keras_dist.cli.jobs.plan import load_of_named

                load, what = load_of_named(model, optimizer, split)
    except (KerasDistError, ValueError) as error:
        fail(str(error))
    if not is_stdout(json):
        report_of(what, load, choice, room).show()
    write_json(json, as_json(load, choice, room))


def _refuse(reason: str, **options: object) -> None:
    """Ends the command if one of these options was given."""
    for name, value in options.items():
        if value is not None:
            option = f"--{name.replace('_', '-')}"
            fail(f"{option} {value}: {reason} Leave {option} out.")


def split_of(optimizer_state: str, variables: str) -> str | None:
    """Returns what is in parts, as a `Placement` has it."""
    if variables == "sharded":
        return ALL_SPLIT
    return SLOTS_SPLIT if optimizer_state == "sharded" else None


def _compile(
    name: str,
    model: str | None,
    strategy: str | None,
    split: str | None,
    logical: tuple[int | None, pathlib.Path | None],
    batch_size: int | None,
    backend: str | None,
    json: pathlib.Path | None,
) -> None:
    """Compiles a model for a target, and prints what the compiler says."""
    from keras_dist.planning.program_report import programs_json
    from keras_dist.planning.program_report import report_of
    from keras_dist.planning.program_report import targets
    from keras_dist.planning.report import as_json
    from keras_dist.planning.targets import read_target

    if name.lower() == "list":
        if json is not None:
            fail("--json: --target list prints a table. Leave --json out.")
        targets().show()
        return
    if model is None:
        fail("--target compiles a model. Say which one with --model.")
    check_folder("--json", json)
    try:
        target = read_target(name)
        # Nothing runs on devices of this machine.
        os.environ.update(CPU_ONLY)
        select_backend(backend)
        with without_log_noise(), stdout_kept_for(json):
            from keras_dist.cli.jobs.target import compiled_for

            arguments = _logical(*logical)
            programs, load, choice, what = compiled_for(
                model, target, strategy, split, batch_size, arguments
            )
    except (KerasDistError, ValueError) as error:
        fail(str(error))
    computed = as_json(load, choice)
    if arguments:  # the rest is for replicas of one device
        computed = {"load": computed["load"]}
    report = programs_json(target, programs) | computed
    if not is_stdout(json):
        report_of(what, target, programs, load).show()
    write_json(json, report)


def _logical(
    devices: int | None, layout_map: pathlib.Path | None
) -> dict[str, Any]:
    """Returns the arguments of a strategy for replicas of several devices."""
    if layout_map is None:
        return {} if devices is None else {"logical_devices": devices}
    try:
        layouts = json_module.loads(layout_map.read_text())
        layouts = {key: tuple(axes) for key, axes in layouts.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"--layout-map {layout_map}: it has no layouts. {error}. Expected: "
            'a JSON file such as {".*up/kernel": [null, "logical"]}.'
        ) from error
    return {"logical_devices": devices, "layout_map": layouts}


def _of_parameters(
    count: int, dtype: str | None, optimizer: str | None, slots: int | None
) -> tuple[Load, str]:
    dtype, optimizer = dtype or "float32", optimizer or "adam"
    load = load_of_parameters(count, dtype, optimizer, slots)
    by = f"{slots} slots each" if slots is not None else optimizer
    return load, f"{count:,} parameters, {dtype}, {by}"
