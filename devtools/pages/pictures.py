"""Pictures of the documentation, of a real run: the terminal as SVG, pages by a headless Chromium."""

from __future__ import annotations

import functools
import http.server
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .faces import ROOT

LIMIT = 150_000  # bytes of a picture
_WIDTH = 132  # columns of the terminal
_LOOKS = 25  # views of the run, one a second, before the one that is drawn
_DESKTOP, _PHONE = (1280, 900), (390, 844)


def draw_pictures(folder: Path) -> None:
    """Train the shipped recipe on two ranks and draw `penstock top` and the report of that run.

    Raises:
        RuntimeError: the run ended before it was drawn, there is no Chromium, or a picture is too large.
    """
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        run = Path(place, "runs", "digits")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        options = [f"--trainer.output_dir={run}", "--trainer.epochs=40", "--trainer.checkpoint.every_steps=100"]
        command = [*launcher, "-m", "penstock.trainer", "digits", *options]
        trained = subprocess.Popen(command, cwd=place, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            top = draw_top(run, trained)
            if trained.wait() != 0:
                raise RuntimeError(f"the run that was to be drawn failed with {trained.returncode}")
        finally:
            trained.kill()
            trained.wait()
        (folder / "top.svg").write_text(top)
        page = Path(place, "report.html")
        subprocess.run([sys.executable, "-m", "penstock.cli", "report", run, "--output", page], check=True)
        for name, is_dark in (("report", False), ("report-dark", True)):
            photograph(page.as_uri(), folder / f"{name}.png", (1180, 980), is_dark=is_dark)
    for path in sorted(folder.iterdir()):
        if path.stat().st_size > LIMIT:
            raise RuntimeError(f"{path} has {path.stat().st_size:,} bytes, more than {LIMIT:,}")
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


def draw_top(run: Path, trained: subprocess.Popen[bytes]) -> str:
    """The view of `penstock top` of a run that trains, as SVG."""
    from penstock.cli.screen import Screen
    from penstock.cli.top import Looker

    while not (run / "metrics.jsonl").exists():
        if trained.poll() is not None:
            raise RuntimeError("the run ended before it began to train")
        time.sleep(0.2)
    looker = Looker(run)
    for _ in range(_LOOKS):
        view = looker.look()
        time.sleep(1)
    if view.state:
        raise RuntimeError(f"no rank trains any more: {view.state}")
    screen = Screen(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for part in view.render(_WIDTH):
        screen.print(part)
    drawn = screen.export_svg(title="penstock top runs/digits", unique_id="top").replace(str(run), "runs/digits")
    # Fonts of other hosts are not fetched.
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    return drawn.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace")


def take_shots(folder: Path, pages: list[str]) -> None:
    """Photograph pages of build/site: `start/`, `reference/loader/`, ..., each as four pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    with served(ROOT / "build" / "site") as url:
        for page in pages:
            name = page.strip("/").replace("/", "-") or "index"
            for kind, size in (("desktop", _DESKTOP), ("phone", _PHONE)):
                for colours, is_dark in (("light", False), ("dark", True)):
                    photograph(f"{url}/{page}", folder / f"{name}-{kind}-{colours}.png", size, is_dark=is_dark)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder to this machine for as long as the block runs; gives its URL."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def photograph(url: str, path: Path, size: tuple[int, int], *, is_dark: bool) -> None:
    """Write a PNG of the top of a page, in a window of ``size`` CSS pixels.

    Raises:
        RuntimeError: there is no Chromium, or it makes no picture.
    """
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        raise RuntimeError("there is no Chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory() as profile:
        arguments = [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}",
            f"--window-size={size[0]},{size[1]}", f"--screenshot={path}", "--virtual-time-budget=4000",
            f"--blink-settings=preferredColorScheme={0 if is_dark else 1}", url,
        ]  # fmt: skip
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    if not path.exists():
        raise RuntimeError(f"{browser} made no picture of {url}: {done.stderr[-500:]}")
    shrink(path)


def shrink(path: Path) -> None:
    """Keep 128 colours of a PNG, which is enough for pages of text and lines."""
    from PIL import Image

    with Image.open(path) as image:
        image.convert("RGB").quantize(128).save(path, optimize=True)
