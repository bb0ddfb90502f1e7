"""A copy of the checkout, in which one edit at a time is tested."""

import compileall
import contextlib
import os
import py_compile
import shutil
import subprocess
import sys

from sabotage.patch import TOP

# Seconds after which tests that hang are ended.
PATIENCE = 600
# pytest's exit statuses. Others mean that it ran no test, or not to the end.
PASSED, FAILED = 0, 1


class Checkout:
    """The tracked files of this checkout, copied to a folder."""

    def __init__(self, folder):
        self.top = folder
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=TOP, check=True, stdout=-1, text=True
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (TOP / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(TOP / name, folder / name)
        # By content: two edits of a second may leave one time and one size.
        by_content = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(folder, quiet=2, invalidation_mode=by_content)
        self._check_used()

    @contextlib.contextmanager
    def edited(self, patch):
        """Applies a patch inside of the context."""
        path = self.top / patch.file
        text = path.read_text()
        path.write_text(patch.sabotaged(self.top))
        try:
            yield
        finally:
            path.write_text(text)

    def test(self, tests, backend, *options):
        """Returns pytest's exit status, or `None` if it hung, and its output.

        Args:
            tests: Sequence of files and tests.
            backend: String, the Keras backend.
            *options: Further options of pytest.
        """
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
        with subprocess.Popen(
            [sys.executable, *command, *tests],
            cwd=self.top,
            env=self._environment(backend),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                # With the workers that the tests have started.
                os.killpg(process.pid, 9)
                return None, process.communicate()[0]
        return process.returncode, output

    def _environment(self, backend):
        return {
            **os.environ,
            "KERAS_BACKEND": backend,
            "PYTHONPATH": f"{self.top}{os.pathsep}{self.top / 'backends'}",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            # Only what CI runs can notice, on this backend or, as a patch of
            # what all share has one backend, on any.
            "TESTS_DIVIDED": "all" if backend == "torch" else "one",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }

    def _check_used(self):
        """Fails unless programs import the copy, not what is installed."""
        names = ("keras_dist", "keras_dist_jax", "keras_dist_torch")
        code = "import importlib.util as u\n" + "\n".join(
            f"print(u.find_spec({name!r}).origin)" for name in names
        )
        found = subprocess.run(
            [sys.executable, "-c", code],
            cwd="/",
            env=self._environment("torch"),
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        for origin in found.stdout.splitlines():
            if not origin.startswith(str(self.top)):
                raise RuntimeError(
                    f"Tests would import {origin}. Expected: what is in "
                    f"{self.top}. Uninstall keras_dist, or install it with -e."
                )
