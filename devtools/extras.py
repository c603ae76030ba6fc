"""Install each extra alone beside a torch for CPUs: how long it resolves, whether it keeps torch, what it is for.

    python devtools/extras.py                       every extra: resolve, install, import
    python devtools/extras.py bench ray             these
    python devtools/extras.py --dry-run             resolve only
    python devtools/extras.py --torch torch-2.13.0+cpu-cp311-....whl

It needs nothing but Python. Torch and what penstock needs are installed once; each extra then gets an environment of
its own above them, in which pip sees them as installed, and which is removed again.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 60.0
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# What each extra is for. Empty: it cannot be imported where there is no GPU.
IMPORTS: dict[str, list[str]] = {
    "images": ["simplejpeg", "cv2"],
    "images-cuda": [],
    "webdataset": ["webdataset"],
    "safetensors": ["safetensors"],
    "text": ["tokenizers"],
    "hf": ["huggingface_hub"],
    "encryption": ["cryptography"],
    "metrics": ["prometheus_client", "tensorboard", "pynvml"],
    "wandb": ["wandb"],
    "mlflow": ["mlflow"],
    "bench": ["webdataset", "matplotlib", "PIL"],
    "integrations": ["lightning", "accelerate", "transformers", "torchdata"],
    "ray": ["ray.train"],
    "fuzz": ["hypothesis"],
    "demo": ["sklearn", "cv2", "tokenizers"],
    "test": ["pytest", "xdist", "kubernetes_validate", "yaml", "lightning", "ray", "sklearn"],
    "lint": ["ruff", "mypy"],
    "docs": ["mkdocs", "material", "mkdocstrings_handlers.python"],
}
# A torch for CPUs is kept: nothing else of it comes, and no gigabytes of CUDA's libraries.
_UNASKED = re.compile(r"torch|torchvision|torchaudio|triton|nvidia-(?!ml-py).*|cuda-.*")


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Versions that pip would install for an extra, by name; seconds, and those of the processor, to find them."""

    seconds: float
    cpu_s: float
    versions: dict[str, str]


def flaws_of(resolved: Resolved) -> list[str]:
    """Say what is wrong with it: too slow, or another torch."""
    flaws = [f"took {resolved.seconds:.0f} s, more than {LIMIT_S:.0f}"] if resolved.seconds > LIMIT_S else []
    unasked = [f"{name} {version}" for name, version in resolved.versions.items() if _UNASKED.fullmatch(name)]
    return flaws + ([f"would install {', '.join(unasked)}"] if unasked else [])


def resolved_of(report: dict[str, Any], seconds: float, cpu_s: float = 0.0) -> Resolved:
    """Read the report of ``pip install --dry-run --report``; penstock itself is left out."""
    found = {one["metadata"]["name"].lower().replace("_", "-"): one["metadata"]["version"] for one in report["install"]}
    found.pop("penstock", None)
    return Resolved(seconds=seconds, cpu_s=cpu_s, versions=found)


def make_base(folder: Path, torch: str | None) -> Path:
    """Make the environment with the newest pip, torch and what penstock needs; gives the wheel of penstock."""
    python = _make_venv(folder / "base")
    _pip(python, "install", "--upgrade", "pip")
    _pip(python, "install", *([torch] if torch else ["--index-url", CPU_INDEX, "torch"]))
    _pip(python, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    [wheel] = folder.glob("penstock-*.whl")
    _pip(python, "install", str(wheel))
    return wheel


def check(extra: str, folder: Path, wheel: Path, *, is_dry: bool) -> list[str]:
    """Resolve, install and import one extra; say what is wrong, and print what was found."""
    python = _make_venv(folder / extra, above=folder / "base")
    wanted = f"penstock[{extra}] @ {wheel.as_uri()}"
    report = folder / f"{extra}.json"
    began, cpu_began = time.monotonic(), _cpu_s()
    try:
        _pip(python, "install", "--dry-run", "--report", str(report), wanted)
        took, cpu = time.monotonic() - began, _cpu_s() - cpu_began
        resolved = resolved_of(json.loads(report.read_text()), took, cpu)
        flaws = flaws_of(resolved)
        did = f"resolved in {took:.1f} s ({cpu:.1f} of the processor), {len(resolved.versions)} packages"
        if not is_dry and not flaws:
            _pip(python, "install", wanted)
            for module in IMPORTS[extra]:
                _run([str(python), "-W", "ignore", "-c", f"import penstock, {module}"])
            did += f"; imports {', '.join(IMPORTS[extra]) or 'nothing without a GPU'}"
    except subprocess.CalledProcessError as exc:
        flaws, did = [f"{exc.stderr.strip().splitlines()[-1] if exc.stderr.strip() else exc}"], "failed"
    finally:
        shutil.rmtree(folder / extra)
    print(f"{extra:13} {did}" + "".join(f"\n{'':13} FLAW: {flaw}" for flaw in flaws), flush=True)
    return flaws


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _make_venv(folder: Path, above: Path | None = None) -> Path:
    venv.EnvBuilder(with_pip=above is None, symlinks=True).create(folder)
    if above is not None:
        [shared] = above.glob("lib/python*/site-packages")
        [own] = folder.glob("lib/python*/site-packages")
        own.joinpath("zz-shared.pth").write_text(f"import site; site.addsitedir({str(shared)!r})\n")
    return folder / "bin" / "python"


def _pip(python: Path, *arguments: str) -> None:
    if arguments[0] == "install":
        arguments = ("install", "--no-compile", *arguments[1:])  # what is imported is compiled then
    _run(
        [str(python), "-m", "pip", arguments[0], "--quiet", "--disable-pip-version-check", "--no-input", *arguments[1:]]
    )


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def main() -> int:
    name = "python -m devtools extras" if __spec__ else None
    parser = argparse.ArgumentParser(
        prog=name, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("extras", nargs="*", help="which (all)")
    parser.add_argument("--torch", help=f"requirement or file of a torch for CPUs (default: the newest of {CPU_INDEX})")
    parser.add_argument("--dry-run", action="store_true", help="resolve, and install nothing")
    given = parser.parse_args()
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    if unknown := [extra for extra in given.extras if extra not in known]:
        parser.error(f"there is no extra {', '.join(unknown)}; there are {', '.join(known)}")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        wheel = make_base(folder, given.torch)
        flawed = [extra for extra in given.extras or known if check(extra, folder, wheel, is_dry=given.dry_run)]
    print(
        f"{len(flawed)} of {len(given.extras or known)} extras have flaws"
        + (f": {', '.join(flawed)}" if flawed else "")
    )
    return 1 if flawed else 0


if __name__ == "__main__":
    sys.exit(main())
