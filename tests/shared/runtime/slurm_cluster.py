"""A real single-node Slurm on loopback, for tests that need srun, sbatch and scancel."""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

START_LIMIT_S = 30

# No munge, cgroups, accounting or affinity: a bare container has none of them. NodeName is
# localhost so that what a job resolves from SLURM_STEP_NODELIST is loopback, whatever the
# machine is called. config_overrides lets `cpus` exceed the cores there are. A requeued job
# waits cred_expire + 1 s before it starts again (121 s by default).
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire={cred_expire}
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait={kill_wait}
StateSaveLocation={folder}/state
SlurmdSpoolDir={spool}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@contextlib.contextmanager
def single_node(folder: Path, cpus: int = 2, kill_wait: int = 30, cred_expire: int = 5) -> Generator[dict[str, str]]:
    """Run Slurm with its state and logs in `folder`; yields the environment its commands need.

    `folder` must have no blank in its path: slurm.conf can't quote one.
    """
    folder = folder.resolve()
    (folder / "state").mkdir(parents=True, exist_ok=True)
    # slurmstepd's Unix sockets lie in the spool: under a folder of more than about 70
    # characters their names are too long, and each job fails or hangs.
    spool = tempfile.mkdtemp(prefix="slurmd-")
    ctld_port, slurmd_port = _free_ports(2)
    conf = folder / "slurm.conf"
    settings = CONF.format(
        host=socket.gethostname().split(".")[0],
        user=getpass.getuser(),
        folder=folder,
        spool=spool,
        ctld_port=ctld_port,
        slurmd_port=slurmd_port,
        cpus=cpus,
        kill_wait=kill_wait,
        cred_expire=cred_expire,
    )
    conf.write_text(settings)
    # A SLURM_* or SBATCH_* variable of an outer job would become an option of the inner one.
    outer = ("SLURM", "SBATCH_", "SRUN_", "SALLOC_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(outer)}
    env["SLURM_CONF"] = str(conf)
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        with (folder / "daemons.out").open("wb") as out:
            for daemon in ("slurmctld", "slurmd"):
                # They die with this process even if it is killed and gets no chance to stop them.
                command = ["setpriv", "--pdeathsig", "KILL", daemon, "-D", "-c"]
                daemons.append(subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True))
        _wait_until_idle(env, daemons, folder / "daemons.out")
        yield env
    finally:
        for process in daemons:
            process.kill()
            process.wait()
        _kill_all_with(f"SLURM_CONF={conf}")
        shutil.rmtree(spool)


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all held at once so that they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


def _wait_until_idle(env: dict[str, str], daemons: list[subprocess.Popen[bytes]], output: Path) -> None:
    """Return once sinfo calls the node idle; TimeoutError or RuntimeError with the log if not."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if any(daemon.poll() is not None for daemon in daemons):
            raise RuntimeError(f"a Slurm daemon exited:\n{output.read_text()}")
        with contextlib.suppress(subprocess.TimeoutExpired):
            sinfo = ["sinfo", "--noheader", "--format=%T"]
            state = subprocess.run(sinfo, env=env, capture_output=True, text=True, timeout=5)
            if state.stdout.strip() == "idle":
                return
        time.sleep(0.1)
    raise TimeoutError(f"no idle node after {START_LIMIT_S} s:\n{output.read_text()}")


def _kill_all_with(variable: str) -> None:
    """Kill every other process started with this environment variable, until none is left."""
    # slurmstepd and the jobs leave slurmd's session and outlive it: only the environment that
    # they inherited tells whose they are.
    while True:
        found = False
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
                if int(entry.name) != os.getpid() and variable.encode() in (
                    (entry / "environ").read_bytes().split(b"\0")
                ):
                    os.kill(int(entry.name), signal.SIGKILL)
                    found = True
        if not found:
            return
        time.sleep(0.05)
