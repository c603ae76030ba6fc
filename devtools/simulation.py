"""The simulation of `penstock plan --simulate` beside real runs on 1, 2 and 4 ranks: samples/s and waits.

python -m devtools simulation [--results benchmarks/results]

Real processes read shards from a real S3 server through a proxy that delays each answer; a step is a sleep, after
which all ranks meet. The simulation is given the mean seconds that a request and a step took the ranks; what comes of
them (threads, spans, memory, meeting) is its own. Runs are bounded by latency or by sleeps. Fails if samples/s differ
by more than 15%, or the share of its time that the job loses to data by more than 0.15 of the whole. How much of that
the ranks wait for their own data, not for others', is printed too.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from penstock.benchmarks.harness.subprocesses import MeasurementError
from penstock.benchmarks.machine import describe_machine, list_versions
from penstock.benchmarks.stores.server import make_bucket, serve_s3
from penstock.loader import Manifest, open_manifest, pack
from penstock.loader.order.plan import EpochPlan, choose_order
from penstock.storage import open_store
from penstock.tools.simulation.chunk_stream import ListedChunks
from penstock.tools.simulation.settings import Machines
from penstock.tools.simulation.simulate import Simulation, simulate

from .arguments import make_parser
from .faults.faults import Delay
from .faults.proxy import FaultProxy

TOLERANCE = 0.15
_SHARDS, _SAMPLES, _SAMPLE_BYTES = 1024, 16, 16_384  # each shard is one chunk
_BUCKET = "penstock-simulation"
_TIMEOUT_S = 240.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A job: seconds added to each request and of a step, a rank's batch, its memory limit; steps."""

    name: str
    delay_s: float
    step_s: float
    batch_size: int = 64
    memory_limit: int = 512 << 20
    steps: int = 45


CASES = (
    Case(name="step", delay_s=0.2, step_s=0.25),
    Case(name="latency", delay_s=0.4, step_s=0.02),
    Case(name="little memory", delay_s=0.4, step_s=0.15, memory_limit=48 << 20),
)


@dataclass(frozen=True, slots=True)
class Scene:
    """A data set on a server, and the proxy before it."""

    url: str
    options: dict[str, str]
    proxy: FaultProxy
    manifest: Manifest


@contextmanager
def set_scene() -> Iterator[Scene]:
    """Data on a real S3 server, behind a proxy that can delay."""
    with (
        serve_s3(plain_http=True) as server,
        tempfile.TemporaryDirectory() as folder,
        FaultProxy(server["endpoint"]) as proxy,
    ):
        make_bucket(_BUCKET, server)
        rng = np.random.default_rng(0)
        rows = ({"bin": rng.bytes(_SAMPLE_BYTES)} for _ in range(_SHARDS * _SAMPLES))
        pack(rows, folder, shard_bytes=_SAMPLES * (_SAMPLE_BYTES + 512), progress=False)
        url = f"s3://{_BUCKET}/data/"
        with closing(open_store(url, storage_options=server | {"allow_http": "true"})) as store:
            for path in sorted(Path(folder).iterdir()):
                store.put(path.name, path.read_bytes())
        options = server | {"endpoint": proxy.url, "allow_http": "true"}
        yield Scene(url, options, proxy, open_manifest(url, storage_options=options, progress=False))


