"""`strategy.profile` on several workers: each one has a trace of its own."""

from workers import clusters
from workers import profile_jobs


def test_each_worker_has_a_trace(tmp_path):
    seen = clusters.run(
        profile_jobs.fit,
        (str(tmp_path),),
        workers=2,
        devices=1,
        timeout=200,
    )
    assert [each["folder"] for each in seen] == ["worker-0", "worker-1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "worker-0",
        "worker-1",
    ]
    for each in seen:
        assert each["steps"] == [2, 3]
        assert each["with"] == each["without"] == seen[0]["with"]
