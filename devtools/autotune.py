"""Tuning from bad settings against the best by hand.

Each run is a process of its own that reads its data set, which is larger than its memory limit, again and again. A
tuned run is compared with the best setting by hand right before and right after it, so that what else the machine does
falls on both.
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Literal

import numpy as np

from penstock.benchmarks.child_arguments import one_of, take_mode
from penstock.benchmarks.machine import describe_machine
from penstock.benchmarks.stores.server import make_bucket, serve_s3
from penstock.loader import DistributedDataLoader, ImageDecoder, TarFormat, TokensFormat, pack
from penstock.loader.limits import usable_cores

from .arguments import OptionalPath, parse_config
from .faults.faults import Delay
from .faults.proxy import FaultProxy

Case = Literal["images", "s3", "tokens"]
CASES: tuple[Case, ...] = ("images", "s3", "tokens")
WORST = {"fetch_threads": 1, "threads": 1, "read_ahead": 1}
_WANTED, _WITHIN_S = 0.9, 30.0
_WARM_S = 3.0  # of a run by hand that do not count
_OVER_S = 3.0  # a rate is a mean over so much time
_BUCKET = "penstock-autotune"
_MEMORY = "256MiB"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Cases and durations of the measurement, and where results and plot go."""

    cases: tuple[Case, ...] = CASES
    rounds: int = 3
    """How often each setting by hand, and tuning, gets its turn."""
    hand_s: float = 10.0
    """Seconds of a run by hand that count."""
    tuned_s: float = 40.0
    """Seconds of a tuned run."""
    delay_s: float = 0.02
    """How late each answer of the S3 server comes."""
    out: OptionalPath = None
    """Write the results here as JSON, and the traces beside it as PNG."""


# -- one run, in a process of its own -----------------------------------------------------------------------------


def open_loader(case: str, url: str, **options: Any) -> DistributedDataLoader[Any]:
    options = {"memory_limit": _MEMORY, "lanes": 4, **options}
    if case == "tokens":
        return DistributedDataLoader(url, batch_size=64, format=TokensFormat(seq_len=2048), **options)
    if case == "images":
        return DistributedDataLoader(url, batch_size=32, decode={"jpg": ImageDecoder(size=(224, 224))}, **options)
    return DistributedDataLoader(url, batch_size=64, decode=None, format=TarFormat(chunk_bytes=1 << 20), **options)


