"""The `keras-dist` application: one subcommand a module."""

import typer

from keras_dist_cli.bench import bench
from keras_dist_cli.demo import demo
from keras_dist_cli.info import info
from keras_dist_cli.plan import plan
from keras_dist_cli.run import SETTINGS
from keras_dist_cli.run import run
from keras_dist_cli.self_test import self_test

app = typer.Typer(
    name="keras-dist",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def keras_dist() -> None:
    """Keras 3 on several devices, with the numbers of one."""


app.command()(demo)
app.command()(info)
app.command()(plan)
app.command("test")(self_test)
app.command(context_settings=SETTINGS)(run)
app.add_typer(bench)
