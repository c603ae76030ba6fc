"""Results of the parts of ``make gpu``, as text on the screen."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from .parts import ALONE, LIMIT, median_of


def print_part(part: str, found: Mapping[str, Any], screen: Console) -> None:
    if part == "tests":
        screen.print(f"tests: {found['summary']}", highlight=False, markup=False)
    elif part == "copies":
        rates = {name.removesuffix("_bytes_per_s"): value / 1e9 for name, value in found.items()}
        shown = ", ".join(f"{name} {rate:.1f} GB/s" for name, rate in rates.items())
        screen.print(f"to the device: {shown}", highlight=False)
    elif part == "decoding":
        print_decoding(found, screen)
    elif part == "interference":
        print_interference(found, screen)
    else:
        print_case(found, screen)


def print_case(case: Mapping[str, Any], screen: Console) -> None:
    table = Table(title=f"{case['model']} on {case['title']}, batch {case['batch_size']}", title_justify="left")
    for head in ("loader", "samples/s", "of no loader", "waits", "step", "first batch"):
        table.add_column(head, justify="left" if head == "loader" else "right")
    limit = median_of(case["runs"][LIMIT], "samples_per_s")
    for loader, runs in case["runs"].items():
        rate = median_of(runs, "samples_per_s")
        waits, step_ms = median_of(runs, "wait_share"), median_of(runs, "step_ms")
        first = f"{median_of(runs, 'first_batch_s'):.2f} s"
        table.add_row(loader, f"{rate:,.0f}", f"{rate / limit:.2f}", f"{waits:.1%}", f"{step_ms:,.1f} ms", first)
    screen.print(table)
    for loader, runs in case["runs"].items():
        if runs[0].get("mfu"):
            tokens = f"{median_of(runs, 'tokens_per_s'):,.0f} tokens/s, " if runs[0]["tokens_per_s"] else ""
            screen.print(f"{loader}: {tokens}MFU {median_of(runs, 'mfu'):.1%}", highlight=False)
    for loader, why in case["refused"].items():
        screen.print(f"not measured: {loader}: {why}", highlight=False, markup=False)


def print_decoding(result: Mapping[str, Any], screen: Console) -> None:
    names = {
        "cpu": "on the CPU",
        "threads": "on the CPU by threads alone",
        "device": "on the device",
        "bare": "by the device's bare codec, whole images",
    }
    for way, name in names.items():
        if way in result:
            rate, cpu = result[way]["images_per_s"], result[way]["cpu_us_per_image"]
            screen.print(f"images decoded {name}: {rate:,.0f}/s, {cpu:,.0f} us of CPU an image", highlight=False)
    if "resize" in result:
        took = result["resize"]
        screen.print(
            f"{took['images']} images cut and resized: {took['chosen']:.2f} ms, by torch's operations "
            f"{took['each']:.2f} ms",
            highlight=False,
        )
    if "refused" in result:
        screen.print(f"not decoded on the device: {result['refused']}", highlight=False, markup=False)


def launch_ratios(found: Mapping[str, Any], way: str) -> list[float]:
    """Divide each round's launches by those of a loop that nothing feeds in the same round."""
    pairs = zip(found["runs"][way], found["runs"][ALONE], strict=False)
    return [one["launches_ms"] / other["launches_ms"] for one, other in pairs]


def print_interference(found: Mapping[str, Any], screen: Console) -> None:
    """Print a table; its ratios are medians of each round's launches over those of a loop that nothing feeds."""
    title = f"{found['batch_size']} images each {1e3 * found['period_s']:.0f} ms"
    table = Table(title=title, title_justify="left")
    for head in ("fed by", "launches", "p90", "to nothing", "wait", "p90"):
        table.add_column(head, justify="left" if head == "fed by" else "right")
    for way, runs in found["runs"].items():
        times = [f"{median_of(runs, name):.2f} ms" for name in ("launches_ms", "launches_p90_ms")]
        ratio = statistics.median(launch_ratios(found, way))
        waits = [f"{median_of(runs, name):.2f} ms" for name in ("wait_ms", "wait_p90_ms")]
        table.add_row(way, *times, f"{ratio:.2f}", *waits)
    screen.print(table)
    for way, why in found["refused"].items():
        screen.print(f"not measured: {way}: {why}", highlight=False, markup=False)