def read(case: str, url: str, seconds: float, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Read, and return the batches handed out and the loader's settings at about four moments a second."""
    trace: list[dict[str, Any]] = []
    with open_loader(case, url, **options) as loader:
        started, samples, noted_s = time.perf_counter(), 0, 0.0
        for batch in chain.from_iterable(repeat(loader)):
            samples += len(next(iter(batch.values())))
            at_s = time.perf_counter() - started
            if at_s - noted_s >= 0.25 or at_s >= seconds:
                seen, noted_s = loader.metrics(), at_s
                names = ("fetch_threads", "decode_threads", "read_ahead_bytes", "tuning")
                trace.append({"at_s": at_s, "samples": samples, **{name: getattr(seen, name) for name in names}})
            if at_s >= seconds:
                return trace
    raise AssertionError("an endless loop has ended")


# -- the data -----------------------------------------------------------------------------------------------------


def _write_images(folder: Path) -> None:
    import simplejpeg

    rng = np.random.default_rng(0)
    pixels = [
        np.kron(rng.integers(0, 255, (48, 64, 3), dtype=np.uint8), np.ones((8, 8, 1), np.uint8)) for _ in range(16)
    ]
    files = [simplejpeg.encode_jpeg(image, quality=90) for image in pixels]
    samples = ({"__key__": f"{i:06d}", "jpg": files[i % len(files)]} for i in range(4000))
    pack(samples, folder, format="tar", shard_bytes=32 << 20, progress=False)


def _write_blobs(folder: str, storage_options: Mapping[str, Any]) -> None:
    rng = np.random.default_rng(0)
    samples = ({"__key__": f"{i:06d}", "jpg": rng.bytes(38_000)} for i in range(8000))
    pack(samples, folder, format="tar", shard_bytes=32 << 20, progress=False, storage_options=dict(storage_options))


def _write_tokens(folder: Path) -> None:
    folder.mkdir(parents=True)
    tokens = np.random.default_rng(0).integers(0, 50_000, 131_072 * 2048, dtype=np.uint16)
    (folder / "tokens.bin").write_bytes(tokens.tobytes())


@contextmanager
def _prepare(case: Case, folder: Path, delay_s: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """(URL, loader's options) of a case's data."""
    if case != "s3":
        (_write_images if case == "images" else _write_tokens)(folder / case)
        yield str(folder / case), {}
        return
    with serve_s3(plain_http=True) as server:
        make_bucket(_BUCKET, server)
        _write_blobs(f"s3://{_BUCKET}/blobs/", server)
        with FaultProxy(server["endpoint"]) as proxy:
            proxy.choose(lambda request: Delay(seconds=delay_s) if request.method == "GET" else None)
            yield f"s3://{_BUCKET}/blobs/", {"storage_options": {**server, "endpoint": proxy.url}}


# -- the comparison -----------------------------------------------------------------------------------------------


def hand_settings(case: Case) -> dict[str, dict[str, int]]:
    """Settings, by name, that an expert on the machine might try."""
    cores = usable_cores()
    if case == "images":
        return {f"{threads} decode": {"threads": threads} for threads in sorted({1, max(1, cores // 2), cores})}
    counts = (4, 16, 64) if case == "s3" else (1, 4, 16)
    return {f"{threads} fetch": {"fetch_threads": threads} for threads in counts}


def _run(case: Case, url: str, seconds: float, options: dict[str, Any]) -> list[dict[str, Any]]:
    command = [
        sys.executable,
        "-m",
        "devtools.autotune",
        "--run",
        case,
        url,
        str(seconds),
        json.dumps(options),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"a run of {case} failed: {done.stderr[-2000:]}")
    trace: list[dict[str, Any]] = json.loads(done.stdout)
    return trace


def rate_after(trace: list[dict[str, Any]], start_s: float, stop_s: float = float("inf")) -> float:
    """Samples/s between two times of a trace; NaN where it does not reach from one to the other."""
    part = [point for point in trace if start_s <= point["at_s"] <= stop_s]
    if len(part) < 2 or part[-1]["at_s"] == part[0]["at_s"]:
        return float("nan")
    return float((part[-1]["samples"] - part[0]["samples"]) / (part[-1]["at_s"] - part[0]["at_s"]))


def reached_s(trace: list[dict[str, Any]], wanted: float) -> float | None:
    """Time when the mean of the next seconds first reached ``wanted``; None if it never did."""
    for point in trace:
        if (
            point["at_s"] + _OVER_S <= trace[-1]["at_s"]
            and rate_after(trace, point["at_s"], point["at_s"] + _OVER_S) >= wanted
        ):
            return float(point["at_s"])
    return None


def compare(case: Case, url: str, reading: dict[str, Any], config: Config) -> dict[str, Any]:
    """All rounds of a case."""

    def by_hand(settings: Mapping[str, Any]) -> float:
        return rate_after(_run(case, url, _WARM_S + config.hand_s, {**reading, **settings, "autotune": False}), _WARM_S)

    tried: dict[str, list[float]] = {name: [] for name in hand_settings(case)}
    rounds: list[dict[str, Any]] = []
    for _ in range(config.rounds):
        for name, settings in hand_settings(case).items():
            tried[name].append(by_hand(settings))
        best = max(tried, key=lambda name: statistics.median(tried[name]))
        before = by_hand(hand_settings(case)[best])
        trace = _run(case, url, config.tuned_s, {**reading, **WORST, "autotune": True})
        after = by_hand(hand_settings(case)[best])
        wanted = (before + after) / 2
        rounds.append(
            {
                "best": best,
                "best_samples_per_s": [before, after],
                "worst_of_best": by_hand(WORST) / wanted,
                "reached_s": reached_s(trace, _WANTED * wanted),
                "last_10_s_of_best": rate_after(trace, trace[-1]["at_s"] - 10) / wanted,
                "last": {k: v for k, v in trace[-1].items() if k not in ("at_s", "samples")},
                "trace": trace,
            }
        )
    return {"by_hand": tried, "rounds": rounds}


def _tell(case: str, found: dict[str, Any]) -> None:
    medians = {name: round(statistics.median(rates)) for name, rates in found["by_hand"].items()}
    print(f"\n{case}: samples/s by hand {medians}")
    for one in found["rounds"]:
        before, after = one["best_samples_per_s"]
        when = "never" if one["reached_s"] is None else f"after {one['reached_s']:.1f} s"
        worst = f"the worst, kept: {one['worst_of_best']:.2f}"
        print(f"  {one['best']}: {before:,.0f} and {after:,.0f}/s before and after; {worst}")
        print(f"  tuned from the worst: {_WANTED} of that {when}; in the last 10 s {one['last_10_s_of_best']:.2f}")
        settings: tuple[int, ...] = ()
        for point in one["trace"]:
            now = (point["fetch_threads"], point["decode_threads"], point["read_ahead_bytes"])
            if now != settings:
                rate = rate_after(one["trace"], point["at_s"] - 1, point["at_s"] + 1)
                held = f"{now[0]:>3} fetch {now[1]:>2} decode {now[2] / 2**20:>6.1f} MiB"
                print(f"    {point['at_s']:5.1f} s {rate:>9,.0f}/s {held}  {point['tuning']}", flush=True)
            settings = now


def plot(results: Mapping[str, Any], path: Path) -> None:
    """A panel a case: samples/s over time of each tuned run, and the best by hand; below, the settings."""
    from penstock.benchmarks.harness.plot import new_figure, note

    cases = results["cases"]
    figure, rows = new_figure(4.2 * len(cases), 5.2, 2, len(cases), sharex=True, height_ratios=(2, 1))
    for column, (case, found) in enumerate(cases.items()):
        rate, threads = rows[0][column], rows[1][column]
        for number, one in enumerate(found["rounds"]):
            trace, wanted = one["trace"], sum(one["best_samples_per_s"]) / 2
            at = [point["at_s"] for point in trace if 1 <= point["at_s"] <= trace[-1]["at_s"] - 1]
            shares = [rate_after(trace, moment - 1, moment + 1) / wanted for moment in at]
            rate.plot(at, shares, color="#0b6e8a", alpha=0.5, lw=1.4, label=None if number else "tuned from the worst")
            at = [point["at_s"] for point in trace]
            for name, colour in (("fetch_threads", "#b56576"), ("decode_threads", "#e0a458")):
                style = {"drawstyle": "steps-post", "lw": 1.3, "alpha": 0.6, "color": colour}
                label = None if number else name.replace("_", " ")
                threads.plot(at, [point[name] for point in trace], label=label, **style)
        worst = statistics.median(one["worst_of_best"] for one in found["rounds"])
        rate.axhline(1, color="#333333", lw=1, label="best by hand, before and after")
        rate.axhline(_WANTED, color="#333333", lw=0.8, ls=":", label=f"{_WANTED} of it")
        rate.axhline(worst, color="#999999", lw=0.8, ls="--", label="the worst, kept")
        rate.set(title=case, ylim=(0, None), ylabel=None if column else "samples/s, of the best by hand")
        threads.set(xlabel="seconds", ylim=(0, None), ylabel=None if column else "threads")
    lines = [*rows[0][0].get_lines()[:1], *rows[0][0].get_lines()[-3:], *rows[1][0].get_lines()[:2]]
    figure.legend(handles=lines, fontsize=7, ncols=len(lines), loc="outside upper center")
    machine = results["machine"]
    note(figure, f"{machine['cores']} cores, load {machine['load_1m']:.0f}; means over 2 s")
    figure.savefig(path, dpi=150)


def _read_options(text: str) -> dict[str, Any]:
    return {**json.loads(text)}


def main() -> None:
    run = take_mode("--run", (one_of(CASES), str, float, _read_options), "python -m devtools autotune")
    if run is not None:
        print(json.dumps(read(*run)))
        return
    config = parse_config(Config, __doc__)
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in config.cases:
            with _prepare(case, Path(folder), config.delay_s) as (url, reading):
                cases[case] = compare(case, url, reading, config)
            _tell(case, cases[case])
    given = {name: value for name, value in asdict(config).items() if name != "out"}
    command = shlex.join(["python", "-m", "devtools.autotune", *sys.argv[1:]])
    results = {"command": command, "machine": describe_machine(), "config": given, "cases": cases}
    if config.out is not None:
        plot(results, config.out.with_suffix(".png"))
        for one in (one for found in cases.values() for one in found["rounds"]):
            del one["trace"]  # it is in the plot
        config.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
