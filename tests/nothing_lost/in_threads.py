"""Runs jobs in threads at the same time."""

import threading


def in_threads(*jobs):
    """What each job returned; the first exception of any is raised."""
    results, errors = [None] * len(jobs), []

    def run(index, job):
        try:
            results[index] = job()
        except Exception as error:
            errors.append(error)

    # Daemons, or what waits for ever here would at the end of all tests too.
    threads = [
        threading.Thread(target=run, args=pair, daemon=True)
        for pair in enumerate(jobs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    return results
