"""Starts workers as processes on loopback, and ends them."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

HERE = pathlib.Path(__file__).parent


class Workers:
    """Workers of one cluster.

    Args:
        folder: Path for what they print.
        script: String, a file beside this one.
        addresses: List of the cluster's addresses.
        indices: Which of them are started; all by default.
        arguments: Sequence of strings, or a callable from the index.
        devices: Integer, CPU devices of each.
    """

    def __init__(
        self, folder, script, addresses, arguments, indices=None, devices=1
    ):
        self.addresses = addresses
        self.outputs = {}
        self.processes = {}
        environment = {
            **os.environ,
            "KERAS_BACKEND": "tensorflow",
            "KERAS_DIST_VIRTUAL_DEVICES": str(devices),
        }
        for index in range(len(addresses)) if indices is None else indices:
            given = arguments(index) if callable(arguments) else arguments
            self.outputs[index] = folder / f"{index}.txt"
            with self.outputs[index].open("wb") as output:
                self.processes[index] = subprocess.Popen(
                    [
                        sys.executable,
                        str(HERE / script),
                        str(index),
                        ",".join(addresses),
                        *map(str, given),
                    ],
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )

    def printed(self, index):
        return self.outputs[index].read_text(errors="replace")

    def wait(self, index, seconds):
        """The exit status of a worker that has to end by itself."""
        try:
            return self.processes[index].wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(
                f"Worker {index} runs on after {seconds} seconds:\n"
                f"{self.printed(index)[-3000:]}"
            )

    def wait_until_printed(self, index, text, seconds):
        deadline = time.monotonic() + seconds
        while True:
            ended = self.processes[index].poll() is not None
            if text in self.printed(index):
                return
            if ended or time.monotonic() > deadline:
                pytest.fail(f"No '{text}' in:\n{self.printed(index)[-3000:]}")
            time.sleep(0.05)  # polls a file

    def end(self):
        for process in self.processes.values():
            if process.poll() is None:
                # A stopped process is killed all the same.
                process.send_signal(signal.SIGKILL)
            process.wait()