def run_real(scene: Scene, case: Case, ranks: int, *, steps: int, warm_up_steps: int) -> dict[str, float]:
    """Real processes: samples/s and share of waits after the warm-up, and the first batch.

    Raises:
        MeasurementError: a rank failed, or all took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = asdict(case) | {"steps": steps, "url": scene.url, "options": scene.options, "folder": folder}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        environment = os.environ | {"PENSTOCK_SIMULATED": json.dumps(job), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, "-m", "devtools.simulation_rank"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
        if done.returncode:
            raise MeasurementError(f"{case.name}, {ranks} ranks: {done.stderr[-1500:]}")
        reports = [json.loads(Path(folder, f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    took = np.array([each["took"][warm_up_steps:] for each in reports])
    waits = np.array([each["waits"][warm_up_steps:] for each in reports])
    # Of the rank whose data came last: others spend a part of it on waiting for that one.
    steps_s = (took - waits).min(axis=0)
    return {
        "latency_s": sum(each["fetch_s"] for each in reports) / sum(each["fetches"] for each in reports),
        "step_s": float(steps_s.mean()),
        "lost_to_data": 1.0 - float(steps_s.sum() / took.mean(axis=0).sum()),
        "samples_per_s": case.batch_size * ranks * took.shape[1] / float(took.sum(axis=1).mean()),
        "data_wait": float(waits.sum() / took.sum()),
        "first_batch_s": max(each["first_batch_s"] for each in reports),
    }


def run_simulated(scene: Scene, case: Case, ranks: int, *, latency_s: float, step_s: float) -> Simulation:
    """The same job, simulated."""
    manifest = scene.manifest
    order = choose_order(
        seed=0,
        shuffle=True,
        lanes="auto",
        window="auto",
        piece="auto",
        world_size=ranks,
        chunk_samples=manifest.samples,
        chunk_memory=manifest.memory,
    )
    return simulate(
        ListedChunks(EpochPlan(manifest.samples, order, 0), manifest.lengths, manifest.memory),
        order,
        Machines(
            latency_s=latency_s,
            latency_spread=0.02,
            step_s=step_s,
            step_spread=0.01,
            ranks_per_node=ranks,
            memory_limit=case.memory_limit,
        ),
        world_size=ranks,
        global_batch_size=case.batch_size * ranks,
        steps=case.steps,
    )


def compare(scene: Scene, case: Case, ranks: int) -> dict[str, Any]:
    """One row: what was measured, what was simulated, and how far they are apart."""
    scene.proxy.choose(lambda request: Delay(seconds=case.delay_s) if request.method == "GET" else None)
    drawn_up = run_simulated(scene, case, ranks, latency_s=case.delay_s, step_s=case.step_s)
    real = run_real(scene, case, ranks, steps=drawn_up.steps, warm_up_steps=drawn_up.warm_up_steps)
    # A request, a sleep and the ranks' meeting take longer on a busy machine: these are inputs.
    latency_s, step_s = real.pop("latency_s"), real.pop("step_s")
    simulated = run_simulated(scene, case, ranks, latency_s=latency_s, step_s=step_s)
    return {
        "case": case.name,
        "ranks": ranks,
        "delay_s": case.delay_s,
        "step_s": case.step_s,
        "measured_step_s": step_s,
        "measured_latency_s": latency_s,
        "load_1m": os.getloadavg()[0],
        "real": real,
        "simulated": {name: getattr(simulated, name) for name in real},
        "samples_per_s_ratio": simulated.samples_per_s / real["samples_per_s"],
        "lost_to_data_difference": simulated.lost_to_data - real["lost_to_data"],
        "data_wait_difference": simulated.data_wait - real["data_wait"],
    }


def is_near(row: dict[str, Any], tolerance: float = TOLERANCE) -> bool:
    """By samples/s, and by the share of its time that the job loses to waits for data."""
    return bool(abs(row["samples_per_s_ratio"] - 1) <= tolerance and abs(row["lost_to_data_difference"]) <= tolerance)


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks")
    parser.add_argument("--results", help="a folder for simulation.json")
    given = parser.parse_args(arguments)
    rows = []
    print(
        f"{'case':18}{'ranks':>6}{'samples/s':>11}{'simulated':>11}{'ratio':>7}{'lost':>7}{'simulated':>10}{'wait':>7}{'simulated':>10}"
    )
    with set_scene() as scene:
        for case in CASES:
            for ranks in given.ranks:
                row = compare(scene, case, ranks)
                rows.append(row)
                real, simulated = row["real"], row["simulated"]
                print(
                    f"{case.name:18}{ranks:6}{real['samples_per_s']:11,.0f}{simulated['samples_per_s']:11,.0f}"
                    f"{row['samples_per_s_ratio']:7.2f}{real['lost_to_data']:7.1%}{simulated['lost_to_data']:10.1%}"
                    f"{real['data_wait']:7.1%}{simulated['data_wait']:10.1%}"
                    f"{'' if is_near(row) else '  TOO FAR'}",
                    flush=True,
                )
    if given.results:
        about = {
            "command": shlex.join(["python", "-m", "devtools.simulation", *arguments]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": describe_machine(),
            "versions": list_versions(),
            "tolerance": TOLERANCE,
        }
        Path(given.results, "simulation.json").write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    return int(not all(map(is_near, rows)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
