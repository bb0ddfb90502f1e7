"""Starts the workers of a job, watches over them, and ends them.

```
job.py          a job, and starting its workers again when they failed
addresses.py    which worker listens where
environment.py  what each worker is told
group.py        all processes that were started together
member.py       one of them, with all that it started
failures.py     which worker failed first, and how
pipe.py         what it writes, passed on
output.py       what the workers write: the screen, log files
signals.py      signals to the launcher, passed on
watcher.py      ends the workers of a launcher that was killed; guard.py too
coordinator.py  the backend's service outside of the workers, where it has one
call.py         a worker that calls a function: `keras_dist.launch(fn)`
```

Nothing here imports Keras, so that the launcher stays small: a framework would
take hundreds of megabytes of memory, or a GPU's.

A process that leaves its session (a daemon) is out of reach and not ended. On
systems other than Linux, a worker whose launcher was killed with SIGKILL is
ended by the watcher alone.
"""

# `keras_dist.errors.RESTART_EXIT_CODE`, without importing Keras.
RESTART_EXIT_CODE = 42
