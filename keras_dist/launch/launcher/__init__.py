"""Starts the workers of a job, watches over them, and ends them.

```
job.py          a job, and starting its workers again when they failed
addresses.py    the address of each worker
environment.py  the environment variables of each worker
gpus.py         each worker's share of this machine's GPUs
group.py        all processes that were started together
member.py       one process of a group, with all that it started
failures.py     the failure that came first, and its report
pipe.py         reads a process' output and passes it on
output.py       the workers' output on the screen and in a report
signals.py      signals to the launcher, passed on
watcher.py      ends the workers of a launcher that was killed; guard.py too
coordinator.py  the backend's service outside of the workers, where it has one
call.py         a worker that calls a function: `keras_dist.launch(fn)`
```

Nothing here imports Keras, so that the launcher stays small: a framework would
take hundreds of megabytes of memory, or memory of a GPU.

A process that leaves its session (a daemon) is out of reach and not ended. On
systems other than Linux, only the watcher ends the workers of a launcher that
was killed with SIGKILL.
"""
