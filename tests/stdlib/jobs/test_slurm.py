"""Slurm's jobs, against stand-ins of its commands that answer as the real ones do, on addresses of loopback."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import monarch
from monarch.actor import this_host
from monarch.job import SlurmJob
from monarch.stdlib.jobs import slurm

WAIT = 60.0

# The job's nodes are 127.0.0.2 and so on. The first question for it finds it in the queue; with `stuck` all do.
STANDINS = {
    "sbatch": """
if [ -e refuse ]; then
    echo "sbatch: error: Batch job submission failed: Invalid partition name specified" >&2
    exit 1
fi
cat > script
echo "$@" > asked
touch pending
if [ ! -e stuck ]; then
    nodes=$(sed -n 's/^#SBATCH --nodes=//p' script)
    SLURM_JOB_ID=77 SLURM_JOB_NODELIST="127.0.0.[2-$((nodes + 1))]" setsid bash script > out 2>&1 &
    echo $! > pid
    echo "127.0.0.[2-$((nodes + 1))]" > nodes
fi
echo "77;cluster"
""",
    "squeue": """
if [ -s fails ]; then
    sed -i 1d fails
    echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2
    exit 1
fi
if [ -e pending ]; then
    [ -e stuck ] || rm pending
    echo "PENDING||Priority"
elif [ ! -e cancelled ] && [ -e pid ] && grep -qs '^State:.[^ZX]' "/proc/$(cat pid)/status"; then
    echo "RUNNING|$(cat nodes)|None"
else
    echo "slurm_load_jobs error: Invalid job id specified" >&2
    exit 1
fi
""",
    "scontrol": """
eval "echo $(echo "$3" | sed 's/\\[\\([0-9]*\\)-\\([0-9]*\\)\\]/{\\1..\\2}/')" | tr ' ' '\\n'
""",
    "srun": """
while [ "${1#-}" != "$1" ]; do shift; done
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    SLURMD_NODENAME=$node "$@" &
done
wait
""",
    "scancel": """
echo "$1" >> cancelled
rm -f pending
[ ! -e pid ] || kill -TERM -- "-$(cat pid)"
""",
}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-ins keep what they know."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, text in STANDINS.items():
        (folder / name).write_text(f"#!/bin/bash\ncd {folder}\n{text}")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setattr(slurm, "LOOK_SECONDS", 0.02)
    return folder


def job(tmp_path: Path, **options: object) -> SlurmJob:
    given = {"python_exe": sys.executable, "log_dir": tmp_path / "logs", "monarch_port": 22427, "partition": "gpu"}
    return SlurmJob({"trainers": 1, "loaders": 1}, **given | options)  # type: ignore[arg-type]


def node() -> str | None:
    return os.environ.get("SLURMD_NODENAME")


def test_the_nodes_of_a_job_are_hosts_with_certificates_of_their_own(cluster: Path, tmp_path: Path) -> None:
    mine = job(tmp_path, gpus_per_node=8, slurm_args=["--constraint=h100"])
    try:
        state = mine.state(tmp_path / "state")
        asked = (cluster / "script").read_text()
        for option in ("--nodes=2", "--partition=gpu", "--gpus-per-node=8", "--exclusive", "--constraint=h100"):
            assert f"#SBATCH {option}\n" in asked
        assert (cluster / "asked").read_text() == "--parsable\n"
        assert state.trainers.addresses == ("127.0.0.2:22427",) and state.loaders.addresses == ("127.0.0.3:22427",)
        with state.loaders.spawn_procs().activate():
            assert monarch.remote(node).call().get(WAIT).values() == ["127.0.0.3"]
        (folder,) = (tmp_path / "logs").glob(".monarch-*")
        assert folder.stat().st_mode & 0o777 == 0o700
        assert sorted(path.name for path in folder.iterdir()) == ["127.0.0.2", "127.0.0.3", "ca.pem", "controller"]
        remembered = monarch.job.job_load(tmp_path / "state")
        assert remembered.can_run(job(tmp_path, gpus_per_node=8, slurm_args=["--constraint=h100"]))
        assert not remembered.can_run(job(tmp_path, gpus_per_node=4))
    finally:
        mine.kill()
    assert (cluster / "cancelled").read_text() == "77\n" and not folder.exists()
    assert not remembered.can_run(mine)
    with this_host().spawn_procs().activate():  # the certificates are gone, and no harm is done
        assert monarch.remote(node).call().get(WAIT).item() is None


def test_what_slurm_refuses_is_an_error_and_leaves_nothing(cluster: Path, tmp_path: Path) -> None:
    (cluster / "refuse").touch()
    with pytest.raises(monarch.MonarchError, match="sbatch failed with status 1: .*Invalid partition name"):
        job(tmp_path).state(None)
    assert list((tmp_path / "logs").iterdir()) == []


def test_a_job_that_waits_too_long_is_cancelled(cluster: Path, tmp_path: Path) -> None:
    (cluster / "stuck").touch()
    with pytest.raises(
        monarch.MonarchError, match="Slurm's job 77 did not start within 0.1 s: it is cancelled\n.*PENDING, Priority"
    ):
        job(tmp_path, job_start_timeout=0.1).state(None)
    assert (cluster / "cancelled").read_text() == "77\n"


def test_a_queue_that_does_not_answer_is_asked_again(
    cluster: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while Slurm's controller is restarted: the job goes on meanwhile, and so does the view of it."""
    mine = job(tmp_path)
    (cluster / "fails").write_text("once\ntwice\n")
    try:
        mine.state(None)
        (warning,) = caplog.messages
        assert "Slurm's job 77: squeue failed with status 1: " in warning and "Unable to contact" in warning
        (cluster / "fails").write_text("for good\n" * 1000)
        monkeypatch.setattr(slurm, "QUEUE_SECONDS", 0.1)
        with pytest.raises(monarch.MonarchError, match="Unable to contact slurm controller"):
            mine.can_run(job(tmp_path))
    finally:
        (cluster / "fails").unlink()
        mine.kill()
    assert (cluster / "cancelled").read_text() == "77\n"


def test_a_job_that_has_ended_says_where_it_wrote(cluster: Path, tmp_path: Path) -> None:
    ends = job(tmp_path, python_exe="false")
    with pytest.raises(monarch.MonarchError, match="it is in no queue any more") as raised:
        ends.state(None)
    ends.kill()
    assert "monarch-77.out" in str(raised.value)


def test_without_slurm_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(monarch.MonarchError, match="there is no sbatch here"):
        job(tmp_path).state(None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"slurm_args": "--constraint=h100"}, "give a list of options"),
        ({"slurm_args": ["--comment=a\nhostname"]}, "those have one line"),
        ({"job_name": "a\nhostname"}, "those have one line"),
        ({"monarch_port": 99999}, "give a number from 1 to 65535"),
        ({"job_start_timeout": "5m"}, "give a number of seconds from 0"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(tmp_path: Path, options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        job(tmp_path, **options)


def test_options_may_have_spaces(tmp_path: Path) -> None:
    script = job(tmp_path, job_name="my job", log_dir=tmp_path / "50% of it").script()
    assert "#SBATCH --job-name='my job'\n" in script
    assert f"#SBATCH --output='{tmp_path}/50%% of it/monarch-%j.out'\n" in script
