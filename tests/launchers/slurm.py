"""A cluster of Slurm on this machine: munge, a controller and one node."""

import contextlib
import os
import pathlib
import secrets
import shutil
import socket
import subprocess
import tempfile
import time

import pytest

from launchers.programs import require
from ports import free_block

# Seconds until the node takes jobs.
_PATIENCE = 60
_CONFIGURATION = """
ClusterName=keras_dist
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmdPort={next_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge}/socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


class Slurm:
    """The daemons, which run as long as the context is open.

    Args:
        folder: `pathlib.Path` of a folder for their files.

    Attributes:
        variables: Dict of the variables of commands that use the cluster.
    """

    def __init__(self, folder):
        self._folder = folder
        self._daemons = contextlib.ExitStack()
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self):
        if os.geteuid():
            pytest.fail("Slurm's daemons need root: run the tests as root.")
        cpus = os.cpu_count()
        if cpus < 2:
            pytest.fail(f"Slurm needs 2 CPUs for 2 tasks. There are {cpus}.")
        # munge wants folders of its own that others can't write into.
        munge = pathlib.Path(tempfile.mkdtemp(prefix="munge", dir="/run"))
        self._daemons.callback(shutil.rmtree, munge)
        munge.chmod(0o711)  # anyone may use the socket in it
        port = free_block(2)
        for name in ("state", "spool"):
            (self._folder / name).mkdir()
        pathlib.Path(self.variables["SLURM_CONF"]).write_text(
            _CONFIGURATION.format(
                cpus=cpus,
                folder=self._folder,
                host=socket.gethostname().partition(".")[0],
                munge=munge,
                next_port=port + 1,
                port=port,
            )
        )
        key = munge / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
        files = [
            f"--{name}-file={munge / name}" for name in ("pid", "log", "seed")
        ]
        try:
            self._start(
                *("munged", "--foreground", f"--socket={munge / 'socket'}"),
                *(f"--key-file={key}", *files),
            )
            self._wait(lambda: (munge / "socket").exists(), "munged")
            self._start("slurmctld", "-D")
            self._start("slurmd", "-D")
            self._wait(self._is_idle, "Slurm's node")
        except BaseException:
            self._daemons.close()
            raise
        return self

    def __exit__(self, *exception):
        self._daemons.close()

    def _start(self, name, *options):
        output = self._daemons.enter_context(
            (self._folder / f"{name}.txt").open("w")
        )
        daemon = subprocess.Popen(
            [require(name), *options],
            env={**os.environ, **self.variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        self._daemons.callback(daemon.wait, timeout=60)
        self._daemons.callback(daemon.terminate)

    def _is_idle(self):
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%T"],
            env={**os.environ, **self.variables},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip() == "idle"

    def _wait(self, condition, what):
        deadline = time.monotonic() + _PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                texts = [
                    f"{path.name}:\n{path.read_text()[-2000:]}"
                    for path in sorted(self._folder.glob("*.txt"))
                ]
                pytest.fail(
                    f"{what} is not ready after {_PATIENCE} seconds.\n"
                    + "\n".join(texts)
                )
            time.sleep(0.2)  # between two looks
